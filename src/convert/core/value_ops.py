"""Operations that change values: additions, multiplications and casts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.core.ops import Op
from convert.core.tensor_spec import TensorSpec, is_float, numpy_dtype, widens

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Add(Op):
    """Add a constant in the input's dtype, which must be float32 or wider."""

    value: float

    @property
    def rounds(self) -> bool:
        return True

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        return _wide(self, spec)

    def apply(self, x: Array) -> Array:
        return np.asarray(np.add(x, x.dtype.type(self.value)))

    def inverse(self, spec: TensorSpec) -> Op:
        return Add(-self.value)

    def __str__(self) -> str:
        return f"{'+' if self.value >= 0 else '-'} {abs(self.value):g}"


@dataclass(frozen=True)
class Multiply(Op):
    """Multiply by a constant other than zero in the input's dtype, which must be float32 or wider."""

    value: float

    @property
    def rounds(self) -> bool:
        return abs(self.value) != 1

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        if self.value == 0:
            raise ValueError("a multiplication by zero loses the weight")
        return _wide(self, spec)

    def apply(self, x: Array) -> Array:
        return np.asarray(np.multiply(x, x.dtype.type(self.value)))

    def inverse(self, spec: TensorSpec) -> Op:
        return Multiply(1 / self.value)

    def __str__(self) -> str:
        return f"x {self.value:g}"


def _wide(op: Op, spec: TensorSpec) -> TensorSpec:
    if spec.dtype not in ("float32", "float64"):
        raise ValueError(f"'{op}' on {spec.dtype} would lose bits; cast to float32 first")
    return spec


@dataclass(frozen=True)
class AddIdentity(Op):
    """Add a multiple of the identity to a square matrix in the input's dtype, which must be float32 or wider."""

    value: float = 1.0

    @property
    def rounds(self) -> bool:
        return True

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        if len(spec.shape) != 2 or spec.shape[0] != spec.shape[1]:
            raise ValueError(f"the identity cannot be added to {spec}, which is not a square matrix")
        return _wide(self, spec)

    def apply(self, x: Array) -> Array:
        return np.asarray(x + self.value * np.eye(x.shape[0], dtype=x.dtype))

    def inverse(self, spec: TensorSpec) -> Op:
        return AddIdentity(-self.value)

    def __str__(self) -> str:
        return f"{'+' if self.value >= 0 else '-'} {abs(self.value):g} x identity"


@dataclass(frozen=True)
class Cast(Op):
    """Cast to another dtype, rounded to nearest even. A finite number that would become infinite is an error."""

    dtype: str

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        numpy_dtype(self.dtype)
        if spec.dtype.startswith("complex") and not self.dtype.startswith("complex"):
            raise ValueError(f"{spec.dtype} as {self.dtype} would lose the imaginary part")
        return TensorSpec(spec.shape, self.dtype)

    def apply(self, x: Array) -> Array:
        """Return the cast array.

        Raises:
            OverflowError: a finite number does not fit the range of the new dtype.
        """
        to = numpy_dtype(self.dtype)
        if x.dtype == to:
            return x
        with np.errstate(over="ignore", invalid="ignore"):
            out = _nearest(x, to)
        if not widens(x.dtype.name, self.dtype):
            _reject_overflow(x, out)
        return out

    def inverse(self, spec: TensorSpec) -> Op:
        return Cast(spec.dtype)

    def __str__(self) -> str:
        return f"to {self.dtype}"


def _is_native(dtype: np.dtype[Any]) -> bool:
    """Whether the dtype is one of NumPy's and not of ml_dtypes, all of whose values are exact in float32."""
    return dtype.isbuiltin == 1


def _nearest(x: Array, to: np.dtype[Any]) -> Array:
    """Cast `x`, rounding once to nearest even.

    ml_dtypes before 0.7 rounds float64 to float32 first, and has no casts between some of its own dtypes.
    """
    if _is_native(to) or (x.dtype.itemsize < 4 and _is_native(x.dtype)) or x.dtype == np.float32:
        return x.astype(to)
    if not _is_native(x.dtype):
        return x.astype(np.float32).astype(to)
    if x.dtype.kind == "c" or not is_float(to.name):
        return x.astype(to)
    # Rounding to odd records in the last bit whether bits were lost, so that only the second rounding counts
    # (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    wide = x.astype(np.float64)
    odd = np.asarray(wide.astype(np.float32))
    inexact = np.isfinite(wide) & (odd != wide)
    odd = np.where(np.abs(odd) > np.abs(wide), np.nextafter(odd, np.float32(0)), odd)
    bits: Array = odd.view(np.uint32) | inexact
    return bits.view(np.float32).astype(to)


def _reject_overflow(x: Array, out: Array) -> None:
    if (out.dtype.kind == "c" or is_float(out.dtype.name)) and np.all(np.isfinite(out)):
        return
    with np.errstate(invalid="ignore"):
        before, after = (y if _is_native(y.dtype) else y.astype(np.float32) for y in (x, out))
    if out.dtype.kind == "c" or is_float(out.dtype.name):
        lost = np.isfinite(before) & ~np.isfinite(after)
    else:
        lost = before != after
    count = int(np.count_nonzero(lost))
    if count:
        example = x[lost].ravel()[0]
        raise OverflowError(f"{count} of {x.size} values do not fit {out.dtype.name}, {example!s} for example")
