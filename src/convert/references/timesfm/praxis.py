"""TimesFM 1.0 and 2.0 in plain JAX: the equations of praxis and of timesfm's Pax model, which cannot be installed with current versions of JAX.

Written from google/praxis@feeaff19915c and timesfm 1.3.0; each function names what it restates, for evaluation (no dropout)
and with the settings of ``TimesFmJax`` (``timesfm_jax.py``). It is itself proven: in float32 it reproduces what the Pax
model gave for checkpoints in ``tests/golden``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

EPSILON = 1e-6  # praxis normalizations.py, LayerNorm.epsilon and RmsNorm.epsilon
TOLERANCE = 1e-7  # patched_decoder.py, _TOLERANCE
PAD_VAL = 1123581321.0  # patched_decoder.py, PAD_VAL
R_SOFTPLUS_0 = 1.442695041  # praxis attentions.py, PerDimScale: 1 / softplus(0)

Array = Any
Tap = Callable[[str, Array], None]


@dataclass(frozen=True)
class Decoder:
    """patched_decoder.py, PatchedTimeSeriesDecoder.

    Attributes:
        theta: the variables by name, without ``params`` in front.
        tap: called with the name of a boundary in upstream's PyTorch module and the value there, in the order of the data.
        layers: number of transformer layers.
        patch_len, horizon_len: points in an input and in an output patch.
        use_pos_emb: whether positions are added.
    """

    theta: Mapping[str, Array]
    tap: Tap
    layers: int
    patch_len: int
    horizon_len: int
    use_pos_emb: bool

    def decode(self, input_ts: Array, paddings: Array, freq: Array) -> tuple[Array, Array]:
        """PatchedTimeSeriesDecoder.decode: mean and all outputs, as far ahead as `paddings` is longer than `input_ts`."""
        context_len = input_ts.shape[1]
        horizon = paddings.shape[1] - context_len
        final_out, full_outputs = input_ts, []
        for _ in range(-(-horizon // self.horizon_len)):
            current = paddings[:, : final_out.shape[1]]
            output_ts = self(final_out[:, -context_len:], current[:, -context_len:], freq)
            full_outputs.append(output_ts[:, -1])
            final_out = jnp.concatenate([final_out, output_ts[:, -1, :, 0]], axis=-1)
        full = jnp.concatenate(full_outputs, axis=1)[:, :horizon]
        return full[:, :, 0], full

    def __call__(self, input_ts: Array, input_padding: Array, freq: Array) -> Array:
        """PatchedTimeSeriesDecoder.__call__ with _preprocess_input and _postprocess_output: [batch, patch, step, output]."""
        batch = input_ts.shape[0]
        inputs = input_ts.reshape(batch, -1, self.patch_len)
        pads = input_padding.reshape(batch, -1, self.patch_len)
        inputs = jnp.where(jnp.abs(pads - 1.0) < TOLERANCE, 0.0, inputs)
        pads = jnp.where(jnp.abs(inputs - PAD_VAL) < TOLERANCE, 1, pads)
        inputs, (mu, sigma) = forward_transform(inputs, pads)
        inputs = inputs * (1.0 - pads)

        x = self.residual_block("input_ff_layer", jnp.concatenate([inputs, pads], axis=-1))
        padding = jnp.min(pads, axis=-1)
        if self.use_pos_emb:
            position = positional_embedding(x.shape[1], x.shape[2])
            self.tap("position_emb", position)
            position = jnp.repeat(position.astype(x.dtype), batch, axis=0)  # fprop_dtype is that of the weights
            x = x + shift_padded_seq(padding, position)
        embedded = self.theta["freq_emb/emb_var"][freq.astype(jnp.int32)]
        self.tap("freq_emb", embedded)
        x = x + embedded

        mask = attention_mask(padding, x)
        for i in range(self.layers):
            x = self.transformer(i, x, padding, mask)
        x = self.residual_block("horizon_ff_layer", x)
        x = x.reshape(batch, x.shape[1], self.horizon_len, -1)
        return x * sigma[:, None, None, None] + mu[:, None, None, None]  # _reverse_transform

    def feed_forward(self, name: str, x: Array) -> Array:
        """praxis linears.py, FeedForward without its activation."""
        return jnp.einsum("...y,yz->...z", x, self.theta[f"{name}/linear/w"]) + self.theta[f"{name}/bias/b"]

    def residual_block(self, name: str, x: Array) -> Array:
        """patched_decoder.py, ResidualBlock; Swish is x sigmoid(x)."""
        self.tap(f"{name}:in", x)
        hidden = self.feed_forward(f"{name}/hidden_layer", x)
        self.tap(f"{name}.hidden_layer.0", hidden)
        hidden = jax.nn.swish(hidden)
        self.tap(f"{name}.output_layer:in", hidden)
        output = self.feed_forward(f"{name}/output_layer", hidden)
        self.tap(f"{name}.output_layer", output)
        residual = self.feed_forward(f"{name}/residual_layer", x)
        self.tap(f"{name}.residual_layer", residual)
        self.tap(name, output + residual)
        return output + residual

    def transformer(self, i: int, x: Array, padding: Array, mask: Array) -> Array:
        """praxis transformers.py, Transformer (norm_policy 'pre', ln_tpl RmsNorm) and TransformerFeedForward (ReLU)."""
        name, torch = f"stacked_transformer_layer/x_layers_{i}", f"stacked_transformer.layers.{i}"
        self.tap(f"{torch}.input_layernorm:in", x)
        normed = rms_norm(x, self.theta[f"{name}/layer_norm/scale"])
        self.tap(f"{torch}.input_layernorm", normed)
        x = x + self.attention(f"{name}/self_attention", f"{torch}.self_attn", normed, mask)

        self.tap(f"{torch}.mlp:in", x)
        normed = layer_norm(
            x, self.theta[f"{name}/ff_layer/layer_norm/scale"], self.theta[f"{name}/ff_layer/layer_norm/bias"]
        )
        self.tap(f"{torch}.mlp.layer_norm", normed)
        hidden = self.feed_forward(f"{name}/ff_layer/ffn_layer1", normed)
        self.tap(f"{torch}.mlp.gate_proj", hidden)
        hidden = jax.nn.relu(hidden)
        self.tap(f"{torch}.mlp.down_proj:in", hidden)
        hidden = self.feed_forward(f"{name}/ff_layer/ffn_layer2", hidden)
        self.tap(f"{torch}.mlp.down_proj", hidden)
        x = x + hidden * (1.0 - padding[:, :, None])
        self.tap(f"{torch}.mlp", x)
        return x

    def attention(self, name: str, torch: str, x: Array, mask: Array) -> Array:
        """praxis attentions.py: DotProductAttention._dot_atten, AttentionProjection, PerDimScale."""
        theta = self.theta
        query, key, value = (
            jnp.einsum("...D,DNH->...NH", x, theta[f"{name}/{part}/w"]) + theta[f"{name}/{part}/b"]
            for part in ("query", "key", "value")
        )
        for part, projected in zip("qkv", (query, key, value), strict=True):
            self.tap(f"{torch}.{part}_proj", projected.reshape(*x.shape[:2], -1))
        scale = R_SOFTPLUS_0 / math.sqrt(query.shape[-1])
        query = query * (scale * jax.nn.softplus(theta[f"{name}/per_dim_scale/per_dim_scale"]))
        logits = jnp.einsum("BTNH,BSNH->BNTS", query, key).astype(jnp.float32)
        # py_utils.py, apply_mask_to_logits
        large = large_negative_number(logits.dtype)
        probs = jax.nn.softmax(jnp.where(mask >= large * 0.5, logits, large), axis=-1).astype(key.dtype)
        self.tap(torch, probs)
        encoded = jnp.einsum("BNTS,BSNH->BTNH", probs, value)
        self.tap(f"{torch}.o_proj:in", encoded.reshape(*x.shape[:2], -1))
        out = jnp.einsum("...NH,DNH->...D", encoded, theta[f"{name}/post/w"]) + theta[f"{name}/post/b"]
        self.tap(f"{torch}.o_proj", out)
        return out


def rms_norm(x: Array, scale: Array) -> Array:
    """praxis normalizations.py, RmsNorm: direct_scale is True, so the factor is the scale itself."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPSILON) * scale


