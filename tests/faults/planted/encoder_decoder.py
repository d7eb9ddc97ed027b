"""Faults of T5 and Whisper: in rules and configurations, in written files, and in the code of transformers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers.models.t5 import modeling_t5
from transformers.models.whisper import modeling_whisper

from faults.expected import Fault
from faults.planted.flax import fault, file, rule, unmasked
from faults.plants import InDirectory, InSidecar, InTarget, Shim, attribute, each, exchange, tensor

SOUND = "model.encoder."
TABLE = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias"
GATED = "encoder.block.0.layer.1.DenseReluDense"


def untied(module: Any) -> None:
    """The head's input is not divided by sqrt(width)."""
    module.config.scale_decoder_outputs = False


def seen_both_ways(module: Any) -> None:
    """The decoder's distances fall into the encoder's buckets."""
    module.decoder.block[0].layer[0].SelfAttention.is_decoder = False


def backwards() -> Any:
    """Distances from the key to the query."""
    made = modeling_t5.T5Attention._relative_position_bucket

    def turned(distance: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return made(-distance, **kwargs)

    return mock.patch.object(modeling_t5.T5Attention, "_relative_position_bucket", staticmethod(turned))


def first_layer_only() -> Any:
    """Layers behind the first one do not get its relative positions."""
    attention = modeling_t5.eager_attention_forward

    def plain(module: Any, *args: Any, position_bias: Any = None, **kwargs: Any) -> Any:
        return attention(
            module, *args, position_bias=position_bias if module.has_relative_attention_bias else None, **kwargs
        )

    return mock.patch.object(modeling_t5, "eager_attention_forward", plain)


def approximate_stem() -> Any:
    """The GELU behind the convolutions is the approximation."""
    functions = torch.nn.functional

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return functions.gelu(x, approximate="tanh")

    return mock.patch.object(modeling_whisper, "nn", Shim(torch.nn, functional=Shim(functions, gelu=gelu)))


def seeing() -> Any:
    """No mask at all."""
    attention = modeling_whisper.eager_attention_forward

    def unmasked(own: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return attention(own, query, key, value, None, **kwargs)

    return mock.patch.object(modeling_whisper, "eager_attention_forward", unmasked)


def later(module: Any) -> None:
    """Positions of the text begin at one."""
    forward = module.forward
    module.forward = lambda ids, **kwargs: forward(ids, **{**kwargs, "position_ids": (kwargs["position_ids"] + 1) % 17})


def ahead(module: Any) -> None:
    """The second convolution has both frames of zeros at the end."""
    conv = module.model.encoder.conv2
    forward, conv.padding = conv.forward, (0,)
    conv.forward = lambda x: forward(torch.nn.functional.pad(x, (0, 2)))


def rolled(x: np.ndarray) -> np.ndarray:
    return np.roll(x, 1, axis=0)


ENCODER_DECODER: tuple[Fault, ...] = (
    # ---- T5
    rule("1+scale on a plain norm", "t5", "model", "encoder.block.0.layer.0.layer_norm", "1+scale on a plain norm", ("  multiplies_by: scale", "  multiplies_by: 1+scale")),
    rule("keys and values of the decoder swapped", "t5", "model", "decoder.block.0.layer.0.SelfAttention.k", "of another tensor", ("linear: decoder.block.{j}.layer.{0.SelfAttention,1.EncDecAttention}.{q,k,v}", "linear: decoder.block.{j}.layer.{0.SelfAttention,1.EncDecAttention}.{q,v,k}")),
    fault("distances told apart too far", "t5", InDirectory("config.json", {"relative_attention_max_distance": 128}), "layers", "relative_attention_max_distance", "relative_attention_max_distance", ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", "relative_attention_max_distance 128")),
    fault("GeLU configured for ReLU", "t5", InDirectory("config.json", {"feed_forward_proj": "gelu", "dense_act_fn": "gelu"}), "layers", "feed_forward_proj", "feed_forward_proj", (f"{GATED}.wo:in", "gelu_erf for relu")),
    fault("gated SiLU configured for gated GeLU", "t5-v1.1", InDirectory("config.json", {"feed_forward_proj": "gated-silu", "dense_act_fn": "silu"}), "layers", "feed_forward_proj", "feed_forward_proj", (f"{GATED}.wo:in", "silu")),
    rule("gate and up swapped", "t5-v1.1", "model", f"{GATED}.wi_0", "of another tensor", ("linear: encoder.block.{i}.layer.1.DenseReluDense.wi_0", "linear: encoder.block.{i}.layer.1.DenseReluDense.wi_"), ("linear: encoder.block.{i}.layer.1.DenseReluDense.wi_1", "linear: encoder.block.{i}.layer.1.DenseReluDense.wi_0"), ("linear: encoder.block.{i}.layer.1.DenseReluDense.wi_\n", "linear: encoder.block.{i}.layer.1.DenseReluDense.wi_1\n")),
    fault("a head of its own configured as tied", "t5-v1.1", InDirectory("config.json", {"tie_word_embeddings": True}), "layers", "tie_word_embeddings", "tie_word_embeddings", ("lm_head:in", "head's input divided by sqrt(width)")),
    file("tables of the encoder's and the decoder's positions swapped", "t5", exchange(f"{TABLE}.weight", f"en{TABLE[2:]}.weight"), f"en{TABLE[2:]}.weight", "of another tensor", (f"en{TABLE[2:]}", "another value in the file")),
    fault("the target divides the scores by sqrt(head width)", "t5", InTarget(each("T5Attention", attribute("scaling", 7**-0.5))), "model", "encoder.block.0.layer.0.SelfAttention.o:in", "attention scale added"),
    fault("the target's decoder has the encoder's buckets", "t5", InTarget(seen_both_ways), "model", TABLE, "buckets of both directions"),
    fault("the target counts distances backwards", "t5", InTarget(patch=backwards), "model", f"en{TABLE[2:]}", "relative positions turned round"),
    fault("the target adds relative positions in the first layer alone", "t5", InTarget(patch=first_layer_only), "model", "encoder.block.1.layer.0.SelfAttention.o:in", "no relative positions"),
    fault("the target does not divide the tied head's input", "t5", InTarget(untied), "model", "lm_head:in", "head's input not scaled"),
    fault("the target's norms have another epsilon", "t5", InTarget(each("T5LayerNorm", attribute("variance_epsilon", 1e-5))), "layers", "encoder.block.0.layer.0.layer_norm", "epsilon", ("encoder.block.0.layer.0.layer_norm", "epsilon 1e-05 for 1e-06")),
    fault("the target attends to padding", "t5", InTarget(unmasked), "model", "encoder.block.0.layer.0.SelfAttention.o:in", "padding is attended to"),
    fault("config.json names a class without a head", "t5-v1.1", InSidecar({"architectures": ["FlaxT5Model"]}), "plan", "architectures", "refused"),
    # ---- Whisper
    fault("config.json names a class without a head", "whisper", InSidecar({"architectures": ["WhisperModel"]}), "plan", "architectures", "refused"),
    rule("convolution's channels exchanged in the dimension numbers (square)", "whisper", "model", f"{SOUND}conv2", "input and output channels exchanged", ("NWC,WIO->NWC\n  from: encoder/conv2", "NWC,WOI->NWC\n  from: encoder/conv2")),
    rule("output projection transposed (square)", "whisper", "model", f"{SOUND}layers.0.self_attn.out_proj", "transposed", ("...E,ED->...D", "...E,DE->...D")),
    fault("twice as many heads configured", "whisper", InDirectory("config.json", {"encoder_attention_heads": 6}), "layers", "encoder_attention_heads", "encoder_attention_heads", (f"{SOUND}layers.0.self_attn.out_proj:in", "6 heads")),
    fault("GeLU's approximation configured for the exact one", "whisper", InDirectory("config.json", {"activation_function": "gelu_new"}), "layers", "activation_function", "activation_function", (f"{SOUND}layers.0.fc2:in", "gelu_tanh for gelu_erf")),
    file("self-attention and attention to the sound swapped", "whisper", exchange("model.decoder.layers.0.self_attn.", "model.decoder.layers.0.encoder_attn."), "model.decoder.layers.0.self_attn.q_proj.weight", "of another tensor", ("model.decoder.layers.0.self_attn.q_proj", "other values in the file")),
    file("a convolution turned round", "whisper", tensor(f"{SOUND}conv1.weight", lambda x: x[..., ::-1].copy()), f"{SOUND}conv1.weight", "kernel flipped", (f"{SOUND}conv1", "another value in the file")),
    file("positions of the sound begin later", "whisper", tensor(f"{SOUND}embed_positions.weight", rolled), f"{SOUND}embed_positions.weight", "rows rolled", (f"{SOUND}embed_positions", "another value in the file")),
    fault("the target's GeLU behind the convolutions is the approximation", "whisper", InTarget(patch=approximate_stem), "model", f"{SOUND}conv2:in", "gelu_tanh for gelu_erf"),
    fault("the target does not divide the scores", "whisper", InTarget(each("WhisperAttention", attribute("scaling", 1.0))), "model", f"{SOUND}layers.0.self_attn.out_proj:in", "attention scale missing"),
    fault("the target's text attends to later positions", "whisper", InTarget(patch=seeing), "model", "model.decoder.layers.0.self_attn.out_proj:in", "no causal mask"),
    fault("the target's positions of the text begin at one", "whisper", InTarget(each("WhisperPositionalEmbedding", later)), "model", "model.decoder.embed_positions", "positions off by one"),
    fault("the target's second convolution looks one frame ahead", "whisper", InTarget(ahead), "model", f"{SOUND}conv2", "another padding"),
)  # fmt: skip
