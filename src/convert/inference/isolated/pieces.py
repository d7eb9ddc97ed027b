"""Which rows of a parameter the target takes as pieces of what the layer gives: `split`, `chunk` or a slice, at once or one in another."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import accumulate

from convert.inference.candidates.context import SPLITS
from convert.inference.derivation import Role
from convert.inference.meetings.sites import Meeting, role_of
from convert.programs.program import Operation, Program, Value

Piece = tuple[int, int, int]  # the length of the axis, and where in it the piece begins and ends
MAX_DEPTH = 32  # operations between the layer and the last of the cuts
SUMS = (Role.PRODUCT, Role.CONVOLUTION)


@dataclass(frozen=True)
class Use:
    """How a program uses a parameter.

    Attributes:
        at: where, from 0 for its first operation to 1 for its last.
        code: the operation, as the same one in another layer has it.
        pieces: those of the rows that it takes apart: the parts of a leaf may lie there in another order.
    """

    at: float = 1.0
    code: Hashable = None
    pieces: frozenset[Piece] = frozenset()


class Pieces:
    """The pieces of one program."""

    def __init__(self, program: Program) -> None:
        self._users = program.users

    def of(self, meeting: Meeting) -> frozenset[Piece]:
        """Return the pieces that are taken of an axis of what an operation gives, up to the next product.

        Which axis it is follows from its length alone: a piece that is none costs a few runs, and no more.
        """
        found: set[Piece] = set()
        for size in set(meeting.operation.results[0].array.shape):
            level = {(value, 0, size) for value in meeting.operation.results}
            seen = set(level)
            for _ in range(MAX_DEPTH):
                level = {
                    piece
                    for value, start, length in level
                    for user in self._users.get(value, [])
                    for piece in _taken(user, value, start, length)
                } - seen
                seen |= level
            found |= {(size, start, start + length) for _, start, length in seen if length < size}
        return frozenset(found)


def _taken(user: Operation, value: Value, start: int, length: int) -> list[tuple[Value, int, int]]:
    """Return what an operation makes of some rows of an axis: pieces of them, or something that has all of them."""
    if role_of(user) in SUMS:
        return []
    axis = user.settings.get("dim", 0) % max(value.array.ndim, 1) if user.name in SPLITS else None
    if axis is None or value.array.shape[axis] != length:
        return [(made, start, length) for made in user.results if length in made.array.shape]
    sizes = [made.array.shape[axis] for made in user.results]
    first = (user.settings.get("start") or 0) % length if user.name == "slice" else 0
    begins = accumulate(sizes, initial=start + first)
    return [(made, at, size) for made, at, size in zip(user.results, begins, sizes, strict=False)]
