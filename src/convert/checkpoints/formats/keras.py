"""Reads the weights of Keras 3: ``.weights.h5``, its shards, and the ``model.weights.h5`` inside a ``.keras`` archive.

The names are the paths of the file, ``layers/dense/vars/0``: Keras calls a layer after its class and its place among its
siblings, and a variable by its number (keras/src/saving/saving_lib.py). The first of several siblings, ``dense`` beside
``dense_1``, is called ``dense_0`` here, so that one rule can say ``dense_{i}``. bfloat16 is ``V2`` with an attribute.

HDF5 files can point to other files; here only what lies in the file itself is read.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from convert.checkpoints.chunks import Box, Meter, Piece, tiles, whole
from convert.checkpoints.files import COPY_AGAIN, children, head, inside, opened, read_json
from convert.checkpoints.formats.npz import ZIP, data_start, member_names, members
from convert.checkpoints.source import Absent, Format, Leaf, Options, Source, distinct_names, stamps
from convert.core.errors import CheckpointError, ConvertError
from convert.core.tensor_spec import TensorSpec, dtype_name, numpy_dtype

_HDF5 = b"\x89HDF\r\n\x1a\n"
_WEIGHTS = "model.weights.h5"  # in a .keras archive; saving_lib.py, _VARS_FNAME_H5
_SHARDS = ".weights.json"
_MOST_DEPTH = 64
_MOST_OBJECTS = 1_000_000
_RATIO = 1032  # the most that deflate, HDF5's gzip filter, expands
_H5_ERRORS = (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, UnicodeError, NotImplementedError, IndexError, OverflowError)  # fmt: skip


class _Part(io.RawIOBase):
    """A range of a file, as a file of its own: HDF5 inside of an archive."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._file.seek(self._start + self._at)
        got = self._file.readinto(view[: max(min(len(view), self._size - self._at), 0)])  # type: ignore[attr-defined]
        self._at += got
        return int(got)


class _Keras(Source):
    """Open weights. Each reading opens its file, so threads share nothing but HDF5's own lock."""

    def __init__(self, path: Path, files: list[Path], format: str) -> None:
        self.path, self.format, self.watched = path, format, stamps(files)
        leaves: dict[tuple[str, ...], Leaf] = {}
        places: dict[tuple[str, ...], tuple[Path, str]] = {}
        absent: list[Absent] = []
        called: dict[tuple[str, ...], str] = {}
        raw: list[tuple[Path, tuple[str, ...], TensorSpec]] = []
        for file in files:
            with _hdf5(file) as h5, _errors(file):
                found, names = _walk(file, h5)
            raw += [(file, keys, spec) for keys, spec in found.items()]
            called |= names
        renamed = _numbered({keys for _, keys, _ in raw} | called.keys())
        for file, keys, spec in raw:
            ours = renamed(keys)
            if ours in leaves:
                raise CheckpointError(
                    f"{file}: two leaves would be called {'/'.join(ours)!r}; rename a layer where they are saved"
                )
            leaves[ours] = Leaf(ours, spec)
            places[ours] = file, "/".join(keys)
        self.leaves = distinct_names(path, leaves.values())
        self.absent = tuple(absent)
        self._places = {name: places[leaf.keys] for name, leaf in self.leaves.items()}
        own = {"/".join(renamed(keys)): label for keys, label in called.items() if keys[-1] != label}
        said = [f"{name} is {label}" for name, label in sorted(own.items())]
        self.notes = (f"the layers' names in the model: {', '.join(said[:40])}",) if said else ()

    def read(self, name: str) -> np.ndarray:
        return self.read_box(name, whole(self.leaves[name].spec.shape))

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        file, inner = self._places[name]
        spec = self.leaves[name].spec
        dtype = numpy_dtype(spec.dtype)
        with _hdf5(file, name) as h5, _errors(file, name):
            dataset = h5[inner]
            if dataset.shape != spec.shape:
                raise ValueError("its shape changed since it was opened")
            for tile in tiles(spec.shape, dtype.itemsize):
                started = time.perf_counter()
                values = np.empty(tile.shape, dataset.dtype)
                dataset.read_direct(values, tile.within((0,) * len(spec.shape)))
                if meter is not None:
                    meter.add("read", time.perf_counter() - started)
                nameless = values.dtype.kind == "V"  # bfloat16
                yield tile.origin, values.view(dtype) if nameless else values.astype(dtype, copy=False)


