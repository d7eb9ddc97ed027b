"""The golden cases of SBX (`tests/golden/make_sbx.py`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from support.paths import GOLDEN

FOLDER = GOLDEN / "sbx"
CASES = ("ppo", "ppo-choices", "sac")


def digest(file: Path) -> dict[str, list[Any]]:
    """Return shape and checksum of each tensor of a file."""
    from safetensors.numpy import load_file

    return {name: [list(x.shape), hashlib.sha256(x.tobytes()).hexdigest()] for name, x in load_file(file).items()}


def loaded_by_sb3(case: str) -> dict[str, list[Any]]:
    """Return the digest of the tensors that stable-baselines3's own policy loaded, strictly, before it computed `sb3`."""
    with np.load(FOLDER / f"{case}.npz") as stored:
        found: dict[str, list[Any]] = json.loads(str(stored["tensors"]))
        return found


def converted(case: str, folder: Path) -> tuple[Path, Path]:
    """Convert a case; return its file and the output."""
    import convert

    convert.convert("sbx", FOLDER / f"{case}.msgpack", folder / "policy.safetensors")
    return FOLDER / f"{case}.msgpack", folder / "policy.safetensors"


def error(case: str, precision: str = "") -> float:
    """The largest relative error of what stable-baselines3 computed, of what SBX did; in float64 if `precision` is 64."""
    from support.goldens import relative_error

    wanted, found = values(case, f"out{precision}"), values(case, f"sb3{precision}")
    assert wanted.keys() == found.keys()
    return max(relative_error(found[name], x) for name, x in wanted.items())


def values(case: str, kind: str) -> dict[str, Any]:
    """Return the inputs (`in`), SBX's outputs (`out`, `out64`), or those of stable-baselines3 (`sb3`, `sb364`)."""
    with np.load(FOLDER / f"{case}.npz") as stored:
        return {name.partition("/")[2]: stored[name] for name in stored.files if name.startswith(f"{kind}/")}
