"""Say in words what a permutation does: reversed, rolled, blocks or parts in turns, factors of an axis in another order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.core.text import in_runs

Array = np.ndarray[Any, np.dtype[Any]]
MAX_NAMED_PARTS = 3  # query, key and value
IN_TURNS, NOT_IN_TURNS = "parts within heads", "heads within parts"
EXCHANGED = "parts and heads exchanged"  # as many of both: one permutation, whichever of the two orders the source has
FACTORS, THIRDS = "factors of an axis in another order", "thirds in another order"


@dataclass(frozen=True)
class Order:
    """What a permutation does.

    Attributes:
        name: short and stable, such as ``rows reversed``.
        text: a sentence about `unit`.
        rows: which one is at each place; empty: not said.
    """

    name: str
    text: str
    rows: tuple[int, ...] = ()


def describe_order(order: Array, unit: str = "rows", *, whole: bool = True) -> Order | None:
    """Return what a permutation does; None if it has no simple form.

    Args:
        order: which thing is now at each place.
        unit: the things, in the plural.
        whole: whether these are all things along an axis, which may be parts of a fused tensor.

    >>> describe_order(np.array([3, 2, 1, 0]))
    Order(name='rows reversed', text='the 4 rows are in the reverse order')
    >>> describe_order(np.array([0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11])).text
    'the rows of 3 parts of 4, such as query, key and value, are in turns: 2, 2 and 2 of each, 2 times; in the source one part follows the other'
    """
    size = len(order)
    moved = np.flatnonzero(order != np.arange(size))
    if len(moved) == 2:
        return Order("two rows swapped", f"of the {unit}, {moved[0]} and {moved[1]} are exchanged")
    if (
        found := (_thirds(order, unit) if whole else None)
        or _simple(order, unit)
        or _turns(order, unit)
        or _of_factors(order, unit)
    ):
        return found
    return _same_in_each(order, unit) or _in_a_range(order, moved, unit) or _blocks(order, unit)


def _thirds(order: Array, unit: str) -> Order | None:
    """Find three equal parts in another order."""
    width = len(order) // MAX_NAMED_PARTS
    if width < 2 or len(order) % MAX_NAMED_PARTS or not np.array_equal(order % width, np.arange(len(order)) % width):
        return None
    parts = (order // width).reshape(MAX_NAMED_PARTS, width)
    if np.any(parts != parts[:, :1]):
        return None
    places = _listed(parts[:, 0].tolist())
    text = f"the thirds of the {unit}, {width} each, are in the order {places}: query, key and value of a fused tensor, or heads"
    return Order(THIRDS, text)


def _simple(order: Array, unit: str) -> Order | None:
    size = len(order)
    if np.array_equal(order, np.arange(size)[::-1]):
        return Order("rows reversed", f"the {size} {unit} are in the reverse order")
    if size > 10 and np.array_equal(order, sorted(range(size), key=str)):
        return Order(
            "rows in the order of strings", f"the {size} {unit} are in the order of strings: 0, 1, 10, 11, ..."
        )
    first = int(order[0])
    if not np.array_equal(order, np.roll(np.arange(size), -first)):
        return None
    if 2 * first == size:
        return Order("halves swapped", f"the two halves of the {unit}, of {first} each, are exchanged")
    by, way = min((size - first, "forward"), (first, "back"))
    return Order("rows rolled", f"the {unit} are moved {way} by {by}: index 0 holds {first}")


def _turns(order: Array, unit: str) -> Order | None:
    """Find parts that follow each other in the source and are in turns here, block by block; or the reverse."""
    for of, name in ((order, IN_TURNS), (np.argsort(order), NOT_IN_TURNS)):
        if (found := _in_turns(of)) is None:
            continue
        widths, times = found
        such = ", such as query, key and value," if len(widths) == MAX_NAMED_PARTS else ""
        sizes = sorted({width * times for width in widths})
        parts = f"{len(widths)} parts of {_listed(sizes, 'or')}{such}"
        each = f"{_listed(widths)} of each, {times} times"
        here, there = f"are in turns: {each}", "one part follows the other"
        if np.array_equal(order, np.argsort(order)):
            text = f"the {unit} of {parts} {here}, and in the source {there}, or the other way round"
            return Order(EXCHANGED, text)
        if name == IN_TURNS:
            return Order(name, f"the {unit} of {parts} {here}; in the source {there}")
        return Order(name, f"in the {unit} of {parts} {there}; in the source they {here}")
    return None


def _in_turns(order: Array) -> tuple[list[int], int] | None:
    """Return how many elements of each part are together, and how often; None if the parts are not in turns."""
    starts = np.flatnonzero(np.diff(order, prepend=order[0] - 2) != 1)
    firsts, widths = order[starts], np.diff(np.append(starts, len(order)))
    again = np.flatnonzero(firsts[1:] == widths[0])
    count = int(again[0]) + 1 if len(again) else 0
    if firsts[0] != 0 or count < 2 or len(starts) % count or min(widths) < 2:
        return None
    times = len(starts) // count
    each = widths[:count]
    equal = len(set(each.tolist())) == 1
    if equal and count > MAX_NAMED_PARTS:
        return None
    expected = firsts[:count] + each * np.arange(times)[:, None]
    if not np.array_equal(firsts.reshape(times, count), expected) or not np.array_equal(widths, np.tile(each, times)):
        return None
    # One part after the other, of these sizes.
    return (each.tolist(), times) if np.array_equal(firsts[:count], np.cumsum([0, *(each * times)[:-1]])) else None


def _of_factors(order: Array, unit: str) -> Order | None:
    """Find an axis that is a product, with its factors in another order, or reversed."""
    factors = _factors(order)
    if factors is None or len(factors) < 2:
        return None
    ranks = sorted(range(len(factors)), key=lambda k: -abs(factors[k][1]))  # as in the source
    shape = [factors[k][0] for k in ranks]
    flipped = [place for place, k in enumerate(ranks) if factors[k][1] < 0]
    grid = " x ".join(map(str, shape))
    if ranks == list(range(len(ranks))):  # some are reversed, none moved
        inner = math.prod(shape[1:])
        if flipped == [0] and shape[0] == 3:
            text = f"of the blocks of {inner} {unit}, 0 and 2 are exchanged"
            return Order("blocks in another order", text)
        if flipped == [0]:
            return Order("blocks reversed", f"the {shape[0]} blocks of {inner} {unit} are in the reverse order")
        if flipped == [len(shape) - 1]:
            text = f"within each block of {shape[-1]} {unit}, they are in the reverse order"
            return Order("reversed within blocks", text)
        return Order(FACTORS, f"the {unit}, as a grid of {grid}, are reversed along {_listed(flipped)}")
    places = [ranks.index(k) for k in range(len(ranks))]
    if len(shape) == 2 and not flipped:
        text = f"the {unit} are a grid of {grid}, and its rows and columns are exchanged"
    else:
        text = f"the {unit} are a grid of {grid}, and its axes are in the order {_listed(places)}"
    if flipped:
        text += f", reversed along {_listed(flipped)}"
    return Order(FACTORS, text)


def _factors(order: Array) -> list[tuple[int, int]] | None:
    """Return size and stride of each factor, the outermost first, if the order is that of a strided grid."""
    size, done, found = len(order), 1, []
    made = np.zeros(1, np.int64)
    while done < size:
        stride = int(order[done] - order[0])
        every = order[::done] - order[0]
        length = int(np.argmin(np.append(every == stride * np.arange(len(every)), False)))
        if size % (done * length):
            return None
        made = (stride * np.arange(length)[:, None] + made).reshape(-1)
        found.append((length, stride))
        done *= length
    if not np.array_equal(made + order[0], order):
        return None
    product = 1
    for length, stride in sorted(found, key=lambda factor: abs(factor[1])):
        if abs(stride) != product:
            return None
        product *= length
    return found[::-1]


def _blocks(order: Array, unit: str) -> Order | None:
    """Find whole blocks of elements in another order, as large as possible."""
    starts = np.flatnonzero(np.diff(order, prepend=order[0] - 2) != 1)
    width = math.gcd(len(order), *starts.tolist(), *order[starts].tolist())
    if width < 2:
        return None
    blocks = order[::width] // width
    if (found := describe_order(blocks, f"blocks of {width} {unit}", whole=False)) is not None:
        return Order("blocks in another order", found.text)
    text = f"the blocks of {width} {unit} are in the order {first_few(blocks.tolist())}"
    return Order("blocks in another order", text)


def _same_in_each(order: Array, unit: str) -> Order | None:
    """Find the same order within each of several blocks, as small as possible."""
    size = len(order)
    for width in range(2, size // 2 + 1):
        if size % width:
            continue
        blocks = order.reshape(-1, width) - width * np.arange(size // width)[:, None]
        if np.array_equal(blocks, np.broadcast_to(blocks[0], blocks.shape)) and blocks.min() == 0:
            found = describe_order(blocks[0], unit, whole=False)
            text = found.text if found is not None else f"their order is {first_few(blocks[0].tolist())}"
            return Order("another order within blocks", f"within each block of {width}: {text}")
    return None


def _in_a_range(order: Array, moved: Array, unit: str) -> Order | None:
    start, stop = int(moved[0]), int(moved[-1]) + 1
    if stop - start == len(order):
        return None
    found = describe_order(order[start:stop] - start, unit, whole=False)
    return None if found is None else Order(found.name, f"in the indices {start} to {stop - 1}: {found.text}")


def _listed(numbers: list[int], word: str = "and") -> str:
    shown = [str(number) for number in numbers]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} {word} {shown[-1]}"


def first_few(numbers: list[int]) -> str:
    """List the first eight numbers; consecutive ones as a range.

    >>> first_few([3, 4, 5, 9])
    '3 to 5, 9'
    """
    shown = [
        text
        for run in in_runs(numbers)
        for text in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(number) for number in run])
    ]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
