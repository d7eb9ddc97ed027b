"""Add a bias to the rows of a table before they are looked up: ``table[i] + b`` is ``(table + b)[i]``.

A layer of one-hot rows has a bias, and the embedding of the other program holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import step
from convert.inference.forms.sums.biases import Term, Terms, is_whole
from convert.inference.meetings.sites import role_of
from convert.programs.program import REFUSALS, Array, Operation, Program, Value


def biased_tables(program: Program) -> int:
    """Return how many biases are added to the rows of tables."""
    terms = Terms(program)
    return sum(len({bias.value for _, _, bias in _biases(program, one, terms)}) for one in program.operations)


def biases_in_tables(program: Program) -> Program:
    """Return the program with a further lookup for each bias that is added to the rows of a table: of the table with the bias."""
    terms = Terms(program)
    operations: list[Operation] = []
    for operation in program.operations:
        for lookup, rows, bias in _biases(program, operation, terms):
            operations += _with_bias(operation, lookup, rows, bias)
        operations.append(operation)
    return replace(program, operations=tuple(operations))


def _biases(program: Program, operation: Operation, terms: Terms) -> Iterator[tuple[Operation, Term, Term]]:
    """Yield the lookups whose rows are terms of a sum that an operation adds a bias to, with both terms."""
    found = terms.of(operation)
    for bias in found:
        if bias.value not in operation.operands or not (_is_one(bias.value) and is_whole(program, bias.value)):
            continue
        for rows in found:
            lookup = program.made_by.get(rows.value)
            if lookup is not None and role_of(lookup) is Role.LOOKUP:
                yield lookup, rows, bias


def _is_one(value: Value) -> bool:
    """Whether a value is a parameter, or elements of one."""
    return value.of_parameters and len(value.elements) == 1


def _with_bias(operation: Operation, lookup: Operation, looked_up: Term, bias: Term) -> Iterator[Operation]:
    """Yield the operations that add a bias to a table, and look its rows up; none where it is not the same for each row."""
    tables = [x for x in lookup.operands if _is_one(x)]
    if len(tables) != 1 or tables[0].array.ndim < 2 or len(lookup.results) != 1:
        return
    (table,), width = tables, tables[0].array[0].size
    own = _of_each_feature(looked_up.places % width, bias.places, width)
    if own is None or lookup.results[0].array.shape[-1] != table.array.shape[-1]:
        return

    def added(rows: Array, vector: Array) -> Array:
        return rows + vector.ravel()[own].reshape(rows.shape[1:])

    features = np.broadcast_to(bias.value.elements[0].ravel()[own].reshape(table.array.shape[1:]), table.array.shape)
    both = Value(
        added(table.array, bias.value.array),
        leaves=table.leaves | bias.value.leaves,
        elements=(table.elements[0], features),
    )
    operands = tuple(both if x is table else x for x in lookup.operands)
    try:
        rows = np.asarray(lookup.again([x.array for x in operands])[0])
    except REFUSALS:
        return
    yield step(operation, "bias", (table, bias.value), both, added)
    yield replace(lookup, operands=operands, results=(Value(rows, data=True, leaves=both.leaves),))


def _of_each_feature(features: Array, places: Array, width: int) -> Array | None:
    """Return the element of a bias that is added to each feature; None where that depends on the row."""
    found = np.full(width, -1)
    found[features] = places
    return found if (found >= 0).all() and (found[features] == places).all() else None
