"""Reads the checkpoints of T5X: a msgpack file in which each array is a number, or points to a zarr directory beside it.

On disk: ``checkpoint_1000/checkpoint``, msgpack of ``{'version': 3, 'optimizer': {'target': ..., 'state': ...}}``, and
``checkpoint_1000/target.encoder.layers_0.mlp.wi.kernel/`` with ``.zarray``. An array's place is a TensorStore spec; of it
only the path, the shape and the dtype are used, so that nothing outside the folder is read whatever it says (t5x/checkpoints.py,
``_get_spec``; TensorStore before 0.1.14 has the path beside ``kvstore``). The writer's file system, gfile or gcs, does not
matter. Version 2 (before June 2021) stored bfloat16 as uint16. Small checkpoints have all arrays in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from convert.checkpoints.chunks import Box, Grid, Meter, Piece, whole
from convert.checkpoints.encodings import msgpack_tokens
from convert.checkpoints.files import COPY_AGAIN, Place, children, head, inside, place_pieces, read_place
from convert.checkpoints.formats.flax_msgpack import map_file
from convert.checkpoints.source import Absent, Format, Leaf, Options, Source, distinct_names, stamps
from convert.core.errors import CheckpointError
from convert.core.tensor_spec import TensorSpec, numpy_dtype

FILE = "checkpoint"
_HEADS = (b"\x82\xa7version", b"\x82\xa9optimizer")
_STEP = re.compile(r"checkpoint_(\d{1,18})")
_UNFINISHED = re.compile(r"checkpoint_\d+\.tmp(-.*)?")
_BFLOAT16_AS_UINT16 = 2  # the last version that stored it so


class _T5X(Source):
    """An open checkpoint. Reading takes no lock: TensorStore's handles may be used from several threads."""

    def __init__(self, file: Path, notes: tuple[str, ...]) -> None:
        self.path, self.notes, self.watched = file, notes, stamps([file])
        with map_file(file) as data:
            nodes = list(msgpack_tokens.walk_tree(data, file))
        version, tree = _parts(file, nodes)
        self.format = f"T5X, version {version}"
        leaves: list[Leaf] = []
        absent: list[Absent] = []
        inline: dict[tuple[str, ...], Place] = {}
        stored: dict[tuple[str, ...], str] = {}
        for keys, found in tree.items():
            if isinstance(found, _Pointer):
                stored[keys] = _directory(file, keys, found)
            elif not isinstance(found, msgpack_tokens.Packed):
                absent.append(Absent(keys, "string" if isinstance(found, msgpack_tokens.Text) else found))
            else:
                inline[keys] = Place(file, found.pieces, found.spec, value=found.value)
                leaves.append(Leaf(keys, found.spec))
        self._arrays = _Arrays(file.parent, set(stored.values()))
        self._halves: set[tuple[str, ...]] = set()
        for keys, name in stored.items():
            spec = self._arrays.spec(file, keys, name)
            pointer = tree[keys]
            said = _said_shape(pointer) if isinstance(pointer, _Pointer) else None
            if said is not None and said != spec.shape:
                raise CheckpointError(
                    f"{file}: leaf {'/'.join(keys)}: {name}/.zarray says {spec}, the file says the shape {list(said)}; {COPY_AGAIN}"
                )
            if version <= _BFLOAT16_AS_UINT16 and spec.dtype == "uint16":
                spec = TensorSpec(spec.shape, "bfloat16")
                self._halves.add(keys)
            leaves.append(Leaf(keys, spec))
        self.leaves = distinct_names(file, leaves)
        self.absent = tuple(absent)
        self._inline, self._stored = inline, stored

    def read(self, name: str) -> np.ndarray:
        keys = self.leaves[name].keys
        if keys in self._inline:
            return read_place(self._inline[keys], name)
        return self.read_box(name, whole(self.leaves[name].spec.shape))

    def chunks(self, name: str) -> Grid:
        keys = self.leaves[name].keys
        return super().chunks(name) if keys in self._inline else self._arrays.grid(self._stored[keys])

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        keys = self.leaves[name].keys
        if keys in self._inline:
            yield from place_pieces(self._inline[keys], name, chunk, meter)
            return
        for origin, values in self._arrays.pieces(self.path, name, self._stored[keys], chunk, meter):
            yield origin, values.view(numpy_dtype("bfloat16")) if keys in self._halves else values


