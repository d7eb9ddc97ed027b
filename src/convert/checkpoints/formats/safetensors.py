"""Reads safetensors written by JAX code (``safetensors.flax.save_file``): one file, or shards with an index."""

from __future__ import annotations

from pathlib import Path

from convert.checkpoints.files import FileSource, Place, check_index, files_in, head, read_index
from convert.checkpoints.source import Format, Leaf, Options, Source, distinct_names
from convert.core.errors import CheckpointError
from convert.core.safetensors_header import read_header

_INDEX = ".safetensors.index.json"


def _open(path: Path, options: Options) -> Source:
    shards = read_index(path) if path.name.endswith(_INDEX) else None
    leaves: list[Leaf] = []
    places: dict[str, Place] = {}
    found: dict[Path, set[str]] = {}
    notes: tuple[str, ...] = ()
    for file in shards or [path]:
        metadata, entries = read_header(file)
        if metadata.get("format") == "pt":
            notes = ("its header says that PyTorch wrote it; rules describe what JAX code writes",)
        for name, entry in entries.items():
            if name in places:
                raise CheckpointError(f"{file}: leaf {name} is also in another shard; write the checkpoint again")
            leaves.append(Leaf(tuple(name.split("/")), entry.spec))
            places[name] = Place(file, ((entry.start, entry.stop - entry.start),), entry.spec)
        found[file] = set(entries)
    if shards is not None:
        check_index(path, shards, found)
    named = distinct_names(path, leaves)
    format = "safetensors" if shards is None else f"safetensors, {len(shards)} shards"
    return FileSource(
        path if shards is None else path.parent,
        format,
        named,
        {name: places["/".join(leaf.keys)] for name, leaf in named.items()},
        notes=notes,
    )


def is_safetensors(path: Path) -> bool:
    """Whether the file starts as safetensors do: the header's length, then JSON."""
    start = head(path, 9)
    return len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") < 2**32


def _is_index(path: Path) -> bool:
    return path.name.endswith(_INDEX) and head(path).lstrip().startswith(b"{")


def _find(path: Path) -> list[Path]:
    if _is_index(path):
        return [path]
    found = files_in(path, (".safetensors", _INDEX), lambda file: _is_index(file) or is_safetensors(file))
    shards = tuple(f"{file.name.removesuffix(_INDEX)}-" for file in found if _is_index(file))
    return [file for file in found if not (shards and file.name.startswith(shards))]


FORMAT = Format("safetensors", "a .safetensors file of safetensors.flax, or shards with an index", _find, _open)
