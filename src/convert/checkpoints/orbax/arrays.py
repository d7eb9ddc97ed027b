"""Reads single arrays out of an Orbax directory with TensorStore: OCDBT or one directory per leaf, zarr or zarr3.

JAX is not needed for it, no device, and no ``_sharding`` file: the global shape, the dtype and the chunks are in the
zarr metadata of each array.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorstore as ts

from convert.checkpoints.chunks import Box, Grid, Meter, Piece, in_one, timed, whole
from convert.checkpoints.chunks import pieces as chunk_pieces
from convert.checkpoints.encodings.ocdbt import MANIFEST, TENSORSTORE_ERRORS, Database
from convert.checkpoints.encodings.zarr_chunks import Encoding, Stored, decoded, decoding, encoding
from convert.core.errors import CheckpointError, ConvertError
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec, dtype_name, numpy_dtype

# One directory for each process (`ocdbt.process_3`) or replica (`ocdbt.process_replica_3`); Orbax 0.12.8,
# _src/serialization/ocdbt_process_spec.py. The values stay in them after the merge; the manifest above refers to them.
PROCESS_PREFIX = "ocdbt.process_"

ARRAY_METADATA = _ZARR, _ZARR3 = ".zarray", "zarr.json"
# What a corrupt shape may well exceed, and no array does. TensorStore ends the process (std::bad_alloc) or works for
# days where it is told to read one.
_MOST_BYTES = 1 << 48
_MOST_CHUNKS = 10_000_000
_MOST_AXES = 32  # of zarr in TensorStore
AGAIN = "the checkpoint is damaged; copy it again, or choose another step with --step"
_BATCH = 10_000  # reads in flight at once
_ZARR_DTYPE = re.compile(r"[<|][biufc]\d+")  # big-endian is left out: no JAX writes it, and it is one flipped bit away


class Array(NamedTuple):  # made by the ten thousand, in half the time and space of a dataclass
    """Where an array lies, and what its zarr metadata says.

    Attributes:
        prefix: of its keys in the store: its name and a slash; empty where the tree is a single array.
        driver: ``zarr`` or ``zarr3``.
        spec: global shape and dtype.
        grid: its chunks.
        encoding: how they are stored; None where TensorStore has to read them.
        stores_zeros: whether the writer surely stored chunks of zeros, so that a chunk which is not there was lost.
            TensorStore leaves out a chunk that is equal to the fill value, unless the metadata has none: Orbax gives
            none with zarr, while zarr3 always has one. (TensorStore since commit 738ea97f1 of January 2022, before the
            first Orbax; tried with TensorStore 0.1.28, 0.1.52 and 0.1.86.)
    """

    prefix: str
    driver: str
    spec: TensorSpec
    grid: Grid
    encoding: Encoding | None
    stores_zeros: bool


class Store(Protocol):
    """A key-value store that holds the files of all arrays of a tree."""

    format: str
    """For people: ``OCDBT`` or ``one directory per leaf``."""

    advice: str
    """What to do where an array cannot be read."""

    def values(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of `keys`, read concurrently; None where there is none."""

    def count(self, prefix: str) -> int:
        """How many keys start with `prefix`."""

    def stored(self, key: str) -> Stored | bytes | None:
        """Where the value of a key lies in a file, or the value; None where there is none, or it cannot be told."""

    def kvstore(self, prefix: str) -> tuple[dict[str, Any], ts.Context]:
        """A TensorStore spec (JSON) of the part whose keys start with `prefix`, and the context to open it in."""


def open_store(path: Path, use_ocdbt: bool | None) -> Store:
    """The store of the tree in the directory `path`.

    Args:
        path: an item directory.
        use_ocdbt: what ``_METADATA`` says; None where it says nothing (before Orbax 0.11.31).

    Raises:
        CheckpointError: its database is missing.
    """
    context = _context()
    if use_ocdbt is not False and (path / MANIFEST).exists():
        return _Merged(path, context)
    processes = process_directories(path)
    if use_ocdbt is not False and processes:
        return _Union(processes, context)
    if use_ocdbt:
        raise CheckpointError(f'"{path}": {MANIFEST} is missing, so no array can be found; {AGAIN}')
    return _Files(path, context)


