"""Products of values that stand side by side, one for each: ``[x, y] W`` is ``x V + y U``, where V and U are the rows of W. Convolutions
of channels in the same way.

The source's record has the product of all; those of the single values are computed here, and what biases meet in the sum of some. Or it has
the sum, and the product of all is computed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import moved, product_at
from convert.inference.forms.sums.reordered import SUMS, terms
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.program import Array, Operation, Program, Value, times_used

SAME_ELEMENTS = ("reshape", "convert_element_type", "copy", "stop_gradient")
LAYOUTS = (*SAME_ELEMENTS, "transpose")
MAX_VALUES = 6  # side by side
MAX_SUM = 64  # products in a sum
MAX_DEPTH = 4  # layouts between the values and the product


@dataclass(frozen=True, eq=False)
class OfOne:
    """A product of one of several values, or a bias that is added to the products of some.

    Attributes:
        index: of the source's operation.
        operation: the product with a part of its operands; the sum as it is.
        side: position of the parameter.
        data: what the bias meets; None for a product.
        result: what the operation gives.
    """

    index: int
    operation: Operation
    side: int
    data: Array | None
    result: Array


def of_each_value(program: Program) -> Iterator[OfOne]:
    """Yield the products of each value that a product takes side by side with others, and of some of them, and the biases of their sums."""
    made_by = program.made_by
    places = {operation: index for index, operation in enumerate(program.operations)}
    operations: list[Operation] = []
    terms_of: dict[Value, list[Value]] = {}  # of what a product of all gives, also in another layout
    for index, operation in enumerate(program.operations):
        side = 0 if operation.operands and not operation.operands[0].data else 1
        blocks = _blocks(operation, side, made_by)
        parts = _products(operation, side, blocks)
        for part in parts:
            yield OfOne(index, part, side, None, part.results[0].array)
            distinct = part if role_of(operation) is Role.CONVOLUTION else _of_distinct_rows(side, part)
            if distinct is not part:
                yield OfOne(index, distinct, side, None, distinct.results[0].array)
        for several in _products_of_several(operation, side, blocks) if role_of(operation) is Role.PRODUCT else ():
            yield OfOne(index, several, side, None, several.results[0].array)
        if not parts and operation.name in LAYOUTS and operation.data and operation.operands[0] in terms_of:
            parts = [_of_term(operation, term) for term in terms_of[operation.operands[0]]]
        if len(parts) > 1:
            terms_of[operation.results[0]] = [part.results[0] for part in parts]
        operations += [*parts, *_added(operation, parts)] if parts else [operation]
    if len(operations) > len(program.operations):
        for term in terms(replace(program, operations=tuple(operations))):
            yield OfOne(places[term.operation], term.operation, term.side, term.data, term.result)


def _of_term(layout: Operation, term: Value) -> Operation:
    """Return the operation that lays out a term of a sum as another one lays out the sum."""
    made = Value(np.asarray(layout.again([term.array])[0]), data=True, leaves=term.leaves)
    return replace(layout, operands=(term,), results=(made,))


def _products(operation: Operation, side: int, blocks: Sequence[slice]) -> list[Operation]:
    """Return the product of each value, with the rows of the weight that it meets."""
    if len(blocks) == 1:  # the others are zeros
        return [_product(operation, side, blocks[0], operation.results[0])]
    return [_product(operation, side, block) for block in blocks]


def _products_of_several(operation: Operation, side: int, blocks: Sequence[slice]) -> Iterator[Operation]:
    """Yield the products of values that follow one another: the other program joins them first, and may multiply them apart from the rest."""
    for count in range(2, len(blocks)):
        for run in (blocks[k : k + count] for k in range(len(blocks) - count + 1)):
            if all(one.stop == two.start for one, two in itertools.pairwise(run)):
                yield _product(operation, side, slice(run[0].start, run[-1].stop))


def _blocks(operation: Operation, side: int, made_by: Mapping[Value, Operation]) -> list[slice]:
    """Return where the values are that stand side by side along the axis that a product sums over; none if it is one."""
    axes = _summed_axes(operation, side) if len(operation.data) == 1 and len(operation.operands) == 2 else None
    if axes is None or not operation.operands[side].of_parameters or not operation.operands[side].elements:
        return []
    data = operation.operands[1 - side]
    ends = np.cumsum(_widths(data, axes[0], made_by))
    blocks = [slice(start, end) for start, end in itertools.pairwise([0, *map(int, ends)])]
    # A state that a recurrent layer starts from is zero.
    return [x for x in blocks if _cut(data.array, axes[0], x).any()]


def _product(operation: Operation, side: int, block: slice, result: Value | None = None) -> Operation:
    """Return the product of some columns of the data with the rows of the weight that they meet; `result` is what it gives, if known."""
    axes = _summed_axes(operation, side)
    assert axes is not None, "`_blocks` has asked for them"
    data, weight = operation.operands[1 - side], operation.operands[side]
    one = Value(_cut(data.array, axes[0], block), data=True, leaves=data.leaves)
    elements = tuple(_cut(n, axes[1], block) for n in weight.elements)
    part = Value(_cut(weight.array, axes[1], block), leaves=weight.leaves, elements=elements)
    operands = (one, part) if side else (part, one)
    if result is None:
        with np.errstate(all="ignore"):
            made = np.asarray(operation.again([operand.array for operand in operands])[0])
        result = Value(made, data=True, leaves=operation.results[0].leaves)
    return replace(operation, operands=operands, results=(result,))


def _summed_axes(operation: Operation, side: int) -> tuple[int, int] | None:
    """Return the axis of the data and that of the weight over which an operation sums: one each, of a convolution the channels."""
    if operation.name == "conv_general_dilated":
        said = operation.settings
        alone = side == 1 and said["feature_group_count"] == said["batch_group_count"] == 1
        return (said["dimension_numbers"].lhs_spec[1], said["dimension_numbers"].rhs_spec[1]) if alone else None
    axes = axes_of(operation, side) if role_of(operation) is Role.PRODUCT else None
    if axes is None or len(axes[0][1]) != 1:
        return None
    (_, (axis,)), (_, (summed,)) = axes
    return axis, summed


def _of_distinct_rows(side: int, product: Operation) -> Operation:
    """Return a product with each row of its data once, if all rows are repeated: the nodes of all pairs of nodes."""
    axes = axes_of(product, side)
    assert axes is not None, "`_products` has asked for them"
    (batch, (axis,)), (_, (summed,)) = axes
    if batch:  # of matrices of their own
        return product
    data, weight = product.operands[1 - side], product.operands[side]
    rows = np.moveaxis(data.array, axis, -1).reshape(-1, data.array.shape[axis])
    _, first, counts = np.unique(rows, axis=0, return_index=True, return_counts=True)
    if not len(counts) or counts[0] < 2 or np.ptp(counts):
        return product
    one = Value(rows[np.sort(first)], data=True, leaves=data.leaves)

    def again(arrays: Sequence[Array]) -> list[Array]:
        return [np.tensordot(arrays[1 - side], arrays[side], (1, summed))]

    made = Value(again([one.array, weight.array] if side else [weight.array, one.array])[0], True, data.leaves)
    numbers = ((1,), (summed,)) if side else ((summed,), (1,))
    operands = (one, weight) if side else (weight, one)
    settings = {"dimension_numbers": (numbers, ((), ()))}
    return replace(product, name="dot_general", operands=operands, results=(made,), settings=settings, again=again)


def _cut(array: Array, axis: int, block: slice) -> Array:
    return np.take(array, np.arange(block.start, block.stop), axis)


def _widths(value: Value, axis: int, made_by: Mapping[Value, Operation]) -> list[int]:
    """Return the widths of the values of data that stand side by side along an axis; none if it is one."""
    last, size = axis == value.array.ndim - 1, value.array.shape[axis]
    for _ in range(MAX_DEPTH):
        made = made_by.get(value)
        if made is None or not made.operands:
            return []
        if made.name == "concatenate":
            alone = made.settings.get("dimension") == axis and all(x.data or not x.array.any() for x in made.operands)
            return [x.array.shape[axis] for x in made.operands] if alone and len(made.operands) <= MAX_VALUES else []
        (value, *others), before = made.operands, value
        same = made.name in SAME_ELEMENTS and not others and value.array.ndim > 0
        if not same or (value.array.shape != before.array.shape and not (last and value.array.shape[-1] == size)):
            return []
        axis = value.array.ndim - 1 if last else axis
    return []


def _added(operation: Operation, products: Sequence[Operation]) -> Iterator[Operation]:
    """Yield the sums that make the product of them all of those of each value."""
    (total, *rest), (result,) = [product.results[0] for product in products], operation.results
    for number, value in enumerate(rest, 1):
        made = result if number == len(rest) else Value(total.array + value.array, data=True, leaves=result.leaves)
        yield Operation("add", (total, value), (made,), {}, lambda x: [reduce(np.add, x)], operation.where)
        total = made


def of_all_values(program: Program) -> Iterator[OfOne]:
    """Yield the product of values side by side, for each sum of their products: heads that are added up after a projection each.

    Where the products have one matrix, also the product of the sum of their values: ``x W + p W`` is ``(x + p) W``.
    """
    uses = times_used(program)
    made_by = program.made_by
    places = {operation: index for index, operation in enumerate(program.operations)}
    inner = {
        x for operation in program.operations if operation.name in SUMS for x in operation.operands if uses[x] == 1
    }
    for operation in program.operations:
        if operation.name not in SUMS or not operation.results[0].data or operation.results[0] in inner:
            continue
        values = list(summands(operation.results[0], made_by, uses))
        every = summands(operation.results[0], made_by, uses, shared=True)  # one that its bias meets apart, too
        kernels = [made for made in map(made_by.__getitem__, every) if _summed_axes(made, 1) and _is_kernel(made)]
        if 1 < len(kernels) <= MAX_VALUES and len(set(map(_form, kernels))) == 1:
            yield _convolution_of_all(kernels, places[kernels[0]])
        behind = [product_of(value, made_by) for value in values]
        products = [one for one in behind if one is not None]
        shapes = {(data.array.shape[:-1], weight.array.shape[1:]) for _, data, weight in products}
        if 1 < len(products) <= MAX_SUM and len(shapes) == 1:
            yield _product_of_all(products, places[products[0][0]])
        of_one_weight: dict[bytes, list[tuple[Operation, Value, Value]]] = {}
        for product in products[:MAX_SUM]:
            of_one_weight.setdefault(product[2].elements[0].tobytes(), []).append(product)
        for same in of_one_weight.values():
            if 1 < len(same) <= MAX_VALUES:
                yield _product_of_sum(same, places[same[0][0]])


def summands(
    value: Value, made_by: Mapping[Value, Operation], uses: Counter[Value], first: bool = True, *, shared: bool = False
) -> Iterator[Value]:
    """Yield the terms of a sum.

    Args:
        first: whether the value is the sum itself, which others may use.
        shared: whether terms that others use are among them.
    """
    made = made_by.get(value)
    if made is None or (uses[value] > 1 and not first and (made.name in SUMS or not shared)):
        return
    if made.name in SUMS:
        for operand in made.operands:
            yield from summands(operand, made_by, uses, False, shared=shared)
    else:
        yield value


def product_of(value: Value, made_by: Mapping[Value, Operation]) -> tuple[Operation, Value, Value] | None:
    """Return the operation, data and weight of a product; of some columns of one, such as a gate's, with or without biases, those of the weight."""
    made = made_by[value]
    whole = _last_axes(made)
    if whole is not None or not made.operands or made.operands[0] not in made_by:
        return whole
    result = made.operands[0]
    found, places = _last_axes(_without_biases(made_by[result], made_by)), moved(made, result)
    if found is None or places is None or found[2].array.ndim != 2:
        return None
    rank = result.array.ndim
    if value.array.shape[-rank:-1] != result.array.shape[:-1] or any(n > 1 for n in value.array.shape[:-rank]):
        return None
    rows = places[made.results.index(value)].reshape(-1, value.array.shape[-1])
    columns = rows[0]
    if (rows != result.array.shape[-1] * np.arange(len(rows))[:, None] + columns).any():  # it moves rows, too
        return None
    operation, data, weight = found
    part = Value(
        weight.array[:, columns],
        leaves=weight.leaves,
        elements=tuple(numbers[:, columns] for numbers in weight.elements),
    )
    return operation, data, part


