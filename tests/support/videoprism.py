"""The golden cases of VideoPrism: their files, and what transformers computes from the converted directories."""

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

ALL = DrawnCases(GOLDEN / "videoprism")
CASES = ALL.names
SET = {"attn_logit_softcapping": 2.0}  # of the published models: 50


def write(case: str, folder: Path) -> Path:
    """Write the checkpoint as the published files are."""
    folder.mkdir(exist_ok=True)
    np.savez(folder / "videoprism.npz", **ALL.leaves(case))  # type: ignore[arg-type]
    return folder / "videoprism.npz"


def converted(case: str, folder: Path, **options: Any) -> tuple[Path, Path]:
    """Write a case and convert it; return both."""
    source = write(case, folder)
    convert.convert("videoprism", source, folder / "out", settings=SET, **options)
    return source, folder / "out"


def loaded(out: Path) -> Any:
    """Load a directory with the class that it names; nothing is missing and nothing is left over."""
    from transformers import AutoModel

    model, info = AutoModel.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return model.requires_grad_(False).eval()


def outputs(case: str, model: Any, dtype: torch.dtype) -> dict[str, np.ndarray[Any, Any]]:
    """What the model says to the golden's videos and texts."""
    given = ALL.values(case, "in")
    videos = {name: torch.from_numpy(given[name]).permute(0, 1, 4, 2, 3).to(dtype) for name in ("video", "resized")}
    own = getattr(model, "video_model", model)
    found = {name: own(x, interpolate_pos_encoding=name == "resized") for name, x in videos.items()}
    if own is model:
        return {name: x.last_hidden_state.numpy() for name, x in found.items()}
    tokens, kept = torch.from_numpy(given["tokens"]).long(), torch.from_numpy(1 - given["paddings"]).long()
    found["text"] = model.get_text_features(input_ids=tokens, attention_mask=kept)
    return {name: x.pooler_output.reshape(len(x.pooler_output), -1).numpy() for name, x in found.items()}


def without_norm(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """What a model of videos and texts says in float64 before both are divided by their lengths, to which the two codes add other epsilons."""
    for part in (model.video_model, model.text_model):
        part.config.apply_l2norm = False
    return {f"{name}_unnormalized": x for name, x in outputs("lvt", model, torch.float64).items()}


def errors(case: str, out: Path) -> tuple[float, float]:
    """The largest relative error in float32; and in float64 with casts removed."""
    model = loaded(out)
    single = outputs(case, model, torch.float32)
    with lifted():
        double = outputs(case, model.double(), torch.float64)
        if case == "lvt":
            double |= without_norm(model)
    wanted = (ALL.values(case, kind) for kind in ("out", "out64"))
    found = [max(relative_error(got[name], want[name]) for name in got) for got, want in zip((single, double), wanted, strict=True)]  # fmt: skip
    return found[0], found[1]
