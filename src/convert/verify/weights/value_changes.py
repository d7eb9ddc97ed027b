"""Name a change of the values of a whole tensor: other bytes, fewer bits, a function of each value, rows that occur twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from convert.numerics.bits import same_bits
from convert.verify.weights.relations import common_factor, places_of_rows

Array = np.ndarray[Any, np.dtype[Any]]
NARROWER = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
LEVELS = 256  # of an 8-bit number
MIN_VALUES = 4  # of a row of whole multiples; the largest of them is one by its definition
SAMPLE = 1 << 20  # values of a large tensor that are compared in float64
MAX_AXES = 4  # of a tensor whose axes are permuted: 24 orders
# Functions that code applies to a parameter when it is used, and that a conversion may apply as well.
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "softplus": lambda x: np.logaddexp(x, 0.0),
    "exp": np.exp,
    "log": np.log,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "square": np.square,
    "sqrt": np.sqrt,
    "1 / sqrt": lambda x: 1 / np.sqrt(x),
    "1 / x": lambda x: 1 / x,
    "abs": np.abs,
}


def find_value_change(got: Array, want: Array) -> tuple[str, str] | None:
    """Return name and description of the change that makes `got` of `want`; None if it is none of the known ones.

    Args:
        got: of the shape and dtype of `want`, and different in more than one value.
    """
    return next((change for find in _FINDERS for change in find(got, want)), None)


def _swapped_bytes(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    if want.dtype.itemsize > 1 and got.tobytes() == want.byteswap().tobytes():
        yield "bytes swapped", f"the {want.dtype.itemsize} bytes of each value are in the reverse order (big-endian)"


def _reshaped(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find the values in the order of other axes: ``reshape`` where a permutation is needed."""
    if not 2 <= want.ndim <= MAX_AXES:
        return
    for order in itertools.permutations(range(want.ndim)):
        moved = want.transpose(order)
        if moved.shape != got.shape and same_bits(got.reshape(-1), np.ascontiguousarray(moved).reshape(-1)):
            yield (
                "reshaped, not permuted",
                f"the values are those of shape {list(moved.shape)}, reshaped to {list(got.shape)}",
            )
            return


