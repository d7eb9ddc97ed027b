"""Text models Gemma 1, 2 and 3: gemma's equations in plain JAX (jax_model.py), against transformers 5.23 (``models/gemma*``)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.planning.facts.values import expand_fact
from convert.planning.plan import Plan
from convert.references.gemma import jax_model
from convert.references.gemma.jax_model import LOGITS, Gemma
from convert.references.gemma.variants import HEAD, TABLE, variants
from convert.references.loading import class_of, config_of, load, on, ready
from convert.references.module_facts import Block
from convert.references.module_facts import facts as common_facts
from convert.references.plan_facts import not_installed, require_fact, require_model
from convert.references.protocol import Arrays, Reference

if TYPE_CHECKING:
    import torch

MODELS = ("gemma1", "gemma2", "gemma3")
INSTALL = "pip install 'transformers>=5.23'"
BEYOND = 19  # positions of a sequence in addition to the window, so that no query sees all
NONE = "none"  # value of the fact where the configuration of a soft cap is null
UNLIMITED = 27  # length of a sequence if there is no window


def reference(plan: Plan) -> Reference:
    """Return the two models at the size of the plan's checkpoint, for whole sequences without padding, cache or images.

    Raises:
        ConvertError: the plan is not of Gemma 1, 2 or 3 to transformers, or lacks a fact.
    """
    require_model(plan, MODELS, ("transformers",))
    model = model_of(plan, plan.rules.model)
    steps = max((window + BEYOND for window in model.windows if window is not None), default=UNLIMITED)

    def inputs(seed: int) -> Arrays:
        # 0 is padding, which upstream masks
        return {"tokens": np.random.default_rng(seed).integers(1, model.vocabulary, (2, steps)).astype(np.int32)}

    return Reference(
        inputs=inputs,
        jax=partial(_jax, model),
        build=partial(build, plan),
        run=_run,
        outputs=(LOGITS,),
        logits=(LOGITS,),
        reduction=max(plan.sizes[letter] for letter in "DF"),
        depth=plan.sizes["i"],
        facts=_facts,
        variants=partial(variants, plan, model, steps),
    )


def _fact(plan: Plan, name: str) -> Any:
    """Return a fact; a list for all layers where the fact repeats."""
    return expand_fact(require_fact(plan, name), plan.sizes)


def model_of(plan: Plan, generation: str) -> Gemma:
    """Return the hyperparameters of the text model.

    Args:
        generation: ``gemma1``, ``gemma2`` or ``gemma3``.

    Raises:
        ConvertError: a fact is unknown.
    """
    layers = plan.sizes["i"]
    rest = (int(_fact(plan, "vocab_size")), plan.choices.get("gating") == "FD")
    if generation == "gemma1":
        base, scale = float(_fact(plan, "rope_theta")), plan.sizes["H"] ** -0.5
        return Gemma([base] * layers, [1.0] * layers, [None] * layers, scale, None, None, *rest)
    types = _fact(plan, "attention_pattern")
    sliding = [word == "sliding_attention" for word in types]
    window = int(_fact(plan, "sliding_window"))
    windows = [window if near else None for near in sliding]
    scale = float(_fact(plan, "query_pre_attn_scalar")) ** -0.5
    if generation == "gemma2":
        near, far = (_cap(_fact(plan, name)) for name in ("attn_logit_softcapping", "final_logit_softcapping"))
        return Gemma([float(_fact(plan, "rope_theta"))] * layers, [1.0] * layers, windows, scale, near, far, *rest)
    near_base, far_base, factor = (float(_fact(plan, name)) for name in ("rope_theta_local", "rope_theta_global", "rope_factor_global"))  # fmt: skip
    bases = [near_base if near else far_base for near in sliding]
    return Gemma(bases, [1.0 if near else factor for near in sliding], windows, scale, None, None, *rest)


def _cap(value: Any) -> float | None:
    return None if value is None else float(value)


def _jax(model: Gemma, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> OrderedDict[str, Any]:
    return jax_model.run(model, weights, inputs["tokens"])


def build(plan: Plan, weights: Mapping[str, torch.Tensor], table: str = TABLE) -> torch.nn.Module:
    """Build transformers' model of a Gemma, with or without a vision tower, by its config.json.

    Args:
        table: name of the embedding; it is the head as well if the config ties them.

    Raises:
        UnavailableError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise not_installed("transformers", error, INSTALL) from error
    config = config_of(plan)
    name, model_type = class_of(plan)
    built = transformers.AutoConfig.for_model(model_type, **config)
    for part in (built, *(getattr(built, key) for key in ("text_config", "vision_config") if hasattr(built, key))):
        part._attn_implementation = "eager"  # other implementations have no soft cap
    tied = {HEAD: weights[table]} if table in weights and built.tie_word_embeddings else {}
    return load(getattr(transformers, name)(built), {**tied, **weights})


def _run(module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    with ready(module) as (device, _):
        return {LOGITS: module(input_ids=on(device, inputs["tokens"]).long(), use_cache=False).logits}


def _facts(module: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return what the module is configured to compute."""
    blocks = [
        Block(f"{layer}.mlp", f"{layer}.mlp.gate_proj", f"{layer}.mlp.down_proj", f"{layer}.mlp.up_proj")
        for layer in (f"model.layers.{i}" for i in range(module.config.num_hidden_layers))
    ]
    return {**common_facts(module, blocks), "": config_facts(module.config)}


def config_facts(config: Any) -> dict[str, Any]:
    """Return the facts in the configuration of a text model, by their names in rules."""
    names = (
        "sliding_window",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "vocab_size",
    )
    facts = {
        name: NONE if getattr(config, name) is None else getattr(config, name)
        for name in names
        if hasattr(config, name)
    }
    rope = config.rope_parameters
    if "rope_theta" in rope:
        facts["rope_theta"] = rope["rope_theta"]
    else:
        facts["rope_theta_local"] = rope["sliding_attention"]["rope_theta"]
        facts["rope_theta_global"] = rope["full_attention"]["rope_theta"]
        facts["rope_factor_global"] = rope["full_attention"].get("factor", 1.0)
    return facts
