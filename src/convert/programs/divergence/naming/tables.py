"""What tables of constants differ in: their rows, the frequencies of sines and cosines, or the numbers that they are computed from."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.numerics.roots import NARROW, round_to_bits
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.layouts import same
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.shared_values import same_numbers
from convert.programs.divergence.words import Words, scalar
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
FREQUENCIES, BACKWARDS = "frequencies divided by another number", "angles of the other sign"
ROUNDED = "number rounded to a narrower dtype"
MOST_SHIFTED = 4  # rows by which a table is moved
LEAST_BASE, LARGEST_BASE, NEAR = 64.0, 1e9, 1e-6  # of frequencies, so that other numbers are not taken for it
SAME_NUMBER = 1e-6  # relative
DOWNSTREAM = 8  # operations from a table to the sine of it


def off_by(rows: int) -> str:
    """Name positions that are counted from another number."""
    return f"positions off by {'one' if abs(rows) == 1 else abs(rows)}"


def shift_of(ours: Array, theirs: Array) -> int:
    """Return by how many rows one array is moved against the other: its row k is row k + n of the other; 0 if it is not moved."""
    if ours.shape != theirs.shape or ours.ndim == 0:
        return 0
    for by in range(1, min(MOST_SHIFTED, len(ours) - 1) + 1):
        if same(ours[:-by], theirs[by:]):
            return by
        if same(ours[by:], theirs[:-by]):
            return -by
    return 0


def shifted_tables(repair: Repair) -> tuple[int, str]:
    """Say how tables of constants with other numbers differ; with the number of rows where it is known that these are positions.

    Empty where both sides have the same tables.
    """
    one, two = (
        [v.array.squeeze() for x in ops for v in x.operands if not v.data and _is_table(v)]
        for ops in (repair.target, repair.source)
    )
    for mine in one:
        for other in (x for x in two if x.shape == mine.shape and not same_numbers(x, mine)):
            if by := shift_of(mine, other):
                said = f"row k of the target's table is row k {'+' if by > 0 else '-'} {abs(by)} of the JAX model's"
                return (by if _of_waves(mine) else 0), said
            return 0, f"the two tables hold other numbers{_first_of_others(mine, other)}"
    return 0, ""


def other_numbers(one: Operation, two: Operation, ours: Words, buffers: Collection[str]) -> str:
    """Say that an operation of the target takes a table of other numbers than the same of the source; empty where weights may be in them.

    Args:
        buffers: names of the target's tensors that are no weights.
    """
    mine, other = (
        [v for v in x.operands if not v.data and _is_table(v) and (v.constant or ours.names.get(v, "") in buffers)]
        for x in (one, two)
    )
    if kind_of(one) != kind_of(two) or not len(mine) == len(other) == 1 or mine[0].array.size != other[0].array.size:
        return ""
    if same_numbers(mine[0].array, other[0].array):
        return ""
    return f"the two tables hold other numbers{_first_of_others(mine[0].array, other[0].array)}"


def _first_of_others(ours: Array, theirs: Array) -> str:
    """Say the first number in which two tables of one shape differ; empty where they have other shapes."""
    if ours.shape != theirs.shape:
        return ""
    at = np.argwhere(~np.isclose(ours, theirs, rtol=SAME_NUMBER, atol=0))
    if not len(at):
        return ""
    first = tuple(at[0])
    return f": {ours[first]:.7g} at {list(map(int, first))} in the target, and {theirs[first]:.7g} in the JAX model"


def _is_table(value: Value) -> bool:
    return value.array.size > 1 and value.array.dtype.kind == "f"


def _of_waves(table: Array) -> bool:
    """Whether each row has sines and cosines of the same angles: their squares add up to 1 for each angle."""
    return table.ndim == 2 and bool(np.allclose((table * table).sum(1), table.shape[1] / 2, rtol=1e-9))


# ---- sines and cosines


@dataclass(frozen=True)
class Waves:
    """What a table of sines or cosines is computed from.

    Attributes:
        frequencies: the largest first, each once.
        first: the first position; None where the positions are data.
        numbers: constants that go into it, with the kind of operation that takes them.
    """

    frequencies: Array
    first: float | None
    numbers: tuple[tuple[str, float], ...]


def other_waves(repair: Repair, ours: Words, theirs: Words) -> tuple[str, str] | None:
    """Name what differs in the angles of two tables of sines and cosines; None if nothing known does."""
    for mine in (v for one in repair.target for v in one.operands if v.constant and _is_table(v)):
        for other in (v for one in repair.source for v in one.operands if v.constant and _is_table(v)):
            if same_numbers(mine.array, other.array):
                continue
            one, two = waves(ours, mine), waves(theirs, other)
            if one is not None and two is not None and (said := _compared(one, two)) is not None:
                return said
    return None


def waves(words: Words, value: Value) -> Waves | None:
    """Return the angles behind a table of sines or cosines, or the frequencies that data is multiplied by in front of them."""
    numbers = tuple(literals(words, [value]))
    angles = _angles(words, value)
    if angles is None:
        flat = value.array.squeeze()
        return Waves(_each_once(flat), None, numbers) if flat.ndim == 1 and _goes_into_waves(words, value) else None
    rows = angles.squeeze()
    if rows.ndim != 2 or len(rows) < 2:
        return None
    steps, first = rows[1] - rows[0], rows[0]
    if not np.allclose(np.diff(rows, axis=0), steps, rtol=1e-9, atol=1e-12) or not steps.all():
        return None
    begin = first / steps
    return Waves(_each_once(steps), float(begin[0]), numbers) if np.allclose(begin, begin[0], atol=1e-9) else None


def _each_once(frequencies: Array) -> Array:
    found = np.unique(np.round(frequencies, 12))
    return found[np.argsort(-np.abs(found), kind="stable")]


def _compared(one: Waves, two: Waves) -> tuple[str, str] | None:
    a, b = one.frequencies, two.frequencies
    if a.shape != b.shape:
        return None
    if same(a, b):
        by = 0.0 if one.first is None or two.first is None else one.first - two.first
        if by == 0 or by != round(by):
            return None
        said = f"the target's positions begin at {one.first:g}, and the JAX model's at {two.first:g}"
        return off_by(int(by)), said
    if same(a, -b):
        return BACKWARDS, "the target's angles are those of the JAX model with the other sign"
    if one.first != two.first or not (said := other_divisor(one, two)):
        return None
    return FREQUENCIES, said


def other_divisor(one: Waves, two: Waves) -> str:
    """Say by which number the exponents of a base are divided that both have; empty where it is another one that differs."""
    a, b = one.frequencies, two.frequencies
    if min(a.min(), b.min()) <= 0 or not (_geometric(a) and _geometric(b)):
        return ""
    base = _common_base(one, two)
    if base is None:
        return ""
    mine, other = (math.log(base) / -math.log(x[1]) for x in (a, b))
    return (
        f"the frequencies are {base:.6g} to the power -k/{mine:.6g} in the target, and -k/{other:.6g} in the JAX model"
    )


def _geometric(frequencies: Array) -> bool:
    """Whether they are 1, r, r², ... with r below 1."""
    if len(frequencies) < 2 or abs(frequencies[0] - 1) > 1e-9 or not 0 < frequencies[1] < 1:
        return False
    return same(frequencies, frequencies[1] ** np.arange(len(frequencies)))


def _common_base(one: Waves, two: Waves) -> float | None:
    """Return the base of both; None where it is not known, or where it is the base that differs."""
    mine, other = (set(_bases(x.numbers)) for x in (one, two))
    return max((a for a in mine if any(math.isclose(a, b, rel_tol=NEAR) for b in other)), default=None)


def _bases(numbers: Sequence[tuple[str, float]]) -> list[float]:
    """Return the numbers of which powers or the logarithm are taken, and those whose logarithm is a constant."""
    made = [x for kind, x in numbers if kind in ("power", "log")]
    powers = [math.exp(abs(x)) for _, x in numbers if abs(x) < math.log(LARGEST_BASE)]
    made += [round(x) for x in powers if math.isclose(x, round(x), rel_tol=NEAR)]
    return [x for x in made if LEAST_BASE <= x <= LARGEST_BASE]


def _angles(words: Words, value: Value) -> Array | None:
    """Return what the sine or cosine of a table is given."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        operation = words.producer.get(one)
        if operation is None:
            continue
        if kind_of(operation) in ("sin", "cos"):
            return operation.operands[0].array
        if kind_of(operation) in (LAYOUT, "join", "part", "pick", "negate"):
            waiting.extend(operation.operands)
    return None


