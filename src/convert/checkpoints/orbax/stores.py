"""Opens the key-value store that holds the arrays of an Orbax directory: OCDBT, or one directory per array."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import tensorstore as ts

from convert.checkpoints.encodings.ocdbt import MANIFEST, TENSORSTORE_ERRORS, Database
from convert.checkpoints.encodings.zarr_chunks import FileRange
from convert.checkpoints.errors import incomplete, unreadable

# One directory for each process (`ocdbt.process_3`) or replica (`ocdbt.process_replica_3`); Orbax 0.12.8,
# _src/serialization/ocdbt_process_spec.py. The values stay in them after the merge; the manifest above refers to them.
PROCESS_PREFIX = "ocdbt.process_"
AGAIN = "copy the checkpoint again, or choose another step with --step"
_BATCH = 10_000  # concurrent reads


class Store(Protocol):
    """A key-value store that holds the files of all arrays of a tree."""

    format: str
    """For people: ``OCDBT`` or ``one directory per leaf``."""

    advice: str
    """The next step where an array cannot be read."""

    def values(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read the values of `keys` concurrently; None for a missing key."""

    def count(self, prefix: str) -> int:
        """Return the number of keys that start with `prefix`."""

    def stored(self, key: str) -> FileRange | bytes | None:
        """Return the place of a value in a file, or the value; None where the key is missing or the place is unknown."""

    def kvstore(self, prefix: str) -> tuple[dict[str, Any], ts.Context]:
        """Return a TensorStore spec (JSON) of the keys that start with `prefix`, and the context to open it in."""


def open_store(path: Path, use_ocdbt: bool | None) -> Store:
    """Open the store of the tree in the directory `path`.

    Args:
        path: an item directory.
        use_ocdbt: the flag in ``_METADATA``; None where there is none (before Orbax 0.11.31).

    Raises:
        CheckpointError: the database is missing or damaged.
    """
    context = _context()
    if use_ocdbt is not False and (path / MANIFEST).exists():
        return _Merged(path, context)
    processes = process_directories(path)
    if use_ocdbt is not False and processes:
        return _Union(processes, context)
    if use_ocdbt:
        raise incomplete(f"{MANIFEST} is missing, which lists the arrays", path, fix=AGAIN)
    return _Files(path, context)


def process_directories(path: Path) -> tuple[Path, ...]:
    """Return the databases of single processes in the directory `path`, in a fixed order. Skips empty directories.

    Raises:
        CheckpointError: one has lost its manifest.
    """
    processes = [child for child in path.glob(f"{PROCESS_PREFIX}*") if child.is_dir() and any(child.iterdir())]
    for child in processes:
        if not (child / MANIFEST).exists():
            raise incomplete(f"{MANIFEST} is missing, which lists the arrays of this process", child, fix=AGAIN)
    return tuple(sorted(processes, key=lambda child: (len(child.name), child.name)))


def reason(error: BaseException, path: Path) -> str:
    """Shorten the text of a TensorStore error: one line, no locations in its C++ source, files relative to `path`."""
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
        return _read_values((self._opened, key) for key in keys)

    def count(self, prefix: str) -> int:
        return _count(self._opened, prefix)

    def stored(self, key: str) -> FileRange | bytes | None:
        file = self._path / key
        try:
            return FileRange(file, 0, file.stat().st_size)
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
        self._values = _index(path, context)

    def values(self, keys: Sequence[str]) -> list[bytes | None]:
        known = {key: self._values.get(key) for key in keys}
        left = [key for key, value in known.items() if not isinstance(value, bytes)]
        read = dict(zip(left, _read_values((self._opened, key) for key in left), strict=True))
        return [value if isinstance(value := known[key], bytes) else read[key] for key in keys]

    def stored(self, key: str) -> FileRange | bytes | None:
        return self._values.get(key)

    def count(self, prefix: str) -> int:
        return _count(self._opened, prefix) if prefix else len(self._values)

    def kvstore(self, prefix: str) -> tuple[dict[str, Any], ts.Context]:
        return {**self._spec, "path": prefix}, self._context


class _Union:
    """The databases of several processes without a common manifest. The chunks of one array may be in several of them."""

    advice = (
        f"copy the {PROCESS_PREFIX}* directories of all processes into one directory; if they are complete, {AGAIN}"
    )

    def __init__(self, processes: Sequence[Path], context: ts.Context) -> None:
        self.format = f"OCDBT, not merged ({len(processes)} {'processes' if len(processes) > 1 else 'process'})"
        self._values: dict[str, FileRange | bytes] = {}
        self._stores: dict[str, ts.KvStore] = {}
        for process in processes:
            opened = ts.KvStore.open(_ocdbt(process), context=context).result()
            values = _index(process, context)
            # A key in several processes is a replica: in Orbax each process writes all of it.
            self._values = values | self._values
            self._stores = dict.fromkeys(values, opened) | self._stores
        self._keys = sorted(self._values)

    def values(self, keys: Sequence[str]) -> list[bytes | None]:
        left = [key for key in keys if isinstance(self._values.get(key), FileRange)]
        read = dict(zip(left, _read_values((self._stores[key], key) for key in left), strict=True))
        return [value if isinstance(value := self._values.get(key), bytes) else read.get(key) for key in keys]

    def stored(self, key: str) -> FileRange | bytes | None:
        return self._values.get(key)

    def count(self, prefix: str) -> int:
        return len(self._keys_with(prefix))

    def kvstore(self, prefix: str) -> tuple[dict[str, Any], ts.Context]:
        context = ts.Context()
        memory = ts.KvStore.open({"driver": "memory"}, context=context).result()
        keys = self._keys_with(prefix)
        for key, value in zip(keys, self.values(keys), strict=True):
            if value is not None:
                memory.write(key, value).result()
        return {"driver": "memory", "path": prefix}, context

    def _keys_with(self, prefix: str) -> list[str]:
        start = stop = bisect.bisect_left(self._keys, prefix)
        while stop < len(self._keys) and self._keys[stop].startswith(prefix):
            stop += 1
        return self._keys[start:stop]


def _index(path: Path, context: ts.Context) -> dict[str, FileRange | bytes]:
    """Read all keys of an OCDBT database, with the values inside its nodes and the places of the others.

    Raises:
        CheckpointError: the database is damaged, or lacks a file with values.
    """
    try:
        database = Database(path, context)
    except TENSORSTORE_ERRORS as error:
        text = f"its list of arrays: {reason(error, path)}"
        raise unreadable(path, ValueError(text), fix=AGAIN) from error
    database.check_files(AGAIN)
    return database.values


def _count(store: ts.KvStore, prefix: str) -> int:
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
    return len(store.list(ts.KvStore.KeyRange(prefix, end)).result())


def _read_values(keys: Iterable[tuple[ts.KvStore, str]]) -> list[bytes | None]:
    keys = list(keys)
    values: list[bytes | None] = []
    for start in range(0, len(keys), _BATCH):
        futures = [store.read(key) for store, key in keys[start : start + _BATCH]]
        for future in futures:
            result = future.result()
            values.append(result.value if result.state == "value" else None)
    return values


def _context() -> ts.Context:
    # The pool caches the nodes of OCDBT's tree, so that they are read once, not once for each array. Only the spec of the
    # store names it: chunks are not cached.
    return ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}, "file_io_concurrency": {"limit": 64}})


def _files(path: Path) -> dict[str, Any]:
    return {"driver": "file", "path": f"{path}/"}


def _ocdbt(path: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": _files(path), "cache_pool": "cache_pool#ocdbt"}
