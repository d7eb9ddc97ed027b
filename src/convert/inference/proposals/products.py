"""Proposals for the matrix of a product.

The source's products of the same rows are candidates. The summed axis is paired column by column, so that no flattening has to
be known. Of the other axes the order is open (`column_orders`), and which rows of a fused matrix a leaf fills (`fillings`); what follows
in the target decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate, Piece, siblings
from convert.inference.candidates.context import Context
from convert.inference.derivation import Arithmetic
from convert.inference.meetings.columns import Pairing, in_other_orders, pair
from convert.inference.meetings.sites import Meeting, Product, products
from convert.inference.proposals import column_orders, fillings, in_one_sum, low_rank, side_by_side
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
TOGETHER = "together"  # kind of a candidate: all experts at once


def propose(context: Context, operation: Operation, side: int) -> Iterator[Candidate]:
    """Yield proposals for the parameters in operand `side`."""
    data, weight = operation.operands[1 - side], operation.operands[side]
    met = replace(data, array=context.replay.value(data))
    target = list(products([_with(operation, side, replace(weight, elements=context.lacking(weight)), met)], side))
    several = len(target) > 1 and all(
        product.numbers for product in target
    )  # no softmax of them, for each row of a batch
    together = list(_of_experts(context, operation, side, target)) if several else []
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

    def atom(stack: tuple[Product, Meeting, Pairing], expert: int) -> fillings.Atom:
        product, meeting, pairing = stack
        axis = product.value.shape[1:].index(count)
        places = np.arange(product.value[0].size).reshape(product.value.shape[1:]).take(expert, axis)
        return fillings.Atom(product, meeting, pairing.numbers, ("stack", axis), places, tuple(pairing.tied.tolist()))

    for chosen in itertools.chain.from_iterable(
        itertools.permutations(stacks, parts) for parts in (1, *fillings.IN_TURNS)
    ):
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
    if not 1 < len(target) <= column_orders.MAX_INDEX or not all(product.numbers for product in target):
        return
    size, out = target[0].numbers[0].shape[0], math.prod(target[0].numbers[0].shape[1:])
    of_groups: list[dict[Any, fillings.Atom]] = []
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
    if context.level > 0 and context.turns(operation.results[0]):
        for chosen in fillings.turned(atoms, out, context.last_sizes(operation.results[0])):
            yield from _candidate(context, chosen, numbers, read)
    for atom in atoms:
        if len(atom.columns) == out:
            yield from _candidate(context, [(atom, slice(0, out))], numbers, read)
    for chosen in fillings.as_taken(atoms, context.taken.of(operation), out):
        yield from _candidate(context, chosen, numbers, read)
    is_cut = bool(context.cuts(operation.results[0], -1))  # into gate and up; queries of several heads are not
    for chosen in fillings.of_one_expert(atoms, out) if is_cut else ():
        yield from _candidate(context, chosen, numbers, read)
    for chosen in fillings.fillings(atoms, out, context.level):
        yield from _candidate(context, chosen, numbers, read)
    for chosen in fillings.in_turns(atoms, out) if context.level > 0 else ():
        yield from _candidate(context, chosen, numbers, read)
    data = operation.operands[1 - side]
    yield from side_by_side.propose(
        context, operation, data, target, lambda rows: _weight(context, operation, side, group).reshape(size, out)[rows]
    )
    if context.level > 0:
        yield from low_rank.propose(context, target)


def _beside_another(
    context: Context, operation: Operation, atoms: Sequence[fillings.Atom], numbers: Sequence[Array], read: Any
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
    taken: Sequence[Array] = (),
) -> Iterator[Candidate]:
    """Yield proposals for a matrix of which leaves fill some columns each, or which is some columns of a leaf.

    Args:
        kernels: matrices of the source whose rows are in the target's order, with the columns of the data that are tied.
        numbers: numbers of the target's elements, [I, O].
        read: returns some columns of the target's matrix.
        whole: whether one of them may be the whole matrix, in another order.
        cuts: lengths of the parts of the target's columns that the source may have in another order.
        taken: the parts that the target takes of its columns.
    """
    out = numbers[0].shape[1]
    atoms = []
    for product, meeting, tied in kernels:
        rows = np.arange(len(product.value))
        flat = product.numbers[0].reshape(len(rows), -1)
        size = flat.shape[1]
        of_parts_ = column_orders.as_cut(size, cuts) if size == out else ()
        for order, columns, _ in itertools.chain(
            column_orders.of_taken(context.source.taken.of(meeting.operation), size, out),
            column_orders.orders(product.value.shape[1:], out, context.level),
            of_parts_,
        ):
            if len(columns) <= out and context.free(flat[:, columns]):
                atoms.append(fillings.Atom(product, meeting, rows, order, columns, tied))
    for atom in atoms:
        if len(atom.columns) == out and (whole or out < atom.product.value[0].size):
            yield from _candidate(context, [(atom, slice(0, out))], numbers, read)
    for chosen in fillings.as_taken(atoms, taken, out):
        yield from _candidate(context, chosen, numbers, read)
    for chosen in fillings.fillings(atoms, out, context.level):
        yield from _candidate(context, chosen, numbers, read)
    for chosen in fillings.in_turns(atoms, out) if context.level > 0 else ():
        yield from _candidate(context, chosen, numbers, read)


def _candidate(
    context: Context, chosen: Sequence[tuple[fillings.Atom, Any]], numbers: Sequence[Array], read: Any
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
    if all(len(np.unique(n[list(tied)], axis=0)) == 1 for n in numbers):
        tied = ()  # the elements that they meet are the same, as those of a bias that is added up over positions
    rows = "fused rows, " if len(chosen) > 1 else ""
    kind = (
        "product",
        tuple(
            (fillings.layout(atom.order), atom.meeting.operation.where, fillings.lies(part)) for atom, part in chosen
        ),
    )
    rope = next((atom.rope for atom, _ in chosen if atom.rope), "")
    places = tuple(fillings.place(atom.order) for atom, _ in chosen)
    steps = tuple(fillings.place(atom.order, atom.number) for atom, _ in chosen)
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


def _atoms(context: Context, target: Product, out: int, operation: Operation) -> Iterator[fillings.Atom]:
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
    channels = 1 if operation.name == "convolution" else -1
    lasts = context.sizes_behind(operation.results[0], channels) if context.level > 0 else ()
    shared = context.shared(operation.results[0]) if context.level > 0 else 1
    map_ = context.map_of(operation.results[0])
    turns = context.level > 0 and context.turns(operation.results[0])
    parts = context.taken.by_use(operation)
    seen = set()
    for product, meeting, pairing in paired:
        size = math.prod(product.value.shape[1:])
        gated = bool(cuts) or not heads
        number = column_orders.numbered(place, count, product.value.shape[1:], out)
        orders = column_orders.orders(product.value.shape[1:], out, context.level, number, turns=turns, gates=gated)
        taken = column_orders.of_taken(context.source.taken.of(meeting.operation), size, out)
        sets = context.source.taken.sets(meeting.operation)
        alone = list(column_orders.taken_alone(sets, size, out, heads, number))
        of_leaf = column_orders.by_leaf(context, product)
        of_heads = column_orders.head_by_head(size, heads), column_orders.in_groups(size, heads, shared)
        transposed = operation.settings.get("transposed") and out == size  # other leaves of its inputs may be smaller
        of_taps = column_orders.with_taps(target.numbers[0].shape[1:]) if transposed else ()
        further = (
            of_taps,
            column_orders.as_cut(size, cuts),
            column_orders.by_use(parts, context.source.taken.by_use(meeting.operation) if parts else ()),
            *of_heads,
            column_orders.turned_by_head(alone, heads if turns else ()),
            column_orders.in_other_sets(sets, context.taken.sets(operation), size) if context.level > 0 else (),
        )
        as_split = column_orders.turned(size, lasts)  # first, as the stored order was tried at the level before
        for order, columns, rope in itertools.chain(
            taken, column_orders.as_map(size, map_), as_split, alone, orders, of_leaf, *further
        ):
            tied = tuple(pairing.tied.tolist())
            atom = fillings.Atom(product, meeting, pairing.numbers, order, columns, tied, rope, number)
            numbers = product.numbers[0].reshape(len(product.value), -1)[:, columns]
            cut = order[0] == "index"  # a network of a stack is also a product of its own, as a form has it
            key = (numbers[pairing.numbers].tobytes(), len(product.numbers), cut)
            if key not in seen and context.free(numbers):
                seen.add(key)
                yield atom