def _goes_into_waves(words: Words, value: Value) -> bool:
    """Whether sines of products with this value are taken."""
    reached = {value}
    for _ in range(DOWNSTREAM):
        users = [one for one in words.operations if reached & set(one.operands)]
        if any(kind_of(one) in ("sin", "cos") for one in users):
            return True
        more = {v for one in users if kind_of(one) in (LAYOUT, "multiply", "product", "join") for v in one.results}
        if more <= reached:
            return False
        reached |= more
    return False


# ---- numbers


def numbers_of_tables(repair: Repair, ours: Words, theirs: Words) -> str:
    """Say which number differs in what two tables of constants are computed from."""
    one, two = (
        literals(words, [v for one in ops for v in one.operands if v.constant and v.array.size > 1])
        for words, ops in ((ours, repair.target), (theirs, repair.source))
    )
    for kind in dict.fromkeys(k for k, _ in one):
        a, b = ({number: where for (k, number), where in x.items() if k == kind} for x in (one, two))
        mine, other = [n for n in a if n not in b], [n for n in b if n not in a]
        if len(mine) == len(other) == 1:
            return (
                f"the table comes from {mine[0]:.10g} in the target ({a[mine[0]]}), "
                f"and from {other[0]:.10g} in the JAX model ({b[other[0]]})"
            )
    return ""


def literals(words: Words, values: Sequence[Value]) -> dict[tuple[str, float], str]:
    """Return the numbers that constants are computed from, with the kind of operation that takes them, and its line."""
    found: dict[tuple[str, float], str] = {}
    waiting = list(values)
    seen: set[Value] = set()
    while waiting:
        value = waiting.pop()
        operation: Operation | None = words.producer.get(value)
        if value in seen or operation is None:
            continue
        seen.add(value)
        number = scalar(operation)
        if number is not None and kind_of(operation) != LAYOUT:
            found.setdefault((kind_of(operation), number), operation.where)
        waiting.extend(operation.operands)
    return found


def rounded(one: float, two: float) -> str:
    """Say which of two numbers is the other one rounded to a narrower dtype; empty if neither is."""
    for side, x, y in (("target", one, two), ("JAX model", two, one)):
        for dtype, bits in NARROW.items():
            if x != y and x == round_to_bits(y, bits):
                return f"{x:.7g} is {y:.7g} rounded to {dtype}, in the {side}"
    return ""
