"""Name a tensor that is made of its own values and another tensor's: a part of it, a sum, a mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.core.tensor_spec import is_float
from convert.layers.base import Step
from convert.layers.step_tensor import expected
from convert.numerics.bits import count_unequal, same_bits, unequal
from convert.numerics.blocks import BLOCK, everywhere, in_float64
from convert.numerics.compare import epsilon
from convert.planning.ambiguity import TwinTree
from convert.planning.plan import Plan
from convert.verify.mistakes.index_moves import find_move, without_numbers
from convert.verify.weights.corruption.find import Corruption
from convert.verify.weights.corruption.relations import indices_that_differ, sample, spread
from convert.verify.weights.folded import MAX_OTHERS, find_folded
from convert.verify.weights.rows_of_others import find_one_row, find_rows_of_others

Array = np.ndarray[Any, np.dtype[Any]]
SAMPLE = 4096  # values that differ, by which other tensors are ruled out
MIN_COMMON = 8  # values that are those of another tensor by no chance
PARTLY, SUMMED, MIXED = "partly of another", "another tensor added", "mixed with another tensor"
OF_DROPPED = "of a dropped tree"
OTHER_TRANSPOSED, OTHER_SHAPE = "of another tensor, transposed", "of another tensor, of another shape"


def find_in_others(step: Step, plan: Plan, got: Array) -> Corruption | None:
    """Return how another tensor went into this one; None if none did in a known way."""
    want = expected(step, plan.source)
    others = [s for s in plan.steps if s.parts and s.name != step.name and not s.tied]
    others.sort(key=lambda s: without_numbers(s.name) != without_numbers(step.name))  # other layers first
    same_shape = [s for s in others if s.spec == step.spec][:MAX_OTHERS]
    places = _some_that_differ(got.reshape(-1), want.reshape(-1))
    few, right = got.reshape(-1)[places], want.reshape(-1)[places]
    for other in same_shape:
        values = expected(other, plan.source)
        maybe = _kind(few, right, values.reshape(-1)[places])
        if maybe is not None and (kind := _kind(got, want, values)) is not None:
            return _described(kind, step.name, other.name, got, want)
    if (mean := _mean_of_numbered(step, plan, got, same_shape)) is not None:
        return mean
    if got.ndim == 2:
        turned = [s for s in others if s.spec.shape == got.shape[::-1] and s.spec.dtype == step.spec.dtype]
        for other in turned[:MAX_OTHERS]:
            if same_bits(got, expected(other, plan.source).T):
                return Corruption(OTHER_TRANSPOSED, f"it holds what belongs to {other.name}, transposed")
    same_size = [
        s
        for s in others
        if s.spec.dtype == step.spec.dtype and s.spec.shape != got.shape and math.prod(s.spec.shape) == got.size
    ]
    for other in same_size[:MAX_OTHERS] if got.size >= MIN_COMMON else ():
        if same_bits(got.reshape(-1), expected(other, plan.source).reshape(-1)):
            text = f"it holds what belongs to {other.name}, {list(other.spec.shape)}, in a shape of its own"
            return Corruption(OTHER_SHAPE, text)
    searches = (find_one_row, find_folded, find_rows_of_others)
    return next((found for search in searches if (found := search(step, plan, got, want)) is not None), None)


def _some_that_differ(got: Array, want: Array) -> Array:
    """Return some of the places at which two flat arrays differ."""
    starts = range(0, got.size, BLOCK)
    found = []
    for k in starts:
        places = k + np.flatnonzero(unequal(got[k : k + BLOCK], want[k : k + BLOCK]))
        found.append(places[:: 1 + len(places) * len(starts) // SAMPLE])
    return np.concatenate(found)


def find_in_dropped(step: Step, plan: Plan, got: Array, twins: Sequence[TwinTree]) -> Corruption | None:
    """Return the dropped tree, such as a moving average, whose leaves make the tensor; None if none of `twins` does."""
    for twin in twins:
        leaves = {converted: dropped for dropped, converted in twin.leaves}
        if not all(part.leaf in leaves for part in step.parts):
            continue
        parts = tuple(replace(part, leaf=leaves[part.leaf]) for part in step.parts)
        if same_bits(got, expected(step, plan.source, parts)):
            return Corruption(OF_DROPPED, f"it is made of {twin.tree}, a tree of the same paths that the rules drop")
    return None


def _mean_of_numbered(step: Step, plan: Plan, got: Array, same_shape: list[Step]) -> Corruption | None:
    """Find the mean over all experts or layers."""
    moves = [(find_move(step.name, other.name), other) for other in same_shape]
    for place in dict.fromkeys(move.place for move, _ in moves if move is not None):
        others = [other for move, other in moves if move is not None and move.place == place]
        if len(others) < 2 or not is_float(got.dtype.name):
            continue
        tensors = (step, *others)
        few = spread(got)[0]
        if _is_mean(few, (spread(expected(s, plan.source))[0] for s in tensors), len(tensors)) and (
            few is got or _is_mean(got, (expected(s, plan.source) for s in tensors), len(tensors))
        ):
            return Corruption(
                MIXED, f"it is the mean of the {1 + len(others)} tensors that differ in the number after {place}"
            )
    return None


def _is_mean(got: Array, tensors: Iterable[Array], count: int) -> bool:
    """Whether values are the mean of those of some tensors."""
    mean = sum(x.astype(np.float64) for x in tensors) / count
    slack = 8 * max(epsilon(got.dtype.name), epsilon("float32")) * float(np.abs(mean).max())
    return everywhere(lambda x, y: np.all(np.abs(x.astype(np.float64) - y) <= slack), got, np.asarray(mean))


def _kind(got: Array, want: Array, other: Array) -> tuple[str, float] | None:
    """Return how another tensor went into this one, and with which factor."""
    if count_unequal(got, want) >= MIN_COMMON and everywhere(_is_partly, got, want, other):
        return PARTLY, 1.0
    if not is_float(want.dtype.name) or got.size < MIN_COMMON:
        return None
    eps = 4 * max(epsilon(want.dtype.name), epsilon("float32"))
    x, y, z = (values.astype(np.float64) for values in sample(got, want, other))
    if not np.median(np.abs(x - y)) > 4 * np.median(eps * (np.abs(y) + np.abs(z))):
        return None

    def holds(share: float, own: float) -> bool:
        """Whether a share of the other is added, and `own` times that share of its own is taken away."""
        return all(
            bool(np.all(np.abs(x - y - share * (z - own * y)) <= eps * (np.abs(y) + np.abs(z))))
            for x, y, z in in_float64(got, want, other)
        )

    for sign in (1.0, -1.0):
        if holds(sign, 0.0):
            return SUMMED, sign
    sums = np.zeros(2)
    for x, y, z in in_float64(got, want, other):
        sums += np.sum(np.square(z - y)), np.sum((x - y) * (z - y))
    share = float(sums[1] / sums[0]) if sums[0] else 0.0
    return (MIXED, share) if 0 < share < 1 and holds(share, 1.0) else None


def _is_partly(got: Array, want: Array, other: Array) -> bool:
    differ = unequal(got, want)
    return not unequal(got[differ], other[differ]).any()


def _described(kind: tuple[str, float], name: str, other: str, got: Array, want: Array) -> Corruption:
    what, factor = kind
    if what == PARTLY:
        move = find_move(name, other)
        return Corruption(
            f"{PARTLY} {move.word if move else 'tensor'}", f"{_place(got, want)}, it holds what belongs to {other}"
        )
    if what == SUMMED:
        return Corruption(what, f"the values of {other} are {'added to' if factor > 0 else 'subtracted from'} it")
    if abs(factor - 0.5) < 1e-4:
        return Corruption(what, f"it is the mean of its own values and those of {other}")
    return Corruption(what, f"{factor:.4g} of it are the values of {other}, the rest its own")


def _place(got: Array, want: Array) -> str:
    """Say where the values are: from one on, in some indices of an axis, or at single places."""
    differ = unequal(got, want).reshape(-1)
    count, size = int(np.count_nonzero(differ)), differ.size
    first, last = int(differ.argmax()), size - 1 - int(differ[::-1].argmax())
    if last - first + 1 == count:
        if last + 1 == size:
            return f"from value {first} of {size} on, in the order of the file"
        return f"in the values {first} to {last}, in the order of the file"
    place = indices_that_differ(got, want)
    if place is not None and count * got.shape[place.axis] == size * len(place.indices):
        return place.where
    return f"in {count} of {size} values"
