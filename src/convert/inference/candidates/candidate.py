"""The type of a proposal: which elements of the source become which elements of the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from convert.inference.derivation import Arithmetic, LowRank
from convert.inference.meetings.sites import Meeting
from convert.programs.program import Operation

Array = np.ndarray[Any, np.dtype[Any]]
EQUAL = 1e-7  # relative: two values of parameters that are computed in different orders

COMPUTE: dict[Arithmetic, Callable[[Array], Array]] = {
    Arithmetic.SAME: lambda v: v,
    Arithmetic.ONE_PLUS: lambda v: 1 + v,
    Arithmetic.MINUS_ONE: lambda v: v - 1,
}


@dataclass(frozen=True, eq=False)
class Piece:
    """Some elements of a tensor of the target.

    Attributes:
        tensor: its name.
        elements: positions in it.
        numbers: of the source's elements, -1 where there is none.
        values: what the elements become.
        arithmetic: how they are computed.
        factor: what they are multiplied by.
        meeting: where the source uses the elements; None for a constant.
        places: of computed values: positions in the operand of `meeting`, or in the matrix of `low_rank`.
        low_rank: of values that are computed from a product of two leaves.
    """

    tensor: str
    elements: Array
    numbers: Array
    values: Array
    arithmetic: Arithmetic
    factor: float = 1.0
    meeting: Meeting | None = None
    places: Array | None = None
    low_rank: LowRank | None = None

    def only(self, here: Array) -> Piece:
        """Return the piece with some of its elements: those where a mask is true."""
        places = None if self.places is None else self.places[here]
        return replace(
            self, elements=self.elements[here], numbers=self.numbers[here], values=self.values[here], places=places
        )


@dataclass(frozen=True, eq=False)
class Candidate:
    """A proposal for one operand of one operation of the target.

    Attributes:
        pieces: what becomes known.
        by: how elements were paired, for people.
        kind: what it has in common with the candidate of the same operation in another layer.
        tied: columns of the operand's data that could not be told apart.
        rope: how pairs of rows were reordered; empty if not.
        places: at which places each part cuts an axis, such as that of the experts; and how far they are from the number of the
            target's matrix.
    """

    pieces: tuple[Piece, ...]
    by: str
    kind: tuple[Any, ...]
    tied: tuple[int, ...] = ()
    rope: str = ""
    places: tuple[Any, Any] = ((), ())

    @property
    def changes(self) -> list[tuple[str, Array, Array]]:
        """What `Replay.assign` takes."""
        return [(piece.tensor, piece.elements, piece.values) for piece in self.pieces]

    @property
    def constant(self) -> bool:
        """Whether it takes the parameter for a constant, such as a bias of zeros."""
        return {piece.arithmetic for piece in self.pieces} == {Arithmetic.CONSTANT}

    @property
    def key(self) -> Any:
        """Equal for candidates that give the same tensors."""
        of: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            of.setdefault(piece.tensor, []).append(piece)
        return tuple((name, *_in_order(pieces)) for name, pieces in sorted(of.items()))


def _in_order(pieces: Sequence[Piece]) -> tuple[bytes, bytes]:
    """Return the elements of one tensor and their values, in the order of the elements."""
    elements, values = (np.concatenate([getattr(p, of) for p in pieces]) for of in ("elements", "values"))
    if (np.diff(elements) < 0).any():
        order = np.argsort(elements, kind="stable")
        elements, values = elements[order], values[order]
    return elements.tobytes(), values.tobytes()


@dataclass(frozen=True, eq=False)
class Choice:
    """A candidate that was chosen.

    Attributes:
        index: of the target's operation.
        side: which operand became known.
        candidate: what it became.
    """

    index: int
    side: int
    candidate: Candidate

    @cached_property
    def digest(self) -> int:
        """Equal for choices that assign the same numbers at the same operation."""
        return hash((self.index, self.side, self.candidate.key))


def siblings(operation: Operation) -> Any:
    """Return what an operation has in common with that of another layer of the same list."""
    module = tuple(word for word in operation.module.split(".") if not word.isdecimal())
    return operation.where, operation.name, module, shapes_but_rows(operation)


def shapes_but_rows(operation: Operation) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of an operation's operands, of data only the number of features: each expert has its own tokens."""
    return tuple(x.array.shape[1:][-1:] if x.data else x.array.shape for x in operation.operands)


def numbers_are_plain(numbers: Sequence[Array], operand: Array, theta: Array) -> bool:
    """Whether the operand is the leaf's elements themselves."""
    return len(numbers) == 1 and bool((numbers[0] >= 0).all()) and np.array_equal(theta[numbers[0]], operand)


def equal(one: Array, two: Array) -> bool:
    """Whether two values of parameters are equal up to the order of their arithmetic."""
    return one.shape == two.shape and bool(np.allclose(one, two, rtol=EQUAL, atol=1e-12))


def ratio(got: Array, operand: Array) -> float | None:
    """Return the number by which all elements differ."""
    if got.shape != operand.shape or got.size < 2:  # one number fits any ratio
        return None
    with np.errstate(all="ignore"):
        ratio = np.ravel(operand / got)
    good = np.isfinite(ratio)
    if not good.any() or np.ptp(ratio[good]) > EQUAL * abs(ratio[good][0]) or ratio[good][0] == 0:
        return None
    return float(np.median(ratio[good]))
