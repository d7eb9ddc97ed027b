"""`infer` finds RoPE's order of pairs, and experts that are stacked on one side."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, grades, linen, rules, sources

D, N, H = WIDTH, 2, 8
FREQUENCIES = 100.0 ** (-np.arange(H // 2) / (H // 2))


def _turned(first: Any, second: Any, sin: Any, cos: Any) -> tuple[Any, Any]:
    return first * cos - second * sin, second * cos + first * sin


def _attention(interleaved: bool) -> Any:
    def turn(x: Any) -> Any:
        angles = np.arange(x.shape[1])[:, None, None] * FREQUENCIES
        pair = (x[..., ::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, -1)
        pair = _turned(*pair, np.sin(angles), np.cos(angles))
        return jnp.stack(pair, -1).reshape(x.shape) if interleaved else jnp.concatenate(pair, -1)

    def function(w: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[c]) for c in "qkv")
        p = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", turn(q), turn(k)) / np.sqrt(H))
        return jnp.einsum("btnh,nhd->btd", jnp.einsum("bnts,bsnh->btnh", p, v), w["o"])

    return function


class Attention(torch.nn.Module):
    """Turns interleaved pairs, or halves."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(4))
        self.interleaved = interleaved

    def turn(self, x: Any) -> Any:
        angles = torch.arange(x.shape[1])[:, None, None] * torch.as_tensor(FREQUENCIES)
        pair = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, -1)
        pair = _turned(*pair, angles.sin(), angles.cos())
        return torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)

    def forward(self, x: Any) -> Any:
        v, k, q = (m(x).unflatten(-1, (N, H)) for m in self.m[:3])
        p = (torch.einsum("btnh,bsnh->bnts", self.turn(q), self.turn(k)) / H**0.5).softmax(-1)
        return self.m[3](torch.einsum("bnts,bsnh->btnh", p, v).flatten(-2))


@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("target", [False, True], ids=["to halves", "to interleaved"])
def test_the_order_of_the_pairs_that_rope_turns(interleaved, target):
    shapes = {**dict.fromkeys("qkv", (D, N, H)), "o": (N, H, D)}
    module = Attention(target)
    found = derive(_attention(interleaved), module, shapes)
    assert found.complete
    assert sources(found) == {"m.0.weight": "v", "m.1.weight": "k", "m.2.weight": "q", "m.3.weight": "o"}
    assert [found.tensor(f"m.{k}.weight").grade for k in (1, 2)] == [Grade.DERIVED] * 2
    names = {(True, False): "interleaved to half-split", (False, True): "half-split to interleaved"}
    rope = {(tensor, fact.value) for fact in found.facts if fact.name == "rope" for tensor in fact.tensors}
    expected = names.get((interleaved, target))
    assert rope == ({("m.1.weight", expected), ("m.2.weight", expected)} if expected else set())
    assert rules(found, module)


def _experts(w: Any, x: Any) -> Any:
    gates = jax.nn.softmax(x @ w["g"])
    y = jnp.einsum("betf,efd->betd", jnp.tanh(jnp.einsum("btd,edf->betf", x, w["a"])), w["b"])
    return jnp.einsum("betd,bte->btd", y, gates)


class Listed(torch.nn.Module):
    """Each expert is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.g = torch.nn.Linear(D, 3, bias=False)
        self.e = torch.nn.ModuleList(
            torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(2)) for _ in range(3)
        )

    def forward(self, x: Any) -> Any:
        gates = self.g(x).softmax(-1)
        return sum(b(torch.tanh(a(x))) * gates[..., k : k + 1] for k, (a, b) in enumerate(self.e))


class Stacked(torch.nn.Module):
    """All experts in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.g = torch.nn.Linear(D, 3, bias=False)
        self.a, self.b = (torch.nn.Parameter(torch.randn(3, D, D)) for _ in range(2))

    def forward(self, x: Any) -> Any:
        gates = self.g(x).softmax(-1)
        y = torch.bmm(torch.tanh(torch.bmm(x.reshape(1, -1, D).expand(3, -1, -1), self.a)), self.b.transpose(1, 2))
        return (y.reshape(3, *x.shape) * gates.permute(2, 0, 1)[..., None]).sum(0)


@pytest.mark.parametrize("kind", [pytest.param(Listed, marks=pytest.mark.slow), Stacked])
def test_experts(kind):
    shapes = {"g": (D, 3), "a": (3, D, D), "b": (3, D, D)}
    found = derive(_experts, kind(), shapes)
    exchanged = kind is Listed  # each expert with its column of the gate
    assert found.complete and grades(found) == {Grade.INTERCHANGEABLE if exchanged else Grade.DERIVED}
    for name, leaf in (("a", "a"), ("b", "b")):
        for k in range(3):
            tensor = found.tensor(f"e.{k}.{'ab'.index(name)}.weight" if kind is Listed else name)
            positions = np.concatenate([part.positions for part in tensor.parts])
            rows = positions if kind is Listed else positions.reshape(3, -1)[k]
            assert tensor.parts[0].leaf == leaf and set(rows // (D * D)) == {k}


class Layers(torch.nn.Module):
    """Two attention layers between residuals: torch's own, or one with separate projections."""

    class Apart(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (torch.nn.Linear(D, D) for _ in range(4))

        def forward(self, x: Any) -> Any:
            q, k, v = (p(x).unflatten(-1, (N, H)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            return self.o_proj(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def __init__(self, whole: bool) -> None:
        super().__init__()
        make = (lambda: torch.nn.MultiheadAttention(D, N, batch_first=True)) if whole else Layers.Apart
        self.whole, self.m = whole, torch.nn.ModuleList(make() for _ in range(2))

    def forward(self, x: Any) -> Any:
        for layer in self.m:
            x = x + (layer(x, x, x, need_weights=False)[0] if self.whole else layer(x))
        return x


@pytest.mark.parametrize(
    "whole", [pytest.param(True, id="fused"), pytest.param(False, id="apart", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("stacked", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["listed", "stacked"])
def test_an_attention_layer_of_linen_is_one_rule(whole, stacked):
    from flax import linen as nn

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any = None) -> Any:
            return x + nn.MultiHeadDotProductAttention(N, name="attention")(x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            if stacked:
                return nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)(name="layer")(
                    x, None
                )[0]
            for k in range(2):
                x, _ = Layer(name=f"layer_{k}")(x)
            return x

    function, shapes = linen(Model(), np.zeros((3, 7, D)))
    module = Layers(whole)
    found = derive(function, module, shapes)
    start = "params/layer" if stacked else "params/layer_{i}"
    said = f"- layer: flax.linen.MultiHeadDotProductAttention\n  from: {start}/attention\n"
    said += "  stacked: {i: 0}\n" if stacked else ""
    to = "m.{i}" if whole else '{module: "m.{i}", projections: "{q,k,v}_proj", output: o_proj}'
    assert rules(found, module) == [f"{said}  axes: DNH\n  attention: {to}"]
