"""A kernel of one tap over joined channels, of which some are one value for all positions, and a product for each value in the source: attentive statistics pooling (Okabe et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, floats, grades, rules, sources

D = WIDTH
SHAPES = {**dict.fromkeys(("w", "frame", "mean", "deviation", "out"), (D, D)), **dict.fromkeys("bmvso", (D,))}


def function(w: Mapping[str, Any], x: Any) -> Any:
    """Each statistic is multiplied once, and added to all frames."""
    x = jax.nn.relu(x @ w["w"])
    mean, deviation = x.mean(1), jnp.sqrt(jnp.maximum(x.var(1, ddof=1), 1e-4))
    e = x @ w["frame"] + w["b"] + (mean @ w["mean"] + deviation @ w["deviation"])[:, None]
    e = (jax.nn.relu(e) - w["m"]) * jax.lax.rsqrt(w["v"] + 1e-5) * w["s"] + w["o"]
    return (jax.nn.softmax(jnp.tanh(e) @ w["out"], 1) * x).sum(1)


class Pooled(torch.nn.Module):
    """Channels first; ``order``: the statistics, as they are joined."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2), unbiased: bool = True) -> None:
        super().__init__()
        self.c, self.a = torch.nn.Conv1d(D, D, 1, bias=False), torch.nn.Conv1d(3 * D, D, 1)
        self.n, self.out = torch.nn.BatchNorm1d(D), torch.nn.Conv1d(D, D, 1, bias=False)
        self.order, self.unbiased = order, unbiased

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.c(x.mT))
        deviation = torch.sqrt(x.var(2, keepdim=True, correction=int(self.unbiased)).clamp(min=1e-4))
        values = [x, *(y.repeat(1, 1, x.shape[-1]) for y in (x.mean(2, keepdim=True), deviation))]
        e = self.n(torch.relu(self.a(torch.cat([values[k] for k in self.order], 1))))
        return (self.out(torch.tanh(e)).softmax(2) * x).sum(2)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_each_value_of_the_channels_has_its_leaf(order: tuple[int, ...]) -> None:
    found = derive(function, Pooled(order), SHAPES, floats(3, 7, D))
    assert found.complete and grades(found) == {Grade.DERIVED}
    leaves = [("frame", "mean", "deviation")[k] for k in order]
    assert sources(found)["a.weight"] == tuple(leaves)
    (rule,) = [rule for rule in rules(found, Pooled(order)) if "a.weight" in rule]
    assert rule.startswith(f'- from: "{{{",".join(leaves)}}}"') or f"from: [{', '.join(leaves)}]" in rule, rule


@pytest.mark.slow
def test_another_deviation_is_not_derived() -> None:
    found = derive(function, Pooled(unbiased=False), SHAPES, floats(3, 7, D))
    assert not found.complete and found.differences
