"""A table whose rows the source takes with ones and zeros, or in another order of its axes, as in a CRF."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.infer import infer
from support.inferred import WIDTH, rules

pytestmark = pytest.mark.slow
D = WIDTH
SHAPES = {"x": (D, D), "h": (D, D), "out": (D, D), "start": (D,), "end": (D,), "steps": (D, D), "book": (D, D)}


def inputs(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {"x": generator.normal(size=(5, 4, D)), "tags": generator.integers(0, D, (5, 4))}


def tagger(w: Any, given: Any) -> dict[str, Any]:
    """The score of some tags, as JAX code has it: products with ones and zeros."""

    def step(h: Any, x: Any) -> tuple[Any, Any]:
        h = jnp.tanh(x @ w["x"] + h @ w["h"])
        return h, h

    _, h = jax.lax.scan(step, jnp.zeros((5, D)), given["x"].swapaxes(0, 1))
    ones = jax.nn.one_hot(given["tags"], D)
    score = (
        jnp.einsum("btd,btd->b", h.swapaxes(0, 1) @ w["out"], ones)
        + ones[:, 0] @ w["start"]
        + w["end"][given["tags"][:, -1]]
    )
    score += jnp.einsum("bti,btj,ij->b", ones[:, :-1], ones[:, 1:], w["steps"])
    return {"score": score, "codes": w["book"].T[given["tags"]]}


class Tagger(torch.nn.Module):
    """The same by indices, with a matrix of (to, from)."""

    def __init__(self, last: int = -1) -> None:
        super().__init__()
        self.last = last
        self.first, self.again, self.out = (torch.nn.Linear(D, D, bias=False) for _ in range(3))
        self.codes = torch.nn.Embedding(D, D)
        self.eos, self.bos = (torch.nn.Parameter(torch.zeros(D)) for _ in range(2))
        self.trans = torch.nn.Parameter(torch.zeros(D, D))

    def forward(self, x: Any, tags: Any) -> dict[str, Any]:
        states = [torch.zeros(len(x), D)]
        for t in range(x.shape[1]):
            states.append(torch.tanh(self.first(x[:, t]) + self.again(states[-1])))
        out, rows = self.out(torch.stack(states[1:], 1)), torch.arange(len(x))
        score = self.bos[tags[:, 0]] + out[rows, 0, tags[:, 0]] + self.eos[tags[:, self.last]]
        for t in range(1, x.shape[1]):
            score = score + out[rows, t, tags[:, t]] + self.trans[tags[:, t], tags[:, t - 1]]
        return {"score": score, "codes": self.codes(tags)}


def test_tables_by_ones_and_zeros_are_found() -> None:
    module = Tagger().eval()
    found = infer(tagger, module, lambda module, given: module(**given), inputs, SHAPES)
    written = rules(found, module)
    for rule in (
        "from: start\n  parameter: bos",
        "from: end\n  parameter: eos",
        "from: steps\n  axes: CD\n  parameter: {name: trans, axes: DC}",
        "from: book\n  axes: CD\n  parameter: {name: codes.weight, axes: DC}",
    ):
        assert f"- {rule}" in written, written


def test_another_row_of_a_table_is_a_difference() -> None:
    found = infer(tagger, Tagger(last=-2).eval(), lambda module, given: module(**given), inputs, SHAPES)
    assert not found.complete and found.differences
