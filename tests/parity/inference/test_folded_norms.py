"""Batch norms that a program folds into one factor and one bias, as DETR's `FrozenBatchNorm2d`: the mean is a parameter as elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as linen_nn
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from support.inferred import derive, floats, linen, rules, sources

D = 4
TENSORS = ("weight", "bias", "running_mean", "running_var")


class Norms(linen_nn.Module):
    @linen_nn.compact
    def __call__(self, x: Any) -> Any:
        for i in range(2):
            x = linen_nn.Dense(D, use_bias=False, name=f"layer_{i}")(x)
            x = jnp.tanh(linen_nn.BatchNorm(use_running_average=True, name=f"norm_{i}")(x))
        return x


def detr(x: Any, w: Any, b: Any, m: Any, v: Any) -> Any:
    scale = w * (v + 1e-5).rsqrt()
    return x * scale + (b - m * scale)


def in_turns(x: Any, w: Any, b: Any, m: Any, v: Any) -> Any:
    deviation = (v + 1e-5).sqrt()
    return (x / deviation - m / deviation) * w + b


def taken_away(x: Any, w: Any, b: Any, m: Any, v: Any) -> Any:
    scale = (v + 1e-5).rsqrt() * w
    return scale * x - (scale * m - b)


def as_written(x: Any, w: Any, b: Any, m: Any, v: Any) -> Any:
    return (x - m) * (v + 1e-5).rsqrt() * w + b


class Frozen(torch.nn.Module):
    """A batch norm whose tensors are buffers, for the channels in axis 1."""

    def __init__(self, norm: Callable[..., Any]) -> None:
        super().__init__()
        self.norm = norm
        for name in TENSORS:
            self.register_buffer(name, torch.ones(D))

    def forward(self, x: Any) -> Any:
        return self.norm(x, *(getattr(self, name).reshape(1, -1, 1) for name in TENSORS))


class Module(torch.nn.Module):
    def __init__(self, *norms: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in norms)
        self.norms = torch.nn.ModuleList(norms)

    def forward(self, x: Any) -> Any:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x).transpose(1, 2)).transpose(1, 2).tanh()
        return x


def frozen(norm: Callable[..., Any]) -> torch.nn.Module:
    return Module(*(Frozen(norm) for _ in range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("norm", [detr, in_turns, taken_away, as_written])
def test_a_frozen_batch_norm_has_a_rule_for_each_tensor(norm: Callable[..., Any]) -> None:
    function, shapes = linen(Norms(), np.zeros((3, 5, D)))
    net = frozen(norm)
    written = rules(derive(function, net, shapes, floats(3, 5, D)), net)
    assert written[-2:] == [
        "- from: params/norm_{j}/{scale,bias}\n  parameter: norms.{j}.{weight,bias}",
        "- from: batch_stats/norm_{j}/{mean,var}\n  parameter: norms.{j}.running_{mean,var}",
    ]


@pytest.mark.slow
def test_a_function_that_folds_it_against_the_module_of_torch() -> None:
    leaves = {f"{n}_{i}": shape for i in range(2) for n, shape in {"k": (D, D), **dict.fromkeys("wbmv", (D,))}.items()}

    def function(p: Any, x: Any) -> Any:
        for i in range(2):
            scale = p[f"w_{i}"] / jnp.sqrt(p[f"v_{i}"] + 1e-5)
            x = jnp.tanh(x @ p[f"k_{i}"] * scale + (p[f"b_{i}"] - p[f"m_{i}"] * scale))
        return x

    net = Module(*(torch.nn.BatchNorm1d(D) for _ in range(2)))
    found = derive(function, net, leaves, floats(3, 5, D))
    assert found.complete and sources(found)["norms.1.running_mean"] == "m_1"
    assert any("batch_norm: norms.{" in rule for rule in rules(found, net))


def _other_epsilon(x: Any, w: Any, b: Any, m: Any, v: Any) -> Any:
    scale = w * (v + 1e-3).rsqrt()
    return x * scale + (b - m * scale)


def _mean_unscaled(x: Any, w: Any, b: Any, m: Any, v: Any) -> Any:
    return x * (w * (v + 1e-5).rsqrt()) + (b - m * (v + 1e-5).rsqrt())


def _bias_scaled(x: Any, w: Any, b: Any, m: Any, v: Any) -> Any:
    scale = w * (v + 1e-5).rsqrt()
    return x * scale + (b - m) * scale


@pytest.mark.slow
@pytest.mark.parametrize("fault", [_other_epsilon, _mean_unscaled, _bias_scaled])
def test_a_fault_in_it_is_not_derived(fault: Callable[..., Any]) -> None:
    function, shapes = linen(Norms(), np.zeros((3, 5, D)))
    found = derive(function, frozen(fault), shapes, floats(3, 5, D))
    assert found.proof is None and found.differences
