"""T5 and Whisper of transformers' flax classes: their equations in plain JAX; transformers on the other side.

Sources: see `convert.references.flax_transformers.t5_jax` and `whisper_jax`; transformers 5.23 (``models/t5``, ``models/whisper``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.planning.plan import Plan
from convert.references.flax_transformers import t5_jax, whisper_jax
from convert.references.flax_transformers.bert_and_gpt2 import LENGTH, PADDED, activation, build, fact, run
from convert.references.flax_transformers.encoder_decoder_variants import (
    T5Sizes,
    WhisperSizes,
    t5_variants,
    whisper_variants,
)
from convert.references.module_facts import Block
from convert.references.module_facts import facts as common_facts
from convert.references.protocol import Arrays, Reference

OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "t5_tied": ("logits",),
    "t5_untied": ("logits",),
    "t5_encoder": ("last_hidden_state",),
    "whisper": ("logits",),
}
LONGEST = 256  # of T5's texts, where distances share a bucket from far away on
WORDS = "shared.weight"
TIED_T5 = {"encoder.embed_tokens.weight": WORDS, "decoder.embed_tokens.weight": WORDS, "lm_head.weight": WORDS}
TIED_WHISPER = {"proj_out.weight": "model.decoder.embed_tokens.weight"}


def reference(plan: Plan) -> Reference:
    """The two models at the size of the plan's checkpoint.

    T5: two texts and two answers, of different lengths, longer than its distances are told apart, the second padded at its end.
    Whisper: two sounds as long as there are positions, and two texts.

    Raises:
        ConvertError: the plan is of another model, or lacks a fact.
    """
    name = plan.rules.model
    if name not in OUTPUTS:
        raise ConvertError(f"{plan.rules.path}: rules of {name}, not of {', '.join(OUTPUTS)}")
    return _whisper(plan) if name == "whisper" else _t5(plan)


def _t5(plan: Plan) -> Reference:
    sizes, outputs = plan.sizes, OUTPUTS[plan.rules.model]
    decodes = plan.rules.model != "t5_encoder"
    furthest, gate = int(fact(plan, "relative_attention_max_distance")), activation(plan, "feed_forward_proj")
    epsilon = float(fact(plan, "layer_norm_epsilon"))
    length = min(furthest + 6, LONGEST)
    gated = any(leaf.endswith("/DenseReluDense/wi_0/kernel") for leaf in plan.source.leaves)
    model = t5_jax.T5(sizes["i"], sizes["j"] if decodes else 0, sizes["N"], epsilon, gate, furthest)

    def inputs(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        given: dict[str, Any] = {}
        for side, steps in (("", length), ("decoder_", length - 2))[: 1 + decodes]:
            mask = np.ones((2, steps), np.int32)
            mask[1, -PADDED:] = 0
            given[f"{side}input_ids"] = rng.integers(0, sizes["V"], (2, steps)).astype(np.int32)
            given[f"{side}attention_mask"] = mask
        return given

    return Reference(
        inputs=inputs,
        jax=partial(t5_jax.run, model),
        build=partial(build, plan, TIED_T5),
        run=partial(run, outputs, {"use_cache": False} if decodes else {}),
        outputs=outputs,
        logits=("logits",) if decodes else (),
        reduction=max(sizes[letter] for letter in "DEF"),
        depth=model.encoder + model.decoder,
        facts=_t5_facts,
        variants=partial(
            t5_variants,
            T5Sizes(sizes["N"], sizes["E"], sizes["D"], furthest, gate if gated else "", plan.rules.model == "t5_tied"),
        ),
    )


def _t5_facts(module: Any) -> Mapping[str, Mapping[str, Any]]:
    """What the module is configured to compute."""
    blocks = []
    for name, submodule in module.named_modules():
        if name.endswith(".DenseReluDense"):
            gated = hasattr(submodule, "wi_0")
            before = f"{name}.wi_0" if gated else f"{name}.wi"
            blocks.append(Block(name, before, f"{name}.wo", f"{name}.wi_1" if gated else ""))
    said = {"relative_attention_max_distance": module.config.relative_attention_max_distance}
    return {**common_facts(module, blocks), "": said}


def _whisper(plan: Plan) -> Reference:
    sizes, outputs = plan.sizes, OUTPUTS["whisper"]
    heads = int(fact(plan, "encoder_attention_heads")), int(fact(plan, "decoder_attention_heads"))
    act = activation(plan, "activation_function")
    length = min(LENGTH, sizes["S"])
    model = whisper_jax.Whisper(sizes["i"], sizes["j"], *heads, float(fact(plan, "epsilon")), act)

    def inputs(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        sound = rng.normal(size=(2, sizes["M"], 2 * sizes["P"])).astype(np.float32)
        return {"input_features": sound, "decoder_input_ids": rng.integers(0, sizes["V"], (2, length)).astype(np.int32)}

    return Reference(
        inputs=inputs,
        jax=partial(whisper_jax.run, model),
        build=partial(build, plan, TIED_WHISPER),
        run=partial(run, outputs, {"use_cache": False}),
        outputs=outputs,
        logits=outputs,
        reduction=max(sizes["K"] * sizes["D"], sizes["F"], sizes["G"]),
        depth=model.encoder + model.decoder,
        facts=_whisper_facts,
        variants=partial(whisper_variants, WhisperSizes(*heads, sizes["D"])),
    )


def _whisper_facts(module: Any) -> Mapping[str, Mapping[str, Any]]:
    """What the module is configured to compute."""
    config = module.config
    layers = [
        f"model.{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(getattr(config, f"{side}_layers"))
    ]
    blocks = [Block(layer, f"{layer}.fc1", f"{layer}.fc2") for layer in layers]
    names = ("encoder_attention_heads", "decoder_attention_heads")
    return {**common_facts(module, blocks), "": {name: getattr(config, name) for name in names}}
