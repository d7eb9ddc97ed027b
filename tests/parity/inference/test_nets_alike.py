"""Equal nets applied to one input: what each is for shows only where its result is used."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, floats, grades, layer_norm, sources

D = WIDTH
GATED = {**dict.fromkeys("abvg", (D, D)), **dict.fromkeys(("ab", "bb", "vb", "gb", "s", "o"), (D,))}


class Gated(nn.Module):
    """A gated residual net, as each of the static encoders of a Temporal Fusion Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.on, self.gate, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2 * D), nn.LayerNorm(D)

    def forward(self, x: Any) -> Any:
        return self.norm(x + functional.glu(self.gate(self.on(functional.elu(self.up(x))))))


class Encoders(nn.Module):
    """The state that a recurrent layer starts from is made by two nets, a third one's result is added."""

    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = (Gated() for _ in range(3))
        self.read, self.lstm, self.swapped = nn.Linear(D, D), nn.LSTM(D, D, batch_first=True), swapped

    def forward(self, x: Any) -> Any:
        y, s = self.read(x), x[:, 0]
        state = self.first(s)[None], self.second(s)[None]
        return self.lstm(y, state)[0] + (self.first if self.swapped else self.third)(s)[:, None]


def gated(w: Any, name: str, x: Any) -> Any:
    def linear(x: Any, leaf: str) -> Any:
        return x @ w[f"{name}/{leaf}"] + w[f"{name}/{leaf}b"]

    y = linear(jax.nn.elu(linear(x, "a")), "b")
    return layer_norm(x + linear(y, "v") * jax.nn.sigmoid(linear(y, "g")), w[f"{name}/s"], w[f"{name}/o"], epsilon=1e-5)


def encoders(w: Any, x: Any) -> Any:
    h, c, extra = (gated(w, name, x[:, 0]) for name in "hcz")
    y = x @ w["r"] + w["rb"]

    def step(state: Any, at: Any) -> Any:
        c, h = state
        i, f, g, o = jnp.split(at @ w["i"] + h @ w["u"] + w["b"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h

    return jax.lax.scan(step, (c, h), y.swapaxes(0, 1))[1].swapaxes(0, 1) + extra[:, None]


RECURRENT = {"r": (D, D), "rb": (D,), "i": (D, 4 * D), "u": (D, 4 * D), "b": (4 * D,)}
SHAPES = {**{f"{k}/{name}": shape for k in "hcz" for name, shape in GATED.items()}, **RECURRENT}


def test_nets_whose_results_meet_in_a_recurrent_layer() -> None:
    found = derive(encoders, Encoders(), SHAPES, floats(5, 4, D))
    assert found.complete, found.differences
    assert grades(found) == {Grade.DERIVED}
    assert [sources(found)[f"{name}.up.weight"] for name in ("first", "second", "third")] == ["h/a", "c/a", "z/a"]


@pytest.mark.slow
def test_a_net_that_is_used_for_another_is_not_derived() -> None:
    assert not derive(encoders, Encoders(swapped=True), SHAPES, floats(5, 4, D)).complete


class Selection(nn.Module):
    """A net of each position, and a choice among them for which another net's result counts."""

    def __init__(self) -> None:
        super().__init__()
        self.context, self.parts, self.last = Gated(), nn.ModuleList(Gated() for _ in range(4)), Gated()
        self.choose, self.given = nn.Linear(4 * D, 4), nn.Linear(D, 4)

    def forward(self, x: Any) -> Any:
        s = x.mean(1)
        context = self.context(s)
        parts = torch.stack([part(x[:, k]) for k, part in enumerate(self.parts)], 1)
        weights = (self.choose(parts.flatten(1)) + self.given(context)).softmax(-1)
        return (weights[..., None] * parts).sum(1) * self.last(s)


def selection(w: Any, x: Any) -> Any:
    s = x.mean(1)
    last, context = gated(w, "h", s), gated(w, "c", s)
    parts = jnp.stack([gated(w, str(k), x[:, k]) for k in range(4)], 1)
    scores = parts.reshape(len(x), -1) @ w["n"] + w["nb"] + context @ w["m"] + w["mb"]
    return (jax.nn.softmax(scores)[..., None] * parts).sum(1) * last


@pytest.mark.slow
def test_a_net_that_shows_far_behind() -> None:
    parts = {f"{k}/{name}": shape for k in "hc0123" for name, shape in GATED.items()}
    shapes = {**parts, "n": (4 * D, 4), "nb": (4,), "m": (D, 4), "mb": (4,)}
    found = derive(selection, Selection(), shapes, floats(5, 4, D))
    assert found.complete, found.differences
    assert sources(found)["context.up.weight"] == "c/a"
