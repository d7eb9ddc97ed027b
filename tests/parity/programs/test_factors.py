"""A number that the target's code multiplies by, and the source's weights carry, does not hide where the two differ."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from convert.layers.activations import NUMPY_ACTIVATIONS
from convert.numerics.compare import difference
from convert.numerics.precision import jax_precision
from convert.programs.divergence.search import diverge
from convert.programs.divergence.wording import Named, named
from convert.programs.record_jax import record_jax
from convert.programs.record_torch import record_torch
from convert.programs.rewrites.factors import with_factors_of

WIDTH, STEPS = 6, 5
RANDOM = np.random.default_rng(2)
WEIGHTS = {name: RANDOM.standard_normal((WIDTH, WIDTH)) for name in "qkvo"}
GIVEN = {"x": RANDOM.standard_normal((2, STEPS, WIDTH))}
FACTOR = 1 / 8


def turned(x: Any, base: float, of: Any) -> Any:
    angles = of.arange(STEPS)[:, None] / base ** (of.arange(0, WIDTH, 2) / WIDTH)
    one, two = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    join = jnp.concatenate if of is jnp else torch.cat
    sin, cos = of.sin(angles), of.cos(angles)
    return join((one * cos - two * sin, two * cos + one * sin), -1)


def source_side(p: Any, given: Any) -> Any:
    x = given["x"]
    q, k = turned(x @ p["q"], 10000.0, jnp), turned(x @ p["k"], 10000.0, jnp)
    shares = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k), -1)
    return {"y": jnp.einsum("bts,bsd->btd", shares, x @ p["v"]) @ p["o"]}


class Target(torch.nn.Module):
    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base
        for name, array in WEIGHTS.items():
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(array)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (turned(x @ self.get_parameter(name), self.base, torch) for name in "qk")
        shares = (torch.einsum("btd,bsd->bts", q, k) * FACTOR).softmax(-1)
        return torch.as_tensor(
            torch.einsum("bts,bsd->btd", shares, x @ self.get_parameter("v")) @ self.get_parameter("o")
        )


def said(base: float, factor: float) -> Named | None:
    stored = {**WEIGHTS, "q": WEIGHTS["q"] * factor}
    with jax_precision("float64"):
        source = record_jax(source_side, stored, GIVEN)
    target = record_torch(Target(base), lambda module, given: {"y": module(**given)}, GIVEN)
    scaled = with_factors_of(source, target, "y")
    if scaled is None:
        return None
    want = source.outputs["y"].array
    found = diverge(source, scaled, "y", lambda got: difference(got, want).relative, 1e-9, 1e-10)
    return None if found is None else named(found, source, scaled, NUMPY_ACTIVATIONS)


def test_the_base_of_rope_is_named_behind_queries_that_carry_the_scale() -> None:
    found = said(base=500000.0, factor=FACTOR)
    assert found is not None and found.name == "another constant"
    assert "500000" in found.problem and "10000" in found.problem


def test_weights_that_carry_another_number_than_the_code_are_no_such_case() -> None:
    assert said(base=10000.0, factor=0.3) is None
