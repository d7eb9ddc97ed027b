"""Layers of equinox.nn, saved as .eqx."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import torch

from convert import open_source
from convert.checkpoints.formats.skeleton import skeleton_of
from support.layer_table.base import BATCH, Case, Live, drawn
from support.layer_table.linen import Slope

NAME = "up"
T = torch.nn
FIRST = (BATCH, 4, 7)
MAP = (BATCH, 4, 5, 6)


class Named(eqx.Module):
    layers: dict[str, Any]


def save(case: Case, folder: Path) -> Live:
    rng = np.random.default_rng(3)
    make = eqx.nn.make_with_state(lambda: Named({NAME: case.make(jax.random.key(0))}))
    shapes = eqx.filter_eval_shape(make)
    made, state = jax.tree.map(
        lambda v: jax.numpy.asarray(drawn(rng, v)) if isinstance(v, jax.ShapeDtypeStruct) else v, shapes
    )
    stateful = bool(jax.tree.leaves(state))
    kept = (made, state) if stateful else made
    eqx.tree_serialise_leaves(folder / "m.eqx", kept)
    rows = [{"path": r.keys, "shape": r.spec.shape, "dtype": r.spec.dtype} for r in skeleton_of(kept)]
    (folder / "s.json").write_text(json.dumps({"format": "convert skeleton 1", "records": rows}))
    layer = eqx.nn.inference_mode(made).layers[NAME]
    x = case.given()
    y = jax.vmap((lambda v: layer(v, state)[0]) if stateful else layer)(x)
    return Live(open_source(folder / "m.eqx", skeleton=folder / "s.json"), np.asarray(y))


E = eqx.nn
EPS = {"epsilon": "1e-5"}
CASES = {
    "Linear": Case(lambda k: E.Linear(4, 5, key=k), (BATCH, 4), lambda: T.Linear(4, 5)),
    "Linear, square": Case(lambda k: E.Linear(4, 4, key=k), (BATCH, 4), lambda: T.Linear(4, 4), {"einsum": "Equinox"}),
    "Linear, no bias": Case(lambda k: E.Linear(4, 5, use_bias=False, key=k), (BATCH, 4), lambda: T.Linear(4, 5, bias=False)),
    "Linear, square, no bias": Case(
        lambda k: E.Linear(4, 4, use_bias=False, key=k), (BATCH, 4), lambda: T.Linear(4, 4, bias=False), {"einsum": "Equinox"}),
    **{
        f"Conv{k}d{why}": Case(
            lambda key, k=k, c=c, b=biased: (E.Conv1d, E.Conv2d)[k - 1](4, c, 3, use_bias=b, key=key), x, lambda k=k, c=c, b=biased: (T.Conv1d, T.Conv2d)[k - 1](4, c, 3, bias=b),
            {"conv": "^conv: ", "linear": "^conv: "})
        for k, x in ((1, FIRST), (2, MAP)) for c, why, biased in ((5, "", True), (4, ", in = out", True), (4, ", in = out, no bias", False))
    },
    "Conv2d, grouped": Case(lambda k: E.Conv2d(4, 6, 3, groups=2, key=k), MAP, lambda: T.Conv2d(4, 6, 3, groups=2), {"conv": "^conv: "}),
    **{
        f"ConvTranspose{k}d{why}": Case(
            lambda key, k=k, c=c, b=biased: (E.ConvTranspose1d, E.ConvTranspose2d)[k - 1](4, c, 3, use_bias=b, key=key), x,
            lambda k=k, c=c, b=biased: (T.ConvTranspose1d, T.ConvTranspose2d)[k - 1](4, c, 3, bias=b), {"conv": "^conv_transpose: ", "linear": "^conv_transpose: "})
        for k, x in ((1, FIRST), (2, MAP)) for c, why, biased in ((5, "", True), (4, ", in = out", True), (4, ", in = out, no bias", False))
    },
    "ConvTranspose2d, grouped": Case(
        lambda k: E.ConvTranspose2d(4, 6, 3, groups=2, key=k), MAP, lambda: T.ConvTranspose2d(4, 6, 3, groups=2), {"conv": "^conv_transpose: "},
        more={"conv": "feature_group_count: 2"}),
    "Embedding": Case(lambda k: E.Embedding(9, 6, key=k), (BATCH,), lambda: T.Embedding(9, 6), {"linear": "^embedding", "einsum": "embedding"}, whole=True),
    "LayerNorm": Case(lambda k: E.LayerNorm(6), (BATCH, 6), lambda: T.LayerNorm(6, 1e-5), {**EPS, "layer_norm": "^layer_norm"}),
    "LayerNorm, two axes": Case(lambda k: E.LayerNorm((3, 6)), (BATCH, 3, 6), lambda: T.LayerNorm((3, 6), 1e-5), {**EPS, "layer_norm": "^layer_norm"}),
    "RMSNorm": Case(lambda k: E.RMSNorm(6, use_bias=False), (BATCH, 6), lambda: T.RMSNorm(6, 1e-5), {**EPS, "rms_norm": "^rms_norm"}),
    "GroupNorm": Case(lambda k: E.GroupNorm(2, 4), MAP, lambda: T.GroupNorm(2, 4, 1e-5), {**EPS, "layer_norm": "^group_norm"}, more={"layer_norm": "num_groups: 2"}),
    "PReLU": Case(lambda k: E.PReLU(), (BATCH, 6), Slope),
    "SpectralNorm of Linear": Case(lambda k: E.SpectralNorm(E.Linear(4, 5, key=k), "weight", key=k), (BATCH, 4), lambda: T.Linear(4, 5)),
    "SpectralNorm of a square Linear": Case(
        lambda k: E.SpectralNorm(E.Linear(4, 4, key=k), "weight", key=k), (BATCH, 4), lambda: T.Linear(4, 4), {"einsum": "Equinox"}),
    "SpectralNorm of Conv2d": Case(lambda k: E.SpectralNorm(E.Conv2d(4, 5, 3, key=k), "weight", key=k), MAP, lambda: T.Conv2d(4, 5, 3), {"conv": "^conv: "}),
    "WeightNorm of Linear": Case(lambda k: E.WeightNorm(E.Linear(4, 5, key=k)), (BATCH, 4), lambda: T.Linear(4, 5)),
    "WeightNorm of Conv2d": Case(lambda k: E.WeightNorm(E.Conv2d(4, 5, 3, key=k)), MAP, lambda: T.Conv2d(4, 5, 3), {"conv": "^conv: "}),
}  # fmt: skip
