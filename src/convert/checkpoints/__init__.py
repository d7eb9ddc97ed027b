"""Opens checkpoints of every format, which it recognises by their content.

`open_source` finds the format among those of ``formats`` and returns a `Source` (`source`): named leaves with shapes and
dtypes, whose arrays are read later, in chunks (`chunks`). ``formats`` has a module for each format and ``orbax`` one folder
for Orbax; both decode bytes with ``encodings`` and `files`. `digest` computes the checksums of leaves, `divided` is the view of a quantised checkpoint, `memory_budget` limits
the memory of concurrent reads, `access` opens files and refuses links out of the checkpoint, `errors` has the errors of all formats, `unrecognised` says what a path without a checkpoint is. May import ``convert.core`` and ``convert.stores``.
A new format goes to ``formats``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from convert.checkpoints.access import Boundary
from convert.checkpoints.divided import divided
from convert.checkpoints.errors import (
    MOST_KEYS,
    ambiguous,
    option_rejected,
    too_deep,
    unreadable,
)
from convert.checkpoints.formats import known_formats
from convert.checkpoints.formats.safetensors import written_by_torch
from convert.checkpoints.source import Absent, Format, Leaf, Options, Source, name_leaves
from convert.checkpoints.unrecognised import not_a_checkpoint, without_index
from convert.stores import located

_OPTION_NOUNS = {"step": "steps", "item": "items", "skeleton": "need of a skeleton"}


def open_source(
    path: str | Path,
    *,
    step: int | None = None,
    item: str | None = None,
    skeleton: str | Path | None = None,
    leaf_names: Sequence[Sequence[str]] = (),
    follow_links: bool = False,
) -> Source:
    """Open a checkpoint: find its format, step and item, and read its tree and specs, but no arrays.

    Args:
        path: a checkpoint, or a directory that holds one (steps of a CheckpointManager, ``checkpoints/`` of paxml); also
            ``s3://``, ``gs://`` and ``http(s)://``.
        step: which step of several; None is the latest finished one.
        item: which item of a composite checkpoint, such as ``params``.
        skeleton: a file of `convert skeleton` with the names of the leaves, for a format without names (Equinox).
        leaf_names: names for such a format from rule files, in the order of the file; one sequence per rule file. Formats
            with names ignore them.
        follow_links: whether links in the checkpoint may lead out of it. Links within it, and within the folder of one
            repository in the cache of the Hugging Face Hub, are followed in any case.

    Raises:
        CheckpointError: not a checkpoint, unfinished, damaged, or several could be meant.
    """
    path = located(path)
    boundary = Boundary(path, follow_links)
    names = tuple(tuple(sequence) for sequence in leaf_names)
    try:
        options = Options(step, item, None if skeleton is None else Path(skeleton), names, boundary=boundary)
        source = _open(path, options)
    except OSError as error:  # any call may fail on a network file system, or when too many files are open
        raise unreadable(error.filename or path, error) from error
    for keys in itertools.chain((leaf.keys for leaf in source.leaves.values()), (node.keys for node in source.absent)):
        if len(keys) > MOST_KEYS:
            raise too_deep(source.path, keys)
    source.given_path, source.boundary = path, boundary
    return divided(source)


def _open(path: Path, options: Options) -> Source:
    formats = list(known_formats())
    candidates = [(format, file) for format in formats for file in format.find(path)]
    # A directory that is a checkpoint takes precedence over the files in it.
    candidates = [(format, file) for format, file in candidates if file == path] or candidates
    if len(candidates) > 1:  # the Hub has PyTorch's weights beside flax_model.msgpack
        candidates = [(format, file) for format, file in candidates if not written_by_torch(file)] or candidates
    if any(file != path for _, file in candidates):
        without_index(path, [file for _, file in candidates])
    if len(candidates) > 1:
        choices = ", ".join(f"{file} ({format.name})" for format, file in candidates)
        raise ambiguous(path, f"{len(candidates)} checkpoints could be meant: {choices}", "give one of them")
    if candidates:
        format, file = candidates[0]
        options.boundary.check(file)
        _check_options(file, format, options)
        return format.open(file, options)
    raise not_a_checkpoint(path, formats)


def _check_options(path: Path, format: Format, options: Options) -> None:
    for option, noun in _OPTION_NOUNS.items():
        value = getattr(options, option)
        if value is not None and option not in format.options:
            problem = f"a checkpoint of {format.name} has no {noun}"
            raise option_rejected(path, problem, f"leave out --{option} {value}")


__all__ = ["Absent", "Boundary", "Format", "Leaf", "Options", "Source", "known_formats", "name_leaves", "open_source"]
