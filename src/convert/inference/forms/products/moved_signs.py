"""A sign at another factor of a product: ``(-w) x`` is ``w (-x)`` and ``-(w x)``.

A decay is ``exp(-|w| r)`` in one program and ``exp(-r |w|)`` in the other. The source's record has the sign at one of the three places; the
others are computed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from convert.inference.derivation import Role
from convert.inference.forms.elements import before_moves
from convert.inference.forms.products.moved_factors import MovedFactor
from convert.inference.meetings.sites import parameter_operands, role_of
from convert.programs.divergence.kinds import kind_of
from convert.programs.program import Operation, Program, Value


def moved_signs(program: Program) -> Iterator[MovedFactor]:
    """Yield the products of elements with parameters that have a sign, with the sign at each other place."""
    made_by, users = program.made_by, program.users
    for index, operation in enumerate(program.operations):
        if role_of(operation) is not Role.SCALE or len(operation.operands) != 2 or len(operation.data) != 1:
            continue
        (result,) = operation.results
        has_sign = any(_is_negated(before_moves(x, made_by)[1]) for x in operation.operands)
        if not has_sign and not any(_is_negated(user) for user in users.get(result, ())):
            continue
        for side in parameter_operands(operation):
            for of_data, of_weight in ((-1, 1), (1, -1), (-1, -1)):
                signs = (of_data, of_weight) if side else (of_weight, of_data)
                operands = tuple(_times(x, sign) for x, sign in zip(operation.operands, signs, strict=True))
                made = replace(operation, operands=operands, results=(_times(result, of_data * of_weight),))
                yield MovedFactor(index, made, side)


def _is_negated(operation: Operation | None) -> bool:
    return operation is not None and kind_of(operation) == "negate"


def _times(value: Value, sign: int) -> Value:
    return replace(value, array=sign * value.array)
