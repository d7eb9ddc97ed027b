"""Whether the columns of a layer in another order make up for a difference: both programs split them into axes, in another order.

A matrix that a layer computes for each row, and that the target multiplies from the other side, is one: the rows of the layer's own weight
give that order, also behind functions of single elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import MOVES
from convert.inference.meetings.sites import role_of
from convert.numerics.magnitude import relative_error
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.rerun import Change, Rerun
from convert.programs.fingerprint import EXACT
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
MOST_AXES = 5  # of the columns, which are tried in all orders
MOST_LAYERS = 4  # in front of a difference, the nearest


def are_split_in_another_order(repair: Repair, target: Program) -> bool:
    """Whether the target gives what the source does where the columns of a layer in front are in another order.

    The orders are those of the axes that either program splits the columns into.

    Args:
        repair: the first one.
        target: with the weights that were found or guessed.
    """
    made = repair.target[-1].results[0] if repair.target else next(iter(repair.operands), None)
    ends = [k for k, operation in enumerate(target.operations) if made in operation.results]
    if made is None or not ends or repair.want.size != made.array.size:
        return False
    program = replace(target, operations=target.operations[: ends[0] + 1])
    operands = (*repair.operands, *repair.source_operands, *(x for one in repair.source for x in one.operands))
    shapes = dict.fromkeys(x.array.shape for x in operands)
    want = repair.want.reshape(made.array.shape)
    layers = [x for x in _layers(program) if any(prod(shape) == x.array.size for shape in shapes)]
    for layer in layers[-MOST_LAYERS:]:
        for order in _orders(layer.array.shape[-1], shapes):
            rerun = Rerun(program)
            try:
                list(rerun.put(Change({layer: np.ascontiguousarray(layer.array[..., order])})))
            except ValueError:  # an operation does not take it
                continue
            if relative_error(rerun.array(made), want) <= EXACT:
                return True
    return False


def _layers(program: Program) -> Iterator[Value]:
    """Yield what the layers of a program give, with their biases."""
    users = program.users
    for operation in program.operations:
        if role_of(operation) is Role.PRODUCT and len(operation.data) == 1 and _has_parameters(operation):
            yield _with_bias(operation.results[0], users)


def _with_bias(value: Value, users: Mapping[Value, Sequence[Operation]]) -> Value:
    """Return the sum of what a layer gives and its bias; what it gives where it has none."""
    behind, width = value, value.array.shape[-1:]
    while len(users.get(behind, ())) == 1 and behind.array.shape[-1:] == width:
        user = users[behind][0]
        if role_of(user) is Role.SHIFT and _has_parameters(user):
            return user.results[0]
        if user.name not in MOVES:
            break
        behind = user.results[0]
    return value


def _has_parameters(operation: Operation) -> bool:
    return any(x.of_parameters for x in operation.operands)


def _orders(width: int, shapes: Iterable[tuple[int, ...]]) -> Iterator[Array]:
    """Yield the orders of columns that the axes give into which shapes split them; not as they are."""
    seen = {np.arange(width).tobytes()}
    for shape in shapes:
        sizes = [size for size in shape if size > 1]
        for count in range(2, min(len(sizes), MOST_AXES) + 1):
            for axes in itertools.combinations(sizes, count):
                for order in itertools.permutations(range(count)) if prod(axes) == width else ():
                    columns = np.arange(width).reshape(axes).transpose(order).ravel()
                    if columns.tobytes() not in seen:
                        seen.add(columns.tobytes())
                        yield columns
