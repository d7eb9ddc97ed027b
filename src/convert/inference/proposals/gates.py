"""Proposals for all parameters of a recurrent cell at once: the source's gates of the same data, in every order.

A library packs the kernels of the gates in an order of its own, in one leaf or in several, may join the input and the state, and
adds one bias or two. A gate is the same sum on both sides: once each gate is paired, each tensor of the target is known.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import COMPUTE, Candidate, Piece
from convert.inference.candidates.context import Context
from convert.inference.derivation import Arithmetic, Role
from convert.inference.forms.elements import behind_moves
from convert.inference.meetings.columns import columns_of_rows, pair
from convert.inference.meetings.rows import RowTable
from convert.inference.meetings.sites import Meeting, parameter_operands, products, role_of
from convert.inference.proposals.affine import Bias, Factor, Gate, gates
from convert.inference.proposals.zero_blocks import rows_by_blocks, widths_along_last
from convert.programs.fingerprint import ValueTable
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
MAX_ORDERS = 48  # of the gates of a cell
KIND = ("gates",)  # of the candidates
OTHERS = (Arithmetic.ONE_PLUS, Arithmetic.MINUS_ONE)
OFFSETS = {0.0: Arithmetic.SAME, 1.0: Arithmetic.ONE_PLUS, -1.0: Arithmetic.MINUS_ONE}


class Cells:
    """The recurrent cells of both programs."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._source, self._target = context.source.program, context.replay.program
        self._made_by = {
            result: k for k, operation in enumerate(self._target.operations) for result in operation.results
        }

    @cached_property
    def _recurrent(self) -> frozenset[int]:
        return _recurrent(self._target)

    @cached_property
    def _source_is_recurrent(self) -> bool:
        return bool(_recurrent(self._source))

    @cached_property
    def source_gates(self) -> list[Gate]:
        """The source's gates."""
        return gates(self._source)

    @cached_property
    def target_gates(self) -> list[Gate]:
        """The target's gates."""
        return gates(self._target)

    @cached_property
    def _residual(self) -> tuple[frozenset[bytes], frozenset[bytes]]:
        """The weights of products whose data the source, and the target, add to what they give; at the first step that may be zeros."""
        of_target = {gate for found in self._of_target.values() for gate in found}
        return _residual(self._source, self.source_gates), _residual(self._target, of_target)

    @cached_property
    def _subtracts_from_one(self) -> bool:
        return any(map(_subtracts_from_one, self._source.operations))

    @cached_property
    def _mixing(self) -> frozenset[Value]:
        """The source's sigmoids that mix two values: 1 minus one is the sigmoid of the negated sum, so that a target may have either."""
        users, made_by = self._source.users, self._source.made_by
        sigmoids = {gate.value for gate in self.source_gates if gate.enters == "sigmoid"}
        return frozenset(v for v in sigmoids if any(_mixes(user, made_by) for user in behind_moves(v, users)))

    @cached_property
    def _of_target(self) -> dict[int, list[Gate]]:
        """The target's gates by their products."""
        found: dict[int, list[Gate]] = {}
        for gate in self.target_gates:
            for factor in gate.factors:
                found.setdefault(factor.operation, []).append(gate)
        return found

    @cached_property
    def _of_source(self) -> ValueTable[tuple[Gate, list[_Matrix]]]:
        """The source's gates with their products, and with each one of several, by the data of these."""
        table: ValueTable[tuple[Gate, list[_Matrix]]] = ValueTable(self._context.tolerance)
        for gate, matrices in self._source_matrices:
            table.add(_data(matrices), (gate, matrices))
        return table

    @cached_property
    def _source_matrices(self) -> list[tuple[Gate, list[_Matrix]]]:
        found = []
        for gate in self.source_gates:
            single = [[factor] for factor in gate.factors] if len(gate.factors) > 1 else []
            for factors in (gate.factors, *single):
                found.append((gate, _matrices(self._source.operations, factors, lambda value: value.array)))
        return found

    @cached_property
    def _of_all_steps(self) -> RowTable[tuple[Gate, list[_Matrix]]]:
        """The source's gates with the rows of all steps: one program may begin with the last steps of the longest sequences, where
        another has the last step of each."""
        groups: dict[Any, list[tuple[Gate, list[_Matrix]]]] = {}
        for gate, matrices in self._source_matrices:
            weights = tuple(matrix.numbers.tobytes() for matrix in matrices)
            biases = tuple(bias.numbers.tobytes() for bias in gate.biases)
            groups.setdefault((gate.enters, gate.number, gate.rest, weights, biases), []).append((gate, matrices))
        several = [steps for steps in groups.values() if len(steps) > 1]
        return RowTable([(np.concatenate([_data(matrices) for _, matrices in steps]), steps[0]) for steps in several])

    def propose(self, at: int) -> list[Candidate] | None:
        """Return proposals for the cell that begins with a product of the target; None if it begins with none, or the source has none."""
        cell = self._cell(at) if self._recurrent and self._source_is_recurrent else []
        return list(self._for(cell, at)) if cell else None

    def of_one_product(self, at: int) -> Iterator[Candidate]:
        """Yield proposals for the gates of one product of which some are not the source's as they are.

        They are negated, as those of a cell or a highway that has 1 - z for z, or the source adds 1 to them.
        """
        if not (self._subtracts_from_one or (self._recurrent and self._source_is_recurrent)):
            return
        found = self._of_target.get(at, [])
        if not all(len(gate.factors) == 1 for gate in found) or not found or not self._is_unknown(at, found):
            return
        for candidate in self._for(found, at):
            if any(piece.factor < 0 or piece.arithmetic in OTHERS for piece in candidate.pieces):
                yield candidate

    def made_of_bias(self, bias: Bias, target: Array, way: Arithmetic, sign: float = 1.0) -> list[Piece]:
        """Return a bias of the target that is made of one of the source."""
        meeting = Meeting(bias.operation, (self._source.operations[bias.operation],), bias.side, Role.SHIFT)
        values = sign * COMPUTE[way](self._context.source.theta[bias.numbers])
        return list(self._context.pieces(target, bias.numbers, values, way, meeting, sign))

    def _for(self, cell: Sequence[Gate], at: int) -> Iterator[Candidate]:
        options = [list(self._same(gate, self._met(gate, at))) for gate in cell]
        for way in sorted({way for of in options for *_, way in of}):  # all gates of a cell are given the same data
            in_way = [
                [(gate, made) for gate, made, other in of if other == min(way, max(x for *_, x in of))]
                for of in options
                if of
            ]
            if len(in_way) < len(options):
                return
            every = list(itertools.islice(itertools.product(*in_way), MAX_ORDERS**2))
            once = [pieces for pieces in every if len({gate for gate, _ in pieces}) == len(cell)]
            for chosen in (once or every)[:MAX_ORDERS]:
                pieces = tuple(piece for _, made in chosen for piece in made)
                yield Candidate(pieces, "gates of the same data", (*KIND, way))

    def _cell(self, at: int) -> list[Gate]:
        """Return the target's gates that a product and those of the state make, one for each column; none if they make no cell.

        A product of what another gate of the cell makes, as of a state that is reset, is not known yet, and follows by itself.
        """
        found: list[Gate] = []
        todo, done = [at], set[int]()
        while todo:
            product = todo.pop()
            done.add(product)
            for gate in self._of_target.get(product, ()):
                if (factor := gate.factor(product)) is not None and not any(
                    np.intersect1d(other.columns, factor.columns).size
                    for other in (gate.factor(product) for gate in found)
                    if other is not None
                ):
                    found.append(gate)
                    todo += [f.operation for f in self._met(gate, at) if f.operation not in {*done, *todo}]
        whole = len(done) > 1 and all(self._is_unknown(product, found) for product in done)
        return found if whole and done & self._recurrent else []

    def _met(self, gate: Gate, at: int) -> list[Factor]:
        """Return the products of a gate whose data the target has in front of an operation."""
        operations = self._target.operations
        return [f for f in gate.factors if self._made_by.get(operations[f.operation].data[0], -1) < at]

    def _is_unknown(self, product: int, cell: Sequence[Gate]) -> bool:
        """Whether nothing is known of the weight of a product, and the gates have each of its columns."""
        operation = self._target.operations[product]
        (side,) = parameter_operands(operation)
        (weight,) = products([operation], side)
        columns = [factor.columns for gate in cell if (factor := gate.factor(product)) is not None]
        now = self._context.replay.value(operation.operands[side])
        fed = product in self._recurrent or operation.data[0].array.any()
        return bool(fed and np.isnan(now).all() and sum(map(len, columns)) == weight.value[0].size)

    def _same(self, gate: Gate, met: Sequence[Factor]) -> Iterator[tuple[Gate, list[Piece], int]]:
        """Yield the source's gates of the same data, with what they make of the target's parameters; if there are none, those that have
        its rows at other steps.

        Args:
            gate: of the target.
            met: its products that are known.
        """
        ours = _matrices(self._target.operations, met, self._context.replay.value)
        same = list(self._made(gate, ours, self._of_source.find(_data(ours))))
        yield from same or self._made(gate, ours, self._by_rows(_data(ours)))

    def _made(
        self, gate: Gate, ours: Sequence[_Matrix], found: Iterable[tuple[Gate, list[_Matrix]]]
    ) -> Iterator[tuple[Gate, list[Piece], int]]:
        """Yield those of some gates of the source that are a gate of the target, each once, with what they make of its parameters, and which way this is."""
        seen = set[bytes]()
        for other, theirs in found:
            further = len(gate.factors) - len(ours), len(other.factors) - len(theirs)
            if (other.enters, other.rest) == (gate.enters, gate.rest) and further[0] == further[1]:
                for sign in (1.0, -1.0) if other.value in self._mixing else (1.0,):
                    for way, paired in enumerate(self._paired(ours, theirs)):
                        made = self._made_of(gate, ours, other, theirs, paired, sign)
                        key = b"".join(np.append(piece.numbers, int(piece.factor)).tobytes() for piece in made or ())
                        if made and key not in seen:
                            seen.add(key)
                            yield other, made, way

    def _by_rows(self, data: Array) -> list[tuple[Gate, list[_Matrix]]]:
        """Return the source's gates that have each of these rows at any step, with these rows."""
        return [
            (gate, _with_rows(matrices, rows))
            for (gate, matrices), rows in self._of_all_steps.find(data, self._context.tolerance)
        ]

    def _made_of(
        self,
        gate: Gate,
        ours: Sequence[_Matrix],
        other: Gate,
        theirs: Sequence[_Matrix],
        paired: tuple[Sequence[int], Array],
        sign: float,
    ) -> list[Piece] | None:
        """Return what a gate of the source makes of the parameters of a gate of the target; None if it cannot.

        Args:
            paired: one of `_paired`.
            sign: -1 where the target's gate is the source's negated.
        """
        if ours[0].numbers.shape[1] != theirs[0].numbers.shape[1]:
            return None
        order, rows = paired
        theirs = [theirs[k] for k in order]
        plus = self._diagonal(ours, theirs)
        if plus is None or (plus.any() and sign < 0):
            return None
        plus = plus[rows]
        numbers = np.concatenate([matrix.numbers for matrix in theirs])[rows]
        owner = np.repeat(np.arange(len(theirs)), [len(matrix.numbers) for matrix in theirs])[rows]
        target = np.concatenate([matrix.numbers for matrix in ours])
        theta = self._context.source.theta
        if not self._context.free(numbers, target):
            return None
        found: list[Piece] = []
        for k, matrix in enumerate(theirs):
            if not np.array_equal(matrix.value, theta[matrix.numbers]):
                return None
            for offset in np.unique(plus[owner == k]):
                here = (plus == offset) & (owner == k)[:, None]
                way = OFFSETS[float(offset)]
                values = sign * COMPUTE[way](theta[numbers[here]])
                found += self._context.pieces(target[here], numbers[here], values, way, matrix.meeting, sign)
        biases = self._biases((gate, ours), (other, theirs), sign)
        return None if biases is None else found + biases

    def _diagonal(self, ours: Sequence[_Matrix], theirs: Sequence[_Matrix]) -> Array | None:
        """Return what is added to the source's weights, below each other: ones on the diagonal of one whose data the source adds to its product.

        The target's diagonal has them if the target does not add the data; None where the weights do not show which is which.
        """
        source, target = (
            [_digest(matrix.meeting.operation, matrix.meeting.side) in weights for matrix in of]
            for of, weights in zip((theirs, ours), self._residual, strict=True)
        )
        if len(source) != len(target):
            return (
                None
                if any((*source, *target))
                else np.zeros((sum(len(x.numbers) for x in theirs), theirs[0].numbers.shape[1]))
            )
        added = [
            (float(one) - float(two)) * np.eye(*matrix.numbers.shape)
            for one, two, matrix in zip(source, target, theirs, strict=True)
        ]
        return np.concatenate(added)

    def _paired(self, ours: Sequence[_Matrix], theirs: Sequence[_Matrix]) -> list[tuple[Sequence[int], Array]]:
        """Return orders of the source's products, and for each row of the target's weights that of the source's, below each other; none if they meet other data.

        There are several where the first step has an input of zeros as well as a state of zeros: the next steps tell.
        """
        every = list(itertools.permutations(range(len(theirs))))
        found: list[tuple[Sequence[int], Array]] = []
        for order in every if len(ours) == len(theirs) else ():
            rows = [self._columns([a], [theirs[k]]) for a, k in zip(ours, order, strict=True)]
            if all(row is not None for row in rows):
                starts = np.cumsum([0, *(len(theirs[k].numbers) for k in order)])
                shifted = [row + s for row, s in zip(rows, starts, strict=False) if row is not None]
                found.append((order, np.concatenate(shifted)))
        if found:
            return found
        rows_of_all = self._joined(ours, theirs)
        if rows_of_all is None:
            return []
        of_ours, of_theirs = (
            [width for one in of for width in widths_along_last(one.meeting.operation.data[0], made_by)]
            for of, made_by in ((ours, self._context.made_by), (theirs, self._context.source.made_by))
        )
        by_blocks = list(rows_by_blocks(rows_of_all, _data(ours), _data(theirs), of_ours, of_theirs))
        return [(range(len(theirs)), rows) for rows in by_blocks or [rows_of_all]]

    def _joined(self, ours: Sequence[_Matrix], theirs: Sequence[_Matrix]) -> Array | None:
        """Return for each row of the target's weights that of the source's, where one of both has joined the input and the state.

        A state that is zero at first has the columns of inputs that are zero in each row, as behind a ReLU: of all orders, the first one
        is right in which each input and state has its columns side by side.
        """
        starts = np.cumsum([0, *(len(matrix.numbers) for matrix in ours)])
        as_they_are = None
        for order in itertools.permutations(range(len(ours))):
            rows = self._columns([ours[k] for k in order], theirs)
            if rows is None:
                return None
            as_they_are = rows if as_they_are is None else as_they_are
            if np.array_equal(rows, np.arange(len(rows))):
                return np.argsort(np.concatenate([np.arange(starts[k], starts[k + 1]) for k in order]))
        return as_they_are

    def _columns(self, ours: Sequence[_Matrix], theirs: Sequence[_Matrix]) -> Array | None:
        one, two = _data(ours), _data(theirs)
        if one.shape != two.shape:
            return None
        pairing = pair(columns_of_rows([one]), columns_of_rows([two]), self._context.tolerance)
        if pairing is None or one[:, pairing.tied].any():  # a state of zeros is paired in its order
            return None
        return pairing.numbers

    def _biases(
        self, one: tuple[Gate, Sequence[_Matrix]], two: tuple[Gate, Sequence[_Matrix]], sign: float
    ) -> list[Piece] | None:
        """Return what the source's biases and numbers make of the target's biases; None if these are too few.

        Args:
            one, two: the gates of the target and of the source, with their products in the same order.
            sign: -1 where the target's gate is the source's negated.
        """
        (gate, _), (other, _) = one, two
        free = [own for own in gate.biases if not self._context.are_zeros(own.numbers)]
        offset = sign * other.number - gate.number
        found: list[Piece] = []
        for bias in other.biases:
            at = next((k for k, own in enumerate(free) if _beside(own, *one) == _beside(bias, *two)), 0)
            way = OFFSETS.get(sign * offset)
            if way is None or not free or not self._context.free(bias.numbers, free[at].numbers):
                return None
            found += self.made_of_bias(bias, free.pop(at).numbers, way, sign)
            offset = 0.0
        for bias in free:
            nothing, value = np.full(len(bias.numbers), -1), np.full(len(bias.numbers), offset)
            found += self._context.pieces(bias.numbers, nothing, value, Arithmetic.CONSTANT, None, offset)
            offset = 0.0
        return None if offset else found


