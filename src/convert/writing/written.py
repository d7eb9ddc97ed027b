"""Open a converted model for checking: one file, or a directory with shards and an index. Tensors are mapped, not loaded; those of a
URL are read when they are asked for."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.safetensors_header import TensorEntry, read_header
from convert.core.system.regular_file import ObjectPath, open_regular, open_unbuffered, read_regular
from convert.core.tensor_spec import TensorSpec, numpy_dtype
from convert.stores import located
from convert.stores.errors import StoreError
from convert.writing.file_layout import INDEX_SUFFIX, INDICES, SINGLE_FILES

Array = np.ndarray[Any, np.dtype[Any]]
MAX_JSON = 64 << 20  # bytes of an index or a config.json
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
WEIGHTS_KEY = "transformers_weights"  # key of config.json: the file to load


@dataclass(frozen=True)
class Written:
    """Safetensors files, as one mapping of tensors.

    Attributes:
        path: file or directory that the user named.
        metadata: of the first file; all files of a conversion have the same, except for their digests.
        tensors: name -> (file, entry).
        config: contents of ``config.json`` in the directory; None without one.
        index: name of the file or index by which the tensors of a directory are found; empty when all files are read.
        missing: file that the index names and that does not exist -> the tensors that it should hold.
    """

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, tuple[Path, TensorEntry]]
    config: Mapping[str, Any] | None
    index: str = ""
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor."""
        return {name: entry.spec for name, (_, entry) in self.tensors.items()}

    def require_files(self) -> None:
        """Check that every file exists that the index names.

        Raises:
            CheckpointError: one does not.
        """
        for file, names in self.missing.items():
            problem = f"{self.index} names {file} (for {names[0]}), and there is no such file"
            raise CheckpointError(Finding("output-incomplete", problem, path=str(self.path)))

    def stated(self, key: str) -> Any:
        """Read ``facts``, ``layers``, ``sizes`` or ``settings`` from the metadata; empty when it lacks the key.

        Raises:
            CheckpointError: the value has another form than a conversion writes; files of other code may hold anything.
        """
        expected = list if key == "layers" else dict
        try:
            value = json.loads(self.metadata.get(key, "[]" if expected is list else "{}"))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, expected):
            raise CheckpointError(
                Finding(
                    "converted-metadata-invalid",
                    f"`{key}` of its metadata was written by other code",
                    path=str(self.path),
                    expected=f"a JSON {'list' if expected is list else 'object'}",
                    got=self.metadata[key][:40],
                    fix=f"remove `{key}` from the metadata, or convert again",
                )
            )
        return value

    def read(self, name: str) -> Array:
        """Read a tensor: a read-only view of the mapped file, or a copy where the file is in a store.

        Raises:
            CheckpointError: the file cannot be read any more.
        """
        path, entry = self.tensors[name]
        dtype = numpy_dtype(entry.spec.dtype)
        if entry.stop == entry.start:
            return np.zeros(entry.spec.shape, dtype)
        try:
            values = _read(path, entry) if isinstance(path, ObjectPath) else _map(path, entry)
        except (OSError, ValueError) as error:  # ValueError: it has become shorter
            problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            fix = getattr(error, "fix", "")  # of a store
            raise CheckpointError(Finding("file-not-readable", problem, path=str(path), fix=fix)) from None
        return values.view(dtype).reshape(entry.spec.shape)


def _map(path: Path, entry: TensorEntry) -> Array:
    with open_regular(path) as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(view, np.uint8, entry.stop - entry.start, entry.start)


def _read(path: ObjectPath, entry: TensorEntry) -> Array:
    values = np.empty(entry.stop - entry.start, np.uint8)
    with open_unbuffered(path, entry.stop) as file:
        file.seek(entry.start)
        if file.readinto(values.data) != len(values):
            raise OSError("it has become shorter")
    values.flags.writeable = False
    return values


