"""Reads msgpack files of ``flax.serialization``: Hugging Face's ``flax_model.msgpack``, its shards with an index,
``checkpoint_N`` of ``flax.training.checkpoints``, and plain ``to_bytes`` files.

Lists and tuples are maps with the keys '0', '1', ...; arrays above a gigabyte are split into chunks, which are joined here.
"""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

from convert.checkpoints.access import Boundary, children, head
from convert.checkpoints.encodings import flax_arrays
from convert.checkpoints.errors import (
    COPY_AGAIN,
    name_clash,
    option_rejected,
    step_chosen,
    step_not_found,
    truncated,
    unreadable,
)
from convert.checkpoints.files import FileSource, StoredArray, check_index, files_in, read_index
from convert.checkpoints.source import Absent, Format, Leaf, Options, Source, distinct_names
from convert.core.findings import Finding
from convert.core.system.regular_file import Content, map_regular

_INDEX = ".msgpack.index.json"
_STEP = re.compile(r"checkpoint_(\d{1,18})")  # flax/training/checkpoints.py, prefix "checkpoint_"
_MODEL, _OPTIMIZER = "flax_model", "opt_state.msgpack"  # transformers' training scripts write both into one folder
_PAX = (b"\x82\xafflattened_state", b"\x82\xb0str_pytree_state")
_T5X = (b"\x82\xa7version", b"\x82\xa9optimizer")


def _open(path: Path, options: Options) -> Source:
    notes: tuple[Finding, ...] = ()
    if path.is_dir():
        path, notes = _choose_step(path, options.step)
        options.boundary.check(path)
    elif options.step is not None:
        raise option_rejected(
            path, "a single file has no steps", "leave out --step, or give the directory of the steps"
        )
    if path.name.endswith(_INDEX):
        return _open_shards(path, options.boundary)
    leaves, arrays, absent = read_tree(path)
    return _source(path, "flax msgpack", leaves, arrays, absent, notes)


def _open_shards(index: Path, boundary: Boundary) -> Source:
    shards = read_index(index, boundary)
    leaves: list[Leaf] = []
    arrays: dict[tuple[str, ...], StoredArray] = {}
    absent: list[Absent] = []
    names: dict[Path, set[str]] = {}
    for file in shards:
        file_leaves, file_arrays, file_absent = read_tree(file)
        leaves += file_leaves
        arrays |= file_arrays
        absent += file_absent
        names[file] = {"/".join(leaf.keys) for leaf in file_leaves}
    check_index(index, shards, names)
    return _source(index.parent, f"flax msgpack, {len(shards)} shards", leaves, arrays, tuple(absent), ())


def _source(
    path: Path,
    format: str,
    leaves: list[Leaf],
    arrays: dict[tuple[str, ...], StoredArray],
    absent: tuple[Absent, ...],
    notes: tuple[Finding, ...],
) -> Source:
    named = distinct_names(path, leaves)
    return FileSource(path, format, named, {name: arrays[leaf.keys] for name, leaf in named.items()}, absent, notes)


def read_tree(path: Path) -> tuple[list[Leaf], dict[tuple[str, ...], StoredArray], tuple[Absent, ...]]:
    """Read the leaves of one file, the place of each, and the nodes without an array.

    Raises:
        CheckpointError: damaged or truncated; the finding names the file and the leaf.
    """
    leaves: list[Leaf] = []
    arrays: dict[tuple[str, ...], StoredArray] = {}
    absent: list[Absent] = []
    with closing(map_file(path)) as data:
        for keys, node in flax_arrays.walk_tree(data, path):
            if not isinstance(node, flax_arrays.PackedArray):
                absent.append(Absent(keys, "string" if isinstance(node, flax_arrays.Text) else node))
                continue
            if keys in arrays:
                raise name_clash(path, "/".join(keys), COPY_AGAIN)
            leaves.append(Leaf(keys, node.spec))
            arrays[keys] = StoredArray(path, node.ranges, node.spec, value=node.value)
    return leaves, arrays, tuple(absent)


def map_file(path: Path) -> Content:
    """Return the bytes of the file, without reading them.

    Raises:
        CheckpointError: empty or unreadable.
    """
    try:
        return map_regular(path)
    except ValueError:
        raise truncated("the file is empty", path) from None
    except OSError as error:
        raise unreadable(path, error) from None


def _choose_step(directory: Path, step: int | None) -> tuple[Path, tuple[Finding, ...]]:
    steps = _steps(directory)
    if step is not None and step not in steps:
        raise step_not_found(directory, step, steps)
    chosen = max(steps) if step is None else step
    return steps[chosen], (step_chosen(chosen, steps),)


def _steps(directory: Path) -> dict[int, Path]:
    matches = ((_STEP.fullmatch(child.name), child) for child in children(directory))
    return {int(match[1]): child for match, child in matches if match and is_msgpack(child)}


def is_msgpack(path: Path) -> bool:
    """Whether the file starts like a map or an array of flax; files of paxml and T5X do not count."""
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
    files = files_in(path, (".msgpack", _INDEX), lambda file: _is_index(file) or is_msgpack(file))
    shards = tuple(f"{file.name.removesuffix(_INDEX)}-" for file in files if _is_index(file))
    files = [file for file in files if not (shards and file.name.startswith(shards))]
    if any(file.name.startswith(_MODEL) for file in files):
        files = [file for file in files if file.name != _OPTIMIZER]
    return files or ([path] if path.is_dir() and _steps(path) else [])


FORMAT = Format(
    "flax msgpack",
    "a file of flax.serialization.to_bytes, flax_model.msgpack with or without an index, checkpoint_N of flax.training",
    _find,
    _open,
    frozenset({"step"}),
)