def _without_biases(operation: Operation, made_by: Mapping[Value, Operation]) -> Operation:
    """Return the operation that gives what biases are added to, in the same shape."""
    while operation.name in SUMS and len(operation.data) == 1 and any(x.of_parameters for x in operation.operands):
        before = made_by.get(operation.data[0])
        if before is None or operation.data[0].array.shape != operation.results[0].array.shape:
            break
        operation = before
    return operation


def _last_axes(operation: Operation) -> tuple[Operation, Value, Value] | None:
    """Return data and weight of a product of the data's last axis and the weight's first one; None if it is another one."""
    side = 0 if operation.operands and not operation.operands[0].data else 1
    axes = axes_of(operation, side) if role_of(operation) is Role.PRODUCT and len(operation.data) == 1 else None
    if axes is None or len(operation.operands) != 2 or axes[0][0]:
        return None
    data, weight = operation.operands[1 - side], operation.operands[side]
    plain = side == 1 and tuple(axes[0][1]) == (data.array.ndim - 1,) and tuple(axes[1][1]) == (0,)
    return (operation, data, weight) if plain and weight.of_parameters and len(weight.elements) == 1 else None


def _product_of_all(products: Sequence[tuple[Operation, Value, Value]], index: int) -> OfOne:
    like = products[0][0]
    x = Value(np.concatenate([data.array for _, data, _ in products], -1), data=True)
    arrays, elements = (
        np.concatenate([weight.array for _, _, weight in products]),
        np.concatenate([weight.elements[0] for _, _, weight in products]),
    )
    leaves = frozenset().union(*(weight.leaves for _, _, weight in products))
    every = Value(arrays, leaves=leaves, elements=(elements,))
    made = product_at(like, x, every)
    return OfOne(index, made, 1, None, made.results[0].array)


