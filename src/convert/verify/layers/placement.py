"""Compare names: the values of a leaf called ``layers_3/key/w`` belong in the tensor that its rule calls ``layers.3.k_proj``."""

from __future__ import annotations

import math
from collections.abc import Mapping

from convert.core.findings import Finding
from convert.core.ops import Slice, Take
from convert.core.path_pattern import Match, Pattern
from convert.layers import Rule
from convert.layers.base import Part, Step
from convert.layers.leaf_sums import sums_of
from convert.layers.low_rank import PLUS_FIRST, PLUS_SECOND, SECOND
from convert.planning.adapters.names import find_pairs
from convert.planning.low_rank_source import Merge
from convert.planning.merged_leaf import Complex, MergedLeaf, Sum
from convert.planning.plan import Plan
from convert.rules.file import further_names


def misplaced(plan: Plan, rule: Rule, step: Step, part: Part) -> Finding | None:
    """Return a finding where the names say that the values of a leaf belong in another tensor, or in other rows.

    This goes the other way than the plan: from the name of the leaf, the elements of the stacked axes and the order of the rows
    to the name of the tensor.
    """

    def finding(problem: str, expected: str, got: str) -> Finding:
        fix = "correct the indices and the alternatives in the paths of the rule"
        return Finding("layer-misplaced", problem, rule.at.line_only, step.name, expected, got, fix)

    layer = rule.layer(plan.target)
    pattern = rule.sources.get(step.role, rule.path)  # the lengths of a weight's rows have no leaf of their own
    merge = plan.merges.get(part.leaf)
    match = _match(pattern, plan.root, part.leaf if merge is None else merge.leaves[0])
    if layer is None or match is None:
        return finding("it takes a leaf that the rule does not name", pattern.text, part.leaf)
    if merge is not None and (stranger := _leaf_of_another_layer(plan, step.role, rule, merge, match)):
        whats = {Merge: "low-rank pair", Sum: "sum", Complex: "complex number"}
        what = next((word for of, word in whats.items() if isinstance(merge, of)), "matrix")
        return finding(f"the leaves of a {what} belong to different layers", f"leaves of {part.leaf}", stranger)
    axes = [name for name, _ in sorted(rule.stacked.items(), key=lambda item: -item[1])]
    split = len(layer.path.groups) > len(pattern.groups)
    axes += part.taken
    elements = [op.index for op in part.ops[: part.opening] if isinstance(op, Take)]
    if len(elements) < len(axes):
        return finding("it takes no element of a stacked axis", f"one element of each of {len(axes)} axes", part.leaf)
    named = dict(zip(axes, elements, strict=False))
    indices = {**dict(match.indices), **named}
    if shared := [axis for axis in rule.split_axes(layer) if axis not in indices]:  # a bias that all modules have
        found = _match(layer.path, "", step.name.rpartition(".")[0])
        indices |= {axis: value for axis, value in (found.indices if found else ()) if axis in shared}
    choices, place = match.choices, _place(step, part)
    if split:
        choices = (*choices, _part_of(rule, part, plan.sizes) if part.ops and not part.taken else elements[-1])
    if layer.piece is not None:
        number, count = layer.piece
        around = [axis for axis in part.taken if axis not in rule.split_axes(layer)]
        element = 0
        for axis in around:
            element = element * plan.sizes[axis] + named[axis]
        if place != element * count + number:
            at = ", ".join(f"{axis}={named[axis]}" for axis in around)
            right = f"part {number + 1} of {count} of {at}, the rows in place {element * count + number + 1}"
            return finding(f"{part.leaf} is in rows of another part", right, f"place {place + 1}, rows {part.rows}")
        place = number
    if not split and len(layer.path.groups) < len(pattern.groups):
        if place != choices[-1]:
            wanted = pattern.fill(dict(match.indices), (*choices[:-1], place))
            return finding(f"rows {part.rows} hold the values of another leaf", wanted, part.leaf)
        choices = choices[:-1]
    if layer.part and place != layer.part[0] - 1:
        right = f"part {layer.part[0]} of {layer.part[1]}"
        return finding(f"{part.leaf} is in rows of another part", right, f"part {place + 1}, rows {part.rows}")
    numbers = rule.resolve(indices)
    names = [rule.kind.tensor_name(layer.path.fill(numbers, choices), step.role, layer)]
    if step.tied:
        tied = [other.tensor.fill(numbers, choices) for other in layer.tied if other.kind_name == step.kind_name]
        again = [
            other for name in (*names, *tied) for other in further_names(name, plan.rules.targets[plan.target].shared)
        ]
        if step.tied == names[0] and step.name in (*tied, *again):
            return None
        names += tied
    if names == [step.name]:
        return None
    leaf = part.leaf + _elements({axis: k for axis, k in named.items() if axis in rule.stacked})
    return finding("it takes the values of another tensor", step.name, f"{leaf}, which belongs to {' or '.join(names)}")


def _part_of(rule: Rule, part: Part, sizes: Mapping[str, int]) -> int:
    """Return which of the parts of an axis that is a sum a tensor has, by its first element; -1: none."""
    first = next((op.start for op in part.ops[: part.opening] if isinstance(op, Slice)), -1)
    variants = rule.kind.variants or (None,)
    group = next(of for variant in variants for of in rule.kind.axis_groups(variant).values() if of.chosen is not None)
    lengths = [math.prod(sizes[letter] for letter in letters) for letters in group.parts]
    return next((k for k in range(len(lengths)) if sum(lengths[:k]) == first), -1)


def _place(step: Step, part: Part) -> int:
    """Return the place of a part among the rows of its tensor, counted from 0."""
    return sorted(p.rows or (0, 0) for p in step.parts).index(part.rows or (0, 0))


def _elements(elements: Mapping[str, int]) -> str:
    return f" at {', '.join(f'{name}={index}' for name, index in elements.items())}" if elements else ""


def _leaf_of_another_layer(plan: Plan, role: str, rule: Rule, merge: MergedLeaf, match: Match) -> str:
    """Return a leaf of a low-rank pair, or of a sum, whose name has other indices than the first; empty where there is none."""
    if merge.adapter and isinstance(merge, Merge):  # the names of the pair say which weight it belongs to
        pair = find_pairs([merge.first, merge.second, merge.base or ""]).get(merge.base or "")
        return "" if pair is not None and (pair.first, pair.second) == (merge.first, merge.second) else merge.first
    declared = next(  # a rule stands there once for each path of the tree
        other.sources
        for other in plan.rules.rules
        if other.at == rule.at and any(_match(path, plan.root, merge.leaves[0]) for path in other.sources.values())
    )
    if not isinstance(merge, Merge):
        roles = dict(zip(sums_of([*declared])[role], merge.leaves, strict=True))
    else:
        added = PLUS_FIRST in declared
        roles = {PLUS_FIRST: merge.first, PLUS_SECOND: merge.second} if added else {SECOND: merge.second}
    strangers = (
        leaf
        for role, leaf in roles.items()
        if (other := _match(declared[role], plan.root, leaf)) is None
        or (dict(other.indices), other.choices) != (dict(match.indices), match.choices)
    )
    return next(strangers, "")


def _match(pattern: Pattern, root: str, leaf: str) -> Match | None:
    """Match the name of a leaf: below the root or from the top, with and without the ``value`` of flax nnx."""
    inside = leaf.removeprefix(f"{root}/" if root else "")
    spellings = (inside, inside.removesuffix("/value"), f"/{leaf}", f"/{leaf}".removesuffix("/value"))
    return next((match for text in spellings if (match := pattern.match(text)) is not None), None)
