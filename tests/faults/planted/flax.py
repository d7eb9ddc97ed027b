"""Faults of BERT and GPT-2: in rules and configurations, in written files, and in the code of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers.models.gpt2 import modeling_gpt2 as gpt2

from faults.expected import HUGGING, Fault
from faults.plants import InFile, InRule, InSidecar, InTarget, Plant, Tensors, attribute, each, exchange, tensor

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


FLAX: tuple[Fault, ...] = (
    rule("a kernel of FlaxConv1D taken for PyTorch's (square)", "gpt2", "model", "transformer.h.0.attn.c_proj", "transposed", ("...E,DE->...D", "...E,ED->...D")),
    rule("output projection transposed (square)", "bert", "model", "bert.encoder.layer.0.attention.output.dense", "transposed", ("...E,ED->...D", "...E,DE->...D")),
    rule("queries and keys swapped", "bert", "model", "bert.encoder.layer.0.attention.self.query", "of another tensor", ("attention.self.{query,key,value}", "attention.self.{key,query,value}")),
    rule("1+scale on a plain norm", "gpt2", "model", "transformer.h.0.ln_1", "1+scale on a plain norm", ("  multiplies_by: scale", "  multiplies_by: 1+scale")),
    rule("GeLU's approximation configured for the exact one", "bert", "layers", "bert.encoder.layer.0.intermediate.dense", "activation", ("hidden_act: $hidden_act", "hidden_act: gelu_new"), model=("bert.encoder.layer.0.output.dense:in", "gelu_tanh for gelu_erf")),
    rule("exact GeLU configured for the approximation", "gpt2", "layers", "transformer.h.0.mlp.c_fc", "activation", ("activation_function: $activation_function", "activation_function: gelu"), model=("transformer.h.0.mlp.c_proj:in", "gelu_erf for gelu_tanh")),
    rule("epsilon of torch configured", "bert", "layers", "bert.embeddings.LayerNorm", "epsilon", ("layer_norm_eps: $layer_norm_eps", "layer_norm_eps: 1e-5"), model=("bert.embeddings.LayerNorm", "epsilon 1e-05 for 1e-12")),
    rule("twice as many heads configured", "bert", "layers", "", "num_attention_heads", ("num_attention_heads: $num_attention_heads", "num_attention_heads: 6"), model=("bert.encoder.layer.0.attention.output.dense:in", "6 heads")),
    rule("one head configured", "gpt2", "layers", "", "n_head", ("n_head: $n_head", "n_head: 1"), model=("transformer.h.0.attn.c_proj:in", "1 head")),
    file("queries, keys and values in another order in one tensor", "gpt2", tensor(f"{BLOCK}attn.c_attn.weight", queries_last), "transformer.h.0.attn.c_attn.weight", "rows rolled", ("transformer.h.0.attn.c_attn", "another value in the file")),
    file("heads mixed with features in the queries", "bert", tensor(f"{LAYER}attention.self.query.weight", mixed), "bert.encoder.layer.0.attention.self.query.weight", "rows in another order", ("bert.encoder.layer.0.attention.self.query", "another value in the file")),
    file("positions begin later", "bert", tensor("bert.embeddings.position_embeddings.weight", shifted), "bert.embeddings.position_embeddings.weight", "rows rolled", ("bert.embeddings.position_embeddings", "another value in the file")),
    file("two layers swapped", "gpt2", exchange("transformer.h.0.", "transformer.h.1."), "transformer.h.0.ln_1.weight", "of another layer", ("transformer.h.0.ln_1", "other values in the file")),
    file("a bias of Conv1D lost", "gpt2", tensor(f"{BLOCK}mlp.c_fc.bias", np.zeros_like), "transformer.h.0.mlp.c_fc.bias", "bias dropped", ("transformer.h.0.mlp.c_fc", "another value in the file")),
    fault("the target attends to later positions", "gpt2", InTarget(patch=seeing), "model", "transformer.h.0.attn.c_proj:in", "no causal mask", None),
    fault("the target's GeLU is the approximation", "bert", InTarget(each("BertIntermediate", attribute("intermediate_act_fn", torch.nn.GELU(approximate="tanh")))), "layers", "bert.encoder.layer.0.intermediate.dense", "activation", ("bert.encoder.layer.0.output.dense:in", "gelu_tanh for gelu_erf")),
    fault("the target's norms have another epsilon", "gpt2", InTarget(each("LayerNorm", attribute("eps", 1e-6))), "layers", "transformer.h.0.ln_1", "epsilon", ("transformer.h.0.ln_1", "epsilon 1e-06 for 1e-05")),
    fault("the target attends to padding", "bert", InTarget(unmasked), "model", "bert.encoder.layer.0.attention.output.dense:in", "padding is attended to", None),
    fault("config.json names another class with this tree", "bert", InSidecar({"architectures": ["BertLMHeadModel"]}), "plan", "architectures", "refused", None),
    fault("config.json names a class with another head", "gpt2", InSidecar({"architectures": ["GPT2ForSequenceClassification"]}), "plan", "architectures", "refused", None),
)  # fmt: skip
