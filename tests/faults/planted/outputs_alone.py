"""Faults in rules, checked with a reference that returns the outputs alone."""

from __future__ import annotations

from faults.expected import HUGGING, TWO_FIVE, UPSTREAM, Fault
from faults.plants import InRuleAlone


def rule(name: str, case: str, to: str, at: str, diagnosis: str, *edits: tuple[str, str], count: int = -1) -> Fault:
    return Fault(name, case, to, InRuleAlone(edits, count), "model", at, diagnosis)


OUTPUTS_ALONE: tuple[Fault, ...] = (
    rule("a kernel of FlaxConv1D taken for PyTorch's (square)", "gpt2", HUGGING, "logits", "transposed", ("...E,DE->...D", "...E,ED->...D")),
    rule("output projection transposed (square)", "bert", HUGGING, "logits", "transposed", ("...E,ED->...D", "...E,DE->...D")),
    rule("queries and keys swapped", "bert", HUGGING, "logits", "modules exchanged", ("attention.self.{query,key,value}", "attention.self.{key,query,value}")),
    rule("1+scale on a plain norm", "gpt2", HUGGING, "logits", "1+scale on a plain norm", ("  multiplies_by: scale", "  multiplies_by: 1+scale"), count=1),
    rule("gate and up swapped", "gemma3", HUGGING, "logits", "modules exchanged", ("model.layers.{i}.mlp.{gate,up}_proj", "model.layers.{i}.mlp.{up,gate}_proj")),
    rule("keys and values swapped", "gemma3", HUGGING, "logits", "modules exchanged", ("transformers: model.layers.{i}.self_attn.{k,v}_proj", "transformers: model.layers.{i}.self_attn.{v,k}_proj")),
    rule("RoPE pairs of queries not declared", "rope-model", "torch", "y", "RoPE pairs still interleaved", ("  rope: {H: interleaved}\n  linear: q", "  linear: q")),
    rule("output projection transposed (square)", TWO_FIVE, UPSTREAM, "renormed_outputs", "transposed", ("...NH,NHD->...D", "...D,NHD->...NH")),
    rule("output projection transposed (square)", TWO_FIVE, HUGGING, "renormed_outputs", "transposed", ("...NH,NHD->...D", "...D,NHD->...NH")),
)  # fmt: skip
