"""Weight norms of the module that the JAX function has not got, or has for other axes: ``g v / |v|`` is v where g is the length of each row of v."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from convert.inference.forms.elements import are_same, with_new
from convert.programs.program import Array, Operation, Program, Value

NORM = "_weight_norm_interface"  # of torch: (v, g, axis) -> v * g / |v|, and |v|


class WeightNorm(NamedTuple):
    """Names of the two parameters: v and g."""

    direction: str
    scale: str


def weight_norms(program: Program) -> list[WeightNorm]:
    """Return the weight norms of a module's parameters."""
    names = {value: name for name, value in program.parameters.items()}
    found = (_norm_of(operation, names) for operation in program.operations)
    return list(dict.fromkeys(norm for norm in found if norm is not None))


def _norm_of(operation: Operation, names: Mapping[Value, str]) -> WeightNorm | None:
    """Return the weight norm that an operation computes, in one step or as ``v * (g / |v|)``; None where it is none of parameters."""
    if operation.name == NORM:
        v, g = (names.get(x) for x in operation.operands[:2])
        return WeightNorm(v, g) if v is not None and g is not None else None
    if operation.name != "mul" or len(operation.operands) != 2:
        return None
    for value, factor in (operation.operands, operation.operands[::-1]):
        others = factor.leaves - value.leaves
        if value in names and factor.of_parameters and value.leaves < factor.leaves:
            return WeightNorm(names[value], *others) if len(others) == 1 else None
    return None


def norms_of(operation: Operation, program: Program, *, alone: bool) -> frozenset[WeightNorm]:
    """Return the weight norms of an operation's weight; unless `alone`, those of all that compute as it does, too, such as all transposed convolutions."""
    met = [one for one in program.operations if one.data and (one is operation or _kind(one) == _kind(operation))]
    of_kind = frozenset[str]().union(*(x.leaves for one in met for x in one.operands if x.of_parameters))
    own = frozenset[str]().union(*(x.leaves for x in operation.operands if x.of_parameters))
    return frozenset(norm for norm in weight_norms(program) if norm.direction in (own if alone else of_kind))


def _kind(operation: Operation) -> tuple[str, bool]:
    return operation.name, bool(operation.settings.get("transposed"))


def normalises_parameters(program: Program) -> bool:
    """Whether a program computes a length, a sum or the like of parameters alone."""
    results = (operation.results[0] for operation in program.operations)
    return any(value.of_parameters and not value.elements for value in results)


def with_lengths(program: Program, norms: Collection[WeightNorm]) -> dict[str, Array]:
    """Return both parameters of some weight norms by name, the scale as the lengths of the rows of the direction."""
    found: dict[str, Array] = {}
    for norm in norms:
        found[norm.direction] = program.parameters[norm.direction].array
        found[norm.scale] = lengths(found[norm.direction], program.parameters[norm.scale].array.shape)
    return found


def lengths(direction: Array, shape: tuple[int, ...]) -> Array:
    """Return the lengths of the slices of a direction, one for each element of a scale of this shape."""
    whole = len(shape) != direction.ndim
    summed = tuple(axis for axis in range(direction.ndim) if whole or shape[axis] == 1)
    return np.asarray(np.sqrt(np.sum(np.square(direction), summed, keepdims=True))).reshape(shape)


def without_weight_norms(program: Program) -> Program:
    """Return the program with the direction in place of each weight that is equal to it, as where its scale is the lengths."""
    names = {value: name for name, value in program.parameters.items()}
    new: dict[Value, Value] = {}
    operations: list[Operation] = []
    for operation in program.operations:
        norm = _norm_of(operation, names)
        direction = None if norm is None else program.parameters[norm.direction]
        if direction is not None and are_same(direction.array, operation.results[0].array):
            new[operation.results[0]] = direction
            continue
        made = with_new(operation, new)
        new.update({old: x for old, x in zip(operation.results, made.results, strict=True) if x is not old})
        operations.append(made)
    return replace(program, operations=tuple(operations)) if new else program
