"""Which columns a matrix has whose product is added to another one: those of the other one.

Gates may stand in another order on the two sides, with a norm over all of them in front of what tells them apart. Then each order of
one matrix fits, and of the other matrix only the same one: ``x W[:, order] + h U[:, order]`` is ``(x W + h U)[:, order]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate
from convert.inference.candidates.context import Context
from convert.inference.derivation import Role
from convert.inference.forms.elements import MOVES
from convert.inference.forms.sums.reordered import SUMS
from convert.inference.meetings.sites import parameter_operands, products, role_of
from convert.inference.proposals.low_rank import is_value
from convert.programs.program import REFUSALS, Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
MAX_STEPS = 8  # operations between a product and the sum


@dataclass(frozen=True, eq=False)
class OtherTerm:
    """A product that is known and that another one is added to.

    Attributes:
        total: the operation that adds both.
        value: what is added there.
        product: the operation that gives it, with biases and layouts behind it.
    """

    total: Operation
    value: Value
    product: Operation


def other_term(context: Context, operation: Operation) -> OtherTerm | None:
    """Return the product that the target adds to what an operation gives, if its weight is known."""
    value = operation.results[0]
    for _ in range(MAX_STEPS):
        users = context.users(value)
        if len(users) != 1:
            return None
        (user,) = users
        if user.name.removesuffix("_") in SUMS and len(user.data) == len(user.operands) == 2:
            others = [x for x in user.operands if x is not value]
            made = _product(context, others[0]) if len(others) == 1 else None
            return None if made is None else OtherTerm(user, others[0], made)
        if not _keeps_columns(user, value):
            return None
        value = user.results[0]
    return None


def columns(context: Context, other: OtherTerm) -> Iterator[Array]:
    """Yield which column of a product of the source each column of a known product of the target is."""
    (side,) = parameter_operands(other.product)
    found = list(products([other.product], side))
    if len(found) != 1 or len(found[0].numbers) != 1:
        return
    row = context.origins[found[0].numbers[0].reshape(len(found[0].value), -1)[0]]
    if (row < 0).any():
        return
    leaf, seen = context.source.leaf(int(row[0])), set[bytes]()
    for product, meeting in context.source.products:
        if leaf not in meeting.weight.leaves or len(product.numbers) != 1:
            continue
        flat = product.numbers[0].reshape(len(product.value), -1)
        for of in flat[(flat == row[0]).any(1)][:1]:
            order = np.argsort(of, kind="stable")
            at = order[np.minimum(np.searchsorted(of, row, sorter=order), len(of) - 1)]
            if np.array_equal(of[at], row) and at.tobytes() not in seen:
                seen.add(at.tobytes())
                yield at


def gives_value(context: Context, operation: Operation, other: OtherTerm, candidate: Candidate) -> bool:
    """Whether the sum with a candidate for the weight of an operation is a value of the source."""
    one = context.replay.value(other.value)
    with context.replay.assigned(candidate.changes):
        try:
            two = context.replay.run(operation)[0].reshape(one.shape)
            total = other.total.again([one, two] if other.total.operands[0] is other.value else [two, one])[0]
        except REFUSALS:
            return False
    return not np.isnan(total).any() and is_value(context, np.asarray(total))


def _product(context: Context, value: Value) -> Operation | None:
    """Return the product of data with known parameters that gives a value, up to biases and layouts."""
    for _ in range(MAX_STEPS):
        made = context.made_by(value)
        if made is None:
            return None
        sides: Sequence[int] = parameter_operands(made)
        if role_of(made) is Role.PRODUCT:
            whole = len(sides) == 1 and len(made.data) == 1 and len(made.operands) == 2
            return made if whole and context.replay.known(made.operands[sides[0]]) else None
        if len(made.data) != 1 or not _keeps_columns(made, made.data[0]):
            return None
        value = made.data[0]
    return None


def _keeps_columns(operation: Operation, value: Value) -> bool:
    """Whether an operation moves rows alone, or adds parameters."""
    if operation.results[0].array.shape[-1:] != value.array.shape[-1:]:
        return False
    return operation.name in MOVES or (role_of(operation) is Role.SHIFT and len(operation.data) == 1)
