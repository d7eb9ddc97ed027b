"""Experts of which a program takes the matrices that each token chose, or sorts the tokens by expert; others take the tokens of each expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import derive, floats, grades

WIDTH, INNER, EXPERTS, CHOSEN = 8, 6, 5, 2


def shapes(experts: int = EXPERTS) -> dict[str, tuple[int, ...]]:
    return {
        "router": (WIDTH, experts),
        "out": (WIDTH, WIDTH),
        "gate": (experts, WIDTH, INNER),
        "up": (experts, WIDTH, INNER),
        "down": (experts, INNER, WIDTH),
    }


def chosen(w: Any, x: Any) -> tuple[Any, Any]:
    return jax.lax.top_k(jax.nn.softmax(x @ w["router"]), CHOSEN)


def taken(w: Any, x: Any) -> Any:
    """Each token takes the matrices of its experts."""
    shares, experts = chosen(w, x)
    gate, up = (jnp.einsum("td,tkdf->tkf", x, w[name][experts]) for name in ("gate", "up"))
    made = jnp.einsum("tkf,tkfd,tk->td", jax.nn.silu(gate) * up, w["down"][experts], shares)
    return jnp.tanh(x + made) @ w["out"]


def grouped(w: Any, x: Any) -> Any:
    """The tokens are sorted by expert, and multiplied group by group."""
    shares, experts = chosen(w, x)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=EXPERTS)
    rows = x[order // CHOSEN]
    gate, up = (jax.lax.ragged_dot(rows, w[name], sizes) for name in ("gate", "up"))
    made = jax.lax.ragged_dot(jax.nn.silu(gate) * up, w["down"], sizes)
    made = made[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH)
    return jnp.tanh(x + jnp.einsum("tkd,tk->td", made, shares)) @ w["out"]


def all_of_all(w: Any, x: Any) -> Any:
    shares, experts = chosen(w, x)
    share = (jax.nn.one_hot(experts, w["router"].shape[1]) * shares[..., None]).sum(-2)
    gate, up = (jnp.einsum("td,edf->tef", x, w[name]) for name in ("gate", "up"))
    return jnp.tanh(x + jnp.einsum("tef,efd,te->td", jax.nn.silu(gate) * up, w["down"], share)) @ w["out"]


class Experts(nn.Module):
    """With a fault: `renormalised` shares, those of the other expert (`exchanged`), or a `gelu`."""

    def __init__(self, experts: int = EXPERTS, fault: str = "") -> None:
        super().__init__()
        self.router, self.out = nn.Linear(WIDTH, experts, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.randn(experts, INNER, WIDTH)) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(experts, WIDTH, INNER))
        self.act = functional.gelu if fault == "gelu" else functional.silu
        self.fault = fault

    def chosen(self, x: Any) -> tuple[Any, Any]:
        shares, experts = self.router(x).softmax(-1).topk(CHOSEN, -1)
        if self.fault == "renormalised":
            shares = shares / shares.sum(-1, keepdim=True)
        return shares.flip(-1) if self.fault == "exchanged" else shares, experts


class Looped(Experts):
    def forward(self, x: Any) -> Any:
        shares, experts = self.chosen(x)
        made = torch.zeros_like(x)
        for k, (w1, w3, w2) in enumerate(zip(self.w1, self.w3, self.w2, strict=True)):
            rows, places = torch.where(experts == k)
            if len(rows):
                inner = self.act(functional.linear(x[rows], w1)) * functional.linear(x[rows], w3)
                made.index_add_(0, rows, functional.linear(inner, w2) * shares[rows, places, None])
        return self.out(torch.tanh(x + made))


class Taken(Experts):
    def forward(self, x: Any) -> Any:
        shares, experts = self.chosen(x)
        gate, up = (torch.einsum("td,tkfd->tkf", x, w[experts]) for w in (self.w1, self.w3))
        made = torch.einsum("tkf,tkdf->tkd", self.act(gate) * up, self.w2[experts])
        return self.out(torch.tanh(x + torch.einsum("tkd,tk->td", made, shares)))


SOURCES: list[Callable[..., Any]] = [taken, grouped]
TARGETS = [Looped, Taken]


@pytest.mark.parametrize("module", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_each_way_to_choose_the_matrices_is_derived(source: Callable[..., Any], module: type[Experts]) -> None:
    found = derive(source, module(), shapes(), floats(20, WIDTH))
    assert found.complete and grades(found) == {Grade.DERIVED}, found.differences
    assert found.tried < 300


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["renormalised", "exchanged", "gelu"])
@pytest.mark.parametrize("module", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_fault_is_never_derived(source: Callable[..., Any], module: type[Experts], fault: str) -> None:
    found = derive(source, module(fault=fault), shapes(), floats(20, WIDTH))
    assert not found.complete and found.proof is None


@pytest.mark.slow
def test_experts_that_a_run_does_not_choose_are_found_by_further_runs() -> None:
    """Three tokens choose six of seven experts at most, others in each run."""
    found = derive(all_of_all, Looped(7), shapes(7), floats(3, WIDTH))
    assert found.complete and grades(found) == {Grade.DERIVED}, found.differences


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["renormalised", "exchanged", "gelu"])
def test_a_fault_is_never_derived_by_further_runs(fault: str) -> None:
    found = derive(all_of_all, Looped(7, fault), shapes(7), floats(3, WIDTH))
    assert not found.complete and found.proof is None
