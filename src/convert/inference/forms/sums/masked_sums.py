"""Sums of what a mask keeps, as sums of products with zeros and ones: a mean over the positions that are no padding.

One program chooses zeros where a position is hidden and adds up, the other multiplies by the mask, which is a matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from convert.inference.forms.elements import step
from convert.inference.forms.sums.masked_softmaxes import SUMS, kept_by
from convert.programs.program import Operation, Program, Value

CHOICES = frozenset(("where", "select_n", "masked_fill"))


def sums_of_chosen(program: Program) -> int:
    """Return how many values are added up with zeros in place of some elements."""
    users = program.users
    return sum(bool(_product(operation, users)) for operation in program.operations)


def chosen_as_products(program: Program) -> Program:
    """Return the program in which each such value is a product with the mask."""
    users = program.users
    made = [_product(operation, users) or [operation] for operation in program.operations]
    return replace(program, operations=tuple(operation for each in made for operation in each))


def _product(choice: Operation, users: Mapping[Value, Sequence[Operation]]) -> list[Operation]:
    """Return the mask and the product that give the result of an operation; none if it is no such value."""
    if choice.name not in CHOICES:
        return []
    (result,) = choice.results
    summed = users.get(result, [])
    if not summed or any(user.name not in SUMS for user in summed):
        return []
    for k, value in enumerate(choice.operands):
        others = [x for j, x in enumerate(choice.operands) if j != k]
        if (
            value.data
            and value.leaves
            and value.array.shape == result.array.shape
            and not any(x.leaves for x in others)
        ):
            mask = kept_by(choice, k)
            if mask is not None:
                return [mask, step(choice, "mul", (value, *mask.results), result, np.multiply)]
    return []
