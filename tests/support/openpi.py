"""openpi: the golden cases, and what transformers computes from their converted files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import convert
from convert.numerics.lift_torch import lifted
from support.drawn_cases import DrawnCases
from support.goldens import relative_error
from support.memory_source import MemorySource
from support.paths import GOLDEN

GOLD = DrawnCases(GOLDEN / "openpi")
ALPHA = 6
IMAGE_TOKEN = 257152


def settings_of(case: str, to: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"lora_alpha": ALPHA} if case.endswith("-lora") else {}
    return found | ({"action_horizon": 3} if case.startswith("pi0") and case != "pi0-fast" and to is None else {})


def source_of(case: str) -> MemorySource:
    return MemorySource({f"params/{name}": x for name, x in GOLD.leaves(case).items()})


def write(case: str, folder: Path) -> Path:
    """Write the leaves of a case to a file."""
    np.savez(folder / "params.npz", **{f"params/{name}": x for name, x in GOLD.leaves(case).items()})  # type: ignore[arg-type]
    return folder / "params.npz"


def converted(case: str, folder: Path, to: str | None = None, **more: Any) -> Path:
    convert.convert("openpi", source_of(case), folder / "out", settings=settings_of(case, to) | more, to=to)
    return folder / "out"


def inputs(case: str) -> dict[str, torch.Tensor]:
    """The observation of a case as transformers takes it: images in their places before the prompt, absent ones masked."""
    given = GOLD.values(case, "in")
    cameras = [name for name in given if name.startswith("images/")]
    masks = np.stack([given[name.replace("images", "image_masks")] for name in cameras], 1)
    tokens = (8 // 4) ** 2
    ids = np.concatenate([np.full((2, tokens * len(cameras)), IMAGE_TOKEN), given["tokenized_prompt"]], 1)
    attended = np.concatenate([np.repeat(masks, tokens, 1), given["tokenized_prompt_mask"]], 1)
    pixels = torch.from_numpy(np.stack([given[name] for name in cameras], 1)).permute(0, 1, 4, 2, 3)
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(attended).long(),
        "pixel_values": pixels,
    }


def policy_inputs(case: str) -> dict[str, torch.Tensor]:
    """`inputs`, and what π0 reads besides them; without the time."""
    values = GOLD.values(case, "in")
    given = inputs(case) | {name: torch.from_numpy(values[name]) for name in ("state", "noise")}
    return given | {"pixel_attention_mask": torch.ones(2, 3, dtype=torch.bool)}


def loaded(out: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model, by the class that config.json names."""
    import json

    import transformers

    (name,) = json.loads((out / "config.json").read_text())["architectures"]
    model, info = getattr(transformers, name).from_pretrained(
        out, output_loading_info=True, dtype=dtype, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return model.requires_grad_(False).eval()


def velocity(model: Any, case: str, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """What π0 says to the golden's observation, noise and time."""
    given = {n: x.to(dtype) if x.is_floating_point() else x for n, x in policy_inputs(case).items()}
    time = torch.from_numpy(GOLD.values(case, "in")["time"]).to(dtype)
    return np.asarray(model(timestep=time, **given).logits.numpy())


def fast_logits(model: Any, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """What π0-FAST says, from the embedded images and prompt on: transformers' processor builds other masks than openpi."""
    values, given = GOLD.values("pi0-fast", "in"), inputs("pi0-fast")
    blocks = np.concatenate([np.zeros((2, 12)), values["token_ar_mask"]], 1).cumsum(1)
    present = given["attention_mask"].numpy().astype(bool)
    attends = (blocks[:, None] <= blocks[:, :, None]) & present[:, None] & present[:, :, None]
    pixels = given["pixel_values"].to(dtype)
    images = model.model.get_image_features(pixels.flatten(0, 1)).pooler_output.reshape(2, 12, -1)
    prompt = model.get_input_embeddings()(given["input_ids"][:, 12:])
    hidden = model.model.language_model(
        inputs_embeds=torch.cat([images, prompt], 1), position_ids=torch.from_numpy(present.cumsum(1) - 1),
        attention_mask=torch.where(torch.from_numpy(attends), 0.0, -2.3819763e38)[:, None].to(dtype),
    ).last_hidden_state  # fmt: skip
    return np.asarray(model.lm_head(hidden).numpy())


def errors(case: str, out: Path) -> tuple[float, float]:
    """The relative error in float32; and in float64 with casts removed."""
    name = "logits" if case == "pi0-fast" else "velocity"

    def said(dtype: torch.dtype) -> np.ndarray[Any, Any]:
        model = loaded(out, dtype)
        return fast_logits(model, dtype) if case == "pi0-fast" else velocity(model, case, dtype)

    single = said(torch.float32)
    with lifted():
        double = said(torch.float64)
    return relative_error(single, GOLD.values(case, "out")[name]), relative_error(
        double, GOLD.values(case, "out64")[name]
    )
