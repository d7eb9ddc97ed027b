"""Proposals for what is added to data or multiplies it.

Each element is paired by the data that it meets, so that no axis is guessed and biases of fused layers need no rule of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import COMPUTE, Candidate, Piece
from convert.inference.candidates.context import Context
from convert.inference.derivation import Arithmetic, Role
from convert.inference.meetings.columns import Columns, Pairing, columns_of_rows, matches, pair
from convert.inference.meetings.sites import Meeting, columns_met, role_of
from convert.inference.proposals import others
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
MAX_VECTORS = 24  # so many leaves are tried by what they give, those nearest to the last match first
MAX_FACTORS = 4  # of a value that several parameters make
BEHIND_PRODUCT = ("behind a product",)


def propose(context: Context, operation: Operation, side: int) -> Iterator[Candidate]:
    """Yield proposals for operand `side` of a sum, difference, product or quotient of elements."""
    weight = operation.operands[side]
    if not weight.elements:  # as the squares of a codebook, added up
        yield from others.any_leaf(context, operation, side)
        return
    elements = context.lacking(weight)
    met = context.met(operation)
    x = np.broadcast_to(met, np.broadcast_shapes(met.shape, weight.array.shape))
    role = role_of(operation)
    found = False
    for proposals in (
        _by_columns(context, operation, side, met, x, role),
        anywhere(context, elements, x, role),
        _by_rows(context, operation, side, x, role),
    ):
        for candidate in proposals:
            found = True
            yield candidate
        if found:
            return
    yield from _by_result(context, elements)
    if role is Role.SCALE and context.level > 0:
        yield from _behind_product(context, elements)
    yield _absent(context, elements, role)


def _first(numbers: Array, wanted: Array) -> Array:
    """Return where each of the wanted numbers first stands."""
    known, first = np.unique(numbers.ravel(), return_index=True)
    return first[np.searchsorted(known, wanted)]


def _by_columns(
    context: Context, operation: Operation, side: int, met: Array, x: Array, role: Role
) -> Iterator[Candidate]:
    """Yield the source's operands that meet the same data in the same role."""
    weight = operation.operands[side]
    merged: list[Candidate] = []
    alone = False  # whether a leaf fits by itself: then tables are added up at a further level
    found = context.near_first(context.source.same_data(role, met, context.tolerance))
    for meeting in sorted(found, key=lambda meeting: _is_sum_of_tables(context, meeting.weight)):
        source = meeting.weight
        if alone and context.level == 0 and _is_sum_of_tables(context, source):
            continue
        yield from _all_factors(context, weight, x, meeting, role)
        for t, s in itertools.product(context.lacking(weight), source.elements):
            one = columns_met([x], t)
            for pairing, order in _pairings(t, s, one, meeting.columns(s), context.tolerance):
                if not context.free(pairing.numbers, one.numbers):
                    continue
                spots = _first(s, pairing.numbers)
                operand = _sign(operation, side, meeting) * np.broadcast_to(source.array, s.shape).ravel()[spots]
                every = np.arange(source.array.size).reshape(source.array.shape)
                places = np.broadcast_to(every, s.shape).ravel()[spots]
                here = _first(t, one.numbers)

                def read(t: Array = t, here: Array = here) -> Array:
                    value: Array = np.broadcast_to(context.replay.value(weight), t.shape).ravel()[here]
                    return value

                tied = tuple(pairing.tied.tolist())
                pieces = context.fitted([one.numbers], [pairing.numbers], operand, read, meeting, places)
                computed = pieces is not None and any(p.arithmetic is Arithmetic.COMPUTED for p in pieces)
                if pieces is not None and not (computed and len(source.elements) > 1):
                    alone = True
                    yield Candidate(pieces, "columns of the data", ("columns", role, *order), tied)
                    continue
                theta = context.source.theta
                same = context.pieces(one.numbers, pairing.numbers, theta[pairing.numbers], Arithmetic.SAME, meeting)
                by = "columns of the data; merged with another factor"
                merged.append(Candidate(same, by, ("merged", role, *order), tied))
                if pieces is not None:
                    merged.append(Candidate(pieces, "columns of the data", ("computed", role, *order), tied))
    yield from merged


