"""Wrong values that no weight holds: in the rules, given with ``--set``, or stated by the header of the file under test.

The JAX models of Gemma, BERT, GPT-2, T5 and Whisper are built from the same values, so both sides agree.
"""

from __future__ import annotations

from typing import Any

from faults.expected import HUGGING, Fault
from faults.plants import InFacts, InHeader, InSettings

GEMMA_1, GEMMA_2, GEMMA_3 = "gemma1-mha", "gemma2-2b", "gemma3"
LOCAL = "sliding_attention, "
SOUND = "model.encoder."


def rule(name: str, case: str, fact: str, *edits: tuple[str, str], to: str = HUGGING, model: tuple[str, str] | None = None, unstated: tuple[str, ...] = ()) -> Fault:  # fmt: skip
    """A fact of the model, in the rules."""
    return Fault(name, case, to, InFacts(edits, unstated=unstated), "layers", fact, fact, model)


def given(name: str, case: str, trust: tuple[str, ...] = (), to: str = HUGGING, **settings: Any) -> Fault:
    """A value that nothing confirms or contradicts."""
    return Fault(name, case, to, InSettings(settings, trust), "facts", ", ".join(settings), "not verified")


def contradicted(name: str, case: str, **settings: Any) -> Fault:
    """A value that contradicts the config.json of the checkpoint."""
    (fact,) = settings
    return Fault(name, case, HUGGING, InSettings(settings), "layers", fact, fact)


TWO = ("vocab_size", "sliding_window", "query_pre_attn_scalar")
THREE = (*TWO, "rope_factor_global", "context_length")


def others(names: tuple[str, ...], own: str) -> tuple[str, ...]:
    return tuple(name for name in names if name != own)


IN_FACTS: tuple[Fault, ...] = (
    # ---- of the model, in the rules
    rule("soft caps exchanged", GEMMA_2, "attn_logit_softcapping", ("attn_logit_softcapping: 50.0", "attn_logit_softcapping: 30.0"), ("final_logit_softcapping: 30.0", "final_logit_softcapping: 50.0")),
    rule("RoPE base of Gemma 3", GEMMA_2, "rope_theta", ("rope_theta: 10000.0\n      attn", "rope_theta: 1000000.0\n      attn")),
    rule("global layers first", GEMMA_2, "attention_pattern", ("[sliding_attention, full_attention]", "[full_attention, sliding_attention]")),
    rule("every layer global", GEMMA_2, "attention_pattern", ("[sliding_attention, full_attention]", "[full_attention]")),
    rule("pattern of attention types shifted", GEMMA_3, "attention_pattern", (f"[{LOCAL * 5}full_attention]", f"[{LOCAL * 4}full_attention, sliding_attention]")),
    rule("RoPE bases of local and global layers exchanged", GEMMA_3, "rope_theta_local", ("rope_theta_local: 10000.0", "rope_theta_local: 1000000.0"), ("rope_theta_global: 1000000.0", "rope_theta_global: 10000.0")),
    rule("RoPE base of the global layers as for the local ones", GEMMA_3, "rope_theta_global", ("rope_theta_global: 1000000.0", "rope_theta_global: 10000.0")),
    rule("RoPE base of Llama 3", GEMMA_1, "rope_theta", ("context_length: ask\n      rope_theta: 10000.0", "context_length: ask\n      rope_theta: 500000.0")),
    rule("another quantile", "timesfm-2.5", "quantiles", ("0.8, 0.9]", "0.8, 0.95]")),
    rule("another quantile is fed back", "timesfm-2.5", "decode_index", ("decode_index: 5 ", "decode_index: 4 ")),
    rule("context of TimesFM 2.0", "timesfm-2.5", "context_length", ("context_length: 16384", "context_length: 2048")),
    rule("another quantile", "timesfm-1.0", "quantiles", ("0.8, 0.9]", "0.8, 0.95]")),
    rule("epsilon of BERT", "gpt2", "layer_norm_epsilon", ("layer_norm_epsilon: 1e-5", "layer_norm_epsilon: 1e-12"), unstated=("layer_norm_epsilon",)),
    rule("exact GeLU for the approximation", "gpt2", "activation_function", ("activation_function: gelu_new", "activation_function: gelu"), unstated=("activation_function",)),
    rule("epsilon of torch", "bert", "layer_norm_eps", ("layer_norm_eps: 1e-12", "layer_norm_eps: 1e-5"), unstated=("layer_norm_eps",)),
    rule("GeLU's approximation for the exact one", "bert", "hidden_act", ("hidden_act: gelu ", "hidden_act: gelu_new "), unstated=("hidden_act",)),
    rule("distances told apart half as far", "t5", "relative_attention_max_distance", ("max_distance: 128", "max_distance: 64"), unstated=("relative_attention_max_distance",)),
    rule("ReLU for GeLU", "whisper", "activation_function", ("activation_function: gelu\n", "activation_function: relu\n"), unstated=("activation_function",)),
    # ---- of one layer, in its rule: both sides compute something else
    Fault("the rules declare GeLU's approximation for the exact one", "whisper", HUGGING, InFacts((("activation: gelu_erf", "activation: gelu_tanh"),), 1), "model", f"{SOUND}conv1", "activation"),
    Fault("the rules declare GeLU's approximation for the exact one", "bert", HUGGING, InFacts((("activation: $hidden_act", "activation: gelu_tanh"),)), "layers", "bert.encoder.layer.0.intermediate.dense", "activation"),
    Fault("the rules declare another epsilon", "gpt2", HUGGING, InFacts((("  epsilon: $layer_norm_epsilon", "  epsilon: 1e-12"),)), "layers", "transformer.h.0.ln_1", "epsilon"),
    Fault("the rules declare another padding", "whisper", HUGGING, InFacts((("padding: [[1, 1]]\n  strides: 2", "padding: [[2, 0]]\n  strides: 2"),)), "layers", f"{SOUND}conv2", "padding"),
    # ---- given with --set
    given("half the window", GEMMA_2, others(TWO, "sliding_window"), sliding_window=4),
    given("another scale of attention", GEMMA_2, others(TWO, "query_pre_attn_scalar"), query_pre_attn_scalar=12),
    given("twice the window", GEMMA_3, others(THREE, "sliding_window"), sliding_window=16),
    given("positions of global layers not divided", GEMMA_3, others(THREE, "rope_factor_global"), rope_factor_global=1.0),
    given("window one short", "recurrentgemma", ("logits_soft_cap", "activation"), attention_window=4),
    given("soft cap of Gemma 2", "recurrentgemma", ("attention_window", "activation"), logits_soft_cap=30.0),
    given("no positional embedding", "timesfm-1.0", ("context_length",), use_positional_embedding=False),
    given("RoPE base of Gemma 3", GEMMA_2, TWO, rope_theta=1_000_000.0),
    given("soft cap of the logits for that of attention", GEMMA_2, TWO, attn_logit_softcapping=30.0),
    contradicted("epsilon of torch", "bert", layer_norm_eps=1e-5),
    contradicted("twice as many heads", "bert", num_attention_heads=6),
    # ---- stated by the header
    Fault("half the window", GEMMA_2, HUGGING, InHeader({"sliding_window": 4}, others(TWO, "sliding_window")), "facts", "sliding_window", "not verified"),
    Fault("RoPE base of Gemma 3", GEMMA_2, HUGGING, InHeader({"rope_theta": 1_000_000.0}, TWO), "facts", "rope_theta", "not verified"),
)  # fmt: skip
