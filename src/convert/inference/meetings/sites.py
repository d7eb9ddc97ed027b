"""Where data meets parameters: the operations of a program in which a value of parameters takes part, in one form for both sides."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from convert.inference.derivation import Role, Site
from convert.inference.meetings.columns import Columns, columns_of, columns_of_rows
from convert.inference.meetings.patches import patches_of
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]

OUTPUT = "output"  # a product of an output of parameters alone with data
VISIBLE_SUM = "visible_sum"  # of data and a parameter, as far as a softmax does not hide it
ROLES: Mapping[str, Role] = {
    **dict.fromkeys(("dot_general", "mm", "bmm", "mv", "matmul", "linear"), Role.PRODUCT),
    **dict.fromkeys(("conv_general_dilated", "convolution"), Role.CONVOLUTION),
    **dict.fromkeys(("add", "add_any", "sub", "rsub", VISIBLE_SUM), Role.SHIFT),
    **dict.fromkeys(("mul", "div", OUTPUT), Role.SCALE),
    **dict.fromkeys(("gather", "embedding", "index", "index_select"), Role.LOOKUP),
}


def role_of(operation: Operation) -> Role:
    """Return what a parameter does in an operation."""
    return ROLES.get(operation.name.removesuffix("_"), Role.OTHER)


def parameter_operands(operation: Operation) -> list[int]:
    """Return the positions of the operands that are computed from parameters alone, if data meets them."""
    if not any(operand.data for operand in operation.operands):
        return []
    return [k for k, operand in enumerate(operation.operands) if operand.of_parameters]


@dataclass(frozen=True, eq=False)
class Meeting:
    """An operation in which data meets a value of parameters; several, if the same value is used again (a loop over time).

    Attributes:
        index: of the (first) operation in the program.
        operations: all of them.
        side: position of the value of parameters among the operands.
        role: what it does.
        instead: the data that it meets in another order of the terms of a sum or product (`reordered`).
    """

    index: int
    operations: tuple[Operation, ...]
    side: int
    role: Role
    instead: Array | None = None
    _columns: dict[int, Columns] = field(default_factory=dict, repr=False)

    @property
    def operation(self) -> Operation:
        """The (first) operation."""
        return self.operations[0]

    @property
    def weight(self) -> Value:
        """The value of parameters."""
        return self.operation.operands[self.side]

    @property
    def data(self) -> list[Array]:
        """The data that it meets, of each operation."""
        if self.instead is not None:
            return [self.instead]
        return [operation.data[0].array for operation in self.operations]

    @cached_property
    def names(self) -> Array:
        """What its elements are called: by their number in the leaf; those of a value of several leaves by their place in it."""
        several = len(self.weight.elements) != 1
        return (
            np.arange(self.weight.array.size).reshape(self.weight.array.shape) if several else self.weight.elements[0]
        )

    def columns(self, numbers: Array) -> Columns:
        """Return the columns of the data that the elements `numbers` of the parameters meet."""
        if id(numbers) not in self._columns:
            self._columns[id(numbers)] = columns_met(self.data, numbers)
        return self._columns[id(numbers)]

    def site(self, program: str) -> Site:
        """Return the site for the result."""
        return site_of(program, self.index, self.operation, self.side)


def site_of(program: str, index: int, operation: Operation, operand: int | None = None) -> Site:
    """Return where an operation is, for the result."""
    settings = {key: plain(value) for key, value in operation.settings.items()}
    return Site(program, index, operation.name, operation.where, operation.module, settings, operand)


def plain(value: Any) -> Any:
    """Return a setting as a JSON value."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return [plain(item) for item in value]
    return str(value)


def columns_met(data: Sequence[Array], numbers: Array) -> Columns:
    """Return the columns of the data that each element of a parameter meets; without those that meet a constant."""
    shape = np.broadcast_shapes(data[0].shape, numbers.shape)
    found = columns_of(np.stack([np.broadcast_to(x, shape) for x in data]), numbers)
    if not len(found.numbers) or found.numbers[0] != -1:
        return found
    return Columns(found.numbers[1:], found.sums[:, 1:], found.scales[:, 1:])


def meetings(program: Program) -> list[Meeting]:
    """Return the meetings of a program in order; those of one value of parameters are joined in a further one."""
    found = [
        Meeting(index, (operation,), side, role_of(operation))
        for index, operation in enumerate(program.operations)
        for side in parameter_operands(operation)
    ]
    return [*found, *of_one_weight(found)]


def of_one_weight(found: Sequence[Meeting]) -> Iterator[Meeting]:
    """Yield a meeting for all those of one value of parameters: a weight that a loop over time uses at each step."""
    groups: dict[Any, list[Meeting]] = {}
    for meeting in found:
        groups.setdefault(_same_weight(meeting), []).append(meeting)
    for group in groups.values():
        if len(group) > 1:
            first = group[0]
            yield Meeting(first.index, tuple(m.operation for m in group), first.side, first.role)


