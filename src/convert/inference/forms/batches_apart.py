"""Take a batch apart in which a program joins several inputs: what a network computes of ``[a, b]`` is what it computes of a, beside that of b.

One program joins two images along the batch, encodes them at once and splits the result; another encodes one after the other. The parts go
by themselves through each operation that acts on each row alone. That it does is seen in numbers: the rows of one part are the same without
the others. What the steps of a loop give is no such batch: each is computed from the one before. Behind an operation that mixes rows, as the
statistics of a batch, the parts are joined again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import JOINS, MOVES, are_same, before_moves, step
from convert.inference.meetings.sites import parameter_operands, role_of
from convert.programs.program import REFUSALS, Array, Operation, Program, Value, computed_by, producers_of

LAYERS = (Role.PRODUCT, Role.CONVOLUTION, Role.LOOKUP)
Run = Callable[[Sequence[Array]], Sequence[Array]]


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a value is made of, one part after the other along an axis.

    Attributes:
        axis: the axis.
        values: the parts.
        made_by: the operation that gives the whole.
        joins: the operations that joined them.
    """

    axis: int
    values: tuple[Value, ...]
    made_by: Operation
    joins: frozenset[Operation]

    @property
    def bounds(self) -> list[int]:
        """Where each part begins, and where the last one ends."""
        return [0, *np.cumsum([x.array.shape[self.axis] for x in self.values]).tolist()]

    def alone(self, array: Array, part: int, shape: tuple[int, ...]) -> Array:
        """Return the whole, of a shape, with one part of it; the others are no numbers."""
        filled = np.full(shape, np.nan if array.dtype.kind in "fc" else 0, array.dtype)
        filled[_rows(self.axis, self.bounds, part)] = array
        return filled


@dataclass(frozen=True, eq=False)
class _Trial:
    """An operation on one part.

    Attributes:
        operands: of this part.
        run: gives the results.
        before: what cuts the operands.
    """

    operands: tuple[Value, ...]
    run: Run
    before: tuple[Operation, ...] = ()

    def results(self) -> list[Array]:
        """Return the results; none where the operation does not take a part."""
        try:
            with np.errstate(all="ignore"):
                return [np.asarray(x) for x in self.run([x.array for x in self.operands])]
        except REFUSALS:
            return []