def _is_sum_of_tables(context: Context, value: Value) -> bool:
    return sum(size > 1 for size in value.array.shape) > 1 and context.source.is_sum(value)


def _sign(operation: Operation, side: int, meeting: Meeting) -> int:
    """Return -1 where one program subtracts what the other adds."""
    return -1 if _subtracts(operation, side) != _subtracts(meeting.operation, meeting.side) else 1


def _subtracts(operation: Operation, side: int) -> bool:
    return operation.name.removesuffix("_") == "sub" and side == 1


def _all_factors(context: Context, weight: Value, x: Array, meeting: Meeting, role: Role) -> Iterator[Candidate]:
    """Yield the source's operand where several parameters make it, element by element, as a decay: all of them at once."""
    lacking, source = context.lacking(weight), meeting.weight
    if not 1 < len(lacking) <= min(len(source.elements), MAX_FACTORS):
        return
    t = max(lacking, key=lambda numbers: len(np.unique(numbers)))
    one = columns_met([x], t)
    for s in source.elements:
        for pairing, order in _pairings(t, s, one, meeting.columns(s), context.tolerance):
            here, spots = _first(t, one.numbers), _first(s, pairing.numbers)
            target = [np.broadcast_to(numbers, t.shape).ravel()[here] for numbers in lacking]
            chosen = [np.broadcast_to(numbers, s.shape).ravel()[spots] for numbers in source.elements]
            if not all(context.free(np.unique(numbers)) for numbers in chosen):
                continue
            operand = np.broadcast_to(source.array, s.shape).ravel()[spots]
            places = np.broadcast_to(np.arange(source.array.size).reshape(source.array.shape), s.shape).ravel()[spots]

            def read(shape: tuple[int, ...] = t.shape, here: Array = here) -> Array:
                value: Array = np.broadcast_to(context.replay.value(weight), shape).ravel()[here]
                return value

            pieces = context.fitted(target, chosen, operand, read, meeting, places)
            if pieces is not None and not any(p.arithmetic is Arithmetic.COMPUTED for p in pieces):
                tied = tuple(pairing.tied.tolist())
                yield Candidate(
                    tuple(map(_once, pieces)), "columns of the data; all factors", ("factors", role, *order), tied
                )


def _once(piece: Piece) -> Piece:
    """Return a piece whose elements stand once each: a factor may be the same for a row."""
    _, first = np.unique(piece.elements, return_index=True)
    return piece if len(first) == len(piece.elements) else piece.only(np.sort(first))


def _pairings(
    t: Array, s: Array, one: Columns, two: Columns, tolerance: float
) -> Iterator[tuple[Pairing, tuple[int, ...]]]:
    """Yield the pairings of the columns of two parameters; where columns are equal, one for each order of the axes that is possible.

    A kernel that a style multiplies meets one number for each of its input channels.
    """
    pairing = pair(one, two, tolerance)
    if pairing is None:
        return
    several = False
    t, s = t.squeeze(), s.squeeze()
    if len(pairing.tied) and t.ndim > 1 and sorted(t.shape) == sorted(s.shape) and len(one.numbers) == t.size:
        for order in itertools.permutations(range(s.ndim)):
            turned = s.transpose(order)
            if turned.shape != t.shape:
                continue
            here, there = np.searchsorted(one.numbers, t.ravel()), np.searchsorted(two.numbers, turned.ravel())
            near = np.abs(one.sums[:, here] - two.sums[:, there]) <= tolerance * one.scales[:, here]
            if near.all():
                several = True
                chosen = np.empty(t.size, int)
                chosen[here] = turned.ravel()
                yield Pairing(chosen, pairing.tied), order
    if not several:
        yield pairing, ()


