"""`infer` finds RoPE's order of pairs, and experts that are stacked on one side."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, grades, sources

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
    found = derive(_attention(interleaved), Attention(target), shapes)
    assert found.complete
    assert sources(found) == {"m.0.weight": "v", "m.1.weight": "k", "m.2.weight": "q", "m.3.weight": "o"}
    assert [found.tensor(f"m.{k}.weight").grade for k in (1, 2)] == [Grade.DERIVED] * 2
    names = {(True, False): "interleaved to half-split", (False, True): "half-split to interleaved"}
    rope = {(tensor, fact.value) for fact in found.facts if fact.name == "rope" for tensor in fact.tensors}
    expected = names.get((interleaved, target))
    assert rope == ({("m.1.weight", expected), ("m.2.weight", expected)} if expected else set())


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


@pytest.mark.parametrize("kind", [Listed, Stacked])
def test_experts(kind):
    shapes = {"g": (D, 3), "a": (3, D, D), "b": (3, D, D)}
    found = derive(_experts, kind(), shapes)
    assert found.complete and grades(found) == {Grade.DERIVED}
    for name, leaf in (("a", "a"), ("b", "b")):
        for k in range(3):
            tensor = found.tensor(f"e.{k}.{'ab'.index(name)}.weight" if kind is Listed else name)
            positions = np.concatenate([part.positions for part in tensor.parts])
            rows = positions if kind is Listed else positions.reshape(3, -1)[k]
            assert tensor.parts[0].leaf == leaf and set(rows // (D * D)) == {k}
