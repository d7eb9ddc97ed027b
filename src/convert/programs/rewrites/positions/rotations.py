"""What RoPE does in a record, measured: which features it turns with which, and by which angles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.divergence.kinds import kind_of
from convert.programs.divergence.rerun import again
from convert.programs.program import Program, Value
from convert.programs.rewrites.places.segments import LAYERS, Segment, segment_to

Array = np.ndarray[Any, np.dtype[Any]]
WIDEST = 256  # features of a head
EXACT = 1e-9
FEWEST = 3  # positions that show the angle from one to the next


@dataclass(frozen=True)
class Turn:
    """A linear function of the features of each position.

    Attributes:
        segment: its operations.
        table: [..., H, H], with the axes of the value in front; of size 1 where it does not depend on the index.
    """

    segment: Segment
    table: Array

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The features that are turned with one another, each pair once, in order."""
        size = np.abs(self.table).reshape(-1, *self.table.shape[-2:]).max(0)
        found = {(min(i, j), max(i, j)) for i, j in np.argwhere(size > EXACT).tolist() if i != j}
        return tuple(sorted(found))

    @property
    def is_rotation(self) -> bool:
        """Whether each feature is turned with one other at most, by one angle."""
        pairs = self.pairs
        features = [k for pair in pairs for k in pair]
        if not pairs or len(set(features)) != len(features):
            return False
        one, two = (np.array(x) for x in zip(*pairs, strict=True))
        t = self.table
        straight, crossed = t[..., one, one] - t[..., two, two], t[..., one, two] + t[..., two, one]
        return bool(max(np.abs(straight).max(), np.abs(crossed).max()) <= EXACT)

    @property
    def numbers(self) -> Array:
        """cos + i sin of each angle, [..., pairs]."""
        one, two = (np.array(x) for x in zip(*self.pairs, strict=True))
        return np.asarray(self.table[..., two, two] + 1j * self.table[..., two, one])

    def of(self, value: Array) -> Array:
        """Turn a value of the segment's shape."""
        features = value.reshape(*value.shape[: self.table.ndim - 2], -1)
        return np.asarray((self.table @ features[..., None])[..., 0].reshape(value.shape))


def turns(program: Program) -> list[Turn]:
    """Return the rotations of what goes into products of two values, in the order of execution."""
    order = {value: k for k, one in enumerate(program.operations) for value in one.results}
    found: dict[Value, Turn] = {}
    for operation in program.operations:
        for value in operation.data if kind_of(operation) in LAYERS and len(operation.data) > 1 else ():
            for segment in _behind(value, program, order):
                if segment.rotates and segment.after not in found and (turn := _measured(segment)) is not None:
                    found[segment.after] = turn
    return sorted(found.values(), key=lambda turn: order[turn.segment.after])


def _behind(value: Value, program: Program, order: dict[Value, int]) -> Iterator[Segment]:
    while (segment := segment_to(value, program, order)) is not None and not segment.kinds & set(LAYERS):
        yield segment
        value = segment.before


def _measured(segment: Segment) -> Turn | None:
    """Return what a segment does with each feature; None if it is no linear function of the features of each position."""
    before, after = segment.before.array, segment.after.array
    lead = _lead(before.shape, after.shape)
    shape, width = before.shape[:lead], int(np.prod(before.shape[lead:]))
    if before.size != after.size or not 1 < width <= WIDEST:
        return None
    columns = []
    for k in range(width):
        probe = np.zeros((*shape, width))
        probe[..., k] = 1
        made = again(segment.operations, {segment.before: probe.reshape(before.shape)})
        if made is None or made.size != after.size:
            return None
        columns.append(made.reshape(*shape, width))
    table = np.stack(columns, axis=-1)
    for axis in range(lead):
        first = np.take(table, [0], axis)
        if np.abs(table - first).max() <= EXACT:
            table = first
    turn = Turn(segment, table)
    scale = float(np.abs(after).max())
    return turn if np.abs(turn.of(before).reshape(after.shape) - after).max() <= EXACT * scale else None


