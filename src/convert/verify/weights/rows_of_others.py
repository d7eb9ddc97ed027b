"""Name a tensor that is made of rows of other tensors, such as gate and up in turn, or of its heads' mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from convert.core.tensor_spec import is_float
from convert.layers.base import Step
from convert.layers.step_tensor import expected
from convert.numerics.bits import same_bits
from convert.numerics.blocks import BLOCK, largest
from convert.numerics.compare import epsilon
from convert.planning.plan import Plan
from convert.verify.weights.corruption.find import Corruption
from convert.verify.weights.corruption.relations import indices_that_differ
from convert.verify.weights.folded import MAX_OTHERS, layer_of

Array = np.ndarray[Any, np.dtype[Any]]
Place = tuple[str, int]  # a tensor, and the index of one of its rows
SEVERAL, AVERAGED = "rows of several tensors", "blocks averaged"
A_ROW, IN_A_ROW = "a row of another tensor", "another tensor in a row"
SHOWN = 4  # runs of rows
MIN_ROW = 2  # values of a row that are another row's by no chance
MIN_TENSOR = 4  # the same of a whole tensor


def find_rows_of_others(step: Step, plan: Plan, got: Array, want: Array) -> Corruption | None:
    """Return which rows of which tensors of the layer the tensor holds; None if a row is none of theirs."""
    layer = layer_of(step.name)
    like = [s for s in plan.steps if s.parts and s.spec.dtype == step.spec.dtype and len(s.spec.shape) == got.ndim]
    near = [s for s in like if layer_of(s.name) == layer]
    for axis in range(got.ndim if got.ndim > 1 else 0):
        rest = (*got.shape[:axis], *got.shape[axis + 1 :])
        fit = [s for s in near if (*s.spec.shape[:axis], *s.spec.shape[axis + 1 :]) == rest][:MAX_OTHERS]
        if len(fit) < 2 or got.size < MIN_ROW * got.shape[axis]:
            continue
        known: dict[int, Place] = {}  # by 64 bits of each row: the rows of a layer may be larger than memory
        for other in fit:
            for k, row in enumerate(_rows(expected(other, plan.source), axis)):
                known.setdefault(hash(row.tobytes()), (other.name, k))
        places = [known.get(hash(row.tobytes())) for row in _rows(got, axis)]
        found = [place for place in places if place is not None]
        if len(found) == len(places) and len({name for name, _ in found}) > 1:
            return Corruption(SEVERAL, f"along axis {axis}, it holds {_described(found, layer)}")
    return find_averaged(got, want)


def find_one_row(step: Step, plan: Plan, got: Array, want: Array) -> Corruption | None:
    """Find a small tensor, such as that of the class token, in a row of a table, and a row of a table in a small tensor."""
    others = [
        s for s in plan.steps if s.parts and s.name != step.name and not s.tied and s.spec.dtype == step.spec.dtype
    ]
    place = indices_that_differ(got, want)
    if place is not None and len(place.indices) == 1 and _tells(row := place.take(got).reshape(-1)):
        for other in [s for s in others if s.spec.size == row.size][:MAX_OTHERS]:
            if same_bits(row, expected(other, plan.source).reshape(-1)):
                return Corruption(IN_A_ROW, f"{place.where}, it holds what belongs to {other.name}")
    flat = np.ascontiguousarray(got).reshape(-1)
    larger = [s for s in others if any(n > 1 and n * got.size == s.spec.size for n in s.spec.shape)]
    for other in larger[:MAX_OTHERS] if _tells(flat) else ():
        for axis, n in enumerate(other.spec.shape):
            if n > 1 and n * got.size == other.spec.size:
                rows = _rows(expected(other, plan.source), axis)
                found = [k for k in np.flatnonzero(rows[:, 0] == flat[0]) if same_bits(rows[k], flat)]
                if found:
                    text = f"it holds what belongs to index {found[0]} of axis {axis} of {other.name}"
                    return Corruption(A_ROW, text)
    return None


def _tells(values: Array) -> bool:
    return values.size >= MIN_TENSOR and bool((values != values[0]).any())


def find_averaged(got: Array, want: Array) -> Corruption | None:
    """Find blocks along an axis, such as heads, that are each the mean of the right ones, or of a group of them."""
    if not is_float(want.dtype.name) or got.ndim == 0:
        return None
    slack = 8 * max(epsilon(want.dtype.name), epsilon("float32")) * largest(want)
    for axis, size in enumerate(got.shape):
        x, y = (np.moveaxis(v, axis, 0) for v in (got, want))
        for width in _divisors(size):
            blocks = size // width
            for group in _divisors(blocks, first=2):
                shape = (blocks // group, group, width, -1)
                if all(_is_mean(a.reshape(shape), b.reshape(shape), slack) for a, b in _columns(x, y)):
                    of = (
                        f"the {blocks} blocks"
                        if group == blocks
                        else f"{group} blocks that follow each other, of {blocks} in all,"
                    )
                    return Corruption(AVERAGED, f"{of} of {width} along axis {axis} are each the mean of these blocks")
    return None


def _columns(got: Array, want: Array) -> Iterator[tuple[Array, Array]]:
    """Yield the first column of two tensors, and then some columns at a time."""
    size = len(got)
    if got.ndim == 1:
        yield got, want
        return
    step = max(1, BLOCK * got.shape[-1] // got.size)
    first = (slice(None), *(slice(0, 1),) * (got.ndim - 1))
    yield got[first], want[first]
    for k in range(0, got.shape[-1], step):
        yield got[..., k : k + step].reshape(size, -1), want[..., k : k + step].reshape(size, -1)


def _is_mean(got: Array, want: Array, slack: float) -> bool:
    mean = want.astype(np.float64).mean(axis=1, keepdims=True)
    return bool(np.all(np.abs(got - mean) <= slack))


def _divisors(size: int, first: int = 1) -> Iterator[int]:
    return (k for k in range(first, size + 1) if size % k == 0)


def _rows(x: Array, axis: int) -> Array:
    return np.ascontiguousarray(np.moveaxis(x, axis, 0)).reshape(x.shape[axis], -1)


def _described(places: Sequence[Place], layer: str) -> str:
    """Say which rows stand in which order: runs of rows that follow each other in one tensor."""
    starts = [0, *(k + 1 for k, (a, b) in enumerate(pairwise(places)) if b != (a[0], a[1] + 1)), len(places)]
    runs = []
    for first, stop in pairwise(starts[: SHOWN + 1]):
        name, row = places[first]
        which = f"row {row}" if stop - first == 1 else f"rows {row} to {row + stop - first - 1}"
        runs.append(f"{which} of {name.removeprefix(layer).removeprefix('.')}")
    return ", ".join(runs) + (", ..." if len(starts) > SHOWN + 1 else "")
