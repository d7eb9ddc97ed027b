"""Layers of Keras 3, saved as .weights.h5."""

from __future__ import annotations

import os
import re
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
import keras
import numpy as np
import torch

from convert import open_source
from support.layer_table.base import BATCH, Case, Live, shaken
from support.layer_table.linen import LINE, MAP, Slope

T, K = torch.nn, keras.layers


def save(case: Case, folder: Path) -> Live:
    net = keras.Sequential([case.make()])
    x = case.given()
    net(x)
    rng = np.random.default_rng(3)
    for weight in net.weights:
        weight.assign(shaken(rng, weight.numpy() if hasattr(weight, "numpy") else weight))
    net.save_weights(folder / "net.weights.h5")
    return Live(open_source(folder / "net.weights.h5"), np.asarray(net(x)))


def renamed(path: str, name: str) -> str:
    """What a leaf would be called below an attribute of a layer of one's own: Keras's file has the attribute's name, then."""
    return re.sub("layers/[^/]+/", f"layers/block/{name}/", path)


EPS = {"epsilon": "Keras"}
CASES = {
    "Dense": Case(lambda: K.Dense(5), (BATCH, 4), lambda: T.Linear(4, 5)),
    "Dense, square": Case(lambda: K.Dense(4), (BATCH, 4), lambda: T.Linear(4, 4), {"einsum": "Keras"}),
    "EinsumDense, from heads": Case(
        lambda: K.EinsumDense("bnh,nhd->bd", 6, bias_axes="d"), (BATCH, 3, 6), lambda: T.Linear(18, 6), {"einsum": "axis 2 is the result", "linear": "axis 2 is the result"}, run=lambda m, x: m(x.flatten(1))),
    "EinsumDense, to heads": Case(
        lambda: K.EinsumDense("bd,dnh->bnh", (3, 5), bias_axes="nh"), (BATCH, 4), lambda: T.Linear(4, 15), {"einsum": "axis 0 is the input", "linear": "axis 0 is the input"}, run=lambda m, x: m(x).unflatten(-1, (3, 5))),
    **{
        f"Conv{k}D{why}": Case(
            lambda k=k, c=c: (K.Conv1D, K.Conv2D)[k - 1](c, 3), x, lambda k=k, c=c: (T.Conv1d, T.Conv2d)[k - 1](4, c, 3),
            {"conv": "^conv: ", "linear": "^conv: ", "conv_transpose": "^conv: "}, last=True)
        for k, x in ((1, LINE), (2, MAP)) for c, why in ((5, ""), (4, ", in = out"))
    },
    **{
        f"Conv{k}DTranspose{why}": Case(
            lambda k=k, c=c, b=biased: (K.Conv1DTranspose, K.Conv2DTranspose)[k - 1](c, 3, use_bias=b), x,
            lambda k=k, c=c, b=biased: (T.ConvTranspose1d, T.ConvTranspose2d)[k - 1](4, c, 3, bias=b),
            {"conv": "^conv_transpose: ", "linear": "^conv_transpose: .*", "conv_transpose": "^conv_transpose: "}, last=True)
        for k, x in ((1, LINE), (2, MAP)) for c, why, biased in ((5, "", True), (4, ", in = out", True), (5, ", no bias", False))
    },
    "SeparableConv2D": Case(
        lambda: K.SeparableConv2D(5, 3), MAP,
        lambda: T.Sequential(__import__("collections").OrderedDict(depthwise=T.Conv2d(4, 4, 3, groups=4, bias=False), pointwise=T.Conv2d(4, 5, 1))), last=True, named=True),
    "Embedding": Case(lambda: K.Embedding(9, 6), (BATCH, 7), lambda: T.Embedding(9, 6), {"linear": "^embedding", "einsum": "embedding"}, whole=True),
    "BatchNormalization": Case(lambda: K.BatchNormalization(), MAP, lambda: T.BatchNorm2d(4, 1e-3), EPS, last=True),
    "LayerNormalization": Case(lambda: K.LayerNormalization(), (BATCH, 6), lambda: T.LayerNorm(6, 1e-3), {**EPS, "layer_norm": "^layer_norm"}),
    "RMSNormalization": Case(lambda: K.RMSNormalization(), (BATCH, 6), lambda: T.RMSNorm(6, 1e-6), {"epsilon": "1e-6", "rms_norm": "^rms_norm"}),
    "GroupNormalization": Case(
        lambda: K.GroupNormalization(2), MAP, lambda: T.GroupNorm(2, 4, 1e-3), {**EPS, "layer_norm": "^group_norm"}, last=True, more={"layer_norm": "num_groups: 2"}),
    "PReLU": Case(lambda: K.PReLU(), (BATCH, 6), lambda: Slope("0", 6), named=True),
    "ReversibleEmbedding": Case(lambda: K.ReversibleEmbedding(9, 6), (BATCH, 7), lambda: T.Embedding(9, 6), {"linear": "^embedding", "einsum": "embedding"}, whole=True),
}  # fmt: skip
