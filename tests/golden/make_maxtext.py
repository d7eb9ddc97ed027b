"""Writes the golden cases maxtext/*: MaxText's own models, checkpoint writer and converter, on a CPU.

    python3.12 -m venv /some/env && . /some/env/bin/activate
    pip install --no-deps maxtext==0.2.5
    pip install jax flax orbax-checkpoint pydantic omegaconf PyYAML psutil tqdm safetensors einops qwix aqtp transformers \\
        jinja2 ml-collections sentencepiece tiktoken tensorboardX optax chex etils huggingface_hub gcsfs drjax \\
        google-cloud-storage pathwaysutils jaxtyping grain pillow tokamax sympy torch==2.13.0
    python tests/golden/make_maxtext.py [CASE ...]

A case is a published configuration of MaxText at toy sizes. Every parameter is random: upstream's initial value, and normal numbers on
top, so no norm scale is one and no bias is zero. `ckpt` is what MaxText saves, `io.npz` what its model computes from it in float32, and
`peer.json` has the names, shapes and SHA-256 (its start) of the tensors that its own `to_huggingface` makes of the same checkpoint. Weights, inputs
and outputs are the same on every run of one machine; Orbax adds timestamps and random file names.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import types
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # a scan of 14 layers takes minutes to compile otherwise

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from flax import nnx
from maxtext.checkpoint_conversion import to_huggingface
from maxtext.checkpoint_conversion.utils import hf_model_configs
from maxtext.checkpoint_conversion.utils.hf_shape import QWEN3_VL_HF_WEIGHTS_TO_SHAPE, QWEN_HF_WEIGHTS_TO_SHAPE
from maxtext.common import checkpointing, train_state_nnx
from maxtext.configs import pyconfig
from maxtext.multimodal.processor_gemma3 import GEMMA_NUM_PLACEHOLDER_TOKENS_PER_IMAGE, GEMMA_TOKEN_PLACEHOLDER
from maxtext.multimodal.processor_gemma4 import GEMMA4_TOKEN_PLACEHOLDER
from maxtext.multimodal.processor_qwen3_omni import QwenTokens, get_rope_index
from maxtext.utils import maxtext_utils, model_creation_utils
from safetensors.numpy import load_file

HERE = Path(__file__).parent / "maxtext"
QWEN_WITH_TOWER = ("qwen3-vl", "qwen3.5", "qwen3-omni")
NOISE, TOKENS, DIGITS = 0.1, 11, 16
VOCABULARY, TEXT_TOKENS = (
    40,
    36,
)  # the last ones are those of images, where the reader of a case wants them in the vocabulary
COMMON = {
    "override_model_config": True,
    "run_name": "golden",
    "skip_jax_distributed_system": True,
    "hardware": "cpu",
    "attention": "dot_product",
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "max_target_length": 16,
    "per_device_batch_size": 1,
    "enable_checkpointing": False,
    "sharding_tolerance": 1.0,
    "remat_policy": "none",
}
SMALL = {
    "base_emb_dim": 16,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 24,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
}
WINDOW = {"sliding_window_size": 4}

TINY = SMALL | {"base_emb_dim": 12, "base_num_query_heads": 2, "base_num_kv_heads": 1}  # for many layers
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 12,
    "sparse_matmul": False,
    "megablox": False,
}
ALL_EXPERTS = EXPERTS | {"base_mlp_dim": 12}  # no layer without experts
LATENT = {"kv_lora_rank": 6, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "base_num_kv_heads": 4}
DELTA = {  # layers of a gated delta rule: value heads 2 to a key head, of another width; a chunk shorter than the text
    "gdn_key_head_dim": 6,
    "gdn_value_head_dim": 10,
    "gdn_num_key_heads": 2,
    "gdn_num_value_heads": 4,
    "gdn_chunk_size": 4,
}
HEADS = {"head_dim": 4}  # `to_huggingface` has shapes for heads of width / heads alone
UNSCANNED = {"scan_layers": False}
IMAGES = {  # 32 x 32 patches, which VisionExit averages to 256 tokens: published images have 64 x 64
    "use_multimodal": True,
    "image_size_for_vit": 64,
    "patch_size_for_vit": 2,
    "conv_stride_for_vit": 2,
    "hidden_size_for_vit": 12,
    "intermediate_size_for_vit": 20,
    "num_hidden_layers_for_vit": 3,
    "num_attention_heads_for_vit": 3,
    "remat_policy_for_vit": "none",
    "max_target_length": 544,
    "sliding_window_size": 260,  # longer than an image, as published: a shorter one cuts images in transformers, and not in MaxText
}
GEMMA4 = {
    "base_emb_dim": 12,
    "base_num_query_heads": 6,
    "base_num_kv_heads": 3,
    "base_mlp_dim": 20,
    "head_dim": 8,
    "global_head_dim": 16,
    "global_num_kv_heads": 2,
    "vocab_size": VOCABULARY,
    "sliding_window_size": 4,
}
GEMMA4_EXPERTS = EXPERTS | {
    "num_experts": 5,
    "base_moe_mlp_dim": 24,
}  # rows of 16 bytes, which torch's grouped product needs
PER_LAYER = (
    GEMMA4
    | UNSCANNED
    | {"global_num_kv_heads": 0, "hidden_size_per_layer_input": 7, "vocab_size_per_layer_input": VOCABULARY}
)
GEMMA4_IMAGES = {  # 6 x 9 patches, 3 x 3 of which are a token
    "use_multimodal": True,
    "image_size_for_vit": [12, 18],
    "patch_size_for_vit": 2,
    "conv_stride_for_vit": 2,
    "hidden_size_for_vit": 24,
    "intermediate_size_for_vit": 28,
    "num_hidden_layers_for_vit": 3,
    "num_attention_heads_for_vit": 3,
    "vision_output_length": 6,
    "num_position_embeddings_for_vit": 11,
    "remat_policy_for_vit": "none",
    "max_target_length": 32,
    "sliding_window_size": 7,
}
GRID = (
    1,
    10,
    4,
)  # patches of Qwen's image: MaxText rounds interpolated positions to bfloat16, and takes every third of 10 x 10 exactly
QWEN_IMAGES = {
    "use_multimodal": True,
    "dtype_mm": "float32",
    "patch_size_for_vit": 2,
    "temporal_patch_size_for_vit": 2,
    "spatial_merge_size_for_vit": 2,
    "hidden_size_for_vit": 24,
    "intermediate_size_for_vit": 96,  # four patches, as `to_huggingface` takes it for the width of the mergers
    "num_hidden_layers_for_vit": 4,
    "num_attention_heads_for_vit": 3,
    "num_position_embeddings_for_vit": 100,
    "out_hidden_size_for_vit": 16,
    "deepstack_visual_indexes_for_vit": [0, 2],
    "remat_policy_for_vit": "none",
    "head_dim": 12,
    "mrope_section": [2, 2, 2],
    "max_target_length": 32,
}
QWEN_EXPERTS = {
    "intermediate_size_for_vit": 44
}  # not four patches, as published: `peer` says what `to_huggingface` makes of it
QWEN_SOUND = {  # chunks of 100 frames, of which three convolutions make 13 tokens: both codes have that number as a constant
    "d_model_for_audio": 12,
    "encoder_layers_for_audio": 2,
    "encoder_attention_heads_for_audio": 3,
    "encoder_ffn_dim_for_audio": 20,
    "num_mel_bins_for_audio": 10,
    "downsample_hidden_size_for_audio": 4,
    "output_dim_for_audio": 16,
    "hidden_size_for_vit": 8,
    "intermediate_size_for_vit": 20,
    "num_hidden_layers_for_vit": 2,
    "num_attention_heads_for_vit": 2,
    "deepstack_visual_indexes_for_vit": [0, 1],
    "head_dim": 8,
    "mrope_section": [2, 1, 1],
    "base_mlp_dim": 8,
    "base_moe_mlp_dim": 8,
    "max_target_length": 64,
}
FRAMES, TOKENS_OF_SOUND = 200, 26
QWEN_3_5 = {
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "mrope_section": [1, 1, 1],
    "deepstack_visual_indexes_for_vit": [],
}
INDEXER = {  # so many heads that no score is the zero of all: MaxText attends to all tokens that tie
    "indexer_n_heads": 14,
    "indexer_head_dim": 6,
    "indexer_topk": 4,
}
HYPER = {  # a layer with a window, one with compressed keys that an indexer chooses, and one with more compressed keys
    "base_emb_dim": 12,
    "base_num_kv_heads": 1,
    "base_mlp_dim": 8,
    "base_moe_mlp_dim": 8,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 10,
    "o_groups": 2,
    "o_lora_rank": 6,
    "mhc_expansion_rate": 2,
    "first_num_hash_layers": 1,
    "compress_ratios": [0, 4, 8],
    "indexer_n_heads": 14,
    "indexer_head_dim": 6,
    "indexer_topk": 2,
    "sliding_window_size": 5,
    "max_target_length": 32,
}
HYPER_TOKENS = 27
HYPER_SCANNED = {  # whose code has fixed what a block's two layers compress: 128 tokens, of which a text has one, and 4
    "compress_ratios": [0, 128, 4, 128, 4],
    "max_target_length": 132,
}
BEGIN, END, KEPT = (
    5,
    6,
    4,
)  # tokens before and after an image; every KEPT-th position of an image of 256 tokens is recorded


def layers(number: int) -> dict[str, int]:
    """Return MaxText's key for this number of layers (of Gemma 2: of pairs)."""
    return {"base_num_decoder_layers": number}


