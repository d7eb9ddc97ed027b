"""Checkpoints of every format, opened by looking at what is there."""

from __future__ import annotations

from pathlib import Path

from convert.errors import CheckpointError
from convert.sources.base import Absent, Leaf, Source, name_leaves


def open_source(path: str | Path, *, step: int | None = None, item: str | None = None) -> Source:
    """Opens a checkpoint: finds its format, its step and its item; reads the tree and the specs, no arrays.

    Args:
        path: a checkpoint, or a directory that holds one (steps of a CheckpointManager, ``checkpoints/`` of paxml).
        step: which step, where there are several; None is the latest that is finished.
        item: which item of a composite checkpoint, such as ``params``.

    Raises:
        CheckpointError: not a checkpoint, unfinished, damaged, or several where one must be named.
    """
    path = Path(path)
    source = _open(path, step, item)
    source.named = path
    return source


def _open(path: Path, step: int | None, item: str | None) -> Source:
    from convert.sources import pax

    if pax.looks_like_pax(path):
        if item is not None:
            raise CheckpointError(f"{path}: a paxml checkpoint has no items; leave out --item {item}")
        return pax.open_pax(path, step=step)
    from convert.sources import orbax  # imports TensorStore, which a paxml file does not need

    if orbax.looks_like_orbax(path):
        return orbax.open_orbax(path, step=step, item=item)
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or directory")
    inside = sorted(child.name for child in path.iterdir())[:6] if path.is_dir() else []
    shown = f"; it holds {', '.join(inside)}" if inside else "; it is empty" if path.is_dir() else ""
    raise CheckpointError(
        f"{path}: no checkpoint that can be read{shown}. Known are Orbax (a directory with _METADATA, or steps that have one) "
        "and paxml (checkpoint_N/state/checkpoint); give the directory that the JAX code saved to"
    )


__all__ = ["Absent", "Leaf", "Source", "name_leaves", "open_source"]