def open_written(path: str | Path) -> Written:
    """Open a converted model, of this package or of other code.

    Of a directory, open what ``from_pretrained`` loads (transformers 5.23, ``_get_resolved_checkpoint_files``): the file that
    `transformers_weights` of ``config.json`` names, or ``model.safetensors``, or the files of the index. Without any of them,
    open all files, if none is a shard: a run into a store that was killed leaves shards, and the index comes last.

    Raises:
        CheckpointError: no such file, not safetensors, or an index that contradicts the files; or shards without an index.
    """
    path = located(path)
    config = _read_config(path / "config.json") if path.is_dir() and (path / "config.json").exists() else None
    index = _find_index(path, config) if path.is_dir() else ""
    indexed: dict[str, str] | None = None  # tensor -> file
    missing: dict[str, tuple[str, ...]] = {}
    if index.endswith(INDEX_SUFFIX):
        indexed = _read_index(path / index)
        names = sorted(set(indexed.values()))
        absent = [name for name in names if not (path / name).exists()]
        missing = {name: tuple(tensor for tensor, file in indexed.items() if file == name) for name in absent}
        indexed = {tensor: file for tensor, file in indexed.items() if file not in missing}
        files = [path / name for name in names if name not in missing]
    elif index:
        files = [path / index]
    elif path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        shard = next((file.name for file in files if _SHARD.search(file.name)), "")
        if shard and isinstance(path, ObjectPath):  # on a disk a directory appears whole
            problem = f"there are shards, such as {shard}, and no index, which is written last"
            fix = "run the conversion to its end; `--resume` keeps what is there"
            raise CheckpointError(Finding("output-incomplete", problem, path=str(path), fix=fix))
    else:
        files = [path] if path.exists() else []
    if not files and not missing:
        problem = "there is no .safetensors file in it" if path.is_dir() else "there is no such file or directory"
        fix = "give the output of `convert`, or safetensors of other code"
        if pickles := sorted(file.name for file in path.glob("*.bin")):
            problem += f", and {pickles[0]} is a pickle, which is not loaded"
            fix = "load it in PyTorch and save it as safetensors; `save_pretrained` of transformers does"
        raise CheckpointError(Finding("converted-not-found", problem, path=str(path), fix=fix))
    tensors: dict[str, tuple[Path, TensorEntry]] = {}
    metadata: dict[str, str] = {}
    for k, file in enumerate(files):
        header, entries = read_header(file)
        metadata = header if k == 0 else metadata
        for name, entry in entries.items():
            if name in tensors:
                files_of = f"{tensors[name][0].name} and {file.name}"
                raise CheckpointError(
                    Finding("converted-index-invalid", f"{name} is in both {files_of}", path=str(path))
                )
            tensors[name] = (file, entry)
    if indexed is not None:
        _compare_index(path / index, indexed, {name: file.name for name, (file, _) in tensors.items()})
    return Written(path, metadata, tensors, config, index, missing)


def _find_index(path: Path, config: Mapping[str, Any] | None) -> str:
    """Return the file or index of a directory by which `from_pretrained` finds the tensors; empty when there is none."""
    name = (config or {}).get(WEIGHTS_KEY)
    if name is None:
        return next((name for name in (*SINGLE_FILES, *INDICES) if (path / name).is_file()), "")
    if not isinstance(name, str) or Path(name).name != name or not (path / name).is_file():
        raise _outside(path / "config.json", f"`{WEIGHTS_KEY}`", name)
    return name


def _read_index(index: Path) -> dict[str, str]:
    """Read which file holds each tensor."""
    try:
        files = dict(json.loads(read_regular(index, MAX_JSON))["weight_map"].items())
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"it is not an index of safetensors files: {error}"
        raise CheckpointError(Finding("converted-index-invalid", problem, path=str(index))) from None
    for name in files.values():
        if not isinstance(name, str) or Path(name).name != name:  # an index must not lead out of its directory
            raise _outside(index, "an entry", name)
    return files


def _outside(path: Path, entry: str, name: object) -> CheckpointError:
    return CheckpointError(
        Finding("converted-index-invalid", entry, path=str(path), expected="a file in this directory", got=repr(name))
    )


def _compare_index(index: Path, indexed: Mapping[str, str], actual: Mapping[str, str]) -> None:
    """Compare the index with the headers of the files: loaders trust the index, and miss what it misplaces."""
    for name in sorted(indexed.keys() | actual.keys()):
        if indexed.get(name) != actual.get(name):
            raise CheckpointError(
                Finding(
                    "converted-index-invalid",
                    f"the index and the files disagree about {name}",
                    path=str(index),
                    expected=f"{actual.get(name, 'no file')} (where it is)",
                    got=indexed.get(name, "no entry"),
                    fix="write both again",
                )
            )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_regular(path, MAX_JSON))
    except StoreError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        problem = f"cannot be read: {error}"
        raise CheckpointError(Finding("converted-metadata-invalid", problem, path=str(path))) from None
    if not isinstance(config, dict):
        raise CheckpointError(Finding("converted-metadata-invalid", path=str(path), expected="a JSON object"))
    return config
