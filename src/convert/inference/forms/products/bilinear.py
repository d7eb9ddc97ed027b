"""Kernels that meet two values: ``(x W) y`` is ``W`` of all pairs of elements of `x` and `y`.

The outer product mean of AlphaFold, or a bilinear layer: one program applies the kernel to one value, and multiplies the result by the
other; the other program multiplies both values element by element, and has a layer behind that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.forms.elements import product_at
from convert.inference.forms.products.joined import OfOne
from convert.inference.meetings.sites import axes_of
from convert.programs.program import Array, Operation, Program, Value

MOST = 1_000_000  # numbers that two values give element by element


@dataclass(frozen=True, eq=False)
class _Applied:
    """A kernel that is applied to a value.

    Attributes:
        data, weight: the two. The axes of the data are named by their numbers.
        of_weight: for each axis of the weight, its name; one of the data's is one that the product sums over.
        axes: of what the product gives, in any layout, the names.
    """

    data: Value
    weight: Value
    of_weight: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def of_data(self) -> tuple[int, ...]:
        """The names of the data's axes."""
        return tuple(range(self.data.array.ndim))


@dataclass(frozen=True, eq=False)
class _Pairs:
    """What two values give element by element, added up along some of their axes.

    Attributes:
        values: the two.
        of_values: for each of the axes of either, its name; an axis of both has one.
        axes: of what they give, in any layout, the names; several where axes are joined.
    """

    values: tuple[Value, Value]
    of_values: tuple[tuple[int, ...], tuple[int, ...]]
    axes: tuple[tuple[int, ...], ...]

    def size(self, name: int) -> int:
        """Return the size of an axis."""
        value, names = next((x, names) for x, names in zip(self.values, self.of_values, strict=True) if name in names)
        return int(value.array.shape[names.index(name)])


def of_two_values(program: Program) -> Iterator[OfOne]:
    """Yield the products of a kernel with both of two values, where the program applies it to one of them first, and the reverse."""
    made_by = program.made_by
    for index, operation in enumerate(program.operations):
        found: list[Operation | None] = []
        if operation.name == "dot_general" and len(operation.data) == 2:
            for side in range(2):
                applied = _applied(operation.operands[side], made_by)
                found.append(None if applied is None else _of_both(operation, side, applied))
        elif operation.name == "dot_general" and len(operation.data) == 1:
            found += _of_one_each(operation, made_by)
        for product in found:
            if product is not None:
                yield OfOne(index, product, 1, None, product.results[0].array)


def _applied(value: Value, made_by: Mapping[Value, Operation]) -> _Applied | None:
    """Return the kernel and the value of which a product gives a value, in any order of its axes; None if none does."""
    order: Sequence[int] = range(value.array.ndim)
    made = made_by.get(value)
    while made is not None and made.name == "transpose":
        order = [made.settings["permutation"][k] for k in order]
        made = made_by.get(made.operands[0])
    if made is None or made.name != "dot_general" or len(made.data) != 1:
        return None
    side = 0 if made.operands[1].data else 1
    data, weight = made.operands[1 - side], made.operands[side]
    axes = axes_of(made, side)
    if axes is None or axes[1][0] or not weight.of_parameters or len(weight.elements) != 1:
        return None
    (_, summed), (_, of_kernel) = axes
    rest = iter(range(data.array.ndim, data.array.ndim + weight.array.ndim))
    of_weight = tuple(summed[of_kernel.index(k)] if k in of_kernel else next(rest) for k in range(weight.array.ndim))
    free = [k for k in range(data.array.ndim) if k not in summed], [x for x in of_weight if x not in summed]
    given = [*free[0], *free[1]] if side else [*free[1], *free[0]]
    return _Applied(data, weight, of_weight, tuple(given[k] for k in order))


