"""Opens the key-value store that holds the arrays of an Orbax directory: OCDBT, or one directory per array."""

from __future__ import annotations

import bisect
import errno
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from stat import S_ISLNK
from typing import Any, Protocol

import tensorstore as ts

from convert.checkpoints.access import Boundary
from convert.checkpoints.encodings.ocdbt import MANIFEST, TENSORSTORE_ERRORS, Database, kvstore
from convert.checkpoints.encodings.zarr_chunks import FileRange
from convert.checkpoints.errors import incomplete, link_refused, unreadable
from convert.core.system.regular_file import ObjectPath, not_regular, read_regular
from convert.stores.client import context as retries

# One directory for each process (`ocdbt.process_3`) or replica (`ocdbt.process_replica_3`); Orbax 0.12.8,
# _src/serialization/ocdbt_process_spec.py. The values stay in them after the merge; the manifest above refers to them.
PROCESS_PREFIX = "ocdbt.process_"
AGAIN = "copy the checkpoint again, or choose another step with --step"
_BATCH = 10_000  # concurrent reads
_MOST_METADATA = 16 << 20  # bytes of `.zarray` or `zarr.json`; real ones have a few hundred
_THREADS = 16
_PER_THREAD = 100  # files


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


def open_store(path: Path, use_ocdbt: bool | None, boundary: Boundary) -> Store:
    """Open the store of the tree in the directory `path`.

    Args:
        path: an item directory.
        use_ocdbt: the flag in ``_METADATA``; None where there is none (before Orbax 0.11.31).
        boundary: where the files may lie.

    Raises:
        CheckpointError: the database is missing or damaged, or a link leads out of the checkpoint.
    """
    context = _context()
    if use_ocdbt is not False and (path / MANIFEST).exists():
        return _Merged(path, context, boundary)
    processes = process_directories(path)
    if use_ocdbt is not False and processes:
        return _Union(processes, context, boundary)
    if use_ocdbt:
        raise incomplete(f"{MANIFEST} is missing, which lists the arrays", path, fix=AGAIN)
    return _Objects(path, context) if isinstance(path, ObjectPath) else _Files(path, context, boundary)


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

    def __init__(self, path: Path, context: ts.Context, boundary: Boundary) -> None:
        self._path = path
        self._spec = kvstore(path)
        self._context = context
        self._opened = ts.KvStore.open(self._spec, context=context).result()
        self._boundary = boundary
        self._links = {entry.name for entry in os.scandir(path) if entry.is_symlink()}
        self._checked: set[str] = set()  # directories
        self._checked_trees: set[str] = set()  # prefixes of arrays

    def values(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read the values without TensorStore, which would follow links. Threads, for file systems in a network."""
        if len(keys) <= _PER_THREAD:
            return [self._value(key) for key in keys]
        batches = [keys[start : start + _PER_THREAD] for start in range(0, len(keys), _PER_THREAD)]
        with ThreadPoolExecutor(_THREADS) as threads:
            return [
                value for values in threads.map(lambda batch: [*map(self._value, batch)], batches) for value in values
            ]

    def _value(self, key: str) -> bytes | None:
        self._check_directories(key)
        file = f"{self._path}/{key}"
        try:
            try:
                return read_regular(file, _MOST_METADATA, follow_link=False)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
            self._boundary.check(Path(file))
            return read_regular(file, _MOST_METADATA)
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the key
            return None
        except OSError as error:
            raise unreadable(file, error) from None

    def _check_directories(self, key: str) -> None:
        """Check that no directory in the path of a value is a link out of the checkpoint."""
        directory = key.rpartition("/")[0]
        if directory in self._checked:
            return
        first, *rest = directory.split("/")
        if ".." in (first, *rest):
            problem = f"the checkpoint refers to {key!r:.200}, which lies outside; such a path is not followed"
            raise link_refused(problem, self._path, fix="save the checkpoint again")
        if first in self._links or rest:
            self._boundary.check(Path(f"{self._path}/{directory}"))
        self._checked.add(directory)

    def count(self, prefix: str) -> int:
        return _count(self._opened, prefix)

    def stored(self, key: str) -> FileRange | bytes | None:
        self._check_directories(key)
        file = Path(f"{self._path}/{key}")
        try:
            stat = file.lstat()
            if S_ISLNK(stat.st_mode):
                self._boundary.check(file)
                stat = file.stat()
        except (OSError, ValueError):
            return None
        if (error := not_regular(stat.st_mode)) is not None:
            raise unreadable(file, error)
        return FileRange(file, 0, stat.st_size)

    def kvstore(self, prefix: str) -> tuple[dict[str, Any], ts.Context]:
        if prefix not in self._checked_trees:  # TensorStore opens files as they are
            self._boundary.check_tree(self._path / prefix)
            self._checked_trees.add(prefix)
        return {**self._spec, "path": self._spec["path"] + prefix}, self._context


class _Objects:
    """One directory for each array, in an object store."""

    format = _Files.format
    advice = AGAIN

    def __init__(self, path: ObjectPath, context: ts.Context) -> None:
        self._path, self._spec, self._context = path, kvstore(path), context
        self._opened = ts.KvStore.open(self._spec, context=context).result()

    def values(self, keys: Sequence[str]) -> list[bytes | None]:
        return _read_values((self._opened, key) for key in keys)

    def count(self, prefix: str) -> int:
        return _count(self._opened, prefix)

    def stored(self, key: str) -> FileRange | bytes | None:
        try:
            return FileRange(self._path / key, 0, (self._path / key).lstat().st_size)
        except FileNotFoundError:
            return None

    def kvstore(self, prefix: str) -> tuple[dict[str, Any], ts.Context]:
        return {**self._spec, "path": self._spec["path"] + prefix}, self._context


class _Merged:
    """One OCDBT database."""

    format = "OCDBT"
    advice = AGAIN

    def __init__(self, path: Path, context: ts.Context, boundary: Boundary) -> None:
        self._spec = _ocdbt(path)
        self._context = context
        self._values = _index(path, context, boundary)
        self._opened = ts.KvStore.open(self._spec, context=context).result()

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

    def __init__(self, processes: Sequence[Path], context: ts.Context, boundary: Boundary) -> None:
        self.format = f"OCDBT, not merged ({len(processes)} {'processes' if len(processes) > 1 else 'process'})"
        self._values: dict[str, FileRange | bytes] = {}
        self._stores: dict[str, ts.KvStore] = {}
        for process in processes:
            boundary.check(process)
            values = _index(process, context, boundary)
            opened = ts.KvStore.open(_ocdbt(process), context=context).result()
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


def _index(path: Path, context: ts.Context, boundary: Boundary) -> dict[str, FileRange | bytes]:
    """Read all keys of an OCDBT database, with the values inside its nodes and the places of the others.

    Raises:
        CheckpointError: the database is damaged, or lacks a file with values.
    """
    try:
        database = Database(path, context, boundary)
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
    return ts.Context(
        {"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}, "file_io_concurrency": {"limit": 64}, **retries()}
    )


def _ocdbt(path: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": kvstore(path), "cache_pool": "cache_pool#ocdbt"}
