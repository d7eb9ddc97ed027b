"""Name the corruption of a tensor: bits, values or rows that changed, or rows in another order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.layers.base import Step
from convert.layers.step_tensor import exact as exact_of
from convert.numerics.blocks import cut, everywhere, longest_axis
from convert.numerics.real_numbers import as_real
from convert.planning.plan import Plan
from convert.verify.weights.corruption.element_changes import find_element_change
from convert.verify.weights.corruption.permutations import first_few
from convert.verify.weights.corruption.relations import Indices, differing, indices_that_differ
from convert.verify.weights.corruption.row_orders import find_row_order
from convert.verify.weights.corruption.value_changes import find_value_change

Array = np.ndarray[Any, np.dtype[Any]]
ONE_VALUE = ("one bit flipped", "one value changed")


@dataclass(frozen=True)
class Corruption:
    """A known kind of corruption.

    Attributes:
        name: short and stable, such as ``one bit flipped``; the fault catalogue refers to it.
        description: the same with its place.
        order: which row of the source is at each place, if the rows are in another order; empty otherwise.
        axis: of the rows.
    """

    name: str
    description: str
    order: tuple[int, ...] = ()
    axis: int = 0


def find_corruption(got: Array, want: Array, step: Step | None = None, plan: Plan | None = None) -> Corruption | None:
    """Return the corruption that makes `got` of `want`; None when it is not one of the known kinds.

    Args:
        step: made `want`; with `plan`, it gives the names of the axes, and the values before they are rounded.
        plan: of `step`.
    """
    if "c" in (got.dtype.kind, want.dtype.kind):  # the last axis then has the real and the imaginary parts
        return find_corruption(as_real(got), as_real(want))
    exact = want
    if step is not None and plan is not None and step.parts:
        made = exact_of(step, plan.source)
        exact = made if made.dtype != want.dtype else want
    differ = differing(got, want)
    if got.size > 1 and all(len(indices) == 1 for indices in differ):
        return _one_value(got, want, tuple(int(indices[0]) for indices in differ))
    if (change := find_value_change(got, want, exact)) is not None:
        return Corruption(*change)
    if got.size == 1:
        return _one_value(got, want, (0,) * got.ndim)
    place = indices_that_differ(got, want)
    some = None if place is None else _Some(place, *(place.take(x) for x in (got, want, exact)))
    if some is not None and (change := find_value_change(some.got, some.want, some.exact)) is not None:
        return Corruption(change[0], f"{some.place.where}: {change[1]}")
    if (found := _not_finite(got, want) or _zeros(got, differ)) is not None:
        return found
    for axis in range(got.ndim):
        if (order := find_row_order(got, want, axis, step, plan)) is not None:
            return Corruption(order.name, order.text, order.rows, axis)
    if some is not None and (order_in := _order_in(some)) is not None:
        return order_in
    if (change := find_element_change(got, want)) is not None:
        return Corruption(*change)
    if some is None:
        return None
    if (change := find_element_change(some.got, some.want)) is not None:
        return Corruption(change[0], f"{some.place.where}: {change[1]}")
    if len(some.place.indices) == 1:
        return Corruption("one row changed", f"only index {some.place.indices[0]} of axis {some.place.axis} differs")
    return None


@dataclass(frozen=True)
class _Some:
    """The values at the few indices that hold all differences."""

    place: Indices
    got: Array
    want: Array
    exact: Array


def _order_in(some: _Some) -> Corruption | None:
    """Find the values of a few indices in another order along another axis."""
    for axis in range(some.got.ndim):
        if (order := find_row_order(some.got, some.want, axis, None, None)) is not None:
            return Corruption(order.name, f"{some.place.where}: {order.text}")
    return None


def _zeros(got: Array, differ: list[Array]) -> Corruption | None:
    if everywhere(_all_zeros, got):
        return Corruption("all zeros", "all values are zeros, those of the source are not")
    for axis in range(got.ndim):
        rows = [int(k) for k in differ[axis]]
        if len(rows) == got.shape[axis]:  # the whole tensor
            continue
        if everywhere(_all_zeros, np.take(got, rows, axis)):
            return _zeroed(rows, axis, got.shape[axis])
    return None


def _all_zeros(x: Array) -> bool:
    return not np.any(x.astype(np.float64))


def _zeroed(rows: list[int], axis: int, size: int) -> Corruption:
    """Describe indices of an axis that are all zeros."""
    if len(rows) == 1:
        last = ", the last," if rows[0] == size - 1 else ""
        return Corruption("row zeroed", f"index {rows[0]}{last} of axis {axis} is all zeros")
    thirds = size // 3 if size % 3 == 0 else 0
    part = rows[0] // thirds if thirds else 0
    third = (
        ("first", "second", "last")[part] if thirds and rows == list(range(part * thirds, (part + 1) * thirds)) else ""
    )
    such = f", the {third} third," if third else ""
    return Corruption("rows zeroed", f"{len(rows)} indices, {first_few(rows)}{such} of axis {axis} are all zeros")


def _one_value(got: Array, want: Array, at: tuple[int, ...]) -> Corruption:
    a, b = (np.frombuffer(np.asarray(x[at]).tobytes(), np.uint8) for x in (got, want))
    shown = f"{got[at]!s} for {want[at]!s}"
    if int(np.unpackbits(a ^ b).sum()) == 1:
        return Corruption(ONE_VALUE[0], f"one bit of the value at {list(at)} is flipped: {shown}")
    if _floating(got) and not np.isfinite(float(got[at])):
        return Corruption("NaN or Inf", f"one value, at {list(at)}, is {shown}")
    return Corruption(ONE_VALUE[1], f"one value, at {list(at)}, is {shown}")


def _floating(x: Array) -> bool:
    return x.dtype.kind not in "iub"


def _lost(got: Array, want: Array) -> Array:
    """Return where a value is not finite, and that of the source is."""
    return np.asarray(~np.isfinite(got.astype(np.float64)) & np.isfinite(want.astype(np.float64)))


def _not_finite(got: Array, want: Array) -> Corruption | None:
    if not _floating(got):
        return None
    if everywhere(lambda x, y: not _lost(x, y).any(), got, want):
        return None
    bad = np.concatenate([_lost(*block) for block in cut(got, want)], axis=longest_axis(got.shape))
    if bad.all():
        return Corruption("NaN or Inf", "all values are NaN or infinite, and those of the source are finite")
    at = [int(k) for k in np.argwhere(bad)[0]]
    return Corruption(
        "NaN or Inf",
        f"{int(bad.sum())} values are NaN or infinite where those of the source are finite, the first at {at}",
    )
