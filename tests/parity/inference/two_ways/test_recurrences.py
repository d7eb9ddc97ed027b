"""RWKV: time mixing is a recurrence in one program, and one product of all pairs of steps in the other; no value inside is shared."""

from __future__ import annotations

from collections.abc import Mapping
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

C, HEADS, N, STEPS, ROWS, TOKENS = 8, 2, 4, 4, 3, 9
Leaves = Mapping[str, Any]


def _shapes(layers: int, mixed: int) -> dict[str, tuple[int, ...]]:
    """The leaves: those of `mixed` projections and of all layers are stacked."""
    of_layers = {
        "norm/scale": (C,),
        "norm/bias": (C,),
        "mix": (mixed, C),
        "project": (mixed, C, C),
        "decay": (HEADS, N),
        "bonus": (HEADS, N),
        "out": (C, C),
    } | ({"group/scale": (HEADS, N), "group/bias": (HEADS, N)} if mixed > 3 else {})
    return {
        "embed": (TOKENS, C),
        **{name: (layers, *shape) for name, shape in of_layers.items()},
        "last/scale": (C,),
        "last/bias": (C,),
        "head": (C, TOKENS),
    }


def _normed(x: Any, scale: Any, bias: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def _mixed(p: Leaves, x: Any) -> Any:
    before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    mix = p["mix"][:, None, None]
    return jnp.einsum("sbtc,scd->sbtd", x * mix + before * (1 - mix), p["project"])


def _states(p: Leaves, x: Any) -> Any:
    """RWKV-5: a matrix for each head is the state."""
    r, k, v, g = _mixed(p, x)
    r, k, v = (jnp.moveaxis(z.reshape(ROWS, STEPS, HEADS, N), 1, 0) for z in (r, k, v))
    decay = jnp.exp(-jnp.exp(p["decay"]))[..., None]

    def step(state: Any, now: Any) -> Any:
        r, k, v = now
        kv = k[..., :, None] * v[..., None, :]
        return decay * state + kv, jnp.einsum("bhi,bhij->bhj", r, state + p["bonus"][..., None] * kv)

    _, y = jax.lax.scan(step, jnp.zeros((ROWS, HEADS, N, N), x.dtype), (r, k, v))
    y = _normed(jnp.moveaxis(y, 0, 1), p["group/scale"], p["group/bias"]).reshape(x.shape)
    return (y * jax.nn.silu(g)) @ p["out"]


def _running_maximum(p: Leaves, x: Any) -> Any:
    """RWKV-4: a mean of values, with weights that decay; the largest exponent is kept beside it."""
    r, k, v = _mixed(p, x)
    decay, bonus = -jnp.exp(p["decay"].reshape(-1)), p["bonus"].reshape(-1)

    def step(state: Any, now: Any) -> Any:
        above, below, top = state
        k, v = now
        high = jnp.maximum(top, bonus + k)
        old, new = jnp.exp(top - high), jnp.exp(bonus + k - high)
        y = (old * above + new * v) / (old * below + new)
        high = jnp.maximum(top + decay, k)
        old, new = jnp.exp(top + decay - high), jnp.exp(k - high)
        return (old * above + new * v, old * below + new, high), y

    zero = jnp.zeros((ROWS, C), x.dtype)
    _, y = jax.lax.scan(step, (zero, zero, zero - 1e38), (jnp.moveaxis(k, 1, 0), jnp.moveaxis(v, 1, 0)))
    return (jax.nn.sigmoid(r) * jnp.moveaxis(y, 0, 1)) @ p["out"]


class TimeMix(nn.Module):
    """`fault`: what else it computes."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.mix_k, self.mix_v, self.mix_r = (nn.Parameter(torch.ones(C)) for _ in range(3))
        self.decay, self.bonus = (nn.Parameter(torch.ones(C)) for _ in range(2))
        self.key, self.value, self.receptance, self.out = (nn.Linear(C, C, bias=False) for _ in range(4))

    def mixed(self, x: Any, mix: Any, layer: Any) -> Any:
        before = nn.functional.pad(x, (0, 0, 1, -1))
        return layer(x * mix + before * (1 - mix))

    def distances(self) -> Any:
        at = torch.arange(STEPS)
        return at[:, None] - at - (0 if self.fault == "distance" else 1)


class PairsOfSteps(TimeMix):
    """RWKV-5."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(fault)
        self.mix_g = nn.Parameter(torch.ones(C))
        self.gate = nn.Linear(C, C, bias=False)
        self.group = nn.GroupNorm(HEADS, C)

    def forward(self, x: Any) -> Any:
        k, v, r = (
            self.mixed(x, mix, layer).unflatten(-1, (HEADS, N)).transpose(1, 2)
            for mix, layer in ((self.mix_k, self.key), (self.mix_v, self.value), (self.mix_r, self.receptance))
        )
        far = self.distances()
        decay, bonus = (z.view(HEADS, 1, 1, N) for z in (self.decay, self.bonus))
        w = torch.exp(-torch.exp(decay) * far.clamp(min=0)[..., None]) * (far >= 0)[..., None]
        w = w + torch.eye(STEPS)[..., None] * bonus
        y = torch.einsum("bhtn,bhsn,htsn->bhts", r, k, w) @ v
        y = self.group(y.transpose(1, 2).reshape(ROWS * STEPS, C)).view(x.shape)
        g = self.mixed(x, self.mix_g, self.gate)
        return self.out(y * (nn.functional.gelu(g) if self.fault == "gate" else nn.functional.silu(g)))


class Softmax(TimeMix):
    """RWKV-4."""

    def forward(self, x: Any) -> Any:
        far = self.distances()[..., None]
        logits = torch.where(far == -1, self.bonus, -torch.exp(self.decay) * far)
        k, v = self.mixed(x, self.mix_k, self.key), self.mixed(x, self.mix_v, self.value)
        weights = torch.softmax(
            (k[:, None] + logits).masked_fill(far < -1, -torch.inf), 1 if self.fault == "axis" else 2
        )
        r = self.mixed(x, self.mix_r, self.receptance)
        return self.out((r.tanh() if self.fault == "gate" else r.sigmoid()) * (weights * v[:, None]).sum(2))


class Layers(nn.Module):
    def __init__(self, layers: list[TimeMix]) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, C)
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in layers)
        self.layers = nn.ModuleList(layers)
        self.last = nn.LayerNorm(C)
        self.head = nn.Linear(C, TOKENS, bias=False)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(self.last(x))


