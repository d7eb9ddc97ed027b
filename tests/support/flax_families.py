"""The golden cases of all flax models of transformers 4 (`tests/golden/make_flax_families.py`)."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from flax import serialization
from flax.traverse_util import unflatten_dict

FOLDER = Path(__file__).parents[1] / "golden" / "flax-families"
CASES = tuple(sorted(path.stem for path in FOLDER.glob("*.npz")))
DIGESTS: dict[str, dict[str, Any]] = json.loads((FOLDER / "DIGEST.json").read_text())


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Draw a leaf as the script of the golden cases does: the stream of RandomState is frozen for good."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    last = name.rpartition("/")[2]
    if last == "var":
        return (0.5 + np.abs(noise) % 1).astype(np.float32)
    near_one = last in ("scale", "weight", "weight_g", "logit_scale")
    return np.asarray(near_one + (0.1 if near_one else 0.3) * noise).astype(np.float32)


def values(case: str, kind: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the inputs (`in`) or the outputs (`out`) of a case."""
    with np.load(FOLDER / f"{case}.npz") as stored:
        return {name.partition("/")[2]: stored[name] for name in stored.files if name.startswith(f"{kind}/")}


def config(case: str) -> dict[str, Any]:
    with np.load(FOLDER / f"{case}.npz") as stored:
        found: dict[str, Any] = json.loads(str(stored["config"]))
        return found


def leaves(case: str) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(FOLDER / f"{case}.npz") as stored:
        shapes = json.loads(str(stored["leaves"]))
    return {name: drawn(f"{case}/{name}", tuple(shape)) for name, shape in shapes.items()}


def write(case: str, folder: Path, changed: dict[str, np.ndarray[Any, Any]] | None = None, **keys: Any) -> Path:
    """Write the checkpoint of a case: the bytes that `save_pretrained` wrote, unless something is changed."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = unflatten_dict(leaves(case) if changed is None else changed, sep="/")
    (folder / "flax_model.msgpack").write_bytes(serialization.to_bytes(tree))
    (folder / "config.json").write_text(json.dumps(config(case) | keys))
    return folder