def process_directories(path: Path) -> tuple[Path, ...]:
    """The databases of single processes in the directory `path`, in a fixed order; empty directories are none.

    Raises:
        CheckpointError: one has lost its manifest.
    """
    found = [child for child in path.glob(f"{PROCESS_PREFIX}*") if child.is_dir() and any(child.iterdir())]
    for child in found:
        if not (child / MANIFEST).exists():
            raise CheckpointError(
                f'"{child}": {MANIFEST} is missing, so the arrays of this process cannot be found; {AGAIN}'
            )
    return tuple(sorted(found, key=lambda child: (len(child.name), child.name)))


def read_metadata(store: Store, names: Sequence[str], use_zarr3: bool) -> dict[str, Array | CheckpointError | None]:
    """The zarr metadata of the arrays called `names`; None where there is none, the error where it is not usable.

    The JSON is read as plain values, all at once: opening each array with TensorStore instead takes three times as
    long (0.40 s against 0.12 s for 10,000 arrays).
    """
    first, second = (_ZARR3, _ZARR) if use_zarr3 else (_ZARR, _ZARR3)
    found: dict[str, Array | CheckpointError | None] = dict.fromkeys(names)
    for filename in (first, second):
        # The other one: `_METADATA` did not tell before Orbax 0.4.8.
        left = [name for name, value in found.items() if value is None]
        prefixes = [prefix(name) for name in left]
        values = store.values([start + filename for start in prefixes])
        for name, start, value in zip(left, prefixes, values, strict=True):
            if value is not None:
                try:
                    found[name] = Array(start, *_parse(filename, value))
                except CheckpointError as error:
                    found[name] = CheckpointError(f"{start}{filename} {error}")
    return found


