"""Name a change of single values: zeros, signs, an order of values, axes reversed, and numbers added or multiplied per index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from convert.core.tensor_spec import is_float
from convert.numerics.bits import count_unequal, same_bits, unequal
from convert.numerics.blocks import BLOCK, everywhere, in_float64, largest
from convert.numerics.compare import epsilon
from convert.verify.weights.corruption.permutations import describe_order
from convert.verify.weights.corruption.relations import (
    MOST_WHOLE,
    along,
    differing,
    first_found,
    sample,
    sums_along,
)

Array = np.ndarray[Any, np.dtype[Any]]
MAX_AXES = 4  # of a tensor whose axes are turned
MIN_EACH = 4  # values for one number per index; fewer fit any
MAX_RANK = 64  # of a change
SIDE = 1 << 10  # of a part of a large square matrix
MAX_SORTED = 1 << 24  # values whose order is looked up
PER_INDEX = ("multiplied by numbers", "numbers added", "one row changed")  # which another tensor may explain
FLAT = "values in the order of the file"


def find_element_change(got: Array, want: Array) -> tuple[str, str] | None:
    """Return name and description of a change of single values, where the tensor as a whole has no simpler name."""
    return first_found(_FINDERS, _OF_THE_WHOLE, got, want)


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
    if not everywhere(lambda x, y: not np.any(x[unequal(x, y)].astype(np.float64)), got, want):
        return
    differ = unequal(got, want)
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
    if is_float(want.dtype.name) and everywhere(lambda x, y: same_bits(np.abs(x), np.abs(y)), got, want):
        count = count_unequal(got, want)
        yield "signs changed", f"{count} of {got.size} values have the other sign"


def _reordered(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find the same values at other places."""
    if got.size > MAX_SORTED:
        return
    x, y = (np.ascontiguousarray(values).reshape(-1).view(f"u{values.dtype.itemsize}") for values in (got, want))
    if x.sum(dtype=np.uint64) != y.sum(dtype=np.uint64):  # tells most that are other values before they are sorted
        return
    ours, theirs = np.argsort(x, kind="stable"), np.argsort(y, kind="stable")
    if not np.array_equal(x[ours], y[theirs]):
        return
    if len(places := np.argwhere(unequal(got, want))) < 2:
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
    """Find one number that is added to all values."""
    if not is_float(want.dtype.name):
        return
    number = sum(float(np.sum(x - y)) for x, y in in_float64(got, want)) / got.size
    top = largest(want)

    def added(got: Array, want: Array) -> bool:
        x, y, slack = _exact(got, want, top)
        return _fits(x, y + number, slack) and bool(np.all(abs(number) > 16 * slack))

    if everywhere(added, got, want):
        yield "a number added", f"{number:.7g} is added to all values"


def _square(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find a number that is added to all values on the diagonal, and a matrix made symmetric."""
    if not is_float(want.dtype.name) or got.ndim != 2 or got.shape[0] != got.shape[1]:
        return
    few = slice(None, None, len(got) // SIDE or 1)  # the same indices of both axes
    if got.size > MOST_WHOLE and next(_square(got[few, few], want[few, few]), None) is None:
        return
    x, y, slack = _exact(got, want)
    number = float(np.mean(np.diagonal(x - y)))
    if _fits(x, y + number * np.eye(len(x)), slack) and abs(number) > 16 * float(np.median(slack)):
        times = "" if abs(number - 1) < 1e-6 else f" times {number:.7g}"
        yield "identity added", f"the identity{times} is added: a residual connection that the code adds, too?"
    elif _tells(got, want) and _fits(x, (y + y.T) / 2, slack):
        yield "made symmetric", "the matrix is the mean of the right one and its transpose"


def _per_index(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find a number for each index of an axis that all its values are multiplied by, or that is added to them."""
    if not is_float(want.dtype.name) or got.ndim < 2 or not _tells(got, want):
        return
    top = largest(want)
    for axis, size in enumerate(got.shape):
        if got.size < MIN_EACH * size or size < 2:
            continue
        norms, products, means, right_means = sums_along(got, want, axis)
        if np.all(norms > 0):
            factors = products / norms
            if _fit_each(got, want, axis, top, lambda y, k: y * factors[k]):  # noqa: B023
                yield _factors(factors, np.sqrt(norms), axis)
                return
        numbers = means - right_means
        if _fit_each(got, want, axis, top, lambda y, k: y + numbers[k]):  # noqa: B023
            if _fits(numbers, -right_means, np.full(size, 16 * _largest_slack(got, want))):
                yield "mean subtracted", f"the mean of each index of axis {axis} is subtracted from its values"
            else:
                yield (
                    "numbers added",
                    f"to each index of axis {axis} a number of its own is added: {_few(numbers)}",
                )
            return


def _fit_each(got: Array, want: Array, axis: int, top: float, made: Callable[[Array, Array], Array]) -> bool:
    """Whether `made` gives all values, from the right ones and the index of each along an axis."""

    def fits(got: Array, want: Array, indices: Array) -> bool:
        x, y, slack = _exact(got, want, top)
        return _fits(x, made(y, indices), slack)

    return everywhere(fits, got, want, along(np.arange(got.shape[axis]), axis, got.shape))


def _factors(factors: Array, norms: Array, axis: int) -> tuple[str, str]:
    if np.allclose(factors * norms, (factors * norms)[0], rtol=1e-5):
        length = float((factors * norms)[0])
        return "normalised", f"each index of axis {axis} is scaled to the norm {length:.4g}"
    return "multiplied by numbers", f"each index of axis {axis} is multiplied by a number of its own: {_few(factors)}"


def _few(numbers: Array) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers[:3]) + (", ..." if len(numbers) > 3 else "")


