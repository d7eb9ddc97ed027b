"""A written conversion, opened for checking: one file, or a directory with shards and an index. Nothing is loaded whole."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from convert.core.errors import CheckpointError
from convert.core.safetensors_header import Entry, read_header
from convert.core.tensor_spec import TensorSpec, numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
NAMED = "transformers_weights"  # a key of config.json: the file to load


@dataclass(frozen=True)
class Written:
    """Safetensors files, as one mapping of tensors.

    Attributes:
        path: what the user named.
        metadata: of the first file (all files of a conversion have the same).
        tensors: name -> (file, entry).
        config: contents of ``config.json`` beside them; None without one.
        found: of a directory, the file or index by which its tensors are found; empty when it is all the files there are.
        missing: file that the index names, and that is not there -> the tensors that it should hold.
    """

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, tuple[Path, Entry]]
    config: Mapping[str, Any] | None
    found: str = ""
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor."""
        return {name: entry.spec for name, (_, entry) in self.tensors.items()}

    def stated(self, key: str) -> Any:
        """What the header says under ``facts``, ``layers``, ``sizes`` or ``settings``; empty when it says nothing.

        Raises:
            CheckpointError: it is not what a conversion writes; someone else's file may say anything there.
        """
        wanted = list if key == "layers" else dict
        try:
            value = json.loads(self.metadata.get(key, "[]" if wanted is list else "{}"))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, wanted):
            raise CheckpointError(
                f"{self.path}: `{key}` in its header is not a JSON {'list' if wanted is list else 'object'}; was it written by "
                f"other code? Remove `{key}` from the header, or write the file again"
            )
        return value

    def read(self, name: str) -> Array:
        """One tensor, as a read-only view of the mapped file."""
        path, entry = self.tensors[name]
        dtype = numpy_dtype(entry.spec.dtype)
        if entry.stop == entry.start:
            return np.zeros(entry.spec.shape, dtype)
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return (
            np.frombuffer(view, np.uint8, entry.stop - entry.start, entry.start).view(dtype).reshape(entry.spec.shape)
        )


def open_written(path: str | Path) -> Written:
    """Opens what a conversion wrote, by ours or by someone else's code.

    Of a directory, what `from_pretrained` loads (transformers 5.23, ``_get_resolved_checkpoint_files``): what ``config.json``
    names as `transformers_weights`, or ``model.safetensors``, or what the index names. Without any of them, all files.

    Raises:
        CheckpointError: no such file, not safetensors, or an index that leads elsewhere or lies about a file.
    """
    path = Path(path)
    config = _config(path / "config.json") if path.is_dir() and (path / "config.json").exists() else None
    found = _found(path, config) if path.is_dir() else ""
    places: dict[str, str] | None = None
    missing: dict[str, tuple[str, ...]] = {}
    if found.endswith(".index.json"):
        places = _indexed(path / found)
        files = sorted({path / file for file in places.values()})
        missing = {
            file.name: tuple(name for name, place in places.items() if place == file.name)
            for file in files
            if not file.exists()
        }
        files = [file for file in files if file.name not in missing]
        places = {name: place for name, place in places.items() if place not in missing}
    elif found:
        files = [path / found]
    elif path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path}: there is no .safetensors file in it")
    elif path.exists():
        files = [path]
    else:
        raise CheckpointError(f"{path}: there is no such file or directory")
    tensors: dict[str, tuple[Path, Entry]] = {}
    metadata: dict[str, str] = {}
    for k, file in enumerate(files):
        said, entries = read_header(file)
        metadata = said if k == 0 else metadata
        for name, entry in entries.items():
            if name in tensors:
                raise CheckpointError(f"{path}: {name} is in both {tensors[name][0].name} and {file.name}")
            tensors[name] = (file, entry)
    if places is not None:
        _compare(path / found, places, {name: file.name for name, (file, _) in tensors.items()})
    return Written(path, metadata, tensors, config, found, missing)


def _found(path: Path, config: Mapping[str, Any] | None) -> str:
    """The file or index in a directory by which `from_pretrained` finds the tensors; empty when there is none."""
    named = (config or {}).get(NAMED)
    if named is None:
        return next((name for name in (WHOLE, INDEX) if (path / name).is_file()), "")
    if not isinstance(named, str) or Path(named).name != named or not (path / named).is_file():
        raise CheckpointError(f"{path / 'config.json'}: {NAMED} names {named!r}, which is no file beside it")
    return named


def _indexed(index: Path) -> dict[str, str]:
    """Tensor -> name of its file, as the index says."""
    try:
        places = dict(json.loads(index.read_text())["weight_map"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors files: {error}") from None
    for name in places.values():
        if not isinstance(name, str) or Path(name).name != name:  # a foreign file may not lead out of its directory
            raise CheckpointError(f"{index}: names {name!r}, which is no file beside it")
    return places


def _compare(index: Path, said: Mapping[str, str], found: Mapping[str, str]) -> None:
    """The index against the files' headers: loaders go by the index, and would miss what it misplaces."""
    for name in sorted(said.keys() | found.keys()):
        if said.get(name) != found.get(name):
            places = [f"in {place}" if place else "nowhere" for place in (said.get(name), found.get(name))]
            raise CheckpointError(f"{index}: says that {name} is {places[0]}, and it is {places[1]}; write both again")


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return config
