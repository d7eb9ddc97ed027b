"""Proposals for the matrix of a product.

The source's products of the same rows are candidates. The summed axis is paired column by column, so that no flattening has to
be known. Of the other axes the order is open, and which rows of a fused matrix a leaf fills; what follows in the target decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate, Piece, siblings
from convert.inference.candidates.context import Context
from convert.inference.derivation import Arithmetic
from convert.inference.meetings.columns import Pairing, in_other_orders, pair
from convert.inference.meetings.sites import Meeting, Product, products
from convert.inference.proposals import in_one_sum, low_rank, side_by_side
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
MAX_PARTS = 8  # rows of a fused matrix come from at most so many leaves
MAX_FILLINGS = 400  # so many orders of the leaves in a fused matrix are tried
MAX_SPACED = 128  # leaves of the same data among which every n-th is tried
MAX_STEPS = 20_000  # so many times a leaf is looked at as the next part of a fused matrix
GATES = (2, 3, 4)  # of a recurrent layer, in one leaf
TOGETHER = "together"  # kind of a candidate: all experts at once
IN_TURNS = (2, 3)  # so many leaves lie in a fused matrix head by head
MAX_CUTS = 4  # of a result, whose parts may have any order in the source
MAX_INDEX = 64  # an axis of at most this size may be spread over several tensors


@dataclass(frozen=True, eq=False)
class _Atom:
    """A matrix [I, O] of the source, in the target's order of I.

    Attributes:
        product, meeting: where it is from.
        order: the order of the axes in O, and which index of another axis; equal for equal layouts.
        columns: for each column of O its position in the product's further axes.
        tied: columns of the data that could not be told apart.
        rope: how pairs were reordered.
        number: which of several equal matrices the target's is.
    """

    product: Product
    meeting: Meeting
    rows: Array
    order: tuple[Any, ...]
    columns: Array
    tied: tuple[int, ...]
    rope: str = ""
    number: int = 0

    def of(self, array: Array) -> Array:
        """Return [I, O] of an array like the product's weight."""
        flat: Array = array.reshape(len(array), -1)
        return flat[self.rows][:, self.columns]


def propose(context: Context, operation: Operation, side: int) -> Iterator[Candidate]:
    """Yield proposals for the parameters in operand `side`."""
    data, weight = operation.operands[1 - side], operation.operands[side]
    met = replace(data, array=context.replay.value(data))
    target = list(products([_with(operation, side, replace(weight, elements=context.lacking(weight)), met)], side))
    together = list(_of_experts(context, operation, side, target)) if len(target) > 1 else []
    together = together or list(_of_one_meeting(context, operation, side, target))
    yield from together
    if together and context.strict:
        return
    for group, product in enumerate(target):
        if not product.numbers or not _lacks(context, operation, side, group, len(target)):
            continue
        yield from _matrix(context, operation, side, group, product)
        return


def _with(operation: Operation, side: int, weight: Value, data: Value) -> Operation:
    operands = list(operation.operands)
    operands[side], operands[1 - side] = weight, data
    return replace(operation, operands=tuple(operands))


def _weight(context: Context, operation: Operation, side: int, group: int) -> Array:
    value = context.replay.value(operation.operands[side])
    return list(products([operation], side, value))[group].value


def _lacks(context: Context, operation: Operation, side: int, group: int, groups: int) -> bool:
    return groups == 1 or bool(np.isnan(_weight(context, operation, side, group)).any())


