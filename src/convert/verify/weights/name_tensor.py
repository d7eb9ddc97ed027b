"""Name the mistake with a wrong tensor: a known mistake, a corruption, or either in one part of a fused tensor."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from convert.core.tensor_spec import TensorSpec
from convert.layers.base import Part, Step
from convert.layers.mistake import Mistake
from convert.layers.step_tensor import exact, expected
from convert.numerics.bits import nearly, same_bits
from convert.planning.ambiguity import TwinTree, twin_trees
from convert.planning.plan import Plan
from convert.verify.mistakes.catalogue import known_mistakes
from convert.verify.mistakes.index_moves import Move, find_move
from convert.verify.weights.corruption.element_changes import PER_INDEX
from convert.verify.weights.corruption.find import ONE_VALUE, Corruption, find_corruption
from convert.verify.weights.corruption.relations import Indices, indices_that_differ
from convert.verify.weights.corruption.rounding import ROUNDINGS
from convert.verify.weights.corruption.row_orders import head_width, one_head
from convert.verify.weights.corruption.value_changes import find_value_change
from convert.verify.weights.from_others import OF_DROPPED, find_in_dropped, find_in_others

Array = np.ndarray[Any, np.dtype[Any]]
MIN_TELLS = 4  # values that are those of a mistake by no chance


@dataclass
class Known:
    """Causes that were found in other tensors of a file.

    Attributes:
        names: of the mistakes and corruptions.
        moves: template of a numbered module -> the numbers that hold the values of which.
    """

    names: set[str] = field(default_factory=set)
    moves: set[tuple[str, int, int]] = field(default_factory=set)

    def add(self, tensor: str, cause: Mistake | Corruption) -> None:
        """Keep a cause, found in this tensor."""
        self.names.add(cause.name)
        if isinstance(cause, Mistake) and (move := find_move(tensor, cause.of)) is not None:
            self.moves.add((move.template, move.here, move.of))

    def allows(self, tensor: str, mistake: Mistake) -> bool:
        """Whether a mistake is to be tried: many tensors have the values of another one, and only few of these are read."""
        if mistake.name not in self.names:
            return False
        move = find_move(tensor, mistake.of) if mistake.of else None
        return move is None or (move.template, move.here, move.of) in self.moves or self._shifts(move)

    def _shifts(self, move: Move) -> bool:
        """Whether all numbers moved by the same amount so far, and this one does, too."""
        return {of - here for template, here, of in self.moves if template == move.template} == {move.of - move.here}


class NameTensor:
    """Names what is wrong with tensors of one plan.

    Attributes:
        plan: says what is right.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def cause(self, step: Step, got: Array, seen: Known, *, thorough: bool = True) -> Mistake | Corruption | None:
        """Return what makes the tensor: a known mistake, or a corruption of it or of some parts of a fused one.

        Args:
            seen: causes in other tensors of the file.
            thorough: whether to try all mistakes, or only those that were seen.
        """
        known = None if thorough else seen
        mistake = _match(step, self.plan, got, known)
        if mistake is not None or (known is not None and not known.names):
            return mistake
        in_parts = self._in_parts(step, got, known)
        found = in_parts or find_corruption(got, expected(step, self.plan.source), step, self.plan)
        if found is None and (thorough or OF_DROPPED in seen.names):
            found = find_in_dropped(step, self.plan, got, self._twins)
        if thorough and (found is None or found.name in PER_INDEX):
            found = find_in_others(step, self.plan, got) or found
        if found is not None and found.name in ONE_VALUE and ROUNDINGS & seen.names:
            change = find_value_change(got, expected(step, self.plan.source), exact(step, self.plan.source))
            if (
                change is not None and change[0] in ROUNDINGS & seen.names
            ):  # a rounding that changes one value of a tensor
                return Corruption(*change)
        return found

    def _in_parts(self, step: Step, got: Array, known: Known | None) -> Corruption | None:
        """Name what is wrong with some parts of a tensor, the others being right; nothing where one value is wrong."""
        if len(step.parts) < 2:
            return None
        source = self.plan.source
        parts = [(k, part, np.ascontiguousarray(part.share(got))) for k, part in enumerate(step.parts)]
        made = [(part_of(step, k), values) for k, _, values in parts]
        rights = [expected(single, source) for single, _ in made]
        wrong = [k for k, (_, values) in enumerate(made) if not same_bits(values, rights[k])]
        if len(wrong) == len(parts) or sum(int(np.sum(made[k][1] != rights[k])) for k in wrong) == 1:
            return None
        for k in wrong:
            single, values = made[k]
            part = step.parts[k]
            where = f"in its part {_shown(part)}, from {part.leaf}, " if part.rows else ""
            mistake = _match(single, self._by_parts, values, known)
            if isinstance(mistake, Corruption):
                return Corruption(mistake.name, where + mistake.description)
            if mistake is not None:
                return Corruption(mistake.name, f"{where}expected {mistake.instead}, got {mistake.gives}")
            found = find_corruption(values, rights[k], single, self._by_parts)
            if found is not None:
                return Corruption(found.name, where + found.description)
        return None

    @cached_property
    def _twins(self) -> tuple[TwinTree, ...]:
        """Dropped trees of the same paths as the converted one."""
        return tuple(twin_trees(self.plan.checkpoint.leaves, {drop.leaf for drop in self.plan.dropped}))

    @cached_property
    def _by_parts(self) -> Plan:
        """The plan with a step for each part of a fused tensor, so that a part may be compared with parts of other tensors."""
        steps = (s if len(s.parts) < 2 else part_of(s, k) for s in self.plan.steps for k in range(max(1, len(s.parts))))
        return replace(self.plan, steps=tuple(steps))


