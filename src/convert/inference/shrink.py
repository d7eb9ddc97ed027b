"""A shipped family at other sizes than its checkpoint's: its rules have letters for the sizes, so that one run stands for all.

Sizes that are equal in one run cannot be told apart there. The written file is confirmed at other ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.checkpoints.source import Source
from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.inference.draws import Draws, Shapes
from convert.inference.grading.proof import error_of
from convert.inference.pair import Pair, shipped_match
from convert.inference.rule_file.drawn import DrawnLeaves
from convert.loading.step_values import read_step
from convert.planning.compile.named_leaf import NamedLeaf, read_leaf
from convert.planning.constraints import Constraint, bind
from convert.planning.planner import make_plan
from convert.planning.rule_match import RuleMatch
from convert.references.user_reference import require_inputs
from convert.rules.parse import parse_rules

FORM = "NAME=SIZE,OTHER, such as D=32,48"


@dataclass(frozen=True)
class Shrink:
    """What `--shrink` says.

    Attributes:
        first: sizes to derive with, by letter of the rules or name of a setting.
        second: sizes to confirm the written file with.
    """

    first: Mapping[str, int]
    second: Mapping[str, int]


def parse_shrink(given: Sequence[str]) -> Shrink:
    """Parse ``D=32,48``, once for each name.

    Raises:
        ConvertError: one has another form, or the same size twice.
    """
    first, second = {}, {}
    for text in given:
        letter, _, sizes = text.partition("=")
        both = sizes.split(",")
        if not letter or len(both) != 2 or not all(x.strip().isdecimal() and int(x) for x in both):
            raise ConvertError(Finding("usage", path=f"--shrink {text}", expected=FORM, got=text))
        first[letter], second[letter] = map(int, both)
        if first[letter] == second[letter]:
            got = f"{first[letter]} twice, which confirms nothing"
            raise ConvertError(Finding("usage", path=f"--shrink {text}", expected="two sizes", got=got))
    return Shrink(first, second)


def shrunken(
    factory: str, settings: Mapping[str, Any], checkpoint: Source, to: str | None, sizes: Mapping[str, int]
) -> tuple[Source, Mapping[str, Any]]:
    """Return a tree of random leaves with the names of the checkpoint, at other sizes, and the settings for it.

    Args:
        factory: reference of the shipped rules, whose letters are meant.
        sizes: by letter, or by setting, such as ``vocab_size``. Letters that are products of others follow from them.

    Raises:
        ConvertError: no shipped rules have this reference, they do not fit the checkpoint, or a letter cannot be given.
    """
    match = shipped_match(factory, settings, checkpoint, to)
    path = "--shrink " + " ".join(f"{letter}={size}" for letter, size in sizes.items())
    if match is None:
        fix = "make the shapes of a small model of your own with --shapes"
        raise ConvertError(
            Finding("usage", path=path, expected="the reference of a shipped family", got=factory, fix=fix)
        )
    new = _sizes(match, sizes, path)
    shapes = {name: leaf.spec.shape for name, leaf in checkpoint.leaves.items()}
    for matched in match.coverage.matched:
        variant = match.sized[0].variants.get(matched.rule.choice or "")
        for role, leaves in matched.leaves.items():
            for name in leaves.values():
                shapes[name] = _shape(read_leaf(matched.rule, role, name, checkpoint.leaves[name].spec, variant), new)
    return DrawnLeaves(shapes), {**settings, **{name: x for name, x in sizes.items() if name not in new}}


def _sizes(match: RuleMatch, given: Mapping[str, int], path: str) -> dict[str, int]:
    """Return the size of every letter."""
    axes, old = match.rules.axes, match.sized[0].sizes
    free = [letter for letter in old if not (letter in axes and axes[letter].equals)]
    wrong = next((letter for letter in given if letter in old and letter not in free), None)
    if wrong is not None:
        got = f"{wrong}, which follows from others"
        raise ConvertError(Finding("usage", path=path, expected=f"letters of the rules ({', '.join(free)})", got=got))
    stated = {letter: given.get(letter, old[letter]) for letter in free}
    return bind([Constraint(x, size, "", "", "--shrink", path) for x, size in stated.items()], axes)[0]


def _shape(leaf: NamedLeaf, sizes: Mapping[str, int]) -> tuple[int, ...]:
    letters = leaf.letters if leaf.letters is not None else "." * len(leaf.own_shape)
    made = []
    for letter, size in zip(letters, leaf.own_shape, strict=True):
        if letter in leaf.groups:
            terms = leaf.groups[letter].terms
            made.append(sum(int(np.prod([sizes[x] for x in term])) for term in terms))
        else:
            made.append(sizes.get(letter, size))
    for index, axis, size in sorted(leaf.stacked, key=lambda stacked: stacked[1]):
        made.insert(axis, sizes.get(index, size))
    return tuple(made)


def confirm(text: str, pair: Pair, shapes: Shapes, root: str, seed: int) -> float:
    """Return the relative error of the outputs when the module has the weights that the rules make of random leaves.

    Args:
        text: of the rules.
        pair: of other sizes than those which they were derived with.
        shapes: of its leaves, by their names below `root`.

    Raises:
        ConvertError: the rules do not fit leaves of these sizes, or a side does not run.
    """
    from convert.programs.record_jax import outputs_jax
    from convert.programs.record_torch import few_threads

    given = require_inputs(pair.inputs(seed))
    source = Draws(shapes).run(seed, lambda weights: outputs_jax(pair.function, weights, given))
    leaves = DrawnLeaves(shapes, root, {name: value.array for name, value in source.parameters.items()})
    plan = make_plan(parse_rules(text), leaves)
    state = {step.name: read_step(plan, step) for step in plan.steps}
    own = {name: tensor.data_ptr() for name, tensor in pair.module.state_dict().items()}
    known = {own[name]: array for name, array in state.items() if name in own}
    tied = {name: known[at] for name, at in own.items() if name not in state and at in known}
    with few_threads(pair.module):
        return error_of(pair.module, pair.run, pair.masks, state | tied, source)
