"""The proposal that the source has no such parameter: the target computes a buffer itself, such as a table of sines, and saves it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from convert.inference.candidates import Candidate, Context, Piece
from convert.inference.derivation import Arithmetic
from convert.programs.program import Operation

KIND = ("own",)  # of the candidate


def propose(context: Context, operation: Operation, side: int) -> Iterator[Candidate]:
    """Yield the numbers that the module has itself, if operand `side` is computed from nothing but its buffers.

    A buffer that one number fills says nothing: the statistics of a BatchNorm are zeros and ones before they are loaded.
    """
    program = context.replay.program
    leaves = operation.operands[side].leaves
    if not leaves <= program.buffers:
        return
    own = {name: np.asarray(program.parameters[name].array, np.float64).ravel() for name in sorted(leaves)}
    if any(np.ptp(array) == 0 for array in own.values() if array.size):
        return
    pieces = tuple(
        Piece(name, np.arange(array.size), np.full(array.size, -1), array, Arithmetic.OWN)
        for name, array in own.items()
    )
    yield Candidate(pieces, "the module computes it itself", KIND)