def _recurrent(program: Program) -> frozenset[int]:
    """Return the products whose weight meets data more than once, and not only zeros."""
    by_weight: dict[bytes, list[int]] = {}
    for index, operation in enumerate(program.operations):
        for side in parameter_operands(operation) if role_of(operation) is Role.PRODUCT else ():
            if len(operation.operands[side].elements) == 1 and len(operation.data) == 1:
                by_weight.setdefault(_digest(operation, side), []).append(index)
    several = (same for same in by_weight.values() if len(same) > 1)
    return frozenset(
        k for same in several if any(program.operations[j].data[0].array.any() for j in same) for k in same
    )


def _residual(program: Program, found: Iterable[Gate]) -> frozenset[bytes]:
    """Return the weights of the products whose data gates add to what they give."""
    factors = {
        f.operation: f for gate in found if gate.residual >= 0 for f in gate.factors if f.operation == gate.residual
    }
    return frozenset(_digest(program.operations[k], factor.side) for k, factor in factors.items())


def _digest(operation: Operation, side: int) -> bytes:
    """Return what tells the elements of a weight from those of others."""
    return hashlib.blake2b(operation.operands[side].elements[0].tobytes()).digest()


def _mixes(operation: Operation, made_by: Mapping[Value, Operation]) -> bool:
    """Whether an operation subtracts a value from 1, or multiplies it by a difference."""
    if operation.name == "sub":
        return _subtracts_from_one(operation)
    made = (made_by.get(value) for value in operation.data)
    return operation.name == "mul" and any(one is not None and one.name == "sub" for one in made)