def _exact(got: Array, want: Array, top: float | None = None) -> tuple[Array, Array, Array]:
    """Return both in float64, and how far rounding may move each value.

    Args:
        top: the largest size of a right value, where these are a block of a tensor.
    """
    x, y = got.astype(np.float64), want.astype(np.float64)
    eps = max(epsilon(want.dtype.name), epsilon("float32"))
    with np.errstate(invalid="ignore"):
        return x, y, eps * (4 * np.maximum(np.abs(x), np.abs(y)) + (np.abs(y).max() if top is None else top))


def _largest_slack(got: Array, want: Array) -> float:
    """Return how far rounding may move the largest value."""
    top = largest(want)
    return max(epsilon(want.dtype.name), epsilon("float32")) * (4 * max(largest(got), top) + top)


def _tells(got: Array, want: Array) -> bool:
    """Whether the change is larger than a few roundings, which any number for each index explains as well."""
    got, want = sample(got, want)
    x, y, slack = _exact(got, want)
    differ = np.abs(x - y)[unequal(got, want)]
    return bool(np.median(differ) > 4 * np.median(slack))


def _fits(x: Array, made: Array, slack: Array) -> bool:
    with np.errstate(invalid="ignore"):
        return bool(np.all(np.abs(x - made) <= slack))


def _scaled_and_shifted(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find a factor and a number that is added, the same for all values."""
    if not is_float(want.dtype.name) or got.size < MIN_EACH or not _tells(got, want):
        return
    means = [sum(float(block.sum()) for (block,) in in_float64(x)) / got.size for x in (got, want)]
    sums = np.zeros(2)
    for x, y in in_float64(got, want):
        sums += np.vdot(x - means[0], y - means[1]), np.sum(np.square(y - means[1]))
    if not sums[1] > 0:
        return
    factor, top = float(sums[0] / sums[1]), largest(want)
    number, rounding = means[0] - factor * means[1], _largest_slack(got, want) * (abs(factor) + 1)

    def fits(got: Array, want: Array) -> bool:
        x, y, slack = _exact(got, want, top)
        return _fits(x, factor * y + number, slack + rounding)

    if factor and everywhere(fits, got, want):
        text = f"all values are multiplied by {factor:.7g}, and {number:.7g} is added"
        yield "scaled and shifted", text


def _low_rank(got: Array, want: Array) -> Iterator[tuple[str, str]]:
    """Find a change of low rank, as of a low-rank pair; and a matrix that was reduced to a low rank."""
    if not is_float(want.dtype.name) or got.ndim != 2 or min(got.shape) < 4 or not _tells(got, want):
        return
    slack = 4 * _largest_slack(got, want)
    if not np.isfinite(slack):
        return
    rows, columns = differing(got, want)  # of a few rows, the rank is low anyway

    def change(some: slice) -> Array:
        place = np.ix_(rows[some], columns)
        return np.asarray(got[place].astype(np.float64) - want[place].astype(np.float64))

    if rank := _rank(change, (len(rows), len(columns)), slack):
        yield (
            "a change of low rank",
            f"the difference from the source has rank {rank}: a low-rank pair, or an edit of the weight",
        )
        return
    rank, right = (_rank(lambda some: x[some].astype(np.float64), x.shape, slack) for x in (got, want))  # noqa: B023
    if rank and not right:
        yield "reduced to a low rank", f"the matrix has rank {rank}, that of the source a higher one"


def _rank(rows: Callable[[slice], Array], shape: tuple[int, ...], slack: float) -> int:
    """Return the rank of a matrix if it is at most a quarter of its size, up to `slack` in each value; otherwise 0.

    Args:
        rows: some of its rows in float64.
        shape: of the matrix.
    """
    height, width = shape
    most = min(MAX_RANK, min(shape) // 4)
    if not most:
        return 0
    step = max(1, BLOCK // width)
    places = [slice(k, k + step) for k in range(0, height, step)]
    random = np.random.default_rng(0).standard_normal((width, most + 1))
    basis, sizes, _ = np.linalg.svd(np.concatenate([rows(k) @ random for k in places]), full_matrices=False)
    rank = int(np.count_nonzero(sizes > 1e-5 * sizes[0])) if sizes[0] > 0 else 0
    if not 0 < rank <= most:
        return 0
    basis = basis[:, :rank]
    inner = sum(basis[k].T @ rows(k) for k in places)
    return rank if all(float(np.abs(rows(k) - basis[k] @ inner).max()) <= slack for k in places) else 0


_FINDERS = (_turned, _zeroed, _signs, _reordered, _added, _per_index, _scaled_and_shifted, _square, _low_rank)
_OF_THE_WHOLE = (_turned, _reordered, _square)  # some values do not tell whether there is such a change
