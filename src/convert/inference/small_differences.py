"""Differences of the outputs below the bound of the proof, and far above what rounding makes: something differs whose effect is small in these outputs.

An output whose columns have several sizes, or that has a large number added to it, hides another function of a small part. Large inputs hide
another epsilon. A difference of one column in its own size is one of the programs; and so is one that grows with smaller inputs. What
stays small has a note: a constant that is written with fewer digits looks like it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from convert.core.errors import ConvertError
from convert.inference.derivation import Tensor
from convert.inference.forms.as_data import parameters_as_data
from convert.inference.grading import proof
from convert.inference.last_digits import DIGIT, Movement, movements
from convert.inference.models import Models
from convert.programs.program import REFUSALS, Array, Program

SMALL = 1e-13  # relative: the outputs of equal programs of 26 layers differ by a tenth of it
FAR = 1000.0  # movements by the last digit: sums of as many terms in another order stay below
LARGE = 100.0  # of an input: it may hide an epsilon, or what a function does near zero
CHANGES = 2  # draws of these movements


@dataclass(frozen=True, eq=False)
class SmallDifference:
    """A difference below the bound.

    Attributes:
        run: of the source that shows it best.
        error: the largest difference, relative to its column.
        problem: in words; empty where it shows in no column and with no inputs.
        note: in words, where it does not.
    """

    run: Program
    error: float
    problem: str = ""
    note: str = ""


def small_difference(
    models: Models, learned: Sequence[str], tensors: Sequence[Tensor], drawn: tuple[int, Program], allowed: float
) -> SmallDifference | None:
    """Return a difference that rounding does not explain; None: there is none.

    Args:
        models: both programs.
        learned: leaves that are data, as in `Records`.
        tensors: every tensor, with which the outputs are equal up to the bound.
        drawn: a seed, and the run of the source with its weights and inputs.
        allowed: the bound, relative to the largest value of an output.
    """
    seed, run = drawn
    found = _worst(models, learned, tensors, run)
    if found is not None and found[0] > allowed:
        problem = f"in a column of an output the values differ by {found[0]:.1e} of its largest one"
        return SmallDifference(run, found[0], problem)
    for words, other in _with_smaller_inputs(models, seed, of_any_sign=found is not None):
        worst = _worst(models, learned, tensors, other)
        if worst is not None and worst[0] > allowed:
            return SmallDifference(other, worst[0], f"{words} the outputs differ by {worst[0]:.1e}")
    if found is None:
        return None
    error, times = found
    note = (
        f"the outputs differ by {error:.1e} of the largest value of a column, {times:,.0f} times what rounding makes; a constant with fewer digits "
        "does that, and so does a function or an epsilon that these inputs hardly show"
    )
    return SmallDifference(run, error, note=note)


def _worst(
    models: Models, learned: Sequence[str], tensors: Sequence[Tensor], run: Program
) -> tuple[float, float] | None:
    """Return the largest difference of a column that rounding does not explain, relative to its largest value, and how many movements it is."""
    data = parameters_as_data(run, learned)
    try:
        made = proof.made_by(models.module, models.run, proof.weights(tensors, data), data)
        target = proof.counted(models.masks, run, made)
        source = proof.counted(models.masks, run, {name: value.array for name, value in run.outputs.items()})
        pairs = [(source[name], target[name]) for name in source if source[name].dtype.kind == "f"]
        if not any((_errors(one, two) > SMALL).any() for one, two in pairs):
            return None
        moved = movements(models, learned, tensors, run, CHANGES)
    except (ConvertError, *REFUSALS):  # an output is not a number, or the inputs are none that the model takes
        return None
    return max((worst for one in moved.values() if (worst := _of_output(one)) is not None), default=None)


def _of_output(moved: Movement) -> tuple[float, float] | None:
    if moved.source.dtype.kind != "f":
        return None
    sizes = _largest(moved.source)
    rounding = np.maximum(_largest(sum(moved.by.values(), np.zeros(moved.source.shape))), DIGIT * sizes)
    errors = _errors(moved.source, moved.target)
    times = errors * sizes / np.where(rounding == 0, np.inf, rounding)
    beyond = (errors > SMALL) & (times > FAR)
    if not beyond.any():
        return None
    at = int(np.argmax(np.where(beyond, errors, 0)))
    return float(errors[at]), float(times[at])


def _errors(one: Array, two: Array) -> Array:
    """Return the largest difference of each column, relative to its largest value."""
    sizes = _largest(one)
    with np.errstate(invalid="ignore"):
        difference = np.where(one == two, 0.0, np.abs(one - two))
    return np.asarray(_largest(difference) / np.where(sizes == 0, np.inf, sizes))


def _largest(array: Array) -> Array:
    """Return the largest size of each column; an array of one axis is one."""
    columns = np.abs(array).reshape(-1, array.shape[-1] if array.ndim > 1 else 1)
    largest: Array = np.where(np.isfinite(columns), columns, 0.0).max(0, initial=0.0)
    return largest


def _with_smaller_inputs(models: Models, seed: int, *, of_any_sign: bool) -> Iterator[tuple[str, Program]]:
    """Yield runs of the source whose inputs of floating-point numbers are smaller than those of a seed, in words, where it takes them.

    Args:
        of_any_sign: whether to take those of mean 0, too; a model may be for positive numbers alone.
    """
    given = models.all_given(seed)
    large = {
        name: x for name, x in given.items() if x.dtype.kind == "f" and LARGE < np.abs(x).max(initial=0.0) < np.inf
    }
    ways = {"with inputs up to 1": {name: x / np.abs(x).max() for name, x in large.items()}}
    if of_any_sign:
        ways["with inputs of mean 0 and deviation 1"] = {n: (x - x.mean()) / (x.std() or 1.0) for n, x in large.items()}
    for words, changed in ways.items() if large else ():
        try:
            as_given = {name: x.astype(given[name].dtype) for name, x in changed.items()}
            yield words, models.runs.program(seed, {**given, **as_given})
        except (ConvertError, *REFUSALS):  # such as numbers that the model does not take
            continue
