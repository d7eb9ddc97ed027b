"""Reads the weights of Keras 3: ``.weights.h5``, its shards, and the ``model.weights.h5`` inside a ``.keras`` archive.

The names are the paths in the file, ``layers/dense/vars/0``: Keras names a layer by its class and its index among its
siblings, and a variable by its number (keras/src/saving/saving_lib.py). Keras writes the siblings ``dense`` and ``dense_1``;
here the first is ``dense_0``, so that one rule can match ``dense_{i}``. bfloat16 is ``V2`` with an attribute.

HDF5 files can refer to other files; only the content of the file itself is read.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from convert.checkpoints.access import children, head, opened, read_json
from convert.checkpoints.chunks import Box, Meter, Piece, full_box, tiles
from convert.checkpoints.errors import (
    COPY_AGAIN,
    corrupt,
    incomplete,
    link_refused,
    located,
    name_clash,
    note,
    out_of_memory,
    unknown_format,
    unreadable,
    unsupported,
)
from convert.checkpoints.formats.npz import ZIP, data_start, member_names, members
from convert.checkpoints.source import Format, Leaf, Options, Source, distinct_names, stamps
from convert.core.errors import CheckpointError, ConvertError
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec, dtype_name, numpy_dtype

_HDF5 = b"\x89HDF\r\n\x1a\n"
_WEIGHTS = "model.weights.h5"  # in a .keras archive; saving_lib.py, _VARS_FNAME_H5
_CONFIG = "config.json"  # beside it; saving_lib.py, _CONFIG_FILENAME
_SHARDS = ".weights.json"
_MOST_DEPTH = 64
_MOST_OBJECTS = 1_000_000
_RATIO = 1032  # the most that deflate, HDF5's gzip filter, expands
_H5_ERRORS = (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, UnicodeError, NotImplementedError, IndexError, OverflowError)  # fmt: skip


class _FilePart(io.RawIOBase):
    """A range of a file, read as a separate file: HDF5 inside an archive."""

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
    """Open weights. Each read opens its file, so threads share nothing but HDF5's own lock."""

    def __init__(self, path: Path, files: list[Path], format: str) -> None:
        self.path, self.format, self.watched = path, format, stamps(files)
        leaves: dict[tuple[str, ...], Leaf] = {}
        datasets: dict[tuple[str, ...], tuple[Path, str]] = {}
        layer_names: dict[tuple[str, ...], str] = {}
        specs: list[tuple[Path, tuple[str, ...], TensorSpec]] = []
        for file in files:
            with _hdf5(file) as h5, _errors(file):
                file_specs, file_names = _walk(file, h5)
            specs += [(file, keys, spec) for keys, spec in file_specs.items()]
            layer_names |= file_names
        rename = _numbering({keys for _, keys, _ in specs} | layer_names.keys())
        for file, keys, spec in specs:
            new_keys = rename(keys)
            if new_keys in leaves:
                raise name_clash(file, "/".join(new_keys), "rename a layer where the model is saved")
            leaves[new_keys] = Leaf(new_keys, spec)
            datasets[new_keys] = file, "/".join(keys)
        self.leaves = distinct_names(path, leaves.values())
        self._datasets = {name: datasets[leaf.keys] for name, leaf in self.leaves.items()}
        given = {"/".join(rename(keys)): name for keys, name in layer_names.items() if keys[-1] != name}
        shown = ", ".join(f"{path} is {name}" for path, name in sorted(given.items())[:40])
        self.notes = (note(f"names of the layers in the model: {shown}"),) if given else ()

    def read(self, name: str) -> np.ndarray:
        return self.read_box(name, full_box(self.leaves[name].spec.shape))

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        file, inner = self._datasets[name]
        spec = self.leaves[name].spec
        dtype = numpy_dtype(spec.dtype)
        with _hdf5(file, name) as h5, _errors(file, name):
            dataset = h5[inner]
            if dataset.shape != spec.shape:
                raise ValueError(
                    f"its shape changed from {list(spec.shape)} to {list(dataset.shape)} since the file was opened"
                )
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
        problem = "Keras stores weights as HDF5, and h5py is not installed"
        fix = "run pip install 'ckpt-convert[keras]'"
        raise CheckpointError(Finding("package-missing", problem, path=str(path), fix=fix)) from None
    return h5py


