"""Reads what big_vision's train.py saves: a directory of zarr arrays for each step.

On disk: ``checkpoint.bv-000001000/params~img~head~kernel/.zarray``, where ``~`` stands for ``/``. A step that is not kept ends
in ``-tmp``. ``checkpoint.bv-LAST``, written when all arrays of a save are, holds the last part of the name of the latest
complete one (big_vision/utils.py, ``tssave`` and ``save_checkpoint_ts``; JAX's ``GlobalAsyncCheckpointManager`` writes the arrays).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from convert.checkpoints.access import Boundary, children, head
from convert.checkpoints.chunks import Box, Grid, Meter, Piece, full_box
from convert.checkpoints.errors import ambiguous, option_rejected, step_chosen, step_not_found, unfinished
from convert.checkpoints.formats.zarr_directories import ZarrDirectories
from convert.checkpoints.source import Format, Leaf, Options, Source, distinct_names, stamps
from convert.core.findings import Finding

SEPARATOR = "~"
METADATA = ".zarray"
_STEP = re.compile(r"(?P<run>.+)-(?P<step>\d{1,18})(-tmp)?")
_LAST = "-LAST"
_WAIT = "wait for the save to end, or choose another step with --step"


class _BigVision(Source):
    """An open step. Reading takes no lock: TensorStore's handles may be used from several threads."""

    def __init__(self, path: Path, notes: tuple[Finding, ...], boundary: Boundary) -> None:
        boundary.check(path)
        self.path, self.notes, self.format = path, notes, "big_vision, one zarr directory per leaf"
        names = [child.name for child in children(path) if child.is_dir()]
        self.watched = stamps(path / name / METADATA for name in names)
        self._arrays = ZarrDirectories(path, set(names), boundary)
        keys = {name: tuple(name.split(SEPARATOR)) for name in names}
        self.leaves = distinct_names(path, (Leaf(of, self._arrays.spec(path, of, name)) for name, of in keys.items()))

    def _directory(self, name: str) -> str:
        return SEPARATOR.join(self.leaves[name].keys)

    def read(self, name: str) -> np.ndarray:
        return self.read_box(name, full_box(self.leaves[name].spec.shape))

    def chunks(self, name: str) -> Grid:
        return self._arrays.grid(self._directory(name))

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        yield from self._arrays.pieces(self.path, name, self._directory(name), chunk, meter)


def _is_tree(path: Path) -> bool:
    """Whether `path` has arrays whose names have keys, as big_vision joins them."""
    return path.is_dir() and any(SEPARATOR in child.name and (child / METADATA).is_file() for child in children(path))


def _steps(folder: Path) -> list[Path]:
    return [child for child in children(folder) if _STEP.fullmatch(child.name) and _is_tree(child)]


def _number(path: Path) -> int | None:
    match = _STEP.fullmatch(path.name)
    return int(match["step"]) if match else None


def _complete(path: Path) -> bool:
    """Whether the save has ended: the file of the run names this step or a later one. Without such a file nothing is known."""
    match = _STEP.fullmatch(path.name)
    file = path.parent / f"{match['run']}{_LAST}" if match else path
    last = head(file).decode("ascii", "replace").strip().removesuffix("-tmp") if file.is_file() else ""
    return not (match and last.isdecimal()) or int(match["step"]) <= int(last)


def _locate(path: Path, step: int | None) -> tuple[Path, tuple[Finding, ...]]:
    """Return the directory of a step, and the note on the choice."""
    if _is_tree(path):
        number = _number(path)
        if step is not None and step != number:
            raise option_rejected(path, f"this is not known to be step {step}", "give the directory of the steps")
        if not _complete(path):
            raise unfinished(path, f"not finished: {_run(path)}{_LAST} names an earlier step", _WAIT)
        return path, () if number is None else (step_chosen(number),)
    found = _steps(path)
    if len(runs := sorted({_run(child) for child in found})) > 1:
        raise ambiguous(path, f"{' and '.join(runs)} have steps", "give the directory of a step")
    steps = {number: child for child in found if (number := _number(child)) is not None and _complete(child)}
    skipped = [child.name for child in found if not _complete(child)]
    if not steps:
        raise unfinished(path, f"no step is finished: there is only {', '.join(skipped)}", _WAIT)
    if step is not None and step not in steps:
        raise step_not_found(path, step, steps)
    chosen = max(steps) if step is None else step
    return steps[chosen], (step_chosen(chosen, steps, skipped),)


def _run(path: Path) -> str:
    match = _STEP.fullmatch(path.name)
    return match["run"] if match else path.name


def _find(path: Path) -> list[Path]:
    return [path] if path.is_dir() and (_is_tree(path) or _steps(path)) else []


def _open(path: Path, options: Options) -> Source:
    return _BigVision(*_locate(path, options.step), options.boundary)


FORMAT = Format(
    "big_vision",
    "a checkpoint.bv-N directory of big_vision, or the directory above it",
    _find,
    _open,
    frozenset({"step"}),
)
