"""Writes the golden cases of all flax models of transformers 4: 39 families, with every class that they have.

transformers 5 has no flax models any more; 4.49.0 is run in an environment of its own (Python 3.11), on a CPU:

    python3.11 -m venv env && env/bin/pip install transformers==4.49.0 jax==0.4.30 jaxlib==0.4.30 flax==0.8.5 'numpy<2' torch
    env/bin/python tests/golden/make_flax_families.py [CASE ...]

Each case is one file, flax-families/CASE.npz: config.json as `save_pretrained` writes it, names and shapes of the leaves, inputs, and what the
flax class computed in float32 with matmul precision `highest`. The weights are those of `drawn` below, which `tests/support/flax_families.py`
has as well; `flax-families/DIGEST.json` has the checksum of the `flax_model.msgpack` that `save_pretrained` wrote, and what `from_flax=True`
of transformers 4 made of it (the largest difference of its outputs, relative to their standard deviation).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict

HERE = Path(__file__).parent / "flax-families"
OUTPUTS = 2  # the first outputs of a class that are arrays
TEXT, ANSWER = 13, 9
V = 29  # rows of a vocabulary

TEXTS = {
    "vocab_size": V, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20,
    "max_position_embeddings": 19, "type_vocab_size": 2, "num_labels": 5,
}  # fmt: skip
BARTS = {
    "vocab_size": V, "d_model": 12, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2, "decoder_attention_heads": 3,
    "encoder_ffn_dim": 20, "decoder_ffn_dim": 28, "max_position_embeddings": 19, "num_labels": 3, "decoder_start_token_id": 2,
}  # fmt: skip
T5S = {
    "vocab_size": V, "d_model": 12, "d_kv": 5, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 3,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 17, "decoder_start_token_id": 0,
}  # fmt: skip
DECODERS = {
    "vocab_size": V, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 31, "pad_token_id": 0,
}  # fmt: skip
IMAGES = {
    "image_size": 12,
    "patch_size": 4,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_labels": 5,
}
CLIP_TEXT = {"vocab_size": V, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": 19, "projection_dim": 10, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip
CLIP_IMAGE = {"image_size": 12, "patch_size": 4, "hidden_size": 14, "intermediate_size": 22, "num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": 10}  # fmt: skip
SOUND = {
    "vocab_size": V, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20, "conv_dim": (6, 8),
    "conv_kernel": (4, 3), "conv_stride": (2, 2), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer",
    "do_stable_layer_norm": True, "num_feat_extract_layers": 2, "codevector_dim": 6, "proj_codevector_dim": 10, "num_codevectors_per_group": 7,
    "num_codevector_groups": 2, "conv_bias": True,
}  # fmt: skip
WHISPERS = {
    "vocab_size": 31, "num_mel_bins": 6, "d_model": 12, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 28, "max_source_positions": 14, "max_target_positions": 17,
    "pad_token_id": 27, "bos_token_id": 27, "eos_token_id": 27, "decoder_start_token_id": 28, "suppress_tokens": None,
    "begin_suppress_tokens": None, "num_labels": 5, "classifier_proj_size": 10,
}  # fmt: skip
HEADS = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)


@dataclass(frozen=True)
class Family:
    """A family: its configuration class, sizes, classes (`Flax` left out), and variants: name -> (class, other sizes)."""

    config: str
    sizes: dict[str, Any]
    classes: tuple[str, ...]
    variants: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)


def heads(prefix: str, *more: str, without: tuple[str, ...] = ()) -> tuple[str, ...]:
    return tuple(f"{prefix}{head}" for head in (*HEADS, *more) if head not in without)


UNTIED = {"tie_word_embeddings": False}
S = 28  # of the cases named "square": widths, feed-forward blocks, vocabulary and labels are equal, so no shape shows that a layout is wrong
SQUARE_TEXT = {"vocab_size": S, "hidden_size": S, "intermediate_size": S, "num_attention_heads": 2, "max_position_embeddings": S, "num_labels": S}  # fmt: skip
SQUARE_BART = {
    "vocab_size": S, "d_model": S, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": S, "decoder_ffn_dim": S, "max_position_embeddings": S, "num_labels": S,
}  # fmt: skip
SQUARE_T5 = {
    "vocab_size": S,
    "d_model": S,
    "d_kv": 2,
    "d_ff": S,
    "num_heads": S // 2,
    "num_layers": 1,
    "num_decoder_layers": 1,
}
SQUARE_DECODER = {**SQUARE_TEXT, "num_key_value_heads": 2}
SQUARE_IMAGE = {**SQUARE_TEXT, "patch_size": 3}  # as many rows, columns and colours
SQUARE_CLIP = {**SQUARE_TEXT, "projection_dim": S}
CROSS = {"is_decoder": True, "add_cross_attention": True}
FAMILIES: dict[str, Family] = {
    "albert": Family("AlbertConfig", {**TEXTS, "embedding_size": 10, "num_hidden_groups": 1, "inner_group_num": 2}, heads("Albert", "ForPreTraining"), {
        "square": ("AlbertForMaskedLM", {**SQUARE_TEXT, "embedding_size": S})}),
    "bart": Family("BartConfig", BARTS, ("BartModel", "BartForConditionalGeneration", "BartForSequenceClassification", "BartForQuestionAnswering"), {
        "untied": ("BartForConditionalGeneration", UNTIED), "causal": ("BartForCausalLM", {"encoder_layers": 3, "decoder_layers": 3, "is_decoder": True, "is_encoder_decoder": False}), "square": ("BartForConditionalGeneration", SQUARE_BART)}),
    "beit": Family("BeitConfig", {**IMAGES, "intermediate_size": 20, "vocab_size": V}, ("BeitModel", "BeitForImageClassification"), {
        "BeitForMaskedImageModeling": ("BeitForMaskedImageModeling", {"use_mask_token": True}),
        "positions": ("BeitForImageClassification", {"use_absolute_position_embeddings": True, "use_relative_position_bias": True, "layer_scale_init_value": 0.2}),
        "shared": ("BeitModel", {"use_shared_relative_position_bias": True, "use_mean_pooling": False}),
        "unscaled": ("BeitModel", {"layer_scale_init_value": 0})}),
    "bert": Family("BertConfig", TEXTS, heads("Bert", "ForPreTraining", "ForNextSentencePrediction"), {
        "untied": ("BertForMaskedLM", UNTIED), "causal": ("BertForCausalLM", {"is_decoder": True}), "cross": ("BertForCausalLM", CROSS), "square": ("BertForMaskedLM", SQUARE_TEXT)}),
    "big_bird": Family("BigBirdConfig", {**TEXTS, "attention_type": "original_full", "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 3}, heads("BigBird", "ForPreTraining"), {
        "causal": ("BigBirdForCausalLM", {"is_decoder": True})}),
    "blenderbot": Family("BlenderbotConfig", BARTS, ("BlenderbotModel", "BlenderbotForConditionalGeneration"), {"untied": ("BlenderbotForConditionalGeneration", UNTIED)}),
    "blenderbot_small": Family("BlenderbotSmallConfig", BARTS, ("BlenderbotSmallModel", "BlenderbotSmallForConditionalGeneration"), {"untied": ("BlenderbotSmallForConditionalGeneration", UNTIED)}),
    "bloom": Family("BloomConfig", {"vocab_size": V, "hidden_size": 12, "n_layer": 2, "n_head": 3}, ("BloomModel", "BloomForCausalLM"), {"untied": ("BloomForCausalLM", UNTIED)}),
    "clip": Family("CLIPConfig", {"text_config": CLIP_TEXT, "vision_config": CLIP_IMAGE, "projection_dim": 10}, ("CLIPModel",), {
        "text": ("CLIPTextModel", {}), "text-projection": ("CLIPTextModelWithProjection", {}), "vision": ("CLIPVisionModel", {}), "square": ("CLIPModel", {"text_config": {**CLIP_TEXT, **SQUARE_CLIP}, "vision_config": {**CLIP_IMAGE, **SQUARE_CLIP, "patch_size": 3}, "projection_dim": S})}),
    "dinov2": Family("Dinov2Config", {**IMAGES, "mlp_ratio": 2, "layerscale_value": 0.3}, ("Dinov2Model", "Dinov2ForImageClassification"), {
        "square": ("Dinov2ForImageClassification", {**SQUARE_IMAGE, "mlp_ratio": 1})}),
    "distilbert": Family("DistilBertConfig", {"vocab_size": V, "dim": 12, "hidden_dim": 20, "n_layers": 2, "n_heads": 3, "max_position_embeddings": 19, "num_labels": 5}, heads("DistilBert"), {
        "sinusoidal": ("DistilBertForMaskedLM", {"sinusoidal_pos_embds": True}), "untied": ("DistilBertForMaskedLM", UNTIED)}),
    "electra": Family("ElectraConfig", {**TEXTS, "embedding_size": 10}, heads("Electra", "ForPreTraining"), {
        "causal": ("ElectraForCausalLM", {"is_decoder": True}), "untied": ("ElectraForMaskedLM", UNTIED),
        "unprojected": ("ElectraForMultipleChoice", {"summary_use_proj": False})}),
    "gemma": Family("GemmaConfig", {**DECODERS, "head_dim": 8}, ("GemmaModel", "GemmaForCausalLM"), {
        "untied": ("GemmaForCausalLM", UNTIED), "base": ("GemmaForCausalLM", {"rope_theta": 50000.0, "hidden_act": "gelu"}),
        "biased": ("GemmaForCausalLM", {"attention_bias": True})}),
    "gpt2": Family("GPT2Config", {"vocab_size": V, "n_positions": 19, "n_embd": 12, "n_layer": 2, "n_head": 3, "bos_token_id": 1, "eos_token_id": 2}, ("GPT2Model", "GPT2LMHeadModel"), {
        "untied": ("GPT2LMHeadModel", UNTIED), "cross": ("GPT2LMHeadModel", {"add_cross_attention": True}), "square": ("GPT2LMHeadModel", {"vocab_size": S, "n_positions": S, "n_embd": S, "n_inner": S, "n_head": 2})}),
    "gpt_neo": Family("GPTNeoConfig", {"vocab_size": V, "hidden_size": 12, "num_layers": 2, "num_heads": 3, "intermediate_size": 20, "max_position_embeddings": 19, "window_size": 4, "attention_types": [[["global", "local"], 1]], "bos_token_id": 1, "eos_token_id": 2}, ("GPTNeoModel", "GPTNeoForCausalLM"), {
        "untied": ("GPTNeoForCausalLM", UNTIED)}),
    "gptj": Family("GPTJConfig", {"vocab_size": V, "n_positions": 19, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}, ("GPTJModel", "GPTJForCausalLM"), {
        "square": ("GPTJForCausalLM", {"vocab_size": S, "n_positions": S, "n_embd": S, "n_inner": S, "rotary_dim": 14})}),
    "llama": Family("LlamaConfig", {**DECODERS, "rope_theta": 500000.0, "tie_word_embeddings": True}, ("LlamaModel", "LlamaForCausalLM"), {
        "biased": ("LlamaForCausalLM", {"attention_bias": True}), "biased-headless": ("LlamaModel", {"attention_bias": True}), "square": ("LlamaForCausalLM", SQUARE_DECODER)}),
    "longt5": Family("LongT5Config", {**T5S, "local_radius": 3, "global_block_size": 4, "encoder_attention_type": "local"}, ("LongT5Model", "LongT5ForConditionalGeneration"), {
        "global": ("LongT5ForConditionalGeneration", {"encoder_attention_type": "transient-global", "feed_forward_proj": "gated-gelu", **UNTIED})}),
    "marian": Family("MarianConfig", {**BARTS, "pad_token_id": V - 1, "eos_token_id": 0, "decoder_vocab_size": V}, ("MarianModel", "MarianMTModel"), {
        "square": ("MarianMTModel", {**SQUARE_BART, "pad_token_id": S - 1, "decoder_vocab_size": S})}),
    "mbart": Family("MBartConfig", BARTS, ("MBartModel", "MBartForConditionalGeneration", "MBartForSequenceClassification", "MBartForQuestionAnswering"), {
        "untied": ("MBartForConditionalGeneration", UNTIED)}),
    "mistral": Family("MistralConfig", {**DECODERS, "sliding_window": 5, "rope_theta": 1000000.0}, ("MistralModel", "MistralForCausalLM"), {
        "square": ("MistralForCausalLM", SQUARE_DECODER)}),
    "mt5": Family("MT5Config", {**T5S, "feed_forward_proj": "gated-gelu"}, ("MT5Model", "MT5ForConditionalGeneration", "MT5EncoderModel"), {
        "ungated": ("MT5Model", {"feed_forward_proj": "relu"})}),
    "opt": Family("OPTConfig", {"vocab_size": V, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "ffn_dim": 20, "max_position_embeddings": 19, "word_embed_proj_dim": 12, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2}, ("OPTModel", "OPTForCausalLM"), {
        "projected": ("OPTForCausalLM", {"word_embed_proj_dim": 10, "do_layer_norm_before": False}), "untied": ("OPTForCausalLM", UNTIED), "square": ("OPTForCausalLM", {**SQUARE_TEXT, "ffn_dim": S, "word_embed_proj_dim": S})}),
    "pegasus": Family("PegasusConfig", BARTS, ("PegasusModel", "PegasusForConditionalGeneration"), {
        "square": ("PegasusForConditionalGeneration", SQUARE_BART)}),
    "regnet": Family("RegNetConfig", {"embedding_size": 6, "hidden_sizes": [8, 12], "depths": [1, 2], "groups_width": 4, "layer_type": "y", "num_labels": 5}, ("RegNetModel", "RegNetForImageClassification")),
    "resnet": Family("ResNetConfig", {"embedding_size": 6, "hidden_sizes": [8, 12], "depths": [1, 2], "layer_type": "bottleneck", "num_labels": 5}, ("ResNetModel", "ResNetForImageClassification"), {
        "basic": ("ResNetForImageClassification", {"layer_type": "basic"})}),
    "roberta": Family("RobertaConfig", {**TEXTS, "pad_token_id": 1}, heads("Roberta"), {
        "untied": ("RobertaForMaskedLM", UNTIED), "causal": ("RobertaForCausalLM", {"is_decoder": True}), "cross": ("RobertaForCausalLM", CROSS)}),
    "roberta_prelayernorm": Family("RobertaPreLayerNormConfig", {**TEXTS, "pad_token_id": 1}, heads("RobertaPreLayerNorm"), {
        "untied": ("RobertaPreLayerNormForMaskedLM", UNTIED), "causal": ("RobertaPreLayerNormForCausalLM", {"is_decoder": True})}),
    "roformer": Family("RoFormerConfig", {**TEXTS, "num_attention_heads": 2, "rotary_value": False}, heads("RoFormer")),
    "t5": Family("T5Config", T5S, ("T5Model", "T5ForConditionalGeneration", "T5EncoderModel"), {
        "v1.1": ("T5ForConditionalGeneration", {"feed_forward_proj": "gated-gelu", **UNTIED}), "square": ("T5ForConditionalGeneration", SQUARE_T5), "gated-tied": ("T5ForConditionalGeneration", {"feed_forward_proj": "gated-gelu", "num_layers": 1, "num_decoder_layers": 2}),
        "gated-encoder": ("T5EncoderModel", {"feed_forward_proj": "gated-gelu"}), "gated-square": ("T5ForConditionalGeneration", {**SQUARE_T5, "feed_forward_proj": "gated-gelu", **UNTIED})}),
    "vit": Family("ViTConfig", {**IMAGES, "intermediate_size": 20}, ("ViTModel", "ViTForImageClassification"), {
        "square": ("ViTForImageClassification", SQUARE_IMAGE)}),
    "wav2vec2": Family("Wav2Vec2Config", SOUND, ("Wav2Vec2Model", "Wav2Vec2ForCTC", "Wav2Vec2ForPreTraining"), {
        "adapter": ("Wav2Vec2Model", {"add_adapter": True, "num_adapter_layers": 2, "output_hidden_size": 12, "mask_time_prob": 0.0, "mask_feature_prob": 0.0}), "square": ("Wav2Vec2ForCTC", {**SQUARE_TEXT, "conv_dim": (S, S), "conv_kernel": (4, 4)})}),
    "whisper": Family("WhisperConfig", WHISPERS, ("WhisperModel", "WhisperForConditionalGeneration", "WhisperForAudioClassification"), {
        "untied": ("WhisperForConditionalGeneration", UNTIED), "square": ("WhisperForConditionalGeneration", {**SQUARE_BART, "num_mel_bins": S, "max_source_positions": S, "max_target_positions": S, "pad_token_id": S - 1, "bos_token_id": S - 1, "eos_token_id": S - 1, "decoder_start_token_id": S - 2})}),
    "xglm": Family("XGLMConfig", {"vocab_size": V, "d_model": 12, "num_layers": 2, "attention_heads": 3, "ffn_dim": 20, "max_position_embeddings": 19}, ("XGLMModel", "XGLMForCausalLM"), {"untied": ("XGLMForCausalLM", UNTIED)}),
    "xlm_roberta": Family("XLMRobertaConfig", {**TEXTS, "pad_token_id": 1}, heads("XLMRoberta"), {
        "untied": ("XLMRobertaForMaskedLM", UNTIED), "causal": ("XLMRobertaForCausalLM", {"is_decoder": True})}),
}  # fmt: skip


def small(family: str, **more: Any) -> Any:
    """Return the configuration of a family, as a part of a composite."""
    of = FAMILIES[family]
    return getattr(transformers, of.config)(**{**of.sizes, **more})


COMPOSITES: dict[str, Callable[[], tuple[str, Any]]] = {
    "encoder_decoder": lambda: ("EncoderDecoderModel", transformers.EncoderDecoderConfig.from_encoder_decoder_configs(small("bert"), small("gpt2", add_cross_attention=True))),
    "encoder_decoder.projected": lambda: ("EncoderDecoderModel", transformers.EncoderDecoderConfig.from_encoder_decoder_configs(small("bert"), small("bert", hidden_size=9, num_hidden_layers=3))),
    "speech_encoder_decoder": lambda: ("SpeechEncoderDecoderModel", transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(small("wav2vec2"), small("bart", encoder_layers=3))),
    "vision_encoder_decoder": lambda: ("VisionEncoderDecoderModel", transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(small("vit"), small("gpt2", add_cross_attention=True, n_embd=15))),
    "vision_text_dual_encoder": lambda: ("VisionTextDualEncoderModel", transformers.VisionTextDualEncoderConfig.from_vision_text_configs(small("vit"), small("bert"), projection_dim=10)),
    "vision_text_dual_encoder.clip": lambda: ("VisionTextDualEncoderModel", transformers.VisionTextDualEncoderConfig.from_vision_text_configs(transformers.CLIPVisionConfig(**CLIP_IMAGE), small("bert", hidden_size=9), projection_dim=10)),
}  # fmt: skip


# Composites are always initialised: shapes of their inputs.
SHAPES = {
    "encoder-decoder": ((1, 4), (1, 4)), "speech-encoder-decoder": ((1, 67), (1, 4)), "vision-encoder-decoder": ((1, 12, 12, 3), (1, 4)),
    "vision-text-dual-encoder": ((1, 4), (1, 12, 12, 3)),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A golden case: its name, the class (`Flax` left out), and its configuration."""

    name: str
    model: str
    config: Any


