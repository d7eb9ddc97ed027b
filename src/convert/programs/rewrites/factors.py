"""Move a number of the target's code into the weights that the source stores multiplied by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from convert.numerics.compare import difference
from convert.programs.divergence.kinds import kind_of
from convert.programs.divergence.rerun import Change, Rerun
from convert.programs.divergence.shared_values import FEW, same_numbers
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
SAME = 1e-9  # relative error of the output up to which the program computes the same
MOST_LINES = 12  # of the code that multiply by a number


def with_factors_of(source: Program, target: Program, output: str) -> Program | None:
    """Return the target with the weights as the source has them, and without the multiplication by what these are multiplied by.

    It computes the same. MaxText's queries, for example, are divided by the square root of a head's width in the checkpoint, and the
    scores in the target's code. None if there are no such weights, or no such number.
    """
    for factor, names in _factors(source, target).items():
        weights = {target.parameters[name]: target.parameters[name].array * factor for name in names}
        for operands in _numbers(target, factor):
            rerun = Rerun(target)
            try:
                list(rerun.put(Change(weights, operands)))
            except ValueError:
                continue
            value = target.outputs[output]
            if difference(rerun.array(value), value.array).relative <= SAME:
                return _rewritten(target, rerun, operands)
    return None


def _factors(source: Program, target: Program) -> dict[float, list[str]]:
    """Return factor -> the target's parameters that are, times the factor, parameters of the source, and are none without it."""
    found: dict[float, list[str]] = {}
    leaves: dict[int, list[Array]] = {}
    for leaf in source.parameters.values():
        for array in (leaf.array, *_stacked(leaf.array)):
            leaves.setdefault(array.size, []).append(array)
    for name, value in target.parameters.items():
        norm = float(np.linalg.norm(value.array))
        beside = leaves.get(value.array.size, []) if value.array.size >= FEW and norm else []
        factors = [round(float(np.linalg.norm(x)) / norm, 6) for x in beside]
        if any(factor == 1 and same_numbers(value.array, x) for factor, x in zip(factors, beside, strict=True)):
            continue
        right = [f for f, x in zip(factors, beside, strict=True) if f and same_numbers(value.array * f, x)]
        if right:
            found.setdefault(right[0], []).append(name)
    return found


def _stacked(array: Array) -> Iterator[Array]:
    """Yield what stands at each index of an axis along which layers may be stacked."""
    for axis in range(array.ndim if array.ndim > 2 else 0):
        yield from (np.take(array, k, axis) for k in range(array.shape[axis]))


def _numbers(target: Program, factor: float) -> Iterator[Mapping[tuple[int, int], Array]]:
    """Yield, for each line that multiplies by the factor, ones in its place."""
    lines: dict[tuple[str, str], dict[tuple[int, int], Array]] = {}
    for at, one in enumerate(target.operations):
        kind = kind_of(one)
        if kind not in ("multiply", "divide") or len(one.data) != 1:
            continue
        for k, value in enumerate(one.operands):
            if value.constant and value.array.size == 1 and (kind == "multiply" or k == 1):
                number = value.array / factor if kind == "multiply" else value.array * factor
                if np.allclose(number, 1, rtol=1e-6):
                    lines.setdefault((one.name, one.where), {})[at, k] = np.ones_like(number)
    yield from list(lines.values())[:MOST_LINES]


def _rewritten(program: Program, rerun: Rerun, operands: Mapping[tuple[int, int], Array]) -> Program:
    """Return the program with the values of a rerun in the place of its own."""
    made: dict[Value, Value] = {}

    def now(value: Value) -> Value:
        if value not in made:
            array = rerun.array(value)
            made[value] = value if array is value.array else replace(value, array=array)
        return made[value]

    def again(at: int, one: Operation) -> Operation:
        given = [Value(operands[at, k]) if (at, k) in operands else now(value) for k, value in enumerate(one.operands)]
        return replace(one, operands=tuple(given), results=tuple(map(now, one.results)))

    return replace(
        program,
        parameters={name: now(value) for name, value in program.parameters.items()},
        operations=tuple(again(at, one) for at, one in enumerate(program.operations)),
        outputs={name: now(value) for name, value in program.outputs.items()},
    )
