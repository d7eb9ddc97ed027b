"""The two models for `convert check --reference reference:reference`; the protocol is in docs/guides/check.md.

convert check out.safetensors --from ckpt --model ./rules.yaml --reference reference:reference
"""

from collections.abc import Mapping
from typing import Any

import jax
import model_jax
import model_torch
import numpy as np
import torch
from flax.traverse_util import unflatten_dict

from convert import Plan, Reference


def reference(plan: Plan) -> Reference:
    return Reference(
        inputs=lambda seed: {"tokens": np.random.default_rng(seed).integers(0, 11, (3, 17))},
        jax=jax_side,
        build=build,
        run=lambda module, inputs: {"logits": module(inputs["tokens"])},
        outputs=("logits",),
        reduction=plan.sizes["D"],  # the longest sum
        depth=plan.sizes["i"],
    )


def jax_side(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Values at the boundaries, called as PyTorch calls its modules and in the order of the data, then the output."""
    params = unflatten_dict(dict(weights), sep="/")["params"]
    logits, state = model_jax.Model().apply({"params": params}, inputs["tokens"], capture_intermediates=True)
    seen = state["intermediates"]
    values = {"embed": seen["embed"]["__call__"][0]}
    for i in range(3):
        block = seen[f"block_{i}"]
        for name in ("norm", "split", "merge"):
            value = block[name]["__call__"][0]
            values[f"blocks.{i}.{name}"] = value.reshape(*value.shape[:2], -1)  # heads side by side, as in PyTorch
        values[f"blocks.{i}"] = block["__call__"][0]
    return {**values, "logits": logits}


def build(weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    module = model_torch.Model()
    module.load_state_dict(dict(weights), strict=True, assign=True)
    return module.eval()
