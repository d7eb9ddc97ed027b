"""Where the elements of a leaf go in an output tensor: the tensor's memory, seen through the leaf's own axes.

Operations that move elements are views, so their inverses are views of the result: a piece of the leaf can be put into
its place, or compared with what lies there, as soon as it is read, whatever comes before and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from convert.ops import Add, Cast, Flip, Multiply, Op, Permute, Reshape, Slice, Take, apply, out_spec
from convert.sources.chunks import Box
from convert.spec import TensorSpec, numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]
ELEMENTWISE = (Cast, Add, Multiply)


@dataclass(frozen=True)
class Place:
    """A region of memory as the leaf has it.

    Attributes:
        view: the region, with the leaf's axes.
        origin: which element of the leaf its first element is.
        ops: what is done to each value on its way there.
    """

    view: Array
    origin: tuple[int, ...]
    ops: tuple[Op, ...]

    @property
    def box(self) -> Box:
        """The part of the leaf that goes there."""
        return Box(self.origin, self.view.shape)


def place(ops: Sequence[Op], spec: TensorSpec, region: Array) -> Place | None:
    """The region that `ops` fill from a leaf of `spec`, in the leaf's axes; None where they do more than move elements.

    >>> region = np.zeros((3, 2))
    >>> found = place((Take(0, 5), Permute((1, 0))), TensorSpec((7, 2, 3), "float64"), region)
    >>> found.view.shape, found.origin
    ((1, 2, 3), (5, 0, 0))
    """
    specs = [spec]
    try:
        for op in ops:
            specs.append(op.out_spec(specs[-1]))
    except ValueError:  # as the plan would never have it; applying them says why
        return None
    view, origin, values = region, [0] * region.ndim, list[Op]()
    for k in range(len(ops) - 1, -1, -1):
        op, before, after = ops[k], specs[k].shape, specs[k + 1].shape
        if isinstance(op, ELEMENTWISE):
            values.insert(0, op)
        elif isinstance(op, Permute):
            back = [op.axes.index(axis) for axis in range(len(op.axes))]
            view, origin = view.transpose(back), [origin[axis] for axis in back]
        elif isinstance(op, Reshape):
            if view.shape != after:  # a part of the axes only
                return None
            try:
                view = np.reshape(view, before, copy=False)
            except ValueError:
                return None
            origin = [0] * len(before)
        elif isinstance(op, Take):
            view = np.expand_dims(view, op.axis)
            origin.insert(op.axis, op.index)
        elif isinstance(op, Slice):
            origin[op.axis] += op.start
        elif isinstance(op, Flip):
            for axis in op.axes:
                origin[axis] = after[axis] - origin[axis] - view.shape[axis]
            view = np.flip(view, op.axes)
        else:
            return None
    return Place(view, tuple(origin), tuple(values))


class Gathered:
    """A part of a leaf whose operations need all of it at once: it is collected first.

    Attributes:
        place: the memory that it is collected in.
    """

    def __init__(self, ops: Sequence[Op], spec: TensorSpec) -> None:
        self._first = tuple(takewhile(lambda op: isinstance(op, Take | Slice), ops))
        self._rest = tuple(ops[len(self._first) :])
        kept = out_spec(self._first, spec)
        self._memory = np.empty(kept.shape, numpy_dtype(kept.dtype))
        found = place(self._first, spec, self._memory)
        assert found is not None
        self.place = found

    def made(self) -> Array:
        """What the operations make of it, once it is complete.

        Raises:
            OverflowError: a value does not fit its new dtype.
        """
        return apply(self._rest, self._memory)
