"""Which elements of an operand show in the results of an operation; no operation is known by its name.

Elements that are only moved are followed by their numbers. Along other axes the operation is tried: where the results of one place of an
operand stand at one place of the results, as the rows of a product or of a softmax, each is judged by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from convert.inference.forms.hidden.certain import Certain, hides, with_others, with_small
from convert.inference.forms.hidden.perturbed import changes, others, run
from convert.programs.program import Array, Operation

HIDDEN, HELD, SHOWN = 0, 1, 2  # any number does; numbers near it do, as of a score that a mask hides; it shows
NEAR = 0.1  # relative


def levels_of(operation: Operation, k: int, levels: Sequence[Array], certain: Certain) -> Array:
    """Return the level of each element of an operand of floats, given those of the results."""
    operand = operation.operands[k]
    all_shown = np.full(operand.array.shape, SHOWN, np.int8)
    chosen = any(x.leaves and x.array.dtype.kind != "f" for x in operation.operands)  # otherwise with other weights
    if chosen or not operand.array.size or operation.operands.count(operand) > 1:
        return all_shown
    trial = _Trial(operation, k, levels, certain)
    if not trial.runs:
        return all_shown
    found = trial.moved()
    if found is None:
        found = trial.by_axes()
    return found if trial.holds(found) else all_shown


class _Trial:
    """An operation that is run with other numbers in one operand, once with its other operands, once with others in them, and
    with small numbers in all of them.
    """

    def __init__(self, operation: Operation, k: int, levels: Sequence[Array], certain: Certain) -> None:
        self._operation, self._k, self._levels = operation, k, levels
        own = [x.array for x in operation.operands]
        *_, drawn = with_others(operation, certain)
        drawn[k] = own[k]
        self._bases = [own, drawn]
        if certain.free(operation.operands[k]).any():
            self._bases.append(with_small(operation, certain))
        self._x, self._shape = own[k], own[k].shape
        met = [x for j, x in enumerate(operation.operands) if j != k]
        self._mask = np.broadcast_to(certain.hide(operation.operands[k]), self._shape)
        self._selects = bool(self._mask.any()) or any(hides(x, certain) for x in met)
        firsts = [run(operation, base) for base in self._bases]
        self._before = [first for first in firsts if first is not None]
        self.runs = len(self._before) == len(self._bases)

    def moved(self) -> Array | None:
        """Return the levels if the operation only moves the elements; None if it computes with them."""
        x = self._x
        made, drawn = [], []
        for seed in (5, 6):
            numbers = np.random.default_rng(seed).uniform(-1.0, 1.0, x.size)
            out = run(self._operation, self._with(0, numbers.reshape(x.shape)))
            if out is None:
                return None
            made.append(out)
            drawn.append(numbers)
        found = np.zeros(x.size, np.int8)
        for one, two, level in zip(*made, self._levels, strict=True):
            places, again = (_places(out, numbers) for out, numbers in zip((one, two), drawn, strict=True))
            if not np.array_equal(places, again) or changes(one, two)[places < 0].any():
                return None
            here = places >= 0
            np.maximum.at(found, places[here], level[here])
        return found.reshape(x.shape)

    def by_axes(self) -> Array:
        """Return the levels by the axes that stay apart, and one of the others."""
        found = np.zeros(self._shape, np.int8)
        for result, level in enumerate(self._levels):
            apart = {axis: to for axis in range(len(self._shape)) if (to := self._apart(axis, result)) is not None}
            if len(set(apart.values())) < len(apart):
                return np.full(self._shape, SHOWN, np.int8)
            mixed = [axis for axis, size in enumerate(self._shape) if axis not in apart and size > 1]
            if not (mixed and self._selects):
                everything = self._effects(np.ones(self._shape, bool), result, level)
                found = np.maximum(found, self._gathered(everything, apart))
                continue
            axis = max(mixed, key=lambda k: self._shape[k])
            for place in range(self._shape[axis]):
                here = _slice(self._shape, axis, place)
                effects = self._gathered(self._effects(here, result, level), apart)
                found = np.where(here, np.maximum(found, effects), found)
        return found

    def holds(self, found: Array) -> bool:
        """Whether nothing shows when all elements that are hidden are others, and those that are held are near."""
        if (found == SHOWN).all():
            return True
        hidden, held = found == HIDDEN, found <= HELD
        return not any(
            (self._effects(hidden, result, level) > HIDDEN).any()
            or ((found == HELD).any() and (self._effects(held, result, level) == SHOWN).any())
            for result, level in enumerate(self._levels)
        )

    def _gathered(self, effects: Array, apart: Mapping[int, int]) -> Array:
        """Return the largest effect for each place of the axes that stay apart, broadcast to the operand."""
        others = tuple(axis for axis in range(effects.ndim) if axis not in apart.values())
        largest = effects.max(others, initial=0) if others else effects
        kept = sorted(apart.values())
        order = [kept.index(apart[axis]) for axis in sorted(apart)]
        shape = [size if axis in apart else 1 for axis, size in enumerate(self._shape)]
        return np.broadcast_to(largest.transpose(order).reshape(shape), self._shape)

    def _apart(self, axis: int, result: int) -> int | None:
        """Return the axis of a result at whose places the places of an axis of the operand show alone; None if there is none."""
        size, shape = self._shape[axis], self._levels[result].shape
        axes = [k for k, other in enumerate(shape) if other == size and size > 1]
        seen = 0
        for place in range(size if axes else 0):
            touched = self._touched(_slice(self._shape, axis, place), result)
            if touched.any():
                axes = [k for k in axes if not (touched & ~_slice(shape, k, place)).any()]
                seen += 1
            if seen == 2 or not axes:
                break
        return axes[0] if axes and seen else None

    def _touched(self, here: Array, result: int) -> Array:
        near, *_ = others(self._x, here, 2, self._mask)
        return self._changed(1, near, result)[0]

    def _effects(self, here: Array, result: int, level: Array) -> Array:
        """Return what level the elements have that change a result: where other numbers near them do, or only others far from them."""
        found = np.zeros(level.shape, np.int8)
        ways = [(SHOWN, base, x) for base, x in zip((0, 1, 1), others(self._x, here, 2, self._mask), strict=True)]
        for small in self._bases[2:]:
            _, far, _ = others(small[self._k], here, 2, self._mask)
            ways.append((SHOWN, 2, far))
        if (here & self._mask).any():
            ways = [(HELD, base, np.where(here, 0.0, of[self._k])) for base, of in enumerate(self._bases)] + ways
        for of, base, x in ways:
            changed, far = self._changed(base, x, result)
            found[changed & ((level == SHOWN) | ((level == HELD) & far))] = of
        return found

    def _changed(self, base: int, x: Array, result: int) -> tuple[Array, Array]:
        """Return which elements of a result others in the operand change, and which they change much."""
        before, after = self._before[base][result], run(self._operation, self._with(base, x))
        if after is None:
            return np.ones(before.shape, bool), np.ones(before.shape, bool)
        changed = changes(before, after[result])
        if before.dtype.kind != "f" or not changed.any():
            return changed, changed
        with np.errstate(all="ignore"):
            near = np.isfinite(before) & (np.abs(after[result] - before) <= NEAR * np.abs(before))
            return changed, changed & ~near

    def _with(self, base: int, x: Array) -> list[Array]:
        return [*self._bases[base][: self._k], x, *self._bases[base][self._k + 1 :]]


def _places(array: Array, numbers: Array) -> Array:
    """Return at which place among some numbers each element of an array is; -1 where it is none of them."""
    order = np.argsort(numbers)
    at = np.minimum(np.searchsorted(numbers[order], array), numbers.size - 1)
    return np.where(numbers[order][at] == array, order[at], -1)


def _slice(shape: Sequence[int], axis: int, place: int) -> Array:
    here = np.zeros(shape, bool)
    here[(slice(None),) * axis + (place,)] = True
    return here
