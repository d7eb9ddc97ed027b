"""Write ``(x * w).sum(axis)`` as the product that it is: an attention vector of a graph network, the scores of a pooling layer. And
``x[..., None] * w``: a layer of one feature.

One program multiplies element by element and adds up, the other takes a matrix product, or one for each head.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from convert.programs.program import Array, Operation, Program, Value, producers_of, times_used

SUMS = ("sum", "reduce_sum")
REPEATS = ("broadcast_in_dim", "expand")


def features_times_vectors(program: Program) -> list[int]:
    """Return the sizes of the vectors that one feature each is multiplied by."""
    made_by = producers_of(program.operations)
    factors = _factors_of_data(program)
    return sorted(
        sum(n.size for n in made[1].results[0].elements)
        for operation in program.operations
        if (made := _outer(operation, made_by, program.buffers, factors))
    )


def sums_as_products(program: Program, *, keep: bool, features: bool = False) -> Program:
    """Return the program with a product in place of a sum over what two values multiplied give.

    Args:
        keep: whether the values that are added up stay values of the program.
        features: whether one feature that is multiplied by a vector is a product, too.
    """
    uses = times_used(program)
    made_by = producers_of(program.operations)
    factors = _factors_of_data(program) if features else set()
    operations: list[Operation] = []
    joined: set[Operation] = set()
    for operation in program.operations:
        product = _product(operation, made_by)
        outer = _outer(operation, made_by, program.buffers, factors) if features else []
        operations += product or outer or [operation]
        if product and uses[operation.operands[0]] == 1 and not keep:
            joined.add(made_by[operation.operands[0]])
    return replace(program, operations=tuple(x for x in operations if x not in joined))


def _product(total: Operation, made_by: dict[Value, Operation]) -> list[Operation]:
    """Return the operations that take the place of a sum; none if it adds up squares or no product, or over axes of one operand alone."""
    times = made_by.get(total.operands[0]) if total.name in SUMS and total.operands else None
    if times is None or times.name != "mul" or len(set(times.operands)) != 2 or not times.results[0].data:
        return []  # squares are those of a norm, or of a variance
    shape = times.results[0].array.shape
    axes = _axes(total, len(shape))
    kept = [_kept(x, shape, made_by) for x in times.operands]
    if not axes or not all(set(axes) <= set(of) for of in kept) or total.results[0].array.dtype.kind != "f":
        return []
    batch = tuple(k for k in range(len(shape)) if k not in axes and all(k in of for of in kept))
    steps, operands = [], []
    for x, of in zip(times.operands, kept, strict=True):
        step = _without_repeats(times, x, len(shape), of)
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
    times: Operation, made_by: dict[Value, Operation], buffers: frozenset[str], factors: Collection[Value]
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
    of_data, of_weight = _kept(data, shape, made_by), _kept(weight, shape, made_by)
    if not of_data or not of_weight or sorted((*of_data, *of_weight)) != [k for k, n in enumerate(shape) if n > 1]:
        return []
    rows = _reshaped(_without_repeats(times, data, len(shape), of_data), (*(shape[k] for k in of_data), 1))
    vector = _reshaped(_without_repeats(times, weight, len(shape), of_weight), (1, *(shape[k] for k in of_weight)))
    (result,) = times.results
    order = np.argsort([*of_data, *of_weight])

    def again(arrays: Sequence[Array]) -> list[Array]:
        made = np.tensordot(arrays[0], arrays[1], 1)
        return [np.asarray(made.transpose(order)).reshape(result.array.shape)]

    numbers = (((len(of_data),), (0,)), ((), ()))
    operands = rows.results[0], vector.results[0]
    made = replace(times, name="dot_general", operands=operands, settings={"dimension_numbers": numbers}, again=again)
    return [rows, vector, made]


def _reshaped(step: Operation, shape: tuple[int, ...]) -> Operation:
    """Return a layout operation whose result has another shape."""
    (made,) = step.results
    elements = tuple(numbers.reshape(shape) for numbers in made.elements)
    short = replace(made, array=made.array.reshape(shape), elements=elements)
    return replace(step, results=(short,), again=lambda x: [step.again(x)[0].reshape(shape)])


def _axes(total: Operation, rank: int) -> tuple[int, ...]:
    said = total.settings.get("axes", total.settings.get("dim"))
    return tuple(range(rank)) if said is None else tuple(sorted(int(k) % rank for k in np.ravel(said)))


def _kept(value: Value, shape: Sequence[int], made_by: dict[Value, Operation]) -> list[int]:
    """Return the axes of the product along which a value is not repeated."""
    array = value.elements[0] if value.elements else value.array
    made = made_by.get(value)
    may_repeat = bool(value.elements) or (made is not None and made.name in REPEATS)
    first = len(shape) - array.ndim
    return [
        first + k
        for k in range(array.ndim)
        if array.shape[k] == shape[first + k] > 1 and not (may_repeat and (array == array.take([0], k)).all())
    ]


def _without_repeats(like: Operation, value: Value, rank: int, kept: Sequence[int]) -> Operation:
    """Return the operation that gives a value with one place along each axis along which it is repeated, and all axes."""
    first = rank - value.array.ndim
    index = (None,) * first + tuple(slice(None) if first + k in kept else slice(1) for k in range(value.array.ndim))
    short = replace(value, array=value.array[index], elements=tuple(numbers[index] for numbers in value.elements))
    return replace(like, name="slice", operands=(value,), results=(short,), settings={}, again=lambda x: [x[0][index]])
