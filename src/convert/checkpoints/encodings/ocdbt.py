"""What an OCDBT database holds, read from the nodes of its tree all at once.

OCDBT is TensorStore's key-value store in few files: ``manifest.ocdbt`` points to the tree's root, whose nodes lie in
``d/`` together with the values; short values lie inside the nodes. To ask for one key after the other takes a time that
grows with the size of the nodes, and the nodes of Orbax hold 100 MB: 50,000 arrays took 4 s, this takes 0.3 s.
Manifest and nodes have checksums (CRC-32C), the values outside of the nodes have none.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tensorstore as ts

from convert.checkpoints.encodings.zarr_chunks import Stored
from convert.core.errors import CheckpointError

MANIFEST = "manifest.ocdbt"

# What TensorStore raises: absl's status codes as these (python/tensorstore/status.cc).
TENSORSTORE_ERRORS = (ValueError, OSError, RuntimeError, IndexError, KeyError, OverflowError, MemoryError)


class Database:
    """The newest version of the database in the directory `path`.

    Attributes:
        path_variants: keys in order, with the values that lie within the nodes, and the places of the others.

    Raises:
        ValueError: a file is missing, truncated or corrupt; as TensorStore raises it.
        KeyError or IndexError: TensorStore told something else than is known here.
    """

    def __init__(self, path: Path, context: ts.Context) -> None:
        self.places: dict[str, bytes | Stored] = {}
        self._path, self._context = path, context
        self._files: dict[str, _File] = {}
        self._same: dict[bytes, bytes] = {}  # arrays of one shape have the same metadata: it is held once
        self._base = ts.KvStore.open({"driver": "file", "path": f"{path}/"}, context=context).result()
        manifest: dict[str, Any] = ts.ocdbt.dump(self._base, context=context).result()
        versions: list[dict[str, Any]] = manifest["versions"]
        root = versions[-1]["root"].get("location")
        if root is not None:  # else it is empty
            self._read(root, b"", versions[-1]["root_height"])
            _give_back()

    def check_files(self) -> None:
        """Checks that every file which holds values is there, and as long as it must be.

        Raises:
            CheckpointError: one is not. The text has no advice.
        """
        for file in sorted(self._files.values(), key=lambda file: file.path):
            name = file.path.relative_to(self._path)
            stop, key = file.last
            try:
                size = file.path.stat().st_size
            except OSError as error:
                why = f"{name} cannot be read, where {key} lies: {error.strerror}"
                raise CheckpointError(f'"{self._path}": {why}') from None
            if size < stop:
                raise CheckpointError(
                    f'"{self._path}": {name} is truncated: it has {size} bytes, and {key} ends at {stop}'
                )

    def _read(self, location: str, prefix: bytes, height: int) -> None:
        """Takes up the entries below a node. `height` shrinks on the way down, so that no file can send this in circles."""
        _, directory, name, offset, length = location.split(":")
        try:
            node: dict[str, Any] = ts.ocdbt.dump(self._base, node=location, context=self._context).result()
        except TENSORSTORE_ERRORS as error:
            raise ValueError(f"{unquote(directory + name)} at byte {offset}: {error}") from error
        if node["height"] != height:
            raise ValueError(f"the node {location} has height {node['height']}, not {height}")
        for entry in node["entries"]:
            if height > 0:
                self._read(entry["location"], prefix + entry["subtree_common_prefix"], height - 1)
                continue
            key = (prefix + entry["key"]).decode()
            if "inline_value" in entry:
                value = entry["inline_value"]
                self.places[key] = self._same.setdefault(value, value)
                continue
            _, directory, name, offset, length = entry["indirect_value"].split(":")
            file = self._files.get(directory + name) or self._file(directory + name)
            start = int(offset)
            stop = start + int(length)
            self.places[key] = Stored(file.path, start, stop)
            file.last = max(file.last, (stop, key))

    def _file(self, quoted: str) -> _File:
        """A file in which no value was so far.

        Raises:
            ValueError: its name leads out of the directory.
        """
        name = unquote(quoted)
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"it names the file {name!r}, which is not in it")
        file = self._files[quoted] = _File(self._path / name)
        return file


def _give_back() -> None:
    """Has glibc return to the system what TensorStore has freed: 1.5 kB of JSON for each array, which nothing else would use,
    as it was taken in other threads. Other C libraries do so by themselves, or cannot be asked."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class _File:
    """A file of values: where it is, where the last of them ends, and that one's key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = (0, "")
