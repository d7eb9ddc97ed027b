"""Name the mistake with a wrong tensor: a known mistake, a corruption, or either in one part of a fused tensor."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from convert.core.tensor_spec import TensorSpec
from convert.layers.base import Step
from convert.layers.mistake import Mistake
from convert.layers.step_tensor import expected
from convert.numerics.bits import nearly, same_bits
from convert.planning.plan import Plan
from convert.verify.mistakes.catalogue import known_mistakes
from convert.verify.weights.corruption import Corruption, find_corruption

Array = np.ndarray[Any, np.dtype[Any]]


class NameTensor:
    """Names what is wrong with tensors of one plan.

    Attributes:
        plan: says what is right.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def mistake(self, step: Step, got: Array) -> Mistake | None:
        """Return the known mistake that makes the whole tensor, if there is one."""
        return _match(step, self.plan, got)

    def corruption(self, step: Step, got: Array) -> Corruption | None:
        """Return what happened to the tensor, or to some parts of a fused one; None when it is not known."""
        in_parts = self._in_parts(step, got)
        return in_parts or find_corruption(got, expected(step, self.plan.source), step, self.plan)

    def _in_parts(self, step: Step, got: Array) -> Corruption | None:
        """Name what is wrong with some parts of a tensor, the others being right; nothing where one value is wrong."""
        source = self.plan.source
        parts = [(k, part, np.ascontiguousarray(part.share(got))) for k, part in enumerate(step.parts)]
        made = [(part_of(step, k), values) for k, _, values in parts]
        rights = [expected(single, source) for single, _ in made]
        wrong = [k for k, (_, values) in enumerate(made) if not same_bits(values, rights[k])]
        if len(wrong) == len(parts) or sum(int(np.sum(made[k][1] != rights[k])) for k in wrong) == 1:
            return None
        for k in wrong:
            single, values = made[k]
            rows = step.parts[k].rows
            where = f"in its part {rows[0]} to {rows[1] - 1}, from {step.parts[k].leaf}, " if rows else ""
            mistake = _match(single, self._by_parts, values)
            if mistake is not None:
                return Corruption(mistake.name, f"{where}it holds {mistake.gives}; right is {mistake.instead}")
            found = find_corruption(values, rights[k], single, self._by_parts)
            if found is not None:
                return Corruption(found.name, where + found.description)
        return None

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
    shape[part.axis] = part.rows[1] - part.rows[0]
    name = f"{step.name}[{part.rows[0]}:{part.rows[1]}]"
    spec = TensorSpec(tuple(shape), step.spec.dtype)
    return replace(step, name=name, spec=spec, parts=(replace(part, rows=None),))


def _match(step: Step, plan: Plan, got: Array) -> Mistake | None:
    """Return the first mistake that gives these values bit for bit, or else within a few roundings."""
    near: Mistake | None = None
    right = expected(step, plan.source)
    for mistake in known_mistakes(step, plan):
        try:
            made = mistake.make()
        except OverflowError:  # the file's dtype cannot hold such a tensor
            continue
        if same_bits(got, made):
            return mistake
        if near is None and nearly(got, made) and not nearly(right, made):
            near = mistake
    return near