def _same_weight(meeting: Meeting) -> Any:
    operation, weight = meeting.operation, meeting.weight
    digest = hashlib.blake2b(digest_size=16)
    for numbers in weight.elements:
        digest.update(numbers.tobytes())
    elements = digest.digest() if weight.elements else id(weight)
    return operation.name, operation.where, meeting.side, operation.data[0].array.shape, weight.array.shape, elements


@dataclass(frozen=True, eq=False)
class Product:
    """A product of data with a matrix, in one form: rows [R, I] times weight [I, ...].

    Attributes:
        rows: the data; several, if the same weight is used again.
        value: the weight, [I, ...]; its further axes are those that the product does not sum over, in the operand's order.
        numbers: the numbers of the elements it comes from, one array like `value` for each factor.
        places: positions in the operand, like `value`.
    """

    rows: tuple[Array, ...]
    value: Array
    numbers: tuple[Array, ...]
    places: Array
    _columns: list[Columns] = field(default_factory=list, repr=False)

    @property
    def columns(self) -> Columns:
        """The columns of the rows."""
        if not self._columns:
            self._columns.append(columns_of_rows(self.rows))
        return self._columns[0]


def products(operations: Sequence[Operation], side: int, weight: Array | None = None) -> Iterator[Product]:
    """Yield the products of an operation, one for each group of its weight (experts); [I, ...] of each.

    Args:
        weight: the weight's value, if the operand has not got it.
    """
    operand = operations[0].operands[side]
    value = operand.array if weight is None else weight
    stack = [value, np.arange(value.size).reshape(value.shape), *operand.elements]
    data = [operation.data[0].array for operation in operations]
    patches = patches_of(operations[0], side)
    if patches is not None:
        value, places, *numbers = (patches.matrix(a) for a in stack)
        yield Product(tuple(patches.rows(x, operand.array.shape) for x in data), value, tuple(numbers), places)
        return
    axes = axes_of(operations[0], side)
    if axes is None:
        return
    (x_batch, x_sum), (w_batch, w_sum) = axes
    free = [axis for axis in range(value.ndim) if axis not in (*w_batch, *w_sum)]
    size = int(np.prod([value.shape[axis] for axis in w_sum]))
    stack = [a.transpose(*w_batch, *w_sum, *free) for a in stack]
    stack = [a.reshape(-1, size, *[value.shape[axis] for axis in free]) for a in stack]
    rows = []
    for x in data:
        rest = [axis for axis in range(x.ndim) if axis not in (*x_batch, *x_sum)]
        rows.append(x.transpose(*x_batch, *rest, *x_sum).reshape(len(stack[0]), -1, size))
    if len(stack) > 2 and all((a == a[:1]).all() for a in stack[2:]):  # one matrix for all groups
        rows, stack = [x.reshape(1, -1, size) for x in rows], [a[:1] for a in stack]
    elif (
        len(stack) == 3 and len(stack[0]) > 1
    ):  # one for several of them, as the bias of a head for all rows of a batch
        each = stack[2].reshape(len(stack[2]), -1)
        _, first, of = np.unique(each, axis=0, return_index=True, return_inverse=True)
        if len(first) < len(each) and len(set(np.bincount(of.ravel()))) == 1:
            order = np.argsort(of.ravel(), kind="stable")
            rows = [x[order].reshape(len(first), -1, size) for x in rows]
            stack = [a[first] for a in stack]
    for group in range(len(stack[0])):
        yield Product(
            tuple(x[group] for x in rows), stack[0][group], tuple(a[group] for a in stack[2:]), stack[1][group]
        )


def free_axes(operation: Operation, side: int) -> tuple[list[int], list[int]] | None:
    """Return the axes of the data and of the weight that a product does not sum over; None for a product with batch axes."""
    axes = axes_of(operation, side)
    if axes is None or axes[1][0]:
        return None
    operands = operation.operands[1 - side], operation.operands[side]
    data, weight = (
        [k for k in range(x.array.ndim) if k not in summed] for x, (_, summed) in zip(operands, axes, strict=True)
    )
    return data, weight


def axes_of(operation: Operation, side: int) -> tuple[tuple[Sequence[int], Sequence[int]], ...] | None:
    """Return (batch axes, summed axes) of the data and of the weight."""
    name, ranks = operation.name, [operand.array.ndim for operand in operation.operands]
    if name == "dot_general":
        (left, right), (left_batch, right_batch) = operation.settings["dimension_numbers"]
        sides = (left_batch, left), (right_batch, right)
        return sides[1 - side], sides[side]
    if name == "linear":
        return ((), (ranks[0] - 1,)), ((), (1,))
    if name in ("mm", "bmm", "mv", "matmul") and len(ranks) == 2 and min(ranks) > 0:
        batch = tuple(range(max(min(ranks) - 2, 0)))
        if ranks[0] != ranks[1] and batch:
            return None
        summed = (ranks[0] - 1,), (max(ranks[1] - 2, 0),)
        return (batch, summed[1 - side]), (batch, summed[side])
    return None
