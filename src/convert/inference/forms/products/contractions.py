"""Write ``(x * w).sum(axis)`` as the product that it is: an attention vector of a graph network, the scores of a pooling layer. And
``x[..., None] * w``: a layer of one feature. A product that sums over nothing, as ``einsum('...d,hd->...hd')``, is none.

One program multiplies element by element and adds up, the other takes a matrix product, or one for each head.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import step, without_idle
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.program import Array, Operation, Program, Value, producers_of, times_used

SUMS = ("sum", "reduce_sum")
REPEATS = ("broadcast_in_dim", "expand")


def features_times_vectors(program: Program) -> list[int]:
    """Return the sizes of the vectors that one feature each is multiplied by."""
    made_by = program.made_by
    factors = _factors_of_data(program)
    return sorted(
        sum(n.size for n in made[1].results[0].elements)
        for operation in program.operations
        if (made := _outer(operation, made_by, program.buffers, factors))
    )


def vectors_of_each_feature(program: Program) -> list[int]:
    """Return the sizes of what several features are multiplied by, each by a vector of its own: ``x[..., None] * w`` with rows for the features."""
    made_by = program.made_by
    return sorted(
        sum(n.size for n in weight.elements)
        for operation in program.operations
        if operation.name == "mul" and len(operation.operands) == 2
        for weight, data in (operation.operands, operation.operands[::-1])
        if weight.of_parameters and data.data and _has_vector_for_each(weight, data, operation, made_by)
    )


def _has_vector_for_each(weight: Value, data: Value, times: Operation, made_by: Mapping[Value, Operation]) -> bool:
    shape = times.results[0].array.shape
    of_data, of_weight = (set(axes_kept(x, shape, made_by)) for x in (data, weight))
    return bool(of_data & of_weight and of_weight - of_data)


def sums_as_products(program: Program, *, keep: bool, features: bool = False) -> Program:
    """Return the program with a product in place of a sum over what two values multiplied give.

    Args:
        keep: whether the values that are added up stay values of the program.
        features: whether one feature that is multiplied by a vector is a product, too.
    """
    uses = times_used(program)
    made_by = program.made_by
    factors = _factors_of_data(program) if features else set()
    operations: list[Operation] = []
    joined: set[Operation] = set()
    moved = False
    for operation in program.operations:
        times = made_by.get(operation.operands[0]) if operation.name in SUMS and operation.operands else None
        product = _product(operation, times, made_by)
        last = _parameter_last(times, made_by) if times is not None else []
        if last and (apart := _product(operation, last[-1], {**made_by, **producers_of(last)})):
            product = [*(product if keep else ()), *last[:-1], *apart]
            moved = True
        outer = _outer(operation, made_by, program.buffers, factors) if features else []
        operations += product or outer or [operation]
        if product and uses[operation.operands[0]] == 1 and not keep:
            joined.add(made_by[operation.operands[0]])
    left = [x for x in operations if x not in joined]
    return replace(program, operations=tuple(without_idle(left, program) if moved and not keep else left))


def products_by_element(program: Program, *, features: bool = False) -> Program:
    """Return the program with a multiplication element by element in place of a product with a parameter that sums over nothing.

    Args:
        features: whether a product of one feature with a vector is multiplied element by element, too.
    """
    operations: list[Operation] = []
    for operation in program.operations:
        operations += _by_element(operation, features) or [operation]
    return replace(program, operations=tuple(operations))


def _by_element(product: Operation, features: bool) -> list[Operation]:
    """Return the operations that take the place of a product; none if it adds up something, or has no axis in common."""
    if role_of(product) is not Role.PRODUCT or len(product.operands) != 2 or len(product.data) != 1:
        return []
    side = 1 if product.operands[0].data else 0
    axes = axes_of(product, side)
    if axes is None or not product.operands[side].of_parameters:
        return []
    (x_batch, x_sum), (w_batch, w_sum) = axes
    data, weight = product.operands[1 - side], product.operands[side]
    if any(data.array.shape[k] > 1 for k in x_sum):
        return []
    if all(data.array.shape[k] == 1 for k in x_batch) and not features:
        return []
    free = [
        [n for k, n in enumerate(x.array.shape) if k not in (*batch, *summed)]
        for x, batch, summed in ((data, x_batch, x_sum), (weight, w_batch, w_sum))
    ]
    common = [data.array.shape[k] for k in x_batch]
    ones = [[1] * len(of) for of in free]
    shapes = (*common, *free[0], *ones[1]), (*common, *ones[0], *free[1])
    if not side:
        shapes = (*common, *ones[1], *free[0]), (*common, *free[1], *ones[0])
    steps = [
        _moved(product, x, (*batch, *(k for k in range(x.array.ndim) if k not in batch)), shape)
        for x, batch, shape in ((data, x_batch, shapes[0]), (weight, w_batch, shapes[1]))
    ]
    operands = (steps[0].results[0], steps[1].results[0])
    times = replace(product, name="mul", operands=operands if side else operands[::-1], settings={})
    return [*steps, replace(times, again=lambda x: [np.asarray(x[0] * x[1])])]


def _moved(like: Operation, value: Value, order: Sequence[int], shape: Sequence[int]) -> Operation:
    """Return the operation that gives a value with its axes in an order, and in a shape."""

    def run(array: Array) -> Array:
        return array.transpose(order).reshape(shape)

    made = replace(value, array=run(value.array), elements=tuple(run(numbers) for numbers in value.elements))
    step = replace(like, name="reshape", operands=(value,), results=(made,), settings={})
    return replace(step, again=lambda x: [run(x[0])])


def _parameter_last(times: Operation, made_by: Mapping[Value, Operation]) -> list[Operation]:
    """Return the operations that multiply the data first, and the parameter last: ``(w x) y`` is ``(x y) w``; none where it is so already."""
    weight, data = _factors(times.results[0], times.results[0].array.shape, made_by)
    if weight is None or len(data) < 2:
        return []
    made: list[Operation] = []
    for x in data[1:]:
        both = (made[-1].results[0] if made else data[0], x)
        leaves = frozenset().union(*(of.leaves for of in both))
        made.append(
            step(times, "mul", both, Value(both[0].array * both[1].array, data=True, leaves=leaves), np.multiply)
        )
    operands = (made[-1].results[0], weight)
    return [*made, step(times, "mul", operands, times.results[0], np.multiply)]


def _factors(
    value: Value, shape: Sequence[int], made_by: Mapping[Value, Operation]
) -> tuple[Value | None, tuple[Value, ...]]:
    """Return the parameter and the data that are multiplied element by element to give a value; None where no parameter is."""
    made = made_by.get(value)
    if value.data and made is not None and made.name == "mul" and value.array.shape == shape:
        for one, other in (made.operands, made.operands[::-1]):
            weight, data = (one, ()) if one.of_parameters else _factors(one, shape, made_by)
            if weight is not None and other.data:
                return weight, (*data, other)
    return None, ()


def _product(total: Operation, times: Operation | None, made_by: Mapping[Value, Operation]) -> list[Operation]:
    """Return the operations that take the place of a sum; none if it adds up squares or no product, or over axes of one operand alone."""
    if times is None or times.name != "mul" or len(set(times.operands)) != 2 or not times.results[0].data:
        return []  # squares are those of a norm, or of a variance
    shape = times.results[0].array.shape
    axes = summed_axes(total, len(shape))
    kept = [axes_kept(x, shape, made_by) for x in times.operands]
    if not axes or not all(set(axes) <= set(of) for of in kept) or total.results[0].array.dtype.kind != "f":
        return []
    batch = tuple(k for k in range(len(shape)) if k not in axes and all(k in of for of in kept))
    steps, operands = [], []
    for x, of in zip(times.operands, kept, strict=True):
        step = without_repeats(times, x, len(shape), of)
        steps.append(step)
        operands.append(step.results[0])
    (result,) = total.results

    def again(arrays: Sequence[Array]) -> list[Array]:
        return [np.asarray((arrays[0] * arrays[1]).sum(axes)).reshape(result.array.shape)]

    numbers = ((axes, axes), (batch, batch))
    made = replace(total, name="dot_general", operands=tuple(operands), settings={"dimension_numbers": numbers})
    return [*steps, replace(made, again=again)]


def _factors_of_data(program: Program) -> set[Value]:
    """Return what multiplies other data, such as the scale of a norm over its deviation."""
    return {x for operation in program.operations if len(operation.data) == 2 and operation.name == "mul" for x in operation.data}  # fmt: skip


def _outer(
    times: Operation, made_by: Mapping[Value, Operation], buffers: frozenset[str], factors: Collection[Value]
) -> list[Operation]:
    """Return the operations that take the place of a product of one feature with a vector; none if it is another."""
    if (
        times.results[0] in factors
        or times.name != "mul"
        or len(times.operands) != 2
        or [x.of_parameters for x in times.operands].count(True) != 1
    ):
        return []
    side = 0 if times.operands[0].of_parameters else 1
    data, weight = times.operands[1 - side], times.operands[side]
    if not data.data or len(weight.elements) != 1 or weight.leaves <= buffers:
        return []
    shape = times.results[0].array.shape
    of_data, of_weight = axes_kept(data, shape, made_by), axes_kept(weight, shape, made_by)
    if not of_weight or set(of_data) & set(of_weight):
        return []
    rows = reshaped(without_repeats(times, data, len(shape), of_data), (*(shape[k] for k in of_data), 1))
    vector = reshaped(without_repeats(times, weight, len(shape), of_weight), (1, *(shape[k] for k in of_weight)))
    (result,) = times.results
    order = np.argsort([*of_data, *of_weight])
    once = [n if k in (*of_data, *of_weight) else 1 for k, n in enumerate(shape)]

    def placed(arrays: Sequence[Array]) -> list[Array]:
        return [np.array(np.broadcast_to(arrays[0].transpose(order).reshape(once), shape))]

    operands = rows.results[0], vector.results[0]
    product = Value(np.tensordot(operands[0].array, operands[1].array, 1), data=True, leaves=result.leaves)
    numbers = (((len(of_data),), (0,)), ((), ()))
    made = replace(
        times,
        name="dot_general",
        operands=operands,
        results=(product,),
        settings={"dimension_numbers": numbers},
        again=lambda x: [np.tensordot(x[0], x[1], 1)],
    )
    return [rows, vector, made, replace(times, name="expand", operands=(product,), settings={}, again=placed)]


def reshaped(step: Operation, shape: tuple[int, ...]) -> Operation:
    """Return a layout operation whose result has another shape."""
    (made,) = step.results
    elements = tuple(numbers.reshape(shape) for numbers in made.elements)
    short = replace(made, array=made.array.reshape(shape), elements=elements)
    return replace(step, results=(short,), again=lambda x: [step.again(x)[0].reshape(shape)])


def summed_axes(total: Operation, rank: int) -> tuple[int, ...]:
    said = total.settings.get("axes", total.settings.get("dim"))
    return tuple(range(rank)) if said is None else tuple(sorted(int(k) % rank for k in np.ravel(said)))


def axes_kept(value: Value, shape: Sequence[int], made_by: Mapping[Value, Operation]) -> list[int]:
    """Return the axes of the product along which a value is not repeated."""
    rank = value.array.ndim
    first = len(shape) - rank
    return [
        first + k
        for k in range(rank)
        if value.array.shape[k] == shape[first + k] > 1 and not is_repeated(value, k - rank, made_by)
    ]


def is_repeated(value: Value, axis: int, made_by: Mapping[Value, Operation]) -> bool:
    """Whether a value is the same in all places along an axis, as all is that it is computed of, place by place."""
    if value.array.ndim < -axis or value.array.shape[axis] == 1:
        return True
    array = value.elements[0] if value.elements else value.array
    if (array != array.take([0], axis)).any():
        return False
    made = made_by.get(value)
    if value.elements or made is None or made.name in REPEATS:
        return made is not None or bool(value.elements)
    given = [x for x in made.operands if not x.constant]
    return all(x.array.ndim == value.array.ndim and is_repeated(x, axis, made_by) for x in given)


def without_repeats(like: Operation, value: Value, rank: int, kept: Sequence[int]) -> Operation:
    """Return the operation that gives a value with one place along each axis along which it is repeated, and all axes."""
    first = rank - value.array.ndim
    index = (None,) * first + tuple(slice(None) if first + k in kept else slice(1) for k in range(value.array.ndim))
    short = replace(value, array=value.array[index], elements=tuple(numbers[index] for numbers in value.elements))
    return replace(like, name="slice", operands=(value,), results=(short,), settings={}, again=lambda x: [x[0][index]])
