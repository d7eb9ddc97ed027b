"""Says what is at a path that no format recognises, or that holds parts of a checkpoint only."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from convert.checkpoints.access import children, head
from convert.checkpoints.errors import incomplete, missing, pickle_refused, unknown_format
from convert.checkpoints.formats import pickle_guard
from convert.checkpoints.formats.safetensors import written_by_torch
from convert.checkpoints.source import Format
from convert.core.errors import CheckpointError

PIPELINE = "model_index.json"  # of diffusers: part -> library and class
MAX_PARTS = 12  # folders that an error lists
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.\w+)")  # of Hugging Face's libraries


def not_a_checkpoint(path: Path, formats: Sequence[Format]) -> CheckpointError:
    """Return the error for a path that no format recognises; of a folder whose folders are checkpoints, it names these."""
    if not path.exists():
        return missing(path)
    if pickle := pickle_guard.find_pickle(path):
        return pickle_refused(pickle)
    inside = children(path)
    for file in inside or [path]:
        if head(file).startswith(_LFS_POINTER):
            got = "a pointer of Git LFS, which a clone has in place of the data"
            return unknown_format(file, expected="a checkpoint", got=got, fix="fetch the data with `git lfs pull`")
    if parts := list(_parts(inside, formats, _libraries(path))):
        got = f"a directory of {len(parts)} checkpoints" if len(parts) > 1 else "a directory above one"
        fix = "convert each by itself:" if len(parts) > 1 else "give that one:"
        lines = ("  mkdir OUT_DIR", *parts[:MAX_PARTS])  # convert makes no folder above its output
        return unknown_format(path, expected="a checkpoint", got=got, fix=fix, lines=lines)
    names = ", ".join(child.name for child in inside[:6])
    got = f"a directory with {names}" if names else "an empty directory" if path.is_dir() else "another file"
    return unknown_format(
        path,
        expected="a checkpoint",
        got=got,
        fix="give the file or directory that the JAX code saved to. Known formats:",
        lines=tuple(f"  {format.name}: {format.understands}" for format in formats),
    )


def _parts(inside: Sequence[Path], formats: Sequence[Format], libraries: Mapping[str, str]) -> Iterator[str]:
    """Yield the command for each folder that is a checkpoint, as a shell takes it."""
    for child in inside:
        found = next((format.name for format in formats if child.is_dir() and any(not written_by_torch(file) for file in format.find(child))), "")  # fmt: skip
        if found:
            rules = f"flax-{libraries[child.name]}" if child.name in libraries else "MODEL"
            yield f"  convert {rules} {shlex.quote(str(child))} {shlex.quote(f'OUT_DIR/{child.name}')}    # {found}"


def _libraries(path: Path) -> dict[str, str]:
    """Return part -> library of a pipeline of diffusers, whose Flax classes have rules that are called after the library."""
    try:
        stated = json.loads((path / PIPELINE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    listed = stated.items() if isinstance(stated, dict) else ()
    return {
        part: one[0]
        for part, one in listed
        if isinstance(one, list) and one and one[0] in ("diffusers", "transformers")
    }


def without_index(path: Path, files: Sequence[Path]) -> None:
    """Refuse a folder where only shards of one checkpoint lie, as nothing says whether all are there.

    Raises:
        CheckpointError: names the index that is missing.
    """
    found = [_SHARD.fullmatch(file.name) for file in files]
    names = {(one["stem"], one["suffix"]) for one in found if one and int(one["count"]) > 1}
    if all(found) and len(names) == 1:
        ((stem, suffix),) = names
        index = f"{stem}{suffix}.index.json"
        raise incomplete(
            f"{index} is missing, which names the shards", path, fix="copy the checkpoint again, with all its files"
        )
