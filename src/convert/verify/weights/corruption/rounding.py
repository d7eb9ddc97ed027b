"""Name a rounding that the rules do not make: through a narrower type, towards zero, at random, or to a grid of 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from convert.core.tensor_spec import is_float
from convert.numerics.bits import same_bits
from convert.numerics.blocks import everywhere
from convert.numerics.compare import epsilon

Array = np.ndarray[Any, np.dtype[Any]]
Neighbours = Callable[[Array, Array], tuple[Array, Array, Array]]
NARROWER = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
MANTISSA = {4: 23, 8: 52}  # bytes of a type of numpy -> stored bits of its mantissa
SCALED = {name: NARROWER[name] for name in ("float8_e4m3fn", "float8_e5m2")}
KNOWN_BITS = {7: "bfloat16", 10: "TF32"}  # bits of the mantissa that remain -> name
CODES, MIN_CODED = 16, 256  # sizes in a table of 4 bits; values that show it
MIN_DECIMALS = 8  # values that are all short by no chance
MIN_CUT = 6  # bits; fewer zeros at the end of every value may be chance
ROUNDED, TRUNCATED, NOT_NEAREST, QUANTIZED = "rounded", "truncated", "not rounded to the nearest", "quantized"
ROUNDINGS = frozenset((ROUNDED, TRUNCATED, NOT_NEAREST))
BITS = {8: (127, 255), 4: (7, 15)}  # steps between 0 and the largest value, or between the smallest and the largest
GROUPS = (16, 32, 64, 128, 256, 8)  # values that have one scale
MIN_VALUES = 4  # of a row of whole multiples; the largest of them is one by its definition
MOST = 1 << 20  # values of a larger tensor that are looked at: the grid of a part is that of the whole


def find_rounding(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
    """Yield name and description of a rounding that makes `got` of `exact`, and that the rules do not make.

    Args:
        got: of the file.
        want: what the rules make: `exact`, in the dtype of the file.
        exact: the values before they are cast to the dtype of the file; `want` itself, if the cast rounds nothing.
    """
    if not is_float(want.dtype.name):
        return
    yield from _through(got, want, exact)
    if exact.dtype != want.dtype:
        yield from _directed(got, exact, want, _neighbours, want.dtype.name)
    elif got.dtype.kind == "f" and got.dtype.itemsize in MANTISSA:
        yield from _fewer_bits(got, want)


def _through(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
    """Find values that were rounded to a narrow type before they were cast to that of the file."""
    for name, dtype in NARROWER.items():
        if name == want.dtype.name:
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            found = everywhere(lambda x, y: same_bits(x, y.astype(dtype).astype(x.dtype)), got, exact)  # noqa: B023
        if found:
            yield ROUNDED, f"all values are rounded to {name} and stored as {want.dtype.name}"
            return


def find_decimals(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
    """Yield the number of decimal digits to which all values are rounded, as by a text file."""
    if not is_float(want.dtype.name) or got.size < MIN_DECIMALS:
        return
    for digits in range(2, 8):
        if everywhere(lambda x, y: same_bits(x, np.round(y.astype(np.float64), digits).astype(x.dtype)), got, exact):  # noqa: B023
            yield ROUNDED, f"all values are rounded to {digits} digits after the decimal point"
            return
        rounded = everywhere(lambda x, y: nearly_bits(x, _to_digits(y, digits, x.dtype)), got, exact)  # noqa: B023
        if rounded and not everywhere(nearly_bits, got, want):
            yield ROUNDED, f"all values are rounded to {digits} decimal digits"
            return


def _to_digits(exact: Array, digits: int, dtype: np.dtype[Any]) -> Array:
    """Round each value to some decimal digits."""
    x = exact.astype(np.float64)
    with np.errstate(all="ignore"):
        scale = 10.0 ** (np.floor(np.log10(np.abs(np.where(x, x, 1.0)))) - digits + 1)
    return np.asarray((np.round(x / scale) * scale).astype(dtype))


def nearly_bits(a: Array, b: Array) -> bool:
    """Whether two tensors differ by one unit in the last place at most, as after another order of operations."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return bool(np.all(np.abs(x - y) <= epsilon(a.dtype.name) * np.abs(y)))