def _by_rows(context: Context, operation: Operation, side: int, x: Array, role: Role) -> Iterator[Candidate]:
    """Yield the vectors that these rows meet in the source, together with others: the bias of an expert that sees all rows there."""
    weight = operation.operands[side]
    if len(weight.elements) != 1 or x.ndim == 0:
        return
    numbers = np.broadcast_to(weight.elements[0], x.shape).reshape(-1, x.shape[-1])
    rows = x.reshape(numbers.shape)
    if not len(rows) or (numbers != numbers[0]).any():
        return
    found = context.source.some_rows_met(role, rows, context.tolerance)
    for product, meeting in sorted(found, key=lambda item: abs(item[1].index - context.near)):
        pairing = pair(columns_of_rows([rows]), product.columns, context.tolerance)
        if pairing is None or not context.free(product.numbers[0][pairing.numbers], numbers[0]):
            continue

        def read() -> Array:
            value: Array = np.broadcast_to(context.replay.value(weight), x.shape).reshape(numbers.shape)[0]
            return value

        chosen = pairing.numbers
        pieces = context.fitted(
            [numbers[0]], [product.numbers[0][chosen]], product.value[chosen], read, meeting, product.places[chosen]
        )
        if pieces is not None:
            yield Candidate(pieces, "rows of the data", ("rows met", role), tuple(pairing.tied.tolist()))


def anywhere(context: Context, elements: tuple[Array, ...], x: Array, role: Role) -> Iterator[Candidate]:
    """Yield what each element's own column meets, wherever in the source it is: biases and scales of fused layers, and sums of biases."""
    if len(elements) != 1:
        return
    target = columns_met([x], elements[0])
    plain = context.source.same_columns(role, target, context.tolerance)
    yield from _anywhere(context, target, plain, role)
    sums = context.source.same_columns(role, target, context.tolerance, sums=True) if role is Role.SHIFT else []
    if sums:  # other gates may have one bias
        yield from _anywhere(context, target, [*sums, *plain], role, "sums")


def _anywhere(
    context: Context, target: Columns, meetings: Sequence[Meeting], role: Role, *kind: str
) -> Iterator[Candidate]:
    """Yield what each element meets in the first of these meetings that has its column."""
    chosen, owner = np.full(len(target.numbers), -1), np.full(len(target.numbers), -1)
    found: list[Meeting] = []
    for meeting in meetings:
        columns = meeting.columns(meeting.names)
        one, two = _without_ties(*matches(target, columns, context.tolerance))
        if not context.free(
            _in_leaf(meeting, columns.numbers[two]), target.numbers[one]
        ):  # the rest of the leaf may be another layer's
            continue
        once = len(np.unique(two)) == len(two) or context.level > 1  # one gate may be two of the target's
        if len(np.unique(one)) != len(one) or not once or not len(one):
            continue
        one, two = one[chosen[one] < 0], two[chosen[one] < 0]
        chosen[one], owner[one] = columns.numbers[two], len(found)
        found.append(meeting)
    if (chosen < 0).any():
        if (chosen >= 0).any() and role is Role.SHIFT:  # the source lacks the other biases
            rest = target.numbers[chosen < 0]
            pieces = context.pieces(rest, np.full(len(rest), -1), np.zeros(len(rest)), Arithmetic.CONSTANT, None, 0.0)
            pieces += _owned(context, target.numbers, chosen, owner, found)
            by = "columns of the data; zeros where the source adds nothing"
            yield Candidate(pieces, by, ("partly", role, *kind))
        return
    if len(np.unique(np.stack([owner, chosen]), axis=1).T) == len(chosen) or context.level > 1:
        yield Candidate(
            _owned(context, target.numbers, chosen, owner, found), "columns of the data", ("anywhere", role, *kind)
        )


