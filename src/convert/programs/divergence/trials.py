"""What may stand in the target's record instead, near the operation at which it departs from the source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.divergence.graph import root
from convert.programs.divergence.kinds import ELEMENTWISE, LAYOUT, kind_of
from convert.programs.divergence.knowledge import Knowledge
from convert.programs.divergence.layouts import layouts, places
from convert.programs.divergence.limits import before_limits, goes_on, is_limit
from convert.programs.divergence.rerun import Change
from convert.programs.divergence.samplings import SAMPLES, with_other_settings
from convert.programs.divergence.shared_values import FEW, Part, same_numbers
from convert.programs.divergence.words import scalar
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
DEPTH = 8  # operations from an entry to the value that is replaced, and in the source to the one that replaces it
MOST_INDICES = 64  # of an axis, each of which is tried where the target picks elements
PADS, SPREADS = ("pad", "constant_pad_nd"), ("scatter",)
BESIDE = 3  # operations behind the value that an anchor is computed from
NEAREST = 40  # values that far, on each side
OPERAND = (4, 4)  # the distance at which another operand is tried: after operations that are missing or too many


@dataclass(frozen=True)
class Trial:
    """A value of the target, and one of the source's to put there.

    Attributes:
        depths: the distance of the two from the entry.
        similar: whether both are results of operations that differ in a constant or a setting alone.
        missing_at: number of the entry, where the value is known and an operation is missing behind it.
        of_layer: whether the entry applies the weights of a layer, to which the source gives the other value.
        settings: other ones with which the target's operation gives the other value, and what it gives; None for none.
    """

    known: Knowledge
    value: Value
    part: Part
    depths: tuple[int, int]
    similar: bool
    missing_at: int | None
    of_layer: bool = False
    settings: tuple[Mapping[str, Any], Array] | None = None

    def changes(self) -> Iterator[Change]:
        """Yield the ways to put it in."""
        known = self.known
        if self.settings is not None:
            yield Change({self.value: self.settings[1]})
            return
        if self.of_layer and self.missing_at is not None:
            operation = known.target.operations[self.missing_at]
            at = operation.operands.index(self.value)
            beside = [(part.array, known.array(self.value)) for part in known.found.get(self.value, ())]
            for array in layouts(self.part.array, known.array(self.value), beside):
                yield Change(operands={(self.missing_at, at): array})
            return
        anchors = (
            [
                (part.array, known.array(v))
                for v in known.target.operations[self.missing_at].data
                for part in known.found.get(v, ())
            ]
            if self.missing_at is not None
            else self._anchors()
        )
        if self.missing_at is None:
            for array in layouts(self.part.array, known.array(self.value), anchors):
                yield Change({self.value: array})
            return
        first = known.root(self.value)
        for array in layouts(self.part.array, known.array(first), anchors):
            yield Change({first: array})
        for array in layouts(self.part.array, known.array(self.value), anchors):
            yield Change(operands=_at_entries(known, self.value, array))

    def _anchors(self) -> list[tuple[Array, Array]]:
        known = self.known
        operation = known.target.operations[known.producer[self.value]]
        given = [*operation.data, *(v for operand in operation.data for v in _padded(known, operand))]
        return [(part.array, known.array(v)) for v in given for part in known.found.get(v, ())]


def trials(known: Knowledge, entry: int, region: set[int]) -> Iterator[Trial]:
    """Yield what may be replaced near an entry by which value of the source's."""
    operation = known.target.operations[entry]
    yield from _of_other_settings(known, operation, region)
    present = known.present()
    anchors = [(v, part) for v in operation.data for part in known.found.get(v, ())]
    anchors = anchors or [(v, part) for v in _in_front(known, operation) for part in known.found.get(v, ())]
    if not anchors:  # a mask that is computed of lengths, and added to scores
        beside = {
            v: None
            for value, _ in _after(known, operation, region)
            for user in known.users.get(value, ())
            for v in user.data
        }
        anchors = [(v, part) for v in beside if known.is_known(v) for part in known.found.get(v, ())]
    indices = {(part.value.array.shape[part.axis], part.index) for _, part in anchors if part.axis is not None}
    if kind_of(operation) in ("pick", "part"):
        sizes = {size for _, part in anchors for size in part.value.array.shape if size <= MOST_INDICES}
        indices |= {(size, k) for size in sizes for k in range(size)}
    near: list[tuple[Value, int]] = list(after_in_source(known, [part.value for _, part in anchors], present))
    near += [(part.value, 0) for _, part in anchors]
    near += _beside(known, anchors, present)
    # A variance is computed of the values less their mean, which the target has, too.
    between = list(_present_behind(known, [part.value for _, part in anchors], present))
    near += [(value, depth + 1) for value, depth in after_in_source(known, between, present) if depth]
    seen: set[tuple[Value, Value]] = set()
    for value, depth in _after(known, operation, region):
        for other, far in near:
            if (value, other) not in seen:
                seen.add((value, other))
                similar = _limit_one_value(known, operation, value, other) or (
                    depth == far == 1 and _similar(known, operation, known.source_producer[other])
                )
                for part in _parts(other, value, indices):
                    yield Trial(known, value, part, (depth, far), similar, None)
    yield from _of_the_layer(known, entry)
    yield from _other_operands(known, entry, present)
    in_front = [*operation.data, *(v for operand in operation.data for v in _padded(known, operand))]
    for value in in_front:  # an operation that is missing in front of the entry
        for other, far in near:
            fits = far and other.array.size == value.array.size and known.shared.tells(known.array(value))
            if fits and (other.array.any() or _is_computed_of_alone(known, other, value)):
                yield Trial(known, value, Part(other), (0, far), False, entry)


