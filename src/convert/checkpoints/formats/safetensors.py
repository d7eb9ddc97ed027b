"""Reads safetensors that JAX code wrote (``safetensors.flax.save_file``): one file, or shards with an index."""

from __future__ import annotations

from pathlib import Path

from convert.checkpoints.access import Boundary, head
from convert.checkpoints.errors import name_clash, note
from convert.checkpoints.files import FileSource, StoredArray, check_index, files_in, read_index
from convert.checkpoints.source import Format, Leaf, Options, Source, distinct_names
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.safetensors_header import read_header

_INDEX = ".safetensors.index.json"
OF_PYTORCH = "PyTorch wrote this file, according to its header; rules describe checkpoints of JAX code"
_JAX_NAMES = ("kernel", "embedding", "scale")  # last keys in trees of flax, haiku and others, and in no state_dict


def _open(path: Path, options: Options) -> Source:
    shards = read_index(path, options.boundary) if path.name.endswith(_INDEX) else None
    leaves: list[Leaf] = []
    arrays: dict[str, StoredArray] = {}
    names: dict[Path, set[str]] = {}
    notes: tuple[Finding, ...] = ()
    for file in shards or [path]:
        metadata, entries = read_header(file)
        if metadata.get("format") == "pt":
            notes = (note(OF_PYTORCH),)
        for name, entry in entries.items():
            if name in arrays:
                raise name_clash(file, name, fix="write the checkpoint again, with each leaf in one shard")
            leaves.append(Leaf(tuple(name.split("/")), entry.spec))
            arrays[name] = StoredArray(file, ((entry.start, entry.stop - entry.start),), entry.spec)
        names[file] = set(entries)
    if shards is not None:
        check_index(path, shards, names)
    named = distinct_names(path, leaves)
    format = "safetensors" if shards is None else f"safetensors, {len(shards)} shards"
    return FileSource(
        path if shards is None else path.parent,
        format,
        named,
        {name: arrays["/".join(leaf.keys)] for name, leaf in named.items()},
        notes=notes,
    )


def is_safetensors(path: Path) -> bool:
    """Whether the file starts like safetensors: the length of the header, then JSON."""
    start = head(path, 9)
    return len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") < 2**32


def written_by_torch(path: Path) -> bool:
    """Whether this is a safetensors file of PyTorch, or an index of such files.

    The header says so, or, of a plain ``save_file`` that states no format, the names: those of a `state_dict`.
    """
    try:
        file = next(iter(read_index(path, Boundary(path.parent)))) if _is_index(path) else path
        if not is_safetensors(file):
            return False
        metadata, entries = read_header(file)
    except CheckpointError:  # a damaged file is reported when it is opened
        return False
    last = {name.rpartition(".")[2].rpartition("/")[2] for name in entries}
    return metadata.get("format", "pt" if "weight" in last and last.isdisjoint(_JAX_NAMES) else "") == "pt"


def _is_index(path: Path) -> bool:
    return path.name.endswith(_INDEX) and head(path).lstrip().startswith(b"{")


def _find(path: Path) -> list[Path]:
    if _is_index(path):
        return [path]
    files = files_in(path, (".safetensors", _INDEX), lambda file: _is_index(file) or is_safetensors(file))
    shards = tuple(f"{file.name.removesuffix(_INDEX)}-" for file in files if _is_index(file))
    return [file for file in files if not (shards and file.name.startswith(shards))]


FORMAT = Format("safetensors", "a .safetensors file of safetensors.flax, or shards with an index", _find, _open)
