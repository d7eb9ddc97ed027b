"""ViViT: the golden case, its checkpoint, and what transformers computes from the converted file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from flax import serialization
from flax.traverse_util import unflatten_dict

import convert
from convert.numerics.lift_torch import lifted
from support.drawn_cases import DrawnCases
from support.goldens import relative_error
from support.paths import GOLDEN

GOLD, CASE = DrawnCases(GOLDEN / "scenic"), "vivit"
SET = {"image_size": 12, "num_frames": 6}


def write(folder: Path) -> Path:
    """Write the file as the published one is: msgpack of flax, before optax, in a file without an extension."""
    params = unflatten_dict(GOLD.leaves(CASE), sep="/")
    state = {"optimizer": {"target": params, "state": {"step": np.int32(3)}}, "global_step": np.int32(3)}
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(state))
    return folder / "checkpoint"


def converted(folder: Path, **options: Any) -> tuple[Path, Path]:
    source = write(folder)
    convert.convert("vivit", source, folder / "out", settings=SET, **options)
    return source, folder / "out"


def errors(out: Path) -> tuple[float, float]:
    """The relative error of the logits in float32; and in float64 with casts removed."""
    from transformers import VivitForVideoClassification

    model, info = VivitForVideoClassification.from_pretrained(out, output_loading_info=True, dtype=torch.float32, attn_implementation="eager")  # fmt: skip
    assert not any(info.values()), info
    model = model.requires_grad_(False).eval()
    videos = torch.from_numpy(GOLD.values(CASE, "in")["videos"]).permute(0, 1, 4, 2, 3)
    single = model(videos).logits.numpy()
    with lifted():
        double = model.double()(videos.double()).logits.numpy()
    wanted = (GOLD.values(CASE, kind)["logits"] for kind in ("out", "out64"))
    single, double = map(relative_error, (single, double), wanted)
    return single, double
