"""Which columns of a product's result a program takes together: the queries of all groups of heads, the keys, the values.

A fused matrix has them in any order, as `(groups, queries of a group + 2, size of a head)`, and the parts need not have one size. The
channels that a convolution gives are columns, too: `(anchors, 4 numbers of a box + 1)`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import JOINS, MOVES, joined, moved
from convert.inference.forms.products.used_parts import matrices_of
from convert.inference.meetings.sites import role_of
from convert.programs.divergence.kinds import kind_of
from convert.programs.program import Array, Operation, Value

MAX_STEPS = 24  # operations that are looked at behind a product
MAX_PART_STEPS = 48  # values that are looked at behind a product
MAX_SETS = 12  # of columns
MAX_JOINED = 5  # parts of which several may stand in one matrix of the other program


@dataclass(frozen=True)
class Part:
    """Columns of a product's result that stand side by side.

    Attributes:
        start, end: the first of them, and the first one behind them.
        uses: what the program does with them.
    """

    start: int
    end: int
    uses: frozenset[str]


class TakenParts:
    """The parts that a program takes of the columns of its products.

    Args:
        users: the operations of the program that use each value.
    """

    def __init__(self, users: Mapping[Value, Sequence[Operation]]) -> None:
        self._users = users
        self._sets: dict[Operation, list[Array]] = {}
        self._known: dict[Operation, list[Array]] = {}
        self._uses: dict[Operation, list[Part]] = {}

    def of(self, product: Operation) -> list[Array]:
        """Return the parts that make up all columns of what a product gives, if they differ in size; none otherwise."""
        if product not in self._known:
            column = _columns_given(product)
            self._known[product] = [] if column is None else _unequal_parts(self.sets(product), 1 + int(column.max()))
        return self._known[product]

    def sets(self, product: Operation) -> list[Array]:
        """Return the sets of columns of what a product gives that the program takes, each in the order in which it has them; not all of them."""
        if product not in self._sets:
            column = _columns_given(product)
            self._sets[product] = [] if column is None else _taken_columns(product, column, self._users)
        return self._sets[product]

    def results(self, product: Operation) -> Iterator[Array]:
        """Yield what a product gives in these parts, one or several: the program has them with the bias alone, and after it has moved them."""
        parts = self.of(product)
        column = _columns_given(product) if parts else None
        if column is not None:
            for _, columns in one_or_several(parts):
                yield product.results[0].array.ravel()[np.isin(column, columns)]

    def by_use(self, product: Operation) -> list[Part]:
        """Return the parts that make up all columns of what a product gives, one behind the other; none if it is used as a whole."""
        if product not in self._uses:
            column = _columns_given(product)
            self._uses[product] = [] if column is None else _used_parts(product, column, self._users)
        return self._uses[product]


def one_or_several(parts: Sequence[Array]) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Yield (which parts, their columns in order) for each of these parts, and for several of a few, but not for all."""
    yield from (((k,), columns) for k, columns in enumerate(parts))
    for count in range(2, len(parts) if len(parts) <= MAX_JOINED else 0):
        for chosen in itertools.combinations(range(len(parts)), count):
            yield chosen, np.sort(np.concatenate([parts[k] for k in chosen]))


def _columns_given(product: Operation) -> Array | None:
    """Return the column that each element of a product's result is in, or the channel of a convolution's; None where there are none."""
    result = product.results[0].array
    if role_of(product) is not Role.CONVOLUTION:
        matrices = matrices_of(product)
        return None if matrices is None else matrices.columns
    if not result.size or not product.operands[0].data or not product.operands[1].of_parameters:
        return None
    said = product.settings.get("dimension_numbers")
    axis = 1 if said is None else said.out_spec[1]  # PyTorch has them there
    channels = np.arange(result.shape[axis]).reshape([-1 if k == axis else 1 for k in range(result.ndim)])
    return np.broadcast_to(channels, result.shape).ravel()


def _used_parts(product: Operation, column: Array, users: Mapping[Value, Sequence[Operation]]) -> list[Part]:
    count = 1 + int(column.max())
    uses: dict[tuple[int, int], set[str]] = {}
    todo: list[tuple[Value, Array | None, tuple[int, int]]] = [(product.results[0], np.arange(column.size), (0, count))]
    for _ in range(MAX_PART_STEPS):
        if not todo:
            break
        value, places, part = todo.pop(0)
        for user in users.get(value, ()):
            made = moved(user, value) if places is not None else None
            if made is None and user.name in MOVES:  # it repeats them
                todo += [(out, None, part) for out in user.results]
            elif made is None:
                uses.setdefault(part, set()).add(_use(user, value))
            for out, at in zip(user.results, made or (), strict=False):
                columns = np.unique(column[places[at]])  # type: ignore[index]
                if not columns.size:  # what is left behind a head that RoPE turns as a whole
                    continue
                of = int(columns[0]), int(columns[-1]) + 1
                if of[1] - of[0] == len(columns):
                    todo.append((out, places[at], of))  # type: ignore[index]
    parts, start = [], 0
    while start < count:
        ends = [end for begin, end in uses if begin == start]
        if not ends or (end := min(ends)) - start == count:
            return []
        parts.append(Part(start, end, frozenset(uses[start, end])))
        start = end
    return parts


def _use(user: Operation, value: Value) -> str:
    """Return what an operation does with a value: with other data, or with a number."""
    others = [x for x in user.operands if x is not value]
    return f"{kind_of(user)} {'data' if any(x.data for x in others) else 'a number' if others else ''}"


def _taken_columns(product: Operation, column: Array, users: Mapping[Value, Sequence[Operation]]) -> list[Array]:
    """Return the sets of columns of a product's result that the program takes, each in the order in which it has them; not all of them."""
    count = 1 + int(column.max())
    found: dict[bytes, Array] = {}
    todo = [(product.results[0], np.arange(column.size))]
    for _ in range(MAX_STEPS):
        if not todo or len(found) == MAX_SETS:
            break
        value, places = todo.pop(0)
        for user in users.get(value, ()):
            made = joined(user, value) if user.name in JOINS else moved(user, value)
            for out, at in zip(user.results, made or (), strict=False):
                now = np.where(at >= 0, places[at], -1)
                columns, first = np.unique(column[now[now >= 0]], return_index=True)
                chosen = columns[np.argsort(first)]
                if 0 < len(chosen) < count:
                    found.setdefault(np.sort(chosen).tobytes(), chosen)
                if len(chosen):
                    todo.append((out, now))
    if not found:
        return []
    rest = np.setdiff1d(np.arange(count), np.concatenate(list(found.values())))  # which are used for nothing
    return [*found.values(), rest] if len(rest) else list(found.values())


def _unequal_parts(sets: Sequence[Array], count: int) -> list[Array]:
    """Return the sets that make up all columns, each once, if they differ in size; few large ones before many small ones.

    Parts of one size are those of heads, or of RoPE's pairs, which have orders of their own.
    """
    by_size = sorted(sets, key=len, reverse=True)

    def covered(left: Array) -> list[Array] | None:
        if not left.any():
            return []
        first = int(np.argmax(left))
        for one in by_size:
            if first in one and left[one].all():
                rest = left.copy()
                rest[one] = False
                more = covered(rest)
                if more is not None:
                    return [one, *more]
        return None

    parts = covered(np.ones(count, bool)) or []
    return parts if len({*map(len, parts)}) > 1 else []
