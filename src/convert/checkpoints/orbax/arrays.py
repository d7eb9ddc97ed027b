"""Reads the values of arrays in an Orbax directory: chunks in plain files here, all others with TensorStore."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import tensorstore as ts

from convert.checkpoints.chunks import Box, Meter, Piece, full_box, read_at_once, tiles, timed
from convert.checkpoints.chunks import pieces as chunk_pieces
from convert.checkpoints.encodings.zarr_chunks import decoded, decoding
from convert.checkpoints.orbax.stores import Store
from convert.checkpoints.orbax.zarr_metadata import Array
from convert.core.tensor_spec import dtype_name, numpy_dtype

_MANY_CHUNKS = 10_000  # above this number, count the stored chunks before reading


def pieces(store: Store, array: Array, all_stored: bool, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
    """Yield one chunk of the array in pieces, as `Source.pieces`.

    Raises:
        one of `TENSORSTORE_ERRORS`: not readable.
    """
    stored = None
    if array.encoding is not None:
        stored = store.stored(array.prefix + array.encoding.key(array.grid.place(chunk)))
    dtype = numpy_dtype(array.spec.dtype)
    if array.encoding is None or stored is None:
        # TensorStore decodes a chunk as a whole. A missing one, if that is allowed, has no bytes: it is made in parts, as
        # its declared size may be any.
        parts = [full_box(chunk.shape)] if array.encoding is None else tiles(chunk.shape, dtype.itemsize)
        for part in parts:
            box = Box(tuple(a + b for a, b in zip(chunk.origin, part.origin, strict=True)), part.shape)
            read = partial(read_array, store, array, all_stored, box)
            yield from read_at_once(box.origin, read, box.size * dtype.itemsize, meter)
        return
    nbytes = math.prod(array.grid.chunk) * dtype.itemsize
    if (raw := decoded(stored, array.encoding.compressed, nbytes, meter)) is not None:
        values = np.frombuffer(raw, dtype).reshape(array.grid.chunk)
        yield chunk.origin, values[full_box(chunk.shape).within((0,) * values.ndim)]
        return
    try:
        with decoding(stored, array.encoding.compressed, meter) as fill:
            yield from timed(chunk_pieces(fill, array.grid.chunk, chunk, dtype), meter, "decode")
    except ValueError as error:
        place = "" if isinstance(stored, bytes) else f" ({stored.file} from byte {stored.start} to {stored.stop})"
        raise ValueError(f"chunk {list(array.grid.place(chunk))}{place}: {error}") from None


def read_array(store: Store, array: Array, all_stored: bool, box: Box | None = None) -> np.ndarray:
    """Read the array or a part of it, in C order.

    Args:
        store: the store of the array.
        array: its place and spec.
        all_stored: whether the checkpoint declares that all chunks were stored. If neither it nor the array does, a
            missing chunk stands for zeros; else it is an error.
        box: the part; None is the whole array.

    Raises:
        one of `TENSORSTORE_ERRORS`: not readable.
    """
    kvstore, context = store.kvstore(array.prefix)
    fill_missing = not (all_stored or array.stores_zeros)
    spec = {
        "driver": array.driver,
        "kvstore": kvstore,
        "fill_missing_data_reads": fill_missing,
        "recheck_cached_metadata": False,
        "recheck_cached_data": False,
    }
    opened = ts.open(spec, context=context, open=True, read=True).result()
    if tuple(opened.shape) != array.spec.shape or dtype_name(opened.dtype.numpy_dtype) != array.spec.dtype:
        raise ValueError(f"its metadata changed to {opened.dtype.name}{list(opened.shape)} since it was opened")
    if not fill_missing and len(array.grid) > _MANY_CHUNKS:  # else TensorStore reports a missing chunk
        present = store.count(array.prefix)
        if present < len(array.grid):
            raise ValueError(f"expected {len(array.grid)} chunks and their metadata, got {present} files")
    # NumPy allocates: it raises MemoryError where there is not enough memory, while TensorStore ends the process.
    box = box or full_box(array.spec.shape)
    result = np.empty(box.shape, opened.dtype.numpy_dtype)
    ts.array(result).write(opened[box.within((0,) * len(box.shape))]).result()
    return result
