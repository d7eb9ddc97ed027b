"""A written conversion, opened for checking: one file, or a directory with shards and an index. Nothing is loaded whole."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.errors import CheckpointError
from convert.safetensors_header import Entry, read_header
from convert.spec import TensorSpec, numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Written:
    """Safetensors files, as one mapping of tensors.

    Attributes:
        path: what the user named.
        metadata: of the first file (all files of a conversion have the same).
        tensors: name -> (file, entry).
        config: contents of ``config.json`` beside them; None without one.
    """

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, tuple[Path, Entry]]
    config: Mapping[str, Any] | None

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor."""
        return {name: entry.spec for name, (_, entry) in self.tensors.items()}

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

    Raises:
        CheckpointError: no such file, not safetensors, or an index that leads elsewhere or lies about a file.
    """
    path = Path(path)
    if path.is_dir():
        index = path / INDEX
        files = _indexed(index) if index.exists() else sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path}: there is no .safetensors file in it")
    elif path.exists():
        files = [path]
    else:
        raise CheckpointError(f"{path}: there is no such file or directory")
    tensors: dict[str, tuple[Path, Entry]] = {}
    metadata: dict[str, str] = {}
    for k, file in enumerate(files):
        found, entries = read_header(file)
        metadata = found if k == 0 else metadata
        for name, entry in entries.items():
            if name in tensors:
                raise CheckpointError(f"{path}: {name} is in both {tensors[name][0].name} and {file.name}")
            tensors[name] = (file, entry)
    config = (path if path.is_dir() else path.parent) / "config.json"
    return Written(path, metadata, tensors, _config(config) if path.is_dir() and config.exists() else None)


def _indexed(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors files: {error}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:  # a foreign file may not lead out of its directory
            raise CheckpointError(f"{index}: names {name!r}, which is no file beside it")
    return [index.parent / name for name in sorted(names)]


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return config
