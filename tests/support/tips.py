"""The golden cases of TIPS: their files, and what transformers computes from the converted directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import convert
from convert.numerics.lift_torch import lifted
from support.drawn_cases import DrawnCases
from support.goldens import relative_error
from support.paths import GOLDEN

ALL = DrawnCases(GOLDEN / "tips")
SET: dict[str, dict[str, Any]] = {"text": {}, "image": {"mlp_ratio": 2}, "image-swiglu": {"mlp_ratio": 4}}


def write(case: str, folder: Path) -> Path:
    """Write the checkpoint as the published files are."""
    np.savez(folder / "tips.npz", **ALL.leaves(case))  # type: ignore[arg-type]
    return folder / "tips.npz"


def converted(case: str, folder: Path) -> tuple[Path, Path]:
    """Write the case and convert it; return both."""
    source = write(case, folder)
    convert.convert("tips", source, folder / "out", settings=SET[case])
    return source, folder / "out"


def errors(case: str, out: Path) -> tuple[float, float]:
    """The relative error in float32; and in float64 with casts removed."""
    from transformers import AutoModel

    model, info = AutoModel.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(info.values()), info
    model = model.requires_grad_(False).eval()
    single = _run(case, model)
    with lifted():
        double = _run(case, model.double())
    return _error(single, ALL.values(case, "out")), _error(double, ALL.values(case, "out64"))


def _run(case: str, model: Any) -> dict[str, np.ndarray[Any, Any]]:
    given = {name: torch.from_numpy(x) for name, x in ALL.values(case, "in").items()}
    if case == "text":
        texts = model(input_ids=given["tokens"].long(), attention_mask=1 - given["paddings"].long())
        return {"text": texts.pooler_output.numpy()}
    found = {}
    for name, images in given.items():
        states = model(images.permute(0, 3, 1, 2).to(model.dtype)).last_hidden_state.numpy()
        patches = [size // model.config.patch_size for size in images.shape[1:3]]
        found[f"{name}_tokens"] = states[:, :2]
        found[f"{name}_patches"] = states[:, 2:].reshape(len(states), *patches, -1)
    return found


def _error(got: dict[str, np.ndarray[Any, Any]], wanted: dict[str, np.ndarray[Any, Any]]) -> float:
    assert list(got) and got.keys() == wanted.keys()
    return max(relative_error(x, wanted[name]) for name, x in got.items())
