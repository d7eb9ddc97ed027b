"""The orders in which a matrix of the target may have the columns that a leaf of the source gives, and RoPE's pairs within them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from convert.inference.candidates.context import Context
from convert.inference.forms.products.taken_columns import Part, one_or_several
from convert.inference.meetings.sites import Product

Array = np.ndarray[Any, np.dtype[Any]]
Order = tuple[tuple[Any, ...], Array, str]  # what it is called, columns of the flattened axes, how pairs were reordered
GATES = (2, 3, 4)  # of a recurrent layer, in one leaf
MAX_CUTS = 4  # of a result, whose parts may have any order in the source
MAX_BY_USE = 48  # orders of parts that are used in the same way
MAX_INDEX = 64  # an axis of at most this size may be spread over several tensors


def orders(
    shape: Sequence[int], out: int, level: int, number: int = 0, *, turns: bool = False, gates: bool = True
) -> Iterator[Order]:
    """Yield (order, columns of the flattened axes, RoPE) of the ways to make at most `out` columns of these axes.

    Args:
        number: of the module in a list.
        turns: whether RoPE may follow.
        gates: whether the columns may be those of gates, and not of heads.
    """
    places = np.arange(math.prod(shape)).reshape(shape)
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if places.size <= out:
        for order in itertools.permutations(axes):
            one = [axis for axis in range(len(shape)) if axis not in order]
            yield ("axes", *order), places.transpose(*one, *order).ravel(), ""
            if level > 0 and order and shape[order[-1]] % 2 == 0:
                pairs = _pairs(("axes", *order), places.transpose(*one, *order), shape[order[-1]])
                yield from ((way, columns, rope if turns else "") for way, columns, rope in pairs)
    if len(axes) > 1:  # axes that are spread over several tensors: [2, D, F], experts
        for cut in (*((axis,) for axis in axes), *itertools.combinations(axes, 2)):
            yield from _cut(places, sorted(cut, key=lambda axis: -shape[axis]), out, number, turns=turns and level > 0)
    if gates and level > 0 and places.size == out and len(axes) == 1:  # gates in another order
        for count in GATES:
            width = out // count
            for start in range(0, out, width) if out % count == 0 else ():
                yield ("block", start, width), places.ravel()[start : start + width], ""
    if places.size > out:  # a fused matrix that the target splits: blocks, or every n-th block
        yield from _blocks(places.ravel(), out, level, number)


def _cut(places: Array, axes: Sequence[int], out: int, number: int, *, turns: bool) -> Iterator[Order]:
    """Yield the columns at each place along some axes, at first those at the number along the first of them.

    Args:
        turns: whether RoPE follows, so that pairs may have the other order, as in the keys of a leaf that has keys and values.
    """
    sizes = [places.shape[axis] for axis in axes]
    columns = places.size // math.prod(sizes)
    if max(sizes) > MAX_INDEX or columns > out or (len(axes) > 1 and columns < out):
        return
    at = np.moveaxis(places, axes, range(len(axes)))
    for index in sorted(np.ndindex(*sizes), key=lambda index: index[0] != number):
        rest = [axis for axis, size in enumerate(at[index].shape) if size > 1]
        for order in itertools.permutations(rest):
            one = [axis for axis in range(at[index].ndim) if axis not in order]
            part = at[index].transpose(*one, *order)
            yield ("index", tuple(axes), index, *order), part.ravel(), ""
            if turns and order and part.shape[-1] % 2 == 0:
                yield from _pairs(("index", tuple(axes), index, *order), part, part.shape[-1])


def numbered(number: int, count: int, shape: Sequence[int], out: int) -> int:
    """Return the number of a matrix among those of a leaf; -1 where the tensor has as many as neither an axis of the leaf nor the leaf.

    Queries, keys and values of each head in turn are three times as many: of these the first one that is free comes first.
    """
    return number if not count or count in shape or (len(shape) == 1 and count * out == shape[0]) else -1


def by_leaf(context: Context, product: Product) -> Iterator[Order]:
    """Yield the columns of each leaf, where the source has joined several."""
    first = product.numbers[0].reshape(len(product.value), -1)[0]
    owners = np.searchsorted(context.source.starts, first, "right")
    changes = np.flatnonzero(np.diff(owners)) + 1
    if len(changes) and (first >= 0).all():
        for columns in np.split(np.arange(len(first)), changes):
            yield ("leaf", len(columns)), columns, ""


def as_map(size: int, axes: Sequence[int]) -> Iterator[Order]:
    """Yield the columns of a matrix whose results the source makes a map of, with the channels last where the target has them first.

    Every value behind it has the same elements in both orders, up to the convolution; so both are tried at any level.
    """
    if math.prod(axes) != size or len(axes) < 2:
        return
    (channels, *space), (*others, last) = axes, axes
    yield ("map", "channels last"), np.moveaxis(np.arange(size).reshape(*space, channels), -1, 0).ravel(), ""
    yield ("map", "channels first"), np.moveaxis(np.arange(size).reshape(last, *others), 0, -1).ravel(), ""


def with_taps(shape: Sequence[int]) -> Iterator[Order]:
    """Yield the columns of a matrix that the target has as the kernel of a transposed convolution, [channels, taps], and the source in any order."""
    for order in itertools.permutations(range(len(shape))):
        places = np.arange(math.prod(shape)).reshape([shape[axis] for axis in order])
        yield ("taps", *order), places.transpose(np.argsort(order)).ravel(), ""


def as_cut(size: int, cuts: Sequence[int]) -> Iterator[Order]:
    """Yield the columns of a matrix whose parts the source takes in another order than the target."""
    for order, columns in orders_of_parts(size, cuts):
        yield ("parts", *order), columns, ""


def in_other_sets(of_source: Sequence[Array], of_target: Sequence[Array], size: int) -> Iterator[Order]:
    """Yield the columns of a matrix of which one program takes parts such as every second column, and the other one others.

    Args:
        of_source, of_target: sets of columns that each takes.
        size: how many columns there are.
    """
    for count in range(2, MAX_CUTS + 1):
        target = next(_all_columns(of_target, count, size), None)
        for chosen in _all_columns(of_source, count, size) if target is not None else ():
            for order in itertools.permutations(range(count)):
                parts = [of_source[chosen[k]] for k in order]
                if [len(part) for part in parts] == [len(of_target[k]) for k in target or ()]:
                    columns = np.zeros(size, int)
                    for k, part in zip(target or (), parts, strict=True):
                        columns[of_target[k]] = part
                    yield ("sets", *order), columns, ""


def _all_columns(sets: Sequence[Array], count: int, size: int) -> Iterator[tuple[int, ...]]:
    """Yield so many of some sets that have each column once."""
    for chosen in itertools.combinations(range(len(sets)), count):
        if sum(len(sets[k]) for k in chosen) == size and {int(n) for k in chosen for n in sets[k]} == {*range(size)}:
            yield chosen


def of_taken(parts: Sequence[Array], size: int, out: int) -> Iterator[Order]:
    """Yield the columns that the source takes together, as the queries of all groups of a fused matrix; several parts if they make up all."""
    if sum(map(len, parts)) == size:
        for chosen, columns in one_or_several(parts):
            if len(columns) == out or (len(chosen) == 1 and len(columns) < out):
                yield ("taken", *chosen), columns, ""


def taken_alone(sets: Sequence[Array], size: int, out: int, heads: Sequence[int], number: int) -> Iterator[Order]:
    """Yield the columns that the source takes alone: queries, keys or values, below each other or in turns, `(heads, 3, size of a head)`.

    Args:
        sets: of columns that the source takes.
        out: how many columns the target has.
        heads: sizes of the axis into which it splits them; those that are a half or a third of its columns have whole heads.
        number: of the module in a list; the columns with this number come first.
    """
    found: list[tuple[int, tuple[Any, ...], Array]] = []
    for columns in sets:
        count, steps = size // len(columns), np.flatnonzero(np.diff(columns) != 1)
        width = int(steps[0]) + 1 if len(steps) else len(columns)
        part = out in (2 * len(columns), 3 * len(columns)) and any(head > 2 and width % head == 0 for head in heads)
        if size % len(columns) or not (part or len(columns) == out):
            continue
        k = int(columns[0]) // width
        turns = np.arange(size).reshape(-1, count, width) if size % (count * width) == 0 else None
        if turns is not None and k < count and np.array_equal(turns[:, k].ravel(), columns):
            order = ("every", count, width, k) if len(steps) else ("block", int(columns[0]), width)
            found.append((k, order, columns))
    for _, order, columns in sorted(found, key=lambda one: (one[0] != number, one[0])):
        yield order, columns, ""


def turned_by_head(orders: Sequence[Order], heads: Sequence[int]) -> Iterator[Order]:
    """Yield columns with the pairs that RoPE turns in the other order, head by head.

    Args:
        orders: of columns that lie head by head.
        heads: sizes of the axis into which the target splits the result.
    """
    for (order, columns, _), head in itertools.product(orders, heads):
        if 2 < head < len(columns) and len(columns) % head == 0 and head % 2 == 0:
            yield from _pairs((*order, "heads", head), columns, head)


def by_use(of_target: Sequence[Part], of_source: Sequence[Part]) -> Iterator[Order]:
    """Yield the columns of parts that the source uses as the target uses its own, such as scales, shifts and gates in another order."""
    if len(of_target) < 2 or sum(part.end - part.start for part in of_target) > sum(p.end - p.start for p in of_source):
        return
    fitting = [
        [
            k
            for k, other in enumerate(of_source)
            if (other.end - other.start, other.uses) == (part.end - part.start, part.uses)
        ]
        for part in of_target
    ]
    ways = (way for way in itertools.product(*fitting) if len({*way}) == len(way))
    for way in itertools.islice(ways, MAX_BY_USE):
        if any(two != one + 1 for one, two in itertools.pairwise(way)):
            columns = [np.arange(of_source[k].start, of_source[k].end) for k in way]
            yield ("by use", *way), np.concatenate(columns), ""


def head_by_head(size: int, heads: Sequence[int]) -> Iterator[Order]:
    """Yield the columns of a matrix of heads that only the code splits, with RoPE's pairs reordered within each head.

    Args:
        heads: sizes of the axis into which the target splits the result.
    """
    for head in heads:
        if 2 < head < size and size % head == 0 and head % 2 == 0:
            yield from _pairs(("heads", head), np.arange(size), head)


def in_groups(size: int, heads: Sequence[int], shared: int) -> Iterator[Order]:
    """Yield the columns of a matrix of heads of which several meet the same one, as its neighbours or in turns.

    Args:
        heads: sizes of the axis into which the target splits the result.
        shared: so many meet the same one.
    """
    for head in heads if shared > 1 else ():
        groups, rest = divmod(size, head * shared)
        if groups > 1 and not rest:
            for of in (shared, groups):
                yield ("groups", head, of), np.arange(size).reshape(of, -1, head).swapaxes(0, 1).ravel(), ""


def turned(size: int, lasts: Sequence[int]) -> Iterator[Order]:
    """Yield the columns of a matrix whose results are two axes that the source has in the other order.

    Args:
        lasts: sizes of the axis into which the target splits the result.
    """
    for last in lasts:
        if 1 < last < size and size % last == 0:
            yield ("turned", last), np.arange(size).reshape(last, -1).T.ravel(), ""


def orders_of_parts(size: int, cuts: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Yield which part is at each place of the source, and where the elements of the target's parts are there; not as they are.

    Args:
        cuts: lengths of the target's parts.
    """
    if len(cuts) > MAX_CUTS or sum(cuts) != size:
        return
    for order in itertools.permutations(range(len(cuts))):
        if order != tuple(range(len(cuts))):
            ends = np.cumsum([cuts[k] for k in order])
            runs = {k: np.arange(end - cuts[k], end) for k, end in zip(order, ends, strict=True)}
            yield order, np.concatenate([runs[k] for k in range(len(cuts))])


def _blocks(flat: Array, out: int, level: int, number: int) -> Iterator[Order]:
    step = math.gcd(out, flat.size)
    if flat.size // step <= MAX_INDEX:
        for start in sorted(range(0, flat.size - out + 1, step), key=lambda start: start != number * out):
            yield ("block", start, out), flat[start : start + out], ""
    if level > 0 and flat.size % out == 0:
        count = flat.size // out
        for width in range(1, out):
            if out % width == 0:
                for k in range(count):
                    yield ("every", count, width, k), flat.reshape(-1, count, width)[:, k].ravel(), ""


def _pairs(order: tuple[Any, ...], places: Array, last: int) -> Iterator[Order]:
    """Yield the two reorderings of the pairs that RoPE turns, or of a gate and what it opens, within the last axis."""
    halves = np.arange(last).reshape(-1, 2).T.ravel()  # interleaved pairs become two halves
    rows = places.reshape(-1, last)
    yield (*order, "halves"), rows[:, halves].ravel(), "interleaved to half-split"
    yield (*order, "pairs"), rows[:, np.argsort(halves)].ravel(), "half-split to interleaved"
