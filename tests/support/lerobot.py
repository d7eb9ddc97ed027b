"""openpi's goldens for lerobot, whose policies run in another environment: `tests/golden/read_back_lerobot.py` recorded what they computed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

import convert
from support.drawn_cases import DrawnCases
from support.goldens import relative_error
from support.paths import GOLDEN
from support.sbx import digest

GOLD, FILE = DrawnCases(GOLDEN / "openpi"), GOLDEN / "lerobot.npz"
ALPHA = 6
CASES = {
    "pi0": "PI0Policy",
    "pi0-lora": "PI0Policy",
    "pi05": "PI05Policy",
    "pi05-lora": "PI05Policy",
    "pi0-fast": "PI0FastPolicy",
}

Arrays = dict[str, np.ndarray[Any, Any]]


def settings_of(case: str) -> dict[str, Any]:
    found = {"action_horizon": 3, "action_dim": 5} if case == "pi0-fast" else {"action_horizon": 3}
    return found | ({"lora_alpha": ALPHA} if case.endswith("-lora") else {})


def converted(case: str, folder: Path) -> tuple[Path, Path]:
    """Convert a case; return its file and the directory."""
    source = folder / "params.npz"
    np.savez(source, **{f"params/{name}": x for name, x in GOLD.leaves(case).items()})  # type: ignore[arg-type]
    convert.convert("openpi", source, folder / "out", to="lerobot", settings=settings_of(case))
    return source, folder / "out"


def there(case: str) -> np.ndarray[Any, Any]:
    """Return [batch, place], true at the tokens of images that are there and of the text."""
    given = GOLD.values(case, "in")
    masks = [x for name, x in given.items() if name.startswith("image_masks/")]
    text = given["tokenized_prompt_mask"]
    tokens = (GOLD.values(case, "out")["logits"].shape[1] - text.shape[1]) // len(masks)
    return np.concatenate([*(np.repeat(x[:, None], tokens, 1) for x in masks), text], 1)


def said(case: str, kind: str) -> Arrays:
    """Return what openpi's JAX code gave; logits where `there`: nothing attends to absent images and padding, and each code has numbers of its own there."""
    return {name: x[there(case)] if name == "logits" else x for name, x in GOLD.values(case, kind).items()}


def checksum(out: Path) -> str:
    """Return the digest of the names, shapes and values of all tensors."""
    return hashlib.sha256(json.dumps(digest(out / "model.safetensors"), sort_keys=True).encode()).hexdigest()


def errors(case: str, out: Path) -> tuple[float, float]:
    """The relative error of what lerobot computed from these very tensors, in float32; and in float64 with casts removed: velocities or logits."""
    with np.load(FILE) as stored:
        assert checksum(out) == str(stored[f"{case}/sha256"])
        single, double = (
            max(relative_error(stored[f"{case}/{kind}/{name}"], said(case, kind)[name]) for name in said(case, "out64"))
            for kind in ("out", "out64")
        )
    return single, double
