"""GPT-2 in plain JAX: the equations of transformers' flax classes, which transformers 5 no longer has.

Source: transformers 4.46.3 ``models/gpt2/modeling_flax_gpt2.py``. tests/models/test_flax_transformers_check.py compares the values
with those that the real classes gave for the golden checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from convert.layers.activations import activation_pair
from convert.references.flax_transformers.equations.layers import attend, causal_mask, layer_norm
from convert.references.protocol import INPUT


@dataclass(frozen=True)
class GPT2:
    """Hyperparameters that no weight holds.

    Attributes:
        layers, heads: how many.
        epsilon: of the norms.
        activation: its name in rules.
        prefix: of the transformer's submodules in PyTorch; empty for a module without a head.
    """

    layers: int
    heads: int
    epsilon: float
    activation: str
    prefix: str


def run(model: GPT2, w: Mapping[str, Any], inputs: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the values at boundaries, by the names of transformers' submodules, and the logits, or the last hidden state."""
    import jax.numpy as jnp

    values: OrderedDict[str, Any] = OrderedDict()
    act, _ = activation_pair(model.activation)

    def dense(name: str, leaf: str, x: Any) -> Any:
        y = values[model.prefix + name] = x @ w[f"{leaf}/kernel"].T + w[f"{leaf}/bias"]  # FlaxConv1D: [out, in]
        return y

    def norm(name: str, leaf: str, x: Any) -> Any:
        values[model.prefix + name + INPUT] = x
        y = values[model.prefix + name] = layer_norm(w, leaf, x, model.epsilon)
        return y

    ids = inputs["input_ids"]
    steps = jnp.arange(ids.shape[1])
    words, positions = w["wte/embedding"][ids], w["wpe/embedding"][steps][None]
    values[f"{model.prefix}wte"], values[f"{model.prefix}wpe"] = words, positions
    x = words + positions
    visible = causal_mask(ids.shape[1]) & (inputs["attention_mask"][:, None, None, :] > 0)
    for i in range(model.layers):
        name, leaf = f"h.{i}", f"h/{i}"
        q, k, v = jnp.split(dense(f"{name}.attn.c_attn", f"{leaf}/attn/c_attn", norm(f"{name}.ln_1", f"{leaf}/ln_1", x)), 3, -1)  # fmt: skip
        y = values[f"{model.prefix}{name}.attn.c_proj{INPUT}"] = attend(q, k, v, model.heads, visible)
        x = x + dense(f"{name}.attn.c_proj", f"{leaf}/attn/c_proj", y)
        y = act(dense(f"{name}.mlp.c_fc", f"{leaf}/mlp/c_fc", norm(f"{name}.ln_2", f"{leaf}/ln_2", x)))
        values[f"{model.prefix}{name}.mlp.c_proj{INPUT}"] = y
        x = x + dense(f"{name}.mlp.c_proj", f"{leaf}/mlp/c_proj", y)
    x = norm("ln_f", "ln_f", x)
    if not model.prefix:
        values["last_hidden_state"] = x
    else:
        values["logits"] = x @ (w["lm_head/kernel"] if "lm_head/kernel" in w else w["wte/embedding"].T)
    return values
