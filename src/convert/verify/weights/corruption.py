"""Name the corruption of a tensor: bits, values or rows that changed, or rows in another order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.layers.base import Step
from convert.layers.transforms.mistakes import DEINTERLEAVED, INTERLEAVED
from convert.numerics.bits import unequal
from convert.planning.plan import Plan
from convert.verify.weights.relations import MAX_ROWS, differing_block, places_of_rows
from convert.verify.weights.value_changes import find_value_change

Array = np.ndarray[Any, np.dtype[Any]]
TABLES = ("embedding", "parameter")  # kinds of layers whose features are not those of heads
HALVES_IN_TURNS, HALVES_JOINED = "halves interleaved", "halves de-interleaved"
SINUSOIDS = "; in a table of positions, the halves are the sines and the cosines"
CANDIDATES = 64  # rows of a larger table that start like its first row


@dataclass(frozen=True)
class Corruption:
    """A known kind of corruption.

    Attributes:
        name: short and stable, such as ``one bit flipped``; the fault catalogue refers to it.
        description: the same with its place.
    """

    name: str
    description: str


def find_corruption(got: Array, want: Array, step: Step | None = None, plan: Plan | None = None) -> Corruption | None:
    """Return the corruption that makes `got` of `want`; None when it is not one of the known kinds.

    Args:
        step: made `want`; with `plan`, it gives the names of the axes.
        plan: of `step`.
    """
    differ = np.argwhere(unequal(got, want))
    if len(differ) == 1:
        return _one_value(got, want, tuple(int(k) for k in differ[0]))
    if (change := _value_change(got, want, differ)) is not None:
        return change
    if corruption := _not_finite(got, want):
        return corruption
    if got.size > 1 and not np.any(got.astype(np.float64)):
        return Corruption("all zeros", f"all {got.size} values are zeros, those of the source are not")
    for axis in range(got.ndim):
        rows = [int(k) for k in np.unique(differ[:, axis])]
        if len(rows) == got.shape[axis]:  # the whole tensor
            continue
        if not np.any(np.take(got, rows, axis).astype(np.float64)):
            names = "index " + str(rows[0]) if len(rows) == 1 else f"{len(rows)} indices, {_first_few(rows)},"
            return Corruption(
                "row zeroed" if len(rows) == 1 else "rows zeroed",
                f"{names} of axis {axis} {'is' if len(rows) == 1 else 'are'} all zeros",
            )
    for axis in range(got.ndim):
        if corruption := _moved(got, want, axis, step, plan):
            return corruption
    for axis in range(got.ndim):
        rows = [int(k) for k in np.unique(differ[:, axis])]
        if len(rows) == 1 and got.shape[axis] > 1:
            return Corruption("one row changed", f"only index {rows[0]} of axis {axis} differs")
    return None


def _value_change(got: Array, want: Array, differ: Array) -> Corruption | None:
    """Find a change of all values, or of all in the narrowest range of indices that holds the differences."""
    if (change := find_value_change(got, want)) is not None:
        return Corruption(*change)
    block = differing_block(differ, got.shape)
    if block is None:
        return None
    axis, start, stop = block
    change = find_value_change(*(np.take(x, range(start, stop), axis) for x in (got, want)))
    if change is None:
        return None
    return Corruption(change[0], f"in the indices {start} to {stop - 1} of axis {axis}: {change[1]}")


def _one_value(got: Array, want: Array, at: tuple[int, ...]) -> Corruption:
    a, b = (np.frombuffer(np.asarray(x[at]).tobytes(), np.uint8) for x in (got, want))
    shown = f"{got[at]!s} for {want[at]!s}"
    if int(np.unpackbits(a ^ b).sum()) == 1:
        return Corruption("one bit flipped", f"one bit of the value at {list(at)} is flipped: {shown}")
    if _floating(got) and not np.isfinite(float(got[at])):
        return Corruption("NaN or Inf", f"one value, at {list(at)}, is {shown}")
    return Corruption("one value changed", f"one value, at {list(at)}, is {shown}")


def _floating(x: Array) -> bool:
    return x.dtype.kind not in "iub"


def _not_finite(got: Array, want: Array) -> Corruption | None:
    if not _floating(got):
        return None
    bad = ~np.isfinite(got.astype(np.float64)) & np.isfinite(want.astype(np.float64))
    if not bad.any():
        return None
    at = [int(k) for k in np.argwhere(bad)[0]]
    return Corruption(
        "NaN or Inf",
        f"{int(bad.sum())} values are NaN or infinite where those of the source are finite, the first at {at}",
    )


def _moved(got: Array, want: Array, axis: int, step: Step | None, plan: Plan | None) -> Corruption | None:
    """Find the same rows along an axis in another order."""
    size = got.shape[axis]
    if size > MAX_ROWS and axis == 0:
        return _rolled_table(got.reshape(size, -1), want.reshape(size, -1))
    found = places_of_rows(got, want, axis)
    if found is None or sorted(found) != list(range(size)):
        return None
    order = np.array(found)
    for name, description, wanted in _orders(size, axis, step, plan):
        if np.array_equal(order, wanted):
            return Corruption(name, description)
    if (corruption := _heads(order, axis, step) or _pairs(order, axis, step)) is not None:
        return corruption
    if np.array_equal(order, np.roll(np.arange(size), -int(order[0]))):
        return _rolled(axis, size, int(order[0]))
    changed = [int(k) for k in np.flatnonzero(order != np.arange(size))]
    if len(changed) == 2:
        return Corruption("two rows swapped", f"indices {changed[0]} and {changed[1]} of axis {axis} are swapped")
    return Corruption(
        "rows in another order", f"{len(changed)} of the {size} rows along axis {axis} are in another order"
    )


def _rolled(axis: int, size: int, first: int) -> Corruption:
    """Describe rows that moved together; `first` is the row that is now at index 0."""
    if 2 * first == size:
        return Corruption("halves swapped", f"the two halves of axis {axis}, of {first} indices each, are swapped")
    by, way = min((size - first, "forward"), (first, "back"))
    return Corruption("rows rolled", f"the rows along axis {axis} are moved {way} by {by}: index 0 holds row {first}")


def _rolled_table(got: Array, want: Array) -> Corruption | None:
    """Find rows that moved together in a table with more than `MAX_ROWS` rows; takes the memory of one column."""
    for first in (int(k) for k in np.flatnonzero(want[:, 0] == got[0, 0])[:CANDIDATES]):
        if np.array_equal(got[: len(got) - first], want[first:]) and np.array_equal(
            got[len(got) - first :], want[:first]
        ):
            return _rolled(0, len(got), first) if first else None
    return None


def _letters(axis: int, step: Step | None) -> str:
    """Return the letters that are flattened into an axis; of a fused tensor, those of its parts."""
    if step is None or not step.parts or len(step.parts[0].groups) <= axis:
        return ""
    return step.parts[0].groups[axis]


def _orders(size: int, axis: int, step: Step | None, plan: Plan | None) -> Iterator[tuple[str, str, Array]]:
    """Yield orders of an axis that is a product, such as steps times quantiles."""
    letters = _letters(axis, step)
    factors = plan.rules.axes[letters].equals if plan is not None and letters in plan.rules.axes else ()
    sizes = [f if isinstance(f, int) else plan.sizes.get(f, 0) if plan is not None else 0 for f in factors]
    if len(sizes) != 2 or sizes[0] * sizes[1] != size:
        return
    grid, (a, b) = np.arange(size), factors
    swapped = grid.reshape(sizes[0], sizes[1]).T.reshape(-1)
    back = grid.reshape(sizes[1], sizes[0]).T.reshape(-1)
    if a == b:
        description = f"axis {axis} is a grid of {sizes[0]} x {sizes[1]}, and its rows and columns are exchanged"
    else:
        description = f"axis {axis} runs over {a} within {b}; in the source, over {b} within {a}"
    for order in (swapped, back):
        yield "axes of a product swapped", description, order
    if sizes[0] == 2:
        yield "halves swapped", f"the second half of axis {axis} comes before the first", np.roll(grid, size // 2)


def _heads(order: Array, axis: int, step: Step | None) -> Corruption | None:
    """Find whole heads in another order."""
    letters = _letters(axis, step)
    if step is None or len(letters) < 2:
        return None
    sizes = dict(step.parts[0].axes)
    width = sizes[letters[-1]]
    blocks = order.reshape(-1, width)
    if not np.array_equal(blocks, blocks[:, :1] + np.arange(width)) or np.any(blocks[:, 0] % width):
        return None
    heads = [int(k) for k in blocks[:, 0] // width]
    return Corruption(
        "heads in another order", f"blocks of {width} along axis {axis} are in the order {_first_few(heads)}"
    )


def _pairs(order: Array, axis: int, step: Step | None) -> Corruption | None:
    """Find features of heads in the order of the other RoPE convention; of a fused tensor, in some of its parts."""
    letters = _letters(axis, step)
    if step is None or not letters:
        return None
    width = dict(step.parts[0].axes)[letters[-1]]
    if width < 4 or width % 2:
        return None
    heads = order.reshape(-1, width)
    kept_order = np.arange(width)
    halves = np.concatenate([kept_order[::2], kept_order[1::2]])
    even = ", ".join(map(str, kept_order[:6:2]))
    pairs = (0, 1), (0, width // 2)
    turns, together = f"{even}, ..., 1, 3, ...", f"0, {width // 2}, 1, ..."
    names = (HALVES_JOINED, HALVES_IN_TURNS) if step.kind_name in TABLES else (DEINTERLEAVED, INTERLEAVED)
    meaning = "{} became {}".format
    meant = (f": the RoPE pairs {meaning(*pairs)}", f": the RoPE pairs {meaning(*pairs[::-1])}")
    if step.kind_name in TABLES:
        meant = (SINUSOIDS, SINUSOIDS)
    for name, text, features in (
        (names[0], turns + meant[0], halves),
        (names[1], together + meant[1], np.argsort(halves)),
    ):
        first = width * np.arange(len(heads))[:, None]
        moved = np.all(heads == first + features, axis=1)
        kept = np.all(heads == first + kept_order, axis=1)
        if np.all(moved | kept):
            where = "" if moved.all() else f" in {int(moved.sum())} of {len(heads)} blocks of {width}"
            problem = f"features along axis {axis} are{where} in the order {text}, and the rules do not reorder them"
            return Corruption(name, problem)
    return None


def _first_few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