def _of_experts(context: Context, operation: Operation, side: int, target: Sequence[Product]) -> Iterator[Candidate]:
    """Yield proposals for the matrices of all experts at once, where the source has a stack of matrices for them, or for each part of the columns."""
    count, (size, *rest) = len(target), target[0].numbers[0].shape
    out = math.prod(rest)
    if any(not np.array_equal(x, y) for of in target for x, y in zip(of.rows, target[0].rows, strict=True)):
        return
    stacks = [
        (product, meeting, paired)
        for product, meeting in context.source.same_rows(target[0].rows, context.tolerance)
        if (paired := pair(target[0].columns, product.columns, context.tolerance)) is not None
        and len(product.numbers) == 1
        and product.value.ndim == 3
        and count in product.value.shape[1:]
        and context.free(product.numbers[0])
    ]

    def atom(stack: tuple[Product, Meeting, Pairing], expert: int) -> _Atom:
        product, meeting, pairing = stack
        axis = product.value.shape[1:].index(count)
        places = np.arange(product.value[0].size).reshape(product.value.shape[1:]).take(expert, axis)
        return _Atom(product, meeting, pairing.numbers, ("stack", axis), places, tuple(pairing.tied.tolist()))

    for chosen in itertools.chain.from_iterable(itertools.permutations(stacks, parts) for parts in (1, *IN_TURNS)):
        widths = [product.value[0].size // count for product, _, _ in chosen]
        below = np.split(np.arange(out), np.cumsum(widths)[:-1])
        turns = (
            [np.arange(k, out, len(chosen)) for k in range(len(chosen))] if len(chosen) > 1 == len(set(widths)) else []
        )
        for way, parts in (("below", below), ("turns", turns)) if sum(widths) == out else ():
            found: list[Candidate] = []
            for expert, product in enumerate(target) if parts else ():
                numbers = [n.reshape(size, out) for n in product.numbers]

                def read(part: Array, expert: int = expert) -> Array:
                    return _weight(context, operation, side, expert).reshape(size, out)[:, part]

                atoms = [(atom(stack, expert), part) for stack, part in zip(chosen, parts, strict=True)]
                found += _candidate(context, atoms, numbers, read)
            plain = all(p.arithmetic is Arithmetic.SAME and p.factor == 1 for one in found for p in one.pieces)
            if len(found) == count and plain:
                pieces = tuple(map(_as_one, zip(*(one.pieces for one in found), strict=True)))
                yield replace(found[0], pieces=pieces, kind=(TOGETHER, way, found[0].kind))


def _of_one_meeting(
    context: Context, operation: Operation, side: int, target: Sequence[Product]
) -> Iterator[Candidate]:
    """Yield proposals for the matrices of all heads at once, each with rows of its own, where one product of the source has the same."""
    if not 1 < len(target) <= MAX_INDEX or not all(product.numbers for product in target):
        return
    size, out = target[0].numbers[0].shape[0], math.prod(target[0].numbers[0].shape[1:])
    of_groups: list[dict[Any, _Atom]] = []
    for product in target:
        whole = (atom for atom in _atoms(context, product, out, operation) if len(atom.columns) == out)
        of_groups.append({(id(atom.meeting), atom.order): atom for atom in whole})
        if not of_groups[-1]:
            return
    for key in of_groups[0]:
        found: list[Candidate] = []
        for group, (product, atoms) in enumerate(zip(target, of_groups, strict=True)):
            if key not in atoms:
                break

            def read(part: slice, group: int = group) -> Array:
                return _weight(context, operation, side, group).reshape(size, out)[:, part]

            numbers = [n.reshape(size, out) for n in product.numbers]
            found += _candidate(context, [(atoms[key], slice(0, out))], numbers, read)
        pieces = [piece for one in found for piece in one.pieces]
        plain = all(p.arithmetic is Arithmetic.SAME and p.factor == 1 for p in pieces)
        if len(found) == len(pieces) == len(target) and plain and len({piece.tensor for piece in pieces}) == 1:
            yield replace(found[0], pieces=(_as_one(pieces),), kind=(TOGETHER, "heads", found[0].kind))


def _as_one(pieces: Sequence[Piece]) -> Piece:
    """Return the pieces of a tensor that the experts of one leaf become as one."""
    elements, numbers, values = (
        np.concatenate([getattr(piece, of) for piece in pieces]) for of in ("elements", "numbers", "values")
    )
    return replace(pieces[0], elements=elements, numbers=numbers, values=values, places=None)


def _matrix(context: Context, operation: Operation, side: int, group: int, target: Product) -> Iterator[Candidate]:
    size, out = target.numbers[0].shape[0], math.prod(target.numbers[0].shape[1:])
    numbers = [n.reshape(size, out) for n in target.numbers]
    atoms = list(_atoms(context, target, out, operation))

    def read(part: slice | Array) -> Array:
        return _weight(context, operation, side, group).reshape(size, out)[:, part]

    if context.level > 0:
        same_order = list(_beside_another(context, operation, atoms, numbers, read))
        if same_order:
            yield from same_order
            return
    for atom in atoms:
        if len(atom.columns) == out:
            yield from _candidate(context, [(atom, slice(0, out))], numbers, read)
    for chosen in _as_taken(atoms, context.taken.of(operation), out) if context.level > 0 else ():
        yield from _candidate(context, chosen, numbers, read)
    is_cut = bool(context.cuts(operation.results[0], -1))  # into gate and up; queries of several heads are not
    for chosen in _of_one_expert(atoms, out) if is_cut else ():
        yield from _candidate(context, chosen, numbers, read)
    for chosen in _fillings(atoms, out, context.level):
        yield from _candidate(context, chosen, numbers, read)
    for chosen in _in_turns(atoms, out) if context.level > 0 else ():
        yield from _candidate(context, chosen, numbers, read)
    data = operation.operands[1 - side]
    yield from side_by_side.propose(
        context, operation, data, target, lambda rows: _weight(context, operation, side, group).reshape(size, out)[rows]
    )
    if context.level > 0:
        yield from low_rank.propose(context, target)


def _beside_another(
    context: Context, operation: Operation, atoms: Sequence[_Atom], numbers: Sequence[Array], read: Any
) -> Iterator[Candidate]:
    """Yield the matrices with the columns of the one whose product the target adds, where the sum is a value of the source."""
    other = in_one_sum.other_term(context, operation)
    if other is None:
        return
    out = numbers[0].shape[1]
    for columns in in_one_sum.columns(context, other):
        for atom in {id(atom.meeting): atom for atom in atoms}.values() if len(columns) == out else ():
            size = atom.product.value[0].size
            if columns.max() >= size or not context.free(atom.product.numbers[0].reshape(-1, size)[:, columns]):
                continue
            aligned = replace(atom, order=("beside another",), columns=columns, rope="")
            for candidate in _candidate(context, [(aligned, slice(0, out))], numbers, read):
                if in_one_sum.gives_value(context, operation, other, candidate):
                    yield candidate


def of_parts(
    context: Context,
    kernels: Sequence[tuple[Product, Meeting, tuple[int, ...]]],
    numbers: Sequence[Array],
    read: Any,
    *,
    whole: bool = False,
    cuts: Sequence[int] = (),
) -> Iterator[Candidate]:
    """Yield proposals for a matrix of which leaves fill some columns each, or which is some columns of a leaf.

    Args:
        kernels: matrices of the source whose rows are in the target's order, with the columns of the data that are tied.
        numbers: numbers of the target's elements, [I, O].
        read: returns some columns of the target's matrix.
        whole: whether one of them may be the whole matrix, in another order.
        cuts: lengths of the parts of the target's columns that the source may have in another order.
    """
    out = numbers[0].shape[1]
    atoms = []
    for product, meeting, tied in kernels:
        rows = np.arange(len(product.value))
        flat = product.numbers[0].reshape(len(rows), -1)
        of_parts_ = _as_cut(flat.shape[1], cuts) if flat.shape[1] == out else ()
        for order, columns, _ in itertools.chain(_orders(product.value.shape[1:], out, context.level), of_parts_):
            if len(columns) <= out and context.free(flat[:, columns]):
                atoms.append(_Atom(product, meeting, rows, order, columns, tied))
    for atom in atoms:
        if len(atom.columns) == out and (whole or out < atom.product.value[0].size):
            yield from _candidate(context, [(atom, slice(0, out))], numbers, read)
    for chosen in _fillings(atoms, out, context.level):
        yield from _candidate(context, chosen, numbers, read)
    for chosen in _in_turns(atoms, out) if context.level > 0 else ():
        yield from _candidate(context, chosen, numbers, read)


def _candidate(
    context: Context, chosen: Sequence[tuple[_Atom, Any]], numbers: Sequence[Array], read: Any
) -> Iterator[Candidate]:
    pieces: list[Any] = []
    for atom, part in chosen:
        product = atom.product
        found = context.fitted(
            [n[:, part] for n in numbers],
            [atom.of(n) for n in product.numbers],
            atom.of(product.value),
            partial(read, part),
            atom.meeting,
            atom.of(product.places),
        )
        if found is None:
            return
        pieces += found
    tied = tuple(sorted({k for atom, _ in chosen for k in atom.tied}))
    rows = "fused rows, " if len(chosen) > 1 else ""
    kind = ("product", tuple((_layout(atom.order), atom.meeting.operation.where, _lies(part)) for atom, part in chosen))
    rope = next((atom.rope for atom, _ in chosen if atom.rope), "")
    places = tuple(_place(atom.order) for atom, _ in chosen)
    steps = tuple(_place(atom.order, atom.number) for atom, _ in chosen)
    yield Candidate(tuple(pieces), f"{rows}columns of the data", kind, tied, rope, (places, steps))


def _number(context: Context, target: Product, operation: Operation) -> tuple[int, int]:
    """Return which of several equal matrices one of the target is, and of how many: of those of its tensor, or of the modules of a list.

    0 for both: there is one, or nothing says how many.
    """
    elements = target.numbers[0]
    of_several = any(
        x.of_parameters and x.array.size > elements.size for x in operation.operands
    )  # heads in one product
    names = context.owners(elements) if len(target.numbers) == 1 and not of_several else set()
    for name in names if len(names) == 1 else ():
        start = int(elements.min()) - context.replay.program.first_element[name]
        whole = context.replay.program.parameters[name].array.size
        if elements.size < whole and int(np.ptp(elements)) + 1 == elements.size and start % elements.size == 0:
            return start // elements.size, whole // elements.size
    return int(([word for word in operation.module.split(".") if word.isdecimal()] or ["0"])[-1]), 0


def _numbered(number: int, count: int, shape: Sequence[int], out: int) -> int:
    """Return the number of a matrix among those of a leaf; -1 where the tensor has as many as neither an axis of the leaf nor the leaf.

    Queries, keys and values of each head in turn are three times as many: of these the first one that is free comes first.
    """
    return number if not count or count in shape or (len(shape) == 1 and count * out == shape[0]) else -1


def _atoms(context: Context, target: Product, out: int, operation: Operation) -> Iterator[_Atom]:
    """Yield the matrices that may be the target's or a part of it, whole ones first.

    Those come first that are parts of the matrix that the same layer for another head was found in.

    Args:
        operation: of the target; of a stack, the matrix comes first that has the same number.
    """
    paired = []
    for product, meeting in context.source.same_rows(target.rows, context.tolerance):
        if product.value.shape[:1] != target.numbers[0].shape[:1]:
            continue
        pairing = pair(target.columns, product.columns, context.tolerance)
        if pairing is not None and product.numbers:
            paired.append((product, meeting, pairing))
            others = () if context.strict else in_other_orders(pairing, target.columns)
            paired += [(product, meeting, other) for other in others]
    last, same = context.of_siblings.get(siblings(operation), (operation, None))
    if last is operation:  # what was tried for it before, and refuted
        same = None
    paired.sort(key=lambda item: (item[1].index != same, abs(item[1].index - context.near)))
    place, count = _number(context, target, operation)
    cuts = context.cuts(operation.results[0], -1) if context.level > 0 else ()
    heads = context.last_sizes(operation.results[0]) if context.level > 0 else ()
    lasts = context.sizes_behind(operation.results[0]) if context.level > 0 else ()
    shared = context.shared(operation.results[0]) if context.level > 0 else 1
    map_ = context.map_of(operation.results[0])
    turns = context.level > 0 and context.turns(operation.results[0])
    seen = set()
    for product, meeting, pairing in paired:
        size = math.prod(product.value.shape[1:])
        gated = bool(cuts) or not heads
        number = _numbered(place, count, product.value.shape[1:], out)
        orders = _orders(product.value.shape[1:], out, context.level, number, turns=turns, gates=gated)
        taken = context.source.taken.of(meeting.operation) if context.level > 0 else []
        of_leaf = _by_leaf(context, product)
        of_heads = _head_by_head(size, heads), _in_groups(size, heads, shared)
        of_taps = _with_taps(target.numbers[0].shape[1:]) if operation.settings.get("transposed") else ()
        further = of_taps, _as_cut(size, cuts), *of_heads, _turned(size, lasts), _of_taken(taken, size, out)
        for order, columns, rope in itertools.chain(_as_map(size, map_), orders, of_leaf, *further):
            tied = tuple(pairing.tied.tolist())
            atom = _Atom(product, meeting, pairing.numbers, order, columns, tied, rope, number)
            numbers = product.numbers[0].reshape(len(product.value), -1)[:, columns]
            key = (numbers[pairing.numbers].tobytes(), len(product.numbers))
            if key not in seen and context.free(numbers):
                seen.add(key)
                yield atom


def _orders(
    shape: Sequence[int], out: int, level: int, number: int = 0, *, turns: bool = False, gates: bool = True
) -> Iterator[tuple[tuple[Any, ...], Array, str]]:
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
            yield from _cut(places, sorted(cut, key=lambda axis: -shape[axis]), out, number)
    if gates and level > 0 and places.size == out and len(axes) == 1:  # gates in another order
        for count in GATES:
            width = out // count
            for start in range(0, out, width) if out % count == 0 else ():
                yield ("block", start, width), places.ravel()[start : start + width], ""
    if places.size > out:  # a fused matrix that the target splits: blocks, or every n-th block
        yield from _blocks(places.ravel(), out, level, number)


def _cut(places: Array, axes: Sequence[int], out: int, number: int) -> Iterator[tuple[tuple[Any, ...], Array, str]]:
    """Yield the columns at each place along some axes, at first those at the number along the first of them."""
    sizes = [places.shape[axis] for axis in axes]
    columns = places.size // math.prod(sizes)
    if max(sizes) > MAX_INDEX or columns > out or (len(axes) > 1 and columns < out):
        return
    at = np.moveaxis(places, axes, range(len(axes)))
    for index in sorted(np.ndindex(*sizes), key=lambda index: index[0] != number):
        rest = [axis for axis, size in enumerate(at[index].shape) if size > 1]
        for order in itertools.permutations(rest):
            one = [axis for axis in range(at[index].ndim) if axis not in order]
            yield ("index", tuple(axes), index, *order), at[index].transpose(*one, *order).ravel(), ""


def _by_leaf(context: Context, product: Product) -> Iterator[tuple[tuple[Any, ...], Array, str]]:
    """Yield the columns of each leaf, where the source has joined several."""
    first = product.numbers[0].reshape(len(product.value), -1)[0]
    owners = np.searchsorted(context.source.starts, first, "right")
    changes = np.flatnonzero(np.diff(owners)) + 1
    if len(changes) and (first >= 0).all():
        for columns in np.split(np.arange(len(first)), changes):
            yield ("leaf", len(columns)), columns, ""


def _as_map(size: int, axes: Sequence[int]) -> Iterator[tuple[tuple[Any, ...], Array, str]]:
    """Yield the columns of a matrix whose results the source makes a map of, with the channels last where the target has them first.

    Every value behind it has the same elements in both orders, up to the convolution; so both are tried at any level.
    """
    if math.prod(axes) != size or len(axes) < 2:
        return
    (channels, *space), (*others, last) = axes, axes
    yield ("map", "channels last"), np.moveaxis(np.arange(size).reshape(*space, channels), -1, 0).ravel(), ""
    yield ("map", "channels first"), np.moveaxis(np.arange(size).reshape(last, *others), 0, -1).ravel(), ""


def _with_taps(shape: Sequence[int]) -> Iterator[tuple[tuple[Any, ...], Array, str]]:
    """Yield the columns of a matrix that the target has as the kernel of a transposed convolution, [channels, taps], and the source in any order."""
    for order in itertools.permutations(range(len(shape))):
        places = np.arange(math.prod(shape)).reshape([shape[axis] for axis in order])
        yield ("taps", *order), places.transpose(np.argsort(order)).ravel(), ""


def _as_cut(size: int, cuts: Sequence[int]) -> Iterator[tuple[tuple[Any, ...], Array, str]]:
    """Yield the columns of a matrix whose parts the source takes in another order than the target."""
    for order, columns in orders_of_parts(size, cuts):
        yield ("parts", *order), columns, ""


def _of_taken(parts: Sequence[Array], size: int, out: int) -> Iterator[tuple[tuple[Any, ...], Array, str]]:
    """Yield the columns that the source takes together, as the queries of all groups of a fused matrix."""
    for k, columns in enumerate(parts if sum(map(len, parts)) == size else ()):
        if len(columns) <= out:
            yield ("taken", k), columns, ""


def _as_taken(atoms: Sequence[_Atom], parts: Sequence[Array], out: int) -> Iterator[list[tuple[_Atom, Any]]]:
    """Yield the ways to fill the columns that the target takes together, where they are not below each other."""
    if sum(map(len, parts)) != out or all((np.diff(columns) == 1).all() for columns in parts):
        return
    plain = [atom for atom in atoms if atom.order[-1] not in ("halves", "pairs")]  # of all parts, they change nothing

    def fill(chosen: list[_Atom]) -> Iterator[list[_Atom]]:
        if len(chosen) == len(parts):
            yield chosen
            return
        for atom in plain:
            if len(atom.columns) == len(parts[len(chosen)]) and _goes_with(atom, chosen):
                yield from fill([*chosen, atom])

    for chosen in itertools.islice(fill([]), MAX_FILLINGS):
        yield list(zip(chosen, parts, strict=True))


def _head_by_head(size: int, heads: Sequence[int]) -> Iterator[tuple[tuple[Any, ...], Array, str]]:
    """Yield the columns of a matrix of heads that only the code splits, with RoPE's pairs reordered within each head.

    Args:
        heads: sizes of the axis into which the target splits the result.
    """
    for head in heads:
        if 2 < head < size and size % head == 0 and head % 2 == 0:
            yield from _pairs(("heads", head), np.arange(size), head)


def _in_groups(size: int, heads: Sequence[int], shared: int) -> Iterator[tuple[tuple[Any, ...], Array, str]]:
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


def _turned(size: int, lasts: Sequence[int]) -> Iterator[tuple[tuple[Any, ...], Array, str]]:
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


def _blocks(flat: Array, out: int, level: int, number: int) -> Iterator[tuple[tuple[Any, ...], Array, str]]:
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


def _pairs(order: tuple[Any, ...], places: Array, last: int) -> Iterator[tuple[tuple[Any, ...], Array, str]]:
    """Yield the two reorderings of the pairs that RoPE turns, or of a gate and what it opens, within the last axis."""
    halves = np.arange(last).reshape(-1, 2).T.ravel()  # interleaved pairs become two halves
    rows = places.reshape(-1, last)
    yield (*order, "halves"), rows[:, halves].ravel(), "interleaved to half-split"
    yield (*order, "pairs"), rows[:, np.argsort(halves)].ravel(), "half-split to interleaved"


def _fillings(atoms: Sequence[_Atom], out: int, level: int) -> Iterator[list[tuple[_Atom, Any]]]:
    """Yield the ways to fill the columns of a fused matrix: leaves below each other."""
    whole = any(len(atom.columns) == out for atom in atoms)
    small = [atom for atom in atoms if len(atom.columns) < out and (level > 1 or atom.order[0] != "index")]
    if whole:  # only gates are reordered within
        small = [atom for atom in small if atom.order[0] in ("leaf", "block")]

    yield from _evenly_spaced(small, out)
    if level == 0 and len(small) > MAX_PARTS:
        return
    reached = _sums({len(atom.columns) for atom in small}, out)

    def fill(start: int, chosen: list[_Atom]) -> Iterator[list[_Atom] | None]:
        """Yield the ways to go on, and None for every leaf that is looked at."""
        if start == out:
            if {atom.order[0] for atom in chosen} != {"index"} or len({atom.product for atom in chosen}) > 1:
                yield list(chosen)
            return
        rest = reached[MAX_PARTS - len(chosen) - 1]
        for atom in small:
            yield None
            end = start + len(atom.columns)
            if out - end in rest and _goes_with(atom, chosen, again=level > 1):
                chosen.append(atom)
                yield from fill(end, chosen)
                chosen.pop()

    full = (found for found in itertools.islice(fill(0, []), MAX_STEPS) if found is not None)
    for atoms_ in itertools.islice(full, MAX_FILLINGS):
        yield _below_each_other(atoms_)


def _of_one_expert(atoms: Sequence[_Atom], out: int) -> Iterator[list[tuple[_Atom, Any]]]:
    """Yield the ways to fill a fused matrix with the matrices that several stacks have at one place: gate and up of an expert."""
    at: dict[Any, list[_Atom]] = {}
    for atom in atoms:
        if atom.order[0] == "index" and len(atom.columns) < out:
            at.setdefault((atom.order[2], _layout(atom.order)), []).append(atom)
    for of in at.values():
        for count in IN_TURNS:
            for chosen in itertools.permutations(of, count):
                if {len(atom.columns) * count for atom in chosen} == {out}:
                    yield _below_each_other(chosen)
                    turns = np.arange(out).reshape(-1, count).T
                    yield list(zip(chosen, turns, strict=True))


def _evenly_spaced(atoms: Sequence[_Atom], out: int) -> Iterator[list[tuple[_Atom, Any]]]:
    """Yield the ways to fill a fused matrix with every n-th leaf: the queries of each head, of a list of heads with all their layers.

    One leaf may stand apart: the values that all heads share.
    """
    wide = sorted((atom for atom in atoms if atom.order[0] == "axes"), key=lambda atom: atom.meeting.index)
    for width in {len(atom.columns): None for atom in wide}:
        of_width = [atom for atom in wide if len(atom.columns) == width]
        count, rest = divmod(out, width)
        if rest or not 2 < count <= len(of_width) <= MAX_SPACED:
            continue
        others = [[*of_width[:k], *of_width[k + 1 :]] for k in range(len(of_width)) if (len(of_width) - 1) % count == 0]
        exact = [of for of in (of_width, *others) if len(of) % count == 0]
        steps = [(of, len(of) // count) for of in exact] + [(of_width, n) for n in range(1, len(of_width) // count + 1)]
        for of, step in steps:
            for start in range(len(of) - step * (count - 1)):
                chosen = of[start::step][:count]
                if all(_goes_with(atom, chosen[:k]) for k, atom in enumerate(chosen)):
                    yield _below_each_other(chosen)


def _below_each_other(atoms: Sequence[_Atom]) -> list[tuple[_Atom, Any]]:
    ends = np.cumsum([len(atom.columns) for atom in atoms])
    return [(atom, slice(end - len(atom.columns), end)) for atom, end in zip(atoms, ends, strict=True)]


def _sums(widths: Collection[int], limit: int) -> list[set[int]]:
    """Return what at most 0, 1, ... parts of these widths can add up to, within a limit."""
    found = [{0}]
    while len(found) < MAX_PARTS:
        more = {total + width for total in found[-1] for width in widths}
        found.append({total for total in found[-1] | more if total <= limit})
    return found


def _in_turns(atoms: Sequence[_Atom], out: int) -> Iterator[list[tuple[_Atom, Any]]]:
    """Yield the ways to fill a fused matrix head by head: queries, keys and values of the first head, then those of the second.

    Leaves without heads alternate row by row.
    """
    headed = [atom for atom in atoms if atom.order[0] == "axes" and isinstance(atom.order[-1], int)]
    ways = itertools.chain.from_iterable(
        itertools.permutations(headed, count) for count in IN_TURNS if count <= len(headed)
    )
    for chosen in itertools.islice(ways, MAX_FILLINGS):
        size = len(chosen[0].columns)
        head = chosen[0].product.value.shape[1 + chosen[0].order[-1]] if len(chosen[0].order) > 2 else 1
        if size * len(chosen) == out and all(_goes_with(atom, chosen[:k]) for k, atom in enumerate(chosen)):
            rows = np.arange(out).reshape(-1, len(chosen), head)
            if all(atom.product.value.shape == chosen[0].product.value.shape for atom in chosen):
                yield [(atom, rows[:, k].ravel()) for k, atom in enumerate(chosen)]


def _goes_with(atom: _Atom, chosen: Sequence[_Atom], again: bool = False) -> bool:
    """Whether a leaf may be a further part: another one (or the same again), and laid out as the others of its shape."""
    for other in chosen:
        if atom is other and again:
            continue
        if atom.product is other.product and np.intersect1d(atom.columns, other.columns).size:
            return False
        same_shape = atom.product.value.shape == other.product.value.shape
        if same_shape and _layout(atom.order) != _layout(other.order) and not _turned_apart(atom, other):
            return False
    return True


def _turned_apart(one: _Atom, other: _Atom) -> bool:
    """Whether RoPE turns one of two leaves, and the other one, as the values beside queries and keys, is laid out as it is."""
    plain, turned = sorted((one, other), key=lambda atom: bool(atom.rope))
    as_it_is = plain.order[0] == "axes" and plain.order[-1] not in ("halves", "pairs")
    return as_it_is and not plain.rope and bool(turned.rope)


def _layout(order: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an order without the index at which an axis is cut."""
    if order[0] == "taken":
        return order[:1]
    if order[0] == "block":
        return order[0], order[2]
    return (*order[:2], *order[3:]) if order[0] == "index" else order


def _lies(part: slice | Array) -> tuple[int, ...]:
    """Return which columns of a fused matrix a leaf fills, where others lie between them; none if its columns lie side by side."""
    return () if isinstance(part, slice) else tuple(part.tolist())


def _place(order: tuple[Any, ...], number: int = 0) -> tuple[int, ...]:
    """Return the index at which axes are cut, the first one from the number of a matrix on; none if none is."""
    if order[0] == "block":
        return (order[1] - number * order[2],)
    if order[0] == "index":
        first, *rest = order[2]
        return (first - number, *rest)
    return order[1:] if order[0] == "taken" else ()
