"""Leave out what no output depends on: rows that a mask hides later, scores that a softmax hides, elements that nothing takes.

Two programs that compute the same may differ there, as where one runs a recurrent layer over the steps of each sequence, and another
over all steps, whose results a mask takes away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from convert.inference.forms.elements import COPIES, MOVES, ShownAlone, elements_moved
from convert.inference.forms.hidden.certain import Certain, certain_elements, hides
from convert.inference.forms.hidden.influence import HIDDEN, SHOWN, levels_of
from convert.inference.forms.hidden.perturbed import changes, others, run
from convert.programs.program import Array, Operation, Program, Value

CHOSEN = frozenset(
    ("mul", "mul_", "where", "select_n")
)  # operations in which a constant may hide elements of another operand

FILLED = frozenset(("tril", "triu", "masked_fill"))  # operations that put a number in the place of elements


def hidden_elements(program: Program, *, masks: bool = True) -> dict[Value, Array]:
    """Return which elements of the values of data no output depends on, of those that have such and others.

    Args:
        masks: whether it counts that masks and zeros hide elements; otherwise only that nothing takes them.
    """
    levels = _levels_of_values(program, certain_elements(program) if masks else None)
    floats = (x for x in (*program.inputs.values(), *_results(program)) if x.data and x.array.dtype.kind == "f")
    every = {x: levels[x] == HIDDEN for x in floats if x in levels}
    found = {value: hidden for value, hidden in every.items() if hidden.any() and not hidden.all()}
    for operation in program.operations:
        if all(x not in levels or not levels[x].any() for x in operation.results):
            found.update(_made_of_hidden(operation, found))
    return found


def hidden_parameters(program: Program) -> dict[str, Array]:
    """Return which elements of each parameter no output depends on, as constants multiply them by zeros or choose others, or nothing takes them.

    Those of buffers count as shown; an element that meets a zero of data may be named as well.
    """
    known = _with_constant_buffers(program)
    levels = _levels_backwards(known, lambda x: x.data or bool(x.leaves), _levels_by_constants)
    return {
        name: np.zeros(value.array.shape, bool)
        if name in program.buffers
        else levels.get(value, np.full(value.array.shape, HIDDEN)) == HIDDEN
        for name, value in known.parameters.items()
    }


def without_idle_operations(program: Program) -> Program:
    """Return the program with zeros in place of results that no output takes an element of, made without parameters.

    Where a norm is applied to the results of all layers, and the last of them is taken, the others are such.
    """
    levels, new = _levels_of_values(program, None), dict[Value, Value]()
    operations = []
    for operation in program.operations:
        made, data = operation.results, operation.data
        floats = all(x.data and x.array.dtype.kind == "f" for x in made)
        if data and floats and not any(x in levels and levels[x].any() for x in made):
            zeros = tuple(Value(np.zeros(x.array.shape), data=True) for x in made)
            new.update(zip(made, zeros, strict=True))
            again = partial(_given, zeros)
            operation = replace(
                operation, name="zeros_like", operands=data[:1], results=zeros, settings={}, again=again
            )
        elif any(x in new for x in operation.operands):
            operation = replace(operation, operands=tuple(new.get(x, x) for x in operation.operands))
        operations.append(operation)
    return replace(program, operations=tuple(operations))


def _with_constant_buffers(program: Program) -> Program:
    """Return the program with its buffers as constants, such as a mask that is saved."""
    every = {*program.parameters.values(), *program.inputs.values(), *_results(program)}
    new = {x: replace(x, leaves=x.leaves - program.buffers) for x in every if x.leaves & program.buffers}

    return _with_values(program, new, lambda operation: operation.again)


def _with_values(
    program: Program,
    new: Mapping[Value, Value],
    again: Callable[[Operation], Callable[[Sequence[Array]], Sequence[Array]]],
) -> Program:
    """Return the program with other values in place of its own.

    Args:
        again: operation -> what runs it on other operands.
    """

    def known(values: Mapping[str, Value]) -> dict[str, Value]:
        return {name: new.get(value, value) for name, value in values.items()}

    def made(operation: Operation) -> Operation:
        operands, results = (tuple(new.get(x, x) for x in of) for of in (operation.operands, operation.results))
        return replace(operation, operands=operands, results=results, again=again(operation))

    parameters, inputs, outputs = map(known, (program.parameters, program.inputs, program.outputs))
    operations = tuple(map(made, program.operations))
    return replace(program, parameters=parameters, inputs=inputs, operations=operations, outputs=outputs)


def _levels_of_values(program: Program, certain: Certain | None) -> dict[Value, Array]:
    """Return the level of each element of the values of data that operations take; without what is certain, as operations move them."""
    return _levels_backwards(
        program, lambda x: x.data, lambda operation, k, levels: _levels(operation, k, levels, certain)
    )


def _levels_backwards(
    program: Program,
    followed: Callable[[Value], bool],
    levels_of_operand: Callable[[Operation, int, list[Array]], Array],
) -> dict[Value, Array]:
    """Return the level of each element of values that operations take, beginning with the outputs.

    Args:
        followed: whether a value is one of them.
        levels_of_operand: (operation, position of the operand, levels of its results) -> levels of the operand.
    """
    levels: dict[Value, Array] = {}
    for value in program.outputs.values():
        levels[value] = np.full(value.array.shape, SHOWN, np.int8)
    for operation in reversed(program.operations):
        of_results = [levels.get(x, np.zeros(x.array.shape, np.int8)) for x in operation.results]
        used = any(level.any() for level in of_results)
        for k, operand in enumerate(operation.operands):
            if followed(operand):
                known = levels.setdefault(operand, np.zeros(operand.array.shape, np.int8))
                if used:
                    levels[operand] = np.maximum(known, levels_of_operand(operation, k, of_results))
    return levels


def shown_alone(program: Program, hidden: Mapping[Value, Array]) -> Program:
    """Return the program with zeros in the elements that no output depends on."""
    new = {value: replace(value, array=np.where(of, 0.0, value.array)) for value, of in hidden.items()}

    def again(operation: Operation) -> Callable[[Sequence[Array]], Sequence[Array]]:
        masks = tuple(hidden.get(x) for x in operation.results)
        return operation.again if all(mask is None for mask in masks) else ShownAlone(operation, masks)

    return _with_values(program, new, again)


def _given(values: Sequence[Value], _: Sequence[Array]) -> list[Array]:
    return [value.array for value in values]


def _results(program: Program) -> Iterator[Value]:
    return (value for operation in program.operations for value in operation.results)


def _made_of_hidden(operation: Operation, hidden: Mapping[Value, Array]) -> Iterator[tuple[Value, Array]]:
    """Yield which elements of unused results depend on hidden ones, as those of another form of what is used."""
    if not any(x in hidden for x in operation.operands):
        return
    arrays = [x.array for x in operation.operands]
    *_, drawn = zip(
        *(others(x.array, hidden.get(x, np.zeros((), bool)), k) for k, x in enumerate(operation.operands)), strict=True
    )
    before, after = run(operation, arrays), run(operation, drawn)
    for k, result in enumerate(operation.results):
        if before is not None and after is not None and result.array.dtype.kind == "f":
            changed = changes(before[k], after[k])
            if changed.any():
                yield result, changed


def _levels(operation: Operation, k: int, levels: Sequence[Array], certain: Certain | None) -> Array:
    """Return the levels of an operand; without trying what shows as a whole in any case."""
    operand, others = operation.operands[k], [x for j, x in enumerate(operation.operands) if j != k]
    plain = (
        all((level == SHOWN).all() for level in levels)
        and sum(x.array.size for x in operation.results) >= operand.array.size
    )
    if certain is None:
        plain = plain and operation.name not in MOVES
    else:
        apart = any(hides(x, certain) for x in others) or any(x in certain.same for x in operation.results)
        plain = plain and not apart
    if plain or operand.array.dtype.kind != "f":
        return np.full(operand.array.shape, SHOWN, np.int8)
    return levels_of(operation, k, levels, certain or Certain())


def _levels_by_constants(operation: Operation, k: int, levels: Sequence[Array]) -> Array:
    """Return the levels of an operand, of which constants alone hide elements: zeros that multiply them, a choice, and places that are taken."""
    operand, others = operation.operands[k], [x for j, x in enumerate(operation.operands) if j != k]
    whole = operation.name in COPIES and not others and operation.results[0].array.size >= operand.array.size
    if whole and (levels[0] == SHOWN).all():
        return np.full(operand.array.shape, SHOWN, np.int8)
    at = elements_moved(operation) if operation.name in MOVES and k == 0 and all(x.constant for x in others) else None
    if at is not None:
        found = np.zeros(operand.array.size, np.int8)
        for places, level in zip(at, levels, strict=True):
            np.maximum.at(found, places, level.ravel())
        return found.reshape(operand.array.shape)
    hides_some = operation.name in CHOSEN and any(x.constant and not x.array.all() for x in others)
    hides_some = hides_some or operation.name.removesuffix("_") in FILLED
    looked_up = any(x.data and x.array.dtype.kind != "f" for x in others)  # other inputs take other elements
    if looked_up or operand.array.dtype.kind != "f" or not (hides_some or any((x != SHOWN).any() for x in levels)):
        return np.full(operand.array.shape, SHOWN, np.int8)
    return levels_of(operation, k, levels, Certain())
