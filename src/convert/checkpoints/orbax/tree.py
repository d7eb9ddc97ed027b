"""The tree of an Orbax checkpoint: which leaves there are, what they are called, and where each lies.

It is read from ``_METADATA`` (JSON, by default since Orbax 0.4.3) or from the aggregate file ``checkpoint`` (msgpack,
of older versions, and with ``use_ocdbt=False`` of some later ones), never from names of files: keys may hold dots and slashes, and
nothing is unpickled or evaluated.
"""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from convert.checkpoints.encodings import msgpack_tokens
from convert.checkpoints.encodings.msgpack_tokens import Packed
from convert.core.errors import CheckpointError

METADATA = "_METADATA"
AGGREGATE = "checkpoint"

# utils.py of Orbax: strings in the aggregate file that stand for an array which lies elsewhere.
_PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")
_TUPLE = 4  # msgpack_utils.py, _MsgpackExtType: Orbax's own extension of flax's format
_CHUNKED = "__msgpack_chunked_array__"
# _src/metadata/empty_values.py, and `string` of StringHandler, whose values lie in `_strings.json`.
_NO_ARRAY = {
    "None": "None",
    "Dict": "empty dict",
    "List": "empty list",
    "Tuple": "empty tuple",
    "NamedTuple": "empty named tuple",
    "string": "string",
}
# `value_type` of those that are stored as arrays; empty in the aggregate file, which does not tell.
ARRAYS = ("jax.Array", "np.ndarray", "scalar", "")
_MAX_DEPTH = 200


class Node(NamedTuple):  # made by the ten thousand, in half the time and space of a dataclass
    """A leaf of the tree.

    Attributes:
        keys: the path through the tree.
        name: of the array in the store; None if there is none.
        packed: where it lies in the aggregate file; None if it does not.
        why: why there is no array; None if there is one.
        kind: the `value_type` of ``_METADATA``, such as ``jax.Array``, ``scalar``; empty if not known.
        write_shape: of the piece that one process wrote; never larger than the array. None if not known.
    """

    keys: tuple[str, ...]
    name: str | None = None
    packed: Packed | None = None
    why: str | None = None
    kind: str = ""
    write_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Tree:
    """What a directory says about its tree.

    Attributes:
        nodes: in the order of the file.
        use_ocdbt: None if not told.
        use_zarr3: False if not told.
        all_stored: whether it says that chunks of zeros were stored, too, so that one which is not there was lost.
            Since Orbax 0.10.0 (commit 646f1e68) all chunks are, and ``_METADATA`` says so with
            ``store_array_data_equal_to_fill_value``.
        data: the aggregate file, mapped; empty if there is none.
    """

    nodes: tuple[Node, ...]
    use_ocdbt: bool | None = None
    use_zarr3: bool = False
    all_stored: bool = False
    data: mmap.mmap | bytes = b""


