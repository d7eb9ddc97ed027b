"""Strided convolutions and poolings that the JAX function pads by SAME, and the module by fixed numbers: for other sizes the two differ.

SAME pads what the result of ``ceil(size / stride)`` rows needs, half of it behind each end, and an odd one behind: with a kernel of 3 and
strides of 2 (1, 1) for an odd size, and (0, 1) for an even one (`jax.lax.padtype_to_pads`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from convert.programs.divergence.naming.windows import settings_of
from convert.programs.jax_paddings import PADDED_BY
from convert.programs.program import Operation, Program

RULES = {"SAME", "SAME_LOWER"}


class _Window(NamedTuple):
    """What a convolution or pooling reads: its window with dilation, its strides, and how it pads, of each axis of space."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]


def notes(source: Program, target: Program) -> tuple[str, ...]:
    """Return a note for each line of the JAX function that pads by SAME, where the module has the same window with fixed numbers."""
    fixed = {window: operation for operation in target.operations if (window := _of_torch(operation)) is not None}
    found = dict[str, str]()
    for operation in source.operations:
        window = _of_jax(operation)
        if window not in fixed or operation.place in found:
            continue
        pads, strides = (
            ", ".join(map(str, dict.fromkeys(of))) for of in (window.padding, (x for x in window.strides if x > 1))
        )
        found[operation.place] = (
            f"the JAX function pads by {operation.settings[PADDED_BY]} at {operation.place}, with strides of {strides}: {pads} for the sizes of these "
            f"inputs, as the PyTorch module at {fixed[window].place} does for every size; for sizes with another remainder, such as even ones "
            "in place of odd ones, the two differ; give inputs of the sizes that you will use"
        )
    return tuple(found.values())


def _of_jax(operation: Operation) -> _Window | None:
    """Return the window of an operation that pads by SAME, if what it pads depends on the size; None for others."""
    said = operation.settings
    if said.get(PADDED_BY) not in RULES:
        return None
    if "dimension_numbers" in said:
        return _of_convolution(operation)
    if any(x != 1 for x in said["base_dilation"]):
        return None
    every = zip(
        said["window_dimensions"], said["window_dilation"], said["window_strides"], said["padding"], strict=True
    )
    return _window(axis for axis in every if axis[0] > 1 or axis[2] > 1)  # without those of the batch and the channels


def _of_torch(operation: Operation) -> _Window | None:
    """Return the window of a convolution or pooling; None for another operation."""
    said = operation.settings
    if operation.name == "convolution":
        return _of_convolution(operation)
    if "pool" not in operation.name or "kernel_size" not in said:
        return None
    kernel = said["kernel_size"]
    dilation, padding = said.get("dilation") or [1] * len(kernel), said.get("padding") or [0] * len(kernel)
    pads = [(pad, pad) for pad in padding]
    return _window(zip(kernel, dilation, said.get("stride") or kernel, pads, strict=True))


def _of_convolution(operation: Operation) -> _Window | None:
    own = settings_of(operation)
    if own is None:
        return None
    return _window(zip(own.kernel.shape[2:], own.dilation, own.stride, own.padding, strict=True))


def _window(axes: Iterable[tuple[int, int, int, tuple[int, int]]]) -> _Window | None:
    """Return a window; None where what SAME pads does not depend on the size, or on whether the result has another one.

    Args:
        axes: of space: size of the kernel, dilation, stride and padding of each.
    """
    found = [((size - 1) * step + 1, stride, (int(pad[0]), int(pad[1]))) for size, step, stride, pad in axes]
    if not any(size > stride > 1 for size, stride, _ in found):
        return None
    return _Window(*map(tuple, zip(*found, strict=True)))
