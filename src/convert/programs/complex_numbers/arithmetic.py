"""What operations on complex values are made of: real arithmetic on their parts. JAX's primitives and ATen's operators have one table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from convert.programs.complex_numbers.operations import NewOperations, as_made, result
from convert.programs.complex_numbers.parts import Parts, filled, is_complex
from convert.programs.program import Array, Operation, Value

CASTS = frozenset(["convert_element_type", "_to_copy", "clone", "detach", "lift_fresh", "alias"])
CONJUGATES = frozenset(["conj", "_conj", "conj_physical", "_conj_physical"])
CHOICES = frozenset(["select_n", "where"])
SUMS_OF_ONE = frozenset(["neg", "reduce_sum", "sum", "mean", "cumsum", "copy", "scatter-add"])  # linear, of one value
SUMS = frozenset(["add", "add_any", "sub", "rsub"])
PRODUCTS = frozenset(
    ["mul", "dot_general", "mm", "bmm", "mv", "dot", "matmul", "conv_general_dilated", "convolution", "outer"]
)


class Arithmetic:
    """Records what complex operations are made of.

    Args:
        new: where it is recorded.
        moving: names of the operations that only move elements.
        parts: returns the parts of a value of the old record.
        real: returns the new value of a real one.
    """

    def __init__(
        self,
        new: NewOperations,
        moving: Collection[str],
        parts: Callable[[Value], Parts],
        real: Callable[[Value], Value],
    ) -> None:
        self._new, self._moving, self._parts, self._real = new, moving, parts, real

    def of(self, operation: Operation) -> list[Parts] | None:
        """Return the results of an operation, made of its operands' parts; None where it is not known what it is made of."""
        name, value = operation.name, operation.results[0]
        if name in self._moving or name in SUMS_OF_ONE or name in CHOICES:
            return self._by_part(operation)
        if len(operation.results) > 1:
            return None
        given = [self._parts(x) for x in operation.operands]
        if name in CASTS and given[0].shape == value.array.shape:
            return [given[0] if is_complex(value) else replace(given[0], imaginary=None)]
        if name in SUMS:
            return [self._sum(operation, *given)]
        if name in PRODUCTS:
            return [self._product(operation, *given)]
        made = self._by_name(operation, given)
        return None if made is None else [made]

    def _by_part(self, operation: Operation) -> list[Parts]:
        """Do to each part what is done to the whole; indices and conditions are the same."""
        numbers = [x for x in operation.operands if x.array.dtype.kind in "fc"]
        made: list[list[Value | None]] = []
        for k in (0, 1):
            if all(self._parts(x).both[k] is None for x in numbers):
                made.append([None] * len(operation.results))
                continue
            operands = [
                filled(self._parts(x).both[k], x.array.shape) if x in numbers else self._real(x)
                for x in operation.operands
            ]
            made.append([self._alike(operation, operands, n) for n in range(len(operation.results))])
        shapes = [x.array.shape for x in operation.results]
        return [Parts(real, other, shape) for real, other, shape in zip(*made, shapes, strict=True)]

    def _alike(self, operation: Operation, operands: Sequence[Value], number: int = 0) -> Value:
        """Record an operation of the same name on real operands, for one of its results."""
        name = operation.name
        return self._new.add(
            operation,
            name,
            operands,
            result(as_made(operation), number),
            operation.settings,
            moves=name in self._moving or name in CHOICES,
            elementwise=name in SUMS or name in ("mul", "neg"),
        )

    def _negative(self, like: Operation, value: Value | None) -> Value | None:
        return None if value is None else self._new.apply(like, "neg", value)

    def _sum(self, operation: Operation, one: Parts, other: Parts) -> Parts:
        shape = operation.results[0].array.shape
        made: list[Value | None] = []
        for left, right in zip(one.both, other.both, strict=True):
            if right is None and (left is None or (left.array.shape == shape and operation.name != "rsub")):
                made.append(left)
            elif left is None and right is not None and right.array.shape == shape and operation.name != "sub":
                made.append(right)
            else:
                made.append(self._alike(operation, [filled(left, one.shape), filled(right, other.shape)]))
        return Parts(made[0], made[1], shape)

    def _product(self, operation: Operation, one: Parts, other: Parts) -> Parts:
        shape = operation.results[0].array.shape
        terms: dict[tuple[int, ...], Value | None] = {}
        # What the real part of the data meets comes first: the imaginary one may be zeros, as at the first place of a spectrum.
        for pair in itertools.product((0, 1), repeat=2):
            j, k = pair[::-1] if other.data else pair
            terms[j, k] = self._times(operation, one.both[j], other.both[k])
        return Parts(
            self._plus(operation, terms[0, 0], terms[1, 1], "sub"),
            self._plus(operation, terms[0, 1], terms[1, 0], "add"),
            shape,
        )

    def _times(self, operation: Operation, x: Value | None, y: Value | None) -> Value | None:
        if x is None or y is None:
            return None
        for one, other in ((x, y), (y, x)) if operation.name == "mul" else ():
            if _is_one(other) and np.broadcast_shapes(one.array.shape, other.array.shape) == one.array.shape:
                return one
        return self._alike(operation, [x, y])

    def _plus(self, like: Operation, x: Value | None, y: Value | None, name: str) -> Value | None:
        if y is None:
            return x
        if x is None:
            return self._negative(like, y) if name == "sub" else y
        return self._new.apply(like, name, x, y)

    def _by_name(self, operation: Operation, given: Sequence[Parts]) -> Parts | None:
        name, shape = operation.name, operation.results[0].array.shape
        first, apply = given[0], partial(self._new.apply, operation)
        if name in CONJUGATES:
            return replace(first, imaginary=self._negative(operation, first.imaginary))
        if name in ("real", "imag"):
            return Parts(first.both[name == "imag"], None, shape)
        if name == "complex" and first.shape == given[1].shape == shape:
            return Parts(first.real, given[1].real, shape)
        if name == "exp":
            return self._turned(operation, first.real, first.imaginary, shape)
        if name == "polar":
            angle = filled(given[1].real, given[1].shape)
            return self._product(_as_product(operation), first, self._turned(operation, None, angle, angle.array.shape))
        if name == "abs":
            return Parts(apply("sqrt", self._square(operation, first)), None, shape)
        if name == "angle":
            return Parts(apply("atan2", filled(first.imaginary, shape), filled(first.real, shape)), None, shape)
        if _power(operation) == 2:
            return self._product(_as_product(operation), first, first)
        if name == "div" and len(given) == 2 and not operation.settings.get("rounding_mode"):
            return self._quotient(operation, first, given[1])
        if name == "reciprocal":
            return self._quotient(operation, Parts(Value(np.ones(())), None, ()), first)
        return None

    def _turned(self, like: Operation, length: Value | None, angle: Value | None, shape: tuple[int, ...]) -> Parts:
        """Return exp(length + i angle)."""
        size = None if length is None else self._new.apply(like, "exp", length)
        if angle is None:
            return Parts(size, None, shape)
        made = [self._new.apply(like, name, angle) for name in ("cos", "sin")]
        if size is not None:
            made = [self._new.apply(like, "mul", size, x) for x in made]
        return Parts(made[0], made[1], shape)

    def _square(self, like: Operation, parts: Parts) -> Value:
        """Return the squared size."""
        squares = [self._new.apply(like, "mul", x, x) for x in parts.both if x is not None]
        if not squares:
            return filled(None, parts.shape)
        return squares[0] if len(squares) == 1 else self._new.apply(like, "add", *squares)

    def _quotient(self, operation: Operation, one: Parts, other: Parts) -> Parts:
        shape = operation.results[0].array.shape
        divisor = filled(other.real, other.shape)
        if other.imaginary is not None:
            turned = replace(other, imaginary=self._negative(operation, other.imaginary))
            one = self._product(_as_product(operation), one, turned)
            divisor = self._square(operation, other)
        real, imaginary = (None if x is None else self._new.apply(operation, "div", x, divisor) for x in one.both)
        return Parts(real, imaginary, shape)


def _as_product(operation: Operation) -> Operation:
    """Return the product of two values element by element, at the place of an operation."""
    return replace(operation, name="mul", operands=_ANY, settings={}, again=_multiplied)


def _multiplied(operands: Sequence[Array]) -> Sequence[Array]:
    return [operands[0] * operands[1]]


_ANY = (Value(np.zeros(())), Value(np.zeros(())))


def _is_one(value: Value) -> bool:
    return value.constant and bool((value.array == 1).all())


def _power(operation: Operation) -> float | None:
    """Return the power that an operation raises to; None if it is no constant."""
    if operation.name == "square":
        return 2
    if operation.name == "integer_pow":
        return float(operation.settings["y"])
    if operation.name == "pow" and operation.operands[1].constant and not operation.operands[1].array.ndim:
        number = complex(operation.operands[1].array.item())
        return None if number.imag else number.real
    return None
