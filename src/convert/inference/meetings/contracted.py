"""Which axes of a leaf a product sums over."""

from __future__ import annotations

import numpy as np

from convert.inference.meetings.sites import Meeting, axes_of
from convert.programs.program import Program


def summed_axes(meeting: Meeting) -> tuple[int, ...]:
    """Return the axes of the operand that its operation sums over."""
    operation = meeting.operation
    if operation.name == "dot_general":
        return tuple(operation.settings["dimension_numbers"][0][meeting.side])
    if operation.name == "conv_general_dilated":
        return tuple(operation.settings["dimension_numbers"].rhs_spec[1:])
    if operation.name == "convolution":
        return tuple(range(1, meeting.weight.array.ndim))
    axes = axes_of(operation, meeting.side)
    return () if axes is None else tuple(axes[1][1])


def contracted_axes(program: Program, meeting: Meeting, leaf: str) -> tuple[int, ...]:
    """Return the axes of a leaf that a product sums over."""
    weight, summed = meeting.weight, summed_axes(meeting)
    start, shape = program.first_element[leaf], program.parameters[leaf].array.shape
    if not shape:
        return ()
    axes: set[int] = set()
    for numbers in weight.elements:
        inside = (numbers >= start) & (numbers < start + int(np.prod(shape)))
        if inside.ndim and not inside.all():  # matrices of several leaves, one below the other
            numbers = numbers[inside.reshape(len(inside), -1).all(1)]
        if not numbers.size or not (inside.ndim or inside.all()):
            continue
        at = np.unravel_index(numbers - start, shape)
        if numbers.shape == shape:  # no element tells an axis of size 1
            axes |= {axis for axis in summed if shape[axis] == 1}
        for axis in summed:
            axes |= {k for k, index in enumerate(at) if np.diff(index, axis=axis).any()}
    return tuple(sorted(axes))
