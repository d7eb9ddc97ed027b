"""Values that are worth a word, though a conversion has no part in them: zeros, denormals, infinities, NaN."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from convert.core.tensor_spec import numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]


def odd_values(x: Array) -> dict[str, int]:
    """How many values are ``zero``, ``denormal``, ``infinite`` and ``NaN``, of floats of any width."""
    code = _encoding(x.dtype.name)
    if code.widened:
        x = x.astype(np.float32)
    # Magnitudes have the order of their bits (IEEE 754), and integers are compared in a fraction of the time.
    bits = x.view(code.unsigned) & code.magnitude
    low, top = int(np.count_nonzero(bits < code.normal)), bits.max()
    zero = int(np.count_nonzero(bits == 0)) if low else 0
    odd = {"zero": zero, "denormal": low - zero}
    if top >= code.infinity:
        odd |= {
            "infinite": int(np.count_nonzero(bits == code.infinity)),
            "NaN": int(np.count_nonzero(bits > code.infinity)),
        }
    return odd


class _Encoding(NamedTuple):
    """How a float dtype stands in unsigned integers.

    Attributes:
        unsigned: the integers' dtype. widened: whether it is that of float32, as the small ones have encodings of their own.
        magnitude: all bits but the sign. normal, infinity: the smallest normal number's, and infinity's.
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
