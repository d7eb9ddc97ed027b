"""Reads the header of an array in NumPy's ``.npy`` format; Equinox files and ``.npz`` members consist of such arrays.

Format: numpy/lib/format.py (versions 1.0, 2.0 and 3.0). bfloat16 has no name in it and is stored as ``V2``.
"""

from __future__ import annotations

import ast
import math
import struct
import sys
from typing import IO, NamedTuple

import numpy as np

from convert.checkpoints.errors import corrupt, pickle_refused, truncated, unsupported
from convert.core.errors import ConvertError
from convert.core.tensor_spec import TensorSpec, dtype_name

MAGIC = b"\x93NUMPY"
_MOST_HEADER = 10_000  # bytes; NumPy's own limit (format.py, _MAX_HEADER_SIZE)
_MOST_AXES = 64
# How NumPy stores the dtypes of ml_dtypes, which it cannot read back. All dtypes of one byte are `V1`, except float8_e5m2.
_NAMELESS = ("|V1", "<V1", ">V1")
_FLOAT8_E5M2 = ("<f1", "|f1")


class Header(NamedTuple):
    """The content of a header.

    Attributes:
        spec: shape and dtype; ``V1`` arrays have the dtype uint8 and `nameless` set.
        fortran: whether the first axis varies fastest.
        swapped: whether the elements have the other byte order than this machine.
        nameless: whether the elements are bytes of a dtype that the file does not name (float8, int4).
    """

    spec: TensorSpec
    fortran: bool
    swapped: bool
    nameless: bool = False


def read_header(file: IO[bytes]) -> Header:
    """Read the header of the array that starts here. Afterwards the file is at the first byte of the elements.

    Raises:
        CheckpointError: there is no array, it is truncated, its dtype is not supported, or it holds Python objects. The
            findings have no path.
    """
    magic = file.read(len(MAGIC) + 2)
    if magic[: len(MAGIC)] != MAGIC[: len(magic)]:
        raise corrupt(expected="an array in NumPy's format", got=f"the bytes {magic.hex(' ') or '-'}")
    if len(magic) < len(MAGIC) + 2:
        raise truncated("the file ends in the header of an array")
    version = tuple(magic[len(MAGIC) :])
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise unsupported(
            "the version of the array is unknown",
            expected="version 1.0, 2.0 or 3.0 of NumPy's format",
            got=f"{version[0]}.{version[1]}",
        )
    form = "<H" if version == (1, 0) else "<I"
    raw = file.read(struct.calcsize(form))
    if len(raw) < struct.calcsize(form):
        raise truncated("the file ends in the header of an array")
    length = struct.unpack(form, raw)[0]
    if length > _MOST_HEADER:
        raise corrupt(
            "the header of the array is too long", expected=f"at most {_MOST_HEADER} bytes", got=f"{length} bytes"
        )
    text = file.read(length)
    if len(text) < length:
        raise truncated("the file ends in the header of an array")
    return _parse(text, "utf-8" if version == (3, 0) else "latin-1")


def _parse(text: bytes, encoding: str) -> Header:
    try:
        header = ast.literal_eval(text.decode(encoding))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise corrupt(f"the header of the array is not one that NumPy writes: {error}") from None
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        raise corrupt("the header of the array is not one that NumPy writes")
    shape, descr, fortran = header["shape"], header["descr"], header["fortran_order"]
    sizes = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
    if (
        not sizes
        or len(shape) > _MOST_AXES
        or math.prod(max(n, 1) for n in shape) >= 2**60
        or type(fortran) is not bool
    ):
        raise corrupt(f"the header of the array has no valid shape or order: {shape!r:.100}, {fortran!r:.20}")
    if not isinstance(descr, str):
        raise unsupported("the array has fields", fix="save each field as an array")
    if "O" in descr:
        raise pickle_refused()
    if descr in ("|V2", "<V2", ">V2"):
        return Header(TensorSpec(shape, "bfloat16"), fortran, descr[0] == ">")
    if descr in _FLOAT8_E5M2:
        return Header(TensorSpec(shape, "float8_e5m2"), fortran, swapped=False)
    if descr in _NAMELESS:
        return Header(TensorSpec(shape, "uint8"), fortran, swapped=False, nameless=True)
    try:
        dtype = np.dtype(descr)
        name = dtype_name(dtype.newbyteorder("="))
    except (TypeError, ValueError, SyntaxError, ConvertError):
        raise unsupported(
            "the dtype is not one of a model's arrays", got=f"{descr!r:.60}", fix="save the array with another dtype"
        ) from None
    swapped = (
        dtype.itemsize > 1
        and dtype.byteorder not in ("=", "|")
        and (dtype.byteorder == "<") != (sys.byteorder == "little")
    )
    return Header(TensorSpec(shape, name), fortran, swapped)
