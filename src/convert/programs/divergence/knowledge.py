"""What of a target's record the source has, too, while values are put into the record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from convert.programs.divergence.graph import root
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.rerun import Rerun
from convert.programs.divergence.shared_values import FEW, Part, SharedValues, contains, same_numbers, visible
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]


class Knowledge:
    """Which values of the target the source has.

    Attributes:
        goal, source_goal: the output, of the target and of the source.
        rerun: the target's record with what was put in.
        found: value of the target -> where the source has it.
        known: value of the target -> whether the source has it; one that cannot tell is known if what it is computed from is.
        lacking: parameters of the target whose numbers are not those of the source, as nothing was found for them.
        fused: the source's products of which the target has the columns in one with others.
        had: the source's values that the target had where others were put in.
        producer, users: value of the target -> number of the operation that gives it; operations that it is given.
        made_by: value of the target -> the operation that gives it.
        source_producer, source_users: the same in the source, with the operation itself.
    """

    def __init__(
        self, source: Program, target: Program, output: str, shared: SharedValues, lacking: Collection[str] = ()
    ) -> None:
        self.lacking = lacking
        self.source, self.target, self.shared, self.goal = source, target, shared, target.outputs[output]
        self.source_goal = source.outputs[output]
        self.rerun = Rerun(target)
        self.producer = {v: k for k, operation in enumerate(target.operations) for v in operation.results}
        self.made_by = target.made_by
        self.users = target.users
        self.source_producer = source.made_by
        self.source_users = source.users
        self.found: dict[Value, tuple[Part, ...]] = {}
        self.known: dict[Value, bool] = {}
        self.had: frozenset[Value] = frozenset()
        for name, value in target.inputs.items():
            named = (Part(source.inputs[name]),) if name in source.inputs else ()
            self.found[value], self.known[value] = shared.find(value.array) or named, True
        for operation in target.operations:
            self.assess(operation)
        self.fused = frozenset(self._in_fused())

    def _in_fused(self) -> Iterator[Value]:
        """Yield the source's products that are columns of what a fused matrix of the target gives of the same value."""
        for operation in self.target.operations:
            if kind_of(operation) != "product" or len(operation.data) != 1 or self.found[operation.results[0]]:
                continue
            result = operation.results[0].array
            of = {root(part.value, self.source_producer) for part in self.found[operation.data[0]]}
            for one in self.source.operations:
                made = one.results[0]
                of_it = len(one.data) == 1 and root(one.data[0], self.source_producer) in of
                if kind_of(one) == "product" and of_it and contains(result, made.array):
                    yield made

    def array(self, value: Value) -> Array:
        """Return what a value of the target is now."""
        return self.rerun.array(value)

    def assess(self, operation: Operation) -> None:
        """Find the results of an operation among the source's values."""
        for value in operation.results:
            self.found[value], self.known[value] = self.look_up(operation, value, self.rerun)

    def look_up(self, operation: Operation, value: Value, rerun: Rerun) -> tuple[tuple[Part, ...], bool]:
        if not value.data:
            return (), True
        array = rerun.array(value)
        found = self.shared.find(array)
        repeats = kind_of(operation) == LAYOUT  # elements of a known value, as often as the target wants them
        same = array.size < FEW or bool((array == array.flat[0]).all())  # zeros that a recurrence begins with
        same = same and not self.shared.tells(array)
        mask = not value.leaves and bool(np.isin(visible(array), (0, 1)).all())  # which the source may have turned over
        if not found and repeats and array.size < FEW and len(operation.data) == 1:  # a time for each of two images
            found = tuple(part for part in self.found.get(operation.data[0], ()) if part.value.array.size == array.size)
        if found or (array.dtype.kind == "f" and not (same or repeats or mask)):
            return found, bool(found)
        return (), all(self.is_known(operand) for operand in operation.data)

    def is_known(self, value: Value) -> bool:
        return not value.data or self.known.get(value, False)

    def present(self) -> set[Value]:
        """Return the source's values that the target has, as they are or in parts."""
        found = {part for parts in self.found.values() for part in parts}
        counts = Counter((part.value, part.axis) for part in found)
        return {value for (value, axis), n in counts.items() if axis is None or n == value.array.shape[axis]}

    def region(self) -> list[int]:
        """Return the numbers of the operations from which the output is reached through unknown values, in order."""
        region: set[int] = set()
        waiting = [self.goal]
        while waiting:
            value = waiting.pop()
            index = self.producer.get(value)
            if index is None or self.is_known(value) or index in region:
                continue
            region.add(index)
            waiting.extend(self.target.operations[index].operands)
        return sorted(region)

    def is_entry(self, index: int) -> bool:
        """Whether an operation is given known values alone."""
        return all(map(self.is_known, self.target.operations[index].data))

    def with_rerun(self, rerun: Rerun, replaced: dict[Value, Array]) -> Knowledge:
        """Return what is known of the record with these values put in."""
        made = object.__new__(Knowledge)
        made.__dict__.update(self.__dict__)
        made.rerun, made.found, made.known = rerun, dict(self.found), dict(self.known)
        made.had |= {part.value for value in replaced for part in self.found.get(value, ()) if part.axis is None}
        for value, array in replaced.items():
            made.found[value], made.known[value] = self.shared.find(array), True
        for operation in self.target.operations:
            if any(v in rerun.changed and v not in rerun.put_in for v in operation.results):
                made.assess(operation)
        return made

    def root(self, value: Value) -> Value:
        """Return the value of the target whose elements this one has in another layout."""
        return root(value, self.made_by)

    def uses(self, value: Value) -> list[Operation]:
        """Return the operations of the target that compute something of a value, in any layout."""
        found, waiting = list[Operation](), [self.root(value)]
        while waiting:
            for user in self.users.get(waiting.pop(), ()):
                if kind_of(user) == LAYOUT:
                    waiting.extend(user.results)
                else:
                    found.append(user)
        return found

    def is_shown(self, value: Value) -> bool:
        """Whether a value is known by its own numbers, or by what it is computed from where it is no number or two of its own."""
        few = value.data and value.array.size < FEW and value.array.dtype.kind == "f" and value in self.producer
        return self.is_known(value) and not (few and not self.found.get(value))

    def behind(self, value: Value) -> tuple[Operation, ...]:
        """Return the operations that compute an unknown value from known ones."""
        found: set[int] = set()
        waiting = [value]
        while waiting:
            one = waiting.pop()
            index = self.producer.get(one)
            if index is not None and not self.is_shown(one) and index not in found:
                found.add(index)
                waiting.extend(self.target.operations[index].operands)
        return tuple(self.target.operations[k] for k in sorted(found))

    def behind_in_source(self, value: Value, present: set[Value]) -> tuple[Operation, ...]:
        """Return the operations of the source that compute a value from those that the target has."""
        found: set[Operation] = set()
        waiting = [value]
        while waiting:
            one = waiting.pop()
            operation = self.source_producer.get(one)
            zeros = one.array.dtype.kind == "f" and not one.array.any()  # what a recurrence begins with
            if operation is None or not one.data or one in present or (zeros and one is not value):
                continue
            if operation not in found:
                found.add(operation)
                waiting.extend(operation.operands)
        return tuple(one for one in self.source.operations if one in found)

    def has_leaf(self, leaf: str) -> bool:
        """Whether a parameter of the source is one of the target's, or one of which nothing is known may be it."""
        array = self.source.parameters[leaf].array
        of_size = {name: v.array for name, v in self.target.parameters.items() if v.array.size == array.size}
        return any(name in self.lacking or same_numbers(array, one) for name, one in of_size.items())

    def between(self, values: Sequence[Value], last: Value) -> tuple[Operation, ...]:
        """Return the operations of the source through which these values go into another one."""
        reached = self.reached_in_source(values)
        behind: set[Operation] = set()
        waiting = [last]
        while waiting:
            operation = self.source_producer.get(waiting.pop())
            if operation is not None and operation in reached and operation not in behind:
                behind.add(operation)
                waiting.extend(operation.operands)
        return tuple(one for one in self.source.operations if one in behind)

    def reached_in_source(self, values: Sequence[Value]) -> set[Operation]:
        """Return the operations of the source that something of these values goes into."""
        found: set[Operation] = set()
        waiting = list(values)
        while waiting:
            for user in self.source_users.get(waiting.pop(), ()):
                if user not in found:
                    found.add(user)
                    waiting.extend(user.results)
        return found
