"""Refuse runs that cannot be compared: outputs with NaN, and outputs that differ between two runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.programs.program import Array, Program

REPEATABLE = 1e-9  # relative; runs differ by this much if threads add in another order


def require_numbers(program: Program) -> None:
    """Check that the outputs are numbers.

    Raises:
        ConvertError: one has NaN. The finding names the first operation that makes NaN of numbers; its `data` has the name of the
            operation and the parameters that it is computed from.
    """
    bad = next((name for name, value in program.outputs.items() if np.isnan(value.array).any()), None)
    if bad is None:
        return
    for operation in program.operations:
        made = any(np.isnan(value.array).any() for value in operation.results)
        if made and not any(np.isnan(value.array).any() for value in operation.operands):
            leaves = sorted(frozenset[str]().union(*(operand.leaves for operand in operation.operands)))
            raise ConvertError(
                Finding(
                    "output-not-a-number",
                    f"the output {bad!r} has NaN; the first comes from `{operation.name}`",
                    path=operation.where,
                    fix="use weights and inputs on which the function is defined",
                    data={"operation": operation.name, "module": operation.module, "leaves": leaves},
                )
            )
    given = [repr(name) for name, value in program.inputs.items() if np.isnan(value.array).any()]
    problem = f"the output {bad!r} has NaN" + (f", and so has the input {', '.join(given)}" if given else "")
    fix = "use weights and inputs that are numbers"
    raise ConvertError(Finding("output-not-a-number", problem, fix=fix, data={"leaves": []}))


def require_same_outputs(
    one: Mapping[str, Array],
    other: Mapping[str, Array],
    fix: str = "switch dropout off, and fix the seeds of random numbers",
) -> None:
    """Check that two runs gave the same outputs.

    Args:
        fix: what to do where they are others.

    Raises:
        ConvertError: one differs.
    """
    for name, first in one.items():
        second = other[name]
        if first.shape != second.shape:
            expected, got = f"shape {list(first.shape)}, as in the first run", f"{list(second.shape)} in the second"
        elif not (difference := _difference(first, second)) <= REPEATABLE:  # NaN is a difference
            expected, got = "the same values in two runs", f"a relative difference of {difference:.1e}"
        else:
            continue
        raise ConvertError(
            Finding(
                "run-not-deterministic",
                f"the output {name!r}",
                expected=expected,
                got=got,
                fix=fix,
            )
        )


def _difference(first: Array, second: Array) -> float:
    """Return the largest difference, relative to the largest finite element; infinite where only one is finite."""
    kind = np.result_type(first, second, np.float64)
    a, b = first.astype(kind), second.astype(kind)
    unequal = a != b
    if not unequal.any():
        return 0.0
    return float(
        np.abs(a - b)[unequal].max() / max(np.abs(a[np.isfinite(a)]).max(initial=0), np.finfo(np.float64).tiny)
    )