class _Rewriting:
    """A program whose batches are taken apart, as far as it was read.

    Attributes:
        operations: what takes the place of those that were read.
        joins: the operations that joined what layers were then applied to.
    """

    def __init__(self, program: Program, *, keep: bool) -> None:
        self.operations: list[Operation] = []
        self.joins: set[Operation] = set()
        self._keep = keep
        self._parts: dict[Value, _Parts] = {}
        self._whole: set[Value] = set()  # values in parts that operations give as well
        self._new: dict[Value, Value] = {}
        self._made_by = producers_of(program.operations)

    def read(self, operation: Operation) -> None:
        """Take the next operation of the program."""
        operands = tuple(map(self.now, operation.operands))
        now = operation if operands == operation.operands else replace(operation, operands=operands)
        done = any(x in self._parts for x in operands) and (self._by_part(now) or self._of_one_part(now))
        if self._keep:
            self.operations.append(operation)
        if done:
            return
        self.put_together(operands)
        if _joins_batches(now) and not self._are_steps(operation.operands):
            self._parts[now.results[0]] = _Parts(0, operands, now, frozenset([now]))
        elif not self._keep:
            self.operations.append(now)

    def _are_steps(self, values: Sequence[Value]) -> bool:
        """Whether the second of some values is computed from the first one, as those of a loop."""
        _, first, _ = before_moves(values[0], self._made_by, MOVES)
        second = self._made_by.get(values[1])
        if first is None or second is None:
            return False
        return first is not second and first in computed_by(second, self._made_by)

    def now(self, value: Value) -> Value:
        """Return the part that a value is, or else the value."""
        return self._new.get(value, value)

    def put_together(self, values: Iterable[Value]) -> None:
        """Let operations give values that are in parts."""
        for value in () if self._keep else [x for x in values if x in self._parts and x not in self._whole]:
            parts = self._parts[value]
            join = step(parts.made_by, "cat", parts.values, value, lambda *x, at=parts.axis: np.concatenate(x, at))
            self.operations.append(replace(join, settings={"dim": parts.axis}))
            self._whole.add(value)

    def _by_part(self, operation: Operation) -> bool:
        """Whether an operation acts on the rows of each part by themselves; it then acts on the parts."""
        of = [self._parts[x] for x in operation.operands if x in self._parts]
        count, joins = len(of[0].values), frozenset[Operation]().union(*(parts.joins for parts in of))
        if any(len(parts.values) != count for parts in of):
            return False
        for cut in (False, True):
            trials = [self._cut(operation, k, cut=cut) for k in range(count)]
            if (axes := _axes(operation, [trial.results() for trial in trials])) is not None:
                break
        else:
            others = (x for x in operation.operands if x not in self._parts)
            if operation.name not in MOVES and any(x.array.ndim for x in others):
                return False
            wholes = [self._alone(operation, k) for k in range(count)]
            found = _axes_of_rows(operation, [trial.results() for trial in wholes], of[0].bounds)
            if found is None:
                return False
            axes = [axis for axis, _ in found]
            trials = [replace(whole, run=_taking(whole.run, found, k)) for k, whole in enumerate(wholes)]
        steps = []
        for trial in trials:
            made = zip(trial.results(), operation.results, strict=True)
            results = tuple(Value(array, data=True, leaves=x.leaves) for array, x in made)
            steps.append(replace(operation, operands=trial.operands, results=results, again=trial.run))
            self.operations += (*trial.before, steps[-1])
        if parameter_operands(operation) and role_of(operation) in LAYERS:
            self.joins |= joins
        for k, (axis, result) in enumerate(zip(axes, operation.results, strict=True)):
            self._parts[result] = _Parts(axis, tuple(one.results[k] for one in steps), operation, joins)
        return True

    def _of_one_part(self, operation: Operation) -> bool:
        """Whether each result of an operation is of one part alone, as what splits the batch again; it then takes that part."""
        (value, *more) = [x for x in operation.operands if x in self._parts]
        if more or operation.name not in MOVES:
            return False
        trials = [self._alone(operation, k) for k in range(len(self._parts[value].values))]
        results = [trial.results() for trial in trials]
        steps = []
        for at, result in enumerate(operation.results):
            of = [k for k, made in enumerate(results) if made and are_same(made[at], result.array)]
            if len(of) != 1:
                return False
            trial = trials[of[0]]
            steps.append(replace(operation, operands=trial.operands, results=(result,), again=_only(trial.run, at)))
        for one in [] if self._keep else steps:
            (part,) = (x for x in one.operands if x in self._parts[value].values)
            (result,) = one.results
            if part.array.shape == result.array.shape and np.array_equal(part.array, result.array):
                self._new[result] = part
            else:
                self.operations.append(one)
        return True

    def _cut(self, operation: Operation, part: int, *, cut: bool) -> _Trial:
        """Return an operation on a part; where `cut`, with the same rows of what else has as many."""
        whole = next(x for x in operation.operands if x in self._parts)
        parts = self._parts[whole]
        operands, before = list[Value](), list[Operation]()
        for x in operation.operands:
            axis = parts.axis - whole.array.ndim + x.array.ndim
            if x in self._parts:
                operands.append(self._parts[x].values[part])
            elif cut and axis >= 0 and x.array.shape[axis] == parts.bounds[-1]:
                at = _rows(axis, parts.bounds, part)
                operands.append(Value(x.array[at], x.data, x.leaves, tuple(of[at] for of in x.elements)))
                before += [] if x.constant else [step(operation, "slice", (x,), operands[-1], lambda a, at=at: a[at])]
            else:
                operands.append(x)
        return _Trial(tuple(operands), operation.again, tuple(before))

    def _alone(self, operation: Operation, part: int) -> _Trial:
        """Return an operation on wholes of which only one part is known, as where a shape is a number in the code."""
        of = [self._parts.get(x) for x in operation.operands]
        shapes = [x.array.shape for x in operation.operands]

        def run(arrays: Sequence[Array]) -> Sequence[Array]:
            given = zip(arrays, of, shapes, strict=True)
            return operation.again([a if at is None else at.alone(a, part, shape) for a, at, shape in given])

        operands = (x if at is None else at.values[part] for x, at in zip(operation.operands, of, strict=True))
        return _Trial(tuple(operands), run)


