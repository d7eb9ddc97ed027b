"""The golden checkpoints of MaxText: what their trees do not hold, and what MaxText's own converter made of them."""

from __future__ import annotations

import hashlib
import json
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.numpy import load_file

import convert
from convert.numerics.lift_torch import lifted
from support import float64
from support.gemma_models import load
from support.goldens import relative_error
from support.paths import GOLDEN

ROOT = GOLDEN / "maxtext"
CASES = tuple(sorted(path.name for path in ROOT.iterdir()))
BOUND = 2e-6
PLACEHOLDER, GEMMA4_PLACEHOLDER = 262144, 258880  # the token at each position of an image
QWEN_SOUND, QWEN_IMAGE, QWEN_END = (
    37,
    38,
    39,
)  # in the vocabulary of 40: its own tokens lie beyond it, and MaxText looks up the last row for those
PATCH = 2  # of Gemma 4's images
QWEN_TOWERS = ("qwen3-vl", "qwen3-vl-moe", "qwen3.5-vision", "qwen3-omni")
SHOWN = dict.fromkeys(QWEN_TOWERS, "MaxText, with its GELU in the mergers")
SHOWN["qwen3-omni"] += " and convolutions"
# The tree of Llama 3, 3.1 and Mistral is the same, and that of Qwen 3-Next and 3.5, unscanned: the user chooses. Of the others, the tree decides.
NAMED = {"llama3": "maxtext-llama3", "llama3.1": "maxtext-llama3.1", "mistral": "maxtext-mistral"}
NAMED |= {f"{name}-unscanned": f"maxtext-{name}" for name in ("qwen3-next", "qwen3.5")}