def _of_other_settings(known: Knowledge, operation: Operation, region: set[int]) -> Iterator[Trial]:
    """Yield values of the source that a sampling behind an entry gives with another setting."""
    for value, _ in _after(known, operation, region):
        made = known.made_by[value]
        if made.name == SAMPLES:
            image, at = map(known.array, made.operands[:2])
            for other in with_other_settings(made, (image, at)):
                for part in known.shared.find(other[1])[:1]:
                    yield Trial(known, value, part, (1, 1), True, None, settings=other)


def _is_computed_of_alone(known: Knowledge, other: Value, value: Value) -> bool:
    """Whether the operation that gives a value of the source is given another one of the numbers of a value, and no further numbers.

    Zeros restore the output in the place of each factor of a product; they are what the source has for the one that it masks.
    """
    operation = known.source_producer.get(other)
    given = [v for v in operation.data if v.array.dtype.kind == "f"] if operation is not None else []
    parts = {root(part.value, known.source_producer) for part in known.found.get(value, ())}
    return len(given) == 1 and root(given[0], known.source_producer) in parts


def _in_front(known: Knowledge, operation: Operation) -> list[Value]:
    """Return the data of the operations in front of one: where that is a comparison, say, no value of the source's is equal."""
    roots = map(known.root, operation.data)
    before = [known.producer[v] for v in roots if v in known.producer]
    return [v for k in before for v in known.target.operations[k].data if known.is_known(v)]


def _other_operands(known: Knowledge, entry: int, present: set[Value]) -> Iterator[Trial]:
    """Yield what the source gives to an operation of the same kind whose result the target lacks.

    It is a value that the target has, or any if both take the same constant.
    """
    operation = known.target.operations[entry]
    kind, number = kind_of(operation), scalar(operation)
    joined = {v for v in operation.data if _is_join(known, v)}
    of_size: dict[int, dict[Value, None]] = {}
    for other in known.source.operations:
        if (
            kind_of(other) == kind
            and len(other.data) == len(operation.data)
            and not present.intersection(other.results)
        ):
            same_number = number not in (None, 0, 1) and scalar(other) == number
            for value in (root(v, known.source_producer) for v in other.data):
                if same_number or value in present or _is_picked(known, value, present):
                    of_size.setdefault(value.array.size, {})[value] = None
    for value in dict.fromkeys(operation.data):
        here = {root(part.value, known.source_producer) for part in known.found.get(value, ())}
        for candidate in of_size.get(value.array.size, ()):
            if known.shared.tells(known.array(value)) and known.shared.tells(candidate.array) and candidate not in here:
                yield Trial(known, value, Part(candidate), OPERAND, False, entry)
        for part in known.found.get(value, ()):  # its own elements, which the target may have joined in another order
            if part.axis is None and known.shared.tells(known.array(value)) and value in joined:
                yield Trial(known, value, part, OPERAND, False, entry)


