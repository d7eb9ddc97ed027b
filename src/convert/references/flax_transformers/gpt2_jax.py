"""GPT-2 in plain JAX: the equations of transformers' flax classes, which transformers 5 has no more.

Source: transformers 4.46.3 ``models/gpt2/modeling_flax_gpt2.py``. It is proven against what the real classes gave for the golden
checkpoints (``tests/models/test_flax_transformers_check.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from convert.layers.activations import activation_pair
from convert.references.flax_transformers.bert_jax import attend, layer_norm
from convert.references.protocol import INPUT


@dataclass(frozen=True)
class GPT2:
    """What no weight tells.

    Attributes:
        layers, heads: how many.
        epsilon: of the norms.
        activation: by its name in a rule.
        module: name of the transformer in PyTorch's module, with a dot behind; empty for a module without a head.
    """

    layers: int
    heads: int
    epsilon: float
    activation: str
    module: str


def run(model: GPT2, w: Mapping[str, Any], inputs: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Values at the boundaries by the names of transformers' modules, and the logits, or the last hidden state."""
    import jax.numpy as jnp

    values: OrderedDict[str, Any] = OrderedDict()
    act, _ = activation_pair(model.activation)

    def dense(name: str, leaf: str, x: Any) -> Any:
        y = values[model.module + name] = x @ w[f"{leaf}/kernel"].T + w[f"{leaf}/bias"]  # FlaxConv1D: [out, in]
        return y

    def norm(name: str, leaf: str, x: Any) -> Any:
        values[model.module + name + INPUT] = x
        y = values[model.module + name] = layer_norm(w, leaf, x, model.epsilon)
        return y

    ids = inputs["input_ids"]
    places = jnp.arange(ids.shape[1])
    words, positions = w["wte/embedding"][ids], w["wpe/embedding"][places][None]
    values[f"{model.module}wte"], values[f"{model.module}wpe"] = words, positions
    x = words + positions
    seen = (places[None, :] <= places[:, None])[None, None] & (inputs["attention_mask"][:, None, None, :] > 0)
    for i in range(model.layers):
        name, leaf = f"h.{i}", f"h/{i}"
        q, k, v = jnp.split(dense(f"{name}.attn.c_attn", f"{leaf}/attn/c_attn", norm(f"{name}.ln_1", f"{leaf}/ln_1", x)), 3, -1)  # fmt: skip
        y = values[f"{model.module}{name}.attn.c_proj{INPUT}"] = attend(q, k, v, model.heads, seen)
        x = x + dense(f"{name}.attn.c_proj", f"{leaf}/attn/c_proj", y)
        y = act(dense(f"{name}.mlp.c_fc", f"{leaf}/mlp/c_fc", norm(f"{name}.ln_2", f"{leaf}/ln_2", x)))
        values[f"{model.module}{name}.mlp.c_proj{INPUT}"] = y
        x = x + dense(f"{name}.mlp.c_proj", f"{leaf}/mlp/c_proj", y)
    x = norm("ln_f", "ln_f", x)
    if not model.module:
        values["last_hidden_state"] = x
    else:
        values["logits"] = x @ (w["lm_head/kernel"] if "lm_head/kernel" in w else w["wte/embedding"].T)
    return values