def _neighbours(exact: Array, want: Array) -> tuple[Array, Array, Array]:
    """Return the values of the dtype of `want` next to each exact value: the nearest, that towards zero, and that away from it."""
    kept, sizes = want.astype(np.float64), np.abs(exact.astype(np.float64))
    bits = want.view(f"u{want.dtype.itemsize}")
    toward = np.where(np.abs(kept) > sizes, bits - 1, bits).astype(bits.dtype)
    away = np.where(np.abs(kept) < sizes, bits + 1, bits).astype(bits.dtype)
    return want, toward.view(want.dtype), away.view(want.dtype)


def _fewer_bits(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find values whose last bits are zeros, with the dtype of the source."""
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    every = int(np.bitwise_or.reduce(np.ascontiguousarray(got).view(unsigned), axis=None))
    left = MANTISSA[got.dtype.itemsize]
    cut = min((every & -every).bit_length() - 1, left) if every else 0
    if cut < MIN_CUT:
        return
    unit, half = unsigned.type(1 << cut), unsigned.type(1 << (cut - 1))

    def neighbours(_: Array, right: Array) -> tuple[Array, Array, Array]:
        words = np.ascontiguousarray(right).view(unsigned)
        toward = words & ~(unit - unsigned.type(1))
        away = np.where(toward == words, words, toward + unit).astype(unsigned)
        rest, odd = words - toward, (toward & unit) != 0
        nearest = np.where((rest > half) | ((rest == half) & odd), away, toward)
        return nearest.view(want.dtype), toward.view(want.dtype), away.view(want.dtype)

    name = KNOWN_BITS.get(left - cut, f"a mantissa of {left - cut} bits")
    if everywhere(lambda x, y: same_bits(x, neighbours(y, y)[0]), got, want):
        yield ROUNDED, f"all values are rounded to {name} and stored as {want.dtype.name}"
        return
    stored = f"{name} and stored as {want.dtype.name}"
    yield from _directed(got, want, want, neighbours, stored)


def _directed(got: Array, exact: Array, want: Array, neighbours: Neighbours, to: str) -> Iterator[tuple[str, str]]:
    """Find values that are rounded to one of their two neighbours, and not always to the nearer one."""

    def holds(test: Callable[[Array, Array, Array, Array], Any]) -> bool:
        return everywhere(lambda x, y, z: test(x, *neighbours(y, z)), got, exact, want)

    down = holds(lambda x, n, t, a: same_bits(x, np.where(n < 0, a, t)))
    if holds(lambda x, n, t, a: same_bits(x, t)):
        yield TRUNCATED, f"all values are cut off to {to}, towards zero, not rounded to the nearest"
    elif holds(lambda x, n, t, a: same_bits(x, a)):
        yield NOT_NEAREST, f"all values are rounded to {to} away from zero, not to the nearest"
    elif down or holds(lambda x, n, t, a: same_bits(x, np.where(n < 0, t, a))):
        way = "down" if down else "up"
        yield NOT_NEAREST, f"all values are rounded {way} to {to}, not to the nearest"
    elif holds(lambda x, n, t, a: np.all((x == t) | (x == a))):
        text = f"some values are rounded to the farther of their two neighbours in {to}: at random, or after other arithmetic"
        yield NOT_NEAREST, text


def find_grid(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
    """Yield the grid of 8 or 4 bits on which all values are: one for the tensor, for each index of an axis, or for each group of values."""
    if not is_float(want.dtype.name):
        return
    if got.size > MOST:
        share = max(1, MOST * len(got) // got.size)
        got, exact = got[:share], exact[:share]
    eps = 0.0 if got.dtype.itemsize >= 4 else epsilon(got.dtype.name)
    ways = [("for the tensor", [values.reshape(1, -1) for values in (got, exact)])]
    for axis in sorted({0, got.ndim - 1}) if got.ndim > 1 else ():
        rows = [np.moveaxis(values, axis, 0).reshape(got.shape[axis], -1) for values in (got, exact)]
        ways.append((f"for each index of axis {axis}", rows))
    for axis in sorted({0, got.ndim - 1}) if got.ndim > 1 else ():
        for group in GROUPS:
            if group < got.shape[axis] and got.shape[axis] % group == 0:
                groups = [np.moveaxis(values, axis, -1).reshape(-1, group) for values in (got, exact)]
                ways.append((f"for each {group} values along axis {axis}", groups))
    for name, dtype in SCALED.items():
        for where, (ours, theirs) in ways:
            if _is_scaled(ours, theirs, dtype):
                yield QUANTIZED, f"the values are rounded to {name}, with a scale {where}: 8 bits each"
                return
    for where, (ours, theirs) in ways:
        if _is_coded(ours, theirs):
            yield QUANTIZED, f"the values have {CODES} sizes, as of a table, with a scale {where}: 4 bits each"
            return
    for bits, steps in BITS.items():
        for where, (ours, theirs) in ways:
            y, x = ours.astype(np.float64), theirs.astype(np.float64)
            if _is_on_grid(y, x, eps, *steps):
                yield (
                    QUANTIZED,
                    f"the values are on a grid of {2**bits} numbers, with a scale {where}: {bits} bits each",
                )
                return


def _is_coded(ours: Array, theirs: Array) -> bool:
    """Whether all rows, each divided by its largest size, have the same sixteen values, and so many that this is no chance."""
    y, x = ours.astype(np.float64), theirs.astype(np.float64)
    largest = np.abs(y).max(axis=1, keepdims=True)
    if y.size < MIN_CODED or not np.all(largest > 0) or np.any(np.abs(x - y) > 0.3 * largest):
        return False
    return len(np.unique(np.round(y[: 1 << 16] / largest[: 1 << 16], 4))) <= CODES


def _is_scaled(ours: Array, theirs: Array, dtype: Any) -> bool:
    """Whether each row, scaled so that its largest value is that of a narrow type, is rounded to that type."""
    x = theirs.astype(np.float64)
    scale = np.abs(x).max(axis=1, keepdims=True) / float(ml_dtypes.finfo(dtype).max)
    if ours.size < MIN_VALUES * (1 + len(ours)) or not np.all(scale > 0):
        return False
    made = (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale
    # One value in a hundred may be rounded the other way: the scale was rounded, too.
    slack = 4 * epsilon("float32" if ours.dtype.itemsize >= 4 else ours.dtype.name) * np.abs(made)
    return bool(np.mean(np.abs(ours.astype(np.float64) - made) <= slack) >= 0.99)


def _is_on_grid(y: Array, x: Array, eps: float, around_zero: int, from_lowest: int) -> bool:
    """Whether each row is within a step of the exact one, and its values are whole multiples of the step."""
    for low, steps in ((np.zeros((len(y), 1)), around_zero), (y.min(axis=1, keepdims=True), from_lowest)):
        size = np.abs(y - low).max(axis=1, keepdims=True) / steps
        if not np.all(np.isfinite(size)) or np.any(np.abs(x - y) > 1.02 * size + eps * np.abs(y)):
            continue
        with np.errstate(all="ignore"):
            numbers = np.nan_to_num((y - low) / size)
        slack = 1e-3 + 2 * eps * (np.abs(numbers) + np.abs(low) / np.where(size, size, 1))
        tells = slack < 0.15  # a value whose own rounding is as wide as the step tells nothing
        enough = MIN_VALUES * (1 + len(y)) if not eps else max(64, 2 * len(y))
        if int(tells.sum()) >= enough and bool(np.all((np.abs(numbers - np.round(numbers)) < slack) | ~tells)):
            return True
    return False