def _h5py(path: Path) -> Any:
    try:
        import h5py
    except ImportError:
        raise CheckpointError(
            f"{path}: Keras stores weights as HDF5; reading it needs h5py: pip install 'ckpt-convert[keras]'"
        ) from None
    return h5py


@contextmanager
def _errors(file: Path, leaf: str | None = None) -> Iterator[None]:
    where = f"{file}: leaf {leaf}" if leaf is not None else str(file)
    try:
        yield
    except CheckpointError as error:
        raise error if str(file) in str(error) else CheckpointError(f"{where}: {error}; {COPY_AGAIN}") from None
    except MemoryError:
        raise CheckpointError(f"{where}: not enough memory") from None
    except _H5_ERRORS as error:
        raise CheckpointError(f"{where}: HDF5 cannot read it: {error}; {COPY_AGAIN}") from None


@contextmanager
def _hdf5(path: Path, leaf: str | None = None) -> Iterator[Any]:
    """The HDF5 file at `path`, or inside the ``.keras`` archive at `path`."""
    h5py = _h5py(path)
    with opened(path) as raw:
        file: Any = raw
        if head(path).startswith(ZIP):
            member = members(path).get(_WEIGHTS)
            if member is None:
                raise CheckpointError(f"{path}: no {_WEIGHTS} in it; save the model again as .keras")
            if member.deflated:
                raise CheckpointError(
                    f"{path}: {_WEIGHTS} is compressed, which Keras does not do; unzip it, and give that file"
                )
            with _errors(path, leaf):
                file = io.BufferedReader(_Part(raw, data_start(raw, member.start), member.size))
        with _errors(path, leaf):
            h5 = h5py.File(file, "r")
        try:
            yield h5
        finally:
            h5.close()


def _walk(path: Path, h5: Any) -> tuple[dict[tuple[str, ...], TensorSpec], dict[tuple[str, ...], str]]:
    """Specs of the datasets by path, and the names of layers by the path of their group. Follows hard links only."""
    h5py = _h5py(path)
    found: dict[tuple[str, ...], TensorSpec] = {}
    called: dict[tuple[str, ...], str] = {}
    size = path.stat().st_size
    pending: list[tuple[tuple[str, ...], Any]] = [((), h5)]
    seen = 0
    while pending:
        keys, group = pending.pop()
        if len(keys) > _MOST_DEPTH:
            raise CheckpointError(f"{path}: {'/'.join(keys)}: more than {_MOST_DEPTH} levels: not Keras's")
        label = group.attrs.get("name") if keys[-1:] == ("vars",) else None
        if isinstance(label, str) and keys[:-1]:
            called[keys[:-1]] = label
        for name in group:
            here = "/".join((*keys, name))
            seen += 1
            if seen > _MOST_OBJECTS:
                raise CheckpointError(f"{path}: more than {_MOST_OBJECTS} objects: not Keras's")
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise CheckpointError(
                    f"{path}: leaf {here}: a link to elsewhere; it is not followed. Save the weights again"
                )
            child = group[name]
            if isinstance(child, h5py.Group):
                pending.append(((*keys, name), child))
            elif isinstance(child, h5py.Dataset):
                found[(*keys, name)] = _spec(path, here, child, size)
    if not any("vars" in keys for keys in found):
        what = (
            "no weights in it"
            if not found
            else f"HDF5, but not of Keras 3: no vars/ in it, only {'/'.join(next(iter(found)))} and the like"
        )
        raise CheckpointError(f"{path}: {what}; save with Keras 3: model.save_weights('model.weights.h5')")
    return found, called