# case: MaxText's name of the model, how it is saved, and what differs from the published configuration
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama3-8b", "params", SMALL | layers(3)),
    "llama3.1": ("llama3.1-8b", "train", SMALL | layers(3)),
    "llama3.1-unscanned": ("llama3.1-8b", "nnx-rl", SMALL | layers(2) | UNSCANNED),
    "gemma2": ("gemma2-2b", "params", SMALL | WINDOW | layers(3)),
    "gemma2-unscanned": ("gemma2-2b", "nnx-sft", SMALL | WINDOW | layers(1) | UNSCANNED),
    "gemma3": ("gemma3-4b", "params", TINY | WINDOW | layers(14)),
    "gemma3-unscanned": ("gemma3-4b", "params", TINY | WINDOW | layers(7) | UNSCANNED),
    "gemma3-vision": ("gemma3-4b", "params", TINY | layers(10) | IMAGES),
    "gemma4": ("gemma4-31b", "params", GEMMA4 | layers(12)),
    "gemma4-unscanned": ("gemma4-31b", "nnx-sft", GEMMA4 | layers(12) | UNSCANNED),
    "gemma4-moe": ("gemma4-26b", "params", GEMMA4 | GEMMA4_EXPERTS | layers(12)),
    "gemma4-moe-unscanned": ("gemma4-26b", "nnx-rl", GEMMA4 | GEMMA4_EXPERTS | layers(6) | UNSCANNED),
    "gemma4-e": ("gemma4-e2b", "params", PER_LAYER | layers(10) | {"num_kv_shared_layers": 4}),
    "gemma4-e-4b": ("gemma4-e4b", "params", PER_LAYER | layers(12) | {"num_kv_shared_layers": 5}),
    "gemma4-vision": ("gemma4-31b", "params", GEMMA4 | layers(12) | GEMMA4_IMAGES),
    "gemma4-moe-vision": ("gemma4-26b", "params", GEMMA4 | GEMMA4_EXPERTS | layers(6) | UNSCANNED | GEMMA4_IMAGES),
    "qwen2.5": ("qwen2.5-7b", "params", SMALL | HEADS | layers(3)),
    "qwen2.5-tied": ("qwen2.5-1.5b", "params", SMALL | HEADS | layers(2) | UNSCANNED),
    "qwen3": ("qwen3-0.6b", "params", SMALL | layers(3)),
    "qwen3-untied": ("qwen3-8b", "params", SMALL | layers(2) | UNSCANNED),
    "qwen3-moe": ("qwen3-30b-a3b", "params", SMALL | ALL_EXPERTS | layers(3)),
    "qwen3-moe-unscanned": ("qwen3-30b-a3b", "params", SMALL | ALL_EXPERTS | layers(2) | UNSCANNED),
    "qwen3-next": ("qwen3-next-80b-a3b", "params", SMALL | ALL_EXPERTS | DELTA | layers(8)),
    "qwen3-next-unscanned": ("qwen3-next-80b-a3b", "params", SMALL | ALL_EXPERTS | DELTA | layers(4) | UNSCANNED),
    "qwen3-vl": ("qwen3-vl-2b", "params", SMALL | QWEN_IMAGES | layers(3) | UNSCANNED),
    "qwen3-vl-moe": ("qwen3-vl-30b-a3b", "params", SMALL | QWEN_IMAGES | QWEN_EXPERTS | ALL_EXPERTS | layers(3) | UNSCANNED),
    "qwen3-omni": ("qwen3-omni-30b-a3b", "params", SMALL | QWEN_IMAGES | ALL_EXPERTS | QWEN_SOUND | layers(2)),
    "qwen3.5": ("qwen3.5-35b-a3b", "params", SMALL | QWEN_3_5 | ALL_EXPERTS | DELTA | layers(8)),
    "qwen3.5-unscanned": ("qwen3.5-35b-a3b", "params", SMALL | QWEN_3_5 | ALL_EXPERTS | DELTA | layers(5) | UNSCANNED),
    "qwen3.5-vision": ("qwen3.5-35b-a3b", "params", SMALL | QWEN_IMAGES | QWEN_EXPERTS | QWEN_3_5 | ALL_EXPERTS | DELTA | layers(4) | UNSCANNED),
    "mistral": ("mistral-7b", "params", SMALL | layers(3)),
    "mixtral": ("mixtral-8x7b", "params", SMALL | HEADS | ALL_EXPERTS | layers(3)),
    "mixtral-unscanned": ("mixtral-8x7b", "params", SMALL | HEADS | ALL_EXPERTS | layers(2) | UNSCANNED),
    "gpt-oss": ("gpt-oss-20b", "params", SMALL | WINDOW | ALL_EXPERTS | layers(4)),
    "gpt-oss-unscanned": ("gpt-oss-20b", "params", SMALL | WINDOW | ALL_EXPERTS | layers(2) | UNSCANNED),
    "olmo3": ("olmo3-7b", "params", TINY | WINDOW | layers(8)),
    "olmo3-unscanned": ("olmo3-7b", "params", TINY | WINDOW | layers(4) | UNSCANNED),
    "deepseek2": ("deepseek2-16b", "params", SMALL | EXPERTS | LATENT | layers(4)),
    "deepseek2-unscanned": ("deepseek2-16b", "params", SMALL | EXPERTS | LATENT | layers(3) | UNSCANNED),
    "deepseek3": ("deepseek3-671b", "params", SMALL | EXPERTS | LATENT | layers(5) | {"q_lora_rank": 10}),
    "deepseek3-unscanned": ("deepseek3-671b", "nnx-sft", SMALL | EXPERTS | LATENT | layers(4) | UNSCANNED | {"q_lora_rank": 10}),
    "deepseek4": ("deepseek4-284b", "params", SMALL | EXPERTS | HYPER | layers(3) | UNSCANNED),
    "deepseek4-scanned": ("deepseek4-284b", "params", SMALL | EXPERTS | HYPER | HYPER_SCANNED | layers(5)),
    "deepseek3.2": ("deepseek3.2-671b", "params", SMALL | EXPERTS | LATENT | INDEXER | layers(5) | {"q_lora_rank": 10}),
    "deepseek3.2-unscanned": ("deepseek3.2-671b", "params", SMALL | EXPERTS | LATENT | INDEXER | layers(4) | UNSCANNED | {"q_lora_rank": 10}),
}  # fmt: skip


