"""Values of data as sums: of products with parameters, of parameters, and of the rest.

A gate of a recurrent cell is such a sum, however its library packs the kernels, adds the biases and cuts the result. The sum of a
value has, for each of its elements, which row and which column of a product it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import move
from convert.inference.meetings.sites import free_axes, parameter_operands, role_of
from convert.programs import jax_elements
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
ADDITIONS = ("add", "add_any")
MAX_PRODUCTS = 2  # of a gate: the input's and the state's
NON_LINEAR = {  # operation -> what a gate enters
    "logistic": "sigmoid",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "max": "relu",
    "relu": "relu",
    "mul": "product",
}


@dataclass(frozen=True, eq=False)
class Term:
    """A term of a sum.

    Attributes:
        at: for each element of the value: which element of the product it is, by row and column, or which number the parameter's
            element has; 0 of other terms; -1 where the term is not added.
        operation: index of the product, or of the operation that adds a parameter; -1 of a number, and of the rest.
        side: position of the parameters among its operands.
        beside: of a parameter: the products among the terms that it was added to.
        number: that is added; 0 of other terms.
        rest: of the rest, where it is added as it is: its value.
    """

    at: Array
    operation: int = -1
    side: int = -1
    beside: tuple[int, ...] = ()
    number: float = 0.0
    rest: Value | None = None


@dataclass(frozen=True)
class Sum:
    """A value of data as a sum. `rest` is what is neither a product with parameters, nor a parameter, nor a number."""

    products: tuple[Term, ...] = ()
    parameters: tuple[Term, ...] = ()
    numbers: tuple[Term, ...] = ()
    rest: tuple[Term, ...] = ()

    def plus(self, other: Sum) -> Sum:
        """Return the sum of both."""
        return Sum(*(getattr(self, name) + getattr(other, name) for name in vars(self)))


@dataclass(frozen=True, eq=False)
class Factor:
    """A product in a gate.

    Attributes:
        operation: its index.
        side: position of the weight among its operands.
        rows: of the data that it multiplies, for each row of the gate.
        columns: of the weight, for each column of the gate.
    """

    operation: int
    side: int
    rows: Array
    columns: Array


@dataclass(frozen=True, eq=False)
class Bias:
    """A parameter that is added to a gate.

    Attributes:
        operation: index of the addition.
        side: position of the parameter among its operands.
        numbers: of the parameter's elements, for each column of the gate.
        beside: the products among the terms that it was added to.
    """

    operation: int
    side: int
    numbers: Array
    beside: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Gate:
    """A sum of one or two products that enters a sigmoid, a tanh, a ReLU or a product of data.

    Attributes:
        value: what the operation that it enters gives, or the part of that which this sum gives.
        enters: what that operation is.
        factors: the products.
        biases: the parameters.
        number: that is added.
        rest: whether anything else is added.
        residual: index of the product whose data is added to what it gives, as by a cell with a residual connection; -1 for none.
    """

    value: Value
    enters: str
    factors: tuple[Factor, ...]
    biases: tuple[Bias, ...]
    number: float
    rest: bool
    residual: int = -1

    def factor(self, operation: int) -> Factor | None:
        """Return its part of a product, by the index of the operation."""
        return next((factor for factor in self.factors if factor.operation == operation), None)


def gates(program: Program) -> list[Gate]:
    """Return the gates of a program, in the order of the operations that they enter."""
    sums: dict[Value, Sum] = {}
    users = program.users
    found = []
    for index, operation in enumerate(program.operations):
        if (enters := NON_LINEAR.get(operation.name)) and (enters != "product" or len(operation.data) > 1):
            for value in dict.fromkeys(operation.data):
                if value in sums:
                    given = operation.results[0]
                    parts = _parts(given, sums[value], users) if enters != "product" else None
                    every = (_gate(part, enters, of, program) for part, of in parts or [(given, sums[value])])
                    found += [gate for gate in every if gate is not None]
        for value, added in zip(operation.results, _sums(index, operation, sums), strict=False):
            if added.products and len(added.products) <= MAX_PRODUCTS:
                sums[value] = added
    return found


def _sums(index: int, operation: Operation, sums: dict[Value, Sum]) -> Sequence[Sum]:
    """Return what the results of an operation are; nothing if it adds and moves no products."""
    sides = parameter_operands(operation)
    if role_of(operation) is Role.PRODUCT and len(sides) == len(operation.data) == 1:
        at = _cells(operation, sides[0])
        return [] if at is None else [Sum((Term(at, index, sides[0]),))]
    if not any(value in sums for value in operation.data):
        return []
    if operation.name in ADDITIONS and operation.settings.get("alpha", 1) == 1:
        return _added(index, operation, sums)
    if operation.name in _moves():
        return _moved(operation, sums)
    return []


def _cells(operation: Operation, side: int) -> Array | None:
    """Return row * columns + column for each element of a product, with the rows of the data and the columns of the weight."""
    axes = free_axes(operation, side)
    if axes is None or len(operation.operands[side].elements) != 1:
        return None
    data, weight = ([x.array.shape[k] for k in of] for x, of in zip(_sides(operation, side), axes, strict=True))
    rows, columns = np.arange(np.prod(data, dtype=int)), np.arange(np.prod(weight, dtype=int))
    cells = rows[:, None] * len(columns) + columns
    shape = operation.results[0].array.shape
    return (cells if side else cells.T).reshape(shape)


def _sides(operation: Operation, side: int) -> tuple[Value, Value]:
    """Return the data and the weight of a product."""
    return operation.operands[1 - side], operation.operands[side]


def _added(index: int, operation: Operation, sums: dict[Value, Sum]) -> Sequence[Sum]:
    shape = operation.results[0].array.shape
    parts = [sums[value] for value in operation.data if value in sums]
    beside = tuple(sorted({term.operation for part in parts for term in part.products}))
    total = Sum()
    for side, value in enumerate(operation.operands):
        if value in sums:
            part = sums[value]
        elif value.of_parameters and len(value.elements) == 1:
            part = Sum(parameters=(Term(value.elements[0], index, side, beside),))
        elif value.constant and np.ptp(value.array) == 0:
            part = Sum(numbers=(Term(np.zeros(shape, int), number=float(value.array.flat[0])),))
        elif side < 2:
            part = Sum(rest=(Term(np.zeros(shape, int), rest=value),))
        else:  # the factor of torch's `add`
            continue
        total = total.plus(_each(part, lambda at: np.broadcast_to(at, shape)))
    return [total]


def _moved(operation: Operation, sums: dict[Value, Sum]) -> Sequence[Sum]:
    totals = [Sum() for _ in operation.results]
    for place, value in enumerate(operation.operands):
        if not value.data or value.array.dtype.kind != "f":  # an index chooses elements, and is none of them
            continue
        known = sums.get(value) or Sum(rest=(Term(np.zeros(value.array.shape, int)),))
        for name, terms in vars(known).items():
            for term in terms:
                for k, at in enumerate(_again(operation, place, term.at)):
                    if (at >= 0).any():
                        totals[k] = totals[k].plus(Sum(**{name: (replace(term, at=at, rest=None),)}))
    return totals


@cache
def _moves() -> frozenset[str]:
    """Return the operations of both sides that move elements."""
    from convert.programs import torch_elements  # imports torch

    return torch_elements.LAYOUT | jax_elements.LAYOUT.keys()


def _again(operation: Operation, place: int, numbers: Array) -> list[Array]:
    """Run an operation that moves elements on numbers, from 1, so that what it fills in is -1 afterwards."""
    given = [x.array if x.array.dtype.kind != "f" else np.zeros(x.array.shape) for x in operation.operands]
    given[place] = numbers + 1.0
    return [np.nan_to_num(np.asarray(x)).astype(int) - 1 for x in move(operation, given)]


def _parts(value: Value, of: Sum, users: Mapping[Value, Sequence[Operation]]) -> list[tuple[Value, Sum]] | None:
    """Return the parts of a value that a program takes, such as each gate of a sigmoid of all; None where it uses the whole, alone or
    joined with others, as the states of longer sequences with those of the ones that begin.

    Args:
        value: a function of each element of a sum.
        of: the sum.
        users: the operations that use each value.
    """
    found: list[tuple[Value, Sum]] = []
    for user in users.get(value, ()):
        if user.name not in _moves():
            return None
        for result, moved in zip(user.results, _moved(user, {value: of}), strict=True):
            parts = _parts(result, moved, users)
            if parts is None and result.array.size >= value.array.size:
                return None
            found += parts or [(result, moved)]
    return found or None


def _each(part: Sum, move: Callable[[Array], Array]) -> Sum:
    return Sum(**{name: tuple(replace(term, at=move(term.at)) for term in terms) for name, terms in vars(part).items()})


def _gate(value: Value, enters: str, of: Sum, program: Program) -> Gate | None:
    """Return a sum in one form; None where a term is not added to all of it, or its columns do not lie along one axis."""
    columns = [_columns(term, program) for term in of.products]
    places = [*columns, *(term.at for term in of.parameters)]
    along = {axis for at in places for axis in range(at.ndim) if (np.diff(at, axis=axis) != 0).any()}
    if len(along) != 1 or any((term.at < 0).any() for term in (*of.products, *of.parameters, *of.numbers)):
        return None
    axis = along.pop()
    products = []
    for term, at in zip(of.products, columns, strict=True):
        cells, at = (np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis]) for x in (term.at, at))
        rows = cells // _count(term, program)
        if (rows != rows[:, :1]).any():
            return None
        products.append(Factor(term.operation, term.side, rows[:, 0], at[0]))
    biases = []
    for term in of.parameters:
        numbers = np.moveaxis(term.at, axis, -1).reshape(-1, term.at.shape[axis])[0]
        biases.append(Bias(term.operation, term.side, numbers, term.beside))
    number = sum(term.number for term in of.numbers)
    residual = _residual(of, program)
    return Gate(value, enters, tuple(products), tuple(biases), number, bool(of.rest) and residual < 0, residual)


def _residual(of: Sum, program: Program) -> int:
    """Return the product whose data is all that is added to a sum besides; -1 for none."""
    if len(of.rest) != 1 or (added := of.rest[0].rest) is None:
        return -1
    met = {term.operation: program.operations[term.operation].data[0].array for term in of.products}
    return next((k for k, data in met.items() if np.array_equal(data, added.array)), -1)


def _count(term: Term, program: Program) -> int:
    """Return how many columns a product has."""
    operation = program.operations[term.operation]
    axes = free_axes(operation, term.side)
    assert axes is not None, "`_cells` has asked for them"
    return int(np.prod([operation.operands[term.side].array.shape[k] for k in axes[1]]))


def _columns(term: Term, program: Program) -> Array:
    columns: Array = term.at % _count(term, program)
    return columns
