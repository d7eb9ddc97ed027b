"""What names alone tell: a leaf called ``layers_3/key/w`` belongs into the tensor that its rule calls ``layers.3.k_proj``."""

from __future__ import annotations

from convert.core.ops import Take
from convert.core.path_pattern import Match, Pattern
from convert.layers import Rule
from convert.layers.base import Part, Step
from convert.layers.low_rank import PLUS_FIRST, PLUS_SECOND, SECOND
from convert.planning.low_rank_source import Merge
from convert.planning.plan import Plan


def misplaced(plan: Plan, rule: Rule, step: Step, part: Part) -> str:
    """What is wrong with the place of a leaf's values, by the names of both and the elements taken; empty when nothing is.

    Goes the other way than the plan: from the leaf's name, the element of each stacked axis and the order of the rows to
    the name of the tensor.
    """
    layer = rule.layer(plan.target)
    pattern = rule.sources[step.role]
    merge = plan.merges.get(part.leaf)
    found = _bound(pattern, plan.root, part.leaf if merge is None else merge.base or merge.first)
    if layer is None or found is None:
        return f"{part.leaf} is no leaf of this rule"
    if merge is not None and (stranger := _unpaired(plan, rule, merge, found)):
        return f"{part.leaf}: {stranger} belongs to another layer"
    axes = sorted(rule.stacked.items(), key=lambda item: -item[1])
    split = len(layer.path.groups) > len(pattern.groups)
    takes = part.ops[: len(axes) + split]
    if len(takes) < len(axes) + split or not all(isinstance(op, Take) for op in takes):
        return f"no element is taken of the stacked axes of {part.leaf}"
    elements = [op.index for op in takes if isinstance(op, Take)]
    indices = {**dict(found.indices), **{index: k for (index, _), k in zip(axes, elements, strict=False)}}
    choices = found.choices
    if split:
        choices = (*choices, elements[-1])
    elif len(layer.path.groups) < len(pattern.groups):
        rank = sorted(p.rows or (0, 0) for p in step.parts).index(part.rows or (0, 0))
        if rank != choices[-1]:
            wanted = pattern.fill(dict(found.indices), (*choices[:-1], rank))
            return f"rows {part.rows} are those of {wanted}, and take the values of {part.leaf}"
        choices = choices[:-1]
    if layer.part and sorted(p.rows or (0, 0) for p in step.parts).index(part.rows or (0, 0)) != layer.part[0] - 1:
        return f"rows {part.rows} are not those of part {layer.part[0]} of {layer.part[1]}, and take the values of {part.leaf}"
    numbers = rule.resolve(indices)
    name = rule.kind.tensor_name(layer.path.fill(numbers, choices), step.role, layer)
    if step.tied:
        others = [tied.tensor.fill(numbers, choices) for tied in layer.tied if tied.word == step.word]
        if step.tied == name and step.name in others:
            return ""
        name = " or ".join((name, *others))
    if name == step.name:
        return ""
    taken = ", ".join(f"{index}={k}" for (index, _), k in zip(axes, elements, strict=False))
    return f"{part.leaf}{f' at {taken}' if taken else ''} belongs to {name}"


def _unpaired(plan: Plan, rule: Rule, merge: Merge, found: Match) -> str:
    """A leaf of a pair that the rule's own paths do not lead to from where the weight is; empty when all is well."""
    declared = next(other for other in plan.rules.rules if other.at == rule.at).sources
    roles = {PLUS_FIRST: merge.first, PLUS_SECOND: merge.second} if PLUS_FIRST in declared else {SECOND: merge.second}
    strangers = (
        leaf
        for role, leaf in roles.items()
        if (other := _bound(declared[role], plan.root, leaf)) is None
        or (dict(other.indices), other.choices) != (dict(found.indices), found.choices)
    )
    return next(strangers, "")


def _bound(pattern: Pattern, root: str, leaf: str) -> Match | None:
    """How the rule's pattern reads a leaf's name: below the root or from the top, with and without flax nnx's ``value``."""
    inside = leaf.removeprefix(f"{root}/" if root else "")
    spellings = (inside, inside.removesuffix("/value"), f"/{leaf}", f"/{leaf}".removesuffix("/value"))
    return next((match for text in spellings if (match := pattern.match(text)) is not None), None)
