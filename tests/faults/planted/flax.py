"""Faults of BERT, GPT-2, Llama, Mistral, Gemma and DINOv2: in rules and configurations, in written files, and in the code of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.t5.modeling_t5 import T5Attention

from faults.expected import HUGGING, Fault
from faults.plants import (
    InDirectory,
    InFile,
    InRule,
    InSidecar,
    InTarget,
    Plant,
    Tensors,
    attribute,
    each,
    exchange,
    tensor,
)

LAYER, BLOCK = "bert.encoder.layer.0.", "transformer.h.0."


def fault(name: str, case: str, plant: Plant, level: str, at: str, diagnosis: str, model: tuple[str, str] | None = None) -> Fault:  # fmt: skip
    return Fault(name, case, HUGGING, plant, level, at, diagnosis, model)


def rule(name: str, case: str, level: str, at: str, diagnosis: str, *edits: tuple[str, str], model: tuple[str, str] | None = None, count: int = -1) -> Fault:  # fmt: skip
    """In the text of the rules, or of the configuration that they write."""
    return fault(name, case, InRule(edits, count), level, at, diagnosis, model)


def file(name: str, case: str, edit: Callable[[Tensors], None], at: str, diagnosis: str, model: tuple[str, str] | None) -> Fault:  # fmt: skip
    return fault(name, case, InFile(edit), "weights", at, diagnosis, model)


def queries_last(x: np.ndarray) -> np.ndarray:
    """Keys, values, queries along the last axis of Conv1D."""
    return np.roll(x, -24, axis=-1)


def mixed(x: np.ndarray) -> np.ndarray:
    """Rows that run over the heads within each feature."""
    return x.reshape(3, 8, 24).swapaxes(0, 1).reshape(x.shape)


def shifted(x: np.ndarray) -> np.ndarray:
    """RoBERTa's positions begin later."""
    return np.roll(x, 2, axis=0)


