"""Proposals for a value that both programs compute of several parameters before data meets it, as the kernel of a state space model, or a
gate that depends on time.

No element of it tells which leaf is which parameter, so they are tried by their sizes, and the value tells.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate, equal
from convert.inference.candidates.context import Context
from convert.inference.derivation import Arithmetic
from convert.inference.meetings.sites import Meeting, role_of
from convert.programs.program import Operation, first_elements

Array = np.ndarray[Any, np.dtype[Any]]
MOST = 6  # parameters that a value is computed of
TRIES = 800  # ways to assign leaves to them, for each value of the source
PAIR = 2  # the real and the imaginary part, which a parameter may have side by side


@dataclass(frozen=True, eq=False)
class _Array:
    """A parameter, a leaf, or the real or imaginary part of one: the numbers of its elements, in its shape without axes of size 1."""

    numbers: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    def halves(self) -> list[_Array]:
        """Return both parts, where the last axis or the first may have them; nothing where neither does."""
        axis = next((k for k in (-1, 0) if self.numbers.ndim > 1 and self.shape[k] == PAIR), None)
        return [] if axis is None else [_Array(self.numbers.take(k, axis)) for k in range(PAIR)]


def propose(context: Context, operation: Operation, side: int) -> Iterator[Candidate]:
    """Yield leaves for all unknown parameters of operand `side` that make the source's value of it."""
    weight, replay = operation.operands[side], context.replay
    unknown = [name for name in sorted(weight.leaves) if np.isnan(replay.parameters[name]).any()]
    if not len(weight.elements) < len(unknown) <= MOST:  # its elements tell no more than one parameter each
        return
    first = replay.program.first_element
    parameters = [_numbered(first[name], replay.program.parameters[name].array.shape) for name in unknown]
    for meeting in context.near_first(context.source.meetings[role_of(operation)]):
        value = meeting.weight
        times = weight.array.size // max(1, value.array.size)  # the target may repeat it for each row of a batch
        if value.array.size * times != weight.array.size or len(value.leaves) * PAIR < len(unknown):
            continue
        for target, numbers in itertools.islice(_assignments(parameters, _leaves(context, meeting)), TRIES):
            theta = context.source.theta[numbers]
            pieces = context.pieces(target, numbers, theta, Arithmetic.SAME, meeting)
            with replay.assigned([(piece.tensor, piece.elements, piece.values) for piece in pieces]):
                made = replay.value(weight)
            if equal(np.sort(made, None), np.sort(np.repeat(value.array, times))):  # in another order of its axes, too
                yield Candidate(pieces, "the value that is computed of them", ("of several", numbers.size))


def _numbered(start: int, shape: Sequence[int]) -> _Array:
    sizes = [size for size in shape if size > 1]
    return _Array(np.arange(start, start + int(np.prod(sizes, dtype=int))).reshape(sizes))


def _leaves(context: Context, meeting: Meeting) -> list[_Array]:
    """Return the leaves that a value of the source is computed of and that are not used yet."""
    source = context.source.program
    first = first_elements({name: value.array.size for name, value in source.parameters.items()})
    found = [_numbered(first[name], source.parameters[name].array.shape) for name in sorted(meeting.weight.leaves)]
    return [leaf for leaf in found if context.free(leaf.numbers)]


def _assignments(parameters: Sequence[_Array], leaves: Sequence[_Array]) -> Iterator[tuple[Array, Array]]:
    """Yield the numbers of the parameters' elements with those of the leaves' that they may be: leaf by leaf, or part by part."""
    for ours, theirs in itertools.product(_apart(parameters), _apart(leaves)):
        if sorted(sorted(one.shape) for one in ours) != sorted(sorted(one.shape) for one in theirs):
            continue
        for chosen in itertools.permutations(theirs):
            if all(sorted(one.shape) == sorted(two.shape) for one, two in zip(ours, chosen, strict=True)):
                turned = (list(_turned(two, one.shape)) for one, two in zip(ours, chosen, strict=True))
                for numbers in itertools.product(*turned):
                    yield np.concatenate([one.numbers.ravel() for one in ours]), np.concatenate(numbers)


def _apart(arrays: Sequence[_Array]) -> Iterator[list[_Array]]:
    """Yield the arrays as they are, then with those in parts that have a real and an imaginary one."""
    yield list(arrays)
    if any(one.halves() for one in arrays):
        yield [part for one in arrays for part in one.halves() or [one]]


def _turned(array: _Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """Yield the numbers in each order of the axes that gives the shape, the stored one first."""
    for order in itertools.permutations(range(len(shape))):
        made = array.numbers.transpose(order)
        if made.shape == shape:
            yield made.ravel()