def pieces(store: Store, array: Array, all_stored: bool, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
    """One of the array's chunks, as `Source.pieces` gives it.

    Raises:
        as `read_array`.
    """
    stored = None
    if array.encoding is not None:
        stored = store.stored(array.prefix + array.encoding.key(array.grid.place(chunk)))
    if array.encoding is None or stored is None:  # TensorStore knows whether it may be missing
        nbytes = chunk.size * numpy_dtype(array.spec.dtype).itemsize
        yield from in_one(chunk.origin, lambda: read_array(store, array, all_stored, chunk), nbytes, meter)
        return
    dtype = numpy_dtype(array.spec.dtype)
    nbytes = math.prod(array.grid.chunk) * dtype.itemsize
    if (raw := decoded(stored, array.encoding.compressed, nbytes, meter)) is not None:
        values = np.frombuffer(raw, dtype).reshape(array.grid.chunk)
        yield chunk.origin, values[whole(chunk.shape).within((0,) * values.ndim)]
        return
    try:
        with decoding(stored, array.encoding.compressed, meter) as fill:
            yield from timed(chunk_pieces(fill, array.grid.chunk, chunk, dtype), meter, "decode")
    except ValueError as error:
        where = "" if isinstance(stored, bytes) else f" ({stored.file} from byte {stored.start} to {stored.stop})"
        raise ValueError(f"chunk {list(array.grid.place(chunk))}{where}: {error}") from None


def read_array(store: Store, array: Array, all_stored: bool, box: Box | None = None) -> np.ndarray:
    """The array or a part of it, in C order.

    Args:
        store: where it lies.
        array: its place and spec.
        box: the part; None is all of it.
        all_stored: whether the checkpoint says that all chunks were stored. If neither it nor the array does, a chunk
            that is not there stands for zeros; else it is an error.

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
        raise ValueError(f"its metadata changed since it was opened: {opened.dtype.name}{list(opened.shape)}")
    if not fill_missing and len(array.grid) > _BATCH:  # else each of them would be asked for, and found missing
        present = store.count(array.prefix)
        if present < len(array.grid):
            raise ValueError(f"{len(array.grid)} chunks and their metadata are due, but only {present} files are there")
    # NumPy's own memory: where there is not enough, it raises MemoryError, while TensorStore would end the process.
    box = box or whole(array.spec.shape)
    result = np.empty(box.shape, opened.dtype.numpy_dtype)
    ts.array(result).write(opened[box.within((0,) * len(box.shape))]).result()
    return result


def prefix(name: str) -> str:
    """What the keys of the array `name` start with. The empty name is a tree that is a single array."""
    return f"{name}/" if name else ""


def reason(error: BaseException, path: Path) -> str:
    """What TensorStore's error says, in one line, without its own source locations; files relative to `path`."""
    text = str(error) or type(error).__name__
    text = re.sub(r"\s*\[[a-z_ ]+='.*?'\](?=\s|$|;|\[)", "", text, flags=re.DOTALL)
    text = re.sub(r"\s+", " ", text).strip()
    if "NOT_FOUND: " in text and "missing" not in text:
        text += " (there is no such file)"
    text = re.sub(r"\b[A-Z]+(_[A-Z]+)*: ", "", text)  # the status code
    text = re.sub(r'^Error opening "\w+" driver: ', "", text)
    text = text.replace(f' in OCDBT database at local file "{path}/"', "").replace(f"{path}/", "")
    return text if len(text) <= 300 else text[:200] + " ... " + text[-95:]


class _Files:
    """One directory for each array."""

    format = "one directory per leaf"
    advice = AGAIN

    def __init__(self, path: Path, context: ts.Context) -> None:
        self._path = path
        self._spec = _files(path)
        self._context = context
        self._opened = ts.KvStore.open(self._spec, context=context).result()

    def values(self, keys: Sequence[str]) -> list[bytes | None]:
        return _values((self._opened, key) for key in keys)

    def count(self, prefix: str) -> int:
        return _count(self._opened, prefix)

    def stored(self, key: str) -> Stored | bytes | None:
        file = self._path / key
        try:
            return Stored(file, 0, file.stat().st_size)
        except OSError:
            return None

    def kvstore(self, prefix: str) -> tuple[dict[str, Any], ts.Context]:
        return {**self._spec, "path": self._spec["path"] + prefix}, self._context


class _Merged:
    """One OCDBT database."""

    format = "OCDBT"
    advice = AGAIN

    def __init__(self, path: Path, context: ts.Context) -> None:
        self._spec = _ocdbt(path)
        self._context = context
        self._opened = ts.KvStore.open(self._spec, context=context).result()
        self._places = _index(path, context)

    def values(self, keys: Sequence[str]) -> list[bytes | None]:
        found = {key: self._places.get(key) for key in keys}
        left = [key for key, value in found.items() if not isinstance(value, bytes)]
        read = dict(zip(left, _values((self._opened, key) for key in left), strict=True))
        return [value if isinstance(value := found[key], bytes) else read[key] for key in keys]

    def stored(self, key: str) -> Stored | bytes | None:
        return self._places.get(key)

    def count(self, prefix: str) -> int:
        return _count(self._opened, prefix)

    def kvstore(self, prefix: str) -> tuple[dict[str, Any], ts.Context]:
        return {**self._spec, "path": prefix}, self._context


class _Union:
    """The databases of several processes that no manifest joins: the chunks of one array lie in several of them."""

    advice = f"bring the {PROCESS_PREFIX}* directories of all processes together in one place; if they are, {AGAIN}"

    def __init__(self, processes: Sequence[Path], context: ts.Context) -> None:
        self.format = f"OCDBT, not merged ({len(processes)} {'processes' if len(processes) > 1 else 'process'})"
        self._places: dict[str, Stored | bytes] = {}
        self._stores: dict[str, ts.KvStore] = {}
        for process in processes:
            opened = ts.KvStore.open(_ocdbt(process), context=context).result()
            found = _index(process, context)
            # What several processes hold is a replica: Orbax has each write all of it.
            self._places = found | self._places
            self._stores = dict.fromkeys(found, opened) | self._stores
        self._keys = sorted(self._places)

    def values(self, keys: Sequence[str]) -> list[bytes | None]:
        left = [key for key in keys if isinstance(self._places.get(key), Stored)]
        read = dict(zip(left, _values((self._stores[key], key) for key in left), strict=True))
        return [value if isinstance(value := self._places.get(key), bytes) else read.get(key) for key in keys]

    def stored(self, key: str) -> Stored | bytes | None:
        return self._places.get(key)

    def count(self, prefix: str) -> int:
        return len(self._below(prefix))

    def kvstore(self, prefix: str) -> tuple[dict[str, Any], ts.Context]:
        context = ts.Context()
        memory = ts.KvStore.open({"driver": "memory"}, context=context).result()
        keys = self._below(prefix)
        for key, value in zip(keys, self.values(keys), strict=True):
            if value is not None:
                memory.write(key, value).result()
        return {"driver": "memory", "path": prefix}, context

    def _below(self, prefix: str) -> list[str]:
        start = stop = bisect.bisect_left(self._keys, prefix)
        while stop < len(self._keys) and self._keys[stop].startswith(prefix):
            stop += 1
        return self._keys[start:stop]


def _index(path: Path, context: ts.Context) -> dict[str, Stored | bytes]:
    """All keys of an OCDBT database, with the values that lie within its nodes, and the places of the others.

    Raises:
        CheckpointError: the database is damaged, or lacks a file that holds values.
    """
    try:
        database = Database(path, context)
    except TENSORSTORE_ERRORS as error:
        raise CheckpointError(f'"{path}": its list of arrays cannot be read: {reason(error, path)}; {AGAIN}') from error
    try:
        database.check_files()
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {AGAIN}") from None
    return database.places


def _count(store: ts.KvStore, prefix: str) -> int:
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
    return len(store.list(ts.KvStore.KeyRange(prefix, end)).result())


def _values(places: Iterable[tuple[ts.KvStore, str]]) -> list[bytes | None]:
    places = list(places)
    found: list[bytes | None] = []
    for start in range(0, len(places), _BATCH):
        futures = [store.read(key) for store, key in places[start : start + _BATCH]]
        for future in futures:
            result = future.result()
            found.append(result.value if result.state == "value" else None)
    return found


def _context() -> ts.Context:
    # The pool holds the nodes of OCDBT's tree, so that they are read once, not once for each array. It is named in the
    # store's spec only: chunks are not cached.
    return ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}, "file_io_concurrency": {"limit": 64}})


