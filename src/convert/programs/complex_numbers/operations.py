"""Operations that a record gets, with what they give on the values of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from convert.programs.program import Array, Operation, Value

Run = Callable[[Sequence[Array]], Sequence[Array]]
Make = Callable[[Sequence[Array]], Array]
FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    "neg": np.negative,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "exp": np.exp,
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "atan2": np.arctan2,
}


class NewOperations:
    """The operations of the new record so far.

    Attributes:
        all: in order.
        made: those that are not of the old record.
    """

    def __init__(self) -> None:
        self.all: list[Operation] = []
        self.made: set[Operation] = set()

    def keep(self, operation: Operation) -> None:
        """Add an operation of the old record."""
        self.all.append(operation)

    def append(self, operation: Operation) -> None:
        """Add another operation."""
        self.all.append(operation)
        self.made.add(operation)

    def forget(self, count: int) -> None:
        """Remove the operations but the first ones, as many as given."""
        self.made.difference_update(self.all[count:])
        del self.all[count:]

    def used(self, outputs: Sequence[Value]) -> tuple[Operation, ...]:
        """Return the operations without made ones that nothing uses, as the imaginary part of what is real in the end."""
        needed, kept = set(outputs), []
        for operation in reversed(self.all):
            if operation not in self.made or not needed.isdisjoint(operation.results):
                needed.update(operation.operands)
                kept.append(operation)
        return tuple(reversed(kept))

    def add(
        self,
        like: Operation,
        name: str,
        operands: Sequence[Value],
        make: Make,
        settings: Mapping[str, Any],
        *,
        moves: bool = False,
        elementwise: bool = False,
    ) -> Value:
        """Add an operation with one result, and return this.

        Args:
            like: where it is from.
            make: what it computes.
            moves: whether it only moves elements.
            elementwise: whether each element is computed from those at its place.
        """
        with np.errstate(all="ignore"):
            array = np.asarray(make([x.array for x in operands]))
        data = any(x.data for x in operands)
        leaves = frozenset[str]().union(*(x.leaves for x in operands))
        elements: tuple[Array, ...] = ()
        if leaves and not data:
            elements = _moved(operands, make) if moves else _joined(operands, array.shape) if elementwise else ()
        made = Value(array, data, leaves, elements)
        run = partial(_alone, make)
        self.append(
            replace(like, name=name, operands=tuple(operands), results=(made,), settings=dict(settings), again=run)
        )
        return made

    def apply(self, like: Operation, name: str, *operands: Value) -> Value:
        """Add one of `FUNCTIONS`."""
        return self.add(like, name, operands, partial(_evaluated, FUNCTIONS[name]), {}, elementwise=True)

    def select(self, like: Operation, value: Value) -> tuple[Value, Value]:
        """Add what takes the two parts apart that lie along the last axis of a value."""
        one, other = (
            self.add(like, "select", [value], partial(_selected, k), {"dim": -1, "index": k}, moves=True)
            for k in (0, 1)
        )
        return one, other

    def stack(self, like: Operation, real: Value, imaginary: Value) -> Value:
        """Add what lays two parts along a further last axis."""
        return self.add(like, "stack", [real, imaginary], _stack, {"dim": -1}, moves=True)


def as_made(operation: Operation) -> Run:
    """Return an operation for real operands, which it is given as complex ones where it was made for these."""
    kinds = [x.array.dtype for x in operation.operands]

    def run(operands: Sequence[Array]) -> Sequence[Array]:
        given = [x.astype(kind) if kind.kind == "c" else x for x, kind in zip(operands, kinds, strict=True)]
        return [np.asarray(np.real(x)) for x in operation.again(given)]

    return run


def result(run: Run, number: int) -> Make:
    """Return what computes one of the results of an operation."""
    return lambda operands: run(operands)[number]


def _alone(make: Make, operands: Sequence[Array]) -> Sequence[Array]:
    return [np.asarray(make(operands))]


def _evaluated(function: Callable[..., Array], operands: Sequence[Array]) -> Array:
    return function(*operands)


def _selected(index: int, operands: Sequence[Array]) -> Array:
    return operands[0][..., index]


def _stack(operands: Sequence[Array]) -> Array:
    return np.stack(operands, axis=-1)


def _moved(operands: Sequence[Value], make: Make) -> tuple[Array, ...]:
    """Return `Value.elements` of what moves elements: it is run on their numbers, from 1, so that a zero is a constant."""
    counts = {len(x.elements) for x in operands if x.leaves}
    if len(counts) != 1:
        return ()
    found = []
    for k in range(counts.pop()):
        made = make(list(_numbers(operands, k)))
        found.append(np.where(np.isnan(made), 0, made).astype(np.int64) - 1)  # a gather fills in NaN
    return tuple(found)


def _numbers(operands: Sequence[Value], factor: int) -> Iterator[Array]:
    for x in operands:
        if x.leaves:
            yield (x.elements[factor] + 1).astype(np.float64)
        else:  # an index or a condition; what is no index is filled in
            yield np.zeros(x.array.shape) if x.array.dtype.kind == "f" else x.array


def _joined(operands: Sequence[Value], shape: tuple[int, ...]) -> tuple[Array, ...]:
    """Return one array of numbers for each factor, in the result's shape; equal ones once."""
    kept: list[Array] = []
    for part in (numbers for x in operands for numbers in x.elements):
        part = np.broadcast_to(part, shape)
        if not any(np.array_equal(part, other) for other in kept):
            kept.append(part)
    return tuple(kept)
