"""The golden case of TIPS's text encoder: its file, and what transformers computes from the converted directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import convert
from convert.numerics.lift_torch import lifted
from support.drawn_cases import DrawnCases
from support.goldens import relative_error
from support.paths import GOLDEN

ALL, CASE = DrawnCases(GOLDEN / "tips"), "text"


def write(folder: Path) -> Path:
    """Write the checkpoint as the published files are."""
    np.savez(folder / "tips_text.npz", **ALL.leaves(CASE))  # type: ignore[arg-type]
    return folder / "tips_text.npz"


def converted(folder: Path) -> tuple[Path, Path]:
    """Write the case and convert it; return both."""
    source = write(folder)
    convert.convert("tips", source, folder / "out")
    return source, folder / "out"


def errors(out: Path) -> tuple[float, float]:
    """The relative error in float32; and in float64 with casts removed."""
    from transformers import AutoModel

    model, info = AutoModel.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(info.values()), info
    given = ALL.values(CASE, "in")
    model = model.requires_grad_(False).eval()
    texts = {"input_ids": torch.from_numpy(given["tokens"]).long()}
    texts["attention_mask"] = torch.from_numpy(1 - given["paddings"]).long()
    single = model(**texts).pooler_output.numpy()
    with lifted():
        double = model.double()(**texts).pooler_output.numpy()
    rounded, exact = (ALL.values(CASE, kind)["text"] for kind in ("out", "out64"))
    return relative_error(single, rounded), relative_error(double, exact)
