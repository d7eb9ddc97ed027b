"""Layers of flax.linen, saved as msgpack."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import torch
from flax import serialization

from convert import open_source
from support.layer_table.base import BATCH, TIME, Case, Live, drawn

CONV, TURNED, KERNEL = r"conv: ", r"^conv_transpose: [\w.]+\n(?!.*transpose_kernel=True)", r"transpose_kernel=True"
T = torch.nn


class Net(nn.Module):
    """A layer within a model: flax calls it by its class and a number, unless it has a name."""

    make: Any
    named: str | None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return self.make(self.named)(x)


def save(case: Case, folder: Path) -> Live:
    net, x = Net(case.make, None), case.given()
    rng = np.random.default_rng(3)
    variables = jax.tree.map(lambda v: drawn(rng, v), jax.eval_shape(net.init, jax.random.key(0), x))
    y = np.asarray(net.apply(variables, x))
    (folder / "flax_model.msgpack").write_bytes(serialization.to_bytes(variables))
    return Live(open_source(folder / "flax_model.msgpack"), y)


def renamed(path: str, name: str) -> str:
    """What a leaf would be called if the module had this name, and not one that flax gave it."""
    return re.sub(r"(?<![A-Za-z])(?!WeightNorm|SpectralNorm)[A-Z][A-Za-z]*_0(?![0-9])", name, path)


def spectral(name: str | None, layer: Any) -> Any:
    norm = nn.SpectralNorm(layer)
    return lambda x: norm(x, update_stats=False)


def scanned(name: str | None, **options: Any) -> Any:
    dense = nn.vmap(nn.Dense, in_axes=0, out_axes=0, variable_axes={"params": 0}, split_rngs={"params": True})
    return dense(6, name=name, **options)


class Stacked(T.ModuleList):
    """Several linear layers, each for its share of the input."""

    def __init__(self, count: int, into: int, out: int, bias: bool = True) -> None:
        super().__init__([T.Linear(into, out, bias=bias) for _ in range(count)])

    def forward(self, x: Any) -> Any:
        return torch.stack([layer(one) for layer, one in zip(self, x, strict=True)])


LINE, MAP, BOX = (BATCH, TIME, 4), (BATCH, 5, 6, 4), (BATCH, 3, 4, 5, 4)
BN = {"epsilon": "BatchNorm", "batch_norm": ""}
LN = {"epsilon": "flax's LayerNorm"}
CASES = {
    "Dense": Case(lambda n: nn.Dense(5, name=n), (BATCH, 4), lambda: T.Linear(4, 5)),
    "Dense, square": Case(lambda n: nn.Dense(4, name=n), (BATCH, 4), lambda: T.Linear(4, 4), {"einsum": "flax"}),
    "Dense, no bias": Case(lambda n: nn.Dense(5, False, name=n), (BATCH, 4), lambda: T.Linear(4, 5, bias=False)),
    "DenseGeneral, to heads": Case(
        lambda n: nn.DenseGeneral((3, 5), name=n), (BATCH, 4), lambda: T.Linear(4, 15), {"einsum": "axis 0 is the input", "linear": "axis 0 is the input"},
        run=lambda m, x: m(x).unflatten(-1, (3, 5))),
    "DenseGeneral, from heads": Case(
        lambda n: nn.DenseGeneral(6, axis=(-2, -1), name=n), (BATCH, 3, 6), lambda: T.Linear(18, 6),
        {"einsum": "axis 2 is the result", "linear": "axis 2 is the result"}, run=lambda m, x: m(x.flatten(1))),
    "DenseGeneral, square from heads": Case(
        lambda n: nn.DenseGeneral(6, axis=(-2, -1), use_bias=False, name=n), (BATCH, 6, 6), lambda: T.Linear(36, 6, bias=False),
        {"einsum": "axis 2 is the result", "linear": "axis 2 is the result"}, run=lambda m, x: m(x.flatten(1))),
    "DenseGeneral, two axes to two": Case(
        lambda n: nn.DenseGeneral((3, 5), axis=(-2, -1), name=n), (BATCH, 2, 4), lambda: T.Linear(8, 15), run=lambda m, x: m(x.flatten(1)).unflatten(-1, (3, 5))),
    "DenseGeneral, two axes to two, no bias": Case(
        lambda n: nn.DenseGeneral((3, 5), axis=(-2, -1), use_bias=False, name=n), (BATCH, 2, 4), lambda: T.Linear(8, 15, bias=False),
        {"linear": "axes 0 and 1 are the inputs"}, run=lambda m, x: m(x.flatten(1)).unflatten(-1, (3, 5))),
    "Einsum, heads first": Case(
        lambda n: nn.Einsum((3, 4, 5), "...d,ndh->...nh", use_bias=False, name=n), (BATCH, 4), lambda: T.Linear(4, 15, bias=False),
        {"einsum": "axis 1 is the input", "linear": "axis 1 is the input"}, run=lambda m, x: m(x).unflatten(-1, (3, 5))),
    "vmap of Dense": Case(
        lambda n: scanned(n), (3, BATCH, 6), lambda: Stacked(3, 6, 6), {"linear": r"\{s\}"}),
    "vmap of Dense, no bias": Case(
        lambda n: scanned(n, use_bias=False), (2, BATCH, 5), lambda: Stacked(2, 5, 6, False), {"linear": r"\{s\}"}),
    **{
        f"Conv {k}d{why}": Case(
            lambda n, k=k, c=c: nn.Conv(c, (3, 2, 3)[:k], padding="VALID", name=n), x,
            lambda k=k, c=c: (T.Conv1d, T.Conv2d, T.Conv3d)[k - 1](4, c, (3, 2, 3)[:k]), {"conv": r"^conv: ", "linear": "a convolution, along"}, last=True)
        for k, x in ((1, LINE), (2, MAP), (3, BOX))
        for c, why in ((5, ""), (4, ", in = out"))
    },
    "Conv, grouped": Case(
        lambda n: nn.Conv(6, (3, 3), padding="VALID", feature_group_count=2, name=n), MAP, lambda: T.Conv2d(4, 6, 3, groups=2),
        {"conv": r"^conv: "}, last=True),
    "Conv, depthwise": Case(
        lambda n: nn.Conv(4, (3, 3), padding="VALID", feature_group_count=4, name=n), MAP, lambda: T.Conv2d(4, 4, 3, groups=4),
        {"conv": r"^conv: ", "feature_group_count": "depthwise"}, last=True),
    **{
        f"ConvTranspose {k}d{why}{', turned by JAX' * turned}": Case(
            lambda n, k=k, c=c, t=turned, b=biased: nn.ConvTranspose(c, (3, 2, 3)[:k], padding="VALID", transpose_kernel=t, use_bias=b, name=n), x,
            lambda k=k, c=c, b=biased: (T.ConvTranspose1d, T.ConvTranspose2d, T.ConvTranspose3d)[k - 1](4, c, (3, 2, 3)[:k], bias=b),
            {"conv": KERNEL if turned else TURNED, "conv_transpose": KERNEL if turned else TURNED, "linear": KERNEL if turned else TURNED, "transpose_kernel": f"transpose_kernel: {str(turned).lower()}"}, last=True)
        for k, x in ((1, LINE), (2, MAP))
        for c, why, biased in ((5, "", True), (4, ", in = out", True), (5, ", no bias", False))
        for turned in (False, True)
    },
    "Embed": Case(lambda n: nn.Embed(9, 6, name=n), (BATCH, TIME), lambda: T.Embedding(9, 6), whole=True),
    "BatchNorm": Case(lambda n: nn.BatchNorm(True, name=n), MAP, lambda: T.BatchNorm2d(4, 1e-5), BN, last=True),
    "LayerNorm": Case(lambda n: nn.LayerNorm(name=n), (BATCH, 6), lambda: T.LayerNorm(6, 1e-6), {**LN, "layer_norm": "^layer_norm"}),
    "RMSNorm": Case(lambda n: nn.RMSNorm(name=n), (BATCH, 6), lambda: T.RMSNorm(6, 1e-6), {**LN, "rms_norm": "^rms_norm"}),
    "GroupNorm": Case(
        lambda n: nn.GroupNorm(2, name=n), MAP, lambda: T.GroupNorm(2, 4, 1e-6), {**LN, "layer_norm": "^group_norm"}, last=True,
        more={"layer_norm": "num_groups: 2"}),
    "InstanceNorm": Case(
        lambda n: nn.InstanceNorm(name=n), MAP, lambda: T.InstanceNorm2d(4, 1e-6, affine=True), {**LN, "layer_norm": "^layer_norm"}, last=True),
    "PReLU": Case(lambda n: nn.PReLU(name=n), (BATCH, 6), lambda: Slope(), {}),
    "SpectralNorm of Dense": Case(lambda n: spectral(n, nn.Dense(5, name=n)), (BATCH, 4), lambda: T.Linear(4, 5)),
    "SpectralNorm of a square Dense": Case(
        lambda n: spectral(n, nn.Dense(4, name=n)), (BATCH, 4), lambda: T.Linear(4, 4), {"einsum": "flax"}),
    "SpectralNorm of Conv": Case(
        lambda n: spectral(n, nn.Conv(5, (3, 3), padding="VALID", name=n)), MAP, lambda: T.Conv2d(4, 5, 3), {"conv": r"^conv: "}, last=True),
    "WeightNorm of Dense": Case(lambda n: nn.WeightNorm(nn.Dense(5, name=n)), (BATCH, 4), lambda: T.Linear(4, 5)),
    "WeightNorm of Conv": Case(
        lambda n: nn.WeightNorm(nn.Conv(5, (3, 3), padding="VALID", name=n)), MAP, lambda: T.Conv2d(4, 5, 3), {"conv": r"^conv: "}, last=True),
}  # fmt: skip


class Slope(T.Module):
    def __init__(self, name: str = "negative_slope", *size: int) -> None:
        super().__init__()
        self.register_parameter(name, T.Parameter(torch.zeros(size)))

    def forward(self, x: Any) -> Any:
        return torch.where(x >= 0, x, x * next(self.parameters()))
