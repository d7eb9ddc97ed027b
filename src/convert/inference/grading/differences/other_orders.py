"""Other orders of the columns that the target splits, as gates: each layer in front of the split may have its columns in another order.

Every value in front of the split has the same numbers in each of these orders, a norm over all columns too: only what follows tells
them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import factorial
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.inference.candidates.context import SPLITS
from convert.inference.derivation import Grade, Part, Role, Tensor
from convert.inference.forms.elements import MOVES, moved
from convert.inference.meetings.sites import parameter_operands, products, role_of
from convert.programs.program import Operation, Program, Value
from convert.programs.rerun import can_rerun, rerun

Array = np.ndarray[Any, np.dtype[Any]]
Places = Mapping[str, Array]  # parameter -> for each element, which one it has the number of
MOST_PARTS = 6  # that are tried in all orders
MOST_VALUES = 64  # between a layer and the split, and behind it
CALL = 5000  # elements that an operation counts as, beside its own
WORK = 5 * 10**8  # elements that all runs may compute


def other_orders(target: Program) -> Iterator[Places]:
    """Yield the parameters of a program with the columns of some layers in another order: that of the parts that are taken of them.

    Parts of one size may also alternate, one element of each in turn.
    """
    users, made_by = target.users, target.made_by
    found: dict[Any, dict[bytes, Array]] = {}  # by the layers, and by the line of code, for all layers at once
    for operation in target.operations:
        value = operation.operands[0] if operation.operands and operation.operands[0].data else None
        axis = None if value is None else _split_axis(operation, value)
        if value is None or axis is None:
            continue
        cuts = _cuts(value, axis, users)
        if 1 < len(cuts) <= MOST_PARTS:
            columns = {numbers.tobytes(): numbers for numbers in _columns(value, axis, made_by)}
            first = min((int(numbers.min()) for numbers in columns.values()), default=-1)
            for key in ((first, cuts), (operation.where, operation.name, cuts)):
                found.setdefault(key, {}).update(columns)
    groups = {(key[-1], *sorted(of)): of for key, of in found.items() if of}
    size = sum(value.array.size for value in target.parameters.values())
    runs = WORK // sum(CALL + sum(x.array.size for x in operation.results) for operation in target.operations)
    for (cuts, *_), columns in groups.items():
        runs -= factorial(len(cuts)) * (3 if len({*cuts}) == 1 else 1)
        for order in _orders(cuts) if runs >= 0 else ():
            every = np.arange(size)
            for numbers in columns.values():
                every[numbers] = numbers[:, order]
            places = _by_parameter(target, every)
            if places:
                yield places


def runs_in_other_orders(
    target: Program, weights: Mapping[str, Array], given: Mapping[str, Array]
) -> Iterator[tuple[Places, Program]]:
    """Yield these orders with the run of the program in each, but those that give no numbers; none if it cannot be run again."""
    for places in other_orders(target) if can_rerun(target, given) else ():
        with suppress(ConvertError):  # not a number
            yield places, rerun(target, reordered_weights(weights, places), given)


def reordered_weights(weights: Mapping[str, Array], places: Places) -> dict[str, Array]:
    """Return weights with those of some parameters in another order."""
    return {
        name: array.ravel()[places[name]].reshape(array.shape) if name in places else array
        for name, array in weights.items()
    }


def reordered_tensors(tensors: Sequence[Tensor], places: Places) -> tuple[Tensor, ...]:
    """Return the tensors with the elements of some in another order, as they are guessed."""
    return tuple(_reordered(tensor, places[tensor.name]) if tensor.name in places else tensor for tensor in tensors)


def _reordered(tensor: Tensor, places: Array) -> Tensor:
    now = np.argsort(places)
    parts = sorted((_moved(part, now) for part in tensor.parts), key=lambda part: int(part.elements[0]))
    return replace(
        tensor, grade=Grade.BEHIND, parts=tuple(parts), alternatives={}, ties=(), candidates=(), guessed=True
    )


def _moved(part: Part, now: Array) -> Part:
    """Return a part whose elements lie elsewhere in the tensor: for each place of before where it is now."""
    elements = now[part.elements]
    order = np.argsort(elements, kind="stable")
    return replace(
        part,
        elements=elements[order],
        positions=part.positions[order] if len(part.positions) else part.positions,
        values=None if part.values is None else part.values[order],
        terms=tuple((leaf, positions[order]) for leaf, positions in part.terms),
    )


def are_of_a_layer(value: Value, axis: int, made_by: Mapping[Value, Operation]) -> bool:
    """Whether the columns along an axis of a value are those that a layer gives, so that its parameters give them in any order."""
    for _ in range(MOST_VALUES):
        operation = made_by.get(value)
        if operation is None:
            return False
        role = role_of(operation)
        if role in (Role.PRODUCT, Role.CONVOLUTION):
            of_rows = axis == 1 if role is Role.CONVOLUTION else axis == value.array.ndim - 1
            return of_rows and bool(parameter_operands(operation))
        before = [(x, k) for x in operation.data for k in _axes_before(operation, x, axis)]
        if len(operation.data) != 1 or not before:
            return False
        ((value, axis),) = before
    return False


def _by_parameter(target: Program, every: Array) -> Places:
    """Return the parameters whose elements are others; none if one has elements of another parameter."""
    found = {}
    for name, first in target.first_element.items():
        size = target.parameters[name].array.size
        places = every[first : first + size] - first
        if (places != np.arange(size)).any():
            if places.min() < 0 or places.max() >= size:
                return {}
            found[name] = places
    return found


def _split_axis(operation: Operation, value: Value) -> int | None:
    """Return the axis of which an operation takes parts: the last one, or that of the channels that PyTorch's convolutions give."""
    rank = value.array.ndim
    if operation.name not in SPLITS or not rank:
        return None
    axis = int(operation.settings.get("dim", 0)) % rank
    return axis if axis == rank - 1 or (axis == 1 and rank > 2) else None


