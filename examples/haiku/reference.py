"""The two models for `convert check --reference reference:reference`; the protocol is in docs/guides/check.md."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import haiku as hk
import jax
import model_jax
import model_torch
import numpy as np
import torch

from convert import Plan, Reference


def reference(plan: Plan, gru: type[torch.nn.Module] = model_torch.GRU) -> Reference:
    return Reference(
        inputs=lambda seed: {"tokens": np.random.default_rng(seed).integers(0, model_jax.VOCABULARY, (3, 7))},
        jax=jax_side,
        build=partial(build, gru),
        run=lambda module, inputs: {"logits": module(inputs["tokens"])},
        outputs=("logits",),
        reduction=model_jax.WIDTH + model_jax.FIRST,  # the longest sum: a gate's input and state
        depth=3,
    )


def wrong(plan: Plan) -> Reference:
    """The target has torch.nn.GRU, whose weights have the same names and shapes."""
    return reference(plan, torch.nn.GRU)


def jax_side(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Values at the boundaries, called as PyTorch calls its modules and in the order of the data, then the output."""
    params: dict[str, dict[str, Any]] = {}
    for name, value in weights.items():
        module, _, leaf = name.rpartition("/")
        params.setdefault(module, {})[leaf] = value
    values = {}

    def keep(call: Any, args: Any, kwargs: Any, context: hk.MethodContext) -> Any:
        result = call(*args, **kwargs)
        name = context.module.name
        if isinstance(context.module, hk.LayerNorm):  # what a recurrence gives is what the norm behind it is given
            values[name.removesuffix("_norm")] = args[0]
        if name in ("embed", "lstm_norm", "gru_norm", "labels"):  # what runs inside the scan has no value outside
            values[name] = result
        return result

    with hk.intercept_methods(keep):
        logits = model_jax.model.apply(params, inputs["tokens"])
    return {**values, "logits": logits}


def build(gru: type[torch.nn.Module], weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    module = model_torch.Tagger(gru)
    module.load_state_dict(dict(weights), strict=True, assign=True)
    return module.eval()
