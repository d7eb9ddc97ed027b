"""The golden cases of Gemma 4 with its towers: settings that a user must give, and the class that loads the converted directories."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import convert
from convert.numerics.lift_torch import lifted
from support import gemma_drawn
from support.drawn_cases import DrawnCases
from support.goldens import relative_error
from support.paths import GOLDEN

ALL = DrawnCases(GOLDEN / "gemma4-towers")
CASES = ("gemma4-31b", "gemma4-26b-a4b", "gemma4-e2b", "gemma4-e4b")
IMAGE, SOUND = -2, -4
OF_IMAGES = {"padded_patches": "hidden"}
OF_SOUND = {"audio_norm": "before", "audio_context": 12, "padded_frames": "cleared"}


def differences(case: str) -> dict[str, Any]:
    """Return the settings that confirm what transformers computes otherwise than gemma."""
    return OF_IMAGES | (OF_SOUND if "audio" in ALL.config(case) else {})


def settings(case: str) -> dict[str, Any]:
    """What a user must say of a model of no published size."""
    return gemma_drawn.settings(case) | differences(case)


def write(case: str, folder: Path) -> Path:
    """Write the leaves of a case with the names of the NESTED layout."""
    folder.mkdir(exist_ok=True)
    np.savez(folder / "ckpt.npz", **ALL.leaves(case))  # type: ignore[arg-type]
    return folder / "ckpt.npz"


def converted(case: str, folder: Path, **options: Any) -> tuple[Path, Path]:
    """Write a case and convert it; return both."""
    source = write(case, folder)
    convert.convert("gemma", source, folder / "out", settings=settings(case), **options)
    return source, folder / "out"


def load(out: Path, dtype: torch.dtype) -> Any:
    """As a user loads it; nothing may be missing, left over or of another shape."""
    from transformers import Gemma4ForConditionalGeneration

    model, report = Gemma4ForConditionalGeneration.from_pretrained(
        out, output_loading_info=True, dtype=dtype, attn_implementation="eager"
    )
    assert not any(report.values()), report
    return model.eval()


@contextmanager
def as_gemma(model: Any) -> Iterator[None]:
    """Let transformers compute as gemma 4.0.1 does, where the two differ: see the rules, `needs_confirmation`."""
    from transformers.models.gemma4 import modeling_gemma4 as code

    right, window = code.create_bidirectional_mask, code.sliding_window_mask_function

    def added(**given: Any) -> torch.Tensor:
        if "and_mask_function" in given:  # of the audio tower
            return right(**given)  # type: ignore[no-any-return]
        valid = given["attention_mask"]
        return (valid[:, None, :, None] & valid[:, None, None, :]).to(given["inputs_embeds"].dtype)

    with (
        patch.object(code, "create_bidirectional_mask", added),
        patch.object(code, "sliding_window_mask_function", lambda sizes: window((sizes[0] + 1, sizes[1]))),
    ):
        handles = []
        for layer in model.model.language_model.layers if model.config.text_config.enable_moe_block else ():
            handles.append(layer.router.register_forward_pre_hook(lambda _, given, layer=layer: (layer.pre_feedforward_layernorm_2(given[0]),)))  # fmt: skip
        if model.model.embed_audio is not None:
            embedder = model.model.embed_audio
            embedder.forward = lambda inputs_embeds: embedder.embedding_pre_projection_norm(
                embedder.embedding_projection(inputs_embeds)
            )
            second = model.model.audio_tower.subsample_conv_projection.layer1
            plain = type(second).forward
            second.forward = lambda x, mask: (plain(second, x)[0], mask[:, ::2])
        yield
        for handle in handles:
            handle.remove()
        if model.model.embed_audio is not None:
            del embedder.forward, second.forward


def inputs(case: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of the class for a text with images and sounds."""
    given = {name: torch.from_numpy(x) for name, x in ALL.values(case, "in").items()}
    tokens = given["tokens"].long()
    arguments: dict[str, Any] = {
        "input_ids": tokens.masked_fill(tokens == IMAGE, 258880).masked_fill(tokens == SOUND, 258881),
        "mm_token_type_ids": (tokens == IMAGE).long(),
        "pixel_values": given["full_patches"].to(dtype),
        "image_position_ids": given["full_positions"].long(),
    }
    if "features" in given:
        features = given["features"].to(dtype) * given["valid"][..., None]
        arguments |= {"input_features": features, "input_features_mask": given["valid"]}
    return arguments


def outputs(case: str, model: Any) -> dict[str, np.ndarray]:
    """Return embeddings of images and sounds, and logits, by the names of what the JAX model gave."""
    given = inputs(case, model.dtype)
    padded = (torch.from_numpy(ALL.values(case, "in")[f"padded_{x}"]) for x in ("patches", "positions"))
    patches, positions = padded
    with torch.no_grad():
        found = {
            "image_tokens": torch.cat(model.get_image_features(given["pixel_values"], given["image_position_ids"]).pooler_output),
            "padded_tokens": torch.cat(model.get_image_features(patches.to(model.dtype), positions.long()).pooler_output),
            "logits": model(**given).logits,
        }  # fmt: skip
        if "input_features" in given:
            sound = model.model.get_audio_features(given["input_features"], given["input_features_mask"])
            found["audio_tokens"] = sound.pooler_output[sound.attention_mask]
    return {name: x.numpy() for name, x in found.items()}


def all_errors(case: str, out: Path, *, gemma: bool = True) -> dict[str, tuple[float, float]]:
    """Relative errors of each output against gemma's, in float32 and in float64 with casts removed.

    Args:
        gemma: whether transformers computes as gemma does where the two differ.
    """

    def found(dtype: torch.dtype) -> dict[str, np.ndarray]:
        model = load(out, dtype)
        if not gemma:
            return outputs(case, model)
        with as_gemma(model):
            return outputs(case, model)

    single = found(torch.float32)
    with lifted():
        double = found(torch.float64)
    rounded, exact = (ALL.values(case, kind) for kind in ("out", "out64"))
    assert single.keys() == rounded.keys()
    return {name: (relative_error(single[name], rounded[name]), relative_error(double[name], exact[name])) for name in single}  # fmt: skip


def errors(case: str, out: Path) -> tuple[float, float]:
    """Return the largest of all errors, in float32 and in float64."""
    single, double = zip(*all_errors(case, out).values(), strict=True)
    return max(single), max(double)
