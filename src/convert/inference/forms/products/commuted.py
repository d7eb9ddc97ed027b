"""Products in front of what mixes rows, and behind it: ``(A x) W`` is ``A (x W)``.

A graph layer applies its matrix to the nodes before it adds up the neighbours, or to the sums; a number multiplies what enters a
layer, or what it gives; a mean is taken before a layer, or behind it; so are rows, and the differences between them. The source's
record has one of the two; the other one is computed here, with the bias of the layer: that of a mean is the same on both sides.
That of a sum is not, unless the other program adds it as often as there are terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.sums.reordered import SUMS, Term
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.program import REFUSALS, Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
LINEAR_LAYOUTS = frozenset(
    ("transpose", "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "convert_element_type", "copy", "slice")
)
LINEAR = frozenset(
    [
        *LINEAR_LAYOUTS,
        "dot_general",
        "reduce_sum",
        "reduce_window_sum",
        "gather",
        "scatter-add",
        "mul",
        "div",
        "neg",
        "concatenate",
        "pad",
        "cumsum",
    ]
)
MAX_DEPTH = 6
MAX_PLACES = 12  # in front of one product
MAX_SAME = 4  # products of one weight that are added up
SAME = 1e-9  # relative


@dataclass(frozen=True, eq=False)
class Commuted:
    """A product as it is in front of an operation that the source applies before it, or behind one that it applies to its result.

    Attributes:
        index: of the source's product.
        operation: the product, with other data.
        side: position of the weight.
        biases: what is added to it.
    """

    index: int
    operation: Operation
    side: int
    biases: tuple[Term, ...] = ()


@dataclass(frozen=True, eq=False)
class _Product:
    index: int
    operation: Operation
    side: int
    axis: int  # of the data, that is summed over
    matrix: Array  # [I, O]

    @property
    def data(self) -> Value:
        return self.operation.operands[1 - self.side]

    @property
    def weight(self) -> Any:
        """What products of one weight have in common."""
        elements = self.operation.operands[self.side].elements
        return self.side, self.matrix.shape, *(numbers.tobytes() for numbers in elements)


@dataclass(frozen=True, eq=False)
class _Bias:
    """A vector that is added to the result of a product.

    Attributes:
        index: of the sum.
        operation: the sum.
        side: position of the vector.
        vectors: what may be added in the other place: the vector as it is, and a leaf that is multiplied by a number in it.
    """

    index: int
    operation: Operation
    side: int
    vectors: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class _Moved:
    """What linear operations make of a product.

    Attributes:
        array: of its data.
        alone: of its result, without biases.
        axis: of the features of both.
        biases: that were added in between.
        beside: whether values that are not made of the product were added in between.
    """

    array: Array
    alone: Array
    axis: int
    biases: tuple[_Bias, ...] = ()
    beside: bool = False


def commuted(program: Program, only: int | None = None) -> Iterator[Commuted]:
    """Yield the products that another order of linear operations would have.

    Args:
        only: index of a product, for those of its weight alone.
    """
    made_by = program.made_by
    users = program.users
    biases = dict(_biases(program))
    of_weights: dict[Any, list[_Product]] = {}
    every = list(_products(program))
    wanted = {product.weight for product in every if product.index == only}
    for product in every if only is None else (one for one in every if one.weight in wanted):
        using = [biases[x] for x in users.get(product.operation.results[0], []) if x in biases]
        for array, axis in _in_front(product, product.data, made_by):
            yield _with(product, array, axis, using)
        of_weights.setdefault(product.weight, []).append(product)
    for same in of_weights.values():
        for group in [same] if len(same) <= MAX_SAME else [[one] for one in same]:
            for array, axis, added in _behind(group, users, biases):
                yield _with(group[0], array, axis, added)


def _biases(program: Program) -> Iterator[tuple[Operation, _Bias]]:
    """Yield the sums of data and a vector of one leaf."""
    theta = np.concatenate([np.zeros(0), *[np.ravel(x.array) for x in program.parameters.values()]])
    for index, operation in enumerate(program.operations):
        if operation.name not in SUMS or len(operation.operands) != 2 or len(operation.data) != 1:
            continue
        side = 0 if operation.operands[1].data else 1
        weight = operation.operands[side]
        same_sign = operation.name != "sub" or side == 0
        if not weight.of_parameters or len(weight.elements) != 1 or not same_sign:
            continue
        array, numbers = weight.array, weight.elements[0]
        if (numbers < 0).any() or sum(size > 1 for size in numbers.shape) > 1:
            continue
        as_it_is = Value(array.ravel(), leaves=weight.leaves, elements=(numbers.ravel(),))
        leaf = replace(as_it_is, array=theta[numbers.ravel()])
        same = np.array_equal(leaf.array, as_it_is.array)
        yield operation, _Bias(index, operation, side, (as_it_is,) if same else (as_it_is, leaf))


def _products(program: Program) -> Iterator[_Product]:
    for index, made in enumerate(program.operations):
        operation = _of_one_tap(made) or made
        if role_of(operation) is not Role.PRODUCT or len(operation.operands) != 2 or len(operation.data) != 1:
            continue
        side = 0 if operation.operands[1].data else 1
        axes, weight = axes_of(operation, side), operation.operands[side]
        if axes is None or axes[1][0] or len(axes[0][1]) != 1 or weight.array.ndim != 2 or not weight.elements:
            continue
        (_, (axis,)), (_, (summed,)) = axes
        yield _Product(index, operation, side, axis, np.moveaxis(weight.array, summed, 0))


def _of_one_tap(operation: Operation) -> Operation | None:
    """Return a convolution with a kernel of one tap, and the channels last, as the product that it is; None for any other operation."""
    if operation.name != "conv_general_dilated" or len(operation.data) != 1 or not operation.operands[0].data:
        return None
    settings, (data, kernel) = operation.settings, operation.operands
    layout: Any = settings["dimension_numbers"]
    rank, taps = data.array.ndim, [kernel.array.shape[axis] for axis in layout.rhs_spec[2:]]
    channels_last = layout.lhs_spec[1] == layout.out_spec[1] == rank - 1
    plain = settings["feature_group_count"] == settings["batch_group_count"] == 1
    if (
        not channels_last
        or not plain
        or {*taps} != {1}
        or data.array.shape[:-1] != operation.results[0].array.shape[:-1]
    ):
        return None
    outputs, inputs = layout.rhs_spec[:2]

    def matrix(array: Array) -> Array:
        return np.moveaxis(array, (inputs, outputs), (0, 1)).reshape(array.shape[inputs], array.shape[outputs])

    weight = replace(kernel, array=matrix(kernel.array), elements=tuple(map(matrix, kernel.elements)))
    axes = (((rank - 1,), (0,)), ((), ()))
    return replace(operation, name="dot_general", operands=(data, weight), settings={"dimension_numbers": axes})


def _in_front(product: _Product, value: Value, made_by: Mapping[Value, Operation]) -> Iterator[tuple[Array, int]]:
    """Yield the data that linear operations are applied to before the product, with the axis of its features; also each term of a sum that enters it."""
    size = len(product.matrix)
    turn = np.random.default_rng(0).normal(size=(size, size))
    todo = [(value, product.axis, 0, True)]  # whether nothing but sums lies between
    for _ in range(MAX_PLACES):
        value, axis, depth, sums = todo.pop(0) if todo else (value, 0, MAX_DEPTH, False)
        made = made_by.get(value)
        if made is None or depth == MAX_DEPTH:
            continue
        if made.name in SUMS and sums and not any(x.of_parameters for x in made.operands):
            for term in made.operands:
                array = np.broadcast_to(term.array, value.array.shape)
                yield array, axis
                if term.array.shape == array.shape:
                    todo.append((term, axis, depth + 1, True))
            continue
        if made.name not in LINEAR:
            continue
        found = next(
            (
                (x, k)
                for x in made.data
                for k in range(x.array.ndim)
                if x.array.shape[k] == size and _commutes(made, x, k, axis, turn)
            ),
            None,
        )
        if found is not None:
            todo.append((*found, depth + 1, False))
            if made.name not in LINEAR_LAYOUTS:
                yield found[0].array, found[1]


def _commutes(made: Operation, x: Value, axis: int, behind: int, turn: Array) -> bool:
    """Whether features of an operand may be mixed before an operation or in its result."""
    try:
        out = run_with(made, x, _times(x.array, axis, turn))
    except REFUSALS:
        return False
    return equal(out, _times(made.results[0].array, behind, turn))


def _behind(
    products: Sequence[_Product], users: Mapping[Value, Sequence[Operation]], biases: Mapping[Operation, _Bias]
) -> Iterator[tuple[Array, int, Sequence[_Bias]]]:
    """Yield what linear operations that are applied to the results of products of one weight make of its data, with the axis of its features.

    Also what they make of the biases that are added in between; and sums of two such results, as the difference between a row and its neighbours.
    """
    product, known = products[0], dict[Value, _Moved]()
    for one in products:
        result, array = one.operation.results[0], one.data.array
        order = [k for k in range(array.ndim) if k != one.axis]
        axis = result.array.ndim - 1 if one.side else 0
        known[result] = _Moved(np.moveaxis(array.transpose(*order, one.axis), -1, axis), result.array, axis)
    todo = [(result, used) for result in known for used in users.get(result, [])]
    for _ in range(MAX_PLACES * len(products)):
        if not todo:
            return
        value, used = todo.pop(0)
        after, *others = used.results
        of, moved = known[value], None
        if used in biases and after.array.shape == of.alone.shape:
            moved = replace(of, biases=(*of.biases, biases[used]))
        elif used.name in LINEAR and used.data.count(value) == 1 and not others:
            moved = _moved(product, used, value, of)
        elif used.name in SUMS and len(used.data) == 2:
            terms = [known[x] for x in used.operands if x in known]
            if len(terms) == len(used.operands):
                moved = _sum(product, used, terms)
            elif not of.biases:
                moved = _moved(product, _alone(used, value), value, replace(of, beside=True))
        if moved is None:
            continue
        further = used.name not in LINEAR_LAYOUTS or after.array.size > value.array.size
        if used not in biases and further and not moved.beside:
            yield moved.array, moved.axis, moved.biases
        known[after] = moved
        todo += [(after, user) for user in users.get(after, [])]


def _alone(used: Operation, value: Value) -> Operation:
    """Return a sum with zeros for the other term."""
    operands = tuple(x if x is value else replace(x, array=np.zeros_like(x.array)) for x in used.operands)
    return replace(used, operands=operands)


def _moved(product: _Product, used: Operation, value: Value, of: _Moved) -> _Moved | None:
    """Return what a linear operation makes of the data and the result of a product; None where it mixes features."""
    size, out = product.matrix.shape
    try:
        alone = run_with(used, value, of.alone)
        if size == out:
            arrays = [run_with(used, value, of.array)]
        elif out in alone.shape:
            arrays = [run_with(used, value, part) for part in _as_wide(of.array, of.axis, out)]
        else:
            return None
    except REFUSALS:
        return None
    for k in (k for k in range(alone.ndim) if alone.shape[k] == out):
        array = np.concatenate(arrays, k).take(range(size), k)
        if equal(_times(array, k, product.matrix), alone):
            return replace(of, array=array, alone=alone, axis=k)
    return None


def _as_wide(array: Array, axis: int, width: int) -> Iterator[Array]:
    """Yield an array in parts of a width along an axis, the last one with zeros behind: an operation may have the width of a product's result in it."""
    for start in range(0, array.shape[axis], width):
        part = array.take(range(start, min(start + width, array.shape[axis])), axis)
        yield np.pad(part, [(0, width - part.shape[axis]) if k == axis else (0, 0) for k in range(array.ndim)])


