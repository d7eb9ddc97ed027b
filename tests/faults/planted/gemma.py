"""Faults of Gemma: in rules and configurations, in written files, and in the code of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

from convert.checkpoints import open_source
from faults.expected import HUGGING, IN, Fault
from faults.planted.in_files import OTHER, bfloat16_fold, flip, put, zero
from faults.plants import InFile, InRule, InTarget, Plant, Tensors, attribute, each, exchange, forward, tensor
from support.goldens import checkpoint

ONE, TWO, THREE, PLAIN = "gemma1-mha", "gemma2-2b", "gemma3", "plain_norms"
LAYER, GLOBAL = "model.layers.0.", "model.layers.5."
LOOK, MLP = f"{LAYER}self_attn.", f"{LAYER}mlp."
TABLE = "model.embed_tokens.weight"
NORM, EMBEDDED = f"{LAYER}input_layernorm", "model.embed_tokens"
FIRST = f"{LOOK}q_norm"  # the first norm by name, which the layers level names


def fault(name: str, case: str, plant: Plant, level: str, at: str, diagnosis: str, model: tuple[str, str] | None = None, to: str = HUGGING) -> Fault:  # fmt: skip
    return Fault(name, case, to, plant, level, at, diagnosis, model)


def rule(name: str, case: str, level: str, at: str, diagnosis: str, *edits: tuple[str, str], model: tuple[str, str] | None = None) -> Fault:  # fmt: skip
    """In the text of the rules, or of the configuration that they write."""
    return fault(name, case, InRule(edits), level, at, diagnosis, model)


def file(name: str, edit: Callable[[Tensors], None], at: str, diagnosis: str, model: str | None, said: str = OTHER, case: str = THREE) -> Fault:  # fmt: skip
    """In the written tensors; `model` is the boundary where the model level sees it, if it does."""
    return fault(name, case, InFile(edit), "weights", at, diagnosis, (model, said) if model else None)


def target(name: str, level: str, at: str, diagnosis: str, plant: Plant, model: tuple[str, str] | None = None, case: str = THREE) -> Fault:  # fmt: skip
    """In the code of the target."""
    return fault(name, case, plant, level, at, diagnosis, model)


# ---- edits of files

HEADS, WIDTH, MODEL = 4, 12, 48


def heads(x: np.ndarray) -> np.ndarray:
    """The last head before the others."""
    return np.roll(x, WIDTH, axis=0)


def mixed(x: np.ndarray) -> np.ndarray:
    """Rows that run over the heads within each feature, not over the features within each head."""
    return x.reshape(HEADS, WIDTH, MODEL).swapaxes(0, 1).reshape(x.shape)


def renumbered(order: list[int]) -> Callable[[Tensors], None]:
    """Layer k is what layer order[k] should be."""

    def edit(tensors: Tensors) -> None:
        before = dict(tensors)
        for name in before:
            parts = name.split(".")
            if parts[:2] == ["model", "layers"]:
                tensors[name] = before[".".join([*parts[:2], str(order[int(parts[2])]), *parts[3:]])]

    return edit


LEXICAL = [int(text) for text in sorted(map(str, range(12)))]  # 0, 1, 10, 11, 2, ...


def untied(tensors: Tensors) -> None:
    """A head of its own."""
    tensors["lm_head.weight"] = tensors[TABLE][::-1].copy()


def last_rows(x: np.ndarray) -> np.ndarray:
    """Of the padded table those rows that end with it."""
    table = open_source(checkpoint(THREE)).read("embedder/input_embedding")
    return table[-len(x) :]


# ---- edits of transformers' code


def named(ending: str, change: Callable[[Any], None]) -> Callable[[Any], None]:
    """An edit of every submodule whose name ends so."""

    def edit(module: Any) -> None:
        found = [inner for name, inner in module.named_modules() if name.endswith(ending)]
        assert found, ending
        for inner in found:
            change(inner)

    return edit


def interleaved(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """RoPE by neighbours."""
    half = cos.shape[-1] // 2
    cos, sin = (x.unsqueeze(unsqueeze_dim)[..., :half] for x in (cos, sin))

    def turn(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)

    return turn(q), turn(k)


def backwards(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """RoPE with the sign of the sine wrong."""
    return half_split(q, cos, -sin, unsqueeze_dim), half_split(k, cos, -sin, unsqueeze_dim)


def half_split(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> torch.Tensor:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rope(function: Callable[..., Any]) -> InTarget:
    """Another RoPE in Gemma 3's attention."""
    from transformers.models.gemma3 import modeling_gemma3

    return InTarget(patch=lambda: mock.patch.object(modeling_gemma3, "apply_rotary_pos_emb", function))


