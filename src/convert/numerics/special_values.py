"""Count the suspicious values that already exist in the source: zeros, subnormals, Inf, NaN."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from convert.core.tensor_spec import numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]


def count_special_values(x: Array) -> dict[str, int]:
    """Count the values that are ``zero``, ``subnormal``, ``infinite`` and ``NaN``; floats of any width."""
    code = _encoding(x.dtype.name)
    if code.widened:
        x = x.astype(np.float32)
    # Magnitudes have the order of their bits (IEEE 754), and integers are compared in a fraction of the time.
    bits = x.view(code.unsigned) & code.magnitude
    low, top = int(np.count_nonzero(bits < code.normal)), bits.max()
    zero = int(np.count_nonzero(bits == 0)) if low else 0
    counts = {"zero": zero, "subnormal": low - zero}
    if top >= code.infinity:
        counts |= {
            "infinite": int(np.count_nonzero(bits == code.infinity)),
            "NaN": int(np.count_nonzero(bits > code.infinity)),
        }
    return counts


class _Encoding(NamedTuple):
    """The bits of a float dtype as unsigned integers.

    Attributes:
        unsigned: dtype of the integers.
        widened: whether values are cast to float32 first; float8 and smaller dtypes have other encodings.
        magnitude: mask of all bits except the sign.
        normal: bits of the smallest normal number.
        infinity: bits of infinity.
    """

    unsigned: np.dtype[Any]
    widened: bool
    magnitude: Any
    normal: Any
    infinity: Any


@cache
def _encoding(name: str) -> _Encoding:
    widened = name not in ("float16", "bfloat16", "float32", "float64")
    dtype = numpy_dtype("float32" if widened else name)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    marks = np.array([float(ml_dtypes.finfo(name).smallest_normal), np.inf]).astype(dtype).view(unsigned)
    return _Encoding(unsigned, widened, unsigned.type(np.iinfo(unsigned).max >> 1), *marks)
