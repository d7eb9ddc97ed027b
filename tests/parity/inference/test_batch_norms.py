"""Norms without a scale, also in a stack, and batch norms of an ensemble: each has its rule, and a planted fault has none."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import derive, floats, linen, rules

D = 4


class Blocks(torch.nn.Module):
    """A norm and a layer, several times."""

    def __init__(self, *norms: torch.nn.Module, mixed: bool = False) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(norms)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in norms)
        self.mixed = mixed

    def forward(self, x: Any) -> Any:
        norms = list(self.norms)
        for norm, layer in zip(norms[::-1] if self.mixed else norms, self.layers, strict=True):
            x = layer(norm(x)).tanh()
        return x


class Block(nn.Module):
    norm: nn.Module

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        return jnp.tanh(nn.Dense(D)(self.norm.copy(name="norm")(x))), None


def block(name: str, **kwargs: Any) -> nn.Module:
    running = {"use_running_average": True} if name == "BatchNorm" else {}
    return getattr(nn, name)(**running, **kwargs, parent=None)


class Stack(nn.Module):
    norm: nn.Module
    scanned: bool = True

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if not self.scanned:
            return Block(self.norm)(x)[0]
        axes = {"params": 0, "batch_stats": 0}
        return nn.scan(Block, axes, split_rngs={"params": True}, length=3)(self.norm)(x, None)[0]


NONE = {"use_scale": False, "use_bias": False}
BIAS = {"use_scale": False}


@pytest.mark.parametrize(
    ("norm", "module", "lines"),
    [
        (("BatchNorm", NONE), lambda: torch.nn.BatchNorm1d(D, affine=False), ("mean", "batch_norm: {module: norms.0, parameters: nothing}")),
        (("BatchNorm", NONE), lambda: torch.nn.BatchNorm1d(D), ("mean", "batch_norm: {module: norms.0, parameters: weight and bias}")),
        (("BatchNorm", BIAS), lambda: torch.nn.BatchNorm1d(D), ("bias", "batch_norm: {module: norms.0, parameters: weight and bias}")),
        (("LayerNorm", BIAS), lambda: torch.nn.LayerNorm(D, 1e-6), ("bias", "layer_norm: {module: norms.0, parameters: weight and bias}")),
        (("GroupNorm", {"num_groups": 2, **BIAS}), lambda: torch.nn.GroupNorm(2, D, 1e-6), ("bias", "group_norm: {module: norms.0, parameters: weight and bias}")),
    ],
)  # fmt: skip
def test_a_norm_without_a_scale(norm: Any, module: Any, lines: tuple[str, str]) -> None:
    name, kwargs = norm
    function, shapes = linen(Stack(block(name, **kwargs), scanned=False), np.zeros((5, D)))
    net = Blocks(module())
    first, *_ = rules(derive(function, net, shapes, floats(5, D)), net)
    key, target = lines
    assert (
        first.startswith(f"- {key}: ")
        and "\n  multiplies_by: 1\n" in first
        and first.replace(chr(34), "").endswith(target)
    )


@pytest.mark.slow
def test_the_statistics_of_a_stack_without_scale_and_bias() -> None:
    function, shapes = linen(Stack(block("BatchNorm", **NONE)), np.zeros((5, D)))
    net = Blocks(*(torch.nn.BatchNorm1d(D, affine=False) for _ in range(3)))
    first, _ = rules(derive(function, net, shapes, floats(5, D)), net)
    assert "\n  stacked: {i: 0}\n" in first and first.endswith('batch_norm: {module: "norms.{i}", parameters: nothing}')
    other = Blocks(*(torch.nn.BatchNorm1d(D, affine=False, eps=1e-3) for _ in range(3)))
    assert not derive(function, other, shapes, floats(5, D)).complete


class Critic(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for k in range(2):
            x = jnp.tanh(nn.Dense(D, name=f"fc{k}")(nn.BatchNorm(use_running_average=True, name=f"bn{k}")(x)))
        return x


class Ensemble(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        axes = {"params": 0, "batch_stats": 0}
        return nn.vmap(Critic, axes, split_rngs={"params": True}, in_axes=None, axis_size=2)(name="critics")(x)


class Critics(torch.nn.Module):
    def __init__(self, epsilon: float = 1e-5, mixed: bool = False) -> None:
        super().__init__()
        each = (Blocks(*(torch.nn.BatchNorm1d(D, epsilon) for _ in range(2)), mixed=mixed and k == 1) for k in range(2))
        self.critics = torch.nn.ModuleList(each)

    def forward(self, x: Any) -> Any:
        return torch.stack([critic(x) for critic in self.critics])


@pytest.mark.slow
def test_batch_norms_of_an_ensemble_that_sees_the_same_data() -> None:
    function, shapes = linen(Ensemble(), np.zeros((5, D)))
    net = Critics()
    norms, layers = rules(derive(function, net, shapes, floats(5, D)), net)
    assert "mean: batch_stats/critics/bn{j}/mean\n" in norms and "stacked: {i: 0}" in norms
    assert norms.endswith("batch_norm: critics.{i}.norms.{j}") and layers.endswith(("{i}.layers.{j}", "{i}.layers.{k}"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["epsilon", "sum"])
def test_another_ensemble_is_not_derived(fault: str) -> None:
    function, shapes = linen(Ensemble(), np.zeros((5, D)))
    net = Critics(1e-3) if fault == "epsilon" else Critics()
    if fault == "sum":
        net.forward = lambda x: torch.stack([net.critics[0](x), net.critics[0](x) + net.critics[1](x)])
    assert not derive(function, net, shapes, floats(5, D)).complete


@pytest.mark.slow
def test_one_batch_norm_that_becomes_two_has_two_counters() -> None:
    """Its rule has both as a list of targets, and writes their counters."""

    def function(w: Any, x: Any) -> Any:
        for layer in "ab":
            x = (x - w["mean"]) / jnp.sqrt(w["var"] + 1e-5) * w["scale"] + w["bias"]
            x = jnp.tanh(x @ w[layer] + w[f"{layer}_bias"])
        return x

    module = Blocks(torch.nn.BatchNorm1d(D), torch.nn.BatchNorm1d(D))
    vectors = dict.fromkeys(("scale", "bias", "mean", "var", "a_bias", "b_bias"), (D,))
    found = derive(function, module, {**vectors, "a": (D, D), "b": (D, D)}, floats(9, D))
    written = write_rules(found, model_of_module(module, "Blocks"))
    assert "batch_norm: [norms.0, norms.1]" in written.text and "constant" not in written.text, written.text


class Bottleneck(torch.nn.Module):
    """Layers and BatchNorms with nothing in between; the last norm has another epsilon if there is a fault."""

    def __init__(self, fault: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6, bias=False) for _ in range(2))
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm1d(6), torch.nn.BatchNorm1d(6, 1e-3 if fault else 1e-5)])

    def forward(self, x: Any) -> Any:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x).mT).mT
        return x


@pytest.mark.slow
@pytest.mark.parametrize("fault", [False, True])
def test_another_epsilon_of_a_norm_behind_a_linear_bottleneck(fault: bool) -> None:
    def function(w: Any, x: Any) -> Any:
        for k in "ab":
            x = x @ w[f"{k}k"]
            x = (x - w[f"{k}m"]) / jnp.sqrt(w[f"{k}v"] + 1e-5) * w[f"{k}g"] + w[f"{k}s"]
        return x

    shapes = {f"{k}{name}": (6, 6) if name == "k" else (6,) for k in "ab" for name in "kmvgs"}
    found = derive(function, Bottleneck(fault), shapes, floats(3, 7, 6))
    assert found.complete is not fault
    assert not fault or any("0.001" in difference.brief for difference in found.differences)
