"""A program as the record of one run: its operations in the order of execution, and the values between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from convert.numerics.real_numbers import as_complex

Array = np.ndarray[Any, np.dtype[Any]]
REFUSALS = (TypeError, ValueError, IndexError, RuntimeError)  # of `Operation.again`, on operands that do not fit


@dataclass(frozen=True, eq=False)
class Value:
    """An array that a run was given or computed.

    Attributes:
        array: its elements; floating ones are float64.
        data: whether an input of the model is in it; otherwise it is computed from parameters and constants alone.
        leaves: names of the parameters that it is computed from.
        elements: for a value of parameters alone: arrays of its shape with the numbers of the parameters' elements that each of
            its elements is computed from, one array for each factor that mixes no elements (`Program.first_element` numbers them); -1 where an element
            is a constant. Empty where an operation mixes elements.
        complex: of a parameter, an input or an output: whether the last axis of `array` has the two parts of complex numbers
            (`complex_numbers`).
    """

    array: Array
    data: bool = False
    leaves: frozenset[str] = frozenset()
    elements: tuple[Array, ...] = ()
    complex: bool = False

    @property
    def given(self) -> Array:
        """The array as the model takes it."""
        return as_complex(self.array) if self.complex else self.array

    @property
    def constant(self) -> bool:
        """Whether neither an input nor a parameter is in it."""
        return not self.data and not self.leaves

    @property
    def of_parameters(self) -> bool:
        """Whether it is computed from parameters, without an input."""
        return not self.data and bool(self.leaves)

    @property
    def number(self) -> float | None:
        """The number that fills it, of a constant; None where it is no constant, or has others."""
        array = self.array
        one = self.constant and array.size and array.dtype.kind in "fiu" and (array == array.flat[0]).all()
        return float(array.flat[0]) if one else None


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation that a run carried out.

    Attributes:
        name: of JAX's primitive (``dot_general``) or ATen's operator without its overload (``mm``).
        operands: the arrays that it was given, in order; scalars are arrays of no axes.
        results: the arrays that it gave.
        settings: what else it was given, such as dimension numbers, an axis or an approximation.
        again: runs it on other operands, as many as `operands`; returns arrays in the order of `results`.
        where: ``file.py:line`` of the model's code; empty where unknown.
        module: path of the module that ran; empty where unknown.
    """

    name: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    settings: Mapping[str, Any] = field(repr=False)
    again: Callable[[Sequence[Array]], Sequence[Array]] = field(repr=False)
    where: str = ""
    module: str = ""

    @property
    def data(self) -> tuple[Value, ...]:
        """The operands that an input of the model is in."""
        return tuple(operand for operand in self.operands if operand.data)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The finite numbers that it was given, each of which fills its operand."""
        given = (operand.number for operand in self.operands)
        return tuple(number for number in given if number is not None and np.isfinite(number))

    @property
    def place(self) -> str:
        """The line of the model's code, or the module where no line is known; empty where neither is."""
        return self.where or self.module


class TakenOut(NamedTuple):
    """A place where Python code took the elements of a value out of the framework.

    Attributes:
        where: ``file.py:line`` of the model's code.
        how: what it called, such as ``numpy``.
        before: the number of operations that had run.
    """

    where: str
    how: str
    before: int


@dataclass(frozen=True, eq=False)
class Program:
    """One run of a model.

    Attributes:
        parameters: the model's parameters by name.
        inputs: the model's inputs by name.
        operations: in the order of execution; of a loop, every iteration.
        outputs: by name.
        opaque: operations that could not be run in float64, or not be looked into, by name.
        path_taken: the line at which the run first chose a branch or a number of iterations by its values, so that other inputs may
            run others; empty if it did not.
        taken_out: where Python code took elements of a value that is not constant, in the order of execution.
        tied: further names of parameters, each with the name in `parameters`.
        buffers: names of those that are not learned: the model computes them, or updates them.
    """

    parameters: Mapping[str, Value]
    inputs: Mapping[str, Value]
    operations: tuple[Operation, ...]
    outputs: Mapping[str, Value]
    opaque: tuple[str, ...] = ()
    path_taken: str = ""
    taken_out: tuple[TakenOut, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()

    @property
    def first_element(self) -> Mapping[str, int]:
        """The number of the first element of each parameter; elements are numbered through, in the order of `parameters`."""
        return first_elements({name: value.array.size for name, value in self.parameters.items()})

    @cached_property
    def made_by(self) -> Mapping[Value, Operation]:
        """The operation that computes each value."""
        return producers_of(self.operations)

    @cached_property
    def users(self) -> Mapping[Value, Sequence[Operation]]:
        """The operations that use each value."""
        return users_of(self.operations)


def users_of(operations: Sequence[Operation]) -> dict[Value, list[Operation]]:
    """Return the operations that use each value."""
    users: dict[Value, list[Operation]] = {}
    for operation in operations:
        for value in dict.fromkeys(operation.operands):
            users.setdefault(value, []).append(operation)
    return users


def producers_of(operations: Sequence[Operation]) -> dict[Value, Operation]:
    """Return the operation that computes each value."""
    return {value: operation for operation in operations for value in operation.results}


def computed_by(
    operation: Operation, made_by: Mapping[Value, Operation], known: Collection[Operation] = ()
) -> set[Operation]:
    """Return an operation and those that compute what it is given, and so on; without those that are known, and what they are given."""
    found, todo = set[Operation](), [operation]
    while todo:
        one = todo.pop()
        if one not in known and one not in found:
            found.add(one)
            todo += [made_by[x] for x in one.operands if x in made_by]
    return found


def times_used(program: Program) -> Counter[Value]:
    """Return how many operations and outputs use each value; an operation that takes one twice counts twice."""
    uses = Counter(value for operation in program.operations for value in operation.operands)
    uses.update(program.outputs.values())
    return uses


def first_elements(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the number of the first element of each parameter, for parameters of these sizes."""
    found, total = {}, 0
    for name, size in sizes.items():
        found[name] = total
        total += size
    return found


def parameter_values(arrays: Mapping[str, Array]) -> dict[str, Value]:
    """Return the values of parameters, with the numbers of their elements."""
    first = first_elements({name: array.size for name, array in arrays.items()})
    return {
        name: Value(
            array,
            leaves=frozenset([name]),
            elements=(np.arange(first[name], first[name] + array.size).reshape(array.shape),),
        )
        for name, array in arrays.items()
    }
