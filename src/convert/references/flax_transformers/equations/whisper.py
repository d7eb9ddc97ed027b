"""Whisper in plain JAX: the equations of transformers' flax classes, which transformers 5 no longer has.

Source: transformers 4.46.3 ``models/whisper/modeling_flax_whisper.py``. tests/models/test_flax_transformers_check.py compares the values
with those that the real classes gave for the golden checkpoint.
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
class Whisper:
    """Hyperparameters that no weight holds.

    Attributes:
        encoder, decoder: numbers of layers.
        encoder_heads, decoder_heads: of each attention.
        epsilon: of the norms.
        activation: of the feed-forward blocks, its name in rules.
    """

    encoder: int
    decoder: int
    encoder_heads: int
    decoder_heads: int
    epsilon: float
    activation: str


def run(model: Whisper, w: Mapping[str, Any], inputs: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the values at boundaries, by the names of transformers' submodules, and the logits."""
    import jax
    import jax.numpy as jnp

    values: OrderedDict[str, Any] = OrderedDict()
    act, _ = activation_pair(model.activation)
    exact, _ = activation_pair("gelu_erf")  # after the convolutions, for every configuration

    def leaf(name: str) -> str:
        return name.removeprefix("model.").replace(".", "/")

    def norm(name: str, x: Any) -> Any:
        values[name + INPUT] = x
        y = values[name] = layer_norm(w, leaf(name), x, model.epsilon)
        return y

    def dense(name: str, x: Any) -> Any:
        y = x @ w[f"{leaf(name)}/kernel"]
        y = values[name] = y + w[f"{leaf(name)}/bias"] if f"{leaf(name)}/bias" in w else y  # keys have none
        return y

    def convolution(name: str, x: Any, stride: int) -> Any:
        """Convolve with one frame of zeros on either side; boundaries have PyTorch's layout, channels first."""
        values[name + INPUT] = x.transpose(0, 2, 1)
        y = jax.lax.conv_general_dilated(
            x, w[f"{leaf(name)}/kernel"], (stride,), [(1, 1)], dimension_numbers=("NWC", "WIO", "NWC")
        )
        y = y + w[f"{leaf(name)}/bias"]
        values[name] = y.transpose(0, 2, 1)
        return y

    def attention(name: str, x: Any, of: Any, heads: int, visible: Any) -> Any:
        q, k, v = dense(f"{name}.q_proj", x), dense(f"{name}.k_proj", of), dense(f"{name}.v_proj", of)
        y = values[f"{name}.out_proj{INPUT}"] = attend(q, k, v, heads, visible)
        return dense(f"{name}.out_proj", y)

    def feed_forward(name: str, x: Any) -> Any:
        y = act(dense(f"{name}.fc1", norm(f"{name}.final_layer_norm", x)))
        values[f"{name}.fc2{INPUT}"] = y
        return dense(f"{name}.fc2", y)

    x = inputs["input_features"].transpose(0, 2, 1)
    x = exact(convolution("model.encoder.conv1", x, 1))
    x = exact(convolution("model.encoder.conv2", x, 2))
    places = values["model.encoder.embed_positions"] = w["encoder/embed_positions/embedding"]
    x = x + places
    for i in range(model.encoder):
        name = f"model.encoder.layers.{i}"
        y = norm(f"{name}.self_attn_layer_norm", x)
        x = x + attention(f"{name}.self_attn", y, y, model.encoder_heads, True)
        x = x + feed_forward(name, x)
    sound = norm("model.encoder.layer_norm", x)

    ids = inputs["decoder_input_ids"]
    steps = jnp.arange(ids.shape[1])
    words = values["model.decoder.embed_tokens"] = w["decoder/embed_tokens/embedding"][ids]
    places = w["decoder/embed_positions/embedding"][steps]
    values["model.decoder.embed_positions"] = jnp.broadcast_to(places, words.shape)
    x = words + places
    causal = causal_mask(ids.shape[1])
    for i in range(model.decoder):
        name = f"model.decoder.layers.{i}"
        y = norm(f"{name}.self_attn_layer_norm", x)
        x = x + attention(f"{name}.self_attn", y, y, model.decoder_heads, causal)
        y = norm(f"{name}.encoder_attn_layer_norm", x)
        x = x + attention(f"{name}.encoder_attn", y, sound, model.decoder_heads, True)
        x = x + feed_forward(name, x)
    x = norm("model.decoder.layer_norm", x)
    values["logits"] = x @ w["decoder/embed_tokens/embedding"].T
    return values
