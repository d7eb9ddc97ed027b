"""The envelopes of a FermiNet: a sign at another factor, weights in another bracket of a sum; and signs as an output, which show little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from convert.inference.rounding import rounded_where
from convert.programs.divergence.shared_values import confirms
from convert.programs.record_jax import record_jax
from support.inferred import UNPROVEN, grades

ROWS, ATOMS, K, N, D = 5, 3, 4, 2, 8
SHAPES = {"p": (ATOMS, K, N), "s": (ATOMS, K, N), "w": (K,)}


def _function(w: Any, x: Any) -> Any:
    made = jnp.sum(w["p"] * jnp.exp(-jnp.abs(w["s"]) * jnp.abs(x)[:, :, None, None]), 1)
    return {"y": jnp.sum(w["w"] * jnp.sin(made[:, :, 0]) * jnp.exp(made[:, :, 1]), -1)}


class Envelopes(nn.Module):
    """`fault`: of the code."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.p, self.s = (nn.Parameter(torch.zeros(K * N, ATOMS)) for _ in range(2))
        self.w, self.fault = nn.Linear(K, 1, bias=False), fault

    def forward(self, x: Any) -> Any:
        r, width = x.abs()[:, None], self.s.abs()
        decay = torch.exp({"sign": r, "square": -r.square()}.get(self.fault, -r) * width)
        made = (decay * self.p).sum(-1).unflatten(-1, (K, N))
        one, two = made.unbind(-1)
        return self.w(one.sin() * (two.exp() - 1 if self.fault == "less" else two.exp()))[:, 0]


def _inputs(columns: int, rows: int = ROWS) -> Callable[[int], dict[str, Any]]:
    return lambda seed: {"x": np.random.default_rng(seed).normal(size=(rows, columns))}


def _envelopes(module: nn.Module) -> Derivation:
    return infer(lambda w, x: _function(w, x["x"]), module, lambda m, x: {"y": m(x["x"])}, _inputs(ATOMS), SHAPES)


def test_a_sign_and_a_weight_at_other_factors() -> None:
    found = _envelopes(Envelopes())
    assert grades(found) == {Grade.DERIVED}
    assert found.proof


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["sign", "square", "less"])
def test_other_envelopes_are_never_derived(fault: str) -> None:
    found = _envelopes(Envelopes(fault))
    assert not found.complete and found.proof is None and grades(found) <= {*UNPROVEN, Grade.TIED}


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ([0.3, -1.2, 0.7], True),
        ([0.3], True),
        ([1, -1, -1], False),
        ([0.0, 1.0, 2.5], False),
        ([0.3, -0.3, -0.3], False),
    ],
)
def test_equal_signs_and_counts_show_nothing(numbers: list[float], shown: bool) -> None:
    assert confirms(np.asarray(numbers, float)) is shown


@pytest.mark.parametrize(("number", "rounded"), [(-9999999.0, False), (0.375, False), (0.1, True), (9.9999e8, True)])
def test_a_whole_number_was_not_rounded(number: float, rounded: bool) -> None:
    """The mask of QMIX is in float32 what its code says."""
    program = record_jax(lambda _, x: {"y": x["x"] * np.float64(np.float32(number))}, {}, {"x": np.ones(3)})
    assert (rounded_where(program) is not None) is rounded


def _signed(w: Any, x: Any) -> Any:
    made = jnp.sum((jnp.sign(x) @ w["a"]) * jnp.sin(9 * jnp.exp(jnp.abs(x) @ w["s"] / D)), -1)
    return {"sign": jnp.sign(made), "log": jnp.log(jnp.abs(made))}


class Signed(nn.Module):
    """Takes a product of exponentials where the JAX model takes the exponential of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.s = nn.Linear(D, K, bias=False), nn.Parameter(torch.zeros(D, K))

    def forward(self, x: Any) -> Any:
        made = (self.a(x.sign()) * torch.sin(9 * (x.abs()[..., None] * self.s / D).exp().prod(1))).sum(-1)
        return {"sign": made.sign(), "log": made.abs().log()}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 6])
def test_signs_that_are_others_by_chance_are_no_difference(rows: int) -> None:
    """Of a few signs, the inputs have columns with as many of either: what is open in front of them may be what is wrong."""
    found = infer(
        lambda w, x: _signed(w, x["x"]),
        Signed(),
        lambda m, x: m(x["x"]),
        _inputs(D, rows),
        {"a": (D, K), "s": (D, K)},
    )
    assert not any(difference.shown for difference in found.differences)
    assert "another order" not in " ".join(difference.problem for difference in found.differences)
