"""Find values that parameters meet as data although no input is part of them: constants, and parameters that are learned inputs.
Outputs of parameters alone get data to meet.

A constant: the state that a recurrent layer starts from, a table of sines before a layer. A learned input: the latents of a
Perceiver, the queries of a decoder, the probe of a pooling layer; layers are applied to them before an input takes part.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import COPIES
from convert.inference.meetings.sites import OUTPUT, role_of
from convert.programs.program import Operation, Program, Value

LEARNED_INPUT = "learned_input"  # an operation that gives a parameter as data


def constants_as_data(program: Program) -> Program:
    """Return the program with the constants that a product multiplies by parameters as data, and what is computed from them."""
    new: dict[Value, Value] = {}
    operations = []
    for operation in program.operations:
        operands = tuple(new.get(operand, operand) for operand in operation.operands)
        if _is_product(operation) and any(x.of_parameters for x in operands):
            operands = tuple(Value(x.array, data=True) if _is_like_data(x) else x for x in operands)
        operations.append(_with(operation, operands, new))
    return _changed(program, operations, new)


def learned_inputs(source: Program, target: Program) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of the source's learned inputs, and of the target's; none if the two have not as many of each size.

    A product of two matrices of parameters has an activation and a weight. In programs in which only one side has such products
    they make a weight: those of LoRA, merged on the other side.

    Of two parameters whose elements nothing mixed before, the activation is the first, as in ``x @ w``. Where the product is turned over
    (`_turned_over`) it is the last: Equinox's layers multiply a vector by ``w @ x``, under `vmap`. Sizes decide if they can.
    """
    for turned_over in (True, False):
        found = _learned(source, turned_over), _learned(target, turned_over)
        sizes = [
            sorted(program.parameters[name].array.size for name in names)
            for program, names in zip((source, target), found, strict=True)
        ]
        if sizes[0] == sizes[1]:
            return found
    return (), ()


def parameters_as_data(program: Program, names: Sequence[str]) -> Program:
    """Return the program with some parameters as data: an operation gives each of them before it is used."""
    return _as_data(program, [program.parameters[name] for name in names])


def tables_as_data(source: Program, target: Program) -> Program:
    """Return the target with the tables that it computes from its buffers alone, such as sines of positions, as data of a product.

    Only where a product of the source takes the same numbers, which are constants there.
    """
    made = {result for operation in source.operations for result in operation.results} | {*source.inputs.values()}
    constants = [
        x for operation in source.operations if _is_product(operation) for x in operation.data if x not in made
    ]
    known = [np.sort(x.array, axis=None) for x in constants]
    found: list[Value] = []
    for operation in target.operations:
        own = [x for x in operation.operands if x.leaves and x.leaves <= target.buffers]
        if own and _is_product(operation) and any(x.of_parameters for x in operation.operands if x not in own):
            sizes = [(x, np.sort(x.array, axis=None)) for x in own]
            found += [x for x, one in sizes if any(one.shape == two.shape and np.allclose(one, two) for two in known)]
    return _as_data(target, found)


def _as_data(program: Program, values: Sequence[Value]) -> Program:
    """Return the program with values of parameters as data: an operation gives each of them in front of what computes with it.

    A decoder's queries may be repeated before its encoder runs, where no value of the other program tells which leaf they are.
    """
    waiting = set(values)
    if not waiting:
        return program
    new: dict[Value, Value] = {}
    late: dict[Value, Operation] = {}  # what gives them or moves them, by its result, that nothing computes with so far
    operations: list[Operation] = []

    def append(operation: Operation) -> None:
        for operand in operation.operands:
            if (needed := late.pop(operand, None)) is not None:
                append(needed)
        operations.append(operation)

    for operation in program.operations:
        for value in dict.fromkeys(x for x in operation.operands if x in waiting):
            waiting.discard(value)
            new[value] = Value(value.array, data=True, leaves=value.leaves)
            nothing = Value(np.zeros(()), data=True)
            late[new[value]] = Operation(
                LEARNED_INPUT,
                (nothing, value),
                (new[value],),
                {},
                lambda arrays: [arrays[1]],
                operation.where,
                operation.module,
            )
        operands = tuple(new.get(operand, operand) for operand in operation.operands)
        made = _with(operation, operands, new)
        if made.name in COPIES and made.operands[0] in late and len(made.data) == 1:
            late[made.results[0]] = made
        else:
            append(made)
    while late:
        append(late.pop(next(iter(late))))
    return _changed(program, operations, new)