def _sum(product: _Product, used: Operation, terms: Sequence[_Moved]) -> _Moved | None:
    """Return a sum or difference of what was made of one product; None if the features of its terms are along different axes, or a bias is left in it."""
    axis, *others = (of.axis - of.array.ndim for of in terms)
    cancel = used.name == "sub" and terms[0].biases == terms[1].biases
    if any(k != axis for k in others) or (any(of.biases for of in terms) and not cancel):
        return None
    try:
        array, alone = (
            np.asarray(used.again(arrays)[0]) for arrays in ([x.array for x in terms], [x.alone for x in terms])
        )
    except REFUSALS:
        return None
    moved = _Moved(array, alone, axis + array.ndim)
    return moved if equal(_times(array, axis, product.matrix), alone) else None


def run_with(operation: Operation, value: Value, array: Array) -> Array:
    """Return the first result of an operation with another array in the place of one operand."""
    operands = [array if operand is value else operand.array for operand in operation.operands]
    with np.errstate(all="ignore"):
        return np.asarray(operation.again(operands)[0])


def _times(array: Array, axis: int, matrix: Array) -> Array:
    with np.errstate(all="ignore"):  # what a pooling layer is padded with is infinite
        return np.moveaxis(np.moveaxis(array, axis, -1) @ matrix, -1, axis)