DEEPSEEK_4 = (  # transformers 5.23 conversion_mapping.py
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^hc_head_", "model.hc_head.hc_"),
    (r"^(norm|layers)\.", r"model.\1."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.indexer\.weights_proj\.", ".compressor.indexer.scorer.weights_proj."),
    (r"\.indexer\.wq_b\.", ".compressor.indexer.q_b_proj."),
    (r"(compressor.*)\.norm\.", r"\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.attn_sink$", ".sinks"),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.(wq|wo)_([ab])\.", lambda found: f".{found[1][1]}_{found[2]}_proj."),
    (r"\.w(kv|gate)\.", r".\1_proj."),
    (r"shared_experts\.(w[123])\.", lambda found: f"shared_experts.{SHARED[found[1]]}_proj."),
)
SHARED = {"w1": "gate", "w2": "down", "w3": "up"}


def family(case: str) -> str:
    """Return the case without its variant."""
    ends = ("-unscanned", "-tied", "-untied", "-4b", "-scanned")
    return next((case.removesuffix(end) for end in ends if case.endswith(end)), case)


def layout(case: str) -> str:
    """Return the layout of the golden's tree."""
    unscanned = (
        "-unscanned",
        "-tied",
        "-untied",
        "gemma4-e",
        "gemma4-e-4b",
        "gemma4-moe-vision",
        "qwen3-vl",
        "qwen3-vl-moe",
        "qwen3.5-vision",
        "qwen3-omni",
        "deepseek4",
    )
    return "UNSCANNED" if case.endswith(unscanned) else "SCANNED"


def rules(case: str) -> str:
    """Return what a user names."""
    return NAMED.get(case) or NAMED.get(family(case), "maxtext")


def settings(case: str) -> dict[str, Any]:
    """Return what a user must say of a model of no published size, as MaxText's configuration of the case has it."""
    said: dict[str, Any] = {"context_length": 64}
    match family(case):
        case "deepseek2" | "deepseek3" | "deepseek3.2" as name:
            heads = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4} | (
                {"tokens_attended": 4} if name == "deepseek3.2" else {}
            )
            return heads | {"experts_per_token": 2, "eos_token_id": 1, "bos_token_id": 2}
        case "deepseek4":
            kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
            if case.endswith("-scanned"):
                kinds = [kinds[0], *(kinds[2], kinds[1]) * 2]
                said = {"context_length": 256}
            return said | {"attention_pattern": kinds, "sliding_window": 5, "tokens_attended": 2, "rotated": 0.5}
        case "gpt-oss":
            published = {"context_length": 131072}  # YaRN's factor is that of the published lengths
            return published | {"sliding_window": 4, "experts_per_token": 2, "eos_token_id": 1, "pad_token_id": 1}
        case "gemma2":
            return {"vocab_size": 40, "sliding_window": 4}
        case "gemma3":
            return said | {"vocab_size": 40, "sliding_window": 4, "query_pre_attn_scalar": 8, "rope_factor_global": 8.0}
        case "gemma3-vision":
            window = {"sliding_window": 260, "context_length": 1024}
            return window | {"vocab_size": 40, "query_pre_attn_scalar": 8, "rope_factor_global": 8.0}
        case "gemma4" | "gemma4-moe" | "gemma4-vision" | "gemma4-moe-vision" as name:
            said |= {"vocab_size": 40, "sliding_window": 7 if name.endswith("vision") else 4}
            return said | ({"experts_per_token": 2} if "moe" in name else {})
        case "gemma4-e":
            layers, shared, unit = (12, 5, 6) if case == "gemma4-e-4b" else (10, 4, 5)
            pattern = (["sliding_attention"] * (unit - 1) + ["full_attention"]) * (layers // unit)
            wide = {"double_wide_mlp": case == "gemma4-e", "kv_shared_layers": shared, "attention_pattern": pattern}
            return said | wide | {"vocab_size": 40, "sliding_window": 4}
        case "olmo3":
            yarn = {"rope_factor": 8.0, "rope_original_length": 8192, "context_length": 65536}
            return yarn | {"sliding_window": 4, "eos_token_id": 1, "pad_token_id": 1}
        case "qwen3-vl" | "qwen3-vl-moe" as name:
            said |= {"mrope_section": [2, 2, 2], "deepstack_layers": [0, 2], "image_token": QWEN_IMAGE}
            return said | ({"experts_per_token": 2} if "moe" in name else {})
        case "qwen3-omni":
            said |= {"mrope_section": [2, 1, 1], "deepstack_layers": [0, 1], "bands": 10}
            return said | {"experts_per_token": 2, "image_token": QWEN_IMAGE, "audio_token": QWEN_SOUND}
        case "qwen3-next":
            return said | {"experts_per_token": 2, "key_heads": 2, "key_head_width": 6}
        case "qwen3.5" | "qwen3.5-vision" as name:
            said |= {
                "experts_per_token": 2,
                "key_heads": 2,
                "key_head_width": 6,
                "mrope_section": [1, 1, 1],
                "rotated": 0.5,
            }
            return said | ({"image_token": QWEN_IMAGE} if "vision" in name else {})
        case "qwen3-moe":
            return said | {"experts_per_token": 2, "rope_theta": 1e7}
    return said


def checkpoint(case: str) -> Path:
    """Return the checkpoint as a user names it."""
    return ROOT / case / "ckpt"


def converted(case: str, out: Path, **options: Any) -> Path:
    """Convert the golden to a directory."""
    convert.convert(rules(case), checkpoint(case), out, settings=settings(case), **options)
    return out


def bound(case: str) -> float:
    """Return how far the class may be off in float32. Gemma 4 does not divide its scores: both codes drift more, and float64 tells.

    So does the delta rule, which solves a triangular system: Qwen 3-Next drifts by 4e-6 in MaxText itself, Qwen 3.5 by 1.2e-5, and
    with an image by 1.5e-5; PyTorch by 6.4e-5, on one of two processors. So does DeepSeek 3.2, by 1.2e-6.
    """
    bounds = {"gemma4": 5e-5, "qwen3-next": 1e-5, "qwen3.5-vision": 1e-4, "qwen3.5": 2e-5, "deepseek3.2": 4e-6}
    return next((bound for name, bound in bounds.items() if case.startswith(name)), BOUND)


def loaded(case: str, out: Path) -> Any:
    """Return the loaded class, with MaxText's GELU in Qwen's towers: the approximation by tanh, where transformers has the exact one."""
    if family(case) not in QWEN_TOWERS:
        return load(out)
    model = load(out, "AutoModelForImageTextToText")
    visual = model.get_submodule("model.visual")
    for merger in (visual.merger, *getattr(visual, "deepstack_merger_list", torch.nn.ModuleList()).children()):
        gelu = torch.nn.GELU(approximate="tanh")
        if hasattr(merger, "mlp"):
            merger.mlp[1] = gelu
        else:
            merger.act_fn = gelu
    if hasattr(model.model, "audio_tower"):
        tower, exact = model.model.audio_tower, torch.nn.functional.gelu
        computed = tower.forward

        def with_its_gelu(*args: Any, **kwargs: Any) -> Any:
            with patch.object(torch.nn.functional, "gelu", partial(exact, approximate="tanh")):
                return computed(*args, **kwargs)

        tower.forward = with_its_gelu
    return model


def exact_error(case: str, out: Path) -> float:
    """Return the relative error of the class in float64 with casts removed, against MaxText's code in float64 with casts removed."""
    with lifted():
        return float64.error("maxtext", case, outputs(case, loaded(case, out).double()))


def error_of_exact_table(case: str, out: Path, table: np.ndarray) -> float:
    """Return that error with the leaf of a table over sqrt(D) in float64, where the file has it rounded to float32."""
    with lifted():
        model = load(out).double()
        model.get_input_embeddings().weight.data.copy_(torch.tensor(table.astype(np.float64) / table.shape[1] ** 0.5))
        return float64.error("maxtext", case, outputs(case, model))


def error(case: str, out: Path) -> float:
    """Return the relative error of the loaded class against the logits that MaxText's model gave.

    Gemma 3 and OLMo 3 have up to 14 layers here, whose float32 drifts in both frameworks (to 3e-6): torch runs them in float64, so
    that only the drift of JAX is in the error. With images, it is the largest error of the logits, of the embeddings of the images,
    and of the logits of text alone.
    """
    io = dict(np.load(ROOT / case / "io.npz"))
    model = loaded(case, out)
    if family(case) in ("gemma3", "gemma3-vision", "olmo3"):
        model = model.double()
    return max(relative_error(x, io[name]) for name, x in outputs(case, model).items())


def outputs(case: str, model: Any) -> dict[str, np.ndarray]:
    """Return what the loaded class computes, by the names of what MaxText's model gave."""
    io = dict(np.load(ROOT / case / "io.npz"))
    given = {name: torch.tensor(x) for name, x in inputs(case).items()}
    if "patches" in io:
        with torch.no_grad():
            seen = model.model.get_image_features(given["pixel_values"].to(model.dtype), given["image_grid_thw"])
            text = model(torch.tensor(io["text_tokens"], dtype=torch.long)).logits.numpy()
            found = {"logits": model(**given).logits.numpy(), "text_logits": text}
            if "sounds" in io:
                heard = model.model.get_audio_features(given["input_features"], given["feature_attention_mask"])
                found |= {"sound_tokens": heard.last_hidden_state.reshape(io["sound_tokens"].shape).numpy()}
            deep = getattr(seen, "deepstack_features", None) or ()
            found |= {f"deep_{k}": torch.stack(x).numpy() for k, x in enumerate(deep)}
            return found | {"soft_tokens": torch.stack(seen.pooler_output).numpy()}
    if "images" not in io:
        with torch.no_grad():
            return {"logits": model(**given).logits.numpy()}
    given["pixel_values"] = given["pixel_values"].to(model.dtype)
    of_image = [given[name] for name in ("pixel_values", "image_position_ids") if name in given]
    with torch.no_grad():
        soft = model.model.get_image_features(*of_image).pooler_output
        soft = (
            (torch.stack(soft) if isinstance(soft, tuple) else soft)
            .reshape(len(io["images"][0]), -1, soft[0].shape[-1])
            .numpy()
        )
        text = model(torch.tensor(io["text_tokens"], dtype=torch.long)).logits.numpy()
        every = soft.shape[1] // io["soft_tokens"].shape[2]
        return {"logits": model(**given).logits.numpy(), "soft_tokens": soft[None, :, ::every], "text_logits": text}


def inputs(case: str) -> dict[str, np.ndarray]:
    """Return the recorded inputs, as transformers' class takes them; with images, it gives the logits at the recorded positions."""
    io = dict(np.load(ROOT / case / "io.npz"))
    tokens = io["tokens"].astype(np.int64)
    if "patches" in io:
        image = (tokens == 151655) | (tokens == 248056)
        known = np.where(image, QWEN_IMAGE, np.where(tokens < QWEN_SOUND, tokens, QWEN_END))
        of_omni = {"mm_token_type_ids": image.astype(np.int64)}
        if "sounds" in io:
            known = np.where(tokens == 151675, QWEN_SOUND, known)
            of_omni = {
                "position_ids": io["positions"].transpose(2, 0, 1).astype(np.int64),
                "input_features": io["sounds"],
            }
            of_omni |= {"feature_attention_mask": np.ones((len(tokens), io["sounds"].shape[-1]), np.int64)}
        return {
            "input_ids": known,
            **of_omni,
            "pixel_values": io["patches"].reshape(-1, io["patches"].shape[-1]),
            "image_grid_thw": io["grid"],
        }
    if "images" not in io:
        return {"input_ids": tokens}
    if family(case).startswith("gemma4"):
        image = (tokens == GEMMA4_PLACEHOLDER).astype(np.int64)
        return {
            "input_ids": tokens,
            "mm_token_type_ids": image,
            "logits_to_keep": io["kept"],
            **_patches(io["images"][0]),
        }
    pixels = io["images"][0].transpose(0, 3, 1, 2).astype(np.float32) / np.float32(127.5) - 1
    image = (tokens == PLACEHOLDER).astype(np.int64)
    return {"input_ids": tokens, "pixel_values": pixels, "token_type_ids": image, "logits_to_keep": io["kept"]}


def _patches(images: np.ndarray) -> dict[str, np.ndarray]:
    """Return the patches of images, row by row, colours from 0 to 1, and their places (across, down)."""
    count, height, width, colours = images.shape
    down, across = height // PATCH, width // PATCH
    apart = images.reshape(count, down, PATCH, across, PATCH, colours).transpose(0, 1, 3, 2, 4, 5)
    places = np.stack(np.meshgrid(np.arange(across), np.arange(down)), -1).reshape(1, -1, 2)
    patches = apart.reshape(count, down * across, -1).astype(np.float32) / np.float32(255)
    return {"pixel_values": patches, "image_position_ids": np.repeat(places, count, 0)}


def digest(x: np.ndarray) -> list[Any]:
    """Return shape and checksum of a tensor, as peer.json has them."""
    return [list(x.shape), hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]]


def digests(out: Path) -> dict[str, list[Any]]:
    """Return those of each tensor of a converted directory."""
    return {name: digest(x) for name, x in load_file(out / "model.safetensors").items()}


def peer(case: str) -> dict[str, list[Any]]:
    """Return what `to_huggingface` made, or its error. It names Gemma 3's text model as a part of the model with images.

    Of that model, it has the names of published files, which transformers translates as it loads them.
    """
    made = json.loads((ROOT / case / "peer.json").read_text())
    if case in QWEN_TOWERS or (family(case).startswith("gemma4") and "vision" in case):
        return made
    if family(case) == "gemma3-vision":
        return {name.replace("vision_tower.vision_model.", "vision_tower."): x for name, x in made.items()}
    if family(case) == "deepseek4":
        return {of_class(name): x for name, x in made.items()}
    return {name.replace("model.language_model.", "model."): x for name, x in made.items()}


def of_class(name: str) -> str:
    """Return the name of transformers' class for that of a published file of DeepSeek 4."""
    for old, new in DEEPSEEK_4:
        name = re.sub(old, new, name)
    return name