def configured(model: str, changes: dict[str, Any]) -> list[str]:
    """Return the command line of MaxText for this model."""
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    keys = {"model_name": model} | COMMON | changes
    return ["golden", str(base), *(f"{key}={json.dumps(x) if isinstance(x, list) else x}" for key, x in keys.items())]


def randomize(model: nnx.Module, rng: np.random.Generator, config: Any) -> None:
    """Upstream's initial values, and normal numbers on top: biases and norm scales, which are 0 or 1 there, are not.

    DeepSeek 3's bias of experts is a variable that is no `Param`. A tied table gets values that bfloat16 holds: `attend_on_embedding`
    rounds it to bfloat16 for the logits, in every dtype. Gemma 4 does not divide its scores by sqrt(H): its query norms do, as in trained weights.
    """
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState)))
    for path, leaf in sorted(leaves, key=lambda item: tuple(map(str, item[0]))):
        drawn = jnp.asarray(leaf[...] + NOISE * rng.standard_normal(leaf[...].shape, np.float32))
        if path[-1] == "pos_embed" or (path[-1] == "embedding" and config.logits_via_embedding):
            drawn = drawn.astype(jnp.bfloat16).astype(jnp.float32)
        if path[-1] == "tid2eid":  # the experts of each token, in float32
            chosen = [rng.permutation(config.num_experts)[: drawn.shape[1]] for _ in range(drawn.shape[0])]
            drawn = jnp.asarray(np.stack(chosen), jnp.float32)
        if "query_norm" in path and config.model_name.startswith("gemma4"):
            drawn = drawn / np.float32(drawn.shape[0] ** 0.5)
        leaf[...] = drawn