def _lead(before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """Return the number of axes in front of the features, which may be pairs on an axis of their own."""
    if before == after:
        return len(before) - (2 if before[-1] == 2 and len(before) > 2 else 1)
    return next((k for k, (m, n) in enumerate(zip(before, after, strict=False)) if m != n), 0)


def laid_out(turn: Turn, like: Turn) -> Array | None:
    """Return the table of one turn for the value of another one; None where it is not known which axes are which."""
    if turn.table.shape[-1] != like.table.shape[-1]:
        return None
    lead, target = turn.table.shape[:-2], like.segment.before.array.shape
    varying = [n for n in lead if n > 1]
    own = [k for k, n in enumerate(like.table.shape[:-2]) if n > 1]
    rank = like.table.ndim - 2
    if [target[k] for k in own] == varying:
        axes = own
    elif len(varying) == 2 and len(own) == 1 and target[0] == varying[0] and target[own[0]] == varying[1]:
        axes = [0, own[0]]  # positions of each series
    elif len(varying) == 1 and len(own) == 2 and target[own[1]] == varying[0]:
        axes = own[1:]
    else:
        return None
    shape = [1] * rank
    for axis, n in zip(axes, varying, strict=True):
        shape[axis] = n
    return turn.table.reshape(*shape, *turn.table.shape[-2:])


@dataclass(frozen=True)
class Angles:
    """What the angles of a rotation are made of.

    Attributes:
        frequencies: the angle from one position to the next, of each pair.
        positions: [series, steps], as numbers; None where the angles are no multiples of the frequencies.
        size: by how much all values are multiplied, too.
    """

    frequencies: Array
    positions: Array | None
    size: float

    @property
    def first(self) -> float | None:
        """The first position; None where positions do not begin together in all series, or begin anew within one."""
        p = self.positions
        if p is None or np.ptp(p, axis=0).any() or (np.diff(p[0]) != 1).any():
            return None
        return float(p[0, 0])

    @property
    def base(self) -> float | None:
        """The number of which the frequencies are the powers 0, -1/n, -2/n, ...; None if they are no such powers."""
        f = np.abs(self.frequencies)
        if len(f) < 2 or abs(f[0] - 1) > EXACT or not 0 < f[1] < 1:
            return None
        if not np.allclose(f, f[1] ** np.arange(len(f)), rtol=1e-6, atol=0):
            return None
        return float(f[1] ** -len(f))


def angles(turn: Turn) -> Angles | None:
    """Return the angles of a rotation, pair by pair; None where they do not grow by the same from one position to the next.

    Positions of packed sequences begin anew within a series: most steps are from one position to the next there.
    """
    z = turn.numbers
    sizes = np.abs(z)
    z = z.reshape([n for n in z.shape[:-1] if n > 1] + [z.shape[-1]])
    if z.ndim not in (2, 3) or z.shape[-2] < FEWEST or np.ptp(sizes) > EXACT:
        return None
    size, rows = float(sizes.flat[0]), z.reshape(-1, *z.shape[-2:])
    if not size:
        return None
    steps = (rows[:, 1:] / rows[:, :-1]).reshape(-1, rows.shape[-1])
    equal = np.abs(steps[:, None] - steps[None]).max(-1) <= EXACT
    most = int(np.argmax(equal.sum(1)))
    if 2 * equal[most].sum() <= len(steps):
        return None
    frequencies = np.angle(steps[most])
    return Angles(frequencies, _positions(rows / size, frequencies), size)


def _positions(rows: Array, frequencies: Array) -> Array | None:
    """Return the positions at which numbers on the circle have these frequencies, by the slowest pair."""
    slowest = int(np.argmin(np.where(np.abs(frequencies) > 1e-12, np.abs(frequencies), np.inf)))
    if not frequencies[slowest]:
        return None
    found = np.round(np.angle(rows[..., slowest]) / frequencies[slowest], 6)
    right = np.abs(np.exp(1j * found[..., None] * frequencies) - rows).max() <= 1e-5
    return np.asarray(found) if right else None
