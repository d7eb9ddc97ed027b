"""Decides whether Orbax's or paxml's reader opens a directory; the two formats have similar directories."""

from __future__ import annotations

from pathlib import Path

from convert.checkpoints.formats import paxml, t5x
from convert.checkpoints.source import Format, Options, Source


def _find_pax(path: Path) -> list[Path]:
    return [path] if paxml.looks_like_pax(path) else []


def _find_orbax(path: Path) -> list[Path]:
    if _find_pax(path) or t5x.find(path):  # their files have the same names as those of Orbax
        return []
    from convert.checkpoints.orbax import reader  # imports TensorStore, which other formats do not need

    return [path] if reader.looks_like_orbax(path) else []


def _open_orbax(path: Path, options: Options) -> Source:
    from convert.checkpoints.orbax import reader

    return reader.open_orbax(path, step=options.step, item=options.item, boundary=options.boundary)


def _open_pax(path: Path, options: Options) -> Source:
    return paxml.open_pax(path, step=options.step, boundary=options.boundary)


FORMATS = (
    Format(
        "Orbax",
        "a directory with _METADATA, or a directory of steps",
        _find_orbax,
        _open_orbax,
        frozenset({"step", "item"}),
    ),
    Format(
        "paxml", "checkpoint_N/state/checkpoint, or a directory above it", _find_pax, _open_pax, frozenset({"step"})
    ),
)
