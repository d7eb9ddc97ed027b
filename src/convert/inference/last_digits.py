"""How far the outputs move when what a program computes changes in its last digit: a smaller difference of two programs is rounding.

Where a program subtracts large numbers that are nearly equal, as the density of a normal distribution at a sample that was just drawn
does, its outputs have fewer digits than its numbers, and two programs that are equal in exact arithmetic differ by more than usual.
Elsewhere an output moves by its own last digits, and nothing is excused. Weights and inputs alone do not show it: a sum that rounds
away the digits of a small term rounds them away in the same place when the large term moves by whole digits. So the result of each
operation that rounds is changed (Monte Carlo arithmetic).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log10

import numpy as np

from convert.core.errors import ConvertError
from convert.inference.derivation import Tensor
from convert.inference.forms.as_data import parameters_as_data
from convert.inference.grading import proof
from convert.inference.models import Models
from convert.inference.recorded import recorded
from convert.numerics.magnitude import magnitudes
from convert.programs.divergence.kinds import kind_of
from convert.programs.fingerprint import EXACT
from convert.programs.program import Array, Operation, Program
from convert.programs.rerun import rerun

ROUNDS = {
    *("multiply", "divide", "add", "subtract", "power", "reciprocal", "sqrt", "rsqrt", "exp", "log", "tanh", "sigmoid", "silu", "gelu"),
    *("softplus", "elu", "erf", "sin", "cos", "product", "convolution", "sum", "mean", "softmax", "running sum"),
}  # fmt: skip
CHANGES = 8  # draws of the direction in which each number changes; one of them alone may round as before
TIMES = 2.0  # a difference of so many movements of both programs together is rounding
DIGIT = 2.0**-52  # what a change in the last digit is, relative to the number


@dataclass(frozen=True, eq=False)
class Movement:
    """How far the elements of an output that count move.

    Attributes:
        source, target: the outputs as they are.
        by: side -> the movement of each element.
    """

    source: Array
    target: Array
    by: Mapping[str, Array]


@dataclass(frozen=True)
class LostDigits:
    """That the outputs differ by no more than the digits that they lose.

    Attributes:
        allowed: the relative error up to which they do.
        notes: which outputs lose how many.
    """

    allowed: float
    notes: tuple[str, ...]


def lost_digits(
    models: Models, learned: Sequence[str], tensors: Sequence[Tensor], runs: Sequence[Program], allowed: float
) -> LostDigits | None:
    """Return which digits the outputs lose, if that explains every difference; None: something else does.

    Args:
        models: both programs.
        learned: leaves that are data, as in `Records`.
        tensors: every tensor, none open.
        runs: of the source, with other weights and inputs.
        allowed: the relative error of an output that loses no digits.
    """
    lost: dict[tuple[str, str], float] = {}  # (output, side) -> the largest movement that explains a difference
    for run in runs:
        try:
            moved = movements(models, learned, tensors, run)
        except ConvertError:  # an output is not a number then
            return None
        for name, one in moved.items():
            sizes = magnitudes(one.source)
            sizes = np.where(sizes == 0, 1.0, sizes)
            errors = np.where(one.target == one.source, 0.0, np.abs(one.target - one.source))
            large = ~(errors <= allowed * sizes)  # not a number is large
            explained = TIMES * sum(one.by.values(), np.zeros(errors.shape))
            if not np.all(errors[large] <= explained[large]) or np.any(explained[large] > EXACT * sizes[large]):
                return None
            for side, by in one.by.items():
                if large.any() and (worst := float((by / sizes)[large].max())) * TIMES > allowed / 2:
                    lost[name, side] = max(worst, lost.get((name, side), 0.0))
    notes = tuple(_in_words(name, side, worst) for (name, side), worst in lost.items())
    return LostDigits(2 * TIMES * max(lost.values()), notes) if lost else None


def _in_words(output: str, side: str, moves: float) -> str:
    return (
        f"the {side} loses {round(log10(moves / DIGIT))} of 16 digits in the output {output}, which moves by {moves:.1e} of its "
        f"largest value if what it computes changes in its last digit; a difference below {TIMES * moves:.0e} is not seen there"
    )


def movements(
    models: Models, learned: Sequence[str], tensors: Sequence[Tensor], run: Program, changes: int = CHANGES
) -> dict[str, Movement]:
    """Return the movement of each output.

    Args:
        models, learned, tensors: as in `lost_digits`.
        run: of the source.
        changes: draws of the direction in which each number changes.

    Raises:
        ConvertError: an output is not a number then.
    """
    data = parameters_as_data(run, learned)
    state = proof.weights(tensors, data)
    given = {name: value.given for name, value in run.inputs.items()}
    records = {"JAX function": run, "PyTorch module": recorded(models.module, models.run, given, state)}
    by = {}
    for side, record in records.items():
        others = [proof.counted(models.masks, run, _changed(record, seed)) for seed in range(changes)]
        own = proof.counted(models.masks, run, _arrays(record))
        by[side] = {name: np.max([np.abs(other[name] - x) for other in others], 0) for name, x in own.items()}
    source = proof.counted(models.masks, run, _arrays(run))
    target = proof.counted(models.masks, run, proof.made_by(models.module, models.run, state, data))
    return {name: Movement(x, target[name], {side: of[name] for side, of in by.items()}) for name, x in source.items()}


def _arrays(record: Program) -> dict[str, Array]:
    return {name: value.array for name, value in record.outputs.items()}


def _changed(record: Program, seed: int) -> dict[str, Array]:
    """Return the outputs where each operation that rounds gives the next or the previous numbers of float64."""
    rng = np.random.default_rng(seed)

    def kept(operation: Operation, array: Array) -> Array:
        if array.dtype.kind != "f" or kind_of(operation) not in ROUNDS:
            return array
        return np.where(array == 0, array, np.nextafter(array, rng.choice([-np.inf, np.inf], array.shape)))

    parameters, inputs = (
        {name: value.array for name, value in of.items()} for of in (record.parameters, record.inputs)
    )
    return _arrays(rerun(record, parameters, inputs, kept))
