"""Writes an Orbax checkpoint as `StandardCheckpointer` lays it out: OCDBT with zarr or zarr3 arrays, and the files of metadata."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zstandard

from convert.checkpoints.chunks import Box, Grid
from convert.checkpoints.errors import name_clash
from convert.checkpoints.orbax.locate import STEP_METADATA, step_number
from convert.checkpoints.orbax.tree import METADATA
from convert.checkpoints.source import Leaf, Source
from convert.core.tensor_spec import TensorSpec, numpy_dtype
from convert.reversing.formats.ocdbt import INLINE, Stored, encode_manifest, encode_node

Array = np.ndarray[Any, np.dtype[Any]]
LEVEL = 1  # of zstd, as Orbax sets it for zarr
OWN_FILE = 1 << 20  # bytes; a leaf of so many gets a file of its own, which its thread writes
SHARED_FILE = "d/values"
BATCH = 64  # leaves that are begun before the first of them is complete
# What an Orbax checkpoint consists of; an output that is replaced keeps its other entries.
OWN = re.compile(
    r"d|manifest\.ocdbt|ocdbt\.process_\d+|array_metadatas|commit_success\.txt|checkpoint|_strings\.json|_(CHECKPOINT_)?METADATA|_sharding"
)
ITEM = "default"  # of a step with a single item: orbax.checkpoint 0.12.8, checkpoint_manager.py, DEFAULT_ITEM_NAME
_COMMITTED = ("commit_success.txt", "Checkpoint commit was successful")
_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
_INDEX = 1  # of `key_type`: an index of a sequence
_EMPTY_VALUES: dict[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": []}
_EMPTY = {"None": "None", "empty dict": "Dict", "empty list": "List", "empty tuple": "Tuple"}


@dataclass(frozen=True)
class _Encoded:
    """A leaf on its way to the database: values that are in memory, and those that are in a file already."""

    name: str
    values: dict[str, bytes] = field(default_factory=dict)
    stored: dict[str, Stored] = field(default_factory=dict)


def write_orbax(source: Source, out: Path, *, jobs: int, done: Callable[[str], None]) -> None:
    """Write all leaves.

    Args:
        source: its chunks are those of the output.
        out: an empty directory.
        jobs: threads.
        done: called after each leaf.
    """
    (out / "d").mkdir()
    zarr3 = uses_zarr3(source)
    names = {name: ".".join(leaf.keys) for name, leaf in source.leaves.items()}
    if len(set(names.values())) < len(names):  # Orbax would overwrite one with the other
        twice = next(name for name, count in Counter(names.values()).items() if count > 1)
        raise name_clash(source.path, twice, fix="write another format, which keeps the keys apart")
    values: dict[str, bytes | Stored] = {}
    with (out / SHARED_FILE).open("wb") as shared, ThreadPoolExecutor(jobs, thread_name_prefix="convert") as pool:

        def one(k: int, name: str) -> _Encoded:
            return _encode(source, name, names[name], zarr3, out, f"d/{k:08d}")

        leaves = list(source.leaves)
        for start in range(0, len(leaves), BATCH):
            for encoded in pool.map(one, range(start, start + BATCH), leaves[start : start + BATCH]):
                for key, value in encoded.values.items():
                    values[key] = value
                    if len(value) > INLINE:
                        values[key] = Stored(SHARED_FILE, shared.tell(), len(value))
                        shared.write(value)
                values.update(encoded.stored)
                done(encoded.name)
        node = encode_node(values)
        place = Stored(SHARED_FILE, shared.tell(), len(node))
        shared.write(node)
    (out / "manifest.ocdbt").write_bytes(encode_manifest(place, values))
    _write_metadata(source, names, zarr3, out)


def uses_zarr3(source: Source) -> bool:
    """Whether arrays are written with zarr3: as the checkpoint that gives the tree, or where that is of another format."""
    return "Orbax" not in source.format or "zarr3" in source.format


def _encode(source: Source, name: str, stored_as: str, zarr3: bool, out: Path, file: str) -> _Encoded:
    leaf, grid = source.leaves[name], source.chunks(name)
    prefix = f"{stored_as}/" if stored_as else ""
    encoded = _Encoded(name)
    encoded.values[prefix + ("zarr.json" if zarr3 else ".zarray")] = array_metadata(leaf.spec, grid, zarr3)
    if leaf.spec.nbytes < OWN_FILE:
        for box in grid:
            encoded.values[prefix + _chunk_key(grid, box, zarr3)] = b"".join(_compressed(source, name, grid, box))
        return encoded
    with (out / file).open("wb") as opened:
        for box in grid:
            start = opened.tell()
            for data in _compressed(source, name, grid, box):
                opened.write(data)
            encoded.stored[prefix + _chunk_key(grid, box, zarr3)] = Stored(file, start, opened.tell() - start)
    return encoded


def _compressed(source: Source, name: str, grid: Grid, box: Box) -> Iterator[bytes]:
    """Compress a chunk piece by piece."""
    spec = source.leaves[name].spec
    itemsize = numpy_dtype(spec.dtype).itemsize
    packer = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=itemsize * Box(box.origin, grid.chunk).size)
    if box.shape != grid.chunk:  # a chunk at an upper edge is filled up
        whole = np.zeros(grid.chunk, numpy_dtype(spec.dtype))
        whole[tuple(slice(n) for n in box.shape)] = source.read_box(name, box)
        yield packer.compress(_raw(whole))
    else:
        for _, piece in source.pieces(name, box):
            yield packer.compress(_raw(piece))
    yield packer.flush()


def _raw(x: Array) -> memoryview:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def _chunk_key(grid: Grid, box: Box, zarr3: bool) -> str:
    place = [str(k) for k in grid.place(box)]
    return "/".join(("c", *place)) if zarr3 else ".".join(place) or "0"


def array_metadata(spec: TensorSpec, grid: Grid, zarr3: bool) -> bytes:
    """Return the metadata of an array, as TensorStore writes them."""
    if zarr3:
        zero: Any = False if spec.dtype == "bool" else 0 if "int" in spec.dtype else 0.0
        zero = [0.0, 0.0] if spec.dtype.startswith("complex") else zero
        metadata: dict[str, Any] = {
            "chunk_grid": {"configuration": {"chunk_shape": list(grid.chunk)}, "name": "regular"},
            "chunk_key_encoding": {"name": "default"},
            "codecs": [
                {"configuration": {"endian": "little"}, "name": "bytes"},
                {"configuration": {"checksum": False, "level": LEVEL}, "name": "zstd"},
            ],
            "data_type": spec.dtype,
            "fill_value": zero,
            "node_type": "array",
            "shape": list(spec.shape),
            "zarr_format": 3,
        }
    else:
        dtype = numpy_dtype(spec.dtype)
        metadata = {
            "chunks": list(grid.chunk),
            "compressor": {"id": "zstd", "level": LEVEL},
            "dimension_separator": ".",
            "dtype": dtype.str if dtype.isbuiltin == 1 else spec.dtype,
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(spec.shape),
            "zarr_format": 2,
        }
    return json.dumps(metadata, separators=(",", ":"), sort_keys=True).encode()


def _write_metadata(source: Source, names: dict[str, str], zarr3: bool, out: Path) -> None:
    """Write what describes the tree; of an Orbax checkpoint that gives the tree, its own description, with all types of keys."""
    given = source.path / METADATA
    tree: dict[str, Any] = {}
    if "Orbax" in source.format and given.is_file():
        tree = json.loads(given.read_bytes())["tree_metadata"]
        tree |= dict(_added(source, tree))
    else:
        tree = {str(leaf.keys): _entry(leaf, source.chunks(name)) for name, leaf in source.leaves.items()}
        for node in source.absent:
            kind = {"value_type": _EMPTY.get(node.why, "None"), "skip_deserialize": True}
            tree[str(node.keys)] = {"key_metadata": _keys(node.keys), "value_metadata": kind}
    # A `jax.Array` needs the sharding file of the machine that wrote it, and another machine refuses that. An `np.ndarray` is
    # restored anywhere, and as a `jax.Array` where the caller gives shardings.
    for entry in tree.values():
        if entry["value_metadata"]["value_type"] == "jax.Array":
            entry["value_metadata"]["value_type"] = "np.ndarray"
    metadata = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": zarr3,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    chunks = [
        {
            "array_metadata": {
                "param_name": names[name],
                "write_shape": list(source.chunks(name).chunk),
                "chunk_shape": list(source.chunks(name).chunk),
                "ext_metadata": None,
            }
        }
        for name in source.leaves
    ]
    (out / "checkpoint").write_bytes(msgpack.packb(_structure(tree)))
    (out / "array_metadatas").mkdir()
    files: dict[str, Any] = {
        METADATA: metadata,
        STEP_METADATA: _checkpoint(_HANDLER),
        "array_metadatas/process_0": {"array_metadatas": chunks},
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content))
    (out / _COMMITTED[0]).write_text(_COMMITTED[1])


def _checkpoint(handlers: str | dict[str, str]) -> dict[str, Any]:
    return {
        "item_handlers": handlers,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": 1,  # the same leaves give the same bytes
        "commit_timestamp_nsecs": 1,
        "custom_metadata": {},
    }


def step_files(out: Path) -> dict[Path, str]:
    """Return the files that a step needs beside its item `out`, in their order; none where Orbax has begun the step, or it is no step.

    With them ``CheckpointManager(RUN).restore(STEP)`` knows the handler of ``RUN/STEP/default``.
    """
    metadata = out.parent / STEP_METADATA
    if out.name != ITEM or step_number(out.parent) is None or metadata.exists():
        return {}
    return {metadata: json.dumps(_checkpoint({ITEM: _HANDLER})), out.parent / _COMMITTED[0]: _COMMITTED[1]}


def _structure(tree: dict[str, Any]) -> Any:
    """Return the tree with the name of its array in the place of each leaf, without which Orbax before 0.6 restores nothing."""
    top: dict[Any, Any] = {}
    for entry in tree.values():
        inner = top
        *above, last = [(key["key_type"] == _INDEX, key["key"]) for key in entry["key_metadata"]] or [(False, "")]
        for key in above:
            inner = inner.setdefault(key, {})
        kind = entry["value_metadata"]["value_type"]
        name = ".".join(str(key["key"]) for key in entry["key_metadata"])
        inner[last] = _EMPTY_VALUES.get(kind, f"PLACEHOLDER://{name}")
    return _listed(top.get((False, ""), top))


def _listed(node: Any) -> Any:
    """Return the children by their keys; those with indices as a list."""
    if not isinstance(node, dict) or not node:
        return node
    if all(is_index for is_index, _ in node):
        return [_listed(child) for _, child in sorted(node.items(), key=lambda item: int(item[0][1]))]
    return {key: _listed(child) for (_, key), child in node.items()}


def _added(source: Source, tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Describe the leaves that are not in the tree, with the types of its keys."""
    types: dict[tuple[str, ...], int] = {}
    for entry in tree.values():
        keys = tuple(key["key"] for key in entry["key_metadata"])
        types |= {keys[: k + 1]: key["key_type"] for k, key in enumerate(entry["key_metadata"])}
    for name, leaf in source.leaves.items():
        if leaf.keys not in types:
            entry = _entry(leaf, source.chunks(name))
            for k, key in enumerate(entry["key_metadata"]):
                key["key_type"] = types.get(leaf.keys[: k + 1], key["key_type"])
            yield str(leaf.keys), entry


def _entry(leaf: Leaf, grid: Grid) -> dict[str, Any]:
    value = {"value_type": "np.ndarray", "skip_deserialize": False, "write_shape": list(grid.chunk)}
    return {"key_metadata": _keys(leaf.keys), "value_metadata": value}


def _keys(keys: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"key": key, "key_type": 2} for key in keys]  # keys of dicts
