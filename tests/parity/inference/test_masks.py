"""Positions that a reference's `masks` leave out: the programs may differ there, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import WIDTH, grades

D = WIDTH
SHAPES = dict.fromkeys(("q", "k", "v", "o", "first", "last"), (D, D))


def function(w: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Attention, in which a query without keys sees all of them."""
    x = jnp.tanh(given["x"] @ w["first"])
    q, k, v = (x @ w[part] for part in "qkv")
    seen = jnp.tril(jnp.ones((x.shape[1],) * 2, bool)) & ~given["padding"][:, None, :]
    x = x + jax.nn.softmax(jnp.where(seen, q @ k.mT / np.sqrt(D), -1e30), -1) @ v @ w["o"]
    return {"y": x @ w["last"]}


class Model(torch.nn.Module):
    """Attention, in which a query without keys sees nothing."""

    def __init__(self, reads_padding: bool) -> None:
        super().__init__()
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in SHAPES)
        self.reads_padding = reads_padding

    def forward(self, x: Any, padding: Any) -> Any:
        x = torch.tanh(self.m[0](x))
        q, k, v = (m(x) for m in self.m[1:4])
        seen = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        if self.reads_padding:
            seen = seen & ~padding[:, None, :]
        p = (q @ k.mT / D**0.5).masked_fill(~seen, -1e30).softmax(-1) * seen.any(-1, keepdim=True)
        return self.m[5](x + self.m[4](p @ v))


def inputs(seed: int) -> dict[str, Any]:
    """Three rows; the second has padding at its start."""
    padding = np.zeros((3, 7), bool)
    padding[1, :3] = True
    return {"x": np.random.default_rng(seed).normal(size=(3, 7, D)), "padding": padding}


def derived(reads_padding: bool, masked: bool = True) -> Derivation:
    def run(module: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": module(given["x"], given["padding"])}

    masks = {"masks": lambda given: {"y": ~np.asarray(given["padding"])}} if masked else {}
    return infer(function, Model(reads_padding).eval(), run, inputs, SHAPES, **masks)


@pytest.mark.slow
def test_what_does_not_count_is_not_compared():
    found = derived(reads_padding=True)
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert not derived(reads_padding=True, masked=False).complete


def test_rows_with_padding_are_in_the_proof():
    """The planted fault: the target attends to padding, which rows without it cannot show."""
    found = derived(reads_padding=False)
    assert not found.complete and found.proof is None
    assert "positions that the JAX model hides" in found.differences[0].problem


@pytest.mark.parametrize("counts", [(True, False, True), (False, False, False)])
def test_rows_that_count_are_kept_and_all_of_them_where_none_does(counts: tuple[bool, ...]) -> None:
    from convert.inference.draws import whole_rows

    mask = np.ones((3, 7), bool)
    mask[:, 4] = counts
    found = whole_rows({"x": np.arange(6).reshape(3, 2), "table": np.arange(5)}, lambda _: {"y": mask})
    assert found["x"].tolist() == ([[0, 1], [4, 5]] if any(counts) else [[0, 1], [2, 3], [4, 5]])
    assert found["table"].tolist() == [0, 1, 2, 3, 4]
