"""The golden cases of brax (`tests/golden/make_brax.py`): conversion, and what examples/brax/policy.py computes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import torch

import convert
from convert.numerics.lift_torch import lifted
from support.goldens import relative_error
from support.paths import EXAMPLES, GOLDEN

CASES = ("ppo", "ppo-plain", "ppo-asymmetric", "sac")


def checkpoint(case: str) -> Path:
    """Return the directory of steps that brax wrote."""
    return GOLDEN / "brax" / case / "ckpt"


def converted(case: str, folder: Path) -> tuple[Path, Path]:
    """Convert a case; return its checkpoint and the output."""
    convert.convert("brax", checkpoint(case), folder / "out")
    return checkpoint(case), folder / "out"


def values(case: str, kind: str) -> dict[str, Any]:
    """Return the observations (`in`), brax's outputs (`out`), or those in float64 (`out64`)."""
    with np.load(GOLDEN / "brax" / case / "io.npz") as stored:
        return {name.partition("/")[2]: stored[name] for name in stored.files if name.startswith(f"{kind}/")}


def computed(model: torch.nn.Module, case: str, as_type: torch.dtype) -> dict[str, Any]:
    """Return what the PyTorch networks give for the observations of a case."""
    observed = {name: torch.from_numpy(x).to(as_type) for name, x in values(case, "in").items()}
    with torch.no_grad():
        found = {"policy": model.policy(observed["state"]), "action": model.act(observed["state"])}  # type: ignore[operator]
        if hasattr(model, "value"):
            seen = observed.get("privileged_state", observed["state"])
            found["value"] = model.value(seen)[:, 0]  # type: ignore[operator]
    return {name: x.numpy() for name, x in found.items()}


def errors(case: str, out: Path) -> tuple[float, float]:
    """The largest relative error in float32; and in float64 with casts removed."""
    model = runpy.run_path(str(EXAMPLES / "brax" / "policy.py"))["load"](out)
    single, rounded = computed(model, case, torch.float32), values(case, "out")
    assert single.keys() == rounded.keys()
    with lifted():
        double = computed(model.double(), case, torch.float64)
    exact = values(case, "out64")
    return (
        max(relative_error(single[name], x) for name, x in rounded.items()),
        max(relative_error(double[name], x) for name, x in exact.items()),
    )
