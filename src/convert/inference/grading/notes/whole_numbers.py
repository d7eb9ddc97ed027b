"""Whole numbers of the JAX function that 32 bits do not hold, as those of a hash: JAX wraps them around, but in the runs of `infer`, which have 64 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
OF_BITS = {"bitcast_convert_type", "random_bits"}  # numbers that stand for bits, as many as the floats have
NAMED = 3  # places


def notes(source: Program) -> tuple[str, ...]:
    """Return where the JAX function has such numbers, in words; nothing where its 64 bits are enabled."""
    found: dict[str, float] = {}
    for place, largest in _places(source):
        found[place] = max(largest, found.get(place, 0.0))
    if not found:
        return ()
    import jax

    if jax.config.read("jax_enable_x64"):
        return ()
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return (
        f"whole numbers of the JAX function exceed 32 bits (up to {max(found.values()):.1e}) at {', '.join(list(found)[:NAMED])}{more}: "
        "JAX wraps them around unless jax_enable_x64 is set, and here it has 64 bits",
    )


def _places(program: Program) -> Iterator[tuple[str, float]]:
    """Yield the places of such numbers, each with the largest: an input, or an operation that is given or makes them."""
    inputs = {value: f"the input {name}" for name, value in program.inputs.items()}
    for value, name in inputs.items():
        if largest := _largest(value):
            yield name, largest
    of_bits: set[Value] = set()
    for operation in program.operations:
        if operation.name in OF_BITS or not of_bits.isdisjoint(operation.operands):
            of_bits.update(operation.results)
        elif largest := max(map(_largest, (*operation.results, *_constants(operation))), default=0.0):
            yield operation.where or f"`{operation.name}`", largest


def _constants(operation: Operation) -> Iterator[Value]:
    return (x for x in operation.operands if x.constant)


def _largest(value: Value) -> float:
    """Return the size of the largest whole number that 32 bits do not hold; 0 if there is none, or the ends of what 64 bits hold, which JAX has at 32 bits, too."""
    array = value.array
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8 or not array.size:
        return 0.0
    ends, narrow = np.iinfo(array.dtype), np.iinfo(f"{array.dtype.kind}4")
    beyond = array[((array < narrow.min) | (array > narrow.max)) & (array != ends.min) & (array != ends.max)]
    return float(np.abs(beyond.astype(np.float64)).max(initial=0.0))
