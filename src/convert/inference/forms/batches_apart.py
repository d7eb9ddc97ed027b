"""Take a batch apart in which a program joins several inputs: what a network computes of ``[a, b]`` is what it computes of a, beside that of b.

One program joins two images along the batch, encodes them at once and splits the result; another encodes one after the other. The parts go
by themselves through each operation that acts on each row alone. That it does is seen in numbers: the rows of one part are the same without
the others. What the steps of a loop give is no such batch: each is computed from the one before. Behind an operation that mixes rows, as the
statistics of a batch, the parts are joined again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import COPIES, JOINS, MOVES, are_same, before_moves, step
from convert.inference.meetings.sites import parameter_operands, role_of
from convert.programs.program import REFUSALS, Array, Operation, Program, Value, computed_by

LAYERS = (Role.PRODUCT, Role.CONVOLUTION, Role.LOOKUP)
Run = Callable[[Sequence[Array]], Sequence[Array]]
Rows = tuple[Array, ...]  # of each part


@dataclass(frozen=True, eq=False)
class Parts:
    """What a value is made of: rows along an axis.

    Attributes:
        axis: the axis.
        rows: those of each part.
        values: the parts.
        made_by: the operation that gives the whole.
        joins: the operations that joined them.
    """

    axis: int
    rows: Rows
    values: tuple[Value, ...]
    made_by: Operation
    joins: frozenset[Operation]

    @property
    def count(self) -> int:
        """How many rows there are."""
        return sum(map(len, self.rows))

    def alone(self, array: Array, part: int, shape: tuple[int, ...]) -> Array:
        """Return the whole, of a shape, with one part of it; the others are no numbers."""
        filled = np.full(shape, np.nan if array.dtype.kind in "fc" else 0, array.dtype)
        filled[_at(self.axis, self.rows[part])] = array
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


class Rewriting:
    """A program whose batches are taken apart.

    Attributes:
        operations: what takes the place of its own.
        joins: the operations that joined what layers were then applied to.
    """

    def __init__(self, program: Program, *, keep: bool, stacks: Mapping[Value, Parts] | None = None) -> None:
        """Take the program apart.

        Args:
            program: the program.
            keep: whether what is computed of the whole stays in the program as well.
            stacks: parameters that are in parts; without them, what joins data is taken apart.
        """
        self.operations: list[Operation] = []
        self.joins: set[Operation] = set()
        self._keep, self._joined = keep, stacks is None
        self._parts = dict(stacks or {})
        self._whole = set(self._parts)  # values in parts that operations give as well
        self._new: dict[Value, Value] = {}
        self._made_by = program.made_by
        for operation in program.operations:
            self._read(operation)
        self._program = program

    def result(self) -> Program:
        """Return the program with these operations."""
        outputs = {name: self._now(value) for name, value in self._program.outputs.items()}
        self._put_together(outputs.values())
        return replace(self._program, operations=tuple(self.operations), outputs=outputs)

    def _read(self, operation: Operation) -> None:
        """Take the next operation of the program."""
        operands = tuple(map(self._now, operation.operands))
        now = operation if operands == operation.operands else self._with(operation, operands)
        in_parts = any(x in self._parts for x in operands) and self.goes_on(now)
        done = in_parts and (self._by_part(now) or self._of_one_part(now))
        if self._keep:
            self.operations.append(operation)
        if done:
            return
        self._put_together(operands)
        axis = self.joined_axis(now) if self._joined else None
        if axis is not None and not self.are_steps(operation.operands):
            rows = one_after_the_other([x.array.shape[axis] for x in operands])
            self._parts[now.results[0]] = Parts(axis, rows, operands, now, frozenset([now]))
        elif not self._keep:
            self.operations.append(now)

    def _with(self, operation: Operation, operands: tuple[Value, ...]) -> Operation:
        """Return an operation on other operands; its results are of parameters alone if these are."""
        if operation.data and not any(x.data for x in operands):
            trial = _Trial(operands, operation.again)
            made = tuple(_of_parameters(operation, trial, at) for at in range(len(operation.results)))
            self._new.update(zip(operation.results, made, strict=True))
            operation = replace(operation, results=made)
        return replace(operation, operands=operands)

    def goes_on(self, operation: Operation) -> bool:
        """Whether an operation is tried on the parts."""
        return True

    def joined_axis(self, operation: Operation) -> int | None:
        """Return the axis along which an operation joins rows that are taken apart; None if it joins none."""
        return _axis_of_data(operation)

    def is_layer(self, operation: Operation) -> bool:
        """Whether the joins are counted of the rows that an operation is applied to."""
        return bool(parameter_operands(operation)) and role_of(operation) in LAYERS

    def are_steps(self, values: Sequence[Value]) -> bool:
        """Whether one of the first two of some values is computed from the other, as those of a loop; one may be rows of an earlier step."""
        for one, other in (values[:2], values[1::-1]):
            _, first, _ = before_moves(one, self._made_by, MOVES)
            second = self._made_by.get(other)
            if first is None or second is None or first is second:
                continue
            if first in computed_by(second, self._made_by):
                return True
        return False

    def _now(self, value: Value) -> Value:
        """Return the part that a value is, or else the value."""
        return self._new.get(value, value)

    def _put_together(self, values: Iterable[Value]) -> None:
        """Let operations give values that are in parts."""
        for value in () if self._keep else [x for x in values if x in self._parts and x not in self._whole]:
            parts = self._parts[value]
            join = step(parts.made_by, "cat", parts.values, value, lambda *x, of=parts: _whole(x, of.axis, of.rows))
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
            if (found := _axes(operation, [trial.results() for trial in trials], of[0].rows)) is not None:
                break
        else:
            others = (x for x in operation.operands if x not in self._parts)
            if operation.name not in MOVES and any(x.array.ndim for x in others):
                return False
            wholes = [self._alone(operation, k) for k in range(count)]
            found = _axes_of_rows(operation, [trial.results() for trial in wholes], of[0].rows)
            if found is None:
                return False
            trials = [replace(whole, run=_taking(whole.run, found, k)) for k, whole in enumerate(wholes)]
        steps = []
        for k, trial in enumerate(trials):
            made = zip(trial.results(), operation.results, found, strict=True)
            results = tuple(part_of(x, array, _at(axis, rows[k])) for array, x, (axis, rows) in made)
            if operation.data and not any(x.data for x in trial.operands):
                results = tuple(_of_parameters(operation, trial, at) for at in range(len(found)))
            steps.append(replace(operation, operands=trial.operands, results=results, again=trial.run))
            self.operations += (*trial.before, steps[-1])
        if self.is_layer(operation):
            self.joins |= joins
        for k, ((axis, rows), result) in enumerate(zip(found, operation.results, strict=True)):
            self._parts[result] = Parts(axis, rows, tuple(one.results[k] for one in steps), operation, joins)
        return True

    def _of_one_part(self, operation: Operation) -> bool:
        """Whether each result of an operation is of one part alone, as what splits the batch again; it then takes that part."""
        (value, *more) = [x for x in operation.operands if x in self._parts]
        if more or operation.name not in MOVES:
            return False
        trials = [self._alone(operation, k) for k in range(len(self._parts[value].values))]
        results = [trial.results() for trial in trials]
        taken = list[_Trial]()
        for at, result in enumerate(operation.results):
            of = [k for k, made in enumerate(results) if made and are_same(made[at], result.array)]
            if len(of) != 1:
                return False
            trial = trials[of[0]]
            taken.append(replace(trial, run=_only(trial.run, at)))
        for trial, whole in [] if self._keep else zip(taken, operation.results, strict=True):
            one = self._with(replace(operation, results=(whole,), again=trial.run), trial.operands)
            (part,) = (x for x in one.operands if x in self._parts[value].values)
            if part.array.shape == whole.array.shape and np.array_equal(part.array, whole.array):
                self._new[whole] = part
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
            elif cut and axis >= 0 and x.array.shape[axis] == parts.count:
                at = _at(axis, parts.rows[part])
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
    """Whether one of two programs joins rows that layers are then applied to, row by row, and the other joins none of their size, and applies layers to each."""
    for one, other in ((source, target), (target, source)):
        joins = Counter(_size(x.results[0]) for x in other.operations if _axis_of_data(x) is not None)
        alone = {_size(x) for operation in other.operations if role_of(operation) in LAYERS for x in operation.data}
        apart = (join for join in Rewriting(one, keep=True).joins if all(_size(x) in alone for x in join.operands))
        if Counter(_size(join.results[0]) for join in apart) - joins:
            return True
    return False


def batches_apart(program: Program, *, keep: bool) -> Program:
    """Return the program with joined batches taken apart.

    Args:
        keep: whether what is computed of the whole stays in the program as well.
    """
    rewriting = Rewriting(program, keep=keep)
    return rewriting.result() if rewriting.joins else program


def _axis_of_data(operation: Operation) -> int | None:
    """Return the axis of rows along which an operation joins several values of data; None if it joins none."""
    return axis_of_rows(operation) if operation.operands == operation.data else None


def axis_of_rows(operation: Operation) -> int | None:
    """Return the axis along which an operation joins several values; None if it is none, or that of the features."""
    if operation.name not in JOINS or len(operation.operands) < 2:
        return None
    rank = operation.results[0].array.ndim
    axis = int(operation.settings.get(JOINS[operation.name], 0)) % rank
    return axis if axis == 0 or axis < rank - 1 else None


def _size(value: Value) -> int:
    return value.array.size


def _axes(operation: Operation, made: Sequence[list[Array]], rows: Rows) -> list[tuple[int, Rows]] | None:
    """Return the axis along which each result is what the parts give, and the rows of each; None if one is not.

    Args:
        made: the results of the operation on each part.
        rows: of the parts in an operand.
    """
    found: list[tuple[int, Rows]] = []
    for of, result in zip(zip(*made, strict=True), operation.results, strict=True) if all(made) else ():
        shape = result.array.shape
        axes = [k for k, size in enumerate(shape) if all(x.ndim == len(shape) and x.shape[k] < size for x in of)]
        if len(axes) != 1 or any(
            np.delete(x.shape, axes[0]).tolist() != np.delete(shape, axes[0]).tolist() for x in of
        ):
            return None
        sizes = [x.shape[axes[0]] for x in of]
        at = rows if sizes == list(map(len, rows)) else one_after_the_other(sizes)
        if not are_same(_whole(of, axes[0], at), result.array):
            return None
        found.append((axes[0], at))
    return found or None


def _axes_of_rows(operation: Operation, made: Sequence[list[Array]], rows: Rows) -> list[tuple[int, Rows]] | None:
    """Return the axis along which each result has the parts, and the rows of each; None if a part hangs on another.

    Args:
        operation: as it ran.
        made: its results with each part alone.
        rows: of the parts in an operand.
    """
    found: list[tuple[int, Rows]] = []
    for of, result in zip(zip(*made, strict=True), operation.results, strict=True) if all(made) else ():
        for axis in range(result.array.ndim):
            at = _rows_along(axis, of, rows)
            if at and all(are_same(x[_at(axis, k)], result.array[_at(axis, k)]) for x, k in zip(of, at, strict=True)):
                found.append((axis, at))
                break
        else:
            return None
    return found or None


def _rows_along(axis: int, made: Sequence[Array], rows: Rows) -> Rows:
    """Return which rows along an axis each part has: those that are numbers with it alone; none if these are not each row once."""
    size, count = made[0].shape[axis], sum(map(len, rows))
    if made[0].dtype.kind in "fc":
        others = tuple(k for k in range(made[0].ndim) if k != axis)
        found = tuple(np.flatnonzero(~np.isnan(x).any(others)) for x in made)
        each_once = np.array_equal(np.sort(np.concatenate(found)), np.arange(size))
        return found if each_once and all(map(len, found)) else ()
    if any(size * len(of) % count for of in rows) or any((np.diff(of) != 1).any() for of in rows):
        return ()
    return one_after_the_other([size * len(of) // count for of in rows])


def _taking(run: Run, axes: Sequence[tuple[int, Rows]], part: int) -> Run:
    """Return what takes the rows of a part of each result."""

    def again(arrays: Sequence[Array]) -> list[Array]:
        made = zip(run(arrays), axes, strict=True)
        return [np.ascontiguousarray(x[_at(axis, rows[part])]) for x, (axis, rows) in made]

    return again


def _only(run: Run, result: int) -> Run:
    """Return what gives one of the results."""
    return lambda arrays: [run(arrays)[result]]


def one_after_the_other(sizes: Sequence[int]) -> Rows:
    ends = np.cumsum(sizes)
    return tuple(np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True))


def part_of(whole: Value, array: Array, at: tuple[slice | Array, ...]) -> Value:
    """Return a part of a value."""
    return Value(array, whole.data, whole.leaves, tuple(numbers[at] for numbers in whole.elements))


def _of_parameters(operation: Operation, trial: _Trial, result: int) -> Value:
    """Return what an operation makes of a part that is of parameters and constants."""
    value, *others = trial.operands
    leaves = frozenset[str]().union(*(x.leaves for x in trial.operands))
    elements: tuple[Array, ...] = ()
    if operation.name in COPIES and not others:
        copied = [trial.run([numbers.astype(np.float64)])[result] for numbers in value.elements]
        elements = tuple(np.asarray(numbers).astype(np.int64) for numbers in copied)
    return Value(trial.results()[result], leaves=leaves, elements=elements)


def _at(axis: int, rows: Array) -> tuple[slice | Array, ...]:
    """Return the index of some rows along an axis."""
    return (*[slice(None)] * axis, rows)


def _whole(parts: Sequence[Array], axis: int, rows: Rows) -> Array:
    """Return what has all parts in their rows."""
    return np.concatenate(parts, axis).take(np.argsort(np.concatenate(rows)), axis)