def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    """praxis normalizations.py, LayerNorm: direct_scale is False, so the factor is 1 + scale."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + EPSILON)
    return normed * (1 + scale) + bias


def large_negative_number(dtype: Any) -> Array:
    """praxis py_utils.py, get_large_negative_number."""
    return jnp.asarray(-0.7 * jnp.finfo(dtype).max, dtype=dtype)


def attention_mask(padding: Array, x: Array) -> Array:
    """praxis transformers.py, compute_attention_masks_for_fprop; attentions.py, convert_paddings_to_mask, merge_masks, causal_mask.

    Zero where a patch may look, a large negative number where not: at later patches, at padding, or being padding itself.
    """
    large = large_negative_number(x.dtype)
    key = padding[:, None, None, :] * large
    both = jnp.minimum(jnp.swapaxes(key, 2, 3), key)
    index = jnp.arange(x.shape[1])
    causal = (index[:, None] < index[None, :]).astype(x.dtype) * large
    return jnp.minimum(both, causal[None, None])


def positional_embedding(length: int, width: int) -> Array:
    """praxis embedding_softmax.py, PositionalEmbedding with timescales from 1 to 10000."""
    position = jnp.arange(length, dtype=jnp.float32)
    count = width // 2
    step = math.log(10_000.0) / jnp.maximum(jnp.asarray(count, dtype=jnp.float32) - 1, 1)
    inverse = jnp.exp(jnp.arange(count, dtype=jnp.float32) * -step)
    time = position[None, :, None] * inverse
    signal = jnp.concatenate([jnp.sin(time), jnp.cos(time)], axis=2)
    return jnp.pad(signal, [[0, 0], [0, 0], [0, width % 2]])


def shift_padded_seq(padding: Array, seq: Array) -> Array:
    """patched_decoder.py, _shift_padded_seq: each row is rotated so that it starts at its first patch without padding."""
    first = jnp.argmin(padding, axis=1)
    index = (jnp.arange(seq.shape[1])[None, :] - first[:, None]) % seq.shape[1]
    return jnp.take_along_axis(seq, index[:, :, None], axis=1)


def forward_transform(inputs: Array, pads: Array) -> tuple[Array, tuple[Array, Array]]:
    """patched_decoder.py, PatchedTimeSeriesDecoder._forward_transform."""
    mu, sigma = masked_mean_std(inputs, pads)
    sigma = jnp.where(sigma < TOLERANCE, 1.0, sigma)
    outputs = (inputs - mu[:, None, None]) / sigma[:, None, None]
    return jnp.where(jnp.abs(inputs - PAD_VAL) < TOLERANCE, PAD_VAL, outputs), (mu, sigma)


def masked_mean_std(inputs: Array, padding: Array) -> tuple[Array, Array]:
    """patched_decoder.py, _masked_mean_std: of the first patch with three valid points, or of the last patch."""
    enough = jnp.sum(1 - padding, axis=2) >= 3
    patch = jnp.where(enough.sum(axis=1) == 0, enough.shape[1] - 1, jnp.argmax(enough, axis=1))
    rows = jnp.arange(inputs.shape[0])
    arr, mask = inputs[rows, patch], 1 - padding[rows, patch]
    count = jnp.sum(mask, axis=1)
    count = jnp.where(count == 0, 1, count)
    mean = jnp.sum(arr * mask, axis=1) / count
    var = jnp.sum((arr * mask) ** 2, axis=1) / count - mean**2
    return mean, jnp.sqrt(jnp.where(var < 0.0, 0.0, var))
