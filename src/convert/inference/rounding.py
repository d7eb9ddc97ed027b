"""How exactly the outputs of two programs can agree: to float64, unless one has numbers that were rounded to float32 before it ran."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from convert.programs.fingerprint import EXACT
from convert.programs.program import Program

Array = np.ndarray[Any, np.dtype[Any]]
ROUNDING = 1e-10  # relative; models of 26 layers leave 1e-12, an epsilon of 1e-6 in place of 1e-12 leaves 1e-7
MASK = 1e9  # a number of at least this size hides what it is added to, and its rounding shows in no output
WHOLE = 2.0**24  # float32 holds all whole numbers below it
SHORT = 2.0**16  # a number of at most so many steps below its power of two was written as it is, such as 0.375
DIGITS = 5  # a larger whole number of at most so many digits in front of its zeros was written as it is, such as 1e8


def tolerance(*programs: Program) -> float:
    """Return the relative error up to which values of these programs are equal."""
    return EXACT if any(rounded_where(program) is not None for program in programs) else ROUNDING


def rounded_where(program: Program) -> str | None:
    """Return where a program first uses numbers that have the precision of float32, such as a table of angles; None: it has none.

    What the program computes itself has not: it runs in float64.
    """
    if program.opaque:
        return program.opaque[0]
    return next((where for where, array in _constants(program) if _is_rounded(array)), None)


def _constants(program: Program) -> Iterator[tuple[str, Array]]:
    computed = {result for operation in program.operations for result in operation.results}
    given = {*program.inputs.values(), *program.parameters.values(), *computed}
    for operation in program.operations:
        for value in operation.operands:
            own = bool(value.leaves) and value.leaves <= program.buffers and not value.data
            if own or (not value.leaves and value not in given):  # a constant, also as data (`forms.as_data`)
                yield operation.where or operation.name, value.array


def _is_rounded(array: Array) -> bool:
    """Whether an array holds numbers of float32 that are no short ones."""
    if array.dtype.kind != "f":
        return False
    x = array[(np.abs(array) < MASK) & ((np.abs(array) > WHOLE) | (array != np.round(array)))]
    fractions, _ = np.frexp(x)
    with np.errstate(all="ignore"):
        single = x.astype(np.float32) == x
    return bool((single & (fractions * SHORT % 1 != 0) & ~_is_decimal(x)).any())


def _is_decimal(x: Array) -> Array:
    """Whether each number is a whole one with few digits in front of its zeros."""
    powers = 10.0 ** np.maximum(np.floor(np.log10(np.maximum(np.abs(x), 1))) + 1 - DIGITS, 0)
    found: Array = x % powers == 0
    return found