def _is_picked(known: Knowledge, value: Value, present: set[Value]) -> bool:
    """Whether the source picks a value out of those that the target has, such as the scores of the experts that it chose."""
    operation = known.source_producer.get(value)
    return operation is not None and kind_of(operation) == "pick" and operation.data[0] in present


def _is_join(known: Knowledge, value: Value) -> bool:
    index = known.producer.get(known.root(value))
    return index is not None and kind_of(known.target.operations[index]) == "join"


def _padded(known: Knowledge, value: Value) -> tuple[Value, ...]:
    """Return the value that was padded to this one, or spread among zeros, which the source may do within an operation."""
    index = known.producer.get(known.root(value))
    operation = known.target.operations[index] if index is not None else None
    return operation.data if operation is not None and operation.name in (*PADS, *SPREADS) else ()


def _of_the_layer(known: Knowledge, entry: int) -> Iterator[Trial]:
    """Yield what the source gives to the operation that applies the same weights as an entry."""
    operation = known.target.operations[entry]
    weights = [v for v in operation.operands if v.of_parameters and v.array.size >= FEW]
    if len(operation.data) != 1 or not weights:
        return
    if sum(any(v in one.operands for v in weights) for one in known.target.operations) > 1:
        return  # it is not told which use is which
    (value,) = operation.data
    for other in known.source.operations:
        if kind_of(other) != kind_of(operation) or len(other.data) != 1 or other.data[0].array.size != value.array.size:
            continue
        theirs = [v for v in other.operands if v.of_parameters]
        same_weights = any(
            x.array.size == y.array.size and same_numbers(x.array, y.array) for x in weights for y in theirs
        )
        if same_weights and not _goes_into(known, other.data[0], value):
            yield Trial(known, value, Part(other.data[0]), (0, 1), False, entry, True)


def _goes_into(known: Knowledge, before: Value, value: Value) -> bool:
    """Whether the source makes a known value of another one without a layer between them: to put that in would be a step back."""
    ways = [known.between([before], part.value) for part in known.found.get(value, ())]
    return any(way and not any(kind_of(one) in ("product", "convolution") for one in way) for way in ways)


def _after(known: Knowledge, operation: Operation, region: set[int]) -> Iterator[tuple[Value, int]]:
    """Yield unknown values of the target behind an operation, with their distance."""
    waiting: list[tuple[Value, int]] = [(v, 1) for v in operation.results if not known.is_known(v)]
    seen: set[Value] = set()
    while waiting and len(seen) < NEAREST:
        value, depth = waiting.pop(0)
        if value in seen or depth > DEPTH:
            continue
        seen.add(value)
        if known.shared.is_large(value.array) and value.array.dtype.kind == "f":
            yield value, depth
        for user in known.users.get(value, ()):
            further = depth + (kind_of(user) != LAYOUT)
            waiting += [(v, further) for v in user.results if known.producer[v] in region and not known.is_known(v)]


def after_in_source(known: Knowledge, values: Sequence[Value], present: set[Value]) -> Iterator[tuple[Value, int]]:
    """Yield values of the source behind these that the target lacks, with their distance."""
    waiting = [(v, 0) for v in values]
    largest = max((v.array.size for v in values), default=0)
    seen: set[Value] = set()
    while waiting and len(seen) < NEAREST:
        value, depth = waiting.pop(0)
        if value in seen or depth > DEPTH or (depth and value in present):
            continue
        seen.add(value)
        repeated = value.array.size > largest and value not in present  # as an interpolation to the nearest does
        if (depth or repeated) and known.shared.is_large(value.array) and value.array.dtype.kind == "f":
            yield value, max(depth, 1)
        for user in known.source_users.get(value, ()):
            waiting += [(v, depth + (kind_of(user) != LAYOUT)) for v in user.results]


