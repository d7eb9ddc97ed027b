"""Mistakes with the kernel of a convolution: flipped taps, exchanged axes, standardisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from convert.core.ops import Flip
from convert.core.value_ops import Cast
from convert.core.weight_norm_ops import Standardize
from convert.layers.base import Step
from convert.layers.conv.standardization import Standardized
from convert.layers.leaf_reader import LeafReader
from convert.layers.mistake import Mistake, symmetric
from convert.layers.step_tensor import expected
from convert.layers.transforms.mistakes import with_ops, without_norms

Array = np.ndarray[Any, np.dtype[Any]]
FLIPPED = "kernel flipped"
CHANNELS, SPATIAL, AS_STORED = "input and output channels exchanged", "spatial axes exchanged", "axes as stored"
NOT_ADJACENT = "results of one channel not adjacent"  # of a depthwise convolution
OTHER_TRANSPOSE_KERNEL = "transpose_kernel the other way round"
NOT_STANDARDIZED, EXTRA_STANDARDIZATION = "standardisation left out", "standardised although the source does not"
EPSILON_SIDE = "epsilon on the other side of the root"
STANDARDIZATIONS = ((False, 1e-5), (True, 1e-5), (False, 1e-10), (True, 1e-6))  # big_vision, flax, BiT, timm


def layout_mistake(right: tuple[str, ...], wrong: tuple[str, ...], stored: str, spatial: set[str]) -> str:
    """Return the name of another order of a kernel's axes; empty where it has none.

    Args:
        right, wrong: letters of each axis of the target's kernel.
        stored: letters of the leaf's axes; spatial: those of them that are spatial.
    """
    moved = [(a, b) for a, b in zip(right, wrong, strict=True) if a != b]
    if any(sorted(a) == sorted(b) for a, b in moved):
        return NOT_ADJACENT
    if {a for a, _ in moved} <= spatial:
        return SPATIAL
    if not {a for a, _ in moved} & spatial:
        return CHANNELS
    return AS_STORED if "".join(wrong) == stored else ""


def flipped_kernel(step: Step, source: LeafReader, axes: tuple[int, ...]) -> Mistake:
    """Return the kernel flipped, as for a true convolution; or not flipped, in a transposed one.

    Args:
        axes: of the target's kernel that are spatial.
    """
    words = ("the kernel with its taps in the order in which the source stores them", "the taps in reverse order")
    flipped = any(isinstance(op, Flip) for op in step.parts[0].ops)
    gives, instead = words if flipped else words[::-1]
    return symmetric(FLIPPED, gives, instead, lambda: np.flip(expected(step, source), axes).copy())


def other_transpose_kernel(step: Step, source: LeafReader, *, transpose_kernel: bool) -> Iterator[Mistake]:
    """Yield the kernel as the other value of `transpose_kernel` has it: flipped, and its channels exchanged."""
    if step.spec.shape[0] != step.spec.shape[1]:
        return
    axes = tuple(range(2, len(step.spec.shape)))

    def make() -> Array:
        return np.flip(expected(step, source), axes).swapaxes(0, 1).copy()

    gives = f"the kernel {'flipped' if transpose_kernel else 'not flipped'}, its channels exchanged"
    yield symmetric(OTHER_TRANSPOSE_KERNEL, gives, "what transpose_kernel says", make)


def standardization_mistakes(
    step: Step, source: LeafReader, equation: Standardized | None, axis: int
) -> Iterator[Mistake]:
    """Yield mistakes with weight standardisation.

    Args:
        equation: of the source; None where it does not standardise.
        axis: of the target's kernel that has the output channels.
    """
    ops = step.parts[0].ops
    if equation is None:
        for inside, epsilon in STANDARDIZATIONS:
            added = (*ops, Cast("float64"), Standardize(axis, epsilon, inside), Cast(step.spec.dtype))
            gives = f"the kernel standardised, {'sqrt(var + ' if inside else '(std + '}{epsilon:g})"
            make = with_ops(step, source, added)
            yield Mistake(EXTRA_STANDARDIZATION, NOT_STANDARDIZED, gives, "the kernel as stored", make)
        return
    instead = f"standardised by {equation.text}"
    if step.spec.shape[0] == step.spec.shape[1]:  # the generic mistakes move the axes before the kernel is standardised

        def exchanged() -> Array:
            return expected(step, source).swapaxes(0, 1).copy()

        yield symmetric(CHANNELS, "standardised, then its first two axes exchanged", instead, exchanged)
    bare = with_ops(step, source, without_norms(ops))
    yield Mistake(NOT_STANDARDIZED, EXTRA_STANDARDIZATION, "the kernel as stored", instead, bare)
    moved = tuple(replace(op, inside=not op.inside) if isinstance(op, Standardize) else op for op in ops)
    gives = "standardised with its epsilon on the other side of the root"
    yield symmetric(EPSILON_SIDE, gives, instead, with_ops(step, source, moved))
