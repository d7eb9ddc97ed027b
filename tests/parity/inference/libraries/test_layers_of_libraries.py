"""Layers of Equinox, Haiku, linen and nnx against those of torch: which rule is written, and with which numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from support.inferred import derive, floats, linen, rules
from support.marks import slow_but

D = 8
KEY = jax.random.key(0)
Function = tuple[Callable[[Mapping[str, Any], Any], Any], dict[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Case:
    """A pair of models.

    Attributes:
        source: makes the function and the shapes of its leaves.
        layers: of the target, in the order of its data.
        shape: of the inputs.
        written: lines that the rules have.
        to_target: permutation from the source's axes to the target's, and back for the output; None where they are equal.
    """

    source: Callable[[], Function]
    layers: Callable[[], list[torch.nn.Module]]
    shape: tuple[int, ...]
    written: tuple[str, ...]
    to_target: tuple[int, ...] | None = None


class Layers(torch.nn.Module):
    def __init__(self, layers: list[torch.nn.Module], to_target: tuple[int, ...] | None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.axes = to_target

    def forward(self, x: Any) -> Any:
        x = x if self.axes is None else x.permute(self.axes)
        for layer in self.layers:
            x = torch.sin(x) if isinstance(layer, torch.nn.Identity) else layer(x)
        return x if self.axes is None else x.permute(*map(int, np.argsort(self.axes)))


def of_tree(tree: Any, apply: Callable[[Any, Any], Any]) -> Function:
    """Return a function of leaves by name, of one of a tree."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    shapes = {name: tuple(np.shape(leaf)) for name, (_, leaf) in zip(names, paths, strict=True)}
    return lambda w, x: apply(jax.tree_util.tree_unflatten(structure, [w[name] for name in names]), x), shapes


def equinox(layers: list[Any]) -> Function:
    """A sequence of layers of Equinox; functions among them are activations."""
    arrays, rest = eqx.partition(layers, eqx.is_inexact_array)

    def apply(arrays: Any, x: Any) -> Any:
        for layer in eqx.combine(arrays, rest):
            x = layer(x)
        return x

    return of_tree(arrays, lambda arrays, x: jax.vmap(lambda x: apply(arrays, x))(x))


def haiku(run: Callable[[Any], Any], shape: tuple[int, ...]) -> Function:
    net = hk.without_apply_rng(hk.transform(run))
    return of_tree(net.init(KEY, jnp.zeros(shape)), net.apply)


def of_nnx(make: Callable[[nnx.Rngs], list[Any]]) -> Function:
    """A sequence of layers of nnx; functions among them are activations."""
    modules = nnx.List([layer for layer in make(nnx.Rngs(0)) if isinstance(layer, nnx.Module)])
    graph, state = nnx.split(modules)
    arrays = {"/".join(map(str, path)): x for path, x in nnx.to_flat_state(state)}
    paths = {"/".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}
    kept = {name: x for name, x in arrays.items() if not jnp.issubdtype(x.get_value().dtype, jnp.floating)}

    def apply(w: Mapping[str, Any], x: Any) -> Any:
        values = [(path, kept[name] if name in kept else arrays[name].replace(w[name])) for name, path in paths.items()]
        own = iter(nnx.merge(graph, nnx.from_flat_state(values)))
        for layer in make(nnx.Rngs(0)):
            x = next(own)(x) if isinstance(layer, nnx.Module) else layer(x)
        return x

    return apply, {name: tuple(x.shape) for name, x in arrays.items() if name not in kept}


def of_linen(layers: Callable[[], list[Any]], shape: tuple[int, ...]) -> Function:
    return linen(nn.Sequential(layers()), np.zeros(shape, np.float32))


