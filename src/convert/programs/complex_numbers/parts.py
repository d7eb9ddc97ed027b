"""The two parts of a complex value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from convert.programs.program import Value

SAME = 1e-9  # relative: an operation in parts and as it is


@dataclass(frozen=True, eq=False)
class Parts:
    """The two parts of a value, of the same shape; None: zeros throughout."""

    real: Value | None
    imaginary: Value | None
    shape: tuple[int, ...]

    @property
    def both(self) -> tuple[Value | None, Value | None]:
        """The real part, then the imaginary one."""
        return self.real, self.imaginary

    @property
    def data(self) -> bool:
        """Whether an input of the model is in it."""
        return any(part is not None and part.data for part in self.both)


def is_complex(value: Value) -> bool:
    """Whether a value has complex numbers."""
    return value.array.dtype.kind == "c"


def filled(part: Value | None, shape: tuple[int, ...]) -> Value:
    """Return a part; zeros where there is none."""
    return Value(np.zeros(shape)) if part is None else part


def parts_of_constant(value: Value) -> Parts:
    """Return the parts of a complex constant."""
    real, imaginary = (Value(np.array(x)) if x.any() else None for x in (value.array.real, value.array.imag))
    return Parts(real, imaginary, value.array.shape)


def agree(made: Sequence[Parts], values: Sequence[Value]) -> bool:
    """Whether parts are those of values that were recorded."""
    return len(made) == len(values) and all(map(_agrees, made, values))


def _agrees(parts: Parts, value: Value) -> bool:
    scale = np.abs(value.array[np.isfinite(value.array)]).max(initial=0)
    for part, array in zip(parts.both, (value.array.real, value.array.imag), strict=True):
        got = np.zeros(array.shape) if part is None else part.array
        if got.shape != array.shape or not np.allclose(got, array, rtol=SAME, atol=SAME * scale, equal_nan=True):
            return False
    return True
