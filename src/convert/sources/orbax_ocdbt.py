"""What an OCDBT database holds, read from the nodes of its tree all at once.

OCDBT is TensorStore's key-value store in few files: ``manifest.ocdbt`` points to the tree's root, whose nodes lie in
``d/`` together with the values; short values lie inside the nodes. To ask for one key after the other takes a time that
grows with the size of the nodes, and the nodes of Orbax hold 100 MB: 50,000 arrays took 4 s, this takes 0.5 s.
Manifest and nodes have checksums (CRC-32C), the values outside of the nodes have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tensorstore as ts

from convert.errors import CheckpointError
from convert.sources.zarr_chunks import Stored

MANIFEST = "manifest.ocdbt"

# What TensorStore raises: absl's status codes as these (python/tensorstore/status.cc).
TENSORSTORE_ERRORS = (ValueError, OSError, RuntimeError, IndexError, KeyError, OverflowError, MemoryError)


def entries(path: Path, context: ts.Context) -> Iterator[tuple[str, bytes | Stored]]:
    """Keys and values of the newest version of the database in the directory `path`, in order.

    Raises:
        ValueError: a file is missing, truncated or corrupt; as TensorStore raises it.
        KeyError or IndexError: TensorStore told something else than is known here.
    """
    base = ts.KvStore.open({"driver": "file", "path": f"{path}/"}, context=context).result()
    manifest: dict[str, Any] = ts.ocdbt.dump(base, context=context).result()
    versions: list[dict[str, Any]] = manifest["versions"]
    root = versions[-1]["root"].get("location")
    if root is not None:  # else it is empty
        yield from _below(path, base, context, root, b"", versions[-1]["root_height"])


def check_files(path: Path, found: Iterable[tuple[str, bytes | Stored]]) -> None:
    """Checks that every file which holds values is there, and as long as it must be.

    Raises:
        CheckpointError: one is not. The text has no advice.
    """
    last: dict[Path, tuple[int, str]] = {}
    for key, value in found:
        if isinstance(value, Stored):
            last[value.file] = max(last.get(value.file, (0, "")), (value.stop, key))
    for file, (stop, key) in sorted(last.items()):
        try:
            size = file.stat().st_size
        except OSError as error:
            file = file.relative_to(path)
            raise CheckpointError(f'"{path}": {file} cannot be read, where {key} lies: {error.strerror}') from None
        if size < stop:
            file = file.relative_to(path)
            raise CheckpointError(f'"{path}": {file} is truncated: it has {size} bytes, and {key} ends at {stop}')


def _below(
    path: Path, base: ts.KvStore, context: ts.Context, location: str, prefix: bytes, height: int
) -> Iterator[tuple[str, bytes | Stored]]:
    """The entries below a node. `height` shrinks on the way down, so that no file can send this in circles."""
    _, directory, file, offset, length = location.split(":")
    try:
        node: dict[str, Any] = ts.ocdbt.dump(base, node=location, context=context).result()
    except TENSORSTORE_ERRORS as error:
        raise ValueError(f"{unquote(directory + file)} at byte {offset}: {error}") from error
    if node["height"] != height:
        raise ValueError(f"the node {location} has height {node['height']}, not {height}")
    for entry in node["entries"]:
        if height > 0:
            below = prefix + entry["subtree_common_prefix"]
            yield from _below(path, base, context, entry["location"], below, height - 1)
        elif "inline_value" in entry:
            yield (prefix + entry["key"]).decode(), entry["inline_value"]
        else:
            _, directory, file, offset, length = entry["indirect_value"].split(":")
            start = int(offset)
            yield (prefix + entry["key"]).decode(), Stored(_file(path, directory + file), start, start + int(length))


@lru_cache(maxsize=1000)
def _file(path: Path, quoted: str) -> Path:
    """A file of the database.

    Raises:
        ValueError: its name leads out of the directory.
    """
    name = unquote(quoted)
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"it names the file {name!r}, which is not in it")
    return path / name
