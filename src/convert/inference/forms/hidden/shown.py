"""Leave out what no output depends on: rows that a mask hides later, scores that a softmax hides, elements that nothing takes.

Two programs that compute the same may differ there, as where one runs a recurrent layer over the steps of each sequence, and another
over all steps, whose results a mask takes away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from convert.inference.forms.elements import ShownAlone
from convert.inference.forms.hidden.certain import certain_elements, hides
from convert.inference.forms.hidden.influence import HIDDEN, SHOWN, levels_of
from convert.inference.forms.hidden.perturbed import changes, others, run
from convert.programs.program import Array, Operation, Program, Value


def hidden_elements(program: Program) -> dict[Value, Array]:
    """Return which elements of the values of data no output depends on, of those that have such."""
    certain = certain_elements(program)
    levels: dict[Value, Array] = {}
    for value in program.outputs.values():
        levels[value] = np.full(value.array.shape, SHOWN, np.int8)
    for operation in reversed(program.operations):
        of_results = [levels.get(x, np.zeros(x.array.shape, np.int8)) for x in operation.results]
        used = any(level.any() for level in of_results)
        for k, operand in enumerate(operation.operands):
            if operand.data:
                known = levels.setdefault(operand, np.zeros(operand.array.shape, np.int8))
                if used:
                    levels[operand] = np.maximum(known, _levels(operation, k, of_results, certain))
    floats = (x for x in (*program.inputs.values(), *_results(program)) if x.data and x.array.dtype.kind == "f")
    every = {x: levels[x] == HIDDEN for x in floats if x in levels}
    found = {value: hidden for value, hidden in every.items() if hidden.any() and not hidden.all()}
    for operation in program.operations:
        if all(x not in levels or not levels[x].any() for x in operation.results):
            found.update(_made_of_hidden(operation, found))
    return found


def shown_alone(program: Program, hidden: Mapping[Value, Array]) -> Program:
    """Return the program with zeros in the elements that no output depends on."""
    new = {value: replace(value, array=np.where(of, 0.0, value.array)) for value, of in hidden.items()}

    def made(operation: Operation) -> Operation:
        operands, results = (tuple(new.get(x, x) for x in of) for of in (operation.operands, operation.results))
        masks = tuple(hidden.get(x) for x in operation.results)
        again = operation.again if all(mask is None for mask in masks) else ShownAlone(operation, masks)
        return replace(operation, operands=operands, results=results, again=again)

    return replace(
        program,
        inputs={name: new.get(value, value) for name, value in program.inputs.items()},
        operations=tuple(map(made, program.operations)),
        outputs={name: new.get(value, value) for name, value in program.outputs.items()},
    )


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


def _levels(operation: Operation, k: int, levels: Sequence[Array], certain: Mapping[Value, Array]) -> Array:
    """Return the levels of an operand; without trying what shows as a whole in any case."""
    operand, others = operation.operands[k], [x for j, x in enumerate(operation.operands) if j != k]
    plain = (
        all((level == SHOWN).all() for level in levels)
        and not any(hides(x, certain) for x in others)
        and not any(x in certain for x in operation.results)
        and sum(x.array.size for x in operation.results) >= operand.array.size
    )
    if plain or operand.array.dtype.kind != "f":
        return np.full(operand.array.shape, SHOWN, np.int8)
    return levels_of(operation, k, levels, certain)
