"""Name the order of the rows of a tensor along one axis, where they are those of the source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.core.ops import Pad
from convert.layers.base import Step
from convert.layers.transforms.mistakes import DEINTERLEAVED, INTERLEAVED
from convert.numerics.blocks import everywhere
from convert.planning.plan import Plan
from convert.verify.weights.corruption.permutations import (
    EXCHANGED,
    IN_TURNS,
    NOT_IN_TURNS,
    Order,
    describe_order,
    first_few,
)
from convert.verify.weights.corruption.relations import MAX_ROWS, places_of_rows

Array = np.ndarray[Any, np.dtype[Any]]
TABLES = ("embedding", "parameter")  # kinds of layers whose features are not those of heads
HALVES_IN_TURNS, HALVES_JOINED = "halves interleaved", "halves de-interleaved"
SINUSOIDS = "; in a table of positions, the halves are the sines and the cosines"
CANDIDATES = 64  # rows of a larger table that start like its first row


def find_row_order(got: Array, want: Array, axis: int, step: Step | None, plan: Plan | None) -> Order | None:
    """Return the order in which `got` has the rows of `want` along an axis; None where it has others, or all in their places.

    Args:
        step: made `want`; with `plan`, it gives the names of the axes.
        plan: of `step`.
    """
    size = got.shape[axis]
    if size > MAX_ROWS and axis == 0:
        return _rolled_table(got.reshape(size, -1), want.reshape(size, -1))
    found = places_of_rows(got, want, axis)
    if found is None or sorted(found) != list(range(size)) or found == list(range(size)):
        return None
    return replace(_named(np.array(found), axis, step, plan), rows=tuple(found))


def _named(order: Array, axis: int, step: Step | None, plan: Plan | None) -> Order:
    """Name an order of rows that is not that of the source."""
    size = len(order)
    for name, description, wanted in _orders(size, axis, step, plan):
        if np.array_equal(order, wanted):
            return Order(name, description)
    width = head_width(axis, step, plan)
    if (named := _pairs(order, axis, width, step) or _in_one_head(order, axis, width)) is not None:
        return named
    unit = f"rows along axis {axis}"
    described = describe_order(order, unit)
    in_turns = described is not None and described.name in (IN_TURNS, NOT_IN_TURNS, EXCHANGED)
    if described is not None and in_turns and (step is None or len(step.parts) > 1 or len(_letters(axis, step)) < 2):
        return described
    if (named := _heads(order, axis, step) or described) is not None:
        return named
    changed = int(np.count_nonzero(order != np.arange(size)))
    return Order("rows in another order", f"{changed} of the {size} {unit} are in another order")


def _rolled_table(got: Array, want: Array) -> Order | None:
    """Find rows that moved together in a table with more than `MAX_ROWS` rows; takes the memory of one column."""
    rows = np.arange(len(got))
    for first in (int(k) for k in np.flatnonzero(want[:, 0] == got[0, 0])[:CANDIDATES]):
        rolled = ((got[: len(got) - first], want[first:]), (got[len(got) - first :], want[:first]))
        if np.array_equal(got[0], want[first]) and all(everywhere(np.array_equal, *pair) for pair in rolled):
            return describe_order(np.roll(rows, -first), "rows along axis 0") if first else None
    return None


def _letters(axis: int, step: Step | None) -> str:
    """Return the letters that are flattened into an axis; of a fused tensor, those of its parts."""
    if step is None or not step.parts or len(step.parts[0].groups) <= axis:
        return ""
    padded = step.group is None and any(isinstance(op, Pad) and op.axis == axis for op in step.parts[0].ops)
    return "" if padded else step.parts[0].groups[axis]


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


def _heads(order: Array, axis: int, step: Step | None) -> Order | None:
    """Find whole heads in another order."""
    letters = _letters(axis, step)
    if step is None or len(letters) < 2:
        return None
    width = dict(step.parts[0].axes)[letters[-1]]
    blocks = order.reshape(-1, width)
    if not np.array_equal(blocks, blocks[:, :1] + np.arange(width)) or np.any(blocks[:, 0] % width):
        return None
    heads = blocks[:, 0] // width
    if (found := describe_order(heads, f"heads of {width} rows along axis {axis}", whole=False)) is not None:
        return Order("heads in another order", found.text)
    text = f"the heads of {width} rows along axis {axis} are in the order {first_few(heads.tolist())}"
    return Order("heads in another order", text)


def head_width(axis: int, step: Step | None, plan: Plan | None) -> int:
    """Return the width of the heads along an axis, of one part of a fused tensor; 0 where no head is known.

    Of a flat axis, the product that is its size tells (``E: {equals: N*H}``). The features of a table are one head.
    """
    letters = _letters(axis, step)
    if step is None or not letters:
        return 0
    sizes = dict(step.parts[0].axes)
    if len(letters) > 1 or step.kind_name in TABLES or plan is None:
        return sizes[letters[-1]]
    products = [plan.rules.axes[letters].equals] if letters in plan.rules.axes else []
    products += [product.factors for product in plan.rules.products if product.letter == letters]
    widths = (plan.sizes.get(str(factors[-1]), 0) for factors in products if factors)
    return next((width for width in widths if width), sizes[letters])


def one_head(indices: Sequence[int], width: int, axis: int) -> str:
    """Say which head all these indices of an axis are of; empty if they are of several, or heads are not known."""
    heads = {k // width for k in indices} if width > 2 else ()
    if len(heads) != 1:
        return ""
    (head,) = heads
    first = head * width
    return f"in the indices {first} to {first + width - 1} of axis {axis}, as of head {head} alone"


def _in_one_head(order: Array, axis: int, width: int) -> Order | None:
    """Name the order of the rows of one head alone."""
    moved = np.flatnonzero(order != np.arange(len(order))).tolist()
    if width == len(order) or len(moved) < 3 or not (where := one_head(moved, width, axis)):
        return None
    first = moved[0] // width * width
    found = describe_order(order[first : first + width] - first, "rows", whole=False)
    return None if found is None else Order(found.name, f"{where}: {found.text}")


def _pairs(order: Array, axis: int, width: int, step: Step | None) -> Order | None:
    """Find features of heads in the order of the other RoPE convention; of a fused tensor, in some of its parts."""
    if step is None or width < 4 or width % 2 or len(order) % width:
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
        if not np.all(moved | kept):
            continue
        if moved.sum() == 1 < len(heads):
            text = f"{one_head([width * int(np.argmax(moved))], width, axis)}: the features are in the order {text}"
        else:
            some = "" if moved.all() else f" in {int(moved.sum())} of {len(heads)} blocks of {width}"
            text = f"features along axis {axis} are{some} in the order {text}"
        return Order(name, f"{text}, and the rules do not reorder them")
    return None