class _Pointer:
    """The nodes of a TensorStore spec: path in it -> place."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[str, ...], msgpack_tokens.Packed | msgpack_tokens.Text | str] = {}


class _Arrays:
    """The zarr directories beside the file."""

    def __init__(self, folder: Path, names: set[str]) -> None:
        self._store = None
        self._found: dict[str, object] = {}
        if names:
            from convert.checkpoints.encodings.ocdbt import TENSORSTORE_ERRORS
            from convert.checkpoints.orbax import (
                arrays,  # imports TensorStore, which a checkpoint in one file does not need
            )

            real = folder.resolve() if ".." in folder.parts else folder.absolute()
            self._store = arrays.open_store(real, use_ocdbt=False)
            try:
                self._found = dict(arrays.read_metadata(self._store, sorted(names), use_zarr3=False))
            except TENSORSTORE_ERRORS as error:
                raise CheckpointError(f"{folder}: the arrays cannot be found: {arrays.reason(error, real)}") from None

    def spec(self, file: Path, keys: tuple[str, ...], name: str) -> TensorSpec:
        from convert.checkpoints.orbax.arrays import Array

        found = self._found.get(name)
        if isinstance(found, Array):
            return found.spec
        why = found if isinstance(found, CheckpointError) else f"{name}/.zarray is missing"
        raise CheckpointError(f"{file}: leaf {'/'.join(keys)}: {why}; {COPY_AGAIN}")

    def grid(self, name: str) -> Grid:
        """The chunks of an array."""
        return self._found[name].grid  # type: ignore[attr-defined,no-any-return]

    def pieces(self, file: Path, leaf: str, name: str, chunk: Box, meter: Meter | None) -> Iterator[Piece]:
        from convert.checkpoints.encodings.ocdbt import TENSORSTORE_ERRORS
        from convert.checkpoints.orbax import arrays

        array = self._found[name]
        assert self._store is not None and isinstance(array, arrays.Array)
        try:
            yield from arrays.pieces(self._store, array, False, chunk, meter)
        except TENSORSTORE_ERRORS as error:
            why = arrays.reason(error, file.parent)
            raise CheckpointError(f"{file}: leaf {leaf} ({array.spec}) cannot be read: {why}; {COPY_AGAIN}") from None


def _parts(
    file: Path, nodes: list[tuple[tuple[str, ...], msgpack_tokens.Packed | msgpack_tokens.Text | str]]
) -> tuple[int, dict[tuple[str, ...], msgpack_tokens.Packed | msgpack_tokens.Text | str | _Pointer]]:
    """The version, and the tree below ``optimizer`` with the TensorStore specs gathered."""
    version: object = None
    pointers = {keys[:-1] for keys, _ in nodes if keys[-1:] == ("driver",)} & {
        keys[: keys.index("kvstore")] for keys, _ in nodes if "kvstore" in keys
    }
    tree: dict[tuple[str, ...], msgpack_tokens.Packed | msgpack_tokens.Text | str | _Pointer] = {}
    for keys, found in nodes:
        if keys == ("version",):
            version = found.value if isinstance(found, msgpack_tokens.Packed) else None
            continue
        if keys[:1] != ("optimizer",):
            raise CheckpointError(f"{file}: {'/'.join(keys)}: not T5X's; it has version and optimizer at the top")
        root = next((keys[:depth] for depth in range(len(keys)) if keys[:depth] in pointers), None)
        ours = (keys if root is None else root)[1:]
        if root is not None:
            pointer = tree.setdefault(ours, _Pointer())
            assert isinstance(pointer, _Pointer)
            pointer.nodes[keys[len(root) :]] = found
        elif ours in tree:
            raise CheckpointError(f"{file}: two leaves would be called {'/'.join(ours)!r}; {COPY_AGAIN}")
        else:
            tree[ours] = found
    if type(version) is not int:
        raise CheckpointError(f"{file}: T5X writes its version into the file; this one is {version!r}; {COPY_AGAIN}")
    return version, tree


def _directory(file: Path, keys: tuple[str, ...], pointer: _Pointer) -> str:
    """The name of the zarr directory that a TensorStore spec points to, which lies beside the file.

    Raises:
        CheckpointError: it is none that T5X writes, lies elsewhere, or contradicts itself.
    """
    where = f"{file}: leaf {'/'.join(keys)}"
    nodes = pointer.nodes
    driver = nodes.get(("driver",))
    path = nodes.get(("kvstore", "path"), nodes.get(("path",)))
    if (
        not isinstance(driver, msgpack_tokens.Text)
        or driver.text != "zarr"
        or not isinstance(path, msgpack_tokens.Text)
    ):
        raise CheckpointError(f"{where}: its TensorStore spec has no zarr array with a path; {COPY_AGAIN}")
    name = path.text.removesuffix("/")
    try:
        directory = inside(file.parent, name)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    if not directory.is_dir():
        raise CheckpointError(f"{where}: its directory {name} is missing; {COPY_AGAIN}")
    for child in children(directory):
        if child.is_symlink():
            raise CheckpointError(
                f"{where}: {name}/{child.name} is a link, which T5X does not write; it is not followed"
            )
    return name


def _said_shape(pointer: _Pointer) -> tuple[int, ...] | None:
    """The shape in the TensorStore spec; None where it says none."""
    sizes = {keys[2:]: found for keys, found in pointer.nodes.items() if keys[:2] == ("metadata", "shape")}
    if sizes == {(): "empty list"}:
        return ()
    values = [sizes.get((str(k),)) for k in range(len(sizes))]
    known = [v.value for v in values if isinstance(v, msgpack_tokens.Packed) and isinstance(v.value, int)]
    return tuple(known) if known and len(known) == len(values) else None


def _locate(path: Path, step: int | None) -> tuple[Path, tuple[str, ...]]:
    """The msgpack file, and what was chosen on the way."""
    if path.is_file():
        if step is not None:
            raise CheckpointError(f"{path}: a single file has no steps; leave out --step, or give the directory of all")
        return path, ()
    if is_t5x(path / FILE):
        match = _STEP.fullmatch(path.name)
        if step is not None and (match is None or int(match[1]) != step):
            raise CheckpointError(f"{path}: this is not known to be step {step}; give the directory of all steps")
        return path / FILE, (f"step {int(match[1])}",) if match else ()
    steps = _steps(path)
    known = ", ".join(map(str, sorted(steps)))
    if step is not None and step not in steps:
        raise CheckpointError(f"{path}: there is no step {step}; there are {known}")
    chosen = max(steps) if step is None else step
    unfinished = [child.name for child in children(path) if _UNFINISHED.fullmatch(child.name)]
    return steps[chosen], (f"step {chosen} of {known}", *(f"unfinished, passed over: {name}" for name in unfinished))


def _steps(directory: Path) -> dict[int, Path]:
    matches = ((_STEP.fullmatch(child.name), child) for child in children(directory))
    return {
        int(match[1]): child / FILE if child.is_dir() else child
        for match, child in matches
        if match and is_t5x(child / FILE if child.is_dir() else child)
    }


def is_t5x(path: Path) -> bool:
    """Whether the file starts as T5X's do: a map of ``version`` and ``optimizer``."""
    return head(path).startswith(_HEADS)


def find(path: Path) -> list[Path]:
    """`path`, where it is a checkpoint, or a directory of steps."""
    return [path] if is_t5x(path) or is_t5x(path / FILE) or _steps(path) else []


def _open(path: Path, options: Options) -> Source:
    return _T5X(*_locate(path, options.step))


FORMAT = Format("T5X", "a checkpoint_N directory of T5X, or one that holds such", find, _open, frozenset({"step"}))