@contextmanager
def _errors(file: Path, leaf: str | None = None) -> Iterator[None]:
    """Add the file and the leaf to errors without a place, and to those of HDF5."""
    try:
        yield
    except CheckpointError as error:
        raise error if error.findings[0].path else located(error, file, leaf) from None
    except MemoryError:
        raise out_of_memory(file, leaf, "not enough memory") from None
    except _H5_ERRORS as error:
        raise unreadable(file, ValueError(f"HDF5: {error}"), leaf, COPY_AGAIN) from None


@contextmanager
def _hdf5(path: Path, leaf: str | None = None) -> Iterator[Any]:
    """Open the HDF5 file at `path`, or inside the ``.keras`` archive at `path`."""
    h5py = _h5py(path)
    with opened(path) as raw:
        file: Any = raw
        if head(path).startswith(ZIP):
            member = members(path).get(_WEIGHTS)
            if member is None:
                raise incomplete(f"the archive has no {_WEIGHTS}", path, fix="save the model again as .keras")
            if member.deflated:
                problem = f"{_WEIGHTS} is compressed in the archive, which Keras does not do"
                raise unsupported(problem, path, fix="unzip it, and give that file")
            with _errors(path, leaf):
                file = io.BufferedReader(_FilePart(raw, data_start(raw, member.start), member.size))
        with _errors(path, leaf):
            h5 = h5py.File(file, "r")
        try:
            yield h5
        finally:
            h5.close()


def _walk(file: Path, h5: Any) -> tuple[dict[tuple[str, ...], TensorSpec], dict[tuple[str, ...], str]]:
    """Return the specs of the datasets by path, and the names of layers by the path of their group.

    Follows hard links only.

    Raises:
        CheckpointError: not weights of Keras 3.
    """
    import h5py

    size = file.stat().st_size
    specs: dict[tuple[str, ...], TensorSpec] = {}
    layer_names: dict[tuple[str, ...], str] = {}
    pending: list[tuple[tuple[str, ...], Any]] = [((), h5)]
    seen: set[int] = set()
    objects = 0
    while pending:
        keys, group = pending.pop()
        if len(keys) > _MOST_DEPTH:
            raise corrupt(
                "the groups are too deep for Keras", file, "/".join(keys), expected=f"at most {_MOST_DEPTH} levels"
            )
        layer_name = group.attrs.get("name") if keys[-1:] == ("vars",) else None
        if isinstance(layer_name, str) and keys[:-1]:
            layer_names[keys[:-1]] = layer_name
        if (place := h5py.h5o.get_info(group.id).addr) in seen:  # 20 levels of two such links would be a million groups
            problem = "two names lead to the same group, which Keras does not write"
            raise link_refused(problem, file, "/".join(keys), fix="save the weights again")
        seen.add(place)
        for key in group:
            path = "/".join((*keys, key))
            objects += 1
            if objects > _MOST_OBJECTS:
                raise corrupt("the file has too many objects for Keras", file, expected=f"at most {_MOST_OBJECTS}")
            if not isinstance(group.get(key, getlink=True), h5py.HardLink):
                problem = "this link leads to another place and is not followed"
                raise link_refused(problem, file, path, fix="save the weights again")
            child = group[key]
            if isinstance(child, h5py.Group):
                pending.append(((*keys, key), child))
            elif isinstance(child, h5py.Dataset):
                specs[(*keys, key)] = _spec(file, path, child, size)
    if not any("vars" in keys for keys in specs):
        got = f"HDF5 with {'/'.join(next(iter(specs)))}" if specs else "no weights"
        fix = "save with Keras 3: model.save_weights('model.weights.h5')"
        raise unknown_format(file, expected="the groups vars/ of Keras 3", got=got, fix=fix)
    return specs, layer_names