def placeholders(config: Any) -> tuple[int, int, int]:
    """Return the token of an image's places, their number, and that of which one is recorded."""
    if config.model_name.startswith("gemma4"):
        return GEMMA4_TOKEN_PLACEHOLDER, config.vision_output_length, 1
    return GEMMA_TOKEN_PLACEHOLDER, GEMMA_NUM_PLACEHOLDER_TOKENS_PER_IMAGE, KEPT


def seen(images: np.ndarray, config: Any) -> np.ndarray:
    """Return the colours as MaxText's processor gives them to the tower: from -1 to 1, of Gemma 4 from 0 to 1."""
    x = images.astype(np.float32)
    return x / np.float32(255) if config.model_name.startswith("gemma4") else x / np.float32(127.5) - 1


def computed(model: nnx.Module, config: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return random inputs and what the model computes from them; with images, two in one sequence."""

    def logits(tokens: np.ndarray, **images: np.ndarray) -> np.ndarray:
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        return np.asarray(
            model(tokens, positions, decoder_segment_ids=np.ones_like(tokens), enable_dropout=False, **images)
        )

    shape = (2, HYPER_TOKENS if config.model_name.startswith("deepseek4") else TOKENS)
    if config.model_name.startswith("deepseek4") and config.scan_layers:
        shape = (1, config.max_target_length)
    tokens = rng.integers(1, VOCABULARY, shape).astype(np.int32)
    if not config.use_multimodal:
        return {"tokens": tokens, "logits": logits(tokens)}
    if config.vision_encoder_block.value.startswith("qwen3"):
        return seeing_qwen(model, config, rng)
    placeholder, of_image, every = placeholders(config)
    images = rng.integers(0, 256, (1, 2, *np.broadcast_to(config.image_size_for_vit, 2), 3), np.uint8)
    pixels = seen(images, config)
    image = [BEGIN, *[placeholder] * of_image, END]
    expanded = np.array([[*tokens[0, :4], *image, *tokens[0, 4:7], *image, *tokens[0, 7:]]], np.int32)
    kept = np.flatnonzero((expanded[0] != placeholder) | (np.arange(expanded.shape[1]) % every == 0))
    soft, _ = model.vision_encoder(pixels, deterministic=True)
    return {
        "tokens": expanded,
        "images": images,
        "kept": kept,
        "soft_tokens": np.asarray(soft)[:, :, ::every],
        "logits": logits(expanded, encoder_images=pixels)[:, kept],
        "text_tokens": tokens,
        "text_logits": logits(tokens),
    }


def pixels(config: Any) -> tuple[int, ...]:
    """Return the shape of the two images as Qwen's tower takes them: colours, frames, rows, columns."""
    side = config.patch_size_for_vit
    return 2, 3, GRID[0] * config.temporal_patch_size_for_vit, GRID[1] * side, GRID[2] * side


def seeing_qwen(model: nnx.Module, config: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return what Qwen's models compute: two sequences with an image each, whose patches come as Qwen's processor orders them.

    Behind the image, a sequence of Omni has a sound: numbers of few bits, which a file keeps small.
    """
    known = QwenTokens(config)
    of_image = int(np.prod(GRID)) // config.spatial_merge_size_for_vit**2
    text = rng.integers(1, TEXT_TOKENS, (2, TOKENS)).astype(np.int32)
    image = np.array([known.vision_start, *[known.image_pad] * of_image, known.vision_end], np.int32)
    sound = np.array([known.audio_start, *[known.audio_pad] * TOKENS_OF_SOUND, known.audio_end], np.int32)
    between = [image, sound] if config.use_audio else [image]
    tokens = np.stack([np.r_[row[:cut], *between, row[cut:]] for row, cut in zip(text, (4, 2), strict=True)])
    shown = rng.standard_normal(pixels(config), np.float32)
    grid = np.array([GRID] * 2)
    heard = {}
    if config.use_audio:
        mel = (2, config.num_mel_bins_for_audio, FRAMES)
        heard = {"encoder_audios": rng.integers(-64, 64, mel).astype(np.float32) / np.float32(32)}
    positions, _ = get_rope_index(
        tokens,
        grid,
        spatial_merge_size=config.spatial_merge_size_for_vit,
        config=config,
        audio_lengths=np.array([FRAMES] * 2),
    )

    def logits(tokens: np.ndarray, positions: np.ndarray, **images: np.ndarray) -> np.ndarray:
        where = positions.astype(np.int32)
        ones = np.ones_like(tokens)
        return np.asarray(model(tokens, where, decoder_segment_ids=ones, enable_dropout=False, **images))

    soft, deep = model.vision_encoder(shown, deterministic=True)
    said = {
        "tokens": tokens,
        "positions": positions.astype(np.int32),
        "patches": shown.reshape(2, int(np.prod(GRID)), -1),
        "grid": grid,
        "soft_tokens": np.asarray(soft),
        **{f"deep_{k}": np.asarray(x) for k, x in enumerate(deep)},
        "logits": logits(tokens, positions, encoder_images=shown, **heard),
        "text_tokens": text,
        "text_logits": logits(text, np.broadcast_to(np.arange(TOKENS)[None, :, None], (*text.shape, 3))),
    }
    if config.use_audio:
        sounds = heard["encoder_audios"]
        said |= {"sounds": sounds, "sound_tokens": np.asarray(model.audio_encoder(sounds, deterministic=True))}
    return said


def size_tower(known: Any, config: Any) -> None:
    """Give the tower in MaxText's table of published models the sizes of the case, which the flag of `peer` does not."""
    for key in known.vision_config.to_dict():
        if hasattr(config, f"{key}_for_vit"):
            setattr(known.vision_config, key, getattr(config, f"{key}_for_vit"))


def sized_gemma4(config: Any) -> Any:
    """Return Gemma 4 of MaxText's table with the sizes of the case: transformers has those of heads for each layer, which the flag does not set."""
    known = deepcopy(getattr(hf_model_configs, f"{config.model_name.replace('-', '_')}_dict"))
    text = known["text_config"]
    text["layer_types"] = text["layer_types"][: config.num_decoder_layers]
    text |= {
        "num_hidden_layers": config.num_decoder_layers,
        "head_dim": config.head_dim,
        "num_key_value_heads": config.num_kv_heads,
        "global_head_dim": config.global_head_dim,
        "num_global_key_value_heads": config.global_num_kv_heads or None,
        "num_kv_shared_layers": config.num_kv_shared_layers,
        "hidden_size_per_layer_input": config.hidden_size_per_layer_input,
        "vocab_size_per_layer_input": config.vocab_size_per_layer_input,
    }
    if config.use_multimodal:
        tower = known["vision_config"]
        tower |= {key: getattr(config, f"{key}_for_vit") for key in tower if hasattr(config, f"{key}_for_vit")}
        tower["head_dim"] = tower["hidden_size"] // tower["num_attention_heads"]
        tower["num_key_value_heads"] = tower["num_attention_heads"]
        tower["position_embedding_size"] = config.num_position_embeddings_for_vit
    return to_huggingface.HF_MODEL_CONFIGS[config.model_name].__class__(**known)


def qwen_shapes(config: Any, known: dict[str, Any]) -> dict[str, list[int]]:
    """Return the shapes of the case that MaxText's table has not: patches are 16 x 16 there, mergers have the width of the MLP.

    Qwen 3-VL's experts have one tensor each there, and one together in the table of names; Qwen 3.5 has no tower there, and Qwen 3-Omni is not
    there. `to_huggingface` ends with an error where it finds no shape.
    """
    if config.use_audio:
        return omni_shapes(config, known["thinker_config"])
    tower = {name: x for name, x in QWEN3_VL_HF_WEIGHTS_TO_SHAPE(known).items() if ".visual." in name}
    side, width, out = config.patch_size_for_vit, config.hidden_size_for_vit, config.out_hidden_size_for_vit
    merged = width * config.spatial_merge_size_for_vit**2
    names = [f"model.visual.deepstack_merger_list.{m}" for m in range(len(config.deepstack_visual_indexes_for_vit))]
    shapes = tower | {
        "model.visual.patch_embed.proj.weight": [width, 3, config.temporal_patch_size_for_vit, side, side]
    }
    for name in (*names, "model.visual.merger"):
        shapes |= {f"{name}.norm.{of}": [merged if name in names else width] for of in ("weight", "bias")}
        shapes |= {f"{name}.linear_fc1.weight": [merged, merged], f"{name}.linear_fc1.bias": [merged]}
        shapes |= {f"{name}.linear_fc2.weight": [out, merged], f"{name}.linear_fc2.bias": [out]}
    for i in range(config.num_decoder_layers if config.model_name == "qwen3-vl-30b-a3b" else 0):
        experts, count, of_expert = (
            f"model.language_model.layers.{i}.mlp.experts",
            config.num_experts,
            config.moe_mlp_dim,
        )
        shapes |= {f"{experts}.gate_up_proj": [count, config.emb_dim, 2 * of_expert]}
        shapes |= {f"{experts}.down_proj": [count, of_expert, config.emb_dim]}
    return shapes


def omni_shapes(config: Any, thinker: dict[str, Any]) -> dict[str, list[int]]:
    """Return those of Qwen 3-Omni, of which MaxText has names and no shapes: they are those of transformers."""
    parts = thinker | {"text_config": thinker["text_config"] | {"head_dim": config.head_dim}}
    shapes = {f"thinker.{name}": x for name, x in QWEN_HF_WEIGHTS_TO_SHAPE(parts["text_config"]).items()}
    tower = {
        name: x for name, x in QWEN3_VL_HF_WEIGHTS_TO_SHAPE(parts).items() if "visual." in name and "merger" not in name
    }
    shapes |= {name.replace("model.", "thinker."): x for name, x in tower.items()}
    side, width = config.patch_size_for_vit, config.hidden_size_for_vit
    shapes["thinker.visual.patch_embed.proj.weight"] = [width, 3, config.temporal_patch_size_for_vit, side, side]
    merged = width * config.spatial_merge_size_for_vit**2
    several = [f"thinker.visual.merger_list.{m}" for m in range(len(config.deepstack_visual_indexes_for_vit))]
    for name in (*several, "thinker.visual.merger"):
        shapes |= {f"{name}.ln_q.{of}": [merged if name in several else width] for of in ("weight", "bias")}
        shapes |= linear(f"{name}.mlp.0", merged, merged) | linear(
            f"{name}.mlp.2", merged, config.out_hidden_size_for_vit
        )
    width, channels, bands = (
        config.d_model_for_audio,
        config.downsample_hidden_size_for_audio,
        config.num_mel_bins_for_audio,
    )
    for name, taken in (("conv2d1", 1), ("conv2d2", channels), ("conv2d3", channels)):
        shapes |= {
            f"thinker.audio_tower.{name}.weight": [channels, taken, 3, 3],
            f"thinker.audio_tower.{name}.bias": [channels],
        }
    shapes["thinker.audio_tower.conv_out.weight"] = [width, channels * -(-bands // 8)]
    for k in range(config.encoder_layers_for_audio):
        name = f"thinker.audio_tower.layers.{k}"
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            shapes |= {f"{name}.{norm}.{of}": [width] for of in ("weight", "bias")}
        for part in ("q", "k", "v", "out"):
            shapes |= linear(f"{name}.self_attn.{part}_proj", width, width)
        shapes |= linear(f"{name}.fc1", width, config.encoder_ffn_dim_for_audio)
        shapes |= linear(f"{name}.fc2", config.encoder_ffn_dim_for_audio, width)
    shapes |= {f"thinker.audio_tower.ln_post.{of}": [width] for of in ("weight", "bias")}
    shapes |= linear("thinker.audio_tower.proj1", width, width)
    return shapes | linear("thinker.audio_tower.proj2", width, config.output_dim_for_audio)


def linear(name: str, taken: int, given: int) -> dict[str, list[int]]:
    """Return the shapes of a linear layer."""
    return {f"{name}.weight": [given, taken], f"{name}.bias": [given]}


def sized_qwen(config: Any) -> Any:
    """Return Qwen 3-VL, 3.5 or Omni of MaxText's table with the sizes of the case: the flag sets no tower, and nothing where the parts are dictionaries."""
    known = hf_model_configs.HF_MODEL_CONFIGS[config.model_name]
    said = deepcopy(known.to_dict()) | {"model_type": known.model_type or config.vision_encoder_block.value}
    if config.use_audio:  # of the whole Omni, MaxText has the thinker
        said = {"model_type": said["model_type"], "thinker_config": said["thinker_config"]}
    parts = said.get("thinker_config", said)
    text, tower = parts["text_config"], parts["vision_config"]
    sizes = {
        "hidden_size": config.emb_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_decoder_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "num_experts": config.num_experts,
        "num_local_experts": config.num_experts,
        "moe_intermediate_size": config.moe_mlp_dim,
        "shared_expert_intermediate_size": config.moe_mlp_dim,
        "linear_key_head_dim": config.gdn_key_head_dim,
        "linear_value_head_dim": config.gdn_value_head_dim,
        "linear_num_key_heads": config.gdn_num_key_heads,
        "linear_num_value_heads": config.gdn_num_value_heads,
    }
    text |= {key: size for key, size in sizes.items() if key in text}
    if "layer_types" in text:  # transformers 5 replaces the interval by this list
        text |= {"layer_types": text["layer_types"][: config.num_decoder_layers]}
        text |= {"full_attention_interval": config.inhomogeneous_layer_cycle_interval}
    tower |= {key: getattr(config, f"{key}_for_vit") for key in tower if hasattr(config, f"{key}_for_vit")}
    tower |= {
        "depth": config.num_hidden_layers_for_vit,
        "num_heads": config.num_attention_heads_for_vit,
        "deepstack_visual_indexes": config.deepstack_visual_indexes_for_vit,
    }
    if config.use_audio:
        sound = parts["audio_config"]
        sound |= {key: getattr(config, f"{key}_for_audio") for key in sound if hasattr(config, f"{key}_for_audio")}
    return hf_model_configs.PTConfig(**said)


def save(model: nnx.Module, form: str, config: Any, folder: Path) -> Path:
    """Save as MaxText does; return the directory of the items.

    `train` and `params` go through MaxText's own writer: a training run with an optimizer, and one without. `nnx-sft` and `nnx-rl` are
    what post-training leaves: the state of the nnx modules itself, for reinforcement learning below `base`.
    """
    if form.startswith("nnx"):
        nnx.pop(model, nnx.Intermediate)  # losses of the experts, which training takes out as well
        state = nnx.state(model)
        with ocp.PyTreeCheckpointer() as saver:
            saver.save(folder, {"base": state} if form == "nnx-rl" else state)
        return folder
    if form == "train":
        import optax

        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        state = nnx.state(train_state_nnx.TrainStateNNX(model, optimizer))
    else:
        state = nnx.state(train_state_nnx.TrainStateNNX(model, None))
    manager = checkpointing.create_orbax_checkpoint_manager(str(folder), True, False, 1)
    checkpointing.save_checkpoint(manager, 0, state, config=config, force=True)
    checkpointing.wait_until_finished(manager)
    return folder / "0" / "items"


def peer(argv: list[str], config: Any, items: Path) -> dict[str, list[Any]]:
    """Run MaxText's `to_huggingface` on the checkpoint; return shape and checksum of each tensor."""
    with tempfile.TemporaryDirectory() as out:
        flags.FLAGS(["golden", "--override_model_architecture"])
        to_huggingface.gc = types.SimpleNamespace(collect=lambda: None)  # a second for each tensor
        to_huggingface.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda *_, **__: None)
        to_huggingface.AutoProcessor = to_huggingface.AutoTokenizer
        hf = to_huggingface.HF_MODEL_CONFIGS[config.model_name]
        if config.model_name.startswith("gemma4"):
            to_huggingface.HF_MODEL_CONFIGS[config.model_name] = sized_gemma4(config)
        elif config.model_name.startswith(QWEN_WITH_TOWER):
            hf = to_huggingface.HF_MODEL_CONFIGS[config.model_name] = sized_qwen(config)
            shapes = to_huggingface.HF_SHAPE.get(config.model_name, lambda _: {})
            to_huggingface.HF_SHAPE[config.model_name] = lambda known: shapes(known) | qwen_shapes(config, known)
        elif config.use_multimodal:
            size_tower(hf, config)
        if hasattr(hf, "compress_ratios"):  # the flag does not override it
            hf.compress_ratios = config.compress_ratios
        if hasattr(hf, "qk_head_dim"):  # the flag above overrides its parts, and not the sum
            hf.qk_head_dim = LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"]
        if config.model_name.startswith("qwen3-next"):  # transformers 5 replaces it by the list of layers
            hf.full_attention_interval = config.inhomogeneous_layer_cycle_interval
        to_huggingface.main([*argv, f"load_parameters_path={items}", f"base_output_directory={out}"])
        tensors: dict[str, np.ndarray] = {}
        for file in sorted(Path(out).glob("*.safetensors")):
            tensors |= load_file(file)
        assert all(x.dtype == np.float32 for x in tensors.values())
        return {
            name: [list(x.shape), hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:DIGITS]]
            for name, x in sorted(tensors.items())
        }


def write(case: str) -> None:
    """Replace the golden case."""
    name, form, changes = CASES[case]
    argv = configured(name, changes)
    config = pyconfig.initialize_pydantic(argv)
    mesh = maxtext_utils.get_mesh_from_config(config)
    rng = np.random.default_rng(int(hashlib.sha256(case.encode()).hexdigest()[:8], 16))
    with jax.set_mesh(mesh):
        model = model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(0))
        randomize(model, rng, config)
        said = computed(model, config, rng)
        folder = HERE / case
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        items = save(model, form, config, folder / "ckpt")
    logits = said["logits"]
    assert logits.dtype == np.float32 and all(np.isfinite(x).all() for x in said.values())
    np.savez_compressed(folder / "io.npz", **said)
    case_file = {
        "model_name": name,
        "form": form,
        "overrides": changes,
        "logits": [float(logits.min()), float(logits.max())],
    }
    (folder / "case.json").write_text(json.dumps(case_file, indent=1) + "\n")
    for said in (folder / "ckpt").rglob("commit_success.txt"):
        said.write_text("Checkpoint commit was successful\n")  # Orbax adds the path on this machine
    if case != "llama3.1":  # the largest files, which no reader of ours needs; one case keeps them
        (items / "_sharding").unlink()
        shutil.rmtree(items / "array_metadatas")
    try:
        made = peer(argv, config, items)
    except (
        KeyError,
        NotImplementedError,
        TypeError,
        ValueError,
    ) as error:  # what MaxText cannot convert is a fact of the case
        made = {"error": f"{type(error).__name__}: {str(error).partition('.')[0]}"}  # type: ignore[dict-item]
    (folder / "peer.json").write_text(json.dumps(made).replace("], ", "],\n") + "\n")
    print(case, len(made), float(np.abs(logits).max()))


def main() -> None:
    """Write the cases of the command line, or all."""
    names = ("maxtext", "flax", "orbax-checkpoint", "jax", "numpy")
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{name} {version(name)}' for name in names)}")
    for case in sys.argv[1:] or CASES:
        write(case)


if __name__ == "__main__":
    main()
