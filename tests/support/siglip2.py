"""SigLIP 2 with images of any aspect ratio: the golden case, and what transformers computes from its converted file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from convert.numerics.lift_torch import lifted
from support.drawn_cases import DrawnCases
from support.goldens import relative_error
from support.paths import GOLDEN

GOLD, CASE = DrawnCases(GOLDEN / "siglip2"), "naflex"


def write(folder: Path) -> Path:
    """Write the checkpoint as big_vision's files have it."""
    np.savez(folder / "siglip2.npz", **{f"params/{name}": x for name, x in GOLD.leaves(CASE).items()})  # type: ignore[arg-type]
    return folder / "siglip2.npz"


def outputs(model: Any, dtype: torch.dtype) -> dict[str, np.ndarray[Any, Any]]:
    """What the model says to the golden's images and texts."""
    given = GOLD.values(CASE, "in")
    shapes = np.stack([given["rows"].max(1) + 1, given["columns"].max(1) + 1], -1)
    found = model(
        input_ids=torch.from_numpy(given["tokens"]).long(), pixel_values=torch.from_numpy(given["patches"]).to(dtype),
        pixel_attention_mask=torch.from_numpy(given["kinds"]), spatial_shapes=torch.from_numpy(shapes),
    )  # fmt: skip
    return {
        "image": found.image_embeds.numpy(),
        "text": found.text_embeds.numpy(),
        "logits": found.logits_per_image.numpy(),
    }


def errors(out: Path) -> tuple[float, float]:
    """The largest relative error in float32; and in float64 with casts removed."""
    from transformers import Siglip2Model

    model, info = Siglip2Model.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(info.values()), info
    model = model.requires_grad_(False).eval()
    single = outputs(model, torch.float32)
    with lifted():
        double = outputs(model.double(), torch.float64)
    pairs = ((single, GOLD.values(CASE, "out")), (double, GOLD.values(CASE, "out64")))
    found = [max(relative_error(got[name], wanted[name]) for name in wanted) for got, wanted in pairs]
    return found[0], found[1]