def cases() -> Iterator[Case]:
    for family, of in FAMILIES.items():
        every = {**{name: (name, {}) for name in of.classes}, **of.variants}
        for variant, (model, sizes) in every.items():
            labels = {"num_labels": 2} if model.endswith(("ForQuestionAnswering", "AlbertForPreTraining")) else {}
            made = getattr(transformers, of.config)(**{**of.sizes, **sizes, **labels})
            if model.startswith("CLIPText"):
                made = transformers.CLIPTextConfig(**CLIP_TEXT)
            elif model.startswith("CLIPVision"):
                made = transformers.CLIPVisionConfig(**CLIP_IMAGE)
            yield Case(f"{family}.{variant}", model, made)
    for name, make in COMPOSITES.items():
        yield Case(name, *make())


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Draw a leaf; norms are near 1, and a variance is positive. The stream of RandomState is frozen for good."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    last = name.rpartition("/")[2]
    if last == "var":
        return (0.5 + np.abs(noise) % 1).astype(np.float32)
    near_one = last in ("scale", "weight", "weight_g", "logit_scale")
    return (near_one + (0.1 if near_one else 0.3) * noise).astype(np.float32)


def patched() -> None:
    """Give arrays `split`, which RoFormer's code and the heads of question answering call, and this jax lacks."""
    from jax._src.array import ArrayImpl

    if not hasattr(ArrayImpl, "split"):
        ArrayImpl.split = lambda self, n, axis=0: jnp.split(self, n, axis=axis)
    if not hasattr(jnp, "cat"):
        jnp.cat = jnp.concatenate  # Bloom's code
    from jax._src.core import Tracer

    if not hasattr(Tracer, "split"):
        Tracer.split = lambda self, n, axis=0: jnp.split(self, n, axis=axis)


