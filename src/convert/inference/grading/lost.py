"""Values that the module's code takes out of PyTorch and computes with: no operation says what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.inference.recorded import drawn
from convert.numerics.magnitude import magnitudes
from convert.programs.program import Program, TakenOut, Value
from convert.programs.run_checks import REPEATABLE

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
Run = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
RUNS = 3  # a constant that has another value in each is no choice between two
NUMBERS = {"item"}  # how a value is taken out most often to choose a path, which loses nothing


def require_followed(
    module: torch.nn.Module, run: Run, recorded: Program, inputs: Sequence[Mapping[str, Array]]
) -> None:
    """Check that no constant of a module's record depends on its weights or inputs.

    Args:
        recorded: the record.
        inputs: further ones; those of other shapes are left out.

    Raises:
        ConvertError: one does: the value left PyTorch, and what came back is not known to be computed from it.
    """
    if not recorded.taken_out:
        return
    given = {name: value.given for name, value in recorded.inputs.items()}
    shapes = {name: x.shape for name, x in given.items()}
    fitting = [given, *(other for other in inputs if {name: x.shape for name, x in other.items()} == shapes)]
    runs = [drawn(module, run, fitting[k % len(fitting)], {}, k) for k in range(RUNS)]
    position = min((at for at in (_changed(runs[0]), _other_constant(runs)) if at is not None), default=None)
    if position is None:
        return
    taken = _taken_before(runs[0].taken_out, position)
    raise ConvertError(
        Finding(
            "function-not-traceable",
            f"the PyTorch module takes the elements of a tensor out of PyTorch (`{taken.how}`) and computes with them",
            path=taken.where,
            fix="compute with torch there: what NumPy and Python do with them is not seen",
        )
    )


def _taken_before(places: Sequence[TakenOut], position: int) -> TakenOut:
    """Return the last place before an operation; one that takes more than a number, if there is one."""
    before = [place for place in places if place.before <= position] or places
    return next((place for place in reversed(before) if place.how not in NUMBERS), before[-1])


def _other_constant(runs: Sequence[Program]) -> int | None:
    """Return the number of the first operation that is given a constant which has another value in each run, as long as they run the same operations."""
    for k, same in enumerate(zip(*(program.operations for program in runs), strict=False)):
        if len({operation.name for operation in same}) > 1:
            return None
        if any(_is_other(values) for values in zip(*(operation.operands for operation in same), strict=False)):
            return k
    outputs = zip(*(program.outputs.values() for program in runs), strict=True)
    return len(runs[0].operations) if any(map(_is_other, outputs)) else None


def _is_other(values: Sequence[Value]) -> bool:
    """Whether constants have another value in each run."""
    if not all(value.constant for value in values):
        return False
    pairs = combinations((value.array for value in values), 2)
    return all(a.shape == b.shape and not np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def _changed(program: Program) -> int | None:
    """Return the number of the first operation that does not give what it gave: something has changed its operands in memory."""
    for k, operation in enumerate(program.operations):
        again = operation.again([operand.array for operand in operation.operands])
        for value, array in zip(operation.results, again, strict=True):
            size = magnitudes(value.array) if value.array.dtype.kind in "fc" else 0
            if not np.allclose(value.array, array, rtol=0, atol=REPEATABLE * size, equal_nan=True):
                return k
    return None