def _without_ties(one: Array, two: Array) -> tuple[Array, Array]:
    """Return pairs of equal columns; of those that have equal ones beside them, as the zeros that a mask makes, the pairs that are as far apart as the others."""
    counts = np.bincount(one)[one] * np.bincount(two)[two]
    steps, times = np.unique((one - two)[counts == 1], return_counts=True)
    if not len(steps) or (counts == 1).all():
        return one, two
    kept = (counts == 1) | (one - two == steps[np.argmax(times)])
    return one[kept], two[kept]


def _in_leaf(meeting: Meeting, names: Array) -> Array:
    """Return the numbers of elements by what they are called; of a sum those of its first leaf."""
    elements: Array = meeting.weight.elements[0]
    return names if len(meeting.weight.elements) == 1 else elements.ravel()[names]


def _owned(context: Context, target: Array, chosen: Array, owner: Array, found: list[Meeting]) -> tuple[Any, ...]:
    pieces: tuple[Any, ...] = ()
    for k, meeting in enumerate(found):
        here = owner == k
        if here.any():
            numbers, places, way = _in_leaf(meeting, chosen[here]), None, Arithmetic.SAME
            values = context.source.theta[numbers]
            if len(meeting.weight.elements) > 1:
                places, way = chosen[here], Arithmetic.COMPUTED
                values = meeting.weight.array.ravel()[places]
            pieces += context.pieces(target[here], numbers, values, way, meeting, places=places)
    return pieces


def _by_result(context: Context, elements: tuple[Array, ...]) -> Iterator[Candidate]:
    """Yield vectors of this size: the source multiplied in another order, and only the result tells."""
    names = np.unique(elements[0])
    names = names[names >= 0]
    seen: set[int] = set()
    for meeting in context.near_first([*context.source.meetings[Role.SCALE], *context.source.meetings[Role.SHIFT]]):
        for s in meeting.weight.elements:
            ids = np.unique(s)
            ids = ids[ids >= 0]
            if len(ids) != len(names) or not len(ids) or ids[0] in seen or not context.free(ids):
                continue
            if len(seen) == MAX_VECTORS:
                return
            seen.add(ids[0])
            for way, compute in COMPUTE.items():
                pieces = context.pieces(names, ids, compute(context.source.theta[ids]), way, meeting)
                yield Candidate(pieces, "what it gives", ("result", way))


def _behind_product(context: Context, elements: tuple[Array, ...]) -> Iterator[Candidate]:
    """Yield vectors that the source sums over with the products of two values: ``(h * u) @ w``, and not ``(h * w) @ u.T``."""
    names = np.unique(elements[0])
    names = names[names >= 0]
    seen: set[bytes] = set()
    for meeting in context.near_first(context.source.meetings[Role.PRODUCT]):
        weight = meeting.weight
        if len(weight.elements) != 1 or max(weight.array.shape, default=0) != weight.array.size:
            continue
        ids = weight.elements[0].ravel()
        if len(ids) != len(names) or (ids < 0).any() or ids.tobytes() in seen or not context.free(ids):
            continue
        if len(seen) == MAX_VECTORS:
            return
        seen.add(ids.tobytes())
        pieces = context.pieces(names, ids, context.source.theta[ids], Arithmetic.SAME, meeting)
        yield Candidate(pieces, "what a product of two values gives", BEHIND_PRODUCT)


def _absent(context: Context, elements: tuple[Array, ...], role: Role) -> Candidate:
    """Return the proposal that the source has no such parameter: it adds zeros, or multiplies by ones."""
    names = np.unique(elements[0])
    names = names[names >= 0]
    number = 0.0 if role is Role.SHIFT else 1.0
    pieces = context.pieces(
        names, np.full(len(names), -1), np.full(len(names), number), Arithmetic.CONSTANT, None, number
    )
    return Candidate(pieces, "the source has no such parameter", ("absent", role))