def _files(path: Path) -> dict[str, Any]:
    return {"driver": "file", "path": f"{path}/"}


def _ocdbt(path: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": _files(path), "cache_pool": "cache_pool#ocdbt"}


@functools.lru_cache(maxsize=10_000)  # the leaves of equal layers have equal metadata
def _parse(filename: str, value: bytes) -> tuple[str, TensorSpec, Grid, Encoding | None, bool]:
    """The last five attributes of an `Array`. The error's text continues the name of the file."""
    try:
        metadata = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not JSON ({error})") from None
    if not isinstance(metadata, dict):
        raise CheckpointError("is not a JSON object")
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
    # A chunk is a device's part of the array, or less.
    if len(chunk) != len(shape) or any(c > max(n, 1) for c, n in zip(chunk, shape, strict=True)):
        raise CheckpointError(f"says chunks of {list(chunk)} for an array of {list(shape)}")
    if spec.nbytes > _MOST_BYTES or math.prod(grid.counts) > _MOST_CHUNKS:
        raise CheckpointError(f"says {spec} in {math.prod(grid.counts)} chunks, which is not possible")
    known = encoding(metadata, spec.dtype, 2 if filename == _ZARR else 3)
    driver = "zarr" if filename == _ZARR else "zarr3"
    return driver, spec, grid, known, filename == _ZARR and metadata.get("fill_value") is None


def _sizes(what: str, sizes: object, least: int) -> tuple[int, ...]:
    if (
        not isinstance(sizes, list)
        or not all(type(n) is int and least <= n < _MOST_BYTES for n in sizes)
        or len(sizes) > _MOST_AXES
    ):
        raise CheckpointError(f"has no valid {what}: {sizes!r:.100}")
    return tuple(sizes)


def _dtype(dtype: object) -> str:
    """The name in our table: zarr spells NumPy's own dtypes ``<f4``; the others, and all in zarr3, have names."""
    if isinstance(dtype, str):
        if dtype in SAFETENSORS_TAGS:
            return dtype
        if _ZARR_DTYPE.fullmatch(dtype):
            with contextlib.suppress(TypeError, ConvertError):
                return dtype_name(np.dtype(dtype))
    raise CheckpointError(f"says the dtype {dtype!r:.100}; known are {', '.join(SAFETENSORS_TAGS)}")
