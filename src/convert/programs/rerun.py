"""Run a record again with other parameters and inputs. The result is the model's unless these values decide a branch or a loop of its code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from convert.numerics.real_numbers import as_real
from convert.programs.program import Array, Operation, Program, Value
from convert.programs.run_checks import require_numbers


def can_rerun(program: Program, inputs: Mapping[str, Array]) -> bool:
    """Whether the operations of a record are those of a run with these inputs: of the same shapes, and nothing hangs on values."""
    return not program.path_taken and fits(program, inputs)


def fits(program: Program, inputs: Mapping[str, Array]) -> bool:
    """Whether inputs have the shapes of those of a record."""
    known = {name: value.array.shape for name, value in program.inputs.items()}
    return known == {name: as_real(array).shape for name, array in inputs.items()}


def rerun(
    program: Program,
    parameters: Mapping[str, Array],
    inputs: Mapping[str, Array],
    kept: Callable[[Operation, Array], Array] = lambda _, array: array,
) -> Program:
    """Return the record of the same operations on other parameters and inputs.

    Args:
        program: for which `can_rerun` holds.
        parameters, inputs: by name; of the shapes and dtypes of its own.
        kept: (operation, a result of it) -> what the operations behind it are given.

    Raises:
        ConvertError: an output has NaN.
    """
    new: dict[Value, Value] = {}
    for own, given in ((program.parameters, parameters), (program.inputs, inputs)):
        new |= {
            value: replace(value, array=as_real(given[name]).astype(value.array.dtype)) for name, value in own.items()
        }
    operations: list[Operation] = []
    for operation in program.operations:
        if all(operand.constant for operand in operation.operands):
            operations.append(operation)
            continue
        operands = tuple(new.get(operand, operand) for operand in operation.operands)
        arrays = [kept(operation, array) for array in operation.again([operand.array for operand in operands])]
        results = tuple(replace(value, array=array) for value, array in zip(operation.results, arrays, strict=True))
        new |= zip(operation.results, results, strict=True)
        operations.append(replace(operation, operands=operands, results=results))
    made = replace(
        program,
        parameters={name: new[value] for name, value in program.parameters.items()},
        inputs={name: new[value] for name, value in program.inputs.items()},
        operations=tuple(operations),
        outputs={name: new.get(value, value) for name, value in program.outputs.items()},
    )
    require_numbers(made)
    return made
