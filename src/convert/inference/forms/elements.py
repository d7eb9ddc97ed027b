"""Which operations move, take and join elements of values, and where the elements are then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.meetings.sites import role_of
from convert.programs.program import REFUSALS, Array, Operation, Program, Value, times_used

LAYOUTS = frozenset(
    [
        *("view", "reshape", "_unsafe_view", "expand", "unsqueeze", "squeeze", "permute", "transpose", "t"),
        *("slice", "select", "repeat", "broadcast_in_dim", "expand_dims"),
    ]
)
SPLITS = frozenset(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unbind"))
MOVES = (
    LAYOUTS
    | SPLITS
    | frozenset(
        [
            *("narrow", "flatten", "unflatten", "clone", "contiguous", "detach", "_to_copy", "index", "index_select"),
            *("convert_element_type", "copy", "dynamic_slice", "gather", "rev", "stop_gradient"),
        ]
    )
)
COPIES = LAYOUTS | frozenset(("clone", "contiguous", "detach", "flatten", "unflatten", "copy", "convert_element_type"))
SAME = 1e-9  # relative: rows that were computed alone, and among others
JOINS = {"cat": "dim", "concatenate": "dimension"}  # -> the setting that names the axis


@dataclass(frozen=True, eq=False)
class ShownAlone:
    """Runs an operation, with zeros in the elements of its results that no output depends on.

    Attributes:
        operation: as it ran.
        hidden: these elements, of each result; None where it has none.
    """

    operation: Operation
    hidden: tuple[Array | None, ...]

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the results."""
        results = self.operation.again(arrays)
        return [x if of is None else np.where(of, 0.0, x) for x, of in zip(results, self.hidden, strict=True)]


def move(operation: Operation, arrays: Sequence[Array]) -> Sequence[Array]:
    """Run an operation on the numbers of elements: those that no output depends on are moved as well."""
    whole = operation.again.operation if isinstance(operation.again, ShownAlone) else operation
    return whole.again(arrays)


def step(
    like: Operation, name: str, operands: tuple[Value, ...], result: Value, run: Callable[..., Array]
) -> Operation:
    """Return an operation at the place of another one."""
    return replace(like, name=name, operands=operands, results=(result,), settings={}, again=lambda x: [run(*x)])


def product_at(like: Operation, data: Value, weight: Value) -> Operation:
    """Return the product of the last axis of data with the first one of a weight, at the place of another operation."""
    result = Value(np.tensordot(data.array, weight.array, 1), data=True, leaves=data.leaves | weight.leaves)
    made = step(like, "dot_general", (data, weight), result, lambda x, y: np.tensordot(x, y, 1))
    return replace(made, settings={"dimension_numbers": (((data.array.ndim - 1,), (0,)), ((), ()))})


def moved_by(operation: Operation, value: Value) -> Value:
    """Return a value of parameters, or a constant, as an operation moves it."""

    def run(array: Array) -> Array:
        return np.asarray(move(operation, [array])[0])

    elements = tuple(run(numbers.astype(np.float64)).astype(np.int64) for numbers in value.elements)
    return Value(run(value.array), leaves=value.leaves, elements=elements)


def as_moved(operation: Operation, value: Value) -> Value:
    """Return a value as an operation moves it, of parameters or of data."""
    if not value.data:
        return moved_by(operation, value)
    return Value(np.asarray(operation.again([value.array])[0]), data=True, leaves=value.leaves)


def with_new(operation: Operation, new: Mapping[Value, Value]) -> Operation:
    """Return an operation with the new values; one that moves a value moves the new one's elements."""
    if new.keys().isdisjoint(operation.operands):
        return operation
    operands = tuple(new.get(x, x) for x in operation.operands)
    moves = operation.name in MOVES and len(operation.operands) == len(operation.results) == 1
    results = (moved_by(operation, operands[0]),) if moves else operation.results
    return replace(operation, operands=operands, results=results)


def without_idle(operations: Sequence[Operation], program: Program) -> list[Operation]:
    """Return the operations of a changed program without those whose results are used no more, and without moves of data that nothing used before."""
    used_before = times_used(program)
    used, kept = {*program.outputs.values()}, list[Operation]()
    for operation in reversed(operations):
        moves_data = operation.name in COPIES and bool(operation.data)
        may_go = moves_data or any(used_before[x] for x in operation.results)
        if not (may_go and used.isdisjoint(operation.results)):
            kept.append(operation)
            used.update(operation.operands)
    return kept[::-1]


def with_instead(program: Program, instead: Callable[[Operation], Sequence[Operation]], *, keep: bool) -> Program:
    """Return a program with others in place of its operations.

    Args:
        instead: operation -> those in its place; none where it stays as it is.
        keep: whether those that others stand for stay in the program as well, in front of them.
    """
    operations: list[Operation] = []
    for operation in program.operations:
        made = instead(operation)
        operations += [operation, *made] if keep or not made else made
    return replace(program, operations=tuple(operations if keep else without_idle(operations, program)))


