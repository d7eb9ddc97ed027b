"""Reads msgpack files of ``flax.serialization``: Hugging Face's ``flax_model.msgpack``, its shards with an index, what
``flax.training.checkpoints`` wrote as ``checkpoint_N``, and plain ``to_bytes`` files.

Lists and tuples are maps with the keys '0', '1', ... in them; arrays above a gigabyte are cut in chunks, which are joined.
"""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

from convert.checkpoints.encodings import msgpack_tokens
from convert.checkpoints.files import (
    COPY_AGAIN,
    FileSource,
    Place,
    check_index,
    children,
    files_in,
    head,
    opened,
    read_index,
)
from convert.checkpoints.source import Absent, Format, Leaf, Options, Source, distinct_names
from convert.core.errors import CheckpointError

_INDEX = ".msgpack.index.json"
_STEP = re.compile(r"checkpoint_(\d{1,18})")  # flax/training/checkpoints.py, prefix "checkpoint_"
_PAX = (b"\x82\xafflattened_state", b"\x82\xb0str_pytree_state")
_T5X = (b"\x82\xa7version", b"\x82\xa9optimizer")


def _open(path: Path, options: Options) -> Source:
    notes: tuple[str, ...] = ()
    if path.is_dir():
        path, notes = _step(path, options.step)
    elif options.step is not None:
        raise CheckpointError(f"{path}: a single file has no steps; leave out --step, or give its directory")
    if path.name.endswith(_INDEX):
        return _sharded(path)
    leaves, places, absent = read_tree(path)
    return _source(path, "flax msgpack", leaves, places, absent, notes)


def _sharded(index: Path) -> Source:
    shards = read_index(index)
    leaves: list[Leaf] = []
    places: dict[tuple[str, ...], Place] = {}
    absent: list[Absent] = []
    found: dict[Path, set[str]] = {}
    for file in shards:
        here, where, empty = read_tree(file)
        leaves += here
        places |= where
        absent += empty
        found[file] = {"/".join(leaf.keys) for leaf in here}
    check_index(index, shards, found)
    return _source(index.parent, f"flax msgpack, {len(shards)} shards", leaves, places, tuple(absent), ())


def _source(
    path: Path,
    format: str,
    leaves: list[Leaf],
    places: dict[tuple[str, ...], Place],
    absent: tuple[Absent, ...],
    notes: tuple[str, ...],
) -> Source:
    named = distinct_names(path, leaves)
    return FileSource(path, format, named, {name: places[leaf.keys] for name, leaf in named.items()}, absent, notes)


def read_tree(path: Path) -> tuple[list[Leaf], dict[tuple[str, ...], Place], tuple[Absent, ...]]:
    """The leaves of one file, where each lies, and what holds no array.

    Raises:
        CheckpointError: damaged or truncated; the message names the file and the leaf.
    """
    leaves: list[Leaf] = []
    places: dict[tuple[str, ...], Place] = {}
    absent: list[Absent] = []
    with map_file(path) as data:
        for keys, found in msgpack_tokens.walk_tree(data, path):
            if not isinstance(found, msgpack_tokens.Packed):
                absent.append(Absent(keys, "string" if isinstance(found, msgpack_tokens.Text) else found))
                continue
            if keys in places:
                raise CheckpointError(f"{path}: two leaves would be called {'/'.join(keys)!r}; {COPY_AGAIN}")
            leaves.append(Leaf(keys, found.spec))
            places[keys] = Place(path, found.pieces, found.spec, value=found.value)
    return leaves, places, tuple(absent)


def map_file(path: Path) -> mmap.mmap:
    """The file as memory, to be walked.

    Raises:
        CheckpointError: empty or unreadable.
    """
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise CheckpointError(f"{path}: the file is empty; {COPY_AGAIN}")
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None


def _step(directory: Path, step: int | None) -> tuple[Path, tuple[str, ...]]:
    steps = _steps(directory)
    known = ", ".join(map(str, sorted(steps)))
    if step is not None and step not in steps:
        raise CheckpointError(f"{directory}: there is no step {step}; there are {known}")
    chosen = max(steps) if step is None else step
    return steps[chosen], (f"step {chosen} of {known}",)


def _steps(directory: Path) -> dict[int, Path]:
    matches = ((_STEP.fullmatch(child.name), child) for child in children(directory))
    return {int(match[1]): child for match, child in matches if match and is_msgpack(child)}


def is_msgpack(path: Path) -> bool:
    """Whether the file starts as a map of flax does, or as a single array; paxml's and T5X's do not count."""
    start = head(path)
    if len(start) < 2 or start.startswith((*_PAX, *_T5X)):
        return start == b"\x80"
    after = {0xDE: 3, 0xDF: 5}.get(start[0], 1 if 0x81 <= start[0] <= 0x8F else 0)
    if after:
        return len(start) > after and (0xA0 <= start[after] <= 0xBF or 0xD9 <= start[after] <= 0xDB)
    width = {0xC7: 2, 0xC8: 3, 0xC9: 5, 0xD4: 1, 0xD5: 1, 0xD6: 1, 0xD7: 1, 0xD8: 1}.get(start[0], 0)
    return bool(width) and len(start) > width + 1 and start[width] in (1, 2, 3) and start[width + 1] & 0xF0 == 0x90


def _is_index(path: Path) -> bool:
    return path.name.endswith(_INDEX) and head(path).lstrip().startswith(b"{")


def _find(path: Path) -> list[Path]:
    if _is_index(path):
        return [path]
    found = files_in(path, (".msgpack", _INDEX), lambda file: _is_index(file) or is_msgpack(file))
    indexes = [file for file in found if _is_index(file)]
    shards = tuple(f"{file.name.removesuffix(_INDEX)}-" for file in indexes)
    found = [file for file in found if not (shards and file.name.startswith(shards))]
    return found or ([path] if path.is_dir() and _steps(path) else [])


FORMAT = Format(
    "flax msgpack",
    "a file of flax.serialization.to_bytes, flax_model.msgpack with an index or without, checkpoint_N of flax.training",
    _find,
    _open,
    frozenset({"step"}),
)
