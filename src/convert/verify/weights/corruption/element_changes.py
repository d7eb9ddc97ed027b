"""Name a change of single values: zeros, signs, an order of values, axes reversed, and numbers added or multiplied per index."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from convert.core.tensor_spec import is_float
from convert.numerics.bits import same_bits, unequal
from convert.numerics.compare import epsilon
from convert.verify.weights.corruption.permutations import describe_order

Array = np.ndarray[Any, np.dtype[Any]]
MAX_AXES = 4  # of a tensor whose axes are turned
MIN_EACH = 4  # values for one number per index; fewer fit any
MAX_RANK = 64  # of a change
MAX_SORTED = 1 << 24  # values whose order is looked up
PER_INDEX = ("multiplied by numbers", "numbers added", "one row changed")  # which another tensor may explain
FLAT = "values in the order of the file"


def find_element_change(got: Array, want: Array) -> tuple[str, str] | None:
    """Return name and description of a change of single values, where the tensor as a whole has no simpler name."""
    return next((change for find in _FINDERS for change in find(got, want)), None)


def _turned(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find axes that are reversed, exchanged, or both."""
    if not 2 <= got.ndim <= MAX_AXES:
        return
    corner = (0,) * got.ndim
    for order in itertools.permutations(range(got.ndim)):
        moved = want.transpose(order)
        if moved.shape != got.shape:
            continue
        for signs in itertools.product((1, -1), repeat=got.ndim):
            view = moved[tuple(slice(None, None, sign) for sign in signs)]
            if unequal(got[corner], view[corner]).any() or not same_bits(got, view):
                continue
            flipped = " and ".join(str(axis) for axis, sign in enumerate(signs) if sign < 0)
            if list(order) == sorted(order) and signs.count(-1) == 1:
                yield "rows reversed", f"the rows along axis {flipped} are in the reverse order"
            elif list(order) == sorted(order):
                yield "axes reversed", f"the values are in the reverse order along the axes {flipped}"
            elif flipped:
                axes = ", ".join(map(str, order))
                yield (
                    "rotated",
                    f"the axes are in the order {axes}, reversed along {flipped}: rotated or mirrored",
                )
            else:
                yield "axes permuted", f"the axes are in the order {', '.join(map(str, order))}"
            return


