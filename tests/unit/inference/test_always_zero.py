"""What parameters meet: zeros alone, or numbers as well."""

from __future__ import annotations

from typing import Any

import numpy as np

from convert.inference.forms.hidden.always_zero import always_zero, met_by_parameters
from convert.programs.program import Array, Operation, Program, Value, parameter_values


def product(x: Value, w: Value) -> Operation:
    """The last axis of one times the first of the other."""
    axes = (((x.array.ndim - 1,), (0,)), ((), ()))
    result = Value(np.tensordot(x.array, w.array, 1), data=x.data, leaves=x.leaves | w.leaves)
    return Operation("dot_general", (x, w), (result,), {"dimension_numbers": axes}, lambda of: [np.tensordot(*of, 1)])


def met(columns: Array) -> list[bool]:
    """Whether each row of a matrix meets zeros alone behind a product of the data with these columns, which are constants."""
    rng = np.random.default_rng(0)
    parameters = parameter_values({"w": rng.normal(size=(3, 2))})
    x = Value(rng.normal(size=(4, 6, 5)), data=True)
    first = product(x, Value(columns))
    second = product(first.results[0], parameters["w"])
    program = Program(parameters, {"x": x}, (first, second), {"y": second.results[0]})
    alone: Any = met_by_parameters(program, always_zero(program)).zeros_alone
    return [bool(row.all()) for row in alone.reshape(3, 2)]


def test_data_times_a_matrix_of_zeros_and_ones() -> None:
    """Such as one that puts columns in another order: it was taken for data, of which the data is the matrix."""
    assert met(np.eye(5)[:, [3, 0, 4]]) == [False] * 3
    assert met(np.zeros((5, 3))) == [True] * 3  # the planted fault