def _spec(file: Path, leaf: str, dataset: Any, size: int) -> TensorSpec:
    if dataset.external or dataset.is_virtual:
        problem = "its data are in other files, which are not read"
        raise link_refused(problem, file, leaf, fix="save the weights again")
    shape = dataset.shape
    if shape is None:
        raise unsupported("an HDF5 null dataset, which Keras does not write", file, leaf, fix="save the weights again")
    dtype_attribute = dataset.attrs.get("dtype")
    if dataset.dtype.kind == "V" and dataset.dtype.itemsize == 2 and dtype_attribute == "bfloat16":
        spec = TensorSpec(tuple(shape), "bfloat16")
    else:
        try:
            spec = TensorSpec(tuple(shape), dtype_name(dataset.dtype.newbyteorder("=")))
        except (ConvertError, TypeError):
            fix = "save the weights with another dtype"
            raise unsupported(
                "the dtype is not one of a model's arrays", file, leaf, got=str(dataset.dtype), fix=fix
            ) from None
    stored = dataset.id.get_storage_size()
    possible = stored * (_RATIO if dataset.chunks else 1)
    if spec.nbytes > possible or stored > size:
        expected = f"{spec.nbytes} bytes for {spec}"
        raise corrupt("the size of the dataset is wrong", file, leaf, expected=expected, got=f"{stored} bytes")
    return spec


def _numbering(paths: set[tuple[str, ...]]) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
    """Return a function that renames ``dense`` to ``dense_0`` where it has a sibling ``dense_1`` and none ``dense_0``."""
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
        document = read_json(options.boundary.open(path), path)
        weight_map = document.get("weight_map") if isinstance(document, dict) else None
        listed = weight_map.values() if isinstance(weight_map, dict) else ()
        names = {name for names in listed for name in (names if isinstance(names, list) else [names])}
        if not names or not all(isinstance(name, str) for name in names):
            raise corrupt("the index has no weight_map, which names the shards", path)
        files = [options.boundary.named(path.parent, name) for name in sorted(names)]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise incomplete(f"the shard {missing[0]} is missing", path)
        return _Keras(path.parent, files, f"Keras 3 weights (HDF5), {len(files)} shards")
    archive = head(path).startswith(ZIP)
    return _Keras(path, [path], "Keras 3 .keras archive (HDF5)" if archive else "Keras 3 weights (HDF5)")


def is_keras(path: Path) -> bool:
    """Whether the file is HDF5, or a zip archive with weights of Keras."""
    start = head(path)
    return start.startswith(_HDF5) or (start.startswith(ZIP) and _WEIGHTS in member_names(path))


def config_in_archive(path: Path, name: str, most: int) -> bytes | None:
    """Return the file `name` of a ``.keras`` archive if it is the ``config.json`` that Keras writes there; None where `path` or `name` is another.

    Args:
        most: the bytes that it may have.

    Raises:
        CheckpointError: the archive has no ``config.json``, or one that is damaged or too large.
    """
    if name != _CONFIG or not head(path).startswith(ZIP) or not is_keras(path):
        return None
    member = members(path).get(_CONFIG)
    if member is None:
        raise incomplete(f"the archive has no {_CONFIG}", path, fix="save the model again as .keras")
    if member.size > most:
        raise corrupt("the file is too large", path, _CONFIG, expected=f"at most {most} bytes", got=f"{member.size} bytes")  # fmt: skip
    try:
        return b"".join(member.stream())
    except CheckpointError as error:
        raise located(error, path, _CONFIG) from None
    except OSError as error:
        raise unreadable(path, error, _CONFIG) from None


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