def _subtracts_from_one(operation: Operation) -> bool:
    first = operation.operands[0] if operation.name == "sub" else None
    return first is not None and first.constant and first.array.size > 0 and bool((first.array == 1).all())


def _beside(bias: Bias, gate: Gate, matrices: Sequence[_Matrix]) -> int | None:
    """Return which of some products of a gate a bias is added to, if it is one alone; their number for another one."""
    products = [factor.operation for factor in gate.factors if factor.operation in bias.beside]
    known = [matrix.meeting.index for matrix in matrices]
    return [*known, *products].index(products[0]) if len(products) == 1 else None


@dataclass(frozen=True, eq=False)
class _Matrix:
    """A product in a gate.

    Attributes:
        data: the rows of the gate, each once.
        numbers, value: the columns of the gate, of the numbers of the weight's elements and of the weight.
        meeting: of both.
    """

    data: Array
    numbers: Array
    value: Array
    meeting: Meeting


def _matrices(
    operations: Sequence[Operation], factors: Sequence[Factor], read: Callable[[Value], Array]
) -> list[_Matrix]:
    """Return some of the products in a gate. A state that all rows of a batch have is one row."""
    found = []
    for factor in factors:
        operation, side = operations[factor.operation], factor.side
        given = Value(read(operation.data[0]), data=True)
        operands = tuple(x if k == side else given for k, x in enumerate(operation.operands))
        (product,) = products([replace(operation, operands=operands)], side)
        numbers, value = (x.reshape(len(x), -1)[:, factor.columns] for x in (product.numbers[0], product.value))
        meeting = Meeting(factor.operation, (operation,), side, Role.PRODUCT)
        found.append(_Matrix(product.rows[0][factor.rows], numbers, value, meeting))
    _, rows = np.unique(_data(found), axis=0, return_index=True)
    return [replace(matrix, data=matrix.data[rows]) for matrix in found]


def _with_rows(matrices: Sequence[_Matrix], rows: Array) -> list[_Matrix]:
    """Return products with other rows of data, which stand side by side."""
    ends = np.cumsum([matrix.data.shape[1] for matrix in matrices])[:-1]
    return [replace(matrix, data=data) for matrix, data in zip(matrices, np.split(rows, ends, 1), strict=True)]


def _data(matrices: Sequence[_Matrix]) -> Array:
    return np.concatenate([matrix.data for matrix in matrices], axis=1)