def norm_of_the_sum(layer: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The residual is added in front of the norm behind the attention."""
    mixed, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    x = layer.post_attention_layernorm(hidden_states + mixed)
    return torch.as_tensor(x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x))))


def norms_behind(module: Any) -> None:
    """Queries and keys are normed when they are already rotated."""
    for layer in module.model.layers:
        attention = layer.self_attn
        call = attention.forward

        def run(*args: Any, attention: Any = attention, call: Any = call, **kwargs: Any) -> Any:
            places = kwargs["position_embeddings"]
            for norm in (attention.q_norm, attention.k_norm):
                plain = type(norm).forward
                norm.forward = lambda x, norm=norm, plain=plain: plain(norm, half_split(x, *places))
            kwargs["position_embeddings"] = (torch.ones_like(places[0]), torch.zeros_like(places[1]))
            return call(*args, **kwargs)

        attention.forward = run


def one_scale(module: Any) -> None:
    """The scale that follows from a head's width, and not from `query_pre_attn_scalar`."""
    module.scaling = module.head_dim**-0.5


def plain_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm without the 1 of 1+weight."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.eps) * module.weight


def layer_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """LayerNorm, without a bias."""
    return plain_norm(module, x - x.mean(-1, keepdim=True)) + module._norm(x - x.mean(-1, keepdim=True))


def head_of_its_own(module: Any) -> None:
    module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().flip(0).clone())


def no_scale(module: Any) -> None:
    module.embed_scale = torch.ones_like(module.embed_scale)


def in_turns(x: torch.Tensor, n: int) -> torch.Tensor:
    """Key and value heads repeated all after one another."""
    return x.repeat(1, n, 1, 1)


def other_groups() -> InTarget:
    from transformers.models.gemma3 import modeling_gemma3

    return InTarget(patch=lambda: mock.patch.object(modeling_gemma3, "repeat_kv", in_turns))


# ---- edits of rules

UP_FIRST = ("model.layers.{i}.mlp.{gate,up}_proj", "model.layers.{i}.mlp.{up,gate}_proj")
VALUES_FIRST = (
    "transformers: model.layers.{i}.self_attn.{k,v}_proj",
    "transformers: model.layers.{i}.self_attn.{v,k}_proj",
)
KEYS_FIRST = (
    "transformers: model.layers.{i}.self_attn.{q,k,v}_proj",
    "transformers: model.layers.{i}.self_attn.{k,q,v}_proj",
)

