"""Golden cases whose weights are drawn again: a file has the configuration, names and shapes of the leaves, inputs and outputs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def drawn(name: str, shape: tuple[int, ...]) -> Array:
    """Draw a leaf as the scripts of the golden cases do: the stream of RandomState is frozen for good."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    last = name.rpartition("/")[2]
    if last == "var":
        return np.asarray(0.5 + np.abs(noise) % 1).astype(np.float32)
    if last.startswith("clip_"):  # bounds on both sides of zero, which a part of the values exceeds
        return np.asarray((-1.0 if last.endswith("min") else 1.0) * (0.5 + np.abs(noise))).astype(np.float32)
    near_one = last in ("scale", "weight", "weight_g", "logit_scale")
    return np.asarray(near_one + (0.1 if near_one else 0.3) * noise).astype(np.float32)


@dataclass(frozen=True)
class DrawnCases:
    """The cases of a folder, `CASE.npz`."""

    folder: Path

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(path.stem for path in self.folder.glob("*.npz")))

    def config(self, case: str) -> dict[str, Any]:
        with np.load(self.folder / f"{case}.npz") as stored:
            found: dict[str, Any] = json.loads(str(stored["config"]))
            return found

    def values(self, case: str, kind: str) -> dict[str, Array]:
        """Return the inputs (`in`), the outputs (`out`) or the outputs in float64 (`out64`) of a case."""
        with np.load(self.folder / f"{case}.npz") as stored:
            return {name.partition("/")[2]: stored[name] for name in stored.files if name.startswith(f"{kind}/")}

    def shapes(self, case: str) -> dict[str, tuple[int, ...]]:
        with np.load(self.folder / f"{case}.npz") as stored:
            return {name: tuple(shape) for name, shape in json.loads(str(stored["leaves"])).items()}

    def leaves(self, case: str) -> dict[str, Array]:
        return {name: drawn(f"{case}/{name}", shape) for name, shape in self.shapes(case).items()}

    def save(
        self, case: str, config: Mapping[str, Any], leaves: Mapping[str, Array], inputs: Mapping[str, Array],
        outputs: Mapping[str, Array], in_float64: Mapping[str, Array],
    ) -> None:  # fmt: skip
        """Replace a case."""
        self.folder.mkdir(exist_ok=True)
        shapes = {name: list(leaf.shape) for name, leaf in leaves.items()}
        kinds = {"in": inputs, "out": outputs, "out64": in_float64}
        arrays = {f"{kind}/{name}": np.asarray(x) for kind, given in kinds.items() for name, x in given.items()}
        np.savez_compressed(self.folder / f"{case}.npz", config=json.dumps(config), leaves=json.dumps(shapes), **arrays)  # type: ignore[arg-type]
