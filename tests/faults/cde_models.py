"""Neural CDEs for the catalogue: the example cde with as many series as knots, so that its axes can be mistaken for each other;
and stored paths as modules."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest import mock

import diffrax
import jax
import numpy as np
import torch
import torchcde
from torch import nn

from convert.references.protocol import Reference
from faults.own_models import example

model_jax, model_torch = (example("cde", name) for name in ("model_jax", "model_torch"))
with mock.patch.dict(sys.modules, model_jax=model_jax, model_torch=model_torch):
    pair = example("cde", "reference")
KNOTS = 9
draw = partial(pair.draw, batch=KNOTS)


def linear(plan: Any) -> Reference:
    made: Reference = pair.make_reference("linear", inputs=draw)
    return made


def cubic(plan: Any) -> Reference:
    made: Reference = pair.make_reference("cubic", inputs=draw)
    return made


def save(path: str) -> None:
    """The example's model, its leaves by the names that the skeleton gives them."""
    from convert.checkpoints.formats.skeleton import skeleton_of

    keys = iter(jax.random.split(jax.random.key(1), 100))
    leaves = [x for x in jax.tree.leaves(model_jax.make()) if hasattr(x, "dtype") or isinstance(x, int)]
    names = ["/".join(record.keys) for record in skeleton_of(model_jax.make())]
    drawn = [x + 0.3 * jax.random.normal(next(keys), x.shape) if hasattr(x, "dtype") else x for x in leaves]
    np.savez(path, **{name: np.asarray(x) for name, x in zip(names, drawn, strict=True)})


# ---- the derivative of a path at all times

_bug, _bug_torch = (example("bugs/diffrax-derivative", name) for name in ("model_jax", "model_torch"))


def slopes(plan: Any) -> Reference:
    with mock.patch.dict(sys.modules, model_torch=_bug_torch):
        made: Reference = _bug.right(plan)
    return made


# ---- stored paths: the file's tensors are what torchcde's constructors take

RULES = """
model: cde-paths
title: stored paths
targets: {torch: {loads: faults.cde_models.Paths}}
rules:
- cubic_spline: {coeffs: cubic.coeffs, times: cubic.times}
  from: cubic
- linear_interpolation: {coeffs: linear.coeffs, times: linear.times}
  from: linear
"""


def write(path: str) -> None:
    """diffrax's coefficients of a batch; as many series as intervals."""
    ts, ys = model_jax.series(7, KNOTS - 1)
    made = jax.vmap(lambda y: diffrax.backward_hermite_coefficients(ts, y))(ys)
    cubic = {f"cubic/coeffs/{k}": np.asarray(x) for k, x in enumerate(made)}
    np.savez(path, **{"cubic/ts": ts, "linear/ts": ts, "linear/ys": ys}, **cubic)


class Stored(nn.Module):
    """A path of torchcde, evaluated at given times."""

    def __init__(self, path: Any, coeffs: torch.Tensor, times: torch.Tensor) -> None:
        super().__init__()
        self.path = path
        self.coeffs, self.times = nn.Parameter(coeffs), nn.Parameter(times)

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        path = self.path(self.coeffs, self.times)
        return torch.cat([path.evaluate(at), path.derivative(at)], -1)


class Paths(nn.Module):
    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.cubic = Stored(torchcde.CubicSpline, weights["cubic.coeffs"], weights["cubic.times"])
        self.linear = Stored(torchcde.LinearInterpolation, weights["linear.coeffs"], weights["linear.times"])


def load(weights: Mapping[str, torch.Tensor]) -> nn.Module:
    return Paths(weights).requires_grad_(False).eval()


def _apply(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    def both(path: Any) -> Any:
        return jax.numpy.concatenate([jax.vmap(getattr(path, m))(inputs["at"]) for m in ("evaluate", "derivative")], -1)

    cubic = tuple(weights[f"cubic/coeffs/{k}"] for k in range(4))
    made = {
        "cubic": jax.vmap(lambda c: both(diffrax.CubicInterpolation(weights["cubic/ts"], c)))(cubic),
        "linear": jax.vmap(lambda y: both(diffrax.LinearInterpolation(weights["linear/ts"], y)))(weights["linear/ys"]),
    }
    return {**made, "y": made["cubic"] + made["linear"]}


def paths(plan: Any) -> Reference:
    return Reference(
        inputs=lambda seed: {"at": np.asarray(pair.draw(7)["at"])},
        build=lambda weights: load(weights),
        run=lambda module, inputs: {"y": module.cubic(inputs["at"]) + module.linear(inputs["at"])},
        outputs=("y",),
        reduction=4,
        depth=1,
        jax=_apply,
    )
