"""Name a change of the values of a whole tensor: other bytes, a function of each value, rows that occur twice, fewer bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from convert.core.tensor_spec import is_float
from convert.numerics.bits import same_bits
from convert.numerics.blocks import BLOCK, cut, everywhere
from convert.numerics.compare import epsilon
from convert.numerics.roots import factor_text
from convert.verify.weights.corruption.relations import common_factor, first_found, places_of_rows
from convert.verify.weights.corruption.rounding import find_decimals, find_grid, find_rounding

Array = np.ndarray[Any, np.dtype[Any]]
SAMPLE = 1 << 20  # values of a large tensor that are compared in float64
LINE = 1 << 12  # values that show which of two orders it is
MIN_SHIFTED = 4  # rows of a table whose order tells something
MIN_SCALED = 4  # values that are the same multiple of a function's values by no chance
MIN_INSIDE = 2  # values of a clipped tensor that keep theirs
MAX_AXES = 4  # of a tensor whose axes are permuted: 24 orders
# Functions that code applies to a parameter when it is used, and that a conversion may apply as well.
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "softplus": lambda x: np.logaddexp(x, 0.0),
    "exp": np.exp,
    "-exp": lambda x: -np.exp(x),
    "log1p": np.log1p,
    "expm1": np.expm1,
    "log": np.log,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "square": np.square,
    "sqrt": np.sqrt,
    "1 / sqrt": lambda x: 1 / np.sqrt(x),
    "1 / x": lambda x: 1 / x,
    "abs": np.abs,
}


def find_value_change(got: Array, want: Array, exact: Array | None = None) -> tuple[str, str] | None:
    """Return name and description of the change that makes `got` of `want`; None if it is none of the known ones.

    Args:
        got: of the shape and dtype of `want`, and different in more than one value.
        exact: `want` before the cast to its dtype; None: nothing is cast.
    """
    before = want if exact is None else exact
    return first_found(_FINDERS, _OF_THE_WHOLE, got, want, before)


def _swapped_bytes(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
    if want.dtype.itemsize > 1 and everywhere(lambda x, y: same_bits(x, y.byteswap()), got, want):
        yield "bytes swapped", f"the {want.dtype.itemsize} bytes of each value are in the reverse order (big-endian)"


def _other_bits(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
    """Find bits that were read as those of another type, and the 16-bit halves of each value exchanged."""
    if want.dtype.name != "float32":
        return
    if everywhere(lambda x, y: np.array_equal(x, (y << 16) | (y >> 16)), got.view(np.uint32), want.view(np.uint32)):
        yield "halves of values swapped", "the two halves of the 4 bytes of each value are exchanged"
        return
    for written, read in ((bfloat16, np.float16), (np.float16, bfloat16)):
        with np.errstate(all="ignore"):
            found = everywhere(
                lambda x, y: same_bits(x, np.ascontiguousarray(y.astype(written)).view(read).astype(np.float32)),  # noqa: B023
                got,
                want,
            )
        if found:
            names = np.dtype(written).name, np.dtype(read).name
            yield "bits of another type", f"the values were written as {names[0]}, and their bits read as {names[1]}"
            return


def _reshaped(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
    """Find the values in the order of other axes: ``reshape`` where a permutation is needed."""
    if not 2 <= want.ndim <= MAX_AXES:
        return
    longer = [size for size in got.shape if size > 1]
    for order in itertools.permutations(range(want.ndim)):
        moved = want.transpose(order)
        # An axis of size 1 has no place of its own: moved elsewhere, the order of the others is a transposition.
        if [size for size in moved.shape if size > 1] != longer and _same_order(got, moved):
            yield (
                "reshaped, not permuted",
                f"the values are those of shape {list(moved.shape)}, reshaped to {list(got.shape)}",
            )
            return


def _same_order(got: Array, moved: Array) -> bool:
    """Whether two tensors of other shapes have the same values in the order of the file: the first tell most that have not."""
    first = slice(0, LINE)
    return same_bits(got.flat[first], moved.flat[first]) and same_bits(
        got.reshape(-1), np.ascontiguousarray(moved).reshape(-1)
    )


def _constant(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
    first = got.reshape(-1)[0]
    if got.size > 1 and first != 0 and everywhere(lambda x: np.all(x == first), got):
        name = "all ones" if first == 1 else "all values equal"
        yield name, f"all {got.size} values are {first}, as before training; those of the source are not"


def _clipped(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
    low, high = (find(np.array([find(x) for (x,) in cut(got)])) for find in (np.min, np.max))
    inside = sum(int(np.count_nonzero((low < y) & (y < high))) for (y,) in cut(want))  # few values tell nothing
    if low < high and inside >= MIN_INSIDE and everywhere(lambda x, y: same_bits(x, np.clip(y, low, high)), got, want):
        yield "clipped", f"all values are clipped to {low} to {high}"


def _zeroed_tail(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
    flat, right = got.reshape(-1), want.reshape(-1)
    starts = range((flat.size - 1) // BLOCK * BLOCK, -1, -BLOCK)  # from the end
    ends = (k + int(last[-1]) + 1 for k in starts if len(last := np.flatnonzero(flat[k : k + BLOCK])))
    kept = next(ends, 0)
    whole = (
        got.size // got.shape[0] if got.ndim > 1 else 0
    )  # values of a row: whole rows of zeros have a name of their own
    if 0 < kept < flat.size and (whole == 0 or kept % whole) and same_bits(flat[:kept], right[:kept]):
        yield "tail zeroed", f"the last {flat.size - kept} of {flat.size} values are zeros, in the order of the file"


def _applied(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
    """Find a function of each value, of the source's values or of the file's."""
    if not is_float(want.dtype.name):
        return
    every = max(1, got.size // SAMPLE)
    x, y = (values.reshape(-1)[::every].astype(np.float64) for values in (exact, got))
    eps = epsilon("float32") if want.dtype.itemsize >= 4 else epsilon(want.dtype.name)
    for name, function in FUNCTIONS.items():
        if _is_function(function, x, y, epsilon("float32"), eps) and not _is_function(function, x, x, eps, eps):
            yield f"{name} applied", f"{name} is applied to all values"
            return
        if _is_function(function, y, x, eps, epsilon("float32")) and not _is_function(function, y, y, eps, eps):
            yield f"{name} missing", f"{name} is missing from all values"
            return


def _applied_and_multiplied(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
    """Find a function of each value and a number behind it, such as a scale that code makes of a parameter when it is used."""
    if not is_float(want.dtype.name) or got.size < MIN_SCALED:
        return
    for name, function in FUNCTIONS.items():
        if (factor := common_factor(got, exact, of=function)) is not None:
            text = f"{name} is applied to all values, and they are multiplied by {factor_text(factor)}"
            yield f"{name} applied and multiplied", text
            return


def _is_function(function: Callable[[Array], Array], x: Array, y: Array, eps_x: float, eps_y: float) -> bool:
    """Whether each `y` is a function of `x`, up to a few roundings of both."""
    with np.errstate(all="ignore"):
        ends = np.stack([function(x * (1 - 4 * eps_x)), function(x), function(x * (1 + 4 * eps_x))])
        if not np.all(np.isfinite(ends)):
            return False
        slack = 8 * max(eps_y, epsilon("float32")) * np.abs(y)
        return bool(np.all((y >= ends.min(axis=0) - slack) & (y <= ends.max(axis=0) + slack)))


def _shifted(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
    """Find rows that moved together over others, from one row on: positions with an offset, a token inserted."""
    for axis, size in enumerate(got.shape):
        found = places_of_rows(got, want, axis) if got.size > size >= MIN_SHIFTED else None
        if found is None or max(found) < 0:
            continue
        places = np.array(found)
        offsets = np.where(places < 0, 0, places - np.arange(size))
        moved = np.flatnonzero(offsets)
        if len(moved) < 2 or len(set(offsets[moved].tolist())) != 1 or moved[-1] - moved[0] + 1 != len(moved):
            continue
        by, start, stop = int(offsets[moved[0]]), int(moved[0]), int(moved[-1])
        if int(np.count_nonzero(places < 0)) > abs(by):
            continue
        if 2 * len(moved) == size and not np.any(places < 0) and abs(by) == len(moved):
            continue  # one half twice
        inner = math.prod(got.shape[axis + 1 :])
        if same_bits(got.reshape(-1), np.roll(want.reshape(-1), -by * inner)):
            return  # none is lost: the values moved in the order of the file
        if abs(by) >= len(moved):
            text = (
                f"the rows {start} to {stop} along axis {axis} hold the rows {start + by} to {stop + by} of the source"
            )
            yield "rows repeated", text
        else:
            way = "back" if by > 0 else "forward"
            text = f"the rows along axis {axis} are moved {way} by {abs(by)} from row {start} on; as many rows are lost"
            yield "rows shifted", text
        return


def _repeated(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
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
            rows, are = ("1 row", "is") if len(lost) == 1 else (f"{len(lost)} rows", "are")
            yield (
                "rows repeated",
                f"{rows} along axis {axis} {are} missing, {lost[:4]} first; row {found[where]} occurs {found.count(found[where])} times",
            )
        return


def _multiplied(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
    if (factor := common_factor(got, want)) is not None:
        yield "multiplied by a number", f"all values are multiplied by {factor_text(factor)}"


def _transposed(got: Array, want: Array, exact: Array) -> Iterator[tuple[str, str]]:
    if want.ndim != 2 or want.shape[0] != want.shape[1]:
        return
    if same_bits(got, want.T):
        yield "transposed", "the matrix is transposed"
    elif (factor := common_factor(got, want.T)) is not None:
        yield (
            "transposed and multiplied",
            f"the matrix is transposed, and all values are multiplied by {factor_text(factor)}",
        )


# They are no changes of each value, so that some values do not tell whether there is one.
_OF_THE_WHOLE = (_reshaped, _zeroed_tail, _shifted, _repeated, _applied, _transposed, find_grid)
# Exact changes first: a rounded tensor is also close to a multiple of the right one.
_FINDERS = (
    _swapped_bytes,
    _other_bits,
    _reshaped,
    _constant,
    find_rounding,
    _zeroed_tail,
    _clipped,
    _shifted,
    _repeated,
    _applied,
    _transposed,
    _multiplied,
    _applied_and_multiplied,
    find_grid,
    find_decimals,
)
