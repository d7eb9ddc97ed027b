"""Between which numbers the values of a program lie for all inputs and parameters: interval arithmetic over the operations of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.words import scalar
from convert.programs.program import Operation, Program, Value

Interval = tuple[float, float]
ANY: Interval = (-math.inf, math.inf)
NOTHING: Interval = (math.inf, -math.inf)  # of no number at all, such as NaN alone
TINY = math.ulp(0.0)  # what is above zero is at least this
LARGEST_EXPONENT = 700.0  # whose exponential is a number

FIXED: Mapping[str, Interval] = {
    "sigmoid": (TINY, 1.0),
    "tanh": (-1.0, 1.0),
    "erf": (-1.0, 1.0),
    "erfc": (0.0, 2.0),
    "sin": (-1.0, 1.0),
    "cos": (-1.0, 1.0),
    "sqrt": (0.0, math.inf),
    "rsqrt": (TINY, math.inf),
    "relu": (0.0, math.inf),
    "softplus": (TINY, math.inf),
    "silu": (-0.2785, math.inf),
    "gelu": (-0.17005, math.inf),
    "var": (0.0, math.inf),
    "std": (0.0, math.inf),
    "linalg_vector_norm": (0.0, math.inf),
    "softmax": (0.0, 1.0),
    "_log_softmax": (-math.inf, 0.0),
    "expm1": (-1.0, math.inf),
}
SAME = {LAYOUT, "part", "join", "pick", "mask", "mean", "largest", "sort", "reduce_min", "amin"}
PADS = {"constant_pad_nd"}  # with another number
COMPARED = {
    "gt": (1, False),
    "ge": (1, True),
    "lt": (-1, False),
    "le": (-1, True),
}  # direction, whether equal ones count


def reaches(program: Program) -> dict[Value, Interval]:
    """Return the interval of every value of a program that is no constant."""
    found: dict[Value, Interval] = {}
    squares: set[Value] = set()
    for operation in program.operations:
        given = [_given(x, found) for x in operation.operands]
        made = _result(operation, given)
        if _is_square(operation):
            squares.update(operation.results)
        if operation.name == "sub" and operation.operands[1] in squares and given[0][0] >= 0:
            made = 0.0, made[1]  # a mean of squares without the square of the mean: negative by rounding alone
        found.update(dict.fromkeys(operation.results, made))
    return found


def decided(operation: Operation, reach: Mapping[Value, Interval]) -> bool:
    """Whether a comparison has the same result for all inputs."""
    if operation.name not in COMPARED or len(operation.operands) != 2:
        return False
    direction, equal = COMPARED[operation.name]
    (low, high), (other_low, other_high) = (_given(x, reach) for x in operation.operands[::direction])
    return low > other_high or high < other_low or (low >= other_high if equal else high <= other_low)


def _given(value: Value, found: Mapping[Value, Interval]) -> Interval:
    if not value.constant:
        return found.get(value, ANY)
    numbers = value.array[~np.isnan(value.array)] if value.array.dtype.kind == "f" else value.array
    return (float(numbers.min()), float(numbers.max())) if numbers.size and numbers.dtype.kind in "fiub" else NOTHING


def _result(operation: Operation, given: Sequence[Interval]) -> Interval:
    kind = kind_of(operation)
    if operation.settings.get("alpha", 1) != 1 or operation.settings.get("rounding_mode"):
        return ANY
    if kind in ARITHMETIC:
        made = ARITHMETIC[kind](operation, given)
    elif kind in SAME and operation.name not in PADS:
        begin = 1 if operation.name == "select_n" else 0
        made = _hull(
            [
                interval
                for interval, operand in list(zip(given, operation.operands, strict=True))[begin:]
                if operand.array.dtype.kind != "b"
            ]
        )
    else:
        made = FIXED.get(operation.name, FIXED.get(kind, ANY))
    return ANY if any(map(math.isnan, made)) else made


def _hull(intervals: Sequence[Interval]) -> Interval:
    return min((low for low, _ in intervals), default=-math.inf), max((high for _, high in intervals), default=math.inf)


def _of(compute: Callable[[float, float], float]) -> Callable[[Operation, Sequence[Interval]], Interval]:
    """Return the interval of a function of two numbers that has its extremes at the ends of their intervals."""

    def made(operation: Operation, given: Sequence[Interval]) -> Interval:
        if len(given) != 2:
            return ANY
        ends = [compute(a, b) for a in given[0] for b in given[1]]
        return min(ends), max(ends)

    return made


def _product(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _multiplied(operation: Operation, given: Sequence[Interval]) -> Interval:
    return _power(given[0], 2) if _is_square(operation) else _of(_product)(operation, given)


def _is_square(operation: Operation) -> bool:
    if operation.name == "mul":
        return operation.operands[0] is operation.operands[1]
    return kind_of(operation) == "power" and scalar(operation) == 2


def _divided(operation: Operation, given: Sequence[Interval]) -> Interval:
    if len(given) != 2 or not (given[1][0] >= 0):
        return ANY
    (low, high), (least, most) = given
    divisors = [1 / x if x else math.inf for x in (least, most)]
    ends = [_product(a, b) for a in (low, high) for b in divisors]
    return min(ends), max(ends)


def _subtracted(operation: Operation, given: Sequence[Interval]) -> Interval:
    if len(given) != 2:
        return ANY
    (low, high), (least, most) = given[::-1] if operation.name == "rsub" else given
    return low - most, high - least


def _raised(operation: Operation, given: Sequence[Interval]) -> Interval:
    power = scalar(operation)
    if power is not None and power == int(power) and power > 0:
        return _power(given[0], int(power))
    return (0.0, math.inf) if given[0][0] >= 0 or (power is not None and power % 2 == 0) else ANY


def _power(given: Interval, power: int) -> Interval:
    ends = sorted(_product_of(x, power) for x in given)
    return (0.0 if given[0] <= 0 <= given[1] else ends[0], ends[1]) if power % 2 == 0 else (ends[0], ends[1])


def _product_of(x: float, power: int) -> float:
    try:
        return float(x**power)
    except OverflowError:
        return math.inf if x > 0 or power % 2 == 0 else -math.inf


def _exp(operation: Operation, given: Sequence[Interval]) -> Interval:
    if operation.name != "exp":
        return FIXED.get(operation.name, (TINY, math.inf))
    low, high = (math.inf if x > LARGEST_EXPONENT else math.exp(x) for x in given[0])
    return max(low, TINY), max(high, TINY)


def _absolute(operation: Operation, given: Sequence[Interval]) -> Interval:
    low, high = given[0]
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _limited(operation: Operation, given: Sequence[Interval]) -> Interval:
    if operation.name in ("max", "maximum") and len(given) == 2:
        return max(x for x, _ in given), max(x for _, x in given)
    if operation.name in ("min", "minimum") and len(given) == 2:
        return min(x for x, _ in given), min(x for _, x in given)
    numbers = [x for x, operand in zip(given, operation.operands, strict=True) if operand.constant and x[0] == x[1]]
    if operation.name == "clamp_min" and len(numbers) == 1:
        return max(given[0][0], numbers[0][0]), max(given[0][1], numbers[0][0])
    return ANY


def _summed(operation: Operation, given: Sequence[Interval]) -> Interval:
    count = operation.operands[0].array.size
    if operation.name == "cumlogsumexp":
        return ANY
    low, high = given[0]
    return (low if low >= 0 else low * count), (high if high <= 0 else high * count)


ARITHMETIC: Mapping[str, Callable[[Operation, Sequence[Interval]], Interval]] = {
    "add": _of(lambda a, b: a + b),
    "subtract": _subtracted,
    "multiply": _multiplied,
    "divide": _divided,
    "negate": lambda operation, given: (-given[0][1], -given[0][0]),
    "power": _raised,
    "exp": _exp,
    "abs": _absolute,
    "limit": _limited,
    "sum": _summed,
    "running sum": _summed,
}