CASES = {
    "linen InstanceNorm": Case(
        lambda: of_linen(lambda: [nn.Conv(6, (3,)), nn.InstanceNorm(), jnp.tanh, nn.Conv(D, (1,))], (2, 7, D)),
        lambda: [
            torch.nn.Conv1d(D, 6, 3, padding=1),
            torch.nn.InstanceNorm1d(6, affine=True, eps=1e-6),
            torch.nn.Tanh(),
            torch.nn.Conv1d(6, D, 1),
        ],
        (2, 7, D),
        ("instance_norm: layers.1", "epsilon: 1e-6"),
        (0, 2, 1),
    ),
    "linen GroupNorm of one channel": Case(
        lambda: of_linen(
            lambda: [nn.GroupNorm(num_groups=None, group_size=1, use_bias=False), jnp.tanh, nn.Dense(4)],
            (2, 5, 4, 3, D),
        ),
        lambda: [
            torch.nn.InstanceNorm3d(D, affine=True, eps=1e-6),
            torch.nn.Tanh(),
            torch.nn.Conv3d(D, 4, 1),
        ],
        (2, 5, 4, 3, D),
        ('instance_norm: {module: layers.0, parameters: "weight and bias"}', "epsilon: 1e-6"),
        (0, 4, 1, 2, 3),
    ),
    "nnx InstanceNorm": Case(
        lambda: of_nnx(lambda rngs: [nnx.InstanceNorm(D, rngs=rngs), jnp.tanh, nnx.Linear(D, 4, rngs=rngs)]),
        lambda: [torch.nn.InstanceNorm1d(D, affine=True, eps=1e-6), torch.nn.Tanh(), torch.nn.Conv1d(D, 4, 1)],
        (2, 7, D),
        ("instance_norm: layers.0", "epsilon: 1e-6"),
        (0, 2, 1),
    ),
    "haiku InstanceNorm": Case(
        lambda: haiku(lambda x: hk.Linear(4)(jnp.tanh(hk.InstanceNorm(True, True)(x))), (2, 6, 5, D)),
        lambda: [torch.nn.InstanceNorm2d(D, affine=True), torch.nn.Tanh(), torch.nn.Conv2d(D, 4, 1)],
        (2, 6, 5, D),
        ("instance_norm: layers.0", "epsilon: 1e-5"),
        (0, 3, 1, 2),
    ),
    "equinox GroupNorm of one channel": Case(
        lambda: equinox([eqx.nn.GroupNorm(D, D), jnp.tanh, eqx.nn.Conv2d(D, 4, 1, key=KEY)]),
        lambda: [torch.nn.InstanceNorm2d(D, affine=True), torch.nn.Tanh(), torch.nn.Conv2d(D, 4, 1)],
        (2, D, 6, 5),
        ("instance_norm: layers.0", "epsilon: 1e-5"),
    ),
    "linen PReLU": Case(
        lambda: of_linen(lambda: [nn.Dense(6), nn.PReLU(), nn.Dense(4)], (5, D)),
        lambda: [torch.nn.Linear(D, 6), torch.nn.PReLU(), torch.nn.Linear(6, 4)],
        (5, D),
        ("from: params/layers_1/negative_slope", "parameter: {name: layers.1.weight, axes: .}"),
    ),
    "equinox PReLU": Case(
        lambda: equinox([eqx.nn.Linear(D, 6, key=KEY), eqx.nn.PReLU(), eqx.nn.Linear(6, 4, key=KEY)]),
        lambda: [torch.nn.Linear(D, 6), torch.nn.PReLU(), torch.nn.Linear(6, 4)],
        (5, D),
        ("from: 1/negative_slope", "parameter: {name: layers.1.weight, axes: .}"),
    ),
    "equinox RMSNorm": Case(
        lambda: equinox([eqx.nn.RMSNorm(D, use_bias=False), jnp.tanh, eqx.nn.Linear(D, 4, key=KEY)]),
        lambda: [torch.nn.RMSNorm(D, eps=1e-5), torch.nn.Tanh(), torch.nn.Linear(D, 4)],
        (5, D),
        ("rms_norm: layers.0", "epsilon: 1e-5"),
    ),
    "haiku RMSNorm": Case(
        lambda: haiku(lambda x: hk.Linear(4)(jnp.tanh(hk.RMSNorm(-1)(x))), (5, D)),
        lambda: [torch.nn.RMSNorm(D, eps=1e-5), torch.nn.Tanh(), torch.nn.Linear(D, 4)],
        (5, D),
        ("rms_norm: layers.0", "epsilon: 1e-5"),
    ),
    "linen ConvTranspose": Case(
        lambda: of_linen(lambda: [nn.ConvTranspose(6, (2,), (2,)), jnp.tanh, nn.Conv(4, (3,))], (2, 7, D)),
        lambda: [torch.nn.ConvTranspose1d(D, 6, 2, 2), torch.nn.Tanh(), torch.nn.Conv1d(6, 4, 3, padding=1)],
        (2, 7, D),
        ("conv_transpose: layers.0", "strides: [2]"),
        (0, 2, 1),
    ),
    "equinox GroupNorm": Case(
        lambda: equinox([eqx.nn.GroupNorm(4, D), jnp.tanh, eqx.nn.Conv3d(D, 4, (1, 2, 3), key=KEY)]),
        lambda: [torch.nn.GroupNorm(4, D), torch.nn.Tanh(), torch.nn.Conv3d(D, 4, (1, 2, 3))],
        (2, D, 4, 5, 6),
        ("group_norm: layers.0", "num_groups: 4"),
    ),
}


@pytest.mark.parametrize(
    "name",
    slow_but(("linen InstanceNorm", "linen GroupNorm of one channel", "linen PReLU", "linen ConvTranspose"), CASES),
)
def test_a_layer_is_derived_and_written(name: str) -> None:
    case = CASES[name]
    function, shapes = case.source()
    module = Layers(case.layers(), case.to_target).eval()
    written = "\n".join(rules(derive(function, module, shapes, floats(*case.shape)), module)).splitlines()
    for line in case.written:
        assert line in [got.strip().removeprefix("- ") for got in written]


class Bilinear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.nn.Bilinear(3, 5, 4)

    def forward(self, x: Any) -> Any:
        return self.b(x[:, :3], x[:, 3:])


@pytest.mark.parametrize("fault", [False, True])
def test_a_bilinear_layer_of_two_values_is_an_einsum(fault: bool) -> None:
    def function(w: Mapping[str, Any], x: Any) -> Any:
        y = jnp.einsum("bi,oij,bj->bo", x[:, :3], w["w"], x[:, 3:])
        return jnp.tanh(y + w["b"]) if fault else y + w["b"]

    module = Bilinear()
    found = derive(function, module, {"w": (4, 3, 5), "b": (4,)}, floats(6, 8))
    if fault:
        assert not found.complete and "tanh" in found.differences[0].problem
    else:
        assert rules(found, module) == ["- from: w\n  parameter: b.weight", "- from: b\n  parameter: b.bias"]
