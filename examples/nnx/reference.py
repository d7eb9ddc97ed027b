"""The two models for `convert check --reference reference:reference`; the protocol is in docs/guides/check.md."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import model_jax
import model_torch
import numpy as np
import torch
from flax import nnx

from convert import Plan, Reference, fill_pytree
from convert.references.module_facts import facts


def reference(plan: Plan, eps: float | None = 1e-6) -> Reference:
    return Reference(
        inputs=lambda seed: {"tokens": np.random.default_rng(seed).integers(0, plan.sizes["V"], (3, 7))},
        jax=partial(jax_side, nnx.eval_shape(lambda: model_jax.Decoder(nnx.Rngs(0)))),
        build=partial(build, eps),
        run=lambda module, inputs: {"logits": module(inputs["tokens"])},
        outputs=("logits",),
        logits=("logits",),
        reduction=plan.sizes["F"],  # the longest sum
        depth=plan.sizes["i"],
        facts=facts,  # the epsilons of torch's own modules
    )


def wrong(plan: Plan) -> Reference:
    """The target has torch's own epsilon."""
    return reference(plan, None)


def jax_side(shapes: nnx.Module, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Values at the boundaries, called as PyTorch calls its modules and in the order of the data, then the output."""
    model = fill_pytree(shapes, weights)
    values = {"embed": model.embed(inputs["tokens"])}
    x = values["embed"]
    for i, block in enumerate(model.blocks):
        values[f"blocks.{i}.attention_norm"] = block.attention_norm(x)
        x = values[f"blocks.{i}"] = block(x)
    values["norm"] = model.norm(x)
    return {**values, "logits": model(inputs["tokens"])}


def build(eps: float | None, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    module = model_torch.Decoder(eps)
    module.load_state_dict(dict(weights), strict=True, assign=True)
    return module.eval()
