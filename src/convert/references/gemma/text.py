"""Gemma 1, 2 and 3, text models: gemma's equations in plain JAX; transformers on the other side.

Sources: see `convert.references.gemma.jax_model`; transformers 5.23 (``models/gemma``, ``models/gemma2``, ``models/gemma3``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.errors import ConvertError, UnavailableError
from convert.planning.facts import expand_fact
from convert.planning.plan import Plan
from convert.references.gemma import jax_model
from convert.references.gemma.jax_model import LOGITS, Gemma
from convert.references.gemma.variants import HEAD, TABLE, variants
from convert.references.loading import class_of, config_of, load, on, ready
from convert.references.module_facts import Block
from convert.references.module_facts import facts as common_facts
from convert.references.protocol import Arrays, Reference

if TYPE_CHECKING:
    import torch

MODELS = ("gemma1", "gemma2", "gemma3")
BEYOND = 19  # positions of a sequence beside the window: more than a query sees
NONE = "none"  # what a soft cap is where the configuration has null
UNLIMITED = 27  # length of a sequence where there is no window


def reference(plan: Plan) -> Reference:
    """The two models at the size of the plan's checkpoint: whole sequences, without padding, cache or images.

    Raises:
        ConvertError: the plan is not of Gemma 1, 2 or 3 to transformers, or lacks a fact.
    """
    if plan.rules.model not in MODELS:
        raise ConvertError(f"{plan.rules.path}: rules of {plan.rules.model}, not of {', '.join(MODELS)}")
    if plan.target != "transformers":
        raise ConvertError(
            f"{plan.rules.path}: the reference of gemma knows the target transformers, not {plan.target}"
        )
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
    if name not in plan.facts:
        raise ConvertError(f"{plan.source.path}: the tree does not tell the {name}; say it with --set {name}=...")
    return expand_fact(plan.facts[name], plan.sizes)


def model_of(plan: Plan, generation: str) -> Gemma:
    """What no weight tells of the text model, which is of a generation: ``gemma1``, ``gemma2``, ``gemma3``.

    Raises:
        ConvertError: a fact is not known.
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
    """The transformers model of a Gemma, with or without a tower, as its config.json has it.

    Args:
        table: name of the embedding, which is the head as well where the config ties them.

    Raises:
        UnavailableError: transformers is missing, or too old.
    """
    try:
        import transformers
    except ImportError as error:
        raise UnavailableError(f"target transformers of gemma needs transformers 5.23 or newer ({error})") from error
    config = config_of(plan)
    name, model_type = class_of(plan)
    built = transformers.AutoConfig.for_model(model_type, **config)
    for part in (built, *(getattr(built, key) for key in ("text_config", "vision_config") if hasattr(built, key))):
        part._attn_implementation = "eager"  # the others have no soft cap
    tied = {HEAD: weights[table]} if table in weights and built.tie_word_embeddings else {}
    return load(getattr(transformers, name)(built), {**tied, **weights})


def _run(module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    with ready(module) as (device, _):
        return {LOGITS: module(input_ids=on(device, inputs["tokens"]).long(), use_cache=False).logits}


def _facts(module: Any) -> Mapping[str, Mapping[str, Any]]:
    """What the module is configured to compute."""
    blocks = [
        Block(f"{layer}.mlp", f"{layer}.mlp.gate_proj", f"{layer}.mlp.down_proj", f"{layer}.mlp.up_proj")
        for layer in (f"model.layers.{i}" for i in range(module.config.num_hidden_layers))
    ]
    return {**common_facts(module, blocks), "": config_facts(module.config)}


def config_facts(config: Any) -> dict[str, Any]:
    """What the configuration of a text model says, by the names that the rules have for it."""
    names = (
        "sliding_window",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "vocab_size",
    )
    said = {
        name: NONE if getattr(config, name) is None else getattr(config, name)
        for name in names
        if hasattr(config, name)
    }
    rope = config.rope_parameters
    if "rope_theta" in rope:
        said["rope_theta"] = rope["rope_theta"]
    else:
        said["rope_theta_local"] = rope["sliding_attention"]["rope_theta"]
        said["rope_theta_global"] = rope["full_attention"]["rope_theta"]
        said["rope_factor_global"] = rope["full_attention"].get("factor", 1.0)
    return said