def _cuts(value: Value, axis: int, users: Mapping[Value, Sequence[Operation]]) -> tuple[int, ...]:
    """Return the lengths of the parts that are taken of an axis of a value, also of parts, and behind what is computed of each element."""
    width = value.array.shape[axis]
    bounds, todo, seen = {0, width}, [(value, 0)], {value}
    while todo and len(seen) < MOST_VALUES:
        at, first = todo.pop()
        for user in users.get(at, ()):
            if _split_axis(user, at) == axis:
                step = int(user.settings.get("step") or 1)
                if step > 1 and at.array.shape[axis] == width and width % step == 0:
                    return (width // step,) * step  # they alternate
                start = first + (
                    (user.settings.get("start") or 0) % at.array.shape[axis] if user.name == "slice" else 0
                )
                for result in user.results:
                    end = start + result.array.shape[axis]
                    bounds |= {start, end}
                    todo += [(result, start)] if result not in seen else []
                    start = end
            elif role_of(user) not in (Role.PRODUCT, Role.CONVOLUTION) and len(user.data) == len(user.results) == 1:
                result = user.results[0]
                todo += [(result, first)] if result.array.shape == at.array.shape and result not in seen else []
            seen.update(user.results)
    return tuple(int(n) for n in np.diff(sorted(bounds)))


def _columns(value: Value, axis: int, made_by: Mapping[Value, Operation]) -> Iterator[Array]:
    """Yield the numbers of the elements, [n, columns], of each parameter that makes the columns along an axis of a value."""
    width = value.array.shape[axis]
    todo, seen = [(value, axis)], {value}
    while todo and len(seen) < MOST_VALUES:
        at, axis = todo.pop()
        operation = made_by.get(at)
        if operation is None:
            continue
        role, behind = role_of(operation), axis - at.array.ndim  # of parameters that have fewer axes
        of_products = role in (Role.PRODUCT, Role.CONVOLUTION)
        for side in parameter_operands(operation):
            elements = operation.operands[side].elements
            if role is Role.CONVOLUTION:
                out = 1 if operation.settings.get("transposed") else 0
                found = [np.moveaxis(n, out, -1) for n in elements if axis == 1]
            elif of_products and len(operation.data) == 1:
                last = axis == at.array.ndim - 1
                found = [n.reshape(len(n), -1) for x in products([operation], side) for n in x.numbers] if last else []
            else:
                found = [np.moveaxis(n, behind, -1) for n in elements if n.ndim >= -behind]
            flat = (n.reshape(-1, n.shape[-1]) for n in found)
            yield from (numbers for numbers in flat if numbers.shape[1] == width and (numbers >= 0).all())
        if not of_products:
            near = [(x, before) for x in operation.data if x not in seen for before in _axes_before(operation, x, axis)]
            todo += near
            seen.update(x for x, _ in near)


def _axes_before(operation: Operation, value: Value, axis: int) -> Iterator[int]:
    """Yield the axis of a value that an operation gives as another one, or that it keeps."""
    shape, made = value.array.shape, operation.results[0].array
    if len(operation.operands) > 1 or operation.name not in MOVES:
        if len(shape) == made.ndim and shape[axis] in (made.shape[axis], 1):
            yield axis
        return
    places = moved(operation, value)
    if places is None or made.shape[axis] < 2:
        return
    steps = np.unique(np.diff(places[0].reshape(made.shape), axis=axis))
    strides = [int(np.prod(shape[k + 1 :])) for k in range(len(shape))]
    found = [k for k, size in enumerate(shape) if size == made.shape[axis] and [strides[k]] == steps.tolist()]
    yield from found[:1]


def _orders(cuts: Sequence[int]) -> Iterator[Array]:
    """Yield the columns in the order of each order of their parts; not as they are."""
    width, count = sum(cuts), len(cuts)
    parts = np.split(np.arange(width), np.cumsum(cuts)[:-1])
    for order in itertools.permutations(range(count)):
        if list(order) != sorted(order):
            yield np.concatenate([parts[k] for k in order])
        if len({*cuts}) == 1 and 1 < count < width:
            one_by_one = np.arange(width).reshape(-1, count)[:, order]
            yield one_by_one.T.ravel()
            yield np.argsort(one_by_one.T.ravel())
