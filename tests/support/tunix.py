"""Tunix's Gemma 3: the golden case, and what transformers computes from its converted file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from convert.numerics.lift_torch import lifted
from support.drawn_cases import DrawnCases
from support.goldens import relative_error
from support.paths import GOLDEN

GOLD, CASE = DrawnCases(GOLDEN / "tunix"), "gemma3"
SET = {"context_length": 64, "sliding_window": 4, "query_pre_attn_scalar": 4, "rope_factor_global": 8.0}


def write(folder: Path) -> Path:
    """Write the leaves to a file."""
    np.savez(folder / "tunix.npz", **GOLD.leaves(CASE))  # type: ignore[arg-type]
    return folder / "tunix.npz"


def errors(out: Path) -> tuple[float, float]:
    """The relative error of the logits in float32; and in float64 with casts removed."""
    from transformers import Gemma3ForCausalLM

    model, info = Gemma3ForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(info.values()), info
    model = model.requires_grad_(False).eval()
    tokens = torch.from_numpy(GOLD.values(CASE, "in")["tokens"]).long()
    single = model(tokens).logits.numpy()
    with lifted():
        double = model.double()(tokens).logits.numpy()
    wanted = (GOLD.values(CASE, kind)["logits"] for kind in ("out", "out64"))
    first, second = map(relative_error, (single, double), wanted)
    return first, second