def part_of(step: Step, k: int) -> Step:
    """Return one part of a fused tensor as a tensor of its own."""
    part = step.parts[k]
    if part.rows is None:
        return step
    shape = list(step.spec.shape)
    shape[part.axis] = part.length(shape[part.axis])
    name = f"{step.name}[{part.place}]"
    spec = TensorSpec(tuple(shape), step.spec.dtype)
    return replace(step, name=name, spec=spec, parts=(replace(part, rows=None, every=1),))


def _shown(part: Part) -> str:
    first, stop = part.rows or (0, 0)
    return f"{first} to {stop - 1}" + (f" in steps of {part.every}" if part.every > 1 else "")


def _match(step: Step, plan: Plan, got: Array, known: Known | None) -> Mistake | Corruption | None:
    """Return the first mistake that gives these values bit for bit, or else within a few roundings, or else in some indices alone."""
    near: Mistake | None = None
    partly: Corruption | None = None
    right = expected(step, plan.source)
    some = _some_indices(step, got, right)
    for mistake in known_mistakes(step, plan):
        if known is not None and not known.allows(step.name, mistake):
            continue
        try:
            made = mistake.make()
        except OverflowError:  # the file's dtype cannot hold such a tensor
            continue
        if same_bits(got, made):
            return mistake
        if near is None and nearly(got, made) and not nearly(right, made):
            near = mistake
        if (
            partly is not None or some is None or mistake.rounding or mistake.of
        ):  # another tensor's values are found later
            continue
        if same_bits(some.take(got), some.take(made)):
            width = head_width(some.axis, step, plan)
            where = one_head(some.indices, width, some.axis) if width < got.shape[some.axis] else ""
            text = f"{where or f'{some.where} alone'}, expected {mistake.instead}, got {mistake.gives}"
            partly = Corruption(mistake.name, text)
    return near or partly


def _some_indices(step: Step, got: Array, right: Array) -> Indices | None:
    """Return the indices that differ, where their values tell a mistake: several, and neither zeros nor two rows exchanged."""
    if len(step.parts) > 1:  # each part is looked at by itself
        return None
    some = indices_that_differ(got, right)
    if some is None or len(some.indices) == 2 or some.take(got).size < MIN_TELLS:
        return None
    values = some.take(got).reshape(-1)
    return some if (values != values[0]).any() else None
