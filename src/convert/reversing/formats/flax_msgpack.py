"""Writes the leaves as ``flax.serialization.to_bytes`` does: nested maps in msgpack, each array an extension."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np

from convert.checkpoints.chunks import Box, full_box
from convert.checkpoints.source import Source
from convert.core.tensor_spec import TensorSpec, numpy_dtype
from convert.reversing.tree import nest

_ARRAY = 1  # flax/serialization.py, _MsgpackExtType.ndarray
MOST = 2**30  # bytes of an array in one piece; flax/serialization.py, MAX_CHUNK_SIZE
_FIXED = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}  # msgpack: fixext


class _Leaf(str):
    """The name of a leaf, in the place of its array."""

    __slots__ = ()


def write_msgpack(source: Source, out: Path, *, done: Callable[[str], None]) -> None:
    """Write all leaves, each in pieces."""
    tree = nest(((leaf.keys, _Leaf(name)) for name, leaf in source.leaves.items()), source.absent)
    with out.open("wb") as file:
        _write(tree, source, file, done)


def _write(tree: Any, source: Source, file: BinaryIO, done: Callable[[str], None]) -> None:
    if isinstance(tree, _Leaf):
        _write_leaf(str(tree), source, file)
        done(str(tree))
    elif isinstance(tree, dict | list | tuple):  # flax writes sequences as maps; only empty ones are left of them
        file.write(msgpack.Packer().pack_map_header(len(tree)))
        for key, value in dict(tree).items():
            file.write(msgpack.packb(key))
            _write(value, source, file, done)
    else:
        file.write(msgpack.packb(tree))  # None


def _write_leaf(name: str, source: Source, file: BinaryIO) -> None:
    spec = source.leaves[name].spec
    if spec.nbytes <= MOST:
        _write_array(name, source, full_box(spec.shape), spec.shape, file)
        return
    # flax flattens a larger array and cuts it into chunks
    each = max(1, MOST // numpy_dtype(spec.dtype).itemsize)
    starts = range(0, spec.size, each)
    file.write(msgpack.Packer().pack_map_header(3))
    file.write(msgpack.packb("__msgpack_chunked_array__") + msgpack.packb(True))
    file.write(msgpack.packb("shape") + msgpack.packb({str(k): n for k, n in enumerate(spec.shape)}))
    file.write(msgpack.packb("chunks") + msgpack.Packer().pack_map_header(len(starts)))
    pieces = source.pieces(name, full_box(spec.shape))
    held = np.empty(0, numpy_dtype(spec.dtype))
    for k, start in enumerate(starts):
        size = min(each, spec.size - start)
        file.write(msgpack.packb(str(k)))
        _write_head(TensorSpec((size,), spec.dtype), file)
        while size:
            if not held.size:
                held = np.ascontiguousarray(next(pieces)[1]).reshape(-1)
            file.write(held[:size].view(np.uint8).data)
            size, held = size - held[:size].size, held[size:]


def _write_array(name: str, source: Source, box: Box, shape: tuple[int, ...], file: BinaryIO) -> None:
    _write_head(TensorSpec(shape, source.leaves[name].spec.dtype), file)
    for _, piece in source.pieces(name, box):
        file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)


def _write_head(spec: TensorSpec, file: BinaryIO) -> None:
    """Write what precedes the elements of an array: the extension's head, its shape, its dtype, and the head of the bytes."""
    packer = msgpack.Packer(autoreset=True)
    inner = packer.pack_array_header(3) + packer.pack(spec.shape) + packer.pack(spec.dtype) + _bytes_head(spec.nbytes)
    size = len(inner) + spec.nbytes
    if size in _FIXED:
        head = bytes([_FIXED[size], _ARRAY])
    elif size < 1 << 8:
        head = struct.pack(">BBb", 0xC7, size, _ARRAY)
    elif size < 1 << 16:
        head = struct.pack(">BHb", 0xC8, size, _ARRAY)
    else:
        head = struct.pack(">BIb", 0xC9, size, _ARRAY)
    file.write(head + inner)


def _bytes_head(size: int) -> bytes:
    if size < 1 << 8:
        return struct.pack(">BB", 0xC4, size)
    return struct.pack(">BH", 0xC5, size) if size < 1 << 16 else struct.pack(">BI", 0xC6, size)
