"""Elements that meet nothing but zeros: a decoder that starts from zeros, as DETR's, never shows the values of its first layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.cli.infer_text import summary
from convert.inference.derivation import Derivation, Grade
from support.inferred import WIDTH, derive, layer_norm, rules, sources

D = WIDTH
LAYERS = range(2)
LEAVES = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "s": (D,), "b": (D,)}


class Decoder(nn.Module):
    """Queries are added to what q and k project; `start` is what the first layer's values project."""

    def __init__(self, start: float | None = 0.0, fused: bool = False) -> None:
        super().__init__()
        self.fused, self.start = fused, start
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    **(
                        {"qkv": nn.Linear(D, 3 * D, bias=False)}
                        if fused
                        else {n: nn.Linear(D, D, bias=False) for n in "qkv"}
                    ),
                    "o": nn.Linear(D, D, bias=False),
                    "norm": nn.LayerNorm(D, eps=1e-6),
                }
            )
            for _ in LAYERS
        )

    def forward(self, x: Any) -> Any:
        t = functional.relu(x - 100) if self.start is None else torch.full_like(x, self.start)
        for layer in self.layers:
            if self.fused:
                q, k, v = layer["qkv"].weight.chunk(3)
            else:
                q, k, v = (layer[name].weight for name in "qkv")
            y = functional.scaled_dot_product_attention(
                functional.linear(t + x, q), functional.linear(t + x, k), functional.linear(t, v)
            )
            t = layer["norm"](x + t + layer["o"](y))
        return t


def run(leaf: Any, x: Any, start: float | None) -> Any:
    t = jax.nn.relu(x - 100) if start is None else jnp.full_like(x, start)
    for i in LAYERS:
        q, k, v = (t + x) @ leaf(i, "q"), (t + x) @ leaf(i, "k"), t @ leaf(i, "v")
        y = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(D)) @ v
        t = layer_norm(x + t + y @ leaf(i, "o"), leaf(i, "s"), leaf(i, "b"))
    return t


def derived(stacked: bool = False, start: float | None = 0.0, fused: bool = False) -> Derivation:
    if stacked:
        shapes = {name: (len(LAYERS), *shape) for name, shape in LEAVES.items()}
        return derive(lambda w, x: run(lambda i, n: w[n][i], x, start), Decoder(start, fused), shapes)
    shapes = {f"layer_{i}/{name}": shape for i in LAYERS for name, shape in LEAVES.items()}
    return derive(lambda w, x: run(lambda i, n: w[f"layer_{i}/{n}"], x, start), Decoder(start, fused), shapes)


def test_a_matrix_that_meets_zeros_is_made_as_in_the_other_layer() -> None:
    found = derived()
    assert found.complete and sources(found)["layers.0.v.weight"] == "layer_0/v"
    first, second = (found.tensor(f"layers.{i}.v.weight") for i in LAYERS)
    assert (first.grade, first.unseen, second.grade, second.unseen) == (Grade.INTERCHANGEABLE, D * D, Grade.DERIVED, 0)
    assert np.array_equal(first.parts[0].positions, second.parts[0].positions)
    said = f"interchangeable: layers.0.v.weight: with inputs of these sizes no output shows {D * D} of its {D * D} elements; they are made as the others of this kind"
    assert said in list(summary(found, {}))


@pytest.mark.slow
def test_a_part_of_a_fused_matrix_and_a_leaf_of_all_layers() -> None:
    found = derived(stacked=True, fused=True)
    assert found.complete
    tensor = found.tensor("layers.0.qkv.weight")
    assert [part.leaf for part in tensor.parts] == ["q", "k", "v"] and tensor.unseen == D * D
    assert tensor.parts[2].positions.max() < D * D <= found.tensor("layers.1.qkv.weight").parts[2].positions.min()


@pytest.mark.slow
def test_zeros_that_other_inputs_change_leave_it_open() -> None:
    assert derived(start=None).tensor("layers.0.v.weight").grade is Grade.OPEN


@pytest.mark.slow
def test_other_numbers_than_zero_show_it() -> None:
    """Equal columns show the sum of a row: the values are no longer free."""
    assert not derived(start=0.5).complete


