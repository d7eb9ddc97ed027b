"""Numbers with which a function of a value gives what is wanted: a factor of the value, a number added to it, and both for the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from convert.programs.program import REFUSALS, Array

STARTS = (1.0, -1.0, 0.5, 2.0, -0.5, -2.0)  # factors from which the search begins
STEPS = 40
MOST_SLOW = 4  # steps that leave more than half: near the right numbers they leave next to nothing
LARGEST = 50.0  # of all numbers; of smaller and smaller values any function is a line
SMALLEST = 0.02
SLOPE = 1e-6  # by which a number is changed to see what follows
ENOUGH = 1e-9  # relative to the largest element
DIGITS = 6  # of a number of the code
FEWEST = 8  # different elements, for numbers other than signs
Run = Callable[[float, float], Sequence[Array]]


@dataclass(frozen=True)
class Fit:
    """Numbers that were found.

    Attributes:
        factor, number: of the value.
        behind: of each result, (factor, number).
    """

    factor: float = 1.0
    number: float = 0.0
    behind: tuple[tuple[float, float], ...] = ()


def fitted(run: Run, want: Sequence[Array], *, factor: bool, number: bool, behind: Sequence[bool] = ()) -> Fit | None:
    """Return numbers with which all results are what is wanted; None if none are found.

    Args:
        run: (factor and number of the value) -> the results.
        want: an array for each.
        factor, number: whether these may be other ones than 1 and 0.
        behind: for each result that may have a factor of its own, whether it may have a number, too; empty: none has.
    """
    problem = _Problem(run, want, behind)
    few = min(len(np.unique(x)) for x in want) < FEWEST
    starts = [np.array([start, 0.0]) for start in (STARTS if factor else STARTS[:1])]
    for numbers in starts if not few else starts[:2]:
        if problem.is_solved(numbers) and (
            not few or all((abs(x), y) == (1.0, 0.0) for x, y in problem.behind(numbers))
        ):
            return problem.fit(numbers)
    if few or not factor:
        return None
    solved = [problem.solved(numbers, [True, number]) for numbers in starts]
    right = [numbers for numbers in solved if problem.is_solved(numbers)]
    best = min(right, key=_changed, default=None)
    return None if best is None else problem.fit(best)


def _changed(numbers: Array) -> tuple[float, bool]:
    """Return how far numbers are from 1 and 0; of two that are as far, as in ``cos(y)`` by ``sin``, the one without a sign is nearer."""
    return round(abs(float(numbers[1])) + abs(float(np.log(abs(numbers[0])))), DIGITS), bool(numbers[0] < 0)


def plain(number: float) -> float:
    """Return a number as code has it, such as 1.702 or its inverse, where that is the same but for rounding."""
    near = [round(number, DIGITS)]
    if number:
        near.append(1 / inverse if (inverse := round(1 / number, DIGITS)) else 0.0)
    return next((x for x in near if abs(x - number) <= ENOUGH * max(1.0, abs(number))), number)


class _Problem:
    """What is left of the wanted arrays, by the numbers."""

    def __init__(self, run: Run, want: Sequence[Array], behind: Sequence[bool]) -> None:
        self._run, self._want, self._behind = run, [x.ravel() for x in want], behind
        self._scale = max(float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in self._want)

    def left(self, numbers: Array) -> Array | None:
        """Return what is left, in one array; None where the function takes no such values or gives other infinite numbers."""
        made = self._made(numbers)
        if made is None:
            return None
        numbers_behind = self._numbers_behind(made)
        rest = []
        for k, (x, y) in enumerate(zip(made, self._want, strict=True)):
            times, plus = numbers_behind[k] if numbers_behind else (1.0, 0.0)
            finite = np.isfinite(x) & np.isfinite(y)
            if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
                return None
            rest.append(y[finite] - times * x[finite] - plus)
        joined: Array = np.concatenate(rest)
        return joined

    def fit(self, numbers: Array) -> Fit:
        """Return the numbers with those of each result."""
        return Fit(float(numbers[0]), float(numbers[1]), self.behind(numbers))

    def is_solved(self, numbers: Array) -> bool:
        """Whether nothing is left, with numbers that are neither very large nor very small."""
        factors = [numbers[0], *(x for x, _ in self.behind(numbers))]
        added = [numbers[1], *(y for _, y in self.behind(numbers))]
        if not all(SMALLEST <= abs(x) <= LARGEST for x in factors) or any(abs(y) > LARGEST for y in added):
            return False
        left = self.left(numbers)
        return left is not None and float(np.abs(left).max(initial=0.0)) <= ENOUGH * self._scale

    def behind(self, numbers: Array) -> tuple[tuple[float, float], ...]:
        """Return (factor, number) of each result."""
        made = self._made(numbers)
        return () if made is None else self._numbers_behind(made)

    def solved(self, numbers: Array, free: Sequence[bool]) -> Array:
        """Return better numbers, by steps of Levenberg and Marquardt."""
        left, damping, slow = self.left(numbers), 1e-3, 0
        chosen = np.flatnonzero(free)
        for _ in range(STEPS):
            if left is None or slow > MOST_SLOW or float(np.abs(left).max(initial=0.0)) <= ENOUGH * self._scale / 1e3:
                break
            near = [self.left(numbers + SLOPE * np.eye(2)[k]) for k in chosen]
            if any(x is None for x in near):
                break
            slopes = np.stack([(x - left) / SLOPE for x in near if x is not None], 1)
            square = slopes.T @ slopes
            while damping < 1e6:
                eye = np.diag(np.diag(square)) + 1e-12 * np.eye(len(square))
                step = np.zeros(2)
                step[chosen] = np.linalg.lstsq(square + damping * eye, -slopes.T @ left, rcond=None)[0]
                after = self.left(numbers + step)
                if after is not None and after @ after < left @ left:
                    slow += bool(after @ after > left @ left / 2)
                    numbers, left, damping = numbers + step, after, damping / 10
                    break
                damping *= 10
            else:
                break
        return numbers

    def _made(self, numbers: Array) -> list[Array] | None:
        try:
            return [x.ravel() for x in self._run(float(numbers[0]), float(numbers[1]))]
        except REFUSALS:
            return None

    def _numbers_behind(self, made: Sequence[Array]) -> tuple[tuple[float, float], ...]:
        found = []
        for x, y, plus in zip(made, self._want, self._behind, strict=False):
            finite = np.isfinite(x) & np.isfinite(y)
            columns = np.stack([x[finite], np.ones(int(finite.sum()))][: 2 if plus else 1], 1)
            fit = np.linalg.lstsq(columns, y[finite], rcond=None)[0]
            number = float(fit[1]) if plus else 0.0
            found.append((float(fit[0]), number if abs(number) > ENOUGH * self._scale else 0.0))
        return tuple(found)
