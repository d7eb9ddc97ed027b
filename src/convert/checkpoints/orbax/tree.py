"""Reads the tree of an Orbax checkpoint: its leaves, their names and the place of each.

The tree is in ``_METADATA`` (JSON, the default since Orbax 0.4.3) or in the aggregate file ``checkpoint`` (msgpack, of older
versions, and of some later ones with ``use_ocdbt=False``). File names are not used, because keys may hold dots and slashes.
Nothing is unpickled or evaluated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from convert.checkpoints.access import Boundary, read_json
from convert.checkpoints.encodings import msgpack_tokens
from convert.checkpoints.encodings.flax_arrays import CHUNKED, PackedArray, packed_array
from convert.checkpoints.encodings.msgpack_tokens import Walker
from convert.checkpoints.errors import MOST_KEYS, corrupt, incomplete, located, too_deep, truncated, unreadable
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.system.regular_file import Content, map_regular

METADATA = "_METADATA"
AGGREGATE = "checkpoint"

# utils.py of Orbax: strings in the aggregate file that stand for an array in another file.
_PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")
_TUPLE = 4  # msgpack_utils.py, _MsgpackExtType: Orbax's own extension of flax's format
# _src/metadata/empty_values.py, and `string` of StringHandler, whose values are in `_strings.json`.
_NO_ARRAY = {
    "None": "None",
    "Dict": "empty dict",
    "List": "empty list",
    "Tuple": "empty tuple",
    "NamedTuple": "empty named tuple",
    "string": "string",
}
# Each `value_type` that is stored as an array; empty in the aggregate file, which has no types.
ARRAYS = ("jax.Array", "np.ndarray", "scalar", "")
_MOST_JSON = 512 << 20  # bytes; 50,000 leaves take 30 MB


class TreeNode(NamedTuple):  # half the time and memory of a dataclass; there may be 50,000
    """A leaf of the tree.

    Attributes:
        keys: the path through the tree.
        name: name of the array in the store; None if it has no entry there.
        packed: the array in the aggregate file; None if it is not in it.
        why: why there is no array; None if there is one.
        kind: the `value_type` of ``_METADATA``, such as ``jax.Array``, ``scalar``; empty if unknown.
        write_shape: shape of the part that one process wrote; never larger than the array. None if unknown.
    """

    keys: tuple[str, ...]
    name: str | None = None
    packed: PackedArray | None = None
    why: str | None = None
    kind: str = ""
    write_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Tree:
    """The tree of a directory, and how its arrays are stored.

    Attributes:
        nodes: in the order of the file.
        use_ocdbt: whether the arrays are in OCDBT; None if unknown.
        use_zarr3: whether zarr3 is the driver; False if unknown.
        all_stored: whether ``_METADATA`` declares that chunks of zeros were stored, so that a missing chunk was lost:
            ``store_array_data_equal_to_fill_value``, since Orbax 0.10.0 (commit 646f1e68).
        data: the aggregate file, mapped; empty if there is none.
    """

    nodes: tuple[TreeNode, ...]
    use_ocdbt: bool | None = None
    use_zarr3: bool = False
    all_stored: bool = False
    data: Content | bytes = b""


def read_tree(path: Path, boundary: Boundary) -> Tree:
    """Read the tree of the item directory `path`.

    Raises:
        CheckpointError: both files are missing, or one is truncated, corrupt or a link out of the checkpoint.
    """
    file, aggregate = path / METADATA, path / AGGREGATE
    packed: dict[tuple[str, ...], TreeNode] = {}
    data: Content | bytes = b""
    if aggregate.is_file():
        data = _map(aggregate, boundary)
        packed = _unpack(aggregate, data)
    if not file.is_file():
        if not aggregate.is_file():
            problem = f"{METADATA} is missing, which names the leaves"
            raise incomplete(problem, path, fix="copy the checkpoint again, with all its files")
        return Tree(_without_filled(path, tuple(packed.values())), data=data)
    metadata = json_object(boundary.open(file), file)
    # As in Orbax 0.12.8's PyTreeCheckpointHandler (_get_internal_metadata), a value in the aggregate file takes precedence
    # over `_METADATA`, a placeholder does not. A string or None in the place of an array is damage.
    nodes = []
    for node in _nodes(file, metadata):
        other = packed.get(node.keys)
        inlined = other is not None and (
            other.packed is not None or (other.why is not None and node.kind not in ARRAYS)
        )
        nodes.append(other if other is not None and inlined else node)
    return Tree(
        _without_filled(path, tuple(nodes)),
        _flag(file, metadata, "use_ocdbt"),
        bool(_flag(file, metadata, "use_zarr3")),
        bool(_flag(file, metadata, "store_array_data_equal_to_fill_value")),
        data,
    )


def json_object(opened: BinaryIO, file: Path) -> dict[str, Any]:
    """Read the JSON object in the open `file`, and close it.

    Raises:
        CheckpointError: unreadable, truncated, corrupt or not an object.
    """
    parsed = read_json(opened, file, _MOST_JSON)
    if not isinstance(parsed, dict):
        raise corrupt("", file, expected="a JSON object", got=type(parsed).__name__)
    return parsed


def _nodes(file: Path, metadata: Mapping[str, Any]) -> Iterator[TreeNode]:
    entries = metadata.get("tree_metadata")
    if not isinstance(entries, dict):
        raise corrupt("tree_metadata is missing", file)
    for label in list(entries):
        entry = entries.pop(label)  # free the JSON while the nodes grow
        try:
            keys = tuple([sys.intern(str(level["key"])) for level in entry["key_metadata"]])  # leaves share most keys
            value = entry["value_metadata"]
            kind, shape = value.get("value_type", ""), value.get("write_shape")
        except (TypeError, KeyError, AttributeError):
            raise corrupt(f"the entry {label:.200} has no key_metadata or value_metadata", file) from None
        if len(keys) > MOST_KEYS:
            raise too_deep(file, keys)
        if not isinstance(kind, str) or not (
            shape is None or (isinstance(shape, list) and all(isinstance(n, int) for n in shape))
        ):
            raise corrupt(f"value_metadata of the entry {label} is not valid", file)
        yield TreeNode(
            keys,
            name=None if kind in _NO_ARRAY else ".".join(keys),
            why=_NO_ARRAY.get(kind),
            kind=kind,
            write_shape=None if shape is None else tuple(shape),
        )


def _flag(file: Path, metadata: Mapping[str, Any], name: str) -> bool | None:
    value = metadata.get(name)
    if not isinstance(value, bool | None):
        raise corrupt(f"{name} is not valid", file, expected="true or false", got=f"{value!r:.100}")
    return value


def _without_filled(path: Path, nodes: tuple[TreeNode, ...]) -> tuple[TreeNode, ...]:
    """Check that names are distinct, and drop empty containers that have children.

    A partial save leaves both (tree.py of Orbax 0.12.8, as_nested_tree).
    """
    names: dict[str, TreeNode] = {}
    for node in nodes:
        if node.name is not None:
            other = names.setdefault(node.name, node)
            if other is not node:
                problem = (
                    f"the leaves {list(other.keys)} and {list(node.keys)} have the same name on disk, {node.name!r}; "
                    "Orbax overwrote one with the other"
                )
                fix = "rename a key and save again"
                raise CheckpointError(
                    Finding("leaf-name-clash", problem, path=str(path), fix=fix, data={"leaf": node.name})
                )
    if all(node.why is None for node in nodes):
        return nodes
    parents = {node.keys[:depth] for node in nodes for depth in range(len(node.keys))}
    return tuple(node for node in nodes if node.why is None or node.keys not in parents)


def _map(file: Path, boundary: Boundary) -> Content:
    boundary.check(file)
    try:
        return map_regular(file)
    except ValueError:
        raise truncated("the file is empty", file) from None
    except OSError as error:
        raise unreadable(file, error) from None


def _unpack(file: Path, data: Content | bytes) -> dict[tuple[str, ...], TreeNode]:
    try:
        nodes: dict[tuple[str, ...], TreeNode] = {}
        walker = Walker(data)
        for node in _walk(walker, 0, ()):
            nodes[node.keys] = node
            if len(nodes) > msgpack_tokens.MAX_NODES:
                raise msgpack_tokens.too_many_nodes(len(data))
        return nodes
    except CheckpointError as error:
        raise located(error, file) from None


def _walk(walker: Walker, at: int, keys: tuple[str, ...]) -> Iterator[TreeNode]:
    if len(keys) > MOST_KEYS:
        raise too_deep("", keys)
    token = walker.token(at)
    if token.kind == "map":
        children = list(walker.items(at))
        if not any(key == CHUNKED for key, _, _ in children):
            if not children:
                yield TreeNode(keys, why="empty dict")
            for key, start, _ in children:
                yield from _walk(walker, start, (*keys, key))
            return
    if token.kind == "array" or (token.kind == "ext" and token.code == _TUPLE):
        spans = walker.sequence(at if token.kind == "array" else token.body)
        if not spans:
            yield TreeNode(keys, why="empty list" if token.kind == "array" else "empty tuple")
        for index, (start, _) in enumerate(spans):
            yield from _walk(walker, start, (*keys, str(index)))
        return
    if token.kind == "str":
        text = walker.text(token)
        mark = next((mark for mark in _PLACEHOLDERS if text.startswith(mark)), None)
        yield TreeNode(keys, why="string") if mark is None else TreeNode(keys, name=text.removeprefix(mark))
        return
    try:
        packed = packed_array(walker, at)
    except CheckpointError as error:
        raise located(error, f"leaf {'/'.join(keys)}") from None
    yield TreeNode(keys, why=packed) if isinstance(packed, str) else TreeNode(keys, packed=packed)
