"""The proposal that the source has no such parameter: the target computes a buffer itself, such as a table of sines, and saves it.

A buffer may be a factor of a parameter, such as the mask of a masked convolution or of a pruned weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from convert.inference.candidates.candidate import Array, Candidate, Piece
from convert.inference.candidates.context import Context
from convert.inference.derivation import Arithmetic
from convert.inference.forms.own_numbers import says_nothing
from convert.programs.program import Operation

KIND = ("own",)  # of the candidate
FACTOR = ("own", "factor")  # of one that leaves the other factors of the operand open


def propose(context: Context, operation: Operation, side: int) -> Iterator[Candidate]:
    """Yield the numbers that the module has itself, if operand `side` is computed from nothing but its buffers."""
    leaves = operation.operands[side].leaves
    own = _own(context, leaves)
    if leaves <= context.replay.program.buffers and not any(map(says_nothing, own.values())):
        yield Candidate(_pieces(own), "the module computes it itself", KIND)


def factors(context: Context, operation: Operation, side: int) -> Iterator[Candidate]:
    """Yield the numbers of the buffers that multiply other parameters in operand `side`: ones, if the module's say nothing."""
    weight = operation.operands[side]
    program, parameters = context.replay.program, context.replay.parameters
    lacking = {name for name in weight.leaves & program.buffers if np.isnan(parameters[name]).any()}
    if not lacking or lacking == weight.leaves:
        return
    own = _own(context, lacking)
    if not any(map(says_nothing, own.values())):
        yield Candidate(_pieces(own), "the module computes it itself", FACTOR)
    elif context.level > 0:
        ones = {name: np.ones(array.size) if says_nothing(array) else array for name, array in own.items()}
        yield Candidate(_pieces(ones), "the source has no such parameter", (*FACTOR, "ones"))


def _own(context: Context, names: Collection[str]) -> dict[str, Array]:
    parameters = context.replay.program.parameters
    return {name: np.asarray(parameters[name].array, np.float64).ravel() for name in sorted(names)}


def _pieces(own: dict[str, Array]) -> tuple[Piece, ...]:
    return tuple(
        Piece(name, np.arange(array.size), np.full(array.size, -1), array, Arithmetic.OWN)
        for name, array in own.items()
    )