GEMMA: tuple[Fault, ...] = (
    rule("gate and up swapped", THREE, "model", f"{MLP}gate_proj", "of another tensor", UP_FIRST),
    rule("keys and values swapped", THREE, "model", f"{LOOK}k_proj", "of another tensor", VALUES_FIRST),
    rule("q and k swapped", ONE, "model", f"{LOOK}q_proj", "of another tensor", KEYS_FIRST),
    rule("1+scale folded and added again", THREE, "layers", NORM, "multiplies_by", ('{module: "model.layers.{i}.input_layernorm", multiplies_by: 1+weight}', "model.layers.{i}.input_layernorm"), model=(NORM, "1+scale doubled")),
    rule("erf for tanh GeLU", THREE, "layers", f"{MLP}gate_proj", "activation", ("model_type: gemma3_text\n          hidden_activation: gelu_pytorch_tanh", "model_type: gemma3_text\n          hidden_activation: gelu"), model=(f"{MLP}down_proj{IN}", "gelu_erf")),
    rule("SiLU for GeLU", THREE, "layers", f"{MLP}gate_proj", "activation", ("model_type: gemma3_text\n          hidden_activation: gelu_pytorch_tanh", "model_type: gemma3_text\n          hidden_activation: silu"), model=(f"{MLP}down_proj{IN}", "silu")),
    rule("epsilon 1e-5 for 1e-6", THREE, "layers", FIRST, "epsilon", ("rms_norm_eps: $epsilon", "rms_norm_eps: 0.00001"), model=(NORM, "epsilon 1e-05 for 1e-06")),
    rule("window off by one", THREE, "layers", "", "sliding_window", ("sliding_window: $sliding_window\n          layer_types: $attention_pattern\n          attn_logit_softcapping: null", "sliding_window: $sliding_window+1\n          layer_types: $attention_pattern\n          attn_logit_softcapping: null"), model=(f"{LOOK}o_proj{IN}", "attention window of 9")),
    rule("RoPE bases of local and global layers swapped", THREE, "layers", "", "rope_theta_local", ("{rope_type: default, rope_theta: $rope_theta_local}", "{rope_type: default, rope_theta: $rope_theta_global}"), ("factor: $rope_factor_global, rope_theta: $rope_theta_global", "factor: $rope_factor_global, rope_theta: $rope_theta_local"), model=(f"{LOOK}o_proj{IN}", "RoPE with the base of the global layers")),
    rule("RoPE positions of global layers not divided", THREE, "layers", "", "rope_factor_global", ("factor: $rope_factor_global", "factor: 1.0"), model=(f"{GLOBAL}self_attn.o_proj{IN}", "RoPE positions not divided")),
    rule("RoPE base 500000 for 10000", TWO, "layers", "model.rotary_emb", "rope_theta", ("model_type: gemma2\n          hidden_activation: gelu_pytorch_tanh\n          rope_parameters: {rope_type: default, rope_theta: $rope_theta}", "model_type: gemma2\n          hidden_activation: gelu_pytorch_tanh\n          rope_parameters: {rope_type: default, rope_theta: 500000.0}"), model=(f"{LOOK}o_proj{IN}", "RoPE with base 500000")),
    rule("soft cap of attention missing", TWO, "layers", "", "attn_logit_softcapping", ("attn_logit_softcapping: $attn_logit_softcapping", "attn_logit_softcapping: null"), model=(f"{LOOK}o_proj{IN}", "no soft cap")),
    rule("soft cap of logits missing", TWO, "layers", "", "final_logit_softcapping", ("final_logit_softcapping: $final_logit_softcapping", "final_logit_softcapping: null"), model=("logits", "no soft cap")),
    file("q projection transposed (square)", tensor(f"{LOOK}q_proj.weight", np.transpose), f"{LOOK}q_proj.weight", "transposed", f"{LOOK}q_proj"),
    file("output projection transposed (square)", tensor(f"{LOOK}o_proj.weight", np.transpose), f"{LOOK}o_proj.weight", "transposed", f"{LOOK}o_proj"),
    file("heads permuted", tensor(f"{LOOK}q_proj.weight", heads), f"{LOOK}q_proj.weight", "heads in another order", f"{LOOK}q_proj"),
    file("head and feature axes swapped", tensor(f"{LOOK}q_proj.weight", mixed), f"{LOOK}q_proj.weight", "axes of a head swapped", f"{LOOK}q_proj"),
    file("q and k swapped", exchange(f"{LOOK}q_proj", f"{LOOK}k_proj"), f"{LOOK}q_proj.weight", "of another tensor", f"{LOOK}q_proj", case=ONE),
    file("gate and up swapped", exchange(f"{MLP}gate_proj", f"{MLP}up_proj"), f"{MLP}gate_proj.weight", "of another tensor", f"{MLP}gate_proj"),
    file("two layers swapped", exchange("model.layers.2.", "model.layers.3."), "model.layers.2.input_layernorm.weight", "of another layer", "model.layers.2.input_layernorm"),
    file("layers shifted by one", renumbered([*range(1, 12), 0]), f"{NORM}.weight", "of another layer", NORM),
    file("layers in lexical order", renumbered(LEXICAL), "model.layers.2.input_layernorm.weight", "of another layer", "model.layers.2.input_layernorm"),
    file("one bit flipped", tensor(f"{MLP}down_proj.weight", flip(0)), f"{MLP}down_proj.weight", "one bit flipped", f"{MLP}down_proj"),
    file("one row zeroed", tensor(f"{MLP}up_proj.weight", zero), f"{MLP}up_proj.weight", "row zeroed", f"{MLP}up_proj"),
    file("NaN in one weight", tensor(f"{LOOK}k_proj.weight", put(np.nan)), f"{LOOK}k_proj.weight", "NaN or Inf", f"{LOOK}k_proj"),
    file("1+scale on a norm that adds 1 itself", tensor(f"{NORM}.weight", lambda x: x + 1), f"{NORM}.weight", "1+scale doubled", NORM),
    file("√D folded into the embedding", tensor(TABLE, lambda x: x * np.float32(np.sqrt(MODEL))), TABLE, "multiplied by a number", EMBEDDED),
    file("wrong slice of the padded vocabulary", tensor(TABLE, last_rows), TABLE, "another slice of the rows", EMBEDDED),
    fault("tied head untied", THREE, InFile(untied), "coverage", "lm_head.weight", "an untied head"),
    *(
        fault(name, THREE, InFile(tensor(f"{NORM}.weight", change)), "weights", f"{NORM}.weight", diagnosis, to=PLAIN)
        for name, change, diagnosis in (
            ("1+scale missing", lambda x: x - 1, "1+scale missing"),
            ("1+scale doubled", lambda x: x + 1, "1+scale doubled"),
            ("norm folded in bfloat16", bfloat16_fold, "folded in bfloat16"),
        )
    ),
    target("interleaved RoPE", "model", f"{LOOK}o_proj{IN}", "interleaved RoPE", rope(interleaved)),
    target("RoPE turned backwards", "model", f"{LOOK}o_proj{IN}", "RoPE turned backwards", rope(backwards)),
    target("attention scale missing", "model", f"{LOOK}o_proj{IN}", "attention scale missing", InTarget(each("Gemma3Attention", attribute("scaling", 1.0)))),
    target("scale by a head's width, not by query_pre_attn_scalar", "model", f"{LOOK}o_proj{IN}", "attention scale 1/sqrt(head width)", InTarget(each("Gemma3Attention", one_scale))),
    target("key heads in turns, not in groups", "model", f"{LOOK}o_proj{IN}", "key heads in turns, not in groups", other_groups()),
    target("q norm missing", "model", f"{LOOK}q_norm", "no q norm", InTarget(named("q_norm", forward(lambda module, x: x)))),
    target("q and k norm behind RoPE", "model", f"{LOOK}q_norm", "norm behind RoPE", InTarget(norms_behind)),
    target("norm of the attention behind its residual", "model", "model.layers.0.post_attention_layernorm", "norm behind the addition, not in front of it", InTarget(each("Gemma3DecoderLayer", forward(norm_of_the_sum)))),
    target("1+scale missing", "layers", FIRST, "multiplies_by", InTarget(each("Gemma3RMSNorm", forward(plain_norm))), (NORM, "1+scale missing")),
    target("LayerNorm for RMSNorm", "model", NORM, "LayerNorm for RMSNorm", InTarget(named("input_layernorm", forward(layer_norm)))),
    target("embedding √D missing", "model", EMBEDDED, "embedding not scaled", InTarget(each("Gemma3TextScaledWordEmbedding", no_scale))),
    target("tied head untied", "model", "logits", "head not tied to the embedding", InTarget(head_of_its_own)),
)  # fmt: skip
