"""What proposals are made from: the source, the target's run so far, and which elements are used."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import COMPUTE, EQUAL, Piece, equal, numbers_are_plain, ratio
from convert.inference.candidates.replay import Replay
from convert.inference.candidates.source import Source
from convert.inference.derivation import Arithmetic, Role
from convert.inference.forms.products.taken_columns import TakenParts
from convert.inference.meetings.added_up import weighs_rows
from convert.inference.meetings.sites import Meeting, axes_of, role_of
from convert.programs.fingerprint import EXACT
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")
SHUFFLE = "pixel_shuffle"
TURNS = ("transpose", "permute", "movedim", "t")
BY_DATA = (Role.PRODUCT, Role.SCALE)  # of two values of data
STEPS = ("unbind", "select")  # of a sequence
SUMMED = (Role.PRODUCT, Role.CONVOLUTION)
SPLITS = ("slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk")
MAX_DEPTH = 5  # operations between a product and the parts that are taken of its result
MAX_BEFORE_CUTS = 16  # operations between a product and the parts that are taken of its result, as those of a norm
MAX_BEFORE_MAP = 16  # operations between a product and the map that is made of its result, as those of a norm
MAX_BEFORE_CONVOLUTION = 32  # operations on the map


@dataclass(eq=False)
class Context:
    """What proposals are made from.

    Attributes:
        source: the source.
        replay: the target, as far as it is known.
        used: how often each element of the source is used.
        origins: for each element of the target the source's that it is, or -1.
        level: 0: what a scale or shift gives must be a value of the source; 1: need not, but the products of attention must be;
            gates and RoPE's pairs in other orders as well; 2: none of these must be, and leaves are used again.
        strict: whether what comes next tries more.
        near: index of the source's operation that was matched last.
        of_siblings: the operation of a layer of a list (`siblings`) that was matched last, and the index of the source's.
        tolerance: of sums.
    """

    source: Source
    replay: Replay
    used: Array
    origins: Array
    level: int = 0
    strict: bool = False
    near: int = 0
    of_siblings: dict[Any, tuple[Operation, int]] = field(default_factory=dict)
    tolerance: float = EXACT
    _starts: Array = field(default_factory=lambda: np.zeros(0, int))

    def __post_init__(self) -> None:
        first = self.replay.program.first_element
        self._users = self.replay.program.users
        self.taken = TakenParts(self._users)
        self._made_by = self.replay.program.made_by
        self._names = list(first)
        self._starts = np.array(list(first.values()), int)

    def users(self, value: Value) -> Sequence[Operation]:
        """Return the operations of the target that take a value."""
        return self._users.get(value, [])

    def made_by(self, value: Value) -> Operation | None:
        """Return the operation of the target that gives a value; None for an input."""
        return self._made_by.get(value)

    def met(self, operation: Operation) -> Array:
        """Return the data that a parameter meets in an operation; only what is kept, if the target cuts the result."""
        data = self.replay.value(operation.data[0])
        users = self._users.get(operation.results[0], [])
        cuts = len(users) == 1 and users[0].name == "slice" and data.shape == operation.results[0].array.shape
        if not cuts or self.source.has(data, self.tolerance):
            return data
        return np.asarray(users[0].again([data])[0])

    def widths(self, value: Value, axis: int = -1) -> list[int]:
        """Return the widths of the target's values that stand side by side along an axis of a value, the last one or channels; none if it is one."""
        size = value.array.shape[axis]
        while (made := self._made_by.get(value)) is not None:
            last = axis % value.array.ndim == value.array.ndim - 1
            if made.name in TURNS:
                axis = _before_turn(made, axis)
            elif made.name in VIEWS and last:
                axis = -1
            else:
                break
            value = made.operands[0]
        if (
            made is None
            or made.name != "cat"
            or value.array.shape[axis] != size
            or made.settings.get("dim", 0) % value.array.ndim != axis % value.array.ndim
        ):
            return []
        return [x.array.shape[axis] for x in made.operands]

    def cuts(self, value: Value, axis: int) -> tuple[int, ...]:
        """Return the lengths of the parts in which the target takes an axis of a value, or of what it makes of each element; none for one.

        Args:
            axis: -1 for the last one, also where the others are joined or split.
        """
        size, bounds, level, seen = value.array.shape[axis], {0}, [value], {value}
        for _ in range(MAX_BEFORE_CUTS):
            users = [(at, user) for at in level for user in self._users.get(at, [])]
            level = []
            for at, user in users:
                if user.name in SPLITS and user.settings.get("dim", 0) % at.array.ndim == axis % at.array.ndim:
                    start = (user.settings.get("start") or 0) % size if user.name == "slice" else 0
                    ends = accumulate(result.array.shape[axis] for result in user.results)
                    bounds |= {start, *(start + end for end in ends)}
                elif role_of(user) in SUMMED or (made := user.results[0]) in seen:
                    continue
                elif made.array.shape == at.array.shape or (
                    axis == -1 and user.name in (*VIEWS, *STEPS) and made.array.shape[-1:] == (size,)
                ):
                    level.append(made)
                    seen.add(made)
        found = tuple(int(n) for n in np.diff(sorted({*bounds, size})))
        return found if len(found) > 1 else ()

    def map_of(self, value: Value) -> tuple[int, ...]:
        """Return the axes of the map that the target makes of the last axis of a value, or of each element, in front of a convolution; none if it makes none."""
        size, level, seen = value.array.shape[-1], [value], {value}
        for _ in range(MAX_BEFORE_MAP):
            made = []
            for at, user in ((of, user) for of in level for user in self._users.get(of, [])):
                result = user.results[0]
                axes = _split_off(at.array.shape, result.array.shape) if user.name in VIEWS else ()
                if axes and self._is_convolved(result):
                    return axes
                if result.array.shape[-1:] == (size,) and result not in seen and keeps_last_axis(user, at):
                    made.append(result)
                    seen.add(result)
            level = made
        return ()

    def turns(self, value: Value) -> bool:
        """Whether the target multiplies what it makes of a value by something else that has several numbers, before the next product: as RoPE does."""
        made, level = {value}, [value]
        products: list[Operation] = []
        for _ in range(MAX_BEFORE_CONVOLUTION):
            users = [user for at in level for user in self._users.get(at, []) if role_of(user) is not Role.PRODUCT]
            products += (user for user in users if user.name.removesuffix("_") == "mul")
            level = [result for user in users for result in user.results if result not in made]
            made.update(level)
        others = (x for user in products for x in user.operands if x not in made and not x.of_parameters)
        return any(x.array.size and x.array.min() != x.array.max() for x in others)

    def shared(self, value: Value) -> int:
        """Return how many heads that the target makes of a value meet the same head in the next product of two values, as queries in groups do."""
        made, level = {value}, [value]
        for _ in range(MAX_BEFORE_CONVOLUTION):
            users = [user for at in level for user in self._users.get(at, [])]
            for user in users:
                others = [k for k, x in enumerate(user.operands) if x not in made]
                axes = axes_of(user, others[0]) if role_of(user) is Role.PRODUCT and len(others) == 1 else None
                if axes is not None and len(user.data) == 2:
                    return _repeated(user.operands[others[0]].array, axes[1][0])
            level = [x for user in users if role_of(user) is not Role.PRODUCT for x in user.results if x not in made]
            made.update(level)
        return 1

    def is_weighed(self, operation: Operation) -> bool:
        """Whether the rows that a product gives are multiplied by a number of data each, before anything else but a bias: they are those of an expert."""
        level = list(operation.results)
        for _ in range(MAX_DEPTH):
            users = [user for at in level for user in self._users.get(at, [])]
            if any(map(weighs_rows, users)):
                return True
            level = [x for user in users if user.name in VIEWS or role_of(user) is Role.SHIFT for x in user.results]
        return False

    def _is_convolved(self, value: Value) -> bool:
        """Whether a convolution takes a value before any product does."""
        level, seen = [value], {value}
        for _ in range(MAX_BEFORE_CONVOLUTION):
            users = [user for at in level for user in self._users.get(at, [])]
            if any(role_of(user) is Role.CONVOLUTION for user in users):
                return True
            results = (user.results[0] for user in users if user.results and role_of(user) is not Role.PRODUCT)
            level = [result for result in results if result not in seen]
            seen.update(level)
        return False

    def last_sizes(self, value: Value) -> list[int]:
        """Return the sizes of the last axis in the views that the target takes of a value, with its bias, or of its parts, such as that of a head's features."""
        found, level = dict[int, None](), [value]
        for _ in range(MAX_DEPTH):
            users = [user for at in level for user in self._users.get(at, [])]
            views = [user.results[0] for user in users if user.name in VIEWS]
            found |= dict.fromkeys(size for made in views for size in made.array.shape[-1:])
            level = views + [x for user in users if user.name in SPLITS or _adds_bias(user) for x in user.results]
        return list(found)

    def sizes_behind(self, value: Value, axis: int = -1) -> list[int]:
        """Return the sizes of the inner part into which views split an axis, of what the target makes of each element of a value, and then turns or multiplies by data; also those of a pixel shuffle."""
        found = dict[int, None]()
        axis %= value.array.ndim
        for at in self._of_each_element(value):
            for user in self._users.get(at, []):
                made, before = user.results[0].array.shape, at.array.shape
                more = len(made) - len(before)
                if user.name == SHUFFLE and axis == len(before) - 3:
                    found[before[axis] // made[axis]] = None
                elif user.name in VIEWS and more > 0 and self._is_turned(user.results[0]):
                    axes = made[axis : axis + more + 1]
                    found |= dict.fromkeys(math.prod(axes[k:]) for k in range(1, more + 1))
        return list(found)

    def _is_turned(self, value: Value) -> bool:
        """Whether the target turns the axes of what it makes of each element of a value, or multiplies it by data, which may have them in another order."""
        users = (user for at in self._of_each_element(value) for user in self._users.get(at, []))
        return any(user.name in TURNS or (role_of(user) in BY_DATA and len(user.data) == 2) for user in users)

    def _of_each_element(self, value: Value) -> list[Value]:
        """Return a value, and what the target makes of it with the same axes."""
        found, level = [value], [value]
        for _ in range(MAX_DEPTH - 1):
            users = [user for at in level for user in self._users.get(at, [])]
            level = [user.results[0] for user in users if user.results[0].array.shape == value.array.shape]
            found += level
        return found

    def free(self, numbers: Array, target: Array | None = None) -> bool:
        """Whether no element is used yet, but where it is the target's element already, or all may be used again."""
        used = (numbers >= 0) & (self.used[numbers] > 0)
        if target is not None:
            used &= self.origins[target] != numbers
        return self.level > 1 or not used.any()

    def lacking(self, weight: Value) -> tuple[Array, ...]:
        """Return the factors of a value of parameters that are not known yet, as `Value.elements`; without a known one such as a mask."""
        if len(weight.elements) < 2:
            return weight.elements
        found = tuple(numbers for numbers in weight.elements if not self._is_known(numbers))
        return found or weight.elements

    def owners(self, numbers: Array) -> set[str]:
        """Return the names of the target's parameters that elements belong to; none if one of them is a constant."""
        if (numbers < 0).any():
            return set()
        return {self._names[k] for k in np.unique(np.searchsorted(self._starts, numbers.ravel(), "right") - 1)}

    def _is_known(self, numbers: Array) -> bool:
        return not any(np.isnan(values).any() for values in self._values(numbers))

    def are_zeros(self, numbers: Array) -> bool:
        """Whether elements of the target are known, and are zeros."""
        return not any(values.any() for values in self._values(numbers))  # NaN is no zero

    def _values(self, numbers: Array) -> Iterator[Array]:
        """Yield the values of elements of the target, tensor by tensor; NaN where one is not known."""
        used = np.unique(numbers[numbers >= 0])
        owners = np.searchsorted(self._starts, used, "right") - 1
        for k in set(owners):
            yield self.replay.parameters[self._names[k]][used[owners == k] - self._starts[k]]

    def pieces(
        self,
        target: Array,
        numbers: Array,
        values: Array,
        arithmetic: Arithmetic,
        meeting: Meeting | None,
        factor: float = 1.0,
        places: Array | None = None,
    ) -> tuple[Piece, ...]:
        """Return pieces by tensor: element `target` (by number) becomes element `numbers` of the source."""
        target, numbers, values = target.ravel(), numbers.ravel(), np.asarray(values, np.float64).ravel()
        places = None if places is None else places.ravel()
        owner = np.searchsorted(self._starts, target, "right") - 1
        owner[target < 0] = -1
        found = []
        for k in np.unique(owner[owner >= 0]):
            here = owner == k
            found.append(
                Piece(
                    self._names[k],
                    target[here] - self._starts[k],
                    numbers[here],
                    values[here],
                    arithmetic,
                    factor,
                    meeting,
                    None if places is None else places[here],
                )
            )
        return tuple(found)

    def fitted(
        self,
        target: Sequence[Array],
        numbers: Sequence[Array],
        operand: Array,
        read: Callable[[], Array],
        meeting: Meeting,
        places: Array,
    ) -> tuple[Piece, ...] | None:
        """Return pieces with which the target's operand equals the source's; None if there are none.

        Args:
            target: numbers of the target's elements, one array for each factor.
            numbers: numbers of the source's elements, one array for each factor, in the order of `target`.
            operand: the source's operand in this order.
            read: returns the target's operand in this order.
            meeting: where the source uses it.
            places: positions in the source's operand in this order.
        """
        theta = self.source.theta
        for chosen in itertools.permutations(numbers, len(target)):
            if any((c < 0).any() for c in chosen):
                continue
            ways = list(COMPUTE) if len(target) == 1 else [Arithmetic.SAME]
            given: list[tuple[Arithmetic, Array]] = []
            for way in ways:
                found = tuple(
                    piece
                    for t, c in zip(target, chosen, strict=True)
                    for piece in self.pieces(t, c, COMPUTE[way](theta[c]), way, meeting)
                )
                got = self._read(found, read)
                if equal(got, operand):
                    if any(len(np.unique(t)) != len(np.unique(c)) for t, c in zip(target, chosen, strict=True)):
                        break
                    return found
                given.append((way, got))
                plain = way is Arithmetic.SAME and len(target) == 1 and self.source.is_scaled(meeting.weight)
                factor = ratio(got, operand) if plain else None
                if factor is not None:
                    t, c = target[0], chosen[0]
                    found = self.pieces(t, c, factor * theta[c], way, meeting, factor)
                    if equal(self._read(found, read), operand):
                        return found
            else:
                found = self._each_in_its_way(target[0], chosen[0], operand, given, meeting) if len(target) == 1 else ()
                if found and equal(self._read(found, read), operand):
                    return found
        if (
            len(target) == 1
            and len(np.unique(target[0])) == target[0].size
            and not numbers_are_plain(numbers, operand, theta)
        ):
            ids = numbers[0] if len(numbers) else np.full(operand.shape, -1)
            found = self.pieces(target[0], ids, operand, Arithmetic.COMPUTED, meeting, places=places)
            if equal(self._read(found, read), operand):
                return found
        return None

    def _each_in_its_way(
        self,
        target: Array,
        numbers: Array,
        operand: Array,
        given: Sequence[tuple[Arithmetic, Array]],
        meeting: Meeting,
    ) -> tuple[Piece, ...]:
        """Return pieces of which each is computed in a way of its own, as a bias to a part of which a number is added; none if an element fits in no way.

        Args:
            target, numbers, operand, meeting: as of `fitted`, of one factor.
            given: the ways, with the target's operand if all elements are computed in it.
        """
        rest, found = np.ones(target.shape, bool), list[Piece]()
        for way, got in given:
            here = rest & np.isclose(got, operand, rtol=EQUAL, atol=0)
            if here.any():
                found += self.pieces(
                    target[here], numbers[here], COMPUTE[way](self.source.theta[numbers[here]]), way, meeting
                )
            rest &= ~here
        return () if rest.any() or len(np.unique(target)) != target.size else tuple(found)

    def _read(self, pieces: Sequence[Piece], read: Callable[[], Array]) -> Array:
        with self.replay.assigned([(p.tensor, p.elements, p.values) for p in pieces]):
            return np.array(read())  # it may share memory with the parameters

    def near_first(self, found: Sequence[Meeting]) -> list[Meeting]:
        """Return meetings, those nearest to the operation that was matched last first."""
        return sorted(found, key=lambda meeting: abs(meeting.index - self.near))


def _repeated(array: Array, batch: Sequence[int]) -> int:
    """Return how often each part of an array along its batch axes stands in it; 1 where not all stand as often."""
    rest = [k for k in range(array.ndim) if k not in batch]
    parts = array.transpose(*batch, *rest).reshape(math.prod(array.shape[k] for k in batch), -1)
    if not parts.size:
        return 1
    counts = np.unique(parts, axis=0, return_counts=True)[1]
    return int(counts[0]) if (counts == counts[0]).all() else 1


def _adds_bias(operation: Operation) -> bool:
    """Whether an operation adds parameters to data."""
    return role_of(operation) is Role.SHIFT and any(x.of_parameters for x in operation.operands)


def keeps_last_axis(operation: Operation, value: Value) -> bool:
    """Whether the last axis of a result that is as long as that of a value is that axis, and not another of the same size, such as the tokens."""
    if role_of(operation) is Role.PRODUCT:
        return value is not operation.operands[0]  # which it adds up along that axis
    if operation.name not in TURNS:
        return True
    numbers = np.arange(value.array.shape[-1], dtype=float)
    turned = operation.again([np.broadcast_to(numbers, value.array.shape).copy()])[0]
    return np.array_equal(turned, np.broadcast_to(numbers, turned.shape))


def _before_turn(operation: Operation, axis: int) -> int:
    """Return the axis that an axis of the result is of what an operation turns."""
    said, rank = operation.settings, operation.results[0].array.ndim
    order = list(range(rank))
    if operation.name == "permute":
        order = [k % rank for k in said["dims"]]
    else:
        one, two = (said["dim0"], said["dim1"]) if "dim0" in said else (0, -1)
        order[one], order[two] = order[two], order[one]
    return order[axis]


def _split_off(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Return the axes longer than 1 that a view makes of the last axis; none if it makes one, or moves others."""
    rows = math.prod(before[:-1])
    heads = [k for k in range(len(after)) if math.prod(after[:k]) == rows]
    axes = tuple(size for size in after[heads[0] :] if size > 1) if heads else ()
    return axes if len(axes) > 1 and math.prod(axes) == before[-1] else ()
