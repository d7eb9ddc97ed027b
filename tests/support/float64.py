"""What upstream's code computes in float64 with casts removed, of goldens that have its outputs in float32 (`tests/golden/make_float64.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from support.goldens import relative_error
from support.paths import GOLDEN

FOLDER = GOLDEN / "float64"
NUMBERS = 64  # of each output, spread over it

Array = np.ndarray[Any, Any]


def kept(output: Any) -> Array:
    """Return the numbers of an output that are recorded."""
    flat = np.asarray(output).reshape(-1)
    return flat[:: -(-flat.size // NUMBERS)]


def save(writer: str, outputs: Mapping[str, Any]) -> None:
    """Record outputs, each named CASE/OUTPUT, beside those of other cases."""
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{writer}.npz"
    before = dict(np.load(file)) if file.exists() else {}
    made = {name: kept(x).astype(np.float64) for name, x in outputs.items()}
    np.savez_compressed(file, **dict(sorted((before | made).items())))  # type: ignore[arg-type]


def recorded(writer: str, case: str) -> dict[str, Array]:
    """Return the recorded numbers of a case, by output."""
    with np.load(FOLDER / f"{writer}.npz") as stored:
        return {name.removeprefix(f"{case}/"): stored[name] for name in stored.files if name.startswith(f"{case}/")}


def error(writer: str, case: str, outputs: Mapping[str, Any]) -> float:
    """Return the largest relative error of the PyTorch class's outputs in float64."""
    wanted = recorded(writer, case)
    assert wanted and wanted.keys() <= outputs.keys(), (case, list(wanted), list(outputs))
    return max(relative_error(kept(outputs[name]), x) for name, x in wanted.items())
