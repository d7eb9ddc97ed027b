"""T5 1.0 and 1.1: transformers' flax classes in plain JAX (equations.py), against transformers 5.23 (``models/t5``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from convert.planning.plan import Plan
from convert.references.flax_transformers.equations import t5 as equations
from convert.references.flax_transformers.t5_and_whisper_variants import T5Sizes, t5_variants
from convert.references.flax_transformers.transformers_module import build, run, text_mask
from convert.references.module_facts import Block
from convert.references.module_facts import facts as common_facts
from convert.references.plan_facts import activation_fact, require_fact, require_model
from convert.references.protocol import Arrays, Reference

LOGITS = ("logits",)
OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "t5_tied": LOGITS,
    "t5_untied": LOGITS,
    "t5_model": ("last_hidden_state",),
    "t5_encoder": ("last_hidden_state",),
}
BEYOND = 6  # tokens behind the distance from which on all share a bucket
MAX_LENGTH = 256  # of a text
TABLE = "shared.weight"
TIED = {"encoder.embed_tokens.weight": TABLE, "decoder.embed_tokens.weight": TABLE, "lm_head.weight": TABLE}


def reference(plan: Plan) -> Reference:
    """Return the two models at the size of the plan's checkpoint, for two texts and two answers.

    They have different lengths, are longer than the largest distance with a bucket of its own, and the second of each is
    padded at its end.

    Raises:
        ConvertError: the plan is of another model, or lacks a fact.
    """
    require_model(plan, OUTPUTS)
    return encoder_decoder(plan, OUTPUTS[plan.rules.model], plan.rules.model != "t5_encoder", plan.rules.model == "t5_tied", lambda w: w)  # fmt: skip


def encoder_decoder(
    plan: Plan,
    outputs: tuple[str, ...],
    decodes: bool,
    scales_head: bool,
    leaves: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> Reference:
    """Return the two models of any T5.

    Args:
        plan: of the checkpoint.
        outputs: of the PyTorch class.
        decodes: whether it has a decoder.
        scales_head: whether the head's input is divided by sqrt(width).
        leaves: names the checkpoint's leaves as transformers' flax classes do.
    """
    sizes = plan.sizes
    furthest = int(require_fact(plan, "relative_attention_max_distance"))
    gate, epsilon = activation_fact(plan, "feed_forward_proj"), float(require_fact(plan, "layer_norm_epsilon"))
    length = min(furthest + BEYOND, MAX_LENGTH)
    gated = any(leaf.removesuffix("/value").endswith("/wi_0/kernel") for leaf in plan.source.leaves)
    model = equations.T5(
        sizes["i"], sizes["j"] if decodes else 0, sizes["N"], epsilon, gate, furthest, outputs == LOGITS, scales_head
    )

    def inputs(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        given: dict[str, Any] = {}
        for side, steps in (("", length), ("decoder_", length - 2))[: 1 + decodes]:
            given[f"{side}input_ids"] = rng.integers(0, sizes["V"], (2, steps)).astype(np.int32)
            given[f"{side}attention_mask"] = text_mask(steps)
        return given

    return Reference(
        inputs=inputs,
        jax=lambda weights, inputs: equations.run(model, leaves(weights), inputs),
        build=partial(build, plan, TIED),
        run=partial(run, outputs, {"use_cache": False} if decodes else {}),
        outputs=outputs,
        logits=LOGITS if outputs == LOGITS else (),
        reduction=max(sizes[letter] for letter in "DEF"),
        depth=model.encoder + model.decoder,
        facts=_facts,
        variants=partial(
            t5_variants, T5Sizes(sizes["N"], sizes["E"], sizes["D"], furthest, gate if gated else "", scales_head)
        ),
    )


def _facts(module: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return what the module is configured to compute."""
    blocks = []
    for name, submodule in module.named_modules():
        if name.endswith(".DenseReluDense"):
            gated = hasattr(submodule, "wi_0")
            before = f"{name}.wi_0" if gated else f"{name}.wi"
            blocks.append(Block(name, before, f"{name}.wo", f"{name}.wi_1" if gated else ""))
    furthest = {"relative_attention_max_distance": module.config.relative_attention_max_distance}
    return {**common_facts(module, blocks), "": furthest}