def _narrowed(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    if want.dtype.kind != "f" or want.dtype.itemsize < 4:
        return
    for name, dtype in NARROWER.items():
        with np.errstate(over="ignore", invalid="ignore"):
            if same_bits(got, want.astype(dtype).astype(want.dtype)):
                yield "rounded", f"all values are rounded to {name} and stored as {want.dtype.name}"
                return
    if want.dtype.itemsize == 4 and same_bits(got, (want.view(np.uint32) & np.uint32(0xFFFF0000)).view(want.dtype)):
        yield "truncated", "all values are cut off to bfloat16, not rounded, and stored as float32"


def _constant(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    first = got.reshape(-1)[0]
    if first != 0 and bool(np.all(got == first)):
        name = "all ones" if first == 1 else "all values equal"
        yield name, f"all {got.size} values are {first}, as before training; those of the source are not"


def _clipped(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    low, high = got.min(), got.max()
    if low < high and same_bits(got, np.clip(want, low, high)):
        yield "clipped", f"all values are clipped to {low} to {high}"


def _zeroed_tail(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    flat, right = got.reshape(-1), want.reshape(-1)
    kept = int(np.flatnonzero(flat)[-1]) + 1 if np.any(flat) else 0
    if 0 < kept < flat.size and same_bits(flat[:kept], right[:kept]):
        yield "tail zeroed", f"the last {flat.size - kept} of {flat.size} values are zeros, in the order of the file"


def _applied(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find a function of each value, of the source's values or of the file's."""
    if want.dtype.kind == "c" or got.size < 4:
        return
    every = max(1, got.size // SAMPLE)
    x, y = (values.reshape(-1)[::every].astype(np.float64) for values in (want, got))
    epsilon = float(np.finfo(np.float32).eps) if want.dtype.itemsize >= 4 else 2.0**-8
    with np.errstate(all="ignore"):
        for name, function in FUNCTIONS.items():
            for made, other, how in ((function(x), y, "is applied to"), (function(y), x, "is missing from")):
                bound = 8 * epsilon * np.abs(other).max()
                if np.isfinite(made).all() and float(np.abs(made - other).max()) <= bound:
                    yield f"{name} applied" if how == "is applied to" else f"{name} missing", f"{name} {how} all values"
                    return


def _quantized(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find values on a grid of 8 bits, of the tensor or of each row along its first or last axis."""
    if want.dtype.kind in "iub":
        return
    if got.size > 16 * SAMPLE:  # the grid of a part is found in the same way
        got, want = (values[: max(1, 16 * SAMPLE * len(values) // values.size)] for values in (got, want))
    ways = [("for the tensor", [values.reshape(1, -1) for values in (got, want)])]
    for axis in sorted({0, got.ndim - 1}) if got.ndim > 1 else ():
        rows = [np.moveaxis(values, axis, 0).reshape(got.shape[axis], -1) for values in (got, want)]
        ways.append((f"for each index of axis {axis}", rows))
    for where, (ours, theirs) in ways:
        y, x = ours.astype(np.float64), theirs.astype(np.float64)
        step = np.abs(x).max(axis=1, keepdims=True) / (LEVELS / 2 - 1)
        if np.all(np.abs(x - y) <= 1.02 * step) and (_few(y) or _multiples(y)):
            yield "quantized", f"the values have at most {LEVELS} different sizes, with a scale {where}: 8 bits each"
            return


def _few(rows: Array) -> bool:
    """Whether each row has few different values, and so many values that this is no chance."""
    return rows.shape[1] > 2 * LEVELS and all(len(np.unique(row)) <= LEVELS for row in rows)


def _multiples(rows: Array) -> bool:
    """Whether the values of each row are whole multiples of a 127th of its largest, and so many that this is no chance."""
    with np.errstate(all="ignore"):
        numbers = rows / np.abs(rows).max(axis=1, keepdims=True) * (LEVELS / 2 - 1)
    return rows.size >= MIN_VALUES * (1 + len(rows)) and bool(np.all(np.abs(numbers - np.round(numbers)) < 1e-3))


def _repeated(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find rows of the source that occur twice, in place of others."""
    for axis, size in enumerate(got.shape):
        found = places_of_rows(got, want, axis)
        if found is None or -1 in found or len(set(found)) == size or got.size == size:
            continue
        lost = sorted(set(range(size)) - set(found))
        if 2 * len(lost) == size and found[: size // 2] == found[size // 2 :]:
            yield (
                "one half twice",
                f"both halves of axis {axis} hold the rows {found[0]} to {found[size // 2 - 1]} of the source",
            )
        else:
            where = found.index(max(found, key=found.count))
            yield (
                "rows repeated",
                f"{len(lost)} rows along axis {axis} are missing, {lost[:4]} first; row {found[where]} occurs {found.count(found[where])} times",
            )
        return


def _multiplied(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    if (factor := common_factor(got, want)) is not None:
        yield "multiplied by a number", f"all values are multiplied by {factor:.7g}"


def _transposed(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    if want.ndim != 2 or want.shape[0] != want.shape[1]:
        return
    if same_bits(got, want.T):
        yield "transposed", "the matrix is transposed"
    elif (factor := common_factor(got, want.T)) is not None:
        yield "transposed and multiplied", f"the matrix is transposed, and all values are multiplied by {factor:.7g}"


# Exact changes first: a rounded tensor is also close to a multiple of the right one.
_FINDERS = (
    _swapped_bytes,
    _reshaped,
    _narrowed,
    _constant,
    _zeroed_tail,
    _clipped,
    _repeated,
    _applied,
    _transposed,
    _multiplied,
    _quantized,
)