def joined_in_one(source: Program, target: Program) -> bool:
    """Whether one of two programs joins a batch that layers are then applied to, row by row, and the other joins none of its size."""
    for one, other in ((source, target), (target, source)):
        joins = (join for join in other.operations if _joins_batches(join))
        if Counter(map(_size, _rewritten(one, keep=True).joins)) - Counter(map(_size, joins)):
            return True
    return False


def batches_apart(program: Program, *, keep: bool) -> Program:
    """Return the program with joined batches taken apart.

    Args:
        keep: whether what is computed of the whole stays in the program as well.
    """
    rewriting = _rewritten(program, keep=keep)
    if not rewriting.joins:
        return program
    outputs = {name: rewriting.now(value) for name, value in program.outputs.items()}
    rewriting.put_together(outputs.values())
    return replace(program, operations=tuple(rewriting.operations), outputs=outputs)


def _rewritten(program: Program, *, keep: bool) -> _Rewriting:
    rewriting = _Rewriting(program, keep=keep)
    for operation in program.operations:
        rewriting.read(operation)
    return rewriting


def _joins_batches(operation: Operation) -> bool:
    """Whether an operation joins several values of data along their first axis."""
    first = operation.settings.get(JOINS.get(operation.name, ""), 0) == 0
    return operation.name in JOINS and first and operation.operands == operation.data and len(operation.data) > 1


def _size(operation: Operation) -> int:
    return operation.results[0].array.size


def _axes(operation: Operation, made: Sequence[list[Array]]) -> list[int] | None:
    """Return the axis along which each result is what the parts give, one after the other; None if one is not."""
    found = []
    for of, result in zip(zip(*made, strict=True), operation.results, strict=True) if all(made) else ():
        shape = result.array.shape
        axes = [k for k, size in enumerate(shape) if all(x.ndim == len(shape) and x.shape[k] < size for x in of)]
        if len(axes) != 1 or any(
            np.delete(x.shape, axes[0]).tolist() != np.delete(shape, axes[0]).tolist() for x in of
        ):
            return None
        if not are_same(np.concatenate(of, axes[0]), result.array):
            return None
        found += axes
    return found or None


def _axes_of_rows(
    operation: Operation, made: Sequence[list[Array]], bounds: Sequence[int]
) -> list[tuple[int, list[int]]] | None:
    """Return the axis along which each result has the parts, and where each begins; None if a part hangs on another.

    Args:
        operation: as it ran.
        made: its results with each part alone.
        bounds: of the parts in an operand.
    """
    found = []
    for of, result in zip(zip(*made, strict=True), operation.results, strict=True) if all(made) else ():
        for axis, size in enumerate(result.array.shape):
            ends = [size * end // bounds[-1] for end in bounds]
            rows = [_rows(axis, ends, k) for k in range(len(of))]
            whole = all(size * end % bounds[-1] == 0 for end in bounds)
            if whole and all(are_same(x[at], result.array[at]) for x, at in zip(of, rows, strict=True)):
                found.append((axis, ends))
                break
        else:
            return None
    return found or None


def _taking(run: Run, axes: Sequence[tuple[int, list[int]]], part: int) -> Run:
    """Return what takes the rows of a part of each result."""

    def again(arrays: Sequence[Array]) -> list[Array]:
        made = zip(run(arrays), axes, strict=True)
        return [np.ascontiguousarray(x[_rows(axis, ends, part)]) for x, (axis, ends) in made]

    return again


def _only(run: Run, result: int) -> Run:
    """Return what gives one of the results."""
    return lambda arrays: [run(arrays)[result]]


def _rows(axis: int, bounds: Sequence[int], part: int) -> tuple[slice, ...]:
    """Return the index of a part."""
    return (*[slice(None)] * axis, slice(bounds[part], bounds[part + 1]))
