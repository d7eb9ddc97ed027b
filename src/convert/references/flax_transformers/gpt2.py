"""GPT-2: transformers' flax classes in plain JAX (equations.py), against transformers 5.23 (``models/gpt2``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from convert.planning.plan import Plan
from convert.references.flax_transformers.bert_and_gpt2_variants import variants
from convert.references.flax_transformers.equations import gpt2 as equations
from convert.references.flax_transformers.transformers_module import TEXT_LENGTH, build, run, text_mask
from convert.references.module_facts import Block
from convert.references.module_facts import facts as common_facts
from convert.references.plan_facts import activation_fact, require_fact, require_model
from convert.references.protocol import Arrays, Reference

OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "gpt2_lm": ("logits",),
    "gpt2_lm_untied": ("logits",),
    "gpt2_model": ("last_hidden_state",),
}
TIED = {"lm_head.weight": "transformer.wte.weight"}


def reference(plan: Plan) -> Reference:
    """Return the two models at the size of the plan's checkpoint, for two texts, the second padded at its end.

    Raises:
        ConvertError: the plan is of another model, or lacks a fact.
    """
    require_model(plan, OUTPUTS)
    sizes, outputs = plan.sizes, OUTPUTS[plan.rules.model]
    heads, epsilon = int(require_fact(plan, "n_head")), float(require_fact(plan, "layer_norm_epsilon"))
    prefix = "" if plan.rules.model == "gpt2_model" else "transformer."
    model = equations.GPT2(sizes["i"], heads, epsilon, activation_fact(plan, "activation_function"), prefix)
    length = min(TEXT_LENGTH, sizes["S"])

    def inputs(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        return {
            "input_ids": rng.integers(0, sizes["V"], (2, length)).astype(np.int32),
            "attention_mask": text_mask(length),
        }

    return Reference(
        inputs=inputs,
        jax=partial(equations.run, model),
        build=partial(build, plan, TIED),
        run=partial(run, outputs, {"use_cache": False}),
        outputs=outputs,
        logits=tuple(output for output in outputs if output == "logits"),
        reduction=max(sizes[letter] for letter in "DF"),
        depth=sizes["i"],
        facts=_facts,
        variants=lambda boundary: tuple(variants(heads, sizes["D"], length, boundary)),
    )


def _facts(module: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return what the module is configured to compute."""
    config = module.config
    prefix = "transformer." if "transformer" in dict(module.named_modules()) else ""
    mlps = [f"{prefix}h.{i}.mlp" for i in range(config.n_layer)]
    blocks = [Block(mlp, f"{mlp}.c_fc", f"{mlp}.c_proj") for mlp in mlps]
    return {**common_facts(module, blocks), "": {"n_head": config.n_head}}
