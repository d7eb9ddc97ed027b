"""BERT: transformers' flax classes in plain JAX (equations.py), against transformers 5.23 (``models/bert``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from convert.planning.plan import Plan
from convert.references.flax_transformers.bert_and_gpt2_variants import variants
from convert.references.flax_transformers.equations import bert as equations
from convert.references.flax_transformers.transformers_module import TEXT_LENGTH, build, run, text_mask
from convert.references.module_facts import Block
from convert.references.module_facts import facts as common_facts
from convert.references.plan_facts import activation_fact, require_fact, require_model
from convert.references.protocol import Arrays, Reference

OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "bert_masked_lm": ("logits",),
    "bert_pretraining": ("prediction_logits", "seq_relationship_logits"),
    "bert_model": ("last_hidden_state", "pooler_output"),
    "bert_classification": ("logits",),
    "bert_tokens": ("logits",),
    "bert_answers": ("start_logits", "end_logits"),
}
TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def reference(plan: Plan) -> Reference:
    """Return the two models at the size of the plan's checkpoint, for two texts, the second padded at its end.

    Raises:
        ConvertError: the plan is of another model, or lacks a fact.
    """
    require_model(plan, OUTPUTS)
    sizes, outputs = plan.sizes, OUTPUTS[plan.rules.model]
    heads, epsilon = int(require_fact(plan, "num_attention_heads")), float(require_fact(plan, "layer_norm_eps"))
    bare = plan.rules.model == "bert_model"
    model = equations.Bert(sizes["i"], heads, epsilon, activation_fact(plan, "hidden_act"), bare)
    length = min(TEXT_LENGTH, sizes["S"])

    def inputs(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        return {
            "input_ids": rng.integers(0, sizes["V"], (2, length)).astype(np.int32),
            "attention_mask": text_mask(length),
            "token_type_ids": rng.integers(0, sizes["T"], (2, length)).astype(np.int32),
        }

    return Reference(
        inputs=inputs,
        jax=partial(equations.run, model),
        build=partial(build, plan, TIED),
        run=partial(run, outputs, {}),
        outputs=outputs,
        logits=tuple(output for output in outputs if output.endswith("logits")),
        reduction=max(sizes[letter] for letter in "DF"),
        depth=sizes["i"],
        facts=_facts,
        variants=lambda boundary: tuple(variants(heads, sizes["D"], length, boundary)),
    )


def _facts(module: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return what the module is configured to compute."""
    config, names = module.config, dict(module.named_modules())
    prefix = "bert." if "bert" in names else ""
    layers = [f"{prefix}encoder.layer.{i}" for i in range(config.num_hidden_layers)]
    blocks = [Block(layer, f"{layer}.intermediate.dense", f"{layer}.output.dense") for layer in layers]
    head = "cls.predictions.transform"
    blocks += [Block(head, f"{head}.dense", f"{head}.LayerNorm")] if head in names else []
    return {**common_facts(module, blocks), "": {"num_attention_heads": config.num_attention_heads}}
