"""Parameters that enter a kernel which nothing looks into: a kernel of Pallas, or a function of the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas
from torch import nn

from convert.inference.derivation import Derivation, Grade
from support.inferred import WIDTH, derive, floats, rules, sources
from support.marks import slow_but

D, H = WIDTH, 8
SHAPES = {"s": (D,), "w": (D, H), "b": (H,), "v": (H, D)}


class Net(nn.Module):
    def __init__(self, between: Any = torch.tanh) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.RMSNorm(D, eps=1e-6), nn.Linear(D, H), nn.Linear(H, D, bias=False)
        self.between = between

    def forward(self, x: Any) -> Any:
        return self.second(self.between(self.first(self.norm(x))))


def kernel(function: Any, size: int, x: Any, *parameters: Any) -> Any:
    def body(*refs: Any) -> None:
        refs[-1][...] = function(*(ref[...] for ref in refs[:-1]))

    return pallas.pallas_call(body, out_shape=jax.ShapeDtypeStruct((*x.shape[:-1], size), x.dtype), interpret=True)(
        x, *parameters
    )


def host(function: Any, size: int, x: Any, *parameters: Any) -> Any:
    def run(*arrays: Any) -> Any:
        return np.asarray(function(*map(np.asarray, arrays)), x.dtype)

    return jax.pure_callback(run, jax.ShapeDtypeStruct((*x.shape[:-1], size), x.dtype), x, *parameters)


def norm(x: Any, scale: Any) -> Any:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


CALLS = {
    "product": lambda p, x: jnp.tanh(kernel(lambda x, w: x @ w, H, norm(x, p["s"]), p["w"]) + p["b"]) @ p["v"],
    "turned": lambda p, x: jnp.tanh(kernel(lambda x, w: x @ w.T, H, norm(x, p["s"]), p["w"].T) + p["b"]) @ p["v"],
    "layer": lambda p, x: kernel(lambda x, w, b: jnp.tanh(x @ w + b), H, norm(x, p["s"]), p["w"], p["b"]) @ p["v"],
    "norm": lambda p, x: jnp.tanh(kernel(norm, D, x, p["s"]) @ p["w"] + p["b"]) @ p["v"],
    "host": lambda p, x: host(lambda x, w, b: np.tanh(x @ w + b), H, norm(x, p["s"]), p["w"], p["b"]) @ p["v"],
}


def found(name: str, module: nn.Module) -> Derivation:
    return derive(CALLS[name], module, SHAPES, floats(9, D))


@pytest.mark.parametrize("name", slow_but(["layer", "norm", "host"], CALLS))
def test_parameters_of_a_kernel_are_derived(name: str) -> None:
    module = Net()
    text = "\n".join(rules(found(name, module), module))
    assert "rms_norm: norm" in text or "parameter: norm.weight" in text
    assert "linear: first" in text and "linear: second" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layer", "host"])
def test_another_function_behind_the_product_is_a_difference(name: str) -> None:
    made = found(name, Net(torch.sigmoid))
    (difference,) = made.differences
    assert made.proof is None and "applies sigmoid" in (difference.brief or difference.problem)
    assert made.tensor("first.weight").grade is not Grade.DERIVED


@pytest.mark.slow
def test_a_second_product_in_one_kernel_is_found_by_the_outputs() -> None:
    def function(p: Any, x: Any) -> Any:
        return kernel(lambda x, w, b, v: jnp.tanh(x @ w + b) @ v, D, norm(x, p["s"]), p["w"], p["b"], p["v"])

    made = derive(function, Net(), SHAPES, floats(9, D))
    assert made.complete and sources(made)["second.weight"] == "v"
