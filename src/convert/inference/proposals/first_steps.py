"""Proposals for a bias that is added to zeros, as in the first step of a recurrent layer: no data tells which it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate, Piece
from convert.inference.candidates.context import Context
from convert.inference.derivation import Arithmetic, Role
from convert.inference.forms.elements import JOINS
from convert.inference.meetings.sites import Meeting, products, role_of
from convert.inference.proposals import others
from convert.inference.proposals.affine import Gate
from convert.inference.proposals.gates import OFFSETS, Cells
from convert.programs.program import Operation, Program

Array = np.ndarray[Any, np.dtype[Any]]
MAX_GATES = 4  # a recurrent layer has at most so many
BY = "added to zeros in the first step"
BY_PLACE = "a leaf of this size that is joined to data, in place of zeros"
AT_ZEROS = ("zeros", "gates")  # kind of the candidates that are made of gates


class FirstSteps:
    """The biases that both programs add to zeros."""

    def __init__(self, context: Context, cells: Cells) -> None:
        self._context, self._cells = context, cells
        self._source, self._target = context.source.program, context.replay.program

    @cached_property
    def _with_one_bias(self) -> list[Gate]:
        """The source's gates of zeros with one bias each, at the first step of each cell."""
        found: dict[bytes, Gate] = {}
        for gate in self._cells.source_gates:
            if len(gate.biases) == 1 and _is_given_zeros(self._source, gate):
                found.setdefault(gate.biases[0].numbers.tobytes(), gate)
        return list(found.values())

    @cached_property
    def _joined(self) -> list[Meeting]:
        """Where the source joins a parameter to data."""
        return [m for m in self._context.source.meetings[Role.OTHER] if m.operation.name in JOINS]

    @cached_property
    def _of_zeros_alone(self) -> frozenset[int]:
        """The operations of the target that add a bias to gates which are given nothing but zeros."""
        zeros = (gate for gate in self._cells.target_gates if _is_given_zeros(self._target, gate))
        return frozenset(bias.operation for gate in zeros for bias in gate.biases)

    @cached_property
    def _never_of_zeros_alone(self) -> Array:
        """The elements of the source's biases whose gates are given other data in each step, as those of the second cell of a decoder.

        None where no gate of the source is given zeros alone: only the target has such a step, as one whose rows no output takes.
        """
        added: dict[bool, list[Array]] = {True: [], False: []}
        for gate in self._cells.source_gates:
            added[_is_given_zeros(self._source, gate)] += [bias.numbers for bias in gate.biases]
        if not (added[True] and added[False]):
            return np.zeros(0, int)
        return np.setdiff1d(np.concatenate(added[False]), np.concatenate(added[True]))

    def are_met(self, operation: Operation, side: int) -> bool:
        """Whether an operation of the target adds a parameter to zeros."""
        adds = role_of(operation) is Role.SHIFT and bool(operation.operands[side].elements)
        return adds and not self._context.met(operation).any()

    def of_gates(self, at: int) -> Iterator[Candidate]:
        """Yield the source's biases of the same functions, in every order, for a bias that gates of the target have.

        The number that the source adds to a gate is part of them: what is zero in that step may not show it.
        """
        own = [
            (gate, bias.numbers) for gate in self._cells.target_gates for bias in gate.biases if bias.operation == at
        ]
        near = sorted(self._with_one_bias, key=lambda gate: abs(gate.biases[0].operation - self._context.near))
        for order in itertools.permutations(near[: len(own)]) if own else ():
            made = [self._bias_of(gate, numbers, other) for (gate, numbers), other in zip(own, order, strict=False)]
            if len(order) == len(own) and all(made):
                yield Candidate(tuple(piece for found in made for piece in found), BY, AT_ZEROS)

    def _bias_of(self, gate: Gate, target: Array, other: Gate) -> list[Piece]:
        """Return what the one bias of a gate of the source makes of a bias of the target; nothing if they are gates of other kinds."""
        (bias,) = other.biases
        way = OFFSETS.get(other.number - gate.number)
        same = (gate.enters, gate.rest, len(target)) == (other.enters, other.rest, len(bias.numbers))
        if way is None or not same or not self._context.free(bias.numbers, target):
            return []
        return self._cells.made_of_bias(bias, target, way)

    def of_joined(self, operation: Operation, side: int) -> Iterator[Candidate]:
        """Yield the leaves of this size that the source joins to data: the target adds them to zeros in their place."""
        for candidate in others.any_leaf(self._context, operation, side, self._joined):
            yield replace(candidate, by=BY_PLACE, kind=("zeros", *candidate.kind))

    def of_blocks(self, at: int, operation: Operation, side: int) -> Iterator[Candidate]:
        """Yield blocks of the source's biases that are added to zeros, or zeros, for a bias of the target."""
        context = self._context
        names = np.unique(operation.operands[side].elements[0])
        blocks = self._blocks(len(names), alone=at in self._of_zeros_alone)
        width = len(blocks[0][0]) if blocks else len(names)
        blocks = [block for block in blocks if len(block[0]) == width][:MAX_GATES]
        count = len(names) // width
        none = len(blocks)
        orders = set(itertools.permutations([*range(none), *[none] * count], count))
        fewest = max(count - none, 0)  # at first every bias is used
        for chosen in sorted(orders, key=lambda order: (order.count(none), order)):
            if context.level == 0 and chosen.count(none) > fewest:
                break
            pieces: tuple[Piece, ...] = ()
            for number, k in enumerate(chosen):
                here = names[number * width : (number + 1) * width]
                if k == none:
                    pieces += context.pieces(here, np.full(width, -1), np.zeros(width), Arithmetic.CONSTANT, None, 0.0)
                else:
                    numbers, meeting = blocks[k]
                    pieces += context.pieces(here, numbers, context.source.theta[numbers], Arithmetic.SAME, meeting)
            yield Candidate(pieces, BY, ("zeros", chosen))

    def _blocks(self, size: int, *, alone: bool) -> list[tuple[Array, Meeting]]:
        """Return the biases that may be one of the gates of a bias, with where the source adds them to zeros, those nearest to the last match first.

        Args:
            size: of the bias of the target.
            alone: whether its gates are given nothing but zeros.
        """
        context, found = self._context, list[tuple[Array, Meeting]]()
        for meeting in context.source.meetings[Role.SHIFT]:
            if len(meeting.operations) == 1 and len(meeting.weight.elements) == 1 and not meeting.data[0].any():
                every = np.unique(meeting.weight.elements[0])
                owners = np.searchsorted(context.source.starts, every, "right")
                for numbers in np.split(
                    every, np.flatnonzero(np.diff(owners)) + 1
                ):  # leaves that the source has joined
                    gates, rest = divmod(size, len(numbers))
                    known = any(np.array_equal(numbers, other) for other, _ in found)
                    other_gates = alone and np.isin(numbers, self._never_of_zeros_alone).any()
                    if gates <= MAX_GATES and not (rest or known or other_gates) and context.free(numbers):
                        found.append((numbers, meeting))
        return sorted(found, key=lambda block: abs(block[1].index - context.near))


def _is_given_zeros(program: Program, gate: Gate) -> bool:
    """Whether the data of a gate is zero, as in the first step of a cell."""
    for factor in gate.factors:
        (product,) = products([program.operations[factor.operation]], factor.side)
        if product.rows[0][factor.rows].any():
            return False
    return True
