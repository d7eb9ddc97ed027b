"""Run the record of a program again, operation by operation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from convert.programs.program import Array, Operation, Program, Value


def replay(program: Program, inputs: Mapping[str, Array] | None = None) -> dict[str, Array]:
    """Run each operation on what the replay has computed; return the outputs. Other inputs may take the place of the program's."""
    arrays: dict[int, Array] = {
        id(value): (inputs or {}).get(name, value.array) for name, value in program.inputs.items()
    }

    def of(value: Value) -> Array:
        return arrays.get(id(value), value.array)

    for operation in program.operations:
        found = operation.again([of(operand) for operand in operation.operands])
        assert len(found) == len(operation.results), operation.name
        arrays |= {id(value): array for value, array in zip(operation.results, found, strict=True)}
    return {name: of(value) for name, value in program.outputs.items()}


def told(operation: Operation) -> str:
    return f"{operation.name} at {operation.where} in {operation.module}"


def assert_again(program: Program) -> None:
    """Assert that each operation, run again on its operands, gives its results, and that the operations are connected."""
    known = {id(value) for value in [*program.parameters.values(), *program.inputs.values()]}
    before = [operation.results[0].array.copy() for operation in program.operations]
    for operation in program.operations:
        for operand in operation.operands:
            assert operand.constant or id(operand) in known, f"{told(operation)} reads a value that nothing gave"
        found = operation.again([operand.array for operand in operation.operands])
        assert len(found) == len(operation.results), told(operation)
        for value, array in zip(operation.results, found, strict=True):
            assert array.dtype == value.array.dtype and array.shape == value.array.shape, told(operation)
            scale = np.abs(value.array[np.isfinite(value.array)]).max(
                initial=0
            )  # sums take another order in other strides
            np.testing.assert_allclose(array, value.array, 1e-12, 1e-13 * scale, err_msg=told(operation))
        known |= {id(value) for value in operation.results}
    for operation, array in zip(program.operations, before, strict=True):
        np.testing.assert_array_equal(operation.results[0].array, array, err_msg=f"{told(operation)} was written to")


def assert_elements(program: Program) -> None:
    """Assert that values which parameters only move into place hold the elements that `Value.elements` names."""
    numbers = np.concatenate([value.array.ravel() for value in program.parameters.values()] or [np.zeros(0)])
    computed = {id(value) for value in program.parameters.values()}
    for operation in program.operations:
        for value in operation.results:
            assert all(part.shape == value.array.shape for part in value.elements), told(operation)
            if (
                len(value.elements) == 1
                and operation.name in LAYOUT
                and all(id(operand) in computed for operand in operation.operands if operand.leaves)
            ):
                computed.add(id(value))
                (part,) = value.elements
                np.testing.assert_array_equal(value.array[part >= 0], numbers[part[part >= 0]], err_msg=told(operation))


LAYOUT = (
    "t",
    "transpose",
    "permute",
    "view",
    "expand",
    "unsqueeze",
    "squeeze",
    "slice",
    "select",
    "split",
    "cat",
    "index",
)
