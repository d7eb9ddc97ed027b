"""Reads all keys of an OCDBT database from the nodes of its tree, at once.

OCDBT is TensorStore's key-value store in few files. ``manifest.ocdbt`` points to the root of the tree. The nodes are in
``d/`` together with the values; short values are inside the nodes. Reading one key after the other takes a time that
grows with the size of the nodes, and Orbax writes nodes of 100 MB: 50,000 arrays took 4 s, this module takes 0.3 s.
Manifest and nodes have checksums (CRC-32C); the values outside of the nodes have none.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tensorstore as ts

from convert.checkpoints.access import Boundary
from convert.checkpoints.encodings.zarr_chunks import FileRange
from convert.checkpoints.errors import incomplete, truncated
from convert.core.system.process import return_freed_memory
from convert.core.system.regular_file import ObjectPath

MANIFEST = "manifest.ocdbt"

# The exceptions of TensorStore, which stand for absl's status codes (python/tensorstore/status.cc).
TENSORSTORE_ERRORS = (ValueError, OSError, RuntimeError, IndexError, KeyError, OverflowError, MemoryError)


def kvstore(path: Path) -> dict[str, Any]:
    """Return the TensorStore spec of a directory."""
    return path.kvstore() if isinstance(path, ObjectPath) else {"driver": "file", "path": f"{path}/"}


class Database:
    """The newest version of the database in the directory `path`.

    Attributes:
        values: keys in order, each with its value where it is inside a node, or with the place of the value.

    Raises:
        ValueError: a file is missing, truncated or corrupt, as TensorStore reports it.
        CheckpointError: a link leads out of the checkpoint, or a file is no regular one.
        KeyError or IndexError: TensorStore describes the nodes in an unknown form.
    """

    def __init__(self, path: Path, context: ts.Context, boundary: Boundary) -> None:
        self.values: dict[str, bytes | FileRange] = {}
        self._path, self._context, self._boundary = path, context, boundary
        for file in path.glob("manifest.*"):
            boundary.check_file(file)
        self._read_nodes: set[str] = set()
        self._files: dict[str, _ValueFile] = {}
        self._same: dict[bytes, bytes] = {}  # arrays of one shape have equal metadata: keep it once
        self._base = ts.KvStore.open(kvstore(path), context=context).result()
        manifest: dict[str, Any] = ts.ocdbt.dump(self._base, context=context).result()
        versions: list[dict[str, Any]] = manifest["versions"]
        root = versions[-1]["root"].get("location")
        if root is not None:  # else it is empty
            self._read(root, b"", versions[-1]["root_height"])
            return_freed_memory()

    def check_files(self, fix: str) -> None:
        """Check that every file with values exists and has the required length.

        Args:
            fix: the next step in the error.

        Raises:
            CheckpointError: one is missing or too short.
        """
        for file in sorted(self._files.values(), key=lambda file: file.path):
            name = file.path.relative_to(self._path)
            stop, key = file.last
            try:
                status = file.path.stat()
            except OSError as error:
                problem = f"{name}, which holds {key}, cannot be read: {error.strerror}"
                raise incomplete(problem, self._path, fix=fix) from None
            if stat.S_ISDIR(status.st_mode):
                problem = f"{name}, which holds {key}, is a directory"
                raise incomplete(problem, self._path, expected="a file", got="a directory", fix=fix)
            if (size := status.st_size) < stop:
                problem = f"{name} is truncated: {key} ends after the end of the file"
                raise truncated(problem, self._path, expected=f"{stop} bytes", got=f"{size} bytes", fix=fix)

    def _read(self, location: str, prefix: bytes, height: int) -> None:
        """Read the entries below a node. `height` decreases on the way down, so a corrupt file cannot cause a loop."""
        _, directory, name, offset, _ = location.split(":")
        self._file(directory + name)
        if location in self._read_nodes:  # 20 levels of two entries each, all to one node, would take a million reads
            raise ValueError(f"two entries of the tree refer to the node {location}")
        self._read_nodes.add(location)
        try:
            node: dict[str, Any] = ts.ocdbt.dump(self._base, node=location, context=self._context).result()
        except TENSORSTORE_ERRORS as error:
            raise ValueError(f"{unquote(directory + name)} at byte {offset}: {error}") from error
        if node["height"] != height:
            raise ValueError(f"the node {location}: expected the height {height}, got {node['height']}")
        for entry in node["entries"]:
            if height > 0:
                self._read(entry["location"], prefix + entry["subtree_common_prefix"], height - 1)
                continue
            key = (prefix + entry["key"]).decode()
            if "inline_value" in entry:
                value = entry["inline_value"]
                self.values[key] = self._same.setdefault(value, value)
                continue
            _, directory, name, offset, length = entry["indirect_value"].split(":")
            file = self._file(directory + name)
            start = int(offset)
            stop = start + int(length)
            self.values[key] = FileRange(file.path, start, stop)
            file.last = max(file.last, (stop, key))

    def _file(self, quoted: str) -> _ValueFile:
        """Return a file of nodes and values.

        Raises:
            ValueError: its name leads out of the directory.
            CheckpointError: a link leads out of the checkpoint, or the file is no regular one.
        """
        if (known := self._files.get(quoted)) is not None:
            return known
        name = unquote(quoted)
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"the database refers to the file {name!r} outside of its directory")
        file = self._files[quoted] = _ValueFile(self._path / name)
        self._boundary.check_file(file.path)
        return file


class _ValueFile:
    """A file of nodes and values: its path, and the end and the key of the last value in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = (0, "")
