"""The two models for `convert check --reference reference:flax`, `:equinox` or `:keras`; the protocol is in docs/guides/check.md."""

from collections.abc import Callable, Mapping
from typing import Any

import model_torch
import numpy as np
import torch

from convert import Plan, Reference, fill_pytree


def flax(plan: Plan) -> Reference:
    import flax_model
    from flax.traverse_util import unflatten_dict

    def jax_side(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        params = unflatten_dict(dict(weights), sep="/")
        y, state = flax_model.Model().apply({"params": params}, inputs["x"], capture_intermediates=True)
        seen = {name: value["__call__"][0] for name, value in state["intermediates"].items() if name != "__call__"}
        return {"layers.0": seen["dense_0"], "layers.1": seen["dense_1"], "norm": seen["norm"], "y": y}

    return reference(plan, jax_side)


def equinox(plan: Plan) -> Reference:
    import equinox_model
    import jax

    def jax_side(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        model = fill_pytree(equinox_model.make(), weights)
        x = inputs["x"]
        return {"layers.0": jax.vmap(model.layers[0])(x), "y": jax.vmap(model)(x)}

    return reference(plan, jax_side)


def keras(plan: Plan) -> Reference:
    import keras_model

    model = keras_model.make()

    def jax_side(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        y, _ = model.stateless_call([weights[name] for name in NAMES], [], inputs["x"])
        return {"y": y}

    return reference(plan, jax_side)


# The variables in the order in which Keras has them.
NAMES = [
    f"layers/{layer}/vars/{k}" for layer in ("dense_0", "dense_1", "layer_normalization", "dense_2") for k in (0, 1)
]


def reference(plan: Plan, jax_side: Callable[..., dict[str, Any]]) -> Reference:
    return Reference(
        inputs=lambda seed: {"x": np.random.default_rng(seed).normal(size=(5, plan.sizes["D"])).astype(np.float32)},
        jax=jax_side,
        build=build,
        run=lambda module, inputs: {"y": module(inputs["x"])},
        outputs=("y",),
        reduction=plan.sizes["D"],  # the longest sum
        depth=3,
    )


def build(weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    module = model_torch.Model()
    module.load_state_dict(dict(weights), strict=True, assign=True)
    return module.eval()
