"""T5 1.0, 1.1 and UMT5 in plain JAX: the equations of transformers' flax classes, which transformers 5 no longer has, and of T5X.

Source: transformers 4.46.3 ``models/t5/modeling_flax_t5.py``. tests/models/test_flax_transformers_check.py compares the values
with those that the real classes gave for the golden checkpoints.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from convert.layers.activations import activation_pair
from convert.references.flax_transformers.equations.layers import attend, causal_mask
from convert.references.protocol import INPUT


@dataclass(frozen=True)
class T5:
    """Hyperparameters that no weight holds.

    Attributes:
        encoder, decoder: numbers of layers; without a decoder the model is the encoder alone.
        heads: of each attention.
        epsilon: of the norms.
        activation: its name in rules.
        furthest: distances from here on share a bucket.
        has_head: whether the decoder's result becomes logits; scales_head: whether it is divided by sqrt(width) before.
    """

    encoder: int
    decoder: int
    heads: int
    epsilon: float
    activation: str
    furthest: int
    has_head: bool = True
    scales_head: bool = False


def buckets(queries: int, keys: int, count: int, furthest: int, *, causal: bool) -> Any:
    """Return the bucket of each distance, [queries, keys]: one for each small distance, then logarithmically wider ones.

    Args:
        count: number of buckets. Unless causal, half of them are for keys after the query.
        furthest: from this distance on, all share the last bucket.
        causal: whether no query sees later keys.
    """
    import jax.numpy as jnp

    distance = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
    first: Any = 0
    if causal:
        distance = -jnp.minimum(distance, 0)
    else:
        count //= 2
        first = (distance > 0) * count
        distance = jnp.abs(distance)
    exact = count // 2
    share = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(furthest / exact)  # distance 0 has its own bucket
    far = jnp.minimum(exact + share * (count - exact), count - 1)
    return first + jnp.where(distance < exact, distance, far.astype(distance.dtype))


def run(model: T5, w: Mapping[str, Any], inputs: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the values at boundaries, by the names of transformers' submodules, and the logits, or the encoder's last hidden state."""
    import jax.numpy as jnp

    values: OrderedDict[str, Any] = OrderedDict()
    act, _ = activation_pair(model.activation)

    def norm(name: str, x: Any) -> Any:
        values[name + INPUT] = x
        scale = w[f"{name.replace('.', '/')}/weight"]
        y = values[name] = x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + model.epsilon) * scale
        return y

    def dense(name: str, x: Any) -> Any:
        y = values[name] = x @ w[f"{name.replace('.', '/')}/kernel"]
        return y

    def attention(name: str, x: Any, of: Any, visible: Any, bias: Any) -> Any:
        """Compute attention without a scale, with `bias` added to the logits."""
        q, k, v = dense(f"{name}.q", x), dense(f"{name}.k", of), dense(f"{name}.v", of)
        y = values[f"{name}.o{INPUT}"] = attend(q, k, v, model.heads, visible, factor=1.0, bias=bias)
        return dense(f"{name}.o", y)

    def positions(stack: str, layer: int, length: int) -> Any:
        """Return the bias of each head and distance, [1, heads, queries, keys]; None where the layer has no table."""
        name = f"{stack}.block.{layer}.layer.0.SelfAttention.relative_attention_bias"
        table = w.get(f"{name.replace('.', '/')}/embedding")
        if table is None:
            return None
        at = buckets(length, length, len(table), model.furthest, causal=stack == "decoder")
        values[name] = table[at]
        return table[at].transpose(2, 0, 1)[None]

    def feed_forward(name: str, x: Any) -> Any:
        x = norm(f"{name}.layer_norm", x)
        name = f"{name}.DenseReluDense"
        if f"{name.replace('.', '/')}/wi/kernel" in w:
            y = act(dense(f"{name}.wi", x))
        else:
            y = act(dense(f"{name}.wi_0", x)) * dense(f"{name}.wi_1", x)
        values[f"{name}.wo{INPUT}"] = y
        return dense(f"{name}.wo", y)

    def stack(side: str, layers: int, ids: Any, visible: Any, across: tuple[Any, Any] | None = None) -> Any:
        """Run a stack; `across` has the keys of its second attention, and the mask."""
        x = values[f"{side}.embed_tokens"] = w["shared/embedding"][ids]
        bias: Any = None
        for i in range(layers):
            name = f"{side}.block.{i}.layer"
            y = norm(f"{name}.0.layer_norm", x)
            own = positions(side, i, ids.shape[1])
            bias = bias if own is None else own  # the first layer's, unless each layer has its own (UMT5)
            x = x + attention(f"{name}.0.SelfAttention", y, y, visible, bias)
            if across is not None:
                x = x + attention(f"{name}.1.EncDecAttention", norm(f"{name}.1.layer_norm", x), *across, 0)
            x = x + feed_forward(f"{name}.{1 if across is None else 2}", x)
        return norm(f"{side}.final_layer_norm", x)

    real = inputs["attention_mask"][:, None, None, :] > 0
    x = stack("encoder", model.encoder, inputs["input_ids"], real)
    if not model.decoder:
        values["last_hidden_state"] = x
        return values
    ids = inputs["decoder_input_ids"]
    causal = causal_mask(ids.shape[1]) & (inputs["decoder_attention_mask"][:, None, None, :] > 0)
    x = stack("decoder", model.decoder, ids, causal, (x, real))
    if not model.has_head:
        values["last_hidden_state"] = x
    else:
        x = values[f"lm_head{INPUT}"] = x * x.shape[-1] ** -0.5 if model.scales_head else x
        values["logits"] = x @ (w["lm_head/kernel"] if "lm_head/kernel" in w else w["shared/embedding"].T)
    return values
