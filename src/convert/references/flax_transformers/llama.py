"""Llama, Mistral, Gemma: transformers' flax classes in plain JAX (equations.py), against transformers 5.23."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from convert.planning.plan import Plan
from convert.references.flax_transformers.equations import llama as equations
from convert.references.flax_transformers.transformers_module import TEXT_LENGTH, build, run, text_mask
from convert.references.module_facts import Block
from convert.references.module_facts import facts as common_facts
from convert.references.plan_facts import activation_fact, require_fact, require_model
from convert.references.protocol import INPUT, Arrays, Observed, Reference, Variant
from convert.references.variants import (
    BASES,
    Attention,
    attention_variants,
    embedding_variants,
    gated_variants,
    rope,
    rope_fix,
)

BIASED = ("llama_lm", "llama_model", "gemma_flax", "gemma_flax_untied", "gemma_flax_model")  # or without biases
MODELS = (*BIASED, *(f"{model}_biased" for model in BIASED), "mistral_lm", "mistral_model")
TABLE = "embed_tokens.weight"
_Array = np.ndarray[Any, Any]
_Turn = Callable[[_Array], _Array]
_Turns = Mapping[str, _Turn]  # part -> its rotation


def reference(plan: Plan) -> Reference:
    """Return the two models at the size of the plan's checkpoint, for two texts, the second padded at its end.

    Raises:
        ConvertError: the plan is of another model, or lacks a fact.
    """
    require_model(plan, MODELS)
    family, sizes = plan.rules.model.partition("_")[0], plan.sizes
    headless = plan.rules.model.removesuffix("_biased").endswith("_model")
    gemma = family == "gemma"
    window = int(require_fact(plan, "sliding_window")) if family == "mistral" else None
    model = equations.Decoder(
        sizes["i"],
        int(require_fact(plan, "num_attention_heads")),
        int(require_fact(plan, "num_key_value_heads")),
        float(require_fact(plan, "rms_norm_eps")),
        activation_fact(plan, "hidden_activation" if gemma else "hidden_act"),
        1 if gemma else 0,
        gemma,
        window,
        "" if headless else "model.",
    )
    length = TEXT_LENGTH + (window or 0)  # some queries see less than all
    outputs = ("last_hidden_state",) if headless else ("logits",)

    def inputs(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        return {
            "input_ids": rng.integers(1, sizes["V"], (2, length)).astype(np.int32),
            "attention_mask": text_mask(length),
        }

    return Reference(
        inputs=inputs,
        jax=partial(equations.run, model),
        build=partial(build, plan, {"lm_head.weight": f"model.{TABLE}"} if family == "gemma" else {}),
        run=partial(run, outputs, {"use_cache": False}),
        outputs=outputs,
        logits=tuple(output for output in outputs if output == "logits"),
        reduction=max(sizes[letter] for letter in "DF"),
        depth=sizes["i"],
        facts=_facts,
        variants=lambda boundary: tuple(_variants(model, length, boundary)),
    )


def _facts(module: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return what the module is configured to compute."""
    config = module.config
    prefix = "model." if "model" in dict(module.named_children()) else ""
    mlps = [f"{prefix}layers.{i}.mlp" for i in range(config.num_hidden_layers)]
    blocks = [Block(mlp, f"{mlp}.gate_proj", f"{mlp}.down_proj", f"{mlp}.up_proj") for mlp in mlps]
    whole = {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads")}
    return {**common_facts(module, blocks), "": {**whole, "rope_theta": config.rope_parameters["rope_theta"]}}


def _variants(model: equations.Decoder, steps: int, name: str) -> Iterator[Variant]:
    """Yield the functions between layers, with known mistakes; see `Reference.variants`."""
    if name == f"{model.prefix}embed_tokens" and model.scaled:
        yield from embedding_variants(f"{model.prefix}{TABLE}")
    layer, _, inner = name.rpartition(".mlp.")
    if inner == f"down_proj{INPUT}":
        gate, up = f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"
        yield from gated_variants(lambda seen: seen.values[gate], lambda seen: seen.values[up], model.activation)
    block, _, inner = name.rpartition(".")
    if inner != f"o_proj{INPUT}":
        return
    meant = Attention(window=None if model.window is None else model.window + 1)

    def attended(turns: _Turns, spread: _Turn) -> Iterator[Variant]:
        def part(seen: Observed, which: str) -> _Array:
            x = seen.values[f"{block}.{which}_proj"]
            x = x.reshape(*x.shape[:2], model.heads if which == "q" else model.groups, -1)
            x = turns[which](x) if which in turns else x
            return x if which == "q" else spread(x)

        def finish(seen: Observed, probabilities: _Array) -> _Array:
            out = np.einsum("bhqk,bkhd->bqhd", probabilities, part(seen, "v"))
            return np.asarray(out.reshape(*out.shape[:2], -1))

        yield from attention_variants(
            lambda seen, _: part(seen, "q") * part(seen, "q").shape[-1] ** -0.5,
            lambda seen: part(seen, "k"),
            finish,
            lambda seen: np.asarray(seen.inputs["attention_mask"]) == 0,
            steps,
            meant=meant,
        )

    def in_groups(x: _Array) -> _Array:
        return np.repeat(x, model.heads // model.groups, axis=2)

    def in_turns(x: _Array) -> _Array:
        return np.tile(x, (1, 1, model.heads // model.groups, 1))

    right, *wrong = _ropes().items()
    yield from attended(right[1], in_groups)
    fix = rope_fix(equations.BASE)
    yield from (Variant(name, next(attended(turns, in_groups)).make, fix=fix) for name, turns in wrong)
    if model.groups not in (1, model.heads):
        yield Variant("key heads in turns, not in groups", next(attended(right[1], in_turns)).make)


def _ropes() -> Mapping[str, _Turns]:
    """Return how queries and keys may be rotated; the first is correct."""

    def turned(base: float = equations.BASE, pairing: str = "half-split", sign: int = 1) -> _Turn:
        return lambda x: rope(x, sign * np.arange(x.shape[1])[None], base, pairing)

    ropes: dict[str, _Turns] = {
        "half-split RoPE": {"q": turned(), "k": turned()},
        "keys without RoPE": {"q": turned()},
        "queries without RoPE": {"k": turned()},
        "no RoPE": {},
    }
    others = {
        "interleaved RoPE": turned(pairing="interleaved"),
        "RoPE turned backwards": turned(sign=-1),
        **{f"RoPE with base {base:g}": turned(base) for base in BASES if base != equations.BASE},
    }
    return ropes | {name: {"q": turn, "k": turn} for name, turn in others.items()}
