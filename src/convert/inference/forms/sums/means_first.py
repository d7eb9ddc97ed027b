"""Subtract a mean before its factor: ``x s + (b - m s)`` becomes ``(x - m) s + b``. Quotients in the same way.

One program folds a batch norm into one factor and one bias, as a frozen one, and the other has the mean, the factor and the bias apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.forms.elements import LAYOUTS, before_moves, moved_by, spread_like, step, without_idle
from convert.programs.program import Array, Operation, Program, Value

SIGNS = {"add": (1, 1), "add_any": (1, 1), "sub": (1, -1)}  # of the operands
FACTORS = {"mul": np.multiply, "div": np.divide}


@dataclass(frozen=True, eq=False)
class _Term:
    """A term of a sum.

    Attributes:
        sign: 1, or -1 where it is subtracted.
        value: what it is.
        moves: how its elements are moved before they are added.
    """

    sign: int
    value: Value
    moves: tuple[Operation, ...] = ()

    @property
    def moved(self) -> Value:
        """The value as it is added."""
        value = self.value
        for move in self.moves:
            value = moved_by(move, value)
        return value


@dataclass(frozen=True, eq=False)
class _Product:
    """A product of data and parameters, or a quotient.

    Attributes:
        name: of the operation.
        data: what is multiplied.
        factor: of parameters.
    """

    name: str
    data: Value
    factor: Value


def means_first(program: Program, *, keep: bool) -> Program:
    """Return the program with the means in front of the factors that they have in common with data.

    Args:
        program: the record.
        keep: whether the sums as they were stay in the program as well.
    """
    made_by = program.made_by
    operations: list[Operation] = []
    found = False
    for operation in program.operations:
        made = _apart(operation, made_by) if operation.results[0].data else []
        operations += [operation, *made] if keep or not made else made
        found |= bool(made)
    if not found:
        return program
    return replace(program, operations=tuple(operations if keep else without_idle(operations, program)))


def _apart(operation: Operation, made_by: Mapping[Value, Operation]) -> list[Operation]:
    """Return what takes the place of a sum; nothing where its parameters have no factor in common with its data."""
    sides = _sides(operation)
    data = [side for side in sides if side.value.data]
    product = _product(made_by.get(data[0].value)) if len(data) == 1 and data[0].sign == 1 else None
    if product is None:
        return []
    terms = [term for side in sides if side not in data for term in _terms(side, made_by)]
    means = {term: mean for term in terms if (mean := _mean(term, product, made_by)) is not None}
    rest = [term for term in terms if term not in means]
    if not means:
        return []
    made: list[Operation] = []
    x = product.data
    for mean in means.values():
        made += _added(operation, x, mean)
        x = made[-1].results[0]
    run, last = FACTORS[product.name], operation.results[0]
    total = Value(run(x.array, product.factor.array), True, x.leaves | product.factor.leaves)
    if not rest:
        if total.array.shape != last.array.shape:
            return []
        total = last
    made.append(step(operation, product.name, (x, product.factor), total, run))
    for k, term in enumerate(rest, 1):
        made += _added(operation, total, term, last if k == len(rest) else None)
        total = made[-1].results[0]
    return made


def _sides(operation: Operation) -> list[_Term]:
    """Return the operands of a sum or a difference; nothing for another operation."""
    if operation.name not in SIGNS or len(operation.operands) != 2 or operation.settings.get("alpha", 1) != 1:
        return []
    return [_Term(sign, value) for sign, value in zip(SIGNS[operation.name], operation.operands, strict=True)]


def _terms(term: _Term, made_by: Mapping[Value, Operation]) -> Iterator[_Term]:
    """Yield the terms that a term of parameters is a sum of; itself if it is none."""
    _, made, moves = before_moves(term.value, made_by, LAYOUTS)
    sides = _sides(made) if made is not None and term.value.of_parameters else []
    if made is None or not sides:
        yield term
        return
    spread = spread_like(made)
    for side in sides:
        yield from _terms(_Term(term.sign * side.sign, side.value, (spread, *moves, *term.moves)), made_by)


def _product(operation: Operation | None) -> _Product | None:
    """Return an operation as a product of data and parameters, or a quotient; None if it is none."""
    if operation is None or operation.name not in FACTORS or len(operation.operands) != 2:
        return None
    sides = operation.operands if operation.name == "div" else sorted(operation.operands, key=lambda x: not x.data)
    data, factor = sides
    return _Product(operation.name, data, factor) if data.data and factor.of_parameters else None


def _mean(term: _Term, product: _Product, made_by: Mapping[Value, Operation]) -> _Term | None:
    """Return what a term has the factor of a product with; None if it has another factor, or at other elements."""
    _, made, moves = before_moves(term.value, made_by, LAYOUTS)
    if made is None or made.name != product.name or len(made.operands) != 2:
        return None
    spread = spread_like(made)
    wanted = term.moved.array
    for value in made.operands if product.name == "mul" else made.operands[:1]:
        mean = _Term(term.sign, value, (spread, *moves, *term.moves))
        with np.errstate(all="ignore"):
            if value.of_parameters and _same(FACTORS[product.name](mean.moved.array, product.factor.array), wanted):
                return mean
    return None


def _same(one: Array, two: Array) -> bool:
    """Whether two arrays are equal where one is repeated to the shape of the other."""
    try:
        one, two = np.broadcast_arrays(one, two)
    except ValueError:
        return False
    return bool(np.allclose(one, two, rtol=1e-12, atol=0))


def _added(like: Operation, data: Value, term: _Term, result: Value | None = None) -> Iterator[Operation]:
    """Yield the operations that move a term to its place, and the one that adds it to data, or subtracts it.

    Args:
        like: an operation at whose place they are.
        data: what the term is added to.
        term: the term.
        result: what the last one gives; None: a value of its own.
    """
    value = term.value
    for move in term.moves:
        moved = moved_by(move, value)
        yield replace(move, operands=(value,), results=(moved,))
        value = moved
    name, run = ("add", np.add) if term.sign == 1 else ("sub", np.subtract)
    made = Value(run(data.array, value.array), True, data.leaves | value.leaves) if result is None else result
    yield step(like, name, (data, value), made, run)
