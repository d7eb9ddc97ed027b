"""Shape and dtype of a tensor, and the table of known dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np

from convert.core.errors import ConvertError
from convert.core.findings import Finding

# name (as NumPy, ml_dtypes, TensorStore and zarr spell it) -> tag in a safetensors header.
# Tags: safetensors 0.8, `safetensors/src/tensor.rs`, enum Dtype. None: the format has no such dtype.
SAFETENSORS_TAGS: dict[str, str | None] = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "complex128": None,
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": None,
    "float8_e5m2fnuz": None,
    "float8_e4m3b11fnuz": None,
    "float8_e8m0fnu": "F8_E8M0",
    "int4": None,
    "uint4": None,
    "int2": None,
    "uint2": None,
}


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype with this name in `SAFETENSORS_TAGS`.

    Raises:
        ConvertError: the name is not in the table.
    """
    if name not in SAFETENSORS_TAGS:
        raise _unknown(name)
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def dtype_name(dtype: object) -> str:
    """Return the name in the table for a NumPy (or ml_dtypes) dtype or scalar type.

    Raises:
        ConvertError: the dtype is not in the table (strings, objects, structured dtypes).
    """
    name = np.dtype(dtype).name  # type: ignore[call-overload]
    if name not in SAFETENSORS_TAGS:
        raise _unknown(name)
    return str(name)


def _unknown(name: str) -> ConvertError:
    return ConvertError(
        Finding("dtype-unknown", "unknown dtype", expected=f"one of {', '.join(SAFETENSORS_TAGS)}", got=repr(name))
    )


def is_float(dtype: str) -> bool:
    """Whether the dtype is a real floating-point type, including those of ml_dtypes."""
    return dtype.startswith(("float", "bfloat"))


def widens(source: str, target: str) -> bool:
    """Whether every value of dtype `source` is a value of dtype `target`, so that a cast loses nothing."""
    if source == target:
        return True
    parts = {"complex64": "float32", "complex128": "float64"}
    if target in parts:
        return widens(parts.get(source, source), parts[target])
    if "e8m0" in target:  # it has no zero and no sign
        return False
    if source == "bool":
        return True
    if is_float(source) and is_float(target):
        a, b = ml_dtypes.finfo(numpy_dtype(source)), ml_dtypes.finfo(numpy_dtype(target))
        fits = (
            a.nmant <= b.nmant
            and float(a.max) <= float(b.max)
            and float(a.smallest_subnormal) >= float(b.smallest_subnormal)
        )
        return bool(fits and "fnuz" not in target)
    if not is_float(source) and source.startswith(("int", "uint")):
        info = ml_dtypes.iinfo(numpy_dtype(source))
        if target.startswith(("int", "uint")):
            room = ml_dtypes.iinfo(numpy_dtype(target))
            return bool(room.min <= info.min and info.max <= room.max)
        if is_float(target):
            return bool(max(abs(int(info.min)), int(info.max)) <= 2 ** (ml_dtypes.finfo(numpy_dtype(target)).nmant + 1))
    return False


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of an array. Arrays of the same shape and dtype share one object, which caches what it derives.

    Attributes:
        shape: sizes of the axes; `()` is a scalar.
        dtype: a name in `SAFETENSORS_TAGS`, such as ``bfloat16``.
    """

    shape: tuple[int, ...]
    dtype: str

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes in memory and in a safetensors file (int4 and int2 take a byte each in memory)."""
        return self.size * numpy_dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"