def _of_both(product: Operation, side: int, applied: _Applied) -> Operation | None:
    """Return the product of the kernel with both values; None if the second product sums over no axis of the kernel."""
    axes = axes_of(product, side)
    assert axes is not None, "it is a `dot_general`"
    (other_batch, other_summed), (batch, summed) = axes
    other = product.operands[1 - side]
    names = dict(zip((*other_batch, *other_summed), (applied.axes[k] for k in (*batch, *summed)), strict=True))
    further = max((*applied.of_data, *applied.of_weight)) + 1
    of_other = [names.get(k, further + k) for k in range(other.array.ndim)]
    first = [x for x in applied.of_weight if x in applied.of_data]
    second = [applied.axes[k] for k in summed if applied.axes[k] in applied.of_weight]
    columns = [x for x in applied.of_weight if x not in (*first, *second)]
    gone = {applied.axes[k] for k in summed}  # of both values
    if not second or any(applied.axes[k] in applied.of_weight for k in batch):
        return None
    rows = [x for x in dict.fromkeys((*applied.of_data, *of_other)) if x not in gone and x not in first]
    sizes = dict(zip((*applied.of_data, *of_other), (*applied.data.array.shape, *other.array.shape), strict=True))
    if np.prod([sizes[x] for x in (*rows, *first, *second)]) > MOST:
        return None
    width = int(np.prod([sizes[x] for x in (*first, *second)]))
    pairs = np.einsum(applied.data.array, applied.of_data, other.array, of_other, [*rows, *first, *second])
    both = Value(pairs.reshape(-1, width), data=True, leaves=applied.data.leaves | other.leaves)
    order = [applied.of_weight.index(x) for x in (*first, *second, *columns)]

    def laid_out(array: Array) -> Array:
        return array.transpose(order).reshape(width, -1)

    weight = applied.weight
    kernel = Value(laid_out(weight.array), leaves=weight.leaves, elements=(laid_out(weight.elements[0]),))
    return product_at(product, both, kernel)


def _of_one_each(product: Operation, made_by: Mapping[Value, Operation]) -> Iterator[Operation]:
    """Yield the products of a kernel with either of the two values of whose pairs of elements the program takes its product."""
    side = 0 if product.operands[1].data else 1
    data, weight = product.operands[1 - side], product.operands[side]
    axes, pairs = axes_of(product, side), _pairs(data, made_by)
    if axes is None or axes[0][0] or pairs is None or not weight.of_parameters or len(weight.elements) != 1:
        return
    (_, summed), (_, of_kernel) = axes
    names = [x for k in summed for x in pairs.axes[k]]
    one, two = (
        [x for x in names if x in of and x not in other] for of, other in (pairs.of_values, pairs.of_values[::-1])
    )
    if not one or not two or len(one) + len(two) < len(names):
        return
    rest = [k for k in range(weight.array.ndim) if k not in of_kernel]
    sizes = [*map(pairs.size, names), *(weight.array.shape[k] for k in rest)]
    for value, of_value, first in zip(pairs.values, pairs.of_values, (one, two), strict=True):
        order = [
            *map(names.index, first),
            *(k for k in range(len(sizes)) if k >= len(names) or names[k] not in first),
        ]
        width = int(np.prod([pairs.size(x) for x in first]))

        def laid_out(array: Array, order: Sequence[int] = order, width: int = width) -> Array:
            return array.transpose(*of_kernel, *rest).reshape(sizes).transpose(order).reshape(width, -1)

        rows = value.array.transpose(
            *(k for k, x in enumerate(of_value) if x not in first), *map(of_value.index, first)
        )
        kernel = Value(laid_out(weight.array), leaves=weight.leaves, elements=(laid_out(weight.elements[0]),))
        yield product_at(product, Value(rows.reshape(-1, width), data=True, leaves=value.leaves), kernel)


def _pairs(value: Value, made_by: Mapping[Value, Operation]) -> _Pairs | None:
    """Return the two values of which a product gives a value, in any order of its axes, some of which may be joined; None if none does."""
    made = made_by.get(value)
    if made is None:
        return None
    if made.name == "dot_general" and len(made.data) == 2:
        (left, right), (left_batch, right_batch) = made.settings["dimension_numbers"]
        one, two = made.operands
        names = dict(zip((*right, *right_batch), (*left, *left_batch), strict=True))
        of_two = tuple(names.get(k, one.array.ndim + k) for k in range(two.array.ndim))
        free = [k for k in range(one.array.ndim) if k not in (*left, *left_batch)]
        given = [*left_batch, *free, *(x for x in of_two if x >= one.array.ndim)]
        return _Pairs((one, two), (tuple(range(one.array.ndim)), of_two), tuple((x,) for x in given))
    if made.name not in ("transpose", "reshape"):
        return None
    before = _pairs(made.operands[0], made_by)
    if before is None:
        return None
    if made.name == "transpose":
        return replace(before, axes=tuple(before.axes[k] for k in made.settings["permutation"]))
    axes, todo = list[tuple[int, ...]](), list(before.axes)
    for size in value.array.shape:
        joined: tuple[int, ...] = ()
        while todo and int(np.prod([before.size(x) for x in joined])) < size:
            joined += todo.pop(0)
        if int(np.prod([before.size(x) for x in joined])) != size:
            return None  # it splits an axis
        axes.append(joined)
    return None if todo else replace(before, axes=tuple(axes))
