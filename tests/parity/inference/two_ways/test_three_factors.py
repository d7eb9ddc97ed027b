"""The similarity of BiDAF: one vector for ``[h, u, h * u]`` of all pairs, or a layer for each; the third may scale `h` before the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import UNPROVEN, WIDTH, grades, rules

D, B, T, J = WIDTH, 2, 6, 5
WHOLE = {"w": (3 * D,), "o": (2 * D, D)}
APART = {"h": (D,), "u": (D,), "m": (D,), "o": (2 * D, D)}


def _attended(scores: Any, h: Any, u: Any) -> Any:
    return jnp.concatenate([h, jax.nn.softmax(scores, -1) @ u], -1)


def _whole(w: Any, h: Any, u: Any) -> Any:
    one, two = (jnp.broadcast_to(x, (B, T, J, D)) for x in (h[:, :, None], u[:, None]))
    return _attended(jnp.concatenate([one, two, one * two], -1) @ w["w"], h, u) @ w["o"]


def _apart(w: Any, h: Any, u: Any) -> Any:
    scores = (h @ w["h"])[:, :, None] + (u @ w["u"])[:, None] + jnp.einsum("btd,bjd->btj", h * w["m"], u)
    return _attended(scores, h, u) @ w["o"]


class Similarity(nn.Module):
    """`form`: of the third term, or of all; `power` of what the third term multiplies `h` by."""

    def __init__(self, form: str, power: int = 1) -> None:
        super().__init__()
        self.form, self.power = form, power
        if form == "whole":
            self.w = nn.Linear(3 * D, 1, bias=False)
        else:
            self.h, self.u = (nn.Linear(D, 1, bias=False) for _ in range(2))
            self.m = nn.Parameter(torch.zeros(D)) if form == "scaled" else nn.Linear(D, 1, bias=False)
        self.o = nn.Linear(2 * D, D, bias=False)

    def forward(self, h: Any, u: Any) -> Any:
        one, two = (x.expand(B, T, J, D) for x in (h[:, :, None], u[:, None]))
        third = one * two**self.power
        if self.form == "whole":
            scores = self.w(torch.cat([one, two, third], -1)).squeeze(-1)
        elif self.form == "pairs":
            scores = self.h(h) + self.u(u).mT + self.m(third).squeeze(-1)
        else:
            scores = self.h(h) + self.u(u).mT + (h * self.m) @ (u**self.power).mT
        return self.o(torch.cat([h, scores.softmax(-1) @ u], -1))


def _inputs(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {"h": random.normal(size=(B, T, D)), "u": random.normal(size=(B, J, D))}


def _derive(function: Callable[..., Any], module: nn.Module, shapes: Any) -> Derivation:
    return infer(
        lambda w, x: {"y": function(w, x["h"], x["u"])}, module.eval(), lambda m, x: {"y": m(**x)}, _inputs, shapes
    )


@pytest.mark.parametrize(
    ("function", "shapes", "form"),
    [
        (_whole, WHOLE, "scaled"),
        (_apart, APART, "whole"),
        (_apart, APART, "pairs"),
        pytest.param(_whole, WHOLE, "pairs", marks=pytest.mark.slow),
        pytest.param(_apart, APART, "scaled", marks=pytest.mark.slow),
    ],
)
def test_a_similarity_in_any_form(function: Callable[..., Any], shapes: Any, form: str) -> None:
    module = Similarity(form)
    found = _derive(function, module, shapes)
    assert grades(found) == {Grade.DERIVED}
    assert rules(found, module)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "shapes", "form"), [(_whole, WHOLE, "scaled"), (_apart, APART, "whole")])
def test_another_third_term_is_a_difference(function: Callable[..., Any], shapes: Any, form: str) -> None:
    found = _derive(function, Similarity(form, power=2), shapes)
    assert not found.complete and found.proof is None and grades(found) <= UNPROVEN


MAPS = {**dict.fromkeys("qkvo", (D, D)), "n": ()}


def _two_maps(w: Any, h: Any, u: Any) -> Any:
    one, two = (jax.nn.softmax(jnp.einsum("btd,bjd->btj", h @ w[name], u), -1) for name in "qk")
    return (one @ (u @ w["v"]) - w["n"] * (two @ (u @ w["v"]))) @ w["o"]


class TwoMaps(nn.Module):
    """Differential attention; `of_first`: the number multiplies the first map; `fault`: the second one is squared."""

    def __init__(self, of_first: bool = False, fault: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.n, self.of_first, self.fault = nn.Parameter(torch.zeros(())), of_first, fault

    def forward(self, h: Any, u: Any) -> Any:
        one, two = ((layer(h) @ u.mT).softmax(-1) for layer in (self.q, self.k))
        two = two.square() if self.fault else two
        return self.o((self.n * one - two if self.of_first else one - self.n * two) @ self.v(u))


@pytest.mark.parametrize("of_first", [False, True])
def test_a_number_times_a_product_or_one_of_its_values(of_first: bool) -> None:
    """Where it multiplies the first map, that is the other program's second one, and the head has the other sign."""
    module = TwoMaps(of_first)
    found = _derive(_two_maps, module, MAPS)
    assert grades(found) == {Grade.DERIVED}
    assert any("prescaled_by: -1" in rule for rule in rules(found, module)) is of_first


@pytest.mark.slow
def test_another_map_is_a_difference() -> None:
    found = _derive(_two_maps, TwoMaps(fault=True), MAPS)
    assert not found.complete and grades(found) <= UNPROVEN
