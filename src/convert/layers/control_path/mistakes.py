"""Mistakes with the coefficients of a control path: their order, the factors 2 and 3, the time axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.core.value_ops import Multiply
from convert.layers.base import Part, Step
from convert.layers.leaf_reader import LeafReader
from convert.layers.mistake import Mistake, symmetric
from convert.layers.step_tensor import expected, maker

Array = np.ndarray[Any, np.dtype[Any]]
ORDER, FACTORS = "coefficients in another order", "factors 2 and 3 missing"
TIME_AXIS = "time axis exchanged with another one"


def coefficient_mistakes(step: Step, source: LeafReader, roles: Sequence[str]) -> Iterator[Mistake]:
    """Yield the coefficients in other orders, each with its own factor, with none, or with that of its place.

    Args:
        roles: of the coefficients, in the order of torchcde.
    """
    right = "cat[a, b, 2c, 3d]"
    scaled = {**{role: role for role in roles}, "c": "2c", "d": "3d"}
    for order in ("abcd", "dcba", *map("".join, itertools.permutations(roles))):
        parts = tuple(step.parts[roles.index(role)] for role in order)
        names = ", ".join(order)
        of_place = tuple(replace(place, leaf=part.leaf) for place, part in zip(step.parts, parts, strict=True))
        variants = {
            f"cat[{', '.join(scaled[role] for role in order)}]": parts,
            f"cat[{names}], without the factors 2 and 3": tuple(map(_without_factor, parts)),
            f"cat[a, b, 2c, 3d] with ({names}) taken for (a, b, c, d)": of_place,
        }
        for gives, variant in variants.items():
            if variant != step.parts:
                name = FACTORS if order == "abcd" else ORDER
                yield symmetric(name, gives, right, maker(step, source, variant), gives)


def _without_factor(part: Part) -> Part:
    return replace(part, ops=tuple(op for op in part.ops if not isinstance(op, Multiply)))


def buffer_mistakes(step: Step, source: LeafReader) -> Iterator[Mistake]:
    """Yield a buffer without its factor, and tensors with another axis of the same size in place of time."""
    if len(step.parts) == 1 and any(isinstance(op, Multiply) for op in step.parts[0].ops):
        bare = maker(step, source, (_without_factor(step.parts[0]),))
        gives = f"the coefficient as diffrax has it, without '{step.arithmetic}'"
        yield symmetric(FACTORS, gives, "the derivative's coefficient", bare, "factor")
    shape = step.spec.shape
    if step.role == "times":
        return
    for axis in range(len(shape) - 2):
        if shape[axis] == shape[-2]:

            def exchanged(axis: int = axis) -> Array:
                return np.ascontiguousarray(np.swapaxes(expected(step, source), axis, -2))

            gives = f"axis {axis} where time should be"
            yield symmetric(TIME_AXIS, gives, "time second to last", exchanged, f"axis{axis}")
