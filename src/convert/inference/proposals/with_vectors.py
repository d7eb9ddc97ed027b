"""Proposals for a weight that the target normalises before data meets it.

Torch's spectral norm divides it by a number that is made of the weight and of two vectors. The weight is proposed as if it were stored as
the product takes it. Then its elements are those of the leaf, and the other parameters are vectors of the source with which the target
divides by the same number.

Where the target normalises a weight by itself, such as the classes of CosFace, the source may divide what the weight gives: the leaf is
proposed as it is, and the result decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate, Piece, equal
from convert.inference.candidates.context import Context
from convert.inference.derivation import Arithmetic
from convert.inference.meetings.sites import Meeting, role_of
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
Propose = Callable[[Context, Operation, int], Iterator[Candidate]]
MOST = 40  # vectors of the source that may be one of the target's


@dataclass(frozen=True, eq=False)
class _Vector:
    """A vector of the source that is computed from the leaves of a weight, or is one of them.

    Attributes:
        value: the vector.
        meeting: an operation that takes it.
    """

    value: Value
    meeting: Meeting


def propose(context: Context, operation: Operation, side: int, plain: Propose) -> Iterator[Candidate]:
    """Yield proposals for such an operand.

    Args:
        plain: the proposals for a weight that is stored as it is.
    """
    weight, parameters = operation.operands[side], context.replay.parameters
    numbers = weight.elements[0] if len(weight.elements) == 1 else np.zeros(0, int)
    owners = context.owners(numbers)
    hidden = sorted(name for name in weight.leaves if name not in owners and np.isnan(parameters[name]).any())
    if len(owners) != 1 or context.replay.is_stored(weight):
        return
    (name,) = owners
    stored = context.replay.stands_for(name, numbers - context.replay.program.first_element[name])
    operands = tuple(stored if k == side else x for k, x in enumerate(operation.operands))
    for candidate in plain(context, replace(operation, operands=operands), side):
        if not hidden:
            with context.replay.assigned(candidate.changes):
                changed = not equal(*(np.array(context.replay.value(x)) for x in (weight, stored)))
            if changed and all(p.arithmetic is Arithmetic.SAME for p in candidate.pieces):
                yield candidate
            continue
        if any(p.arithmetic is not Arithmetic.COMPUTED or (p.numbers < 0).any() for p in candidate.pieces):
            continue
        with context.replay.assigned(candidate.changes):
            want = np.array(context.replay.value(stored))
        theta = context.source.theta
        kernel = [
            replace(p, values=theta[p.numbers], arithmetic=Arithmetic.SAME, places=None) for p in candidate.pieces
        ]
        meeting = candidate.pieces[0].meeting
        vectors = list(_vectors(context, meeting)) if meeting is not None else []
        sizes = [parameters[other].size for other in hidden]
        choices = [[v for v in vectors if v.value.array.size == size][:MOST] for size in sizes]
        for chosen in itertools.product(*choices):
            pieces = (*kernel, *(_piece(context, other, v) for other, v in zip(hidden, chosen, strict=True)))
            made = replace(candidate, pieces=pieces)
            with context.replay.assigned(made.changes):
                fits = equal(np.array(context.replay.value(weight)), want)
            if fits:
                yield made
                break


def _vectors(context: Context, meeting: Meeting) -> Iterator[_Vector]:
    """Yield the vectors that the source computes from the leaves of a weight before it meets data, each once; leaves first."""
    seen: set[bytes] = set()
    found = []
    for index, operation in enumerate(context.source.program.operations[: meeting.index]):
        for side, value in enumerate(operation.operands):
            inside = value.of_parameters and value.leaves <= meeting.weight.leaves
            if inside and sum(size > 1 for size in value.array.shape) <= 1 and value.array.tobytes() not in seen:
                seen.add(value.array.tobytes())
                found.append(_Vector(value, Meeting(index, (operation,), side, role_of(operation))))
    yield from sorted(found, key=lambda vector: not _is_leaf(vector.value))


def _is_leaf(value: Value) -> bool:
    return len(value.leaves) == 1 and len(value.elements) == 1 and bool((value.elements[0] >= 0).all())


def _piece(context: Context, tensor: str, vector: _Vector) -> Piece:
    value, elements = vector.value.array.ravel(), np.arange(vector.value.array.size)
    if _is_leaf(vector.value) and np.array_equal(context.source.theta[vector.value.elements[0].ravel()], value):
        return Piece(tensor, elements, vector.value.elements[0].ravel(), value, Arithmetic.SAME, 1.0, vector.meeting)
    nothing = np.full(len(elements), -1)
    return Piece(tensor, elements, nothing, value, Arithmetic.COMPUTED, 1.0, vector.meeting, elements)