def read_tree(path: Path) -> Tree:
    """The tree of the item directory `path`.

    Raises:
        CheckpointError: neither file is there, or one is truncated or corrupt.
    """
    file, aggregate = path / METADATA, path / AGGREGATE
    packed: dict[tuple[str, ...], Node] = {}
    data: mmap.mmap | bytes = b""
    if aggregate.is_file():
        data = _map(aggregate)
        packed = _unpack(aggregate, data)
    if not file.is_file():
        if not aggregate.is_file():
            raise CheckpointError(
                f'"{path}": {METADATA} is missing, so the names and places of the arrays are not known; '
                "copy the checkpoint again, with all its files"
            )
        return Tree(_checked(path, tuple(packed.values())), data=data)
    metadata = read_json(file)
    # Values in the aggregate file go before `_METADATA`, placeholders do not: as in Orbax 0.12.8's
    # PyTreeCheckpointHandler (_get_internal_metadata). A string or nothing in the place of an array is damage.
    nodes = []
    for node in _nodes(file, metadata):
        other = packed.get(node.keys)
        inlined = other is not None and (
            other.packed is not None or (other.why is not None and node.kind not in ARRAYS)
        )
        nodes.append(other if other is not None and inlined else node)
    return Tree(
        _checked(path, tuple(nodes)),
        _flag(file, metadata, "use_ocdbt"),
        bool(_flag(file, metadata, "use_zarr3")),
        bool(_flag(file, metadata, "store_array_data_equal_to_fill_value")),
        data,
    )


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises:
        CheckpointError: truncated, corrupt or not an object.
    """
    try:
        parsed = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f'"{file}" cannot be read: {error.strerror or error}') from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f'"{file}" is not valid JSON ({error}): it is truncated or corrupt; copy the checkpoint again'
        ) from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f'"{file}" is not a JSON object: it is corrupt; copy the checkpoint again')
    return parsed


def _nodes(file: Path, metadata: Mapping[str, Any]) -> Iterator[Node]:
    entries = metadata.get("tree_metadata")
    if not isinstance(entries, dict):
        raise _corrupt(file, "tree_metadata is missing")
    for label in list(entries):
        entry = entries.pop(label)  # so that what is made of it takes its memory
        try:
            keys = tuple([sys.intern(str(level["key"])) for level in entry["key_metadata"]])  # most leaves share most
            value = entry["value_metadata"]
            kind, shape = value.get("value_type", ""), value.get("write_shape")
        except (TypeError, KeyError, AttributeError):
            raise _corrupt(file, f"the entry {label} has no key_metadata or value_metadata") from None
        if not isinstance(kind, str) or not (
            shape is None or (isinstance(shape, list) and all(isinstance(n, int) for n in shape))
        ):
            raise _corrupt(file, f"value_metadata of the entry {label} is not valid")
        yield Node(
            keys,
            name=None if kind in _NO_ARRAY else ".".join(keys),
            why=_NO_ARRAY.get(kind),
            kind=kind,
            write_shape=None if shape is None else tuple(shape),
        )


def _flag(file: Path, metadata: Mapping[str, Any], name: str) -> bool | None:
    value = metadata.get(name)
    if not isinstance(value, bool | None):
        raise _corrupt(file, f"{name} is {value!r}, not true or false")
    return value


def _corrupt(file: Path, what: str) -> CheckpointError:
    return CheckpointError(f'"{file}": {what}: it is corrupt; copy the checkpoint again')


def _checked(path: Path, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes, without those that stand for an empty container which has children after all (a partial save leaves
    both: tree.py of Orbax 0.12.8, as_nested_tree)."""
    names: dict[str, Node] = {}
    for node in nodes:
        if node.name is not None:
            other = names.setdefault(node.name, node)
            if other is not node:
                raise CheckpointError(
                    f'"{path}": the leaves {list(other.keys)} and {list(node.keys)} have the same name on disk, '
                    f"{node.name!r}: Orbax wrote one over the other, and which is not known. "
                    "Rename a key and save again"
                )
    if all(node.why is None for node in nodes):
        return nodes
    parents = {node.keys[:depth] for node in nodes for depth in range(len(node.keys))}
    return tuple(node for node in nodes if node.why is None or node.keys not in parents)


def _map(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f'"{file}" is empty: it is truncated; copy the checkpoint again') from None
    except OSError as error:
        raise CheckpointError(f'"{file}" cannot be read: {error.strerror or error}') from None


def _unpack(file: Path, data: mmap.mmap | bytes) -> dict[tuple[str, ...], Node]:
    try:
        return {node.keys: node for node in _walk(msgpack_tokens.Walker(data), 0, ())}
    except CheckpointError as error:
        raise CheckpointError(f'"{file}": {error}; copy the checkpoint again') from None


def _walk(walker: msgpack_tokens.Walker, at: int, keys: tuple[str, ...]) -> Iterator[Node]:
    if len(keys) > _MAX_DEPTH:
        raise CheckpointError(f"more than {_MAX_DEPTH} levels at byte {at}")
    token = walker.token(at)
    if token.kind == "map":
        children = list(walker.items(at))
        if not any(key == _CHUNKED for key, _, _ in children):
            if not children:
                yield Node(keys, why="empty dict")
            for key, start, _ in children:
                yield from _walk(walker, start, (*keys, key))
            return
    if token.kind == "array" or (token.kind == "ext" and token.code == _TUPLE):
        spans = walker.sequence(at if token.kind == "array" else token.body)
        if not spans:
            yield Node(keys, why="empty list" if token.kind == "array" else "empty tuple")
        for index, (start, _) in enumerate(spans):
            yield from _walk(walker, start, (*keys, str(index)))
        return
    if token.kind == "str":
        text = walker.text(token)
        mark = next((mark for mark in _PLACEHOLDERS if text.startswith(mark)), None)
        yield Node(keys, why="string") if mark is None else Node(keys, name=text.removeprefix(mark))
        return
    try:
        packed = walker.leaf(at)
    except CheckpointError as error:
        raise CheckpointError(f"leaf {'/'.join(keys)}: {error}") from None
    yield Node(keys, why=packed) if isinstance(packed, str) else Node(keys, packed=packed)
