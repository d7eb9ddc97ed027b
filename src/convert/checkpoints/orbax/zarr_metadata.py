"""Reads the zarr metadata of the arrays in an Orbax directory: shape, dtype, chunks and encoding.

The metadata have the global shape, so neither JAX nor devices nor the ``_sharding`` file are needed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from convert.checkpoints.chunks import Grid
from convert.checkpoints.encodings.zarr_chunks import Encoding, encoding
from convert.checkpoints.errors import corrupt, located
from convert.checkpoints.orbax.stores import Store
from convert.core.errors import CheckpointError, ConvertError
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec, dtype_name

ARRAY_METADATA = _ZARR, _ZARR3 = ".zarray", "zarr.json"
# Limits that a corrupt shape may exceed, but no array. Asked for such an array, TensorStore ends the process
# (std::bad_alloc) or works for days.
_MOST_BYTES = 1 << 48
_MOST_CHUNKS = 10_000_000
_MANY_CHUNKS = 50_000  # of all arrays; from here on, count how many are stored
_MOST_ABSENT = 100  # chunks for each stored value
_MOST_AXES = 32  # of zarr in TensorStore
_ZARR_DTYPE = re.compile(r"[<|][biufc]\d+")  # no JAX writes big-endian, which one flipped bit would give


class Array(NamedTuple):  # half the time and memory of a dataclass; there may be 50,000
    """The place and the zarr metadata of an array.

    Attributes:
        prefix: start of its keys in the store: its name and a slash; empty where the tree is a single array.
        driver: ``zarr`` or ``zarr3``.
        spec: global shape and dtype.
        grid: its chunks.
        encoding: how they are stored; None where only TensorStore can read them.
        stores_zeros: whether the writer stored chunks of zeros, so that a missing chunk was lost. TensorStore omits a
            chunk that is equal to the fill value, unless the metadata has no fill value: Orbax sets none with zarr,
            while zarr3 always has one. (TensorStore since commit 738ea97f1 of January 2022, before the first Orbax;
            checked with TensorStore 0.1.28, 0.1.52 and 0.1.86.)
    """

    prefix: str
    driver: str
    spec: TensorSpec
    grid: Grid
    encoding: Encoding | None
    stores_zeros: bool


def read_metadata(store: Store, names: Sequence[str], use_zarr3: bool) -> dict[str, Array | CheckpointError | None]:
    """Read the zarr metadata of the arrays `names`: None where there are none, the error where they are not valid.

    The JSON of all arrays is read at once, as plain values. Opening each array with TensorStore takes three times as long
    (0.40 s instead of 0.12 s for 10,000 arrays).
    """
    first, second = (_ZARR3, _ZARR) if use_zarr3 else (_ZARR, _ZARR3)
    arrays: dict[str, Array | CheckpointError | None] = dict.fromkeys(names)
    for filename in (first, second):  # before Orbax 0.4.8 `_METADATA` did not name the driver
        left = [name for name, array in arrays.items() if array is None]
        prefixes = [prefix(name) for name in left]
        values = store.values([start + filename for start in prefixes])
        for name, start, value in zip(left, prefixes, values, strict=True):
            if value is not None:
                try:
                    arrays[name] = Array(start, *_parse(filename, value))
                except CheckpointError as error:
                    arrays[name] = located(error, start + filename)
    return _refuse_absent_chunks(store, arrays)


def _refuse_absent_chunks(
    store: Store, arrays: dict[str, Array | CheckpointError | None]
) -> dict[str, Array | CheckpointError | None]:
    """Replace the array of the most chunks by an error if the arrays have far more chunks than the store has values.

    A chunk that is absent has the fill value, and reading it takes as long as a small one: ten million of them, declared
    in 400 bytes, would take an hour.
    """
    chunks = {name: len(array.grid) for name, array in arrays.items() if isinstance(array, Array)}
    total = sum(chunks.values())
    if total > _MANY_CHUNKS and total > _MOST_ABSENT * (present := store.count("")):
        name = max(chunks, key=chunks.__getitem__)
        arrays[name] = corrupt(
            "almost all chunks of the checkpoint are absent",
            expected=f"at most {_MOST_ABSENT} chunks for each that is stored",
            got=f"{total} chunks of all arrays, {present} stored values",
        )
    return arrays


def prefix(name: str) -> str:
    """Return the start of the keys of the array `name`. The empty name is a tree that is a single array."""
    return f"{name}/" if name else ""


@functools.lru_cache(maxsize=10_000)  # leaves of equal layers have equal metadata
def _parse(filename: str, value: bytes) -> tuple[str, TensorSpec, Grid, Encoding | None, bool]:
    """Return the last five attributes of an `Array`. The errors do not name the file."""
    try:
        metadata = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise corrupt(f"not valid JSON: {error}") from None
    if not isinstance(metadata, dict):
        raise corrupt(expected="a JSON object", got=type(metadata).__name__)
    if filename == _ZARR:
        chunk, dtype = metadata.get("chunks"), metadata.get("dtype")
    else:
        grid = metadata.get("chunk_grid")
        configuration = grid.get("configuration") if isinstance(grid, dict) else None
        chunk = configuration.get("chunk_shape") if isinstance(configuration, dict) else None
        dtype = metadata.get("data_type")
    shape, chunk = _sizes("shape", metadata.get("shape"), 0), _sizes("chunk shape", chunk, 1)
    spec = TensorSpec(shape, _dtype(dtype))
    grid = Grid(shape, chunk)
    # A chunk is the part of the array on one device, or smaller.
    if len(chunk) != len(shape) or any(c > max(n, 1) for c, n in zip(chunk, shape, strict=True)):
        raise corrupt("the chunks do not fit the array", expected=f"at most {list(shape)}", got=str(list(chunk)))
    if spec.nbytes > _MOST_BYTES or math.prod(grid.counts) > _MOST_CHUNKS:
        raise corrupt("the size of the array is not possible", got=f"{spec} in {math.prod(grid.counts)} chunks")
    known = encoding(metadata, spec.dtype, 2 if filename == _ZARR else 3)
    driver = "zarr" if filename == _ZARR else "zarr3"
    return driver, spec, grid, known, filename == _ZARR and metadata.get("fill_value") is None


def _sizes(what: str, sizes: object, least: int) -> tuple[int, ...]:
    if (
        not isinstance(sizes, list)
        or not all(type(n) is int and least <= n < _MOST_BYTES for n in sizes)
        or len(sizes) > _MOST_AXES
    ):
        raise corrupt(f"the {what} is not valid", got=f"{sizes!r:.100}")
    return tuple(sizes)


def _dtype(dtype: object) -> str:
    """Return the name of a dtype. Zarr writes NumPy's own dtypes as ``<f4``; the others, and all in zarr3, have names."""
    if isinstance(dtype, str):
        if dtype in SAFETENSORS_TAGS:
            return dtype
        if _ZARR_DTYPE.fullmatch(dtype):
            with contextlib.suppress(TypeError, ConvertError):
                return dtype_name(np.dtype(dtype))
    raise corrupt("unknown dtype", expected=f"one of {', '.join(SAFETENSORS_TAGS)}", got=f"{dtype!r:.100}")
