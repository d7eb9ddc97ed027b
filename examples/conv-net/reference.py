"""The two models for `convert check --reference reference:reference`; the protocol is in docs/guides/check.md."""

from collections.abc import Mapping
from typing import Any

import jax
import model_jax
import model_torch
import numpy as np

from convert import Plan, Reference, fill_pytree


def reference(plan: Plan) -> Reference:
    return Reference(
        inputs=lambda seed: {
            "x": np.random.default_rng(seed).normal(0.3, 1, (3, 3, *model_jax.SIZE)).astype(np.float32)
        },
        jax=jax_side,
        build=lambda state: model_torch.load(dict(state)),
        run=lambda module, inputs: {"y": module(inputs["x"])},
        outputs=("y",),
        reduction=192,  # the longest sum, of `dense`
        depth=6,
    )


def jax_side(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Values at the boundaries, channels first as PyTorch has them, then the output."""
    shapes = jax.eval_shape(model_jax.Model().init, jax.random.key(0), inputs["x"].transpose(0, 2, 3, 1))
    variables = fill_pytree(shapes, {**weights, "batch_stats/spectral_norm/head/kernel/sigma": np.float32(1)})
    x = inputs["x"].transpose(0, 2, 3, 1)
    y, state = model_jax.Model().apply(variables, x, capture_intermediates=True, mutable=["intermediates"])
    seen = state["intermediates"]
    names = ("stem", "norm", "depthwise", "mix", "group", "up")
    values = {name: seen[name]["__call__"][0].transpose(0, 3, 1, 2) for name in names}
    return {**values, "dense": seen["weight_norm"]["__call__"][0], "head": y, "y": y}