def moved(operation: Operation, value: Value) -> list[Array] | None:
    """Return which element of a value each element of the results is made of; None where it is made of others, too."""
    size, others = value.array.size, [x for x in operation.operands if x is not value]
    if len(others) + 1 != len(operation.operands) or any(x.data for x in others):
        return None
    if role_of(operation) in (Role.SHIFT, Role.SCALE):
        same = len(others) == 1 and operation.results[0].array.shape == value.array.shape
        return [np.arange(size)] if same else None
    if operation.name not in MOVES or operation.operands[0] is not value or not all(x.constant for x in others):
        return None
    found = elements_moved(operation)
    repeats = found is None or any(len(np.unique(of)) != len(of) for of in found)
    return None if repeats else found


def joined(operation: Operation, value: Value) -> list[Array] | None:
    """Return which element of a value each element is that an operation joins, -1 where it is another's; None where it has the value twice."""
    if operation.operands.count(value) != 1:
        return None
    numbers = [numbered(x) if x is value else np.full(x.array.shape, -1.0) for x in operation.operands]
    return [np.asarray(out).ravel().astype(int) for out in move(operation, numbers)]


def behind_moves(value: Value, users: Mapping[Value, Sequence[Operation]]) -> Iterator[Operation]:
    """Yield the operations that use a value, or some of its elements."""
    todo = [value]
    while todo:
        for user in users.get(todo.pop(), ()):
            if user.name in MOVES:
                todo += user.results
            else:
                yield user


def before_moves(
    value: Value, made_by: Mapping[Value, Operation], names: Collection[str] = COPIES
) -> tuple[Value, Operation | None, tuple[Operation, ...]]:
    """Return the value whose elements operations of these names move to a value, the operation that makes it, and those that move them."""
    moves: list[Operation] = []
    while (made := made_by.get(value)) is not None and made.name in names and len(made.operands) == 1:
        moves.insert(0, made)
        value = made.operands[0]
    return value, made, tuple(moves)


def places_before_moves(value: Value, made_by: Mapping[Value, Operation], most: int) -> tuple[Value, Array]:
    """Return the value that moves make a value of, at most so many, and for each element of that, in order, which of its elements it is."""
    places = np.arange(value.array.size)
    for _ in range(most):
        made = made_by.get(value)
        found = moved(made, made.operands[0]) if made is not None and made.name in MOVES and made.operands else None
        if made is None or found is None:
            break
        places, value = found[made.results.index(value)][places], made.operands[0]
    return value, places


def before_zeros(value: Value, whole: Iterable[Value]) -> Value | None:
    """Return the first of these values that has the elements of a value in which some are zeros; None where it has no zeros, or none has them."""
    if len(value.elements) != 1:
        return None
    (numbers,) = value.elements
    zeroed = numbers < 0
    if not zeroed.any() or zeroed.all() or value.array[zeroed].any():
        return None
    same_shape = (x for x in whole if x.array.shape == value.array.shape)
    of_same = (x for x in same_shape if np.array_equal(x.elements[0][~zeroed], numbers[~zeroed]))
    return next((x for x in of_same if np.array_equal(x.array[~zeroed], value.array[~zeroed])), None)  # not scaled


def spread_like(operation: Operation) -> Operation:
    """Return the operation that repeats an operand to the shape of an operation's result."""
    shape = operation.results[0].array.shape
    return replace(operation, name="expand", settings={}, again=lambda x: [np.array(np.broadcast_to(x[0], shape))])


def elements_moved(operation: Operation) -> list[Array] | None:
    """Return which element of the first operand each element of the results is, flattened; None where it is none."""
    value, others = operation.operands[0], operation.operands[1:]
    numbers = numbered(value)
    try:
        made = [np.asarray(out).ravel() for out in move(operation, [numbers, *(x.array for x in others)])]
    except REFUSALS:
        return None
    return [of.astype(int) for of in made] if all(np.isin(of, numbers).all() for of in made) else None


def elements_looked_up(lookup: Operation, moves: Sequence[Operation]) -> Array | None:
    """Return which element of its table each element is that a lookup takes and operations then move; None where it is none."""
    table, *indices = lookup.operands
    numbers = numbered(table)
    try:
        at = in_turn(moves, np.asarray(lookup.again([numbers, *(x.array for x in indices)])[0]))
    except REFUSALS:
        return None
    return at.astype(int) if np.isin(at, numbers).all() else None


def in_turn(moves: Sequence[Operation], array: Array) -> Array:
    """Return what operations make of an array, one after the other."""
    for move in moves:
        array = np.asarray(move.again([array])[0])
    return array


def numbered(value: Value) -> Array:
    """Return the number of each element of a value, as floats, which every operation moves."""
    return np.arange(value.array.size, dtype=np.float64).reshape(value.array.shape)


def taken(value: Value, places: Array) -> Value:
    """Return some elements of a value."""
    elements = tuple(take(numbers, places) for numbers in value.elements)
    return Value(take(value.array, places), value.data, value.leaves, elements)


def take(array: Array, places: Array) -> Array:
    """Return the elements of an array at places in C order, in the shape of the places."""
    found: Array = array.ravel()[places]
    return found


def are_same(array: Array, other: Array) -> bool:
    """Whether two arrays are equal but for rounding, as rows that were computed alone, and among others."""
    sizes = np.abs(other) if other.dtype.kind in "fc" else np.zeros(1)
    scale = sizes.max(initial=0, where=np.isfinite(sizes))  # an infinite one would make all numbers the same
    return array.shape == other.shape and bool(np.allclose(array, other, rtol=0, atol=SAME * scale))
