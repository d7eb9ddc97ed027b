"""Branches that lead to an output alone, as the prior of each level of a flow, whose parts the two programs take in other orders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch import nn

from convert.inference.derivation import BY_OUTPUTS, Derivation, Grade
from convert.inference.grading.differences import other_orders
from convert.inference.infer import infer
from convert.inference.proposals import column_orders
from support.inferred import floats, grades, rules, sources

D, LEVELS = 6, 3
LEAVES = {f"{name}{k}": (D, D) for k in range(LEVELS) for name in ("trunk", "latent")}
LEAVES |= {f"prior{k}": (D, 2 * D) for k in range(LEVELS)} | {f"b{k}": (2 * D,) for k in range(LEVELS)}


def likelihood(w: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Means and logarithms of variances alternate."""
    x, total = inputs["x"], 0.0
    for k in range(LEVELS):
        x = jnp.tanh(x @ w[f"trunk{k}"])
        prior = x @ w[f"prior{k}"] + w[f"b{k}"]
        mean, log = prior[..., 0::2], prior[..., 1::2]
        z = jnp.sin(x) @ w[f"latent{k}"]
        total = total - (0.5 * (z - mean) ** 2 * jnp.exp(-log) + log).sum((1, 2))
    return {"likelihood": total, "x": x}


class Likelihood(nn.Module):
    """The logarithms stand in front of the means, each side by side; `taps`: the priors are convolutions."""

    def __init__(self, *, taps: bool, fault: bool = False) -> None:
        super().__init__()
        self.trunk, self.latent = (nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(LEVELS)) for _ in "tl")
        self.prior = nn.ModuleList(nn.Conv1d(D, 2 * D, 1) if taps else nn.Linear(D, 2 * D) for _ in range(LEVELS))
        self.taps, self.fault = taps, fault

    def forward(self, x: Any) -> dict[str, Any]:
        terms = []
        for trunk, latent, prior in zip(self.trunk, self.latent, self.prior, strict=True):
            x = torch.tanh(trunk(x))
            log, mean = (prior(x.mT).mT if self.taps else prior(x)).chunk(2, -1)
            z = latent(x.sin())
            log = -log if self.fault else log
            terms.append((0.5 * (z - mean) ** 2 / log.exp() + log).flatten(1).sum(1))
        return {"likelihood": -sum(terms), "x": x}


def derive(module: nn.Module) -> Derivation:
    return infer(likelihood, module.eval(), lambda net, given: net(given["x"]), floats(3, 4, D), LEAVES)


@pytest.mark.parametrize("taps", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_branch_in_another_order_ends_with_its_own_value(taps: bool) -> None:
    module = Likelihood(taps=taps)
    found = derive(module)
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert BY_OUTPUTS not in {part.evidence.by for tensor in found.tensors for part in tensor.parts}
    of = sources(found)
    assert all(of[f"prior.{k}.weight"] == f"prior{k}" and of[f"prior.{k}.bias"] == f"b{k}" for k in range(LEVELS))
    assert any("prior.{" in rule for rule in rules(found, module))


@pytest.mark.slow
def test_another_likelihood_is_a_difference() -> None:
    found = derive(Likelihood(taps=False, fault=True))
    assert not found.complete and found.differences


@pytest.mark.slow
def test_an_order_that_was_not_tried_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_orders, "in_other_sets", lambda *_: iter(()))
    monkeypatch.setattr(other_orders, "other_orders", lambda *_: iter(()))
    monkeypatch.setattr("convert.inference.infer._by_outputs", lambda *_: (None, ""))
    found = derive(Likelihood(taps=True))
    assert not any(difference.shown for difference in found.differences), [d.problem for d in found.differences]