def _is_kernel(operation: Operation) -> bool:
    """Whether an operation convolves data with a kernel of parameters."""
    data, kernel = operation.operands[:2]
    return role_of(operation) is Role.CONVOLUTION and data.data and kernel.of_parameters and len(kernel.elements) == 1


def _form(convolution: Operation) -> Any:
    """Return what convolutions that are one of all their channels have in common."""
    said = convolution.settings
    numbers, strides = said["dimension_numbers"], said["window_strides"]
    taps = tuple(convolution.operands[1].array.shape[axis] for axis in numbers.rhs_spec[2:])
    steps = (*strides, *said["lhs_dilation"], *said["rhs_dilation"])
    return str(numbers), steps, str(said["padding"]), taps, convolution.results[0].array.shape


def _convolution_of_all(convolutions: Sequence[Operation], index: int) -> OfOne:
    like = convolutions[0]
    numbers = like.settings["dimension_numbers"]
    data, kernels = zip(*(operation.operands for operation in convolutions), strict=True)
    x = Value(np.concatenate([value.array for value in data], numbers.lhs_spec[1]), data=True)
    summed = numbers.rhs_spec[1]
    elements = np.concatenate([value.elements[0] for value in kernels], summed)
    leaves = frozenset[str]().union(*(value.leaves for value in kernels))
    every = Value(np.concatenate([value.array for value in kernels], summed), leaves=leaves, elements=(elements,))
    total = np.sum([operation.results[0].array for operation in convolutions], 0)
    made = replace(like, operands=(x, every), results=(Value(total, data=True, leaves=leaves),))
    return OfOne(index, made, 1, None, total)


def _product_of_sum(products: Sequence[tuple[Operation, Value, Value]], index: int) -> OfOne:
    like, _, weight = products[0]
    leaves = frozenset().union(*(data.leaves for _, data, _ in products))
    x = Value(reduce(np.add, [data.array for _, data, _ in products]), data=True, leaves=leaves)
    made = product_at(like, x, weight)
    return OfOne(index, made, 1, None, made.results[0].array)
