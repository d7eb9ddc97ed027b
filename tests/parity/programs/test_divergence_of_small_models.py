"""Mistakes of a few lines, each in a model of a few operations: what the comparison of the two records says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.functional import hardswish, leaky_relu, relu, silu

from convert.layers.activations import NUMPY_ACTIVATIONS
from convert.numerics.compare import difference
from convert.numerics.precision import jax_precision
from convert.programs.divergence.search import diverge
from convert.programs.divergence.wording import Named, named
from convert.programs.record_jax import record_jax
from convert.programs.record_torch import record_torch

Arrays = dict[str, Any]
RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "w": RANDOM.standard_normal((8, 8)),
    "v": RANDOM.standard_normal((8, 8)),
    "g": 1 + 0.3 * RANDOM.standard_normal(8),
    "h": 1 + 0.3 * RANDOM.standard_normal(8),
    "rel": RANDOM.standard_normal(9),
    "conv": RANDOM.standard_normal((8, 8, 3)),
}
INPUTS = {"x": RANDOM.standard_normal((3, 10, 8)), "real": np.arange(10)[None] < np.array([10, 6, 8])[:, None]}


def norm(x: Any) -> Any:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def distances(low: int, high: int, of: Any) -> Any:
    return (of.arange(10)[None] - of.arange(10)[:, None]).clip(low, high) + 4


def attend(q: Any, k: Any, v: Any, heads: int) -> Any:
    q, k, v = (z.reshape(3, 10, heads, 8 // heads) for z in (q, k, v))
    s = torch.einsum("btnh,bsnh->bnts", q, k) * (8 // heads) ** -0.5
    return torch.einsum("bnts,bsnh->btnh", s.softmax(-1), v).reshape(3, 10, 8)


def heads_of_four(p: Arrays, x: Any, real: Any) -> Any:
    q, k, v = (z.reshape(3, 10, 2, 4) for z in (x @ p["w"], x @ p["v"], x))
    a = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / 2, -1)
    return jnp.einsum("bnts,bsnh->btnh", a, v).reshape(3, 10, 8)


def block(p: Arrays, x: Any, real: Any) -> Any:
    x = x + jnp.tanh((norm(x) * p["g"]) @ p["w"])
    return x + (norm(x) * p["h"]) @ p["v"]


def parallel(p: Arrays, x: Any, real: Any) -> Any:
    return x + torch.tanh((rms(x) * p["g"]) @ p["w"]) + (rms(x) * p["h"]) @ p["v"]


def pooled(x: Any) -> Any:
    return [x[:, 0], x.mean(1)]


TABLE = np.sin(np.arange(12)[:, None] * np.array([1, 0.3, 0.1, 0.03, 0.7, 0.2, 0.05, 0.9]))


@dataclass(frozen=True)
class Fault:
    """What the JAX model computes, what the target computes instead, the name, and what the sentence says."""

    right: Callable[[Arrays, Any, Any], Any]
    wrong: Callable[[Arrays, Any, Any], Any]
    name: str
    says: tuple[str, ...]


FAULTS = {
    "no soft cap at the end": Fault(
        lambda p, x, real: 8 * jnp.tanh((x @ p["w"]) / 8),
        lambda p, x, real: x @ p["w"],
        "operation missing",
        ("divides by 8, applies tanh, multiplies by 8", "uses it as it is"),
    ),
    "the output's axes in another order": Fault(
        lambda p, x, real: (x @ p["w"]).reshape(3, 10, 2, 4).swapaxes(-1, -2).reshape(3, 10, 8),
        lambda p, x, real: x @ p["w"],
        "elements in another order",
        ("the elements of", "are put in another order"),
    ),
    "joined in another order": Fault(
        lambda p, x, real: jnp.concatenate(pooled(jnp.tanh(x)), -1) @ jnp.concatenate([p["w"], p["v"]]),
        lambda p, x, real: torch.cat(pooled(torch.tanh(x))[::-1], -1) @ torch.cat([p["w"], p["v"]]),
        "elements in another order",
        ("with its elements in another order",),
    ),
    "an activation missing in front of a layer": Fault(
        lambda p, x, real: jax.nn.silu(x @ p["w"]) @ p["v"] + jax.nn.silu(x @ p["w"]),
        lambda p, x, real: (x @ p["w"]) @ p["v"] + silu(x @ p["w"]),
        "operation missing",
        ("applies sigmoid, multiplies", "uses it as it is"),
    ),
    "another norm's scale": Fault(
        lambda p, x, real: (norm(x) * p["g"]) @ p["w"] + (norm(x * x) * p["h"]) @ p["v"],
        lambda p, x, real: (rms(x) * p["g"]) @ p["w"] + (rms(x * x) * p["g"]) @ p["v"],
        "another parameter",
        ("the target uses g, and the JAX model h",),
    ),
    "relu for softplus": Fault(
        lambda p, x, real: jax.nn.softplus(x @ p["w"]) @ p["v"],
        lambda p, x, real: relu(x @ p["w"]) @ p["v"],
        "relu for softplus",
        ("relu for softplus",),
    ),
    "another slope": Fault(
        lambda p, x, real: jax.nn.leaky_relu(x @ p["w"], 0.1) @ p["v"],
        lambda p, x, real: leaky_relu(x @ p["w"], 0.3) @ p["v"],
        "leaky_relu with slope 0.3 for leaky_relu with slope 0.1",
        ("runs leaky_relu",),
    ),
    "hard swish for swish": Fault(
        lambda p, x, real: jax.nn.silu(x @ p["w"]) @ p["v"],
        lambda p, x, real: hardswish(x @ p["w"]) @ p["v"],
        "hard swish for silu",
        (),
    ),
    "positions from one on": Fault(
        lambda p, x, real: jnp.tanh(x + TABLE[:10]) @ p["w"],
        lambda p, x, real: torch.tanh(x + torch.tensor(TABLE)[1:11]) @ p["w"],
        "another constant",
        ("row k of the target's table is row k + 1 of the JAX model's",),
    ),
    "distances clipped elsewhere": Fault(
        lambda p, x, real: jax.nn.softmax(jnp.einsum("btd,bsd->bts", x @ p["w"], x) + p["rel"][distances(-4, 4, jnp)], -1) @ x,
        lambda p, x, real: (torch.einsum("btd,bsd->bts", x @ p["w"], x) + p["rel"][distances(-3, 3, torch)]).softmax(-1) @ x,
        "another part",
        ("of rel, the two pick other elements",),
    ),
    "fewer heads": Fault(
        heads_of_four,
        lambda p, x, real: attend(x @ p["w"], x @ p["v"], x, 1),
        "heads of another width",
        ("vectors of 8 features, and the JAX model of 4",),
    ),
    "a parallel block": Fault(block, parallel, "another operand", ("the JAX model gives it",)),
}  # fmt: skip


def said(right: Callable[..., Any], wrong: Callable[..., Any]) -> Named | None:
    with jax_precision("float64"):
        source = record_jax(lambda p, inputs: {"y": right(dict(p), **inputs)}, WEIGHTS, INPUTS)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, array in WEIGHTS.items():
                self.register_parameter(name, torch.nn.Parameter(torch.tensor(array)))

        def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = wrong(dict(self.named_parameters()), x, real)
            return made

    target = record_torch(Model().double(), lambda module, inputs: {"y": module(**inputs)}, INPUTS)
    want = source.outputs["y"].array
    found = diverge(source, target, "y", lambda got: difference(got, want).relative, 1e-9, 1e-10)
    return None if found is None else named(found, source, target, NUMPY_ACTIVATIONS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_mistake_is_named(name: str) -> None:
    fault = FAULTS[name]
    found = said(fault.right, fault.wrong)
    assert found is not None and found.name == fault.name
    for words in fault.says:
        assert words in found.problem
    assert found.fix
