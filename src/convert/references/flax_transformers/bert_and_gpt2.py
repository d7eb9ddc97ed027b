"""BERT and GPT-2 of transformers' flax classes: their equations in plain JAX; transformers on the other side.

Sources: see `convert.references.flax_transformers.bert_jax` and `gpt2_jax`; transformers 5.23 (``models/bert``, ``models/gpt2``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.errors import ConvertError, UnavailableError
from convert.layers.shared_keys import ACTIVATION_NAMES
from convert.planning.plan import Plan
from convert.references.flax_transformers import bert_jax, gpt2_jax
from convert.references.flax_transformers.variants import variants
from convert.references.loading import class_of, config_of, load, on, ready
from convert.references.module_facts import Block
from convert.references.module_facts import facts as common_facts
from convert.references.protocol import Arrays, Reference

if TYPE_CHECKING:
    import torch

OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "bert_masked_lm": ("logits",),
    "bert_pretraining": ("prediction_logits", "seq_relationship_logits"),
    "bert_model": ("last_hidden_state", "pooler_output"),
    "bert_classification": ("logits",),
    "bert_tokens": ("logits",),
    "bert_answers": ("start_logits", "end_logits"),
    "gpt2_lm": ("logits",),
    "gpt2_lm_untied": ("logits",),
    "gpt2_model": ("last_hidden_state",),
}
LENGTH = 29  # of the texts, where there are as many positions
PADDED = 4  # positions at the end of the second text
# Settings of how the same function is computed, which refuse float64 (the first) or some lengths: models run without them.
RUNNING: Mapping[str, Any] = {"reorder_and_upcast_attn": False, "chunk_size_feed_forward": 0}
# Of a module whose weight is another's: transformers' state_dict has both.
TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.weight": "transformer.wte.weight",
}


def reference(plan: Plan) -> Reference:
    """The two models at the size of the plan's checkpoint: two texts, the second padded at its end.

    Raises:
        ConvertError: the plan is of another model, or lacks a fact.
    """
    name = plan.rules.model
    if name not in OUTPUTS:
        raise ConvertError(f"{plan.rules.path}: rules of {name}, not of {', '.join(OUTPUTS)}")
    bert = name.startswith("bert")
    sizes, outputs = plan.sizes, OUTPUTS[name]
    length = min(LENGTH, sizes["S"])
    heads = int(fact(plan, "num_attention_heads" if bert else "n_head"))

    def inputs(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        mask = np.ones((2, length), np.int32)
        mask[1, -PADDED:] = 0
        given = {"input_ids": rng.integers(0, sizes["V"], (2, length)).astype(np.int32), "attention_mask": mask}
        types = {"token_type_ids": rng.integers(0, sizes["T"], (2, length)).astype(np.int32)} if bert else {}
        return {**given, **types}

    return Reference(
        inputs=inputs,
        jax=_bert(plan) if bert else _gpt2(plan),
        build=partial(build, plan, TIED),
        run=partial(run, outputs, {} if bert else {"use_cache": False}),
        outputs=outputs,
        logits=tuple(output for output in outputs if output.endswith("logits")),
        reduction=max(sizes[letter] for letter in "DF"),
        depth=sizes["i"],
        facts=partial(_facts, bert=bert),
        variants=lambda boundary: tuple(variants(heads, sizes["D"], length, boundary)),
    )


def fact(plan: Plan, name: str) -> Any:
    """A fact of the plan.

    Raises:
        ConvertError: nobody told it.
    """
    if name not in plan.facts:
        raise ConvertError(f"{plan.source.called}: the tree does not tell the {name}; say it with --set {name}=...")
    return plan.facts[name]


def activation(plan: Plan, name: str) -> str:
    """The activation that a fact names, by its name in a rule."""
    said = str(fact(plan, name))
    return ACTIVATION_NAMES.get(said, said)


def _bert(plan: Plan) -> Callable[..., Any]:
    heads, epsilon = int(fact(plan, "num_attention_heads")), float(fact(plan, "layer_norm_eps"))
    bare = plan.rules.model == "bert_model"
    return partial(bert_jax.run, bert_jax.Bert(plan.sizes["i"], heads, epsilon, activation(plan, "hidden_act"), bare))


def _gpt2(plan: Plan) -> Callable[..., Any]:
    heads, epsilon = int(fact(plan, "n_head")), float(fact(plan, "layer_norm_epsilon"))
    module = "" if plan.rules.model == "gpt2_model" else "transformer."
    act = activation(plan, "activation_function")
    return partial(gpt2_jax.run, gpt2_jax.GPT2(plan.sizes["i"], heads, epsilon, act, module))


def build(plan: Plan, tied: Mapping[str, str], weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """transformers' module of the plan's configuration, with these weights.

    Args:
        tied: names in its state_dict of weights that are others', with those.

    Raises:
        UnavailableError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UnavailableError(f"target transformers of {plan.rules.model} needs transformers 5.23 or newer ({error})") from error  # fmt: skip
    name, model_type = class_of(plan)
    built = transformers.AutoConfig.for_model(model_type, **config_of(plan))
    built._attn_implementation = "eager"
    for setting, off in RUNNING.items():
        if hasattr(built, setting):
            setattr(built, setting, off)
    module = getattr(transformers, name)(built)
    shared = {key: weights[of] for key, of in tied.items() if key in module.state_dict() and key not in weights}
    return load(module, {**shared, **weights})


def run(outputs: tuple[str, ...], extra: Mapping[str, Any], module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What the module gives for these inputs; `extra` goes along."""
    with ready(module) as (device, _):
        given = {name: on(device, value) for name, value in inputs.items()}
        made = module(**{name: x if x.is_floating_point() else x.long() for name, x in given.items()}, **extra)
    return {name: made[name] for name in outputs}


def _facts(module: Any, *, bert: bool) -> Mapping[str, Mapping[str, Any]]:
    """What the module is configured to compute."""
    config, names = module.config, dict(module.named_modules())
    if bert:
        prefix = "bert." if "bert" in names else ""
        blocks = [
            Block(layer, f"{layer}.intermediate.dense", f"{layer}.output.dense")
            for layer in (f"{prefix}encoder.layer.{i}" for i in range(config.num_hidden_layers))
        ]
        head = "cls.predictions.transform"
        blocks += [Block(head, f"{head}.dense", f"{head}.LayerNorm")] if head in names else []
        return {**common_facts(module, blocks), "": {"num_attention_heads": config.num_attention_heads}}
    prefix = "transformer." if "transformer" in names else ""
    blocks = [
        Block(mlp, f"{mlp}.c_fc", f"{mlp}.c_proj") for mlp in (f"{prefix}h.{i}.mlp" for i in range(config.n_layer))
    ]
    return {**common_facts(module, blocks), "": {"n_head": config.n_head}}