def equal(one: Array, two: Array) -> bool:
    """Whether two arrays of finite numbers are equal but for rounding."""
    if one.shape != two.shape or not two.size or not (np.isfinite(one).all() and np.isfinite(two).all()):
        return False
    return float(np.abs(one - two).max()) <= SAME * float(np.abs(two).max())


def _with(product: _Product, array: Array, axis: int, biases: Sequence[_Bias] = ()) -> Commuted:
    """Return the product with other data."""
    operation, side = product.operation, product.side
    weight = operation.operands[side]
    axes = axes_of(operation, side)
    summed = axes[1][1] if axes is not None else ()
    data = Value(array, data=True)
    both = ((axis,), tuple(summed)) if side else (tuple(summed), (axis,))
    result = np.moveaxis(array, axis, -1) @ product.matrix

    def again(arrays: Sequence[Array]) -> list[Array]:
        given, by = (arrays[0], arrays[1]) if side else (arrays[1], arrays[0])
        return [np.moveaxis(given, axis, -1) @ np.moveaxis(by, summed[0], 0)]

    made = replace(
        operation,
        name="dot_general",
        operands=(data, weight) if side else (weight, data),
        results=(Value(result, data=True, leaves=operation.results[0].leaves),),
        settings={"dimension_numbers": (both, ((), ()))},
        again=again,
    )
    return Commuted(product.index, made, side, tuple(_terms(result, biases)))


def _terms(result: Array, biases: Sequence[_Bias]) -> Iterator[Term]:
    """Yield the biases as they are added to the result of a product, whose features are its last axis."""
    for bias in biases:
        for vector in bias.vectors:
            if vector.array.shape not in ((1,), result.shape[-1:]):
                continue
            data = Value(result, data=True)
            total = Value(result + vector.array, data=True, leaves=vector.leaves)
            operands = (data, vector)
            made = replace(
                bias.operation,
                name="add",
                operands=operands,
                results=(total,),
                settings={},
                again=lambda x: [x[0] + x[1]],
            )
            yield Term(bias.index, made, 1, result, total.array)