def outputs_as_data(program: Program) -> Program:
    """Return the program with each output of parameters alone, such as a deviation that no state changes, times random numbers.

    The numbers are those of the output's name, so that both programs have the same.
    """
    outputs, operations = dict(program.outputs), list(program.operations)
    made = program.made_by
    for name, value in program.outputs.items():
        if not value.of_parameters or value.array.dtype.kind != "f":
            continue
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        data = Value(np.asarray(rng.normal(size=value.array.shape)), data=True)
        outputs[name] = Value(np.asarray(value.array * data.array), data=True, leaves=value.leaves)
        by = made.get(value)
        operations.append(
            Operation(
                OUTPUT,
                (data, value),
                (outputs[name],),
                {},
                lambda arrays: [arrays[0] * arrays[1]],
                by.where if by is not None else "",
                by.module if by is not None else "",
            )
        )
    return replace(program, operations=tuple(operations), outputs=outputs)


def _learned(program: Program, turned_over: bool) -> list[str]:
    """Return the parameters to which layers are applied before an input takes part, in the order of their use.

    Args:
        program: the record.
        turned_over: whether the activation is the last operand of a product that is turned over.
    """
    made = program.made_by
    names = {value: name for name, value in program.parameters.items()}
    live: set[Value] = set()
    found: list[str] = []
    for index, operation in enumerate(program.operations):
        weights = [x for x in operation.operands if x.of_parameters and x not in live and x.array.ndim]
        ranks = [x.array.ndim for x in weights]
        applied = _is_product(operation) and len(weights) > 1 and max(ranks) > 1
        if applied and not any(x.data or x in live for x in operation.operands):
            last = turned_over and _turned_over(program.operations, index)
            root = _root(operation, made, last)
            if root is None:
                continue
            found.append(names[root])
            live.add(root)
            for before in program.operations[: index + 1]:
                _pass_on(before, live)
        else:
            _pass_on(operation, live)
    return found


def _pass_on(operation: Operation, live: set[Value]) -> None:
    if any(x in live for x in operation.operands):
        live.update(operation.results)


def _root(product: Operation, made: Mapping[Value, Operation], last: bool) -> Value | None:
    """Return the parameter that a product is applied to: a vector beside a matrix, as a first state is under `vmap`; or the one behind
    more operations than the other; or else the first, or the `last`.
    """
    operands = [x for x in product.operands if x.of_parameters][:2]
    steps = [(x.array.ndim == 1, *_walked(x, made)) for x in operands]
    _, value, _ = max(reversed(steps) if last else steps, key=lambda step: (step[0], step[2]))
    return value if value not in made else None


def _turned_over(operations: Sequence[Operation], index: int) -> bool:
    """Whether a product of the last axes of two operands has its first axis last in what is computed from it."""
    product = operations[index]
    if product.name != "dot_general" or product.settings["dimension_numbers"][0] != tuple(
        (x.array.ndim - 1,) for x in product.operands
    ):
        return False
    value = product.results[0]
    for operation in operations[index + 1 :]:
        if value not in operation.operands:
            continue
        if operation.name == "transpose":
            return bool(operation.settings["permutation"][0] != 0)
        if operation.name == "dot_general":
            return 0 in operation.settings["dimension_numbers"][0][operation.operands.index(value)]
        if len(operation.operands) > 1 or operation.results[0].array.shape != value.array.shape:
            return False
        value = operation.results[0]
    return False


def _walked(value: Value, made: Mapping[Value, Operation]) -> tuple[Value, int]:
    """Return the parameter that a value is computed from by norms and the like, and how many operations mix its elements."""
    count = 0
    while (operation := made.get(value)) is not None:
        count += not value.elements
        operands = [x for x in operation.operands if x.of_parameters]
        value = max(operands, key=lambda x: (not x.elements, len(np.unique(x.elements[0])) if x.elements else 0))
    return value, count


def _is_product(operation: Operation) -> bool:
    return role_of(operation) in (Role.PRODUCT, Role.CONVOLUTION)


def _is_like_data(value: Value) -> bool:
    """Whether a constant is more than a number, such as a time, which the other program may multiply the parameters by."""
    return value.constant and value.array.dtype.kind == "f" and value.array.size > 1


def _with(operation: Operation, operands: tuple[Value, ...], new: dict[Value, Value]) -> Operation:
    if operands == operation.operands:
        return operation
    results = tuple(Value(value.array, data=True, leaves=value.leaves) for value in operation.results)
    new.update(zip(operation.results, results, strict=True))
    return replace(operation, operands=operands, results=results)


def _changed(program: Program, operations: Sequence[Operation], new: dict[Value, Value]) -> Program:
    outputs = {name: new.get(value, value) for name, value in program.outputs.items()}
    return replace(program, operations=tuple(operations), outputs=outputs)
