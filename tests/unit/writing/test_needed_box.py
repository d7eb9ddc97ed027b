"""The elements that the first operations of a leaf select."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from convert.core.ops import Flip, Op, Permute, Slice, Take, apply
from convert.core.tensor_spec import TensorSpec
from convert.writing.scatter import needed_box


@st.composite
def selections(draw: Any) -> tuple[Op, ...]:
    """Operations on an array of (5, 4, 6), most of which select."""
    shape, ops = [5, 4, 6], list[Op]()
    for _ in range(draw(st.integers(0, 5))):
        axis = draw(st.integers(0, len(shape) - 1))
        kind = draw(st.sampled_from(["slice", "slice", "take", "other"]))
        if kind == "slice":
            start = draw(st.integers(0, shape[axis] - 1))
            stop = draw(st.integers(start + 1, shape[axis]))
            ops.append(Slice(axis, start, stop))
            shape[axis] = stop - start
        elif kind == "take" and len(shape) > 1:
            ops.append(Take(axis, draw(st.integers(0, shape[axis] - 1))))
            del shape[axis]
        else:
            ops += [Flip((axis,)), Permute(tuple(reversed(range(len(shape)))))]
            shape.reverse()
    return tuple(ops)


@given(selections())
def test_the_rest_of_the_operations_on_the_box_gives_the_same(ops: tuple[Op, ...]) -> None:
    x = np.arange(120).reshape(5, 4, 6)
    box, rest = needed_box(ops, TensorSpec(x.shape, "int64"))
    assert np.array_equal(apply(rest, x[box.within((0, 0, 0))]), apply(ops, x))
    assert box.size == np.prod(box.shape) and not (rest and isinstance(rest[0], Slice | Take))
