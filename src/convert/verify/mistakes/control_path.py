"""Mistakes with the coefficients of a cubic path: their order, the factors 2 and 3, the time axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from convert.checkpoints.source import Source
from convert.core.ops import Multiply, Op
from convert.layers.base import Part, Step
from convert.layers.control_path.kinds import CubicSpline
from convert.layers.hypothesis import Hypothesis
from convert.planning.plan import Plan
from convert.verify.mistakes.hypothesis import expected, maker

Array = np.ndarray[Any, np.dtype[Any]]
ORDER, FACTORS = "coefficients in another order", "factors 2 and 3 missing"
TIME_AXIS = "time axis exchanged with another one"


def path_hypotheses(step: Step, plan: Plan) -> Iterator[Hypothesis]:
    """Mistakes that give a tensor of the same shape."""
    kind = step.group.rule.kind if step.group is not None else None
    if isinstance(kind, CubicSpline):
        yield from _coefficients(step, kind, plan.source)
    yield from _missing(step, plan.source)


def _coefficients(step: Step, kind: CubicSpline, source: Source) -> Iterator[Hypothesis]:
    """Orders of the four, each with its own factor or with none."""
    if step.role != "coeffs":
        return
    roles = tuple(kind.ORDER)
    right = "cat[a, b, 2c, 3d]"
    said = {**{role: role for role in roles}, "c": "2c", "d": "3d"}
    for order in ("abcd", "dcba", *map("".join, itertools.permutations(roles))):
        parts = tuple(step.parts[roles.index(role)] for role in order)
        given = ", ".join(order)
        ways = {  # with the factor of the coefficient, with none, and with that of the place where it stands
            f"cat[{', '.join(said[role] for role in order)}]": parts,
            f"cat[{given}], without the factors 2 and 3": tuple(replace(part, ops=_bare(part)) for part in parts),
            f"cat[a, b, 2c, 3d] with ({given}) taken for (a, b, c, d)": tuple(
                replace(place, leaf=part.leaf) for place, part in zip(step.parts, parts, strict=True)
            ),
        }
        for gives, made in ways.items():
            if made != step.parts:
                name = FACTORS if order == "abcd" else ORDER
                yield Hypothesis(name, name, gives, right, maker(step, source, made), gives)


def _bare(part: Part) -> tuple[Op, ...]:
    return tuple(op for op in part.ops if not isinstance(op, Multiply))


def _missing(step: Step, source: Source) -> Iterator[Hypothesis]:
    """A buffer without its factor; the time axis where another one of its size should be."""
    if len(step.parts) == 1 and any(isinstance(op, Multiply) for op in step.parts[0].ops):
        bare = (replace(step.parts[0], ops=_bare(step.parts[0])),)
        yield Hypothesis(
            FACTORS, FACTORS, f"the coefficient as diffrax has it, without '{step.arithmetic}'", "the derivative's coefficient",
            maker(step, source, bare), "factor",
        )  # fmt: skip
    shape = step.spec.shape
    if step.role == "times":
        return
    for axis in range(len(shape) - 2):
        if shape[axis] == shape[-2]:

            def exchanged(axis: int = axis) -> Array:
                return np.ascontiguousarray(np.swapaxes(expected(step, source), axis, -2))

            yield Hypothesis(
                TIME_AXIS,
                TIME_AXIS,
                f"axis {axis} where time should be",
                "time second to last",
                exchanged,
                f"axis{axis}",
            )
