"""Layers of flax.nnx, saved by Orbax."""

from __future__ import annotations

from pathlib import Path

import flax.nnx as nnx
import jax
import numpy as np
import orbax.checkpoint as ocp
import torch

from convert import open_source
from support.layer_table import linen
from support.layer_table.base import BATCH, Case, Live, drawn
from support.layer_table.linen import BN, KERNEL, LINE, LN, MAP, TURNED

NAME = "up"
T = torch.nn


def save(case: Case, folder: Path) -> Live:
    rng = np.random.default_rng(3)
    shapes = nnx.eval_shape(lambda: case.make(nnx.Rngs(0)))
    whole = isinstance(shapes, nnx.WeightNorm)  # its scales are bare arrays, which nnx does not fill in
    graph, state = nnx.split(case.make(nnx.Rngs(0)) if whole else shapes)
    layer = nnx.merge(graph, jax.tree.map(lambda v: jax.numpy.asarray(drawn(rng, v)), state))
    kept = nnx.to_pure_dict(nnx.state(layer, nnx.Not(nnx.RngState)))
    kept = {NAME: kept}
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder / "ckpt", kept)
    layer.eval()
    y = np.asarray(layer(jax.numpy.asarray(case.given())))
    return Live(open_source(folder / "ckpt"), y)


CASES = {
    "Linear": Case(lambda r: nnx.Linear(4, 5, rngs=r), (BATCH, 4), lambda: T.Linear(4, 5)),
    "Linear, square": Case(lambda r: nnx.Linear(4, 4, rngs=r), (BATCH, 4), lambda: T.Linear(4, 4), {"einsum": "flax"}),
    "LinearGeneral, from heads": Case(
        lambda r: nnx.LinearGeneral((3, 6), 6, axis=(-2, -1), rngs=r), (BATCH, 3, 6), lambda: T.Linear(18, 6), {"einsum": "axis 2 is the result", "linear": "axis 2 is the result"},
        run=lambda m, x: m(x.flatten(1))),
    "LinearGeneral, to heads": Case(
        lambda r: nnx.LinearGeneral(4, (3, 5), rngs=r), (BATCH, 4), lambda: T.Linear(4, 15), {"einsum": "axis 0 is the input", "linear": "axis 0 is the input"},
        run=lambda m, x: m(x).unflatten(-1, (3, 5))),
    "Einsum": Case(
        lambda r: nnx.Einsum("bd,ndh->bnh", (3, 4, 5), (3, 5), rngs=r), (BATCH, 4), lambda: T.Linear(4, 15), {"einsum": "axis 1 is the input", "linear": "axis 1 is the input"},
        run=lambda m, x: m(x).unflatten(-1, (3, 5))),
    "Conv 1d": Case(
        lambda r: nnx.Conv(4, 4, (3,), padding="VALID", rngs=r), LINE, lambda: T.Conv1d(4, 4, 3), {"conv": "^conv: ", "linear": "^conv: "}, last=True),
    "Conv 2d": Case(lambda r: nnx.Conv(4, 5, (3, 2), padding="VALID", rngs=r), MAP, lambda: T.Conv2d(4, 5, (3, 2)), {"conv": "^conv: "}, last=True),
    **{
        f"ConvTranspose {k}d{', turned by JAX' * turned}": Case(
            lambda r, k=k, t=turned: nnx.ConvTranspose(4, 4, (3, 2)[:k], padding="VALID", transpose_kernel=t, rngs=r), x,
            lambda k=k: (T.ConvTranspose1d, T.ConvTranspose2d)[k - 1](4, 4, (3, 2)[:k]),
            {"conv": KERNEL if turned else TURNED, "linear": KERNEL if turned else TURNED}, last=True)
        for k, x in ((1, LINE), (2, MAP)) for turned in (False, True)
    },
    "Embed": Case(lambda r: nnx.Embed(9, 6, rngs=r), (BATCH, 7), lambda: T.Embedding(9, 6), whole=True),
    "BatchNorm": Case(lambda r: nnx.BatchNorm(4, rngs=r), MAP, lambda: T.BatchNorm2d(4, 1e-5), BN, last=True),
    "LayerNorm": Case(lambda r: nnx.LayerNorm(6, rngs=r), (BATCH, 6), lambda: T.LayerNorm(6, 1e-6), {**LN, "layer_norm": "^layer_norm"}),
    "RMSNorm": Case(lambda r: nnx.RMSNorm(6, rngs=r), (BATCH, 6), lambda: T.RMSNorm(6, 1e-6), {**LN, "rms_norm": "^rms_norm"}),
    "GroupNorm": Case(
        lambda r: nnx.GroupNorm(4, 2, rngs=r), MAP, lambda: T.GroupNorm(2, 4, 1e-6), {**LN, "layer_norm": "^group_norm"}, last=True,
        more={"layer_norm": "num_groups: 2"}),
    "InstanceNorm": Case(
        lambda r: nnx.InstanceNorm(4, rngs=r), MAP, lambda: T.InstanceNorm2d(4, 1e-6, affine=True), {**LN, "layer_norm": "^layer_norm"}, last=True),
    "PReLU": Case(lambda r: nnx.PReLU(), (BATCH, 6), linen.Slope),
    "LoRALinear": Case(lambda r: nnx.LoRALinear(4, 5, lora_rank=2, rngs=r), (BATCH, 4), lambda: T.Linear(4, 5)),
    "LoRA": Case(lambda r: nnx.LoRA(4, 2, 5, base_module=nnx.Linear(4, 5, rngs=r), rngs=r), (BATCH, 4), lambda: T.Linear(4, 5)),
    "SpectralNorm of Linear": Case(lambda r: nnx.SpectralNorm(nnx.Linear(4, 5, rngs=r), rngs=r), (BATCH, 4), lambda: T.Linear(4, 5)),
    "SpectralNorm of a square Linear": Case(
        lambda r: nnx.SpectralNorm(nnx.Linear(4, 4, rngs=r), rngs=r), (BATCH, 4), lambda: T.Linear(4, 4), {"einsum": "flax"}),
    "SpectralNorm of Conv": Case(
        lambda r: nnx.SpectralNorm(nnx.Conv(4, 5, (3, 3), padding="VALID", rngs=r), rngs=r), MAP, lambda: T.Conv2d(4, 5, 3), {"conv": "^conv: "}, last=True),
    "WeightNorm of Linear": Case(lambda r: nnx.WeightNorm(nnx.Linear(4, 5, rngs=r), rngs=r), (BATCH, 4), lambda: T.Linear(4, 5)),
    "WeightNorm of Conv": Case(
        lambda r: nnx.WeightNorm(nnx.Conv(4, 5, (3, 3), padding="VALID", rngs=r), rngs=r), MAP, lambda: T.Conv2d(4, 5, 3), {"conv": "^conv: "}, last=True),
}  # fmt: skip
