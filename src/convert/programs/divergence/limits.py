"""Between which numbers operations limit a value: one that clips at both ends, or two that clip at one end each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from convert.programs.divergence.graph import root
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.program import Operation, Value

Bounds = tuple[float | None, float | None]
LOW, HIGH = ("max", "maximum", "clamp_min"), ("min", "minimum", "clamp_max")


def bounds(operation: Operation) -> Bounds:
    """Return the least and the largest number that an operation gives; None where that is no constant."""
    return _bound(operation, "min"), _bound(operation, "max")


def _bound(operation: Operation, end: str) -> float | None:
    if operation.name == "clamp":
        return _of_clamp(operation, end)
    if isinstance(operation.settings.get(end), int | float):
        return float(operation.settings[end])
    return _number(operation) if operation.name in (LOW if end == "min" else HIGH) else None


def _of_clamp(operation: Operation, end: str) -> float | None:
    """Return a bound of `clamp`: JAX gives it (low, x, high), torch (x, low, high), or x and one of them without a word of which."""
    if len(operation.operands) == 3:
        low = 1 if operation.operands[0].data else 0
        array = operation.operands[low if end == "min" else 2].array
        return float(array.flat[0]) if array.size == 1 else None
    number, made = _number(operation), operation.results[0].array
    if number is None or not made.size:
        return None
    return number if (made >= number if end == "min" else made <= number).all() else None


def _number(operation: Operation) -> float | None:
    """Return the one number that an operation is given beside data; None where there is none."""
    return next((x.number for x in operation.operands if x.number is not None), None)


def in_words(limits: Bounds) -> str:
    """Say to which numbers values are limited; empty where to none."""
    low, high = limits
    if low is not None and high is not None:
        return f"to {low:.7g} to {high:.7g}"
    if low is None and high is None:
        return ""
    return f"to at least {low:.7g}" if low is not None else f"to at most {high:.7g}"


def joined(operations: Sequence[Operation]) -> Bounds:
    """Return between which numbers operations that follow one another limit a value."""
    low, high = (-np.inf, np.inf)
    for one in operations:
        least, largest = bounds(one)
        if least is not None:
            low, high = max(low, least), max(high, least)
        if largest is not None:
            low, high = min(low, largest), min(high, largest)
    return (None if low == -np.inf else float(low)), (None if high == np.inf else float(high))


def is_limit(operation: Operation) -> bool:
    """Whether an operation limits a value to numbers."""
    varying = [v for v in operation.operands if not v.constant]
    return kind_of(operation) == "limit" and len(varying) == 1 and bounds(operation) != (None, None)


def before_limits(value: Value, producer: Mapping[Value, Operation]) -> Value:
    """Return the value of which operations that limit it make this one; the value itself where none does."""
    value = root(value, producer)
    while (made := producer.get(value)) is not None and is_limit(made):
        value = root(next(v for v in made.operands if not v.constant), producer)
    return value


def goes_on(value: Value, users: Mapping[Value, Sequence[Operation]]) -> bool:
    """Whether a value is limited further, in any layout."""
    waiting = [value]
    while waiting:
        for user in users.get(waiting.pop(), ()):
            if is_limit(user):
                return True
            waiting += user.results if kind_of(user) == LAYOUT else ()
    return False
