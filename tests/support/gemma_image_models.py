"""The golden checkpoints with images: what their trees do not hold, and the models that load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import convert
from support.goldens import golden_io, relative_error
from support.paths import GOLDEN

# The largest error that the project promises; measured: 4e-7 to 2e-6.
BOUND = 5e-6

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # what the user names, and says of a model of no published size
    "gemma3-vision": (
        "ckpt",
        {
            "vocab_size": 131,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "rope_factor_global": 1.0,
            "context_length": 1024,
            "mm_tokens_per_image": 4,
        },
    ),
    "paligemma1": ("ckpt.npz", {"vocab_size": 101, "context_length": 1024}),
    "paligemma2": (
        "ckpt.npz",
        {
            "vocab_size": 101,
            "sliding_window": 4,  # which no layer has; a fault shows it
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "siglip": ("ckpt.npz", {}),
}
MODEL = {"gemma3-vision": "gemma", "paligemma1": "gemma", "paligemma2": "gemma", "siglip": "siglip"}


def path(case: str) -> Path:
    """The golden's checkpoint, as a user would name it."""
    return GOLDEN / case / CASES[case][0]


def directory(case: str, out: Path, rules: str | None = None, **options: Any) -> Path:
    """The golden, converted to a directory."""
    convert.convert(rules or MODEL[case], path(case), out, settings=CASES[case][1], **options)
    return out


def load(out: Path) -> torch.nn.Module:
    """As a user loads it, by the class that config.json names; nothing may be missing, left over or of another shape."""
    import transformers

    (name,) = json.loads((out / "config.json").read_text())["architectures"]
    model, report = getattr(transformers, name).from_pretrained(
        out, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(report.values()), report
    return model.eval()


def _pixels(images: np.ndarray, model: Any) -> torch.Tensor:
    """[..., height, width, colours] as torch has them, in the dtype of the model: [images, colours, height, width]."""
    return torch.tensor(images.reshape(-1, *images.shape[-3:])).permute(0, 3, 1, 2).contiguous().to(model.dtype)


def outputs(case: str, model: Any) -> dict[str, np.ndarray]:
    """What the model says to the golden's inputs, by the names of what the JAX model said."""
    io = golden_io(case)
    with torch.no_grad():
        if case == "siglip":
            out = model(
                input_ids=torch.tensor(io["tokens"], dtype=torch.long), pixel_values=_pixels(io["pixels"], model)
            )
            return {
                "image": out.image_embeds.numpy(),
                "text": out.text_embeds.numpy(),
                "logits": out.logits_per_image.numpy(),
            }
        if case == "gemma3-vision":
            return _gemma3(model, io)
        return _paligemma(model, io)


def _gemma3(model: Any, io: Any) -> dict[str, np.ndarray]:
    image = torch.tensor(io["expanded"] == -2)
    ids = torch.tensor(io["expanded"], dtype=torch.long).masked_fill(image, model.config.image_token_id)
    got = model(input_ids=ids, pixel_values=_pixels(io["pixels"], model), token_type_ids=image.long()).logits.numpy()
    soft = model.model.get_image_features(_pixels(io["pixels"], model)).pooler_output.numpy()
    plain = model(input_ids=torch.tensor(io["tokens"], dtype=torch.long)).logits.numpy()
    return {"logits": got, "soft_tokens": soft.reshape(io["soft_tokens"].shape), "text_logits": plain}


def _paligemma(model: Any, io: Any) -> dict[str, np.ndarray]:
    images, tokens = _pixels(io["pixels"], model), torch.tensor(io["tokens"], dtype=torch.long)
    soft = model.model.get_image_features(images).pooler_output
    ids = torch.cat([torch.full(soft.shape[:2], model.config.image_token_id), tokens], 1)
    kinds = torch.cat([torch.zeros(soft.shape[:2], dtype=torch.long), torch.tensor(io["mask_ar"], dtype=torch.long)], 1)
    got = model(input_ids=ids, pixel_values=images, token_type_ids=kinds).logits[:, soft.shape[1] :]
    return {"soft_tokens": soft.numpy(), "logits": got.numpy()}


def errors(case: str, out: Path) -> dict[str, float]:
    """Relative errors of the converted model against what the JAX model gave."""
    io = golden_io(case)
    return {name: relative_error(got, io[name]) for name, got in outputs(case, load(out)).items()}