def _spec(path: Path, name: str, dataset: Any, size: int) -> TensorSpec:
    where = f"{path}: leaf {name}"
    if dataset.external or dataset.is_virtual:
        raise CheckpointError(
            f"{where}: its data are said to lie in other files; they are not read. Save the weights again"
        )
    shape = dataset.shape
    if shape is None:
        raise CheckpointError(f"{where}: an HDF5 null dataset, which Keras does not write")
    marked = dataset.attrs.get("dtype")
    if dataset.dtype.kind == "V" and dataset.dtype.itemsize == 2 and marked == "bfloat16":
        spec = TensorSpec(tuple(shape), "bfloat16")
    else:
        try:
            spec = TensorSpec(tuple(shape), dtype_name(dataset.dtype.newbyteorder("=")))
        except (ConvertError, TypeError):
            raise CheckpointError(f"{where}: the dtype {dataset.dtype} is not one that a model's arrays have") from None
    stored = dataset.id.get_storage_size()
    possible = stored * (_RATIO if dataset.chunks else 1)
    if spec.nbytes > possible or stored > size:
        raise CheckpointError(f"{where}: {spec} takes {spec.nbytes} bytes, but {stored} are stored; {COPY_AGAIN}")
    return spec


def _numbered(paths: set[tuple[str, ...]]) -> Any:
    """A function that calls ``dense`` ``dense_0`` where it has a sibling ``dense_1`` and none of the new name."""
    known = {keys[:depth] for keys in paths for depth in range(1, len(keys) + 1)}

    def rename(keys: tuple[str, ...]) -> tuple[str, ...]:
        result = []
        for depth, key in enumerate(keys):
            parent = keys[:depth]
            several = (*parent, f"{key}_1") in known and (*parent, f"{key}_0") not in known
            result.append(f"{key}_0" if several else key)
        return tuple(result)

    return rename


def _open(path: Path, options: Options) -> Source:
    if path.name.endswith(_SHARDS):
        document = read_json(path)
        weight_map = document.get("weight_map") if isinstance(document, dict) else None
        listed = weight_map.values() if isinstance(weight_map, dict) else ()
        names = {name for names in listed for name in (names if isinstance(names, list) else [names])}
        if not names or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{path}: it has no weight_map that names the shards; {COPY_AGAIN}")
        files = [inside(path.parent, name) for name in sorted(names)]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(f"{path}: the shard {missing[0]} is not there; {COPY_AGAIN}")
        return _Keras(path.parent, files, f"Keras 3 weights (HDF5), {len(files)} shards")
    archive = head(path).startswith(ZIP)
    return _Keras(path, [path], "Keras 3 .keras archive (HDF5)" if archive else "Keras 3 weights (HDF5)")


def is_keras(path: Path) -> bool:
    """Whether the file is HDF5, or a zip archive with Keras's weights in it."""
    start = head(path)
    return start.startswith(_HDF5) or (start.startswith(ZIP) and _WEIGHTS in member_names(path))


def _is_index(path: Path) -> bool:
    return path.name.endswith(_SHARDS) and head(path).lstrip().startswith(b"{")


def _find(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path] if _is_index(path) or is_keras(path) else []
    indexes = [child for child in children(path) if _is_index(child)]
    shards = tuple(f"{index.name.removesuffix(_SHARDS)}_" for index in indexes)
    files = [c for c in children(path) if c.name.endswith((".weights.h5", ".keras")) and is_keras(c)]
    return indexes + [file for file in files if not (shards and file.name.startswith(shards))]


FORMAT = Format("Keras 3", "a .weights.h5 or .keras file of Keras 3, or shards with .weights.json", _find, _open)
