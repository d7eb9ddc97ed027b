"""Checkpoints of every format, opened by looking at what is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from convert.errors import CheckpointError
from convert.keeping import all_kept
from convert.sources.base import Absent, Format, Leaf, Options, Source, name_leaves
from convert.sources.files import children

GROUP = "convert.sources"
"""Entry points of this group are `Format` objects, of formats that other packages read."""


def open_source(
    path: str | Path,
    *,
    step: int | None = None,
    item: str | None = None,
    skeleton: str | Path | None = None,
    records: Sequence[Sequence[str]] = (),
) -> Source:
    """Opens a checkpoint: finds its format, its step and its item; reads the tree and the specs, no arrays.

    Args:
        path: a checkpoint, or a directory that holds one (steps of a CheckpointManager, ``checkpoints/`` of paxml).
        step: which step, where there are several; None is the latest that is finished.
        item: which item of a composite checkpoint, such as ``params``.
        skeleton: what `convert skeleton` wrote: the names of the leaves, for a format that has none (Equinox).
        records: names for such a format from rule files, in the order of the file; one sequence per rule file. A format
            that has names of its own does not need them, and they are ignored.

    Raises:
        CheckpointError: not a checkpoint, unfinished, damaged, or several where one must be named.
    """
    path = Path(path)
    names = tuple(tuple(one) for one in records)
    with all_kept():
        source = _open(path, Options(step, item, None if skeleton is None else Path(skeleton), names))
    source.named = path
    return source


def formats() -> Iterator[Format]:
    """The formats that are understood, those of other packages last.

    Raises:
        CheckpointError: a package's entry point is broken; the message names it.
    """
    from convert.sources import equinox, flax_msgpack, keras, npz, orbax_pax, safetensors, t5x

    for module in (flax_msgpack, equinox, npz, safetensors, keras, t5x):
        yield module.FORMAT
    yield from orbax_pax.FORMATS
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist else entry.value
        try:
            found = entry.load()
        except Exception as error:
            raise CheckpointError(
                f"the source {entry.name} of {package} cannot be loaded: {error}; repair or uninstall it"
            ) from error
        if not isinstance(found, Format):
            raise CheckpointError(f"the source {entry.name} of {package} is no convert.Format; repair or uninstall it")
        yield found


def _open(path: Path, options: Options) -> Source:
    known = list(formats())
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
    from convert.sources import pickles

    if not path.exists():
        return f"{path}: there is no such file or directory"
    if said := pickles.refusal(path):
        return said
    inside = [child.name for child in children(path)[:6]]
    shown = f"; it holds {', '.join(inside)}" if inside else "; it is empty" if path.is_dir() else ""
    listed = "\n".join(f"  {format.name}: {format.understands}" for format in known)
    return f"{path}: no checkpoint that can be read{shown}. Understood are\n{listed}\nGive the file or directory that the JAX code saved to"


__all__ = ["Absent", "Format", "Leaf", "Options", "Source", "formats", "name_leaves", "open_source"]
