"""Reads T5X checkpoints: a msgpack file with numbers, and references to zarr directories next to the file.

On disk: ``checkpoint_1000/checkpoint``, msgpack of ``{'version': 3, 'optimizer': {'target': ..., 'state': ...}}``, and
``checkpoint_1000/target.encoder.layers_0.mlp.wi.kernel/`` with ``.zarray``. A reference is a TensorStore spec
(t5x/checkpoints.py, ``_get_spec``; TensorStore before 0.1.14 has the path next to ``kvstore``). Only its path, shape and
dtype are used, so nothing outside of the folder is read. The file system in it, gfile or gcs, is ignored. Version 2 (before
June 2021) stored bfloat16 as uint16. Small checkpoints have all arrays in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from convert.checkpoints.access import Boundary, children, head
from convert.checkpoints.chunks import Box, Grid, Meter, Piece, full_box
from convert.checkpoints.encodings.flax_arrays import PackedArray, Text, TreeNode, walk_tree
from convert.checkpoints.errors import (
    COPY_AGAIN,
    corrupt,
    incomplete,
    located,
    name_clash,
    option_rejected,
    step_chosen,
    step_not_found,
    unknown_format,
)
from convert.checkpoints.files import StoredArray, read_stored, stored_pieces
from convert.checkpoints.formats.flax_msgpack import map_file
from convert.checkpoints.formats.zarr_directories import ZarrDirectories
from convert.checkpoints.source import Absent, Format, Leaf, Options, Source, distinct_names, stamps
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec, numpy_dtype

FILE = "checkpoint"
_HEADS = (b"\x82\xa7version", b"\x82\xa9optimizer")
_STEP = re.compile(r"checkpoint_(\d{1,18})")
_UNFINISHED = re.compile(r"checkpoint_\d+\.tmp(-.*)?")
_BFLOAT16_AS_UINT16 = 2  # the last version that stored it so


class _T5X(Source):
    """An open checkpoint. Reading takes no lock: TensorStore's handles may be used from several threads."""

    def __init__(self, file: Path, notes: tuple[Finding, ...], boundary: Boundary) -> None:
        boundary.check(file)
        self.path, self.notes, self.watched = file, notes, stamps([file])
        with closing(map_file(file)) as data:
            nodes = walk_tree(data, file)
        version, tree = _parts(file, nodes)
        self.format = f"T5X, version {version}"
        leaves: list[Leaf] = []
        absent: list[Absent] = []
        inline: dict[tuple[str, ...], StoredArray] = {}
        directories: dict[tuple[str, ...], str] = {}
        for keys, node in tree.items():
            if isinstance(node, _Reference):
                directories[keys] = _directory(file, keys, node, boundary)
            elif not isinstance(node, PackedArray):
                absent.append(Absent(keys, "string" if isinstance(node, Text) else node))
            else:
                inline[keys] = StoredArray(file, node.ranges, node.spec, value=node.value)
                leaves.append(Leaf(keys, node.spec))
        self._arrays = ZarrDirectories(file.parent, set(directories.values()), boundary)
        self._bfloat16: set[tuple[str, ...]] = set()  # leaves whose uint16 values are bfloat16
        for keys, name in directories.items():
            spec = self._arrays.spec(file, keys, name)
            node = tree[keys]
            shape = _shape(node) if isinstance(node, _Reference) else None
            if shape is not None and shape != spec.shape:
                raise corrupt(
                    "the shapes differ",
                    file,
                    "/".join(keys),
                    expected=f"{list(shape)} as in the file",
                    got=f"{spec} in {name}/.zarray",
                )
            if version <= _BFLOAT16_AS_UINT16 and spec.dtype == "uint16":
                spec = TensorSpec(spec.shape, "bfloat16")
                self._bfloat16.add(keys)
            leaves.append(Leaf(keys, spec))
        self.leaves = distinct_names(file, leaves)
        self.absent = tuple(absent)
        self._inline, self._directories = inline, directories

    def read(self, name: str) -> np.ndarray:
        keys = self.leaves[name].keys
        if keys in self._inline:
            return read_stored(self._inline[keys], name)
        return self.read_box(name, full_box(self.leaves[name].spec.shape))

    def chunks(self, name: str) -> Grid:
        keys = self.leaves[name].keys
        return super().chunks(name) if keys in self._inline else self._arrays.grid(self._directories[keys])

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        keys = self.leaves[name].keys
        if keys in self._inline:
            yield from stored_pieces(self._inline[keys], name, chunk, meter)
            return
        for origin, values in self._arrays.pieces(self.path, name, self._directories[keys], chunk, meter):
            yield origin, values.view(numpy_dtype("bfloat16")) if keys in self._bfloat16 else values


