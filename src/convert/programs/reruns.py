"""Run a record again and again, with a few parameters changed each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.numerics.magnitude import relative_error
from convert.numerics.real_numbers import as_real
from convert.programs.program import REFUSALS, Program, Value
from convert.programs.rerun import rerun

Array = np.ndarray[Any, np.dtype[Any]]
Outputs = Sequence[Array]


class Reruns:
    """Runs of a record with some parameters changed: only what is computed of these is computed again.

    Attributes:
        outputs: with the parameters that were kept.
        ran: how many operations were run again, up to now.
        size: how many operations the record has.
    """

    def __init__(
        self, program: Program, parameters: Mapping[str, Array], inputs: Mapping[str, Array], outputs: Sequence[str]
    ) -> None:
        """Run the record.

        Args:
            program: the record.
            parameters, inputs: by name, all of them.
            outputs: the names of those that are compared, in their order.

        Raises:
            ConvertError: an output has NaN.
        """
        self._program, self._names = program, outputs
        self.ran, self.size = 0, len(program.operations)
        made = rerun(program, parameters, inputs)
        self._arrays: dict[Value, Array] = {}
        for before, after in zip(program.operations, made.operations, strict=True):
            self._arrays |= {x: y.array for x, y in zip(before.operands, after.operands, strict=True)}
            self._arrays |= {x: y.array for x, y in zip(before.results, after.results, strict=True)}
        self.outputs: Outputs = [made.outputs[name].array for name in outputs]

    def changed(self, parameters: Mapping[str, Array], *, keep: bool = False) -> Outputs | None:
        """Return the outputs with other numbers in some parameters; None where they are not numbers.

        Args:
            parameters: the numbers, by name.
            keep: whether they stay for the runs that follow.
        """
        program = self._program
        new = {
            program.parameters[name]: as_real(array).astype(program.parameters[name].array.dtype)
            for name, array in parameters.items()
        }
        for operation in program.operations:
            if not any(operand in new for operand in operation.operands):
                continue
            self.ran += 1
            operands = [new[x] if x in new else self._arrays[x] for x in operation.operands]
            try:
                new |= zip(operation.results, operation.again(operands), strict=True)
            except (ConvertError, *REFUSALS):
                return None
        values = [program.outputs[name] for name in self._names]
        outputs = [new.get(x, self._arrays.get(x, x.array)) for x in values]
        if any(np.isnan(x).any() for x in outputs):
            return None
        if keep:
            self._arrays |= new
            self.outputs = outputs
        return outputs


def equal(got: Outputs | None, want: Outputs, allowed: float) -> bool:
    """Whether outputs are numbers, and equal up to a relative error of each."""
    return got is not None and all(relative_error(x, y) <= allowed for x, y in zip(got, want, strict=True))
