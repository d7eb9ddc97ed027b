"""How far upstream's JAX code is, in float32, from itself in float64 with casts removed: both were recorded with the goldens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from support import float64
from support.paths import GOLDEN

Outputs = Mapping[str, Any]


def drift(case: str, folders: tuple[str, ...], writer: str = "") -> float:
    """Return the largest difference of an output, relative to its largest value.

    Args:
        folders: in which of the goldens' folders the case lies.
        writer: of the recording in float64, where the golden itself has none.
    """
    given, rounded, exact = _stored(case, folders, writer)
    both = exact.keys() & rounded.keys()
    assert both, (case, list(exact), list(rounded))
    return max(_difference(*_read(name, rounded[name], exact[name], given)) for name in both)


def _stored(case: str, folders: tuple[str, ...], writer: str) -> tuple[Outputs, Outputs, Outputs]:
    """Return the inputs, the outputs in float32, and those in float64."""
    places = [GOLDEN / folder / name for folder in folders for name in (f"{case}.npz", f"{case}/io.npz")]
    with np.load(next(place for place in places if place.exists())) as stored:
        arrays = dict(stored)
    given, rounded, exact = ({name.partition("/")[2]: x for name, x in arrays.items() if name.startswith(f"{kind}/")} for kind in ("in", "out", "out64"))  # fmt: skip
    rounded = rounded or arrays
    if writer == "keras_hub":
        from support import keras_hub

        rounded = {name: keras_hub.seen(case, rounded[name]) for name in rounded.keys() & set(keras_hub.OUTPUTS.values())}  # fmt: skip
    return given, rounded, float64.recorded(writer, case) if writer else exact


def _read(name: str, rounded: Any, exact: Any, given: Outputs) -> tuple[Any, Any]:
    """Return the numbers that both recordings have; of an encoder's output, where the mask has a token: nothing reads the others."""
    there = np.ones(rounded.shape, bool)
    if name == "encoder_last_hidden_state" and "attention_mask" in given:
        there &= given["attention_mask"][..., None].astype(bool)
    if rounded.shape != exact.shape:
        rounded, there = float64.kept(rounded), float64.kept(there)
    there &= np.isfinite(exact)  # infinities are masks
    return rounded[there].astype(np.float64), exact[there]


def _difference(rounded: Any, exact: Any) -> float:
    return float(np.abs(rounded - exact).max() / np.abs(exact).max())