class Added(nn.Module):
    """A bias of many elements is added to zeros; what it gives has their places."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.d = nn.Parameter(torch.zeros(D)), nn.Linear(D, D)

    def forward(self, x: Any) -> Any:
        return torch.tanh(functional.relu(x - 100) + self.b) * self.d(x)


def test_a_bias_of_many_elements_that_is_added_to_zeros() -> None:
    """Numbers that the source adds to zeros are no gates of it; 16 of them have more orders than can be listed."""

    def function(w: Any, x: Any) -> Any:
        zeros = jax.nn.relu(x - 100)
        one = zeros[..., :1] + w["one"]
        return one * jnp.tanh(zeros + w["b"]) * (x @ w["w"] + w["c"])

    found = derive(function, Added(), {"b": (D,), "w": (D, D), "c": (D,), "one": (1,)})
    assert not found.complete


def test_an_input_of_zeros_leaves_what_meets_it_open_and_is_named() -> None:
    found = derive(
        lambda p, x: jnp.tanh(x @ p["w"] + p["b"]),
        Layer(),
        {"w": (D, D), "b": (D,)},
        lambda seed: {"x": np.zeros((5, D))},
    )
    assert not found.complete and found.dropped == ()
    assert found.tensor("layer.weight").grade is Grade.OPEN
    assert "the input x has nothing but zeros, which show no parameter; give other numbers" in found.notes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Any) -> Any:
        return self.layer(x).tanh()


MASK = (np.arange(D) % 2).astype(float)
COUPLING = {"a": (D, 24), "s": (24, D), "t": (24, D)}


class Coupling(nn.Module):
    """A layer of RealNVP: the half of the columns that a mask leaves says how the other half is scaled and moved."""

    def __init__(self, mask: Any = MASK, *, saved: bool = True) -> None:
        super().__init__()
        self.a, self.s, self.t = (
            nn.Linear(D, 24, bias=False),
            nn.Linear(24, D, bias=False),
            nn.Linear(24, D, bias=False),
        )
        self.register_buffer("mask", torch.as_tensor(mask), persistent=saved)

    def forward(self, x: Any) -> Any:
        h = self.a(x * self.mask).tanh()
        return x * self.mask + (1 - self.mask) * (x * self.s(h).tanh().exp() + self.t(h))


def _coupling(w: Any, x: Any, mask: Any = MASK) -> Any:
    h = jnp.tanh((x * mask) @ w["a"])
    return x * mask + (1 - mask) * (x * jnp.exp(jnp.tanh(h @ w["s"])) + h @ w["t"])


@pytest.mark.parametrize("saved", [True, False])
def test_columns_behind_a_mask_are_interchangeable(saved: bool) -> None:
    module = Coupling(saved=saved)
    found = derive(_coupling, module, COUPLING)
    assert found.complete and rules(found, module)
    hidden = found.tensor("a.weight")
    assert (hidden.grade, hidden.unseen, hidden.ties) == (Grade.INTERCHANGEABLE, 24 * D // 2, ())
    behind = [found.tensor(f"{name}.weight") for name in "st"]
    assert {(of.grade, of.unseen) for of in behind} == {(Grade.INTERCHANGEABLE, 24 * D // 2)}
    assert (
        next(iter(summary(found, {})))
        == f"interchangeable: a.weight: with inputs of these sizes no output shows {24 * D // 2} of its {24 * D} elements; they are made as the others of this kind"
    )


def test_columns_that_the_inputs_make_zero_stay_tied() -> None:
    """Other inputs would tell them apart: the mask is one of them."""

    def inputs(seed: int) -> dict[str, Any]:
        return {"x": np.random.default_rng(seed).normal(size=(3, 7, D)) * MASK}

    found = derive(lambda w, x: jnp.tanh(x @ w["a"]) @ w["s"], Plain(), {"a": (D, 24), "s": (24, D)}, inputs)
    assert found.tensor("0.weight").grade is Grade.TIED and not found.complete


@pytest.mark.slow
def test_a_mask_of_other_columns_is_named() -> None:
    found = derive(_coupling, Coupling(1 - MASK, saved=False), COUPLING)
    assert not found.complete and found.differences and found.proof is None


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(D, 24, bias=False), nn.Tanh(), nn.Linear(24, D, bias=False))


class Biased(nn.Module):
    """Attention with a learned bias of its scores, and a layer of which two columns meet zeros."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.bias, self.seen = nn.Parameter(torch.zeros(7, 7)), torch.ones(7, 7, dtype=torch.bool).tril()
        self.q, self.k = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.out, self.value = nn.Linear(D + 2, D, bias=False), value

    def forward(self, x: Any) -> Any:
        scores = self.q(x) @ self.k(x).mT + self.bias
        x = torch.tanh(scores.masked_fill(~self.seen, -torch.inf).softmax(-1) @ x)
        return self.out(functional.pad(x, (0, 2), value=self.value))


@pytest.mark.parametrize("value", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_columns_of_zeros_behind_a_bias_of_masked_scores(value: float) -> None:
    """The bias is compared where the mask lets it through, by an operation that only the search has: infer ended with an internal error.

    The planted fault: the columns meet ones.
    """

    def function(leaves: Any, x: Any) -> Any:
        scores = (x @ leaves["q"]) @ (x @ leaves["k"]).mT + leaves["s"]
        x = jnp.tanh(jax.nn.softmax(jnp.where(np.tri(7) > 0, scores, -jnp.inf)) @ x)
        return jnp.pad(x, ((0, 0), (0, 0), (0, 2))) @ leaves["o"]

    found = derive(function, Biased(value), {"q": (D, D), "k": (D, D), "s": (7, 7), "o": (D + 2, D)})
    grades = {tensor.name: tensor.grade for tensor in found.tensors}
    assert found.complete == (value == 0) == (grades["out.weight"] is Grade.INTERCHANGEABLE)
