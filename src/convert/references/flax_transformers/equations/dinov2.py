"""DINOv2 in plain JAX: the equations of transformers' flax classes, which transformers 5 no longer has.

Source: transformers 4.46.3 ``models/dinov2/modeling_flax_dinov2.py``, for images of the size of the position table.
tests/models/test_flax_transformers_check.py compares the values with those that the real classes gave for the golden checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from convert.layers.activations import activation_pair
from convert.references.flax_transformers.equations.layers import attend, layer_norm
from convert.references.protocol import INPUT


@dataclass(frozen=True)
class Dinov2:
    """Hyperparameters that no weight holds.

    Attributes:
        layers, heads: how many.
        epsilon: of the norms.
        activation: its name in rules.
        layerscale: factor by which FlaxDinov2LayerScale multiplies a layer's scale, twice.
        prefix: of the submodules in PyTorch; empty for a module without a head.
    """

    layers: int
    heads: int
    epsilon: float
    activation: str
    layerscale: float
    prefix: str


def run(model: Dinov2, w: Mapping[str, Any], inputs: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the values at boundaries, by the names of transformers' submodules, and the outputs."""
    import jax
    import jax.numpy as jnp

    values: OrderedDict[str, Any] = OrderedDict()
    act, _ = activation_pair(model.activation)
    root = "dinov2/" if "dinov2/layernorm/scale" in w else ""

    def dense(name: str, leaf: str, x: Any) -> Any:
        values[model.prefix + name + INPUT] = x
        y = values[model.prefix + name] = x @ w[f"{root}{leaf}/kernel"] + w.get(
            f"{root}{leaf}/bias", 0
        )  # or qkv_bias: false
        return y

    def norm(name: str, x: Any) -> Any:
        values[model.prefix + name + INPUT] = x
        y = values[model.prefix + name] = layer_norm(w, root + name.replace(".", "/"), x, model.epsilon)
        return y

    def scaled(name: str, x: Any) -> Any:
        scale = model.layerscale * w[f"{root}{name.replace('.', '/')}/lambda1"] * model.layerscale
        y = values[model.prefix + name] = scale * x
        return y

    def embedding(name: str) -> Any:
        return w[f"{root}embeddings/{name}"]

    image = jnp.transpose(inputs["pixel_values"], (0, 2, 3, 1))
    kernel = embedding("patch_embeddings/projection/kernel")
    maps = jax.lax.conv_general_dilated(
        image, kernel, kernel.shape[:2], "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    patches = (maps + embedding("patch_embeddings/projection/bias")).reshape(image.shape[0], -1, kernel.shape[-1])
    token = jnp.broadcast_to(embedding("cls_token"), (image.shape[0], 1, kernel.shape[-1]))
    x = jnp.concatenate([token, patches], 1) + embedding("position_embeddings")
    for i in range(model.layers):
        name, leaf = f"encoder.layer.{i}", f"encoder/layer/{i}"
        h = norm(f"{name}.norm1", x)
        of = {"q": "query", "k": "key", "v": "value"}
        q, k, v = (
            dense(f"{name}.attention.{part}_proj", f"{leaf}/attention/attention/{of[part]}", h) for part in "qkv"
        )
        y = dense(f"{name}.attention.o_proj", f"{leaf}/attention/output/dense", attend(q, k, v, model.heads, True))
        x = x + scaled(f"{name}.layer_scale1", y)
        y = act(dense(f"{name}.mlp.fc1", f"{leaf}/mlp/fc1", norm(f"{name}.norm2", x)))
        x = x + scaled(f"{name}.layer_scale2", dense(f"{name}.mlp.fc2", f"{leaf}/mlp/fc2", y))
    x = norm("layernorm", x)
    if not model.prefix:
        values["last_hidden_state"], values["pooler_output"] = x, x[:, 0]
    else:
        pooled = jnp.concatenate([x[:, 0], jnp.mean(x[:, 1:], 1)], -1)
        values["logits"] = pooled @ w["classifier/kernel"] + w["classifier/bias"]
    return values
