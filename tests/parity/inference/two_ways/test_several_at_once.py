"""What one program computes at once and the other piece by piece: networks over stacked parameters, points in one sequence, positions that a mask keeps, heads that are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import UNPROVEN, grades

D, ROWS, POINTS, OTHERS, HEADS = 6, 3, 7, 5, 3
Leaves = Mapping[str, Any]
FAULTS = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_search_by_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no tensor be found by the outputs alone, as in a model with more tensors than that search finds."""
    monkeypatch.setattr("convert.inference.infer.found_by_outputs", lambda *_: SimpleNamespace(tensors=None, note=""))


def _inputs(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    mask = np.arange(POINTS) < np.array([7, 4, 2])[:, None]
    return {"x": rng.normal(size=(ROWS, POINTS, D)), "z": rng.normal(size=(ROWS, OTHERS, D)), "mask": mask}


def _derived(function: Any, module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Derivation:
    return infer(
        lambda p, given: {"y": function(p, **given)}, module.eval(), lambda m, given: {"y": m(**given)}, _inputs, shapes
    )


def _is_derived(found: Derivation) -> bool:
    return found.complete and grades(found) <= {Grade.DERIVED, Grade.INTERCHANGEABLE}


def _differs(found: Derivation) -> bool:
    return bool(found.differences) and bool(grades(found) & UNPROVEN)


def _normed(x: Any, gain: Any, shift: Any) -> Any:
    """The gain before the deviation: no value in between is that of `torch.nn.LayerNorm`."""
    x = x - x.mean(-1, keepdims=True)
    return gain * x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) + shift


ENCODER = {"in": (D, D), "b": (D,), "q": (D, D), "k": (D, D), "v": (D, D), "gain": (D,), "shift": (D,), "out": (D, D)}


def _encoded(p: Leaves, x: Any, mask: Any) -> Any:
    h = jax.nn.relu(x @ p["in"] + p["b"])
    scores = jnp.where(mask[..., None, :], (h @ p["q"]) @ (h @ p["k"]).mT, -jnp.inf)
    h = _normed(h + jax.nn.softmax(scores / D**0.5, -1) @ (h @ p["v"]), p["gain"], p["shift"])
    return h @ p["out"]


def _two_encoders(p: Leaves, x: Any, z: Any, mask: Any) -> Any:
    one, two = jax.vmap(_encoded, in_axes=(0, None, None))(p, x, mask)
    return one * jnp.tanh(two)


class Encoder(nn.Module):
    def __init__(self, function: Any = torch.relu) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(D, D)
        self.q, self.k, self.v, self.out = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Any, mask: Any) -> Any:
        h = self.function(self.first(x))
        scores = self.q(h) @ self.k(h).mT / D**0.5
        weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        return self.out(self.norm(h + weights @ self.v(h)))


class TwoEncoders(nn.Module):
    def __init__(self, *functions: Any) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(map(Encoder, functions))

    def forward(self, x: Any, z: Any, mask: Any) -> Any:
        one, two = (encoder(x, mask) for encoder in self.encoders)
        return one * two.tanh()


@pytest.mark.slow
@pytest.mark.parametrize("functions", [(torch.relu, torch.relu), (torch.relu, nn.functional.gelu)])
def test_networks_over_stacked_parameters(functions: Any) -> None:
    found = _derived(_two_encoders, TwoEncoders(*functions), {name: (2, *shape) for name, shape in ENCODER.items()})
    assert _differs(found) if nn.functional.gelu in functions else _is_derived(found)


def _two_norms(p: Leaves, x: Any, z: Any, mask: Any) -> Any:
    def normed(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + scale)

    return jax.vmap(lambda g, h: normed(normed(x, g), h))(p["g"], p["h"])


class TwoNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.ModuleList(nn.RMSNorm(D, eps=1e-6) for _ in range(2)) for _ in range(2))

    def forward(self, x: Any, z: Any, mask: Any) -> Any:
        return torch.stack([last(first(x)) for first, last in zip(self.first, self.last, strict=True)])


def test_norms_over_stacked_parameters() -> None:
    """No product has a matrix for each."""
    assert _is_derived(_derived(_two_norms, TwoNorms(), {"g": (2, D), "h": (2, D)}))


MASKED = {"in": (D, D), "gain": (D,), "shift": (D,), "out": (D, D), "b": (D,)}


def _masked_mean(p: Leaves, x: Any, z: Any, mask: Any) -> Any:
    h = _normed(x @ p["in"], p["gain"], p["shift"])
    return (jnp.where(mask[..., None], h, 0).sum(1) / mask.sum(-1, keepdims=True)) @ p["out"] + p["b"]