def inputs_of(case: Case, model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Draw the inputs that the class takes; the second text ends in padding."""
    rng = np.random.RandomState(zlib.crc32(case.name.encode()) ^ 1)
    names = inspect.signature(type(model).__call__).parameters
    found: dict[str, np.ndarray[Any, Any]] = {}
    if "pixel_values" in names:
        found["pixel_values"] = rng.standard_normal((2, 3, 12, 12)).astype(np.float32)
    if "input_features" in names:
        found["input_features"] = rng.standard_normal(
            (2, case.config.num_mel_bins, 2 * case.config.max_source_positions)
        ).astype(np.float32)
    if "input_values" in names or case.model.startswith("Speech"):
        found["inputs" if case.model.startswith("Speech") else "input_values"] = rng.standard_normal((2, 67)).astype(
            np.float32
        )
    if "input_ids" in names:
        found["input_ids"] = rng.randint(4, V - 4, (2, TEXT)).astype(np.int32)
        found["attention_mask"] = np.ones((2, TEXT), np.int32)
        found["attention_mask"][1, -3:] = 0
    if "token_type_ids" in names and "input_ids" in found and not case.name.startswith("vision_text"):
        found["token_type_ids"] = (np.arange(TEXT) > 5).astype(np.int32)[None].repeat(2, 0)
        if "roberta" in case.name:
            found["token_type_ids"][:] = 0
    if case.model in ("BartForSequenceClassification", "MBartForSequenceClassification"):
        found["input_ids"][:, 7] = case.config.eos_token_id
    if case.model.endswith("MultipleChoice"):
        found = {name: np.stack([x, np.roll(x, 1, 0)], 1) for name, x in found.items()}
    if "decoder_input_ids" in names and not case.model.endswith("SequenceClassification"):
        found["decoder_input_ids"] = rng.randint(4, V - 4, (2, ANSWER)).astype(np.int32)
    if case.model == "BeitForMaskedImageModeling":
        found["bool_masked_pos"] = rng.randint(0, 2, (2, 9)).astype(np.int32)
    return found


def built(case: Case) -> tuple[Any, dict[str, np.ndarray[Any, Any]]]:
    """Return the model of a case and its leaves."""
    cls = getattr(transformers, f"Flax{case.model}")
    extra = {"input_shape": (1, 12, 12, 3)} if case.model.startswith(("ResNet", "RegNet")) else {}
    if case.config.model_type in SHAPES:
        model = cls(case.config, input_shape=SHAPES[case.config.model_type])
        shapes = model.params
    else:
        model = cls(case.config, _do_init=False, **extra)
        shapes = jax.eval_shape(lambda: model.init_weights(jax.random.PRNGKey(0), model.input_shape))
    return model, {
        name: drawn(f"{case.name}/{name}", tuple(x.shape)) for name, x in flatten_dict(shapes, sep="/").items()
    }


def computed(case: Case, model: Any, params: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return what the class computes, by the names of its outputs."""
    call = {name: jnp.asarray(x) for name, x in given.items()}
    if "bool_masked_pos" in call:
        call["bool_masked_pos"] = call["bool_masked_pos"].astype(bool)
    if case.model == "Wav2Vec2ForPreTraining":
        call["gumbel_rng"] = jax.random.PRNGKey(0)
    still = (
        {"train": False} if "train" in inspect.signature(type(model).__call__).parameters else {"deterministic": True}
    )
    return dict(model(**call, params=params, **still).items())


def make(case: Case) -> dict[str, Any]:
    """Write a case; return what DIGEST.json says about it."""
    model, leaves = built(case)
    params = unflatten_dict({name: jnp.asarray(x) for name, x in leaves.items()}, sep="/")
    given = inputs_of(case, model)
    got = computed(case, model, params, given)
    outputs = {
        name: np.asarray(x) for name, x in got.items() if hasattr(x, "shape") and np.asarray(x).dtype == np.float32
    }
    if case.model == "Wav2Vec2ForPreTraining":
        outputs = {
            "projected_states": outputs["projected_states"]
        }  # the others depend on the draws of a Gumbel softmax
    outputs = dict(list(outputs.items())[:OUTPUTS])
    assert outputs and all(np.isfinite(x).all() and x.std() > 1e-3 for x in outputs.values()), {
        k: x.std() for k, x in outputs.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, params=params)
        config = (Path(folder) / "config.json").read_text()
        digest = hashlib.sha256((Path(folder) / "flax_model.msgpack").read_bytes()).hexdigest()
        peer = from_flax(case, folder, given, outputs)
    np.savez_compressed(
        HERE / f"{case.name}.npz", config=np.array(config), leaves=np.array(json.dumps({n: x.shape for n, x in leaves.items()})),
        **{f"in/{name}": x for name, x in given.items()}, **{f"out/{name}": x for name, x in outputs.items()},
    )  # fmt: skip
    return {"sha256": digest, "from_flax": peer}


def from_flax(case: Case, folder: str, given: dict[str, Any], outputs: dict[str, Any]) -> float | str:
    """Return what transformers 4 makes of the checkpoint: the largest difference of its outputs, or its error."""
    name = {"BertForCausalLM": "BertLMHeadModel"}.get(case.model, case.model)
    try:
        model = getattr(transformers, name).from_pretrained(folder, from_flax=True, attn_implementation="eager").eval()
        call = {k: torch.from_numpy(x if x.dtype == np.float32 else x.astype(np.int64)) for k, x in given.items()}
        if "bool_masked_pos" in call:
            call["bool_masked_pos"] = call["bool_masked_pos"].bool()
        with torch.no_grad():
            got = model(**call)
        worst = max(float(np.abs(got[k].numpy() - x).max() / x.std()) for k, x in outputs.items())
        return float(f"{worst:.1e}") if np.isfinite(worst) else "not finite"
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error)[:80]}"


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    patched()
    HERE.mkdir(exist_ok=True)
    digests_at = HERE / "DIGEST.json"
    digests = json.loads(digests_at.read_text()) if digests_at.exists() else {}
    wanted = sys.argv[1:]
    for case in cases():
        if wanted and not any(case.name == word or case.name.startswith(f"{word}.") for word in wanted):
            continue
        digests[case.name] = make(case)
        size = (HERE / f"{case.name}.npz").stat().st_size
        print(f"{case.name}: {size:,} bytes, from_flax {digests[case.name]['from_flax']}", flush=True)
        digests_at.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
