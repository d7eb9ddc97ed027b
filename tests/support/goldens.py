"""The golden checkpoints: where they lie, and what the JAX models gave for them. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from convert.checkpoints.source import Leaf, Source
from convert.core.tensor_spec import TensorSpec
from support.paths import GOLDEN

# num_layers, num_heads and the positional embedding are not in the tree; golden/README.md
TIMESFM_1_CASES: dict[str, dict[str, Any]] = {
    "timesfm-1.0": {"num_layers": 3, "num_heads": 4, "use_positional_embedding": True},
    "timesfm-2.0": {"num_layers": 12, "num_heads": 2, "use_positional_embedding": False},
}


def relative_error(got: Any, want: np.ndarray) -> float:
    """Largest absolute error over the largest absolute value."""
    got = np.asarray(got)
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max())


def golden_io(case: str) -> Any:
    """Inputs and outputs of the JAX model."""
    return dict(np.load(GOLDEN / case / "io.npz"))


def checkpoint(case: str) -> Path:
    """The golden's checkpoint, as a user would name it."""
    return GOLDEN / case / ("checkpoints" if case in TIMESFM_1_CASES else "ckpt")


class SpecsOnly(Source):
    """A checkpoint of which only names, shapes and dtypes are known: enough to plan."""

    format = "specs"

    def __init__(self, specs: dict[str, tuple[tuple[int, ...], str]]) -> None:
        self.path = Path("/specs")
        self.leaves = {name: Leaf(tuple(name.split("/")), TensorSpec(*spec)) for name, spec in specs.items()}

    def read(self, name: str) -> np.ndarray:
        raise AssertionError("a plan reads no array")


def ends_of_modules(names: Iterable[str]) -> dict[str, set[str]]:
    """Return each leaf and module with the leaves in it; of those that differ in numbers alone, the first and the last."""
    inside: dict[str, set[str]] = {}
    for name in names:
        keys = name.split("/")
        for k in range(1, len(keys) + 1):
            inside.setdefault("/".join(keys[:k]), set()).add(name)
    alike: dict[str, list[str]] = {}
    for name in inside:
        alike.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    numbers = lambda name: [int(number) for number in re.findall(r"\d+", name)]  # noqa: E731
    return {
        name: inside[name] for found in alike.values() for name in (min(found, key=numbers), max(found, key=numbers))
    }