class MaskedMean(nn.Module):
    """`of_all`: whether it divides by the number of all positions."""

    def __init__(self, *, of_all: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(D, D, bias=False), nn.LayerNorm(D), nn.Linear(D, D)
        self.of_all = of_all

    def forward(self, x: Any, z: Any, mask: Any) -> Any:
        keep = mask.to(x.dtype)[..., None]
        h = (self.norm(self.first(x)) * keep).sum(1)
        return self.out(h / (POINTS if self.of_all else keep.sum(1)))


@pytest.mark.parametrize("of_all", [False, pytest.param(True, marks=FAULTS)])
def test_positions_that_a_mask_keeps(of_all: bool) -> None:
    found = _derived(_masked_mean, MaskedMean(of_all=of_all), MASKED)
    assert _differs(found) if of_all else _is_derived(found)


POSITIONS = {"in": (D, D), "b": (D,), "out": (D, D), "c": (D,), "head": (D, D)}


def _twice(p: Leaves, x: Any, z: Any, mask: Any) -> Any:
    keys, queries = (jax.nn.relu(one @ p["in"] + p["b"]) @ p["out"] + p["c"] for one in (x, z))
    return jax.nn.softmax(queries @ keys.mT, -1) @ (x @ p["head"])


class Once(nn.Module):
    """Joins the points, whose numbers differ; `first`: so many rows are the queries."""

    def __init__(self, first: int = OTHERS) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
        self.head, self.first = nn.Linear(D, D, bias=False), first

    def forward(self, x: Any, z: Any, mask: Any) -> Any:
        rows = self.embed(torch.cat([z, x], 1))
        queries, keys = rows[:, : self.first], rows[:, -POINTS:]
        return ((queries @ keys.mT).softmax(-1) @ self.head(x))[:, :OTHERS]


@pytest.mark.parametrize("module", [Once(), pytest.param(Once(OTHERS + 1), marks=FAULTS)])
def test_points_in_one_sequence(module: Once) -> None:
    """With one row more, which is cut off again, the programs are equal as well."""
    assert _is_derived(_derived(_twice, module, POSITIONS))


@FAULTS
def test_points_of_the_other_sequence_are_a_difference() -> None:
    class Exchanged(Once):
        def forward(self, x: Any, z: Any, mask: Any) -> Any:
            rows = self.embed(torch.cat([x[:, :OTHERS], z, x[:, OTHERS:]], 1))
            return (rows[:, :OTHERS] @ rows[:, -POINTS:].mT).softmax(-1) @ self.head(x)

    assert _differs(_derived(_twice, Exchanged(), POSITIONS))


LAYERS = 2
ATTENTION = {
    f"{k}/{name}": shape
    for k in range(LAYERS)
    for name, shape in {"q": (D, HEADS, 2), "k": (D, HEADS, 2), "v": (D, 4), "out": (4, D)}.items()
}


def _averaged_weights(p: Leaves, x: Any, z: Any, mask: Any) -> Any:
    for layer in range(LAYERS):
        q, k = (jnp.einsum("bnd,dhc->bhnc", x, p[f"{layer}/{name}"]) for name in "qk")
        weights = jax.nn.softmax(q @ k.mT, -1).mean(1)
        x = jnp.tanh(x + (weights @ (x @ p[f"{layer}/v"])) @ p[f"{layer}/out"])
    return x


class AveragedHeads(nn.Module):
    """As in the Temporal Fusion Transformer: all heads have the same values."""

    def __init__(self, average: Any) -> None:
        super().__init__()
        self.q, self.k = (nn.ModuleList(nn.Linear(D, 2, bias=False) for _ in range(HEADS)) for _ in range(2))
        self.v, self.out, self.average = nn.Linear(D, 4, bias=False), nn.Linear(4, D, bias=False), average

    def forward(self, x: Any) -> Any:
        v = self.v(x)
        heads = [(q(x) @ k(x).mT).softmax(-1) @ v for q, k in zip(self.q, self.k, strict=True)]
        return torch.tanh(x + self.out(self.average(torch.stack(heads))))


class Averaged(nn.Module):
    def __init__(self, average: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(AveragedHeads(average) for _ in range(LAYERS)))

    def forward(self, x: Any, z: Any, mask: Any) -> Any:
        return self.layers(x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean", "amax"])
def test_heads_that_are_averaged(name: str) -> None:
    found = _derived(_averaged_weights, Averaged(lambda x: getattr(torch, name)(x, 0)), ATTENTION)
    assert _differs(found) if name == "amax" else _is_derived(found)
    assert name == "amax" or found.tried < 600  # 805 where what each head gives is no value of the JAX model