def unmasked(module: Any) -> None:
    """Padding is attended to."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "attention_mask": None})


def seeing() -> Any:
    """The mask is that of the padding alone."""
    attention = gpt2.eager_attention_forward

    def masked(own: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return attention(own, query, key, value, mask[:, :, -1:, :], **kwargs)

    return mock.patch.object(gpt2, "eager_attention_forward", masked)


def later_from_zero() -> Any:
    """A token's distance to itself falls into the bucket of later tokens."""
    own = T5Attention._relative_position_bucket

    def bucket(distance: torch.Tensor, bidirectional: bool, num_buckets: int, max_distance: int) -> torch.Tensor:
        found: torch.Tensor = own(distance, bidirectional, num_buckets, max_distance)
        return found + (num_buckets // 2) * (distance == 0) if bidirectional else found

    return mock.patch.object(T5Attention, "_relative_position_bucket", staticmethod(bucket))


FLAX: tuple[Fault, ...] = (
    rule("a kernel of FlaxConv1D taken for PyTorch's (square)", "gpt2", "model", "transformer.h.0.attn.c_proj", "transposed", ("...E,DE->...D", "...E,ED->...D")),
    rule("output projection transposed (square)", "bert", "model", "bert.encoder.layer.0.attention.output.dense", "transposed", ("...E,ED->...D", "...E,DE->...D")),
    rule("queries and keys swapped", "bert", "model", "bert.encoder.layer.0.attention.self.query", "of another tensor", ("attention.self.{query,key,value}", "attention.self.{key,query,value}")),
    rule("1+scale on a plain norm", "gpt2", "model", "transformer.h.0.ln_1", "1+scale on a plain norm", ("  multiplies_by: scale", "  multiplies_by: 1+scale")),
    fault("GeLU's approximation configured for the exact one", "bert", InDirectory("config.json", {"hidden_act": "gelu_new"}), "layers", "hidden_act", "hidden_act", ("bert.encoder.layer.0.output.dense:in", "gelu_tanh for gelu_erf")),
    fault("exact GeLU configured for the approximation", "gpt2", InDirectory("config.json", {"activation_function": "gelu"}), "layers", "activation_function", "activation_function", ("transformer.h.0.mlp.c_proj:in", "gelu_erf for gelu_tanh")),
    fault("epsilon of torch configured", "bert", InDirectory("config.json", {"layer_norm_eps": 1e-5}), "layers", "layer_norm_eps", "layer_norm_eps", ("bert.embeddings.LayerNorm", "epsilon 1e-05 for 1e-12")),
    fault("twice as many heads configured", "bert", InDirectory("config.json", {"num_attention_heads": 6}), "layers", "num_attention_heads", "num_attention_heads", ("bert.encoder.layer.0.attention.output.dense:in", "6 heads")),
    fault("one head configured", "gpt2", InDirectory("config.json", {"n_head": 1}), "layers", "n_head", "n_head", ("transformer.h.0.attn.c_proj:in", "1 head")),
    file("queries, keys and values in another order in one tensor", "gpt2", tensor(f"{BLOCK}attn.c_attn.weight", queries_last), "transformer.h.0.attn.c_attn.weight", "thirds in another order", ("transformer.h.0.attn.c_attn", "another value in the file")),
    file("heads mixed with features in the queries", "bert", tensor(f"{LAYER}attention.self.query.weight", mixed), "bert.encoder.layer.0.attention.self.query.weight", "factors of an axis in another order", ("bert.encoder.layer.0.attention.self.query", "another value in the file")),
    file("positions begin later", "bert", tensor("bert.embeddings.position_embeddings.weight", shifted), "bert.embeddings.position_embeddings.weight", "rows rolled", ("bert.embeddings.position_embeddings", "another value in the file")),
    file("two layers swapped", "gpt2", exchange("transformer.h.0.", "transformer.h.1."), "transformer.h.0.ln_1.weight", "of another layer", ("transformer.h.0.ln_1", "other values in the file")),
    file("a bias of Conv1D lost", "gpt2", tensor(f"{BLOCK}mlp.c_fc.bias", np.zeros_like), "transformer.h.0.mlp.c_fc.bias", "bias dropped", ("transformer.h.0.mlp.c_fc", "another value in the file")),
    fault("the target attends to later positions", "gpt2", InTarget(patch=seeing), "model", "transformer.h.0.attn.c_proj:in", "no causal mask", None),
    fault("the distance 0 counts as a later one", "t5", InTarget(patch=later_from_zero), "model", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias", "other rows of a table: operation that the JAX model lacks", None),
    fault("the target's GeLU is the approximation", "bert", InTarget(each("BertIntermediate", attribute("intermediate_act_fn", torch.nn.GELU(approximate="tanh")))), "layers", "bert.encoder.layer.0.intermediate.dense", "activation", ("bert.encoder.layer.0.output.dense:in", "gelu_tanh for gelu_erf")),
    fault("the target's norms have another epsilon", "gpt2", InTarget(each("LayerNorm", attribute("eps", 1e-6))), "layers", "transformer.h.0.ln_1", "epsilon", ("transformer.h.0.ln_1", "epsilon 1e-06 for 1e-05")),
    fault("the target attends to padding", "bert", InTarget(unmasked), "model", "bert.encoder.layer.0.attention.output.dense:in", "padding is attended to", None),
    rule("base of config.json, which the flax code does not read, in the rules", "llama", "layers", "rope_theta", "rope_theta", ("rope_theta: 10000.0 ", "rope_theta: 500000.0 "), model=("model.layers.0.self_attn.o_proj:in", "RoPE with base 500000")),
    rule("window of config.json as transformers counts it", "mistral", "model", "model.layers.0.self_attn.o_proj:in", "attention window of 5", ("sliding_window: $sliding_window+1", "sliding_window: $sliding_window")),
    rule("queries and keys of one head width exchanged", "llama", "model", "model.layers.0.self_attn.k_proj", "of another tensor", ("linear: model.layers.{i}.self_attn.{k_proj,v_proj}", "linear: model.layers.{i}.self_attn.{v_proj,k_proj}")),
    fault("base of config.json copied", "llama", InDirectory("config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}), "layers", "rope_parameters.rope_theta", "rope_theta", ("model.layers.0.self_attn.o_proj:in", "RoPE with base 500000")),
    fault("scaling of config.json copied", "llama", InDirectory("config.json", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}), "layers", "rope_scaling", "rope_scaling", ("model.layers.0.self_attn.o_proj:in", "RoPE of other frequencies")),
    fault("window of config.json copied", "mistral", InDirectory("config.json", {"sliding_window": 5}), "layers", "sliding_window", "sliding_window", ("model.layers.0.self_attn.o_proj:in", "attention window of 5")),
    rule("layer scales as stored, which the flax code multiplies twice", "dinov2", "model", "encoder.layer.0.layer_scale1", "prescale not removed", ("  prescaled_by: 1/$layerscale_value^2\n", "")),
    rule("layer scales multiplied once", "dinov2", "model", "encoder.layer.0.layer_scale1", "prescale not removed", ("1/$layerscale_value^2", "1/$layerscale_value")),
    rule("layer scales exchanged", "dinov2", "model", "encoder.layer.0.layer_scale1", "of another tensor", ("{layer_scale1,layer_scale2}.lambda1", "{layer_scale2,layer_scale1}.lambda1")),
    fault("config.json names another class with this tree", "bert", InSidecar({"architectures": ["BertLMHeadModel"]}), "plan", "architectures", "refused", None),
    fault("config.json names a class with another head", "gpt2", InSidecar({"architectures": ["GPT2ForSequenceClassification"]}), "plan", "architectures", "refused", None),
)  # fmt: skip
