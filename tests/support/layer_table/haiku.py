"""Layers of Haiku, saved as .npz: ``params/module/name`` and ``state/module/name``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import haiku as hk
import jax
import numpy as np
import torch

from convert import open_source
from support.layer_table.base import BATCH, Case, Live, drawn
from support.layer_table.linen import LINE, MAP

T = torch.nn


def save(case: Case, folder: Path) -> Live:
    net = hk.without_apply_rng(hk.transform_with_state(lambda x: case.make()(x)))
    x = case.given()
    rng = np.random.default_rng(3)
    params, state = jax.tree.map(lambda v: drawn(rng, v), jax.eval_shape(net.init, jax.random.key(0), x))
    flat = {
        f"{top}/{m}/{k}": v
        for top, tree in (("params", params), ("state", state))
        for m, of in tree.items()
        for k, v in of.items()
    }
    np.savez(folder / "m.npz", **flat)
    return Live(open_source(folder / "m.npz"), np.asarray(net.apply(params, state, x)[0]))


def renamed(path: str, name: str) -> str:
    """What a leaf would be called if the module had this name, and not one that Haiku gave it."""
    top, _, rest = path.split("/", 2)
    return f"{top}/{name}/{rest}"


EPS = {"epsilon": "1e-5"}
CASES = {
    "Linear": Case(lambda: hk.Linear(5), (BATCH, 4), lambda: T.Linear(4, 5)),
    "Linear, square": Case(lambda: hk.Linear(4), (BATCH, 4), lambda: T.Linear(4, 4), {"einsum": "Haiku"}),
    "Linear, no bias": Case(lambda: hk.Linear(5, False), (BATCH, 4), lambda: T.Linear(4, 5, bias=False)),
    **{
        f"Conv{k}D{why}": Case(
            lambda k=k, c=c: (hk.Conv1D, hk.Conv2D)[k - 1](c, 3, padding="VALID"), x, lambda k=k, c=c: (T.Conv1d, T.Conv2d)[k - 1](4, c, 3),
            {"conv": "^conv: ", "linear": "^conv: "}, last=True)
        for k, x in ((1, LINE), (2, MAP)) for c, why in ((5, ""), (4, ", in = out"))
    },
    **{
        f"Conv{k}DTranspose{why}": Case(
            lambda k=k, c=c, b=biased: (hk.Conv1DTranspose, hk.Conv2DTranspose)[k - 1](c, 3, padding="VALID", with_bias=b), x,
            lambda k=k, c=c, b=biased: (T.ConvTranspose1d, T.ConvTranspose2d)[k - 1](4, c, 3, bias=b),
            {"conv": "Haiku", "linear": "Haiku", "conv_transpose": "Haiku"}, last=True)
        for k, x in ((1, LINE), (2, MAP)) for c, why, biased in ((5, "", True), (4, ", in = out", True), (5, ", no bias", False))
    },
    "DepthwiseConv2D": Case(
        lambda: hk.DepthwiseConv2D(1, 3, padding="VALID"), MAP, lambda: T.Conv2d(4, 4, 3, groups=4), {"conv": "^conv: ", "feature_group_count": "depthwise"}, last=True),
    "Embed": Case(lambda: hk.Embed(9, 6), (BATCH, 7), lambda: T.Embedding(9, 6), whole=True),
    "LayerNorm": Case(lambda: hk.LayerNorm(-1, True, True), (BATCH, 6), lambda: T.LayerNorm(6, 1e-5), {**EPS, "layer_norm": "^layer_norm"}),
    "RMSNorm": Case(lambda: hk.RMSNorm(-1), (BATCH, 6), lambda: T.RMSNorm(6, 1e-5), {**EPS, "rms_norm": "^rms_norm"}),
    "GroupNorm": Case(lambda: hk.GroupNorm(2), MAP, lambda: T.GroupNorm(2, 4, 1e-5), {**EPS, "layer_norm": "^group_norm"}, last=True, more={"layer_norm": "num_groups: 2"}),
    "Bias": Case(lambda: hk.Bias(bias_dims=[-1]), (BATCH, 6), lambda: Added(6)),
    "MLP": Case(lambda: hk.nets.MLP([5, 3], activate_final=False), (BATCH, 4), lambda: TwoLinears(4, 5, 3)),
}  # fmt: skip


class Added(T.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.b = T.Parameter(torch.zeros(n))

    def forward(self, x: Any) -> Any:
        return x + self.b


class TwoLinears(T.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.linear_0, self.linear_1 = T.Linear(*sizes[:2]), T.Linear(*sizes[1:])

    def forward(self, x: Any) -> Any:
        return self.linear_1(torch.relu(self.linear_0(x)))
