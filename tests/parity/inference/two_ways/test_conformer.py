"""A Conformer of linen against that of transformers: the biases u and v in the queries, or in the scores; the shift by indices, or by a view."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen

from convert.inference.derivation import Grade
from support.inferred import derive, floats, grades, rules
from support.inferred import linen as of_linen
from support.relative_scores import relative_scores

transformers = pytest.importorskip("transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer")
D, N, HIDDEN, T, LAYERS = 16, 4, 24, 6, 2


class Upstream(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.Wav2Vec2ConformerConfig(
            hidden_size=D,
            num_attention_heads=N,
            intermediate_size=HIDDEN,
            conv_depthwise_kernel_size=3,
            hidden_act="swish",
            position_embeddings_type="relative",
            max_source_positions=64,
            attn_implementation="eager",
        )
        self.positions = transformers.Wav2Vec2ConformerRelPositionalEmbedding(config)
        self.layers = torch.nn.ModuleList(transformers.Wav2Vec2ConformerEncoderLayer(config) for _ in range(LAYERS))

    def forward(self, x: Any) -> Any:
        positions = self.positions(x)
        for layer in self.layers:
            made = layer(x, relative_position_embeddings=positions)
            x = made[0] if isinstance(made, tuple) else made
        return x


def _positions() -> Any:
    angles = np.arange(T - 1, -T, -1.0)[:, None] * 10000.0 ** (-np.arange(0, D, 2) / D)
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(2 * T - 1, D)


def _norm() -> Any:
    return linen.LayerNorm(epsilon=1e-5)


class FeedForward(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(D)(jax.nn.silu(linen.Dense(HIDDEN)(_norm()(x))))


class Attention(linen.Module):
    folded: bool

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = _norm()(x)
        q, k, v = (linen.DenseGeneral((N, D // N), name=c)(x) for c in "qkv")
        p = linen.DenseGeneral((N, D // N), use_bias=False, name="p")(jnp.asarray(_positions()))
        one, two = (self.param(name, linen.initializers.normal(), (N, D // N)) for name in ("one", "two"))
        made = relative_scores(q, k, p, one, two, folded=self.folded)
        scores = jax.nn.softmax(made / np.sqrt(D // N), -1)
        return linen.DenseGeneral(D, axis=(-2, -1), name="o")(jnp.einsum("bnts,bsnh->btnh", scores, v))


class Convolution(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x, gate = jnp.split(linen.Dense(2 * D, use_bias=False)(_norm()(x)), 2, -1)
        x = linen.Conv(D, (3,), feature_group_count=D, use_bias=False)(x * jax.nn.sigmoid(gate))
        x = jax.nn.silu(linen.BatchNorm(use_running_average=True, epsilon=1e-5)(x))
        return linen.Dense(D, use_bias=False)(x)


class Conformer(linen.Module):
    folded: bool

    @linen.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(LAYERS):
            x = x + FeedForward()(x) / 2
            x = x + Attention(self.folded)(x)
            x = x + Convolution()(x)
            x = _norm()(x + FeedForward()(x) / 2)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("folded", [True, False])
def test_a_conformer_of_two_layers(folded: bool) -> None:
    function, shapes = of_linen(Conformer(folded), np.zeros((2, T, D)))
    module = Upstream()
    found = derive(function, module, shapes, floats(2, T, D))
    assert found.complete and grades(found) == {Grade.DERIVED} and not found.dropped
    assert any("pos_bias_" in rule for rule in rules(found, module))