def _beside(
    known: Knowledge, anchors: Sequence[tuple[Value, Part]], present: set[Value]
) -> Iterator[tuple[Value, int]]:
    """Yield what the source computes of the value behind an anchor in one operation, or in two: exp(2 * x) beside exp(x)."""
    for _, part in anchors:
        operation = known.source_producer.get(root(part.value, known.source_producer))
        if operation is None or kind_of(operation) not in ELEMENTWISE or len(operation.data) != 1:
            continue
        for value, depth in after_in_source(known, [root(operation.data[0], known.source_producer)], present):
            if 0 < depth <= BESIDE:
                yield value, depth + BESIDE


def _present_behind(known: Knowledge, values: Sequence[Value], present: set[Value]) -> Iterator[Value]:
    """Yield values of the source behind these that the target has, too: what it lacks may be computed of them."""
    waiting = [(v, 0) for v in values]
    seen: set[Value] = set(values)
    while waiting and len(seen) < NEAREST:
        value, depth = waiting.pop(0)
        if depth and value in present and known.shared.is_large(value.array):
            yield value
        for user in known.source_users.get(value, ()) if depth < DEPTH else ():
            new = [v for v in user.results if v not in seen]
            seen.update(new)
            waiting += [(v, depth + (kind_of(user) != LAYOUT)) for v in new]


def _limit_one_value(known: Knowledge, operation: Operation, value: Value, other: Value) -> bool:
    """Whether two values are what all limits of the target and of the source make of one value, each by one operation or by two."""
    if not is_limit(operation) or goes_on(value, known.users) or goes_on(other, known.source_users):
        return False
    ours, theirs = before_limits(value, known.made_by), before_limits(other, known.source_producer)
    given = {root(part.value, known.source_producer) for part in known.found.get(ours, ())}
    return ours is known.root(operation.data[0]) and theirs in given


def _similar(known: Knowledge, one: Operation, two: Operation) -> bool:
    """Whether two operations are the same but for a constant, a setting or the order of elements; limits differ as a whole."""
    if is_limit(one):
        return False
    ours_data, theirs_data = (
        [v for v in x.data if v.array.dtype.kind == "f"] for x in (one, two)
    )  # a mask is another value
    if kind_of(one) != kind_of(two) or len(ours_data) != len(theirs_data):
        return False
    ours = {part.value for operand in one.data for part in known.found.get(operand, ())}
    return all(root(operand, known.source_producer) in ours or operand in ours for operand in theirs_data)


def _at_entries(known: Knowledge, value: Value, array: Array) -> dict[tuple[int, int], Array]:
    """Return the operands of entries that are a value in any layout, with other elements for it."""
    made = {}
    first = known.root(value)
    for index in known.region():
        operation = known.target.operations[index]
        if not all(map(known.is_known, operation.data)):
            continue
        for k, operand in enumerate(operation.operands):
            if operand.data and known.root(operand) is first:
                order = places(known.array(value), known.array(operand))
                laid = array if order is None else array.ravel()[order]
                made[index, k] = laid.reshape(operand.array.shape)
    return made


def _parts(value: Value, like: Value, indices: Iterable[tuple[int, int]]) -> Iterator[Part]:
    """Yield the value, or what stands at an index of an axis, if it has as many elements as another value.

    Args:
        indices: (length of an axis, index) of the parts from which the target goes on.
    """
    size = like.array.size
    if value.array.size == size:
        yield Part(value)
        return
    for length, index in indices:
        for axis, n in enumerate(value.array.shape):
            if n == length and value.array.size == size * length:
                yield Part(value, axis, index)
