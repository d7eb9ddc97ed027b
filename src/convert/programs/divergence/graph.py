"""How the values of a program depend on one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]


def on_the_way(program: Program, *outputs: str) -> Program:
    """Return the program with the operations alone that some outputs are computed from."""
    producer = program.made_by
    needed: set[Operation] = set()
    waiting = [program.outputs[output] for output in outputs]
    while waiting:
        operation = producer.get(waiting.pop())
        if operation is not None and operation not in needed:
            needed.add(operation)
            waiting.extend(operation.operands)
    return replace(program, operations=tuple(one for one in program.operations if one in needed))


def root(value: Value, producer: Mapping[Value, Operation]) -> Value:
    """Return the value whose elements this one has in another layout."""
    operation = producer.get(value)
    while operation is not None and kind_of(operation) == LAYOUT and len(operation.data) == 1:
        if operation.data[0].array.size != value.array.size:
            break
        value = operation.data[0]
        operation = producer.get(value)
    return value
