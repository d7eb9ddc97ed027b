"""Mistakes with a weight of integers and scales: scales left out, multiplied by or of other places, and integers unpacked wrongly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from convert.checkpoints.divided import DividedSource
from convert.core.ops import apply
from convert.layers.base import Step
from convert.layers.mistake import Mistake, symmetric
from convert.layers.step_tensor import assemble
from convert.planning.plan import Plan

Array = np.ndarray[Any, np.dtype[Any]]
Change = Callable[[Array], Any]
OTHER_SCALES, OTHER_INTEGERS = "scales of other places", "integers unpacked wrongly"
RIGHT = "the integers divided by their scales"


def integer_mistakes(step: Step, plan: Plan) -> Iterator[Mistake]:
    """Yield mistakes with the leaves of a tensor that the checkpoint holds as integers and scales."""
    source = plan.checkpoint
    leaves = [part.leaf for part in step.parts if isinstance(source, DividedSource) and part.leaf in source.scales]
    if not isinstance(source, DividedSource) or not leaves or plan.merges:
        return

    def made(integers: Change = np.asarray, scales: Change = np.asarray, join: Any = np.divide) -> Callable[[], Array]:
        """Return what computes the tensor with other integers, other scales or without the division."""

        def leaf(name: str) -> Array:
            if name not in source.scales:
                return plan.source.read(name)
            kernel, scale = (x.astype(np.float32) for x in source.read_stored(name))
            return np.asarray(join(integers(kernel), scales(scale)), np.float32)

        return lambda: assemble(step.parts, [apply(part.ops, leaf(part.leaf)) for part in step.parts])

    kernel, scale = source.read_stored(leaves[0])
    yield symmetric("scales left out", "the integers alone", RIGHT, made(scales=np.ones_like))
    yield symmetric(
        "multiplied by the scales", "the integers multiplied by their scales", RIGHT, made(join=np.multiply)
    )
    for which, scales in _other_scales(kernel.shape, scale.shape):
        yield symmetric(OTHER_SCALES, f"the integers divided by {which}", RIGHT, made(scales=scales))
    for which, integers in _other_integers(kernel.dtype.name):
        yield symmetric(OTHER_INTEGERS, f"{which}, divided by the scales", RIGHT, made(integers))


def _other_scales(shape: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[str, Change]]:
    """Yield what may stand in place of scales of these sizes, for integers of this shape."""
    yield "the mean of the scales", np.mean
    yield "the largest of the scales", np.max
    yield "the smallest of the scales", np.min
    long = [axis for axis, size in enumerate(sizes) if size > 1]
    for axis in long:
        yield f"the scales of the place before along axis {axis}", partial(np.roll, shift=1, axis=axis)
        yield f"the scales of the place behind along axis {axis}", partial(np.roll, shift=-1, axis=axis)
        yield f"the scales in reverse order along axis {axis}", partial(np.flip, axis=axis)
        yield f"the first scale along axis {axis}", partial(np.take, indices=[0], axis=axis)
    for a, b in itertools.combinations(range(len(shape)), 2):
        if shape[a] == shape[b] and {a, b} & set(long):
            yield f"scales of which axes {a} and {b} are exchanged", partial(np.swapaxes, axis1=a, axis2=b)


def _other_integers(dtype: str) -> Iterator[tuple[str, Change]]:
    """Yield what may become of packed integers: halves of a byte exchanged, the sign lost, zero in the middle."""
    bits = int(dtype.removeprefix("int"))
    if bits < 8:
        yield "each two neighbours of the packed integers exchanged", _exchanged
    yield "the integers read without a sign", lambda kernel: np.mod(kernel, 2.0**bits)
    for offset in (2.0 ** (bits - 1), -(2.0 ** (bits - 1))):
        yield f"the integers with {offset:+.0f}", partial(np.add, offset)


def _exchanged(kernel: Array) -> Array:
    """Exchange the integers that share a byte; of an odd number, the last stays."""
    made = kernel.copy()
    flat = made.reshape(-1)
    pairs = flat[: flat.size - flat.size % 2].reshape(-1, 2)
    pairs[:] = pairs[:, ::-1].copy()
    return made
