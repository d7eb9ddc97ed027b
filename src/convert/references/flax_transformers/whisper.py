"""Whisper: transformers' flax classes in plain JAX (equations.py), against transformers 5.23 (``models/whisper``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from convert.planning.plan import Plan
from convert.references.flax_transformers.equations import whisper as equations
from convert.references.flax_transformers.t5_and_whisper_variants import WhisperSizes, whisper_variants
from convert.references.flax_transformers.transformers_module import TEXT_LENGTH, build, run
from convert.references.module_facts import Block
from convert.references.module_facts import facts as common_facts
from convert.references.plan_facts import activation_fact, require_fact, require_model
from convert.references.protocol import Arrays, Reference

OUTPUTS = ("logits",)
HEADS = ("encoder_attention_heads", "decoder_attention_heads")
TIED = {"proj_out.weight": "model.decoder.embed_tokens.weight"}


def reference(plan: Plan) -> Reference:
    """Return the two models at the size of the plan's checkpoint, for two sounds that fill all positions and two texts.

    Raises:
        ConvertError: the plan is of another model, or lacks a fact.
    """
    require_model(plan, ("whisper",))
    sizes = plan.sizes
    encoder_heads, decoder_heads = (int(require_fact(plan, name)) for name in HEADS)
    activation = activation_fact(plan, "activation_function")
    epsilon = float(require_fact(plan, "epsilon"))
    model = equations.Whisper(sizes["i"], sizes["j"], encoder_heads, decoder_heads, epsilon, activation)
    length = min(TEXT_LENGTH, sizes["S"])

    def inputs(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        sound = rng.normal(size=(2, sizes["M"], 2 * sizes["P"])).astype(np.float32)
        return {"input_features": sound, "decoder_input_ids": rng.integers(0, sizes["V"], (2, length)).astype(np.int32)}

    return Reference(
        inputs=inputs,
        jax=partial(equations.run, model),
        build=partial(build, plan, TIED),
        run=partial(run, OUTPUTS, {"use_cache": False}),
        outputs=OUTPUTS,
        logits=OUTPUTS,
        reduction=max(sizes["K"] * sizes["D"], sizes["F"], sizes["G"]),
        depth=model.encoder + model.decoder,
        facts=_facts,
        variants=partial(whisper_variants, WhisperSizes(encoder_heads, decoder_heads, sizes["D"])),
    )


def _facts(module: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return what the module is configured to compute."""
    config = module.config
    layers = [
        f"model.{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(getattr(config, f"{side}_layers"))
    ]
    blocks = [Block(layer, f"{layer}.fc1", f"{layer}.fc2") for layer in layers]
    return {**common_facts(module, blocks), "": {name: getattr(config, name) for name in HEADS}}
