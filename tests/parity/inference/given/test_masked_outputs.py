"""Outputs with numbers that stand for masked values prove nothing by these: beside -1e30 any difference of the logits would be small."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import UNPROVEN, WIDTH, derive, grades

LEAVES = {"w": (WIDTH, WIDTH), "b": (WIDTH,)}


class Net(torch.nn.Module):
    def __init__(self, hidden: float, added: bool, wrong: float) -> None:
        super().__init__()
        self.layer, self.hidden, self.added, self.wrong = torch.nn.Linear(WIDTH, WIDTH), hidden, added, wrong

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self.layer(x)) * (1 + self.wrong)
        if self.added:
            return y + self.hidden * (x < 0)
        return y.masked_fill(x < 0, self.hidden)


def _function(hidden: float, added: bool) -> Any:
    def function(w: Any, x: Any) -> Any:
        y = jnp.tanh(x @ w["w"] + w["b"])
        return y + hidden * (x < 0) if added else jnp.where(x < 0, hidden, y)

    return function


def _inputs(seed: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).normal(size=(5, WIDTH)).astype(np.float32)}


@pytest.mark.parametrize(("hidden", "added"), [(-1e30, False), (-1e9, True)])
@pytest.mark.parametrize("wrong", [0.0, 1e-6])
def test_masked_values_do_not_hide_the_others(hidden: float, added: bool, wrong: float) -> None:
    found = derive(_function(hidden, added), Net(hidden, added, wrong), LEAVES, _inputs)
    if wrong:
        assert grades(found) <= UNPROVEN and found.proof is None
    else:
        assert grades(found) == {Grade.DERIVED} and found.proof is not None and found.proof.error < 1e-10
