"""Refuse runs that cannot be compared: outputs with NaN, and outputs that differ between two runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.programs.program import Array, Program, Value

REPEATABLE = 1e-9  # relative; runs differ by this much if threads add in another order
PRODUCTS = {"dot_general", "conv_general_dilated", "mul", "div"}  # of JAX, by which data meets parameters
GIVE_FINITE = "give finite numbers, such as -1e30 for the -inf of a mask"


def require_numbers(program: Program) -> None:
    """Check that the outputs are numbers.

    Raises:
        ConvertError: one has NaN. The finding names the first operation that makes NaN of numbers; its `data` has the name of the
            operation, the parameters that it is computed from, and those that it has without data. Where an input is not finite, it
            names its element, too.
    """
    bad = next((name for name, value in program.outputs.items() if np.isnan(value.array).any()), None)
    if bad is None:
        return
    given = _not_finite(program)
    sides = {"expected": "finite inputs", "got": given} if given else {}
    for operation in program.operations:
        made = any(np.isnan(value.array).any() for value in operation.results)
        if made and not any(np.isnan(value.array).any() for value in operation.operands):
            leaves = sorted(frozenset[str]().union(*(operand.leaves for operand in operation.operands)))
            alone = {leaf for operand in operation.operands if not operand.data for leaf in operand.leaves}
            raise ConvertError(
                Finding(
                    "output-not-a-number",
                    f"the output {bad!r} has NaN; the first comes from `{operation.name}`",
                    path=operation.where,
                    **sides,
                    fix=GIVE_FINITE if given else "use weights and inputs on which the function is defined",
                    data={
                        "operation": operation.name,
                        "module": operation.module,
                        "leaves": leaves,
                        "alone": sorted(alone),
                    },
                )
            )
    fix = GIVE_FINITE if given else "use weights and inputs that are numbers"
    raise ConvertError(
        Finding(
            "output-not-a-number", f"the output {bad!r} has NaN", **sides, fix=fix, data={"leaves": [], "alone": []}
        )
    )


def require_finite_products(source: Program) -> None:
    """Check that parameters meet finite data, as far as the inputs decide it.

    In the product with an infinity, one parameter is like another. Infinities that are added, as in a mask, or selected, stay as they are.

    Args:
        source: a record of JAX.

    Raises:
        ConvertError: an input is not finite, and enters a product with parameters.
    """
    given = _not_finite(source)
    if not given:
        return
    for operation in source.operations:
        factors = any(operand.of_parameters for operand in operation.operands)
        if operation.name in PRODUCTS and factors and not all(map(_is_finite, operation.data)):
            problem = f"`{operation.name}` multiplies parameters by values that are not finite"
            raise ConvertError(
                Finding(
                    "reference-values-invalid",
                    problem,
                    path=operation.where,
                    expected="finite inputs",
                    got=given,
                    fix=GIVE_FINITE,
                )
            )


def _not_finite(program: Program) -> str:
    """Return the first element of an input that is not finite, in words; empty where there is none."""
    for name, value in program.inputs.items():
        if not _is_finite(value):
            array = value.given
            index = [int(k) for k in np.argwhere(~np.isfinite(array))[0]]
            return f"{array[tuple(index)]} in the input {name!r} at {index}"
    return ""


def _is_finite(value: Value) -> bool:
    return value.array.dtype.kind not in "fc" or bool(np.isfinite(value.array).all())


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
        np.abs(a[unequal] - b[unequal]).max() / max(np.abs(a[np.isfinite(a)]).max(initial=0), np.finfo(np.float64).tiny)
    )