class _Reference:
    """A TensorStore spec, which refers to a zarr directory: path of keys in the spec -> value."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[str, ...], TreeNode] = {}


def _parts(
    file: Path, nodes: list[tuple[tuple[str, ...], TreeNode]]
) -> tuple[int, dict[tuple[str, ...], TreeNode | _Reference]]:
    """Return the version, and the tree below ``optimizer`` in which each TensorStore spec is one node."""
    version: object = None
    references = {keys[:-1] for keys, _ in nodes if keys[-1:] == ("driver",)} & {
        keys[: keys.index("kvstore")] for keys, _ in nodes if "kvstore" in keys
    }
    tree: dict[tuple[str, ...], TreeNode | _Reference] = {}
    for keys, node in nodes:
        if keys == ("version",):
            version = node.value if isinstance(node, PackedArray) else None
            continue
        if keys[:1] != ("optimizer",):
            raise unknown_format(
                file, expected="the keys version and optimizer of T5X", got="/".join(keys), fix=COPY_AGAIN
            )
        root = next((keys[:depth] for depth in range(len(keys)) if keys[:depth] in references), None)
        path = (keys if root is None else root)[1:]
        if root is not None:
            reference = tree.setdefault(path, _Reference())
            assert isinstance(reference, _Reference)
            reference.nodes[keys[len(root) :]] = node
        elif path in tree:
            raise name_clash(file, "/".join(path), COPY_AGAIN)
        else:
            tree[path] = node
    if type(version) is not int:
        raise corrupt("the version of the checkpoint is not valid", file, expected="an integer", got=repr(version))
    return version, tree


def _directory(file: Path, keys: tuple[str, ...], reference: _Reference, boundary: Boundary) -> str:
    """Return the name of the zarr directory that a TensorStore spec refers to; it is next to the file.

    Raises:
        CheckpointError: T5X does not write such a spec, or the directory is missing or elsewhere.
    """
    leaf = "/".join(keys)
    nodes = reference.nodes
    driver = nodes.get(("driver",))
    path = nodes.get(("kvstore", "path"), nodes.get(("path",)))
    if not isinstance(driver, Text) or driver.text != "zarr" or not isinstance(path, Text):
        raise corrupt("the TensorStore spec has no zarr array with a path", file, leaf)
    name = path.text.removesuffix("/")
    try:
        directory = boundary.named(file.parent, name)
    except CheckpointError as error:
        raise located(error, file, leaf) from None
    if not directory.is_dir():
        raise incomplete(f"the directory {name} is missing", file, leaf)
    return name


def _shape(reference: _Reference) -> tuple[int, ...] | None:
    """Return the shape in the TensorStore spec; None where it has none."""
    sizes = {keys[2:]: node for keys, node in reference.nodes.items() if keys[:2] == ("metadata", "shape")}
    if sizes == {(): "empty list"}:
        return ()
    values = [sizes.get((str(k),)) for k in range(len(sizes))]
    known = [v.value for v in values if isinstance(v, PackedArray) and isinstance(v.value, int)]
    return tuple(known) if known and len(known) == len(values) else None


def _locate(path: Path, step: int | None) -> tuple[Path, tuple[Finding, ...]]:
    """Return the msgpack file, and the note on the chosen step."""
    if path.is_file():
        if step is not None:
            fix = "leave out --step, or give the directory of the steps"
            raise option_rejected(path, "a single file has no steps", fix)
        return path, ()
    if is_t5x(path / FILE):
        match = _STEP.fullmatch(path.name)
        if step is not None and (match is None or int(match[1]) != step):
            raise option_rejected(path, f"this is not known to be step {step}", "give the directory of the steps")
        return path / FILE, (step_chosen(int(match[1])),) if match else ()
    steps = _steps(path)
    if step is not None and step not in steps:
        raise step_not_found(path, step, steps)
    chosen = max(steps) if step is None else step
    unfinished = [child.name for child in children(path) if _UNFINISHED.fullmatch(child.name)]
    return steps[chosen], (step_chosen(chosen, steps, unfinished),)


def _steps(directory: Path) -> dict[int, Path]:
    matches = ((_STEP.fullmatch(child.name), child) for child in children(directory))
    return {
        int(match[1]): child / FILE if child.is_dir() else child
        for match, child in matches
        if match and is_t5x(child / FILE if child.is_dir() else child)
    }


def is_t5x(path: Path) -> bool:
    """Whether the file starts like one of T5X: a map of ``version`` and ``optimizer``."""
    return head(path).startswith(_HEADS)


def find(path: Path) -> list[Path]:
    """Return `path` where it is a checkpoint, or a directory of steps."""
    return [path] if is_t5x(path) or is_t5x(path / FILE) or _steps(path) else []


def _open(path: Path, options: Options) -> Source:
    return _T5X(*_locate(path, options.step), options.boundary)


FORMAT = Format("T5X", "a checkpoint_N directory of T5X, or the directory above it", find, _open, frozenset({"step"}))