def _zeroed(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find values that became zeros, all others being right."""
    differ = unequal(got, want)
    if np.any(got[differ].astype(np.float64)):
        return
    count = int(np.count_nonzero(differ))
    lost, kept = (np.abs(want[mask].astype(np.float64)) for mask in (differ, ~differ & (want != 0)))
    if got.ndim == 2:
        rows, columns = np.indices(got.shape)
        for name, triangle in (("below", rows > columns), ("above", rows < columns)):
            if np.array_equal(differ, triangle & (want != 0)):
                yield "a triangle zeroed", f"all values {name} the diagonal are zeros"
                return
    if count < got.size and kept.size and lost.max() <= kept.min():
        yield "small values zeroed", f"the {count} smallest values, up to {lost.max():.3g}, are zeros"
        return
    fours = differ.reshape(-1, 4).sum(axis=1) if got.size % 4 == 0 else np.zeros(0)
    if len(fours) > 2 and np.all(fours == fours[0]):
        yield "values zeroed", f"{fours[0]} of each 4 values are zeros: pruned"
        return
    yield "values zeroed", f"{count} of {got.size} values, at single places, are zeros"


def _signs(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    if is_float(want.dtype.name) and same_bits(np.abs(got), np.abs(want)):
        count = int(np.count_nonzero(unequal(got, want)))
        yield "signs changed", f"{count} of {got.size} values have the other sign"


def _reordered(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find the same values at other places."""
    differ = unequal(got, want)
    places = np.argwhere(differ)
    if got.size > MAX_SORTED or len(places) < 2:
        return
    x, y = (np.ascontiguousarray(values).reshape(-1).view(f"u{values.dtype.itemsize}") for values in (got, want))
    ours, theirs = np.argsort(x, kind="stable"), np.argsort(y, kind="stable")
    if not np.array_equal(x[ours], y[theirs]):
        return
    if len(places) == 2:
        first, second = (place.tolist() for place in places)
        yield "two values exchanged", f"the values at {first} and {second} are exchanged"
        return
    name, text = "values in another order", f"{len(places)} of {got.size} values are at other places, and none is new"
    if len(np.unique(y)) == len(y):
        order = np.empty(len(x), np.int64)
        order[ours] = theirs
        if (found := describe_order(order, FLAT, whole=False)) is not None:
            text = found.text
    yield name, text


def _added(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find one number that is added to all values, or to all on the diagonal."""
    if not is_float(want.dtype.name):
        return
    x, y, slack = _exact(got, want)
    number = float(np.mean(x - y))
    if _fits(x, y + number, slack) and np.all(abs(number) > 16 * slack):
        yield "a number added", f"{number:.7g} is added to all values"
    elif got.ndim == 2 and got.shape[0] == got.shape[1]:
        number = float(np.mean(np.diagonal(x - y)))
        if _fits(x, y + number * np.eye(len(x)), slack) and abs(number) > 16 * float(np.median(slack)):
            times = "" if abs(number - 1) < 1e-6 else f" times {number:.7g}"
            yield "identity added", f"the identity{times} is added: a residual connection that the code adds, too?"


def _per_index(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find a number for each index of an axis that all its values are multiplied by, or that is added to them."""
    if not is_float(want.dtype.name) or got.ndim < 2 or not _tells(got, want):
        return
    for axis, size in enumerate(got.shape):
        if got.size < MIN_EACH * size or size < 2:
            continue
        x, y, slack = (np.moveaxis(v, axis, 0).reshape(size, -1) for v in _exact(got, want))
        norms = np.sum(y * y, axis=1, keepdims=True)
        if np.all(norms > 0):
            factors = np.sum(x * y, axis=1, keepdims=True) / norms
            if _fits(x, factors * y, slack):
                yield _factors(factors[:, 0], np.sqrt(norms[:, 0]), axis)
                return
        numbers = np.mean(x - y, axis=1, keepdims=True)
        if _fits(x, y + numbers, slack):
            if _fits(numbers, -np.mean(y, axis=1, keepdims=True), 16 * slack.max(axis=1, keepdims=True)):
                yield "mean subtracted", f"the mean of each index of axis {axis} is subtracted from its values"
            else:
                yield (
                    "numbers added",
                    f"to each index of axis {axis} a number of its own is added: {_few(numbers[:, 0])}",
                )
            return


def _factors(factors: Array, norms: Array, axis: int) -> tuple[str, str]:
    if np.allclose(factors * norms, (factors * norms)[0], rtol=1e-5):
        length = float((factors * norms)[0])
        return "normalised", f"each index of axis {axis} is scaled to the norm {length:.4g}"
    return "multiplied by numbers", f"each index of axis {axis} is multiplied by a number of its own: {_few(factors)}"


def _few(numbers: Array) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers[:3]) + (", ..." if len(numbers) > 3 else "")


def _exact(got: Array, want: Array) -> tuple[Array, Array, Array]:
    """Return both in float64, and how far rounding may move each value."""
    x, y = got.astype(np.float64), want.astype(np.float64)
    eps = max(epsilon(want.dtype.name), epsilon("float32"))
    with np.errstate(invalid="ignore"):
        return x, y, eps * (4 * np.maximum(np.abs(x), np.abs(y)) + np.abs(y).max())


def _tells(got: Array, want: Array) -> bool:
    """Whether the change is larger than a few roundings, which any number for each index explains as well."""
    x, y, slack = _exact(got, want)
    differ = np.abs(x - y)[unequal(got, want)]
    return bool(np.median(differ) > 4 * np.median(slack))


def _fits(x: Array, made: Array, slack: Array) -> bool:
    with np.errstate(invalid="ignore"):
        return bool(np.all(np.abs(x - made) <= slack))


def _scaled_and_shifted(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find a factor and a number that is added, the same for all values; and a matrix made symmetric."""
    if not is_float(want.dtype.name) or got.size < MIN_EACH or not _tells(got, want):
        return
    x, y, slack = _exact(got, want)
    spread = float(np.var(y))
    if spread > 0:
        factor = float(np.mean((x - x.mean()) * (y - y.mean()))) / spread
        number = float(x.mean() - factor * y.mean())
        if factor and _fits(x, factor * y + number, slack + slack.max() * (abs(factor) + 1)):
            text = f"all values are multiplied by {factor:.7g}, and {number:.7g} is added"
            yield "scaled and shifted", text
            return
    if got.ndim == 2 and got.shape[0] == got.shape[1] and _fits(x, (y + y.T) / 2, slack):
        yield "made symmetric", "the matrix is the mean of the right one and its transpose"


def _low_rank(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find a change of low rank, as of a low-rank pair; and a matrix that was reduced to a low rank."""
    if not is_float(want.dtype.name) or got.ndim != 2 or min(got.shape) < 4 or not _tells(got, want):
        return
    x, y, slack = _exact(got, want)
    if not np.all(np.isfinite(x)):
        return
    differ = unequal(got, want)
    rows, columns = np.flatnonzero(differ.any(axis=1)), np.flatnonzero(differ.any(axis=0))
    change = _rank((x - y)[np.ix_(rows, columns)], 4 * float(slack.max()))  # of a few rows, the rank is low anyway
    whole = _rank(x, 4 * float(slack.max()))
    if change:
        yield (
            "a change of low rank",
            f"the difference from the source has rank {change}: a low-rank pair, or an edit of the weight",
        )
    elif whole and not _rank(y, 4 * float(slack.max())):
        yield "reduced to a low rank", f"the matrix has rank {whole}, that of the source a higher one"


def _rank(x: Array, slack: float) -> int:
    """Return the rank of a matrix if it is at most a quarter of its size, up to `slack` in each value; otherwise 0."""
    most = min(MAX_RANK, min(x.shape) // 4)
    if not most:
        return 0
    taken = x @ np.random.default_rng(0).standard_normal((x.shape[1], most + 1))
    basis, sizes, _ = np.linalg.svd(taken, full_matrices=False)
    rank = int(np.count_nonzero(sizes > 1e-5 * sizes[0])) if sizes[0] > 0 else 0
    if not 0 < rank <= most:
        return 0
    basis = basis[:, :rank]
    return rank if float(np.abs(x - basis @ (basis.T @ x)).max()) <= slack else 0


_FINDERS = (_turned, _zeroed, _signs, _reordered, _added, _per_index, _scaled_and_shifted, _low_rank)
