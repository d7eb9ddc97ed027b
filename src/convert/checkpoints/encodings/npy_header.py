"""The head of an array in NumPy's ``.npy`` format, read without trusting it; Equinox and ``.npz`` are made of these.

Format: numpy/lib/format.py (versions 1.0, 2.0 and 3.0). bfloat16 has no name in it and becomes ``V2``.
"""

from __future__ import annotations

import ast
import math
import struct
import sys
from typing import IO, NamedTuple

import numpy as np

from convert.core.errors import CheckpointError, ConvertError
from convert.core.tensor_spec import TensorSpec, dtype_name

MAGIC = b"\x93NUMPY"
_MOST_HEADER = 10_000  # bytes; NumPy's own limit (format.py, _MAX_HEADER_SIZE)
_MOST_AXES = 64
# What ml_dtypes' types become, none of which NumPy can read back. All of one byte are `V1`, but for float8_e5m2.
_NAMELESS = ("|V1", "<V1", ">V1")
_FLOAT8_E5M2 = ("<f1", "|f1")
NO_PICKLES = (
    "it is a pickle, and loading one runs its code, so it is refused. Where the code that wrote it runs, load it there and "
    "save the arrays without objects: numpy.savez(path, **flat_dict), flax.serialization.to_bytes or "
    "safetensors.flax.save_file"
)


class Header(NamedTuple):
    """What the head says.

    Attributes:
        spec: shape and dtype; ``V1`` arrays have the dtype uint8 and `nameless` set.
        fortran: whether the first axis varies fastest.
        swapped: whether the elements are in the other byte order than this machine's.
        nameless: whether the elements are bytes of a dtype that the file does not tell (float8, int4).
    """

    spec: TensorSpec
    fortran: bool
    swapped: bool
    nameless: bool = False


def read_header(file: IO[bytes]) -> Header:
    """Reads the head of the array that starts here; the file stands at its first byte afterwards.

    Raises:
        CheckpointError: no such array, truncated, of a dtype that is none of ours, or of Python objects. The message
            has neither file nor leaf.
    """
    magic = file.read(len(MAGIC) + 2)
    if magic[: len(MAGIC)] != MAGIC[: len(magic)]:
        raise CheckpointError(f"no array of NumPy's format: it starts with the bytes {magic.hex(' ') or '-'}")
    if len(magic) < len(MAGIC) + 2:
        raise CheckpointError("truncated in the head of an array")
    version = tuple(magic[len(MAGIC) :])
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise CheckpointError(f"version {version[0]}.{version[1]} of NumPy's format is not known")
    form = "<H" if version == (1, 0) else "<I"
    raw = file.read(struct.calcsize(form))
    if len(raw) < struct.calcsize(form):
        raise CheckpointError("truncated in the head of an array")
    length = struct.unpack(form, raw)[0]
    if length > _MOST_HEADER:
        raise CheckpointError(f"the head of the array would take {length} bytes; {_MOST_HEADER} are the most")
    text = file.read(length)
    if len(text) < length:
        raise CheckpointError("truncated in the head of an array")
    return _parse(text, "utf-8" if version == (3, 0) else "latin-1")


def _parse(text: bytes, encoding: str) -> Header:
    try:
        said = ast.literal_eval(text.decode(encoding))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"the head of the array is not what NumPy writes: {error}") from None
    if not isinstance(said, dict) or set(said) != {"descr", "fortran_order", "shape"}:
        raise CheckpointError("the head of the array is not what NumPy writes")
    shape, descr, fortran = said["shape"], said["descr"], said["fortran_order"]
    sizes = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
    if (
        not sizes
        or len(shape) > _MOST_AXES
        or math.prod(max(n, 1) for n in shape) >= 2**60
        or type(fortran) is not bool
    ):
        raise CheckpointError(f"the head of the array has no valid shape or order: {shape!r:.100}, {fortran!r:.20}")
    if not isinstance(descr, str):
        raise CheckpointError("the array has fields, which no JAX code writes; save each of them as an array")
    if "O" in descr:
        raise CheckpointError(NO_PICKLES)
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
        raise CheckpointError(f"the dtype {descr!r:.60} is not one that a model's arrays have") from None
    swapped = (
        dtype.itemsize > 1
        and dtype.byteorder not in ("=", "|")
        and (dtype.byteorder == "<") != (sys.byteorder == "little")
    )
    return Header(TensorSpec(shape, name), fortran, swapped)
