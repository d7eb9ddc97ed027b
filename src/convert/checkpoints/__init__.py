"""Checkpoints of every format, opened by looking at what is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from convert.checkpoints.files import children
from convert.checkpoints.formats import known_formats, pickle_guard
from convert.checkpoints.source import Absent, Format, Leaf, Options, Source, name_leaves
from convert.core.errors import CheckpointError


def open_source(
    path: str | Path,
    *,
    step: int | None = None,
    item: str | None = None,
    skeleton: str | Path | None = None,
    leaf_names: Sequence[Sequence[str]] = (),
) -> Source:
    """Opens a checkpoint: finds its format, its step and its item; reads the tree and the specs, no arrays.

    Args:
        path: a checkpoint, or a directory that holds one (steps of a CheckpointManager, ``checkpoints/`` of paxml).
        step: which step, where there are several; None is the latest that is finished.
        item: which item of a composite checkpoint, such as ``params``.
        skeleton: what `convert skeleton` wrote: the names of the leaves, for a format that has none (Equinox).
        leaf_names: names for such a format from rule files, in the order of the file; one sequence per rule file. A format
            that has names of its own does not need them, and they are ignored.

    Raises:
        CheckpointError: not a checkpoint, unfinished, damaged, or several where one must be named.
    """
    path = Path(path)
    names = tuple(tuple(one) for one in leaf_names)
    source = _open(path, Options(step, item, None if skeleton is None else Path(skeleton), names))
    source.named = path
    return source


def _open(path: Path, options: Options) -> Source:
    known = list(known_formats())
    found = [(format, place) for format in known for place in format.find(path)]
    # A directory that is a checkpoint is what the user means, whatever files lie beside the arrays.
    found = [(format, place) for format, place in found if place == path] or found
    if len(found) > 1:
        choices = "\n".join(f"  {place} ({format.name})" for format, place in found)
        raise CheckpointError(f"{path}: {len(found)} checkpoints could be meant; give one of them:\n{choices}")
    if found:
        format, place = found[0]
        _check_options(place, format, options)
        return format.open(place, options)
    raise CheckpointError(_unknown(path, known))


def _check_options(path: Path, format: Format, options: Options) -> None:
    for option, what in (("step", "steps"), ("item", "items"), ("skeleton", "need of a skeleton")):
        value = getattr(options, option)
        if value is not None and option not in format.options:
            raise CheckpointError(f"{path}: a checkpoint of {format.name} has no {what}; leave out --{option} {value}")


def _unknown(path: Path, known: Sequence[Format]) -> str:
    if not path.exists():
        return f"{path}: there is no such file or directory"
    if said := pickle_guard.refusal(path):
        return said
    inside = [child.name for child in children(path)[:6]]
    shown = f"; it holds {', '.join(inside)}" if inside else "; it is empty" if path.is_dir() else ""
    listed = "\n".join(f"  {format.name}: {format.understands}" for format in known)
    return f"{path}: no checkpoint that can be read{shown}. Understood are\n{listed}\nGive the file or directory that the JAX code saved to"


__all__ = ["Absent", "Format", "Leaf", "Options", "Source", "known_formats", "name_leaves", "open_source"]
