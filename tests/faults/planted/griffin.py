"""Faults of RecurrentGemma: in its convolution, its recurrence, its attention and its gated MLP."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

from faults.expected import HUGGING, IN, Fault
from faults.plants import InFile, InRule, InTarget, Plant, attribute, each, forward, tensor

CASE, UPSTREAM = "recurrentgemma", "recurrentgemma"
LAYER = {HUGGING: "model.layers.0.", UPSTREAM: "blocks.0."}
BLOCK = {HUGGING: "model.layers.0.temporal_block.", UPSTREAM: "blocks.0.recurrent_block."}
LOOK = {HUGGING: "model.layers.2.temporal_block.", UPSTREAM: "blocks.2.attention_block."}


def fault(name: str, to: str, plant: Plant, level: str, at: str, diagnosis: str, model: tuple[str, str] | None = None) -> Fault:  # fmt: skip
    return Fault(name, CASE, to, plant, level, at, diagnosis, model)


def flipped(module: Any, x: torch.Tensor) -> torch.Tensor:
    """A depthwise convolution that turns its kernel round."""
    return F.conv1d(x, module.weight.flip(-1), module.bias, padding=module.padding, groups=module.groups)


def plain_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm without the 1 of 1+weight."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.eps) * module.weight


def window(size: int) -> Any:
    def edit(module: Any) -> None:
        module.config.attention_window_size = size

    return edit


def upstream_window(size: int) -> Any:
    def edit(module: Any) -> None:
        for block in module.blocks:
            if hasattr(block, "attention_block"):
                block.attention_block.window_size = size

    return edit


def no_cap(module: Any) -> None:
    module.config = module.config._replace(logits_soft_cap=0.0)


def erf(module: Any) -> None:
    for layer in module.model.layers:
        layer.mlp_block.act_fn = torch.nn.GELU()


def loose_cap(module: Any) -> None:
    module.config.logits_soft_cap = 30.0


def whole_heads(module: Any) -> None:
    """RoPE on all of a head, not on its first half."""
    for rotary in (m for m in module.modules() if type(m).__name__ == "RecurrentGemmaRotaryEmbedding"):
        width = module.config.head_dim
        inverse = 1.0 / 10_000.0 ** (torch.arange(0, width, 2) / width)
        rotary.inv_freq = inverse.to(rotary.inv_freq.dtype)


SWAPPED_GATES = (("rg_lru/input_gate/", "rg_lru/@/"), ("rg_lru/a_gate/", "rg_lru/input_gate/"), ("rg_lru/@/", "rg_lru/a_gate/"))  # fmt: skip
UP_FIRST = (("{gate,up}_proj", "{up,gate}_proj"),)
MEMBERS = (("linear_y/", "@/"), ("linear_x/", "linear_y/"), ("@/", "linear_x/"))
OUTPUT = (("...R,RD->...D", "...D,RD->...R"),)
ATTENDED = (("...E,ED->...D", "...D,ED->...E"),)
TURNED = {
    HUGGING: (("      einsum: ...NB,NBJ->...NJ", "      einsum: ...NB,NJB->...NJ"),),
    UPSTREAM: (('weight: w, bias: b, einsum: "...NB,NBJ->...NJ"', 'weight: w, bias: b, einsum: "...NB,NJB->...NJ"'),),
}
TEMPORAL = {
    HUGGING: (('_pre_norm", multiplies_by: 1+weight}', '_pre_norm"}'),),
    UPSTREAM: (('_pre_norm", weight: scale, multiplies_by: 1+weight}', '_pre_norm", weight: scale}'),),
}
CONV = {HUGGING: f"{BLOCK[HUGGING]}conv_1d.weight", UPSTREAM: f"{BLOCK[UPSTREAM]}conv_1d.w"}
AXIS = {HUGGING: 2, UPSTREAM: 0}

GRIFFIN: tuple[Fault, ...] = (
    fault("input gate and recurrent gate swapped", HUGGING, InRule(SWAPPED_GATES), "model", f"{BLOCK[HUGGING]}rg_lru", "leaves of two rules exchanged"),
    fault("input gate and recurrent gate swapped", UPSTREAM, InRule(SWAPPED_GATES), "model", f"{BLOCK[UPSTREAM]}rg_lru.input_gate", "of another tensor"),
    fault("block-diagonal gates transposed", HUGGING, InRule(TURNED[HUGGING]), "model", f"{BLOCK[HUGGING]}rg_lru", "axes permuted"),
    fault("block-diagonal gates transposed", UPSTREAM, InRule(TURNED[UPSTREAM]), "model", f"{BLOCK[UPSTREAM]}rg_lru.input_gate", "axes permuted"),
    fault("x and y branch swapped", HUGGING, InRule(MEMBERS), "model", f"{BLOCK[HUGGING]}linear_y", "of another tensor"),
    fault("recurrent output projection transposed (square)", HUGGING, InRule(OUTPUT), "model", f"{BLOCK[HUGGING]}linear_out", "transposed"),
    fault("attention output projection transposed (square)", HUGGING, InRule(ATTENDED), "model", f"{LOOK[HUGGING]}o_proj", "transposed"),
    fault("1+scale folded and added again", HUGGING, InRule(TEMPORAL[HUGGING]), "layers", f"{LAYER[HUGGING]}temporal_pre_norm", "multiplies_by", (f"{LAYER[HUGGING]}temporal_pre_norm", "1+scale doubled")),
    fault("convolution kernel flipped", HUGGING, InFile(tensor(CONV[HUGGING], lambda x: np.flip(x, AXIS[HUGGING]))), "weights", CONV[HUGGING], "kernel flipped", (f"{BLOCK[HUGGING]}rg_lru{IN}", "another value in the file")),
    fault("convolution kernel flipped", UPSTREAM, InFile(tensor(CONV[UPSTREAM], lambda x: np.flip(x, AXIS[UPSTREAM]))), "weights", CONV[UPSTREAM], "kernel flipped", (f"{BLOCK[UPSTREAM]}conv_1d", "another value in the file")),
    fault("gate and up swapped", HUGGING, InRule(UP_FIRST), "model", f"{LAYER[HUGGING]}mlp_block.gate_proj", "of another tensor"),
    fault("convolution flipped", HUGGING, InTarget(each("Conv1d", forward(flipped))), "model", f"{BLOCK[HUGGING]}rg_lru{IN}", "convolution flipped"),
    fault("1+scale missing", HUGGING, InTarget(each("RecurrentGemmaRMSNorm", forward(plain_norm))), "layers", f"{LAYER[HUGGING]}temporal_pre_norm", "multiplies_by", (f"{LAYER[HUGGING]}temporal_pre_norm", "1+scale missing")),
    fault("attention window one short (transformers' default)", HUGGING, InTarget(window(5)), "layers", "", "attention_window", (f"{LOOK[HUGGING]}o_proj{IN}", "attention window of 5")),
    fault("attention window one short", UPSTREAM, InTarget(upstream_window(4)), "model", f"{LOOK[UPSTREAM]}proj_final{IN}", "attention window of 5"),
    fault("soft cap 30 for 3", HUGGING, InTarget(loose_cap), "layers", "", "logits_soft_cap", ("logits", "soft cap 30")),
    fault("soft cap missing", UPSTREAM, InTarget(no_cap), "layers", "", "logits_soft_cap", ("logits", "no soft cap")),
    fault("erf for tanh GeLU", HUGGING, InTarget(erf), "layers", f"{LAYER[HUGGING]}mlp_block.gate_proj", "activation", (f"{LAYER[HUGGING]}mlp_block.down_proj{IN}", "gelu_erf")),
    fault("whole heads rotated", HUGGING, InTarget(whole_heads), "model", f"{LOOK[HUGGING]}o_proj{IN}", "whole heads rotated"),
    fault("epsilon 1e-5 for 1e-6", HUGGING, InTarget(each("RecurrentGemmaRMSNorm", attribute("eps", 1e-5))), "layers", f"{LAYER[HUGGING]}temporal_pre_norm", "epsilon", (f"{LAYER[HUGGING]}temporal_pre_norm", "epsilon 1e-05 for 1e-06")),
)  # fmt: skip
