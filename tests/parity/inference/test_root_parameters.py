"""Parameters of the model itself, which no module below it holds: a rule for a layer would need the name of one."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from torch.nn import Parameter
from torch.nn.functional import linear, rms_norm

from support.inferred import WIDTH, derive, rules, tokens
from support.inferred import rms_norm as source_norm

COUNT, T, N, D = 11, 7, 4, WIDTH
SHAPES = {"table": (COUNT, D), "m": (D, D), "bias": (D,), "scale": (D,), "heads": (D, N, D // N), "k": (D // N, N)}


class Model(torch.nn.Module):
    """A table, a matrix with a bias, a norm and a layer of several axes, all of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.t, self.w, self.h = (Parameter(torch.zeros(shape)) for shape in ((COUNT, D), (D, D), (D, N, D // N)))
        self.b, self.g = (Parameter(torch.zeros(D)) for _ in range(2))
        self.out = torch.nn.Linear(D // N, N, bias=False)

    def forward(self, x: Any) -> Any:
        x = rms_norm(linear(self.t[x], self.w, self.b), (D,), self.g, 1e-6)
        return self.out(torch.einsum("bld,dnh->blnh", torch.tanh(x), self.h))


def model(w: Any, x: Any) -> Any:
    x = source_norm(w["table"][x] @ w["m"] + w["bias"], w["scale"])
    return jnp.einsum("bld,dnh->blnh", jnp.tanh(x), w["heads"]) @ w["k"]


def test_parameters_of_the_model_itself_have_rules() -> None:
    module = Model()
    assert set(rules(derive(model, module, SHAPES, tokens(COUNT, 3, T)), module)) == {
        "- from: table\n  parameter: t",
        "- from: m\n  axes: CD\n  parameter: {name: w, axes: DC}",
        '- from: "{bias,scale}"\n  parameter: "{b,g}"',
        "- from: heads\n  parameter: h",
        "- einsum: ...E,EF->...F\n  from: k\n  linear: out",
    }
