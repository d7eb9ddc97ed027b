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
from convert.inference.meetings.sites import parameter_operands, products, role_of
from convert.programs.program import Operation, Program, Value, producers_of, users_of
from convert.programs.rerun import can_rerun, rerun

Array = np.ndarray[Any, np.dtype[Any]]
Places = Mapping[str, Array]  # parameter -> for each element, which one it has the number of
MOST_PARTS = 6  # that are tried in all orders
MOST_VALUES = 64  # between a layer and the split, and behind it
CALL = 5000  # elements that an operation counts as, beside its own
WORK = 5 * 10**8  # elements that all runs may compute


def other_orders(target: Program) -> Iterator[Places]:
    """Yield the parameters of a program with the columns of some layers in another order: that of the parts that are taken of them."""
    users, made_by = users_of(target.operations), producers_of(target.operations)
    found: dict[Any, dict[bytes, Array]] = {}  # by the layers, and by the line of code, for all layers at once
    for operation in target.operations:
        value = operation.operands[0] if operation.operands and operation.operands[0].data else None
        cuts = _cuts(value, users) if value is not None and _splits(operation, value) else ()
        if value is not None and 1 < len(cuts) <= MOST_PARTS:
            columns = {numbers.tobytes(): numbers for numbers in _columns(value, made_by)}
            first = min((int(numbers.min()) for numbers in columns.values()), default=-1)
            for key in ((first, cuts), (operation.where, operation.name, cuts)):
                found.setdefault(key, {}).update(columns)
    groups = {(key[-1], *sorted(of)): of for key, of in found.items() if of}
    size = sum(value.array.size for value in target.parameters.values())
    runs = WORK // sum(CALL + sum(x.array.size for x in operation.results) for operation in target.operations)
    for (cuts, *_), columns in groups.items():
        runs -= factorial(len(cuts))
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


def _splits(operation: Operation, value: Value) -> bool:
    """Whether an operation takes parts of the last axis of a value."""
    rank = value.array.ndim
    return operation.name in SPLITS and rank > 0 and operation.settings.get("dim", 0) % rank == rank - 1


def _cuts(value: Value, users: Mapping[Value, Sequence[Operation]]) -> tuple[int, ...]:
    """Return the lengths of the parts that are taken of a value's last axis, also of parts, and behind what is computed of each element."""
    width = value.array.shape[-1]
    bounds, todo, seen = {0, width}, [(value, 0)], {value}
    while todo and len(seen) < MOST_VALUES:
        at, first = todo.pop()
        for user in users.get(at, ()):
            if _splits(user, at):
                start = first + ((user.settings.get("start") or 0) % at.array.shape[-1] if user.name == "slice" else 0)
                for result in user.results:
                    end = start + result.array.shape[-1]
                    bounds |= {start, end}
                    todo += [(result, start)] if result not in seen else []
                    start = end
            elif role_of(user) not in (Role.PRODUCT, Role.CONVOLUTION) and len(user.data) == len(user.results) == 1:
                result = user.results[0]
                todo += [(result, first)] if result.array.shape == at.array.shape and result not in seen else []
            seen.update(user.results)
    return tuple(int(n) for n in np.diff(sorted(bounds)))


def _columns(value: Value, made_by: Mapping[Value, Operation]) -> Iterator[Array]:
    """Yield the numbers of the elements, [n, columns], of each parameter that makes the columns of a value."""
    width = value.array.shape[-1]
    todo, seen = [value], {value}
    while todo and len(seen) < MOST_VALUES:
        operation = made_by.get(todo.pop())
        if operation is None:
            continue
        of_products = role_of(operation) in (Role.PRODUCT, Role.CONVOLUTION)
        for side in parameter_operands(operation):
            weight = operation.operands[side]
            if of_products and len(operation.data) == 1:
                found = [n.reshape(len(n), -1) for product in products([operation], side) for n in product.numbers]
            else:
                found = [n.reshape(-1, n.shape[-1]) for n in weight.elements if n.ndim]
            yield from (numbers for numbers in found if numbers.shape[1] == width and (numbers >= 0).all())
        if not of_products:
            near = [x for x in operation.data if x not in seen and x.array.shape[-1:] in ((width,), (1,))]
            todo += near
            seen.update(near)


def _orders(cuts: Sequence[int]) -> Iterator[Array]:
    """Yield the columns in the order of each order of their parts; not as they are."""
    parts = np.split(np.arange(sum(cuts)), np.cumsum(cuts)[:-1])
    for order in itertools.permutations(range(len(parts))):
        if list(order) != sorted(order):
            yield np.concatenate([parts[k] for k in order])