def _inputs(seed: int) -> dict[str, Any]:
    return {"tokens": np.random.default_rng(seed).integers(0, TOKENS, (ROWS, STEPS))}


def _derived(mixing: Any, layers: list[TimeMix]) -> Derivation:
    shapes = _shapes(len(layers), 4 if mixing is _states else 3)
    stacked = [name for name, shape in shapes.items() if name not in ("embed", "head") and not name.startswith("last/")]

    def forward(p: Leaves, inputs: Mapping[str, Any]) -> Any:
        x = p["embed"][inputs["tokens"]]
        for k in range(len(layers)):
            one = {name: p[name][k] for name in stacked}
            x = x + mixing(one, _normed(x, one["norm/scale"], one["norm/bias"]))
        return {"y": _normed(x, p["last/scale"], p["last/bias"]) @ p["head"]}

    return infer(forward, Layers(layers).eval(), lambda m, x: {"y": m(**x)}, _inputs, shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixing", "layer"), [(_states, PairsOfSteps), pytest.param(_running_maximum, Softmax, marks=pytest.mark.slow)]
)
def test_a_recurrence_is_one_product_of_all_pairs_of_steps(mixing: Any, layer: type[TimeMix]) -> None:
    derivation = _derived(mixing, [layer() for _ in range(2)])
    assert derivation.complete
    assert grades(derivation) <= {Grade.DERIVED, Grade.INTERCHANGEABLE}
    made = {
        tensor.name: [(part.leaf, int(part.positions[0])) for part in tensor.parts] for tensor in derivation.tensors
    }
    assert made["layers.1.value.weight"] == [("project", (6 if mixing is _states else 5) * C * C)]
    assert made["layers.1.decay"] == [("decay", C)]


@pytest.mark.parametrize(
    ("mixing", "layer", "fault"),
    [
        pytest.param(_states, PairsOfSteps, "distance", marks=pytest.mark.slow),
        pytest.param(_states, PairsOfSteps, "gate", marks=pytest.mark.slow),
        pytest.param(_running_maximum, Softmax, "axis", marks=pytest.mark.slow),
        pytest.param(_running_maximum, Softmax, "gate", marks=pytest.mark.slow),
    ],
)
def test_another_recurrence_is_never_derived(mixing: Any, layer: type[TimeMix], fault: str) -> None:
    derivation = _derived(mixing, [layer(), layer(fault)])
    assert UNPROVEN & grades(derivation)
    assert derivation.differences
