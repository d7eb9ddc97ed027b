"""What one program writes as a sum over a product of elements, and the other as a matrix product: attention vectors, pooling scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import HEADS, WIDTH, derive, rules, sources

D, H = WIDTH, HEADS
SHAPES = {"w": (D, D), "left": (H, D // H), "right": (H, D // H), "out": (D, D)}
Scores = Callable[[Mapping[str, Any], Any], tuple[Any, Any]]


class Scored(torch.nn.Module):
    """Heads that are weighted by two numbers each, which one vector for each head gives."""

    def __init__(self, exchanged: bool = False) -> None:
        super().__init__()
        self.w, self.out = (torch.nn.Linear(D, D, bias=False) for _ in range(2))
        self.a = torch.nn.Parameter(torch.ones(1, H, 2 * D // H))
        self.exchanged = exchanged

    def forward(self, x: Any) -> Any:
        h = self.w(x).unflatten(-1, (H, -1))
        left = (h * self.a[..., : D // H]).sum(-1)
        right = (h * self.a[..., D // H :]).sum(dim=-1, keepdim=True).squeeze(-1)
        left, right = (right, left) if self.exchanged else (left, right)
        e = torch.tanh(left.unsqueeze(2) + right.unsqueeze(1))
        return self.out((e * torch.relu(right).unsqueeze(1)).sum(2).unsqueeze(-1).mul(h).flatten(2))


def source(scores: Scores) -> Callable[[Mapping[str, Any], Any], Any]:
    def function(w: Mapping[str, Any], x: Any) -> Any:
        h = (x @ w["w"]).reshape(*x.shape[:-1], H, D // H)
        left, right = scores(w, h)
        e = jnp.tanh(left[:, :, None] + right[:, None])
        return ((e * jnp.maximum(right, 0)[:, None]).sum(2)[..., None] * h).reshape(x.shape) @ w["out"]

    return function


PRODUCTS: Scores = lambda w, h: tuple(jnp.einsum("bnhk,hk->bnh", h, w[name]) for name in ("left", "right"))  # type: ignore[assignment,return-value]  # noqa: E731
SUMS: Scores = lambda w, h: ((h * w["left"]).sum(-1), jnp.sum(h * w["right"], axis=3))  # noqa: E731


@pytest.mark.parametrize("scores", [PRODUCTS, SUMS])
def test_a_sum_of_products_is_a_product(scores: Scores) -> None:
    found = derive(source(scores), Scored(), SHAPES)
    assert found.proof is not None, found.differences
    assert {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}
    assert any("parameter: {name: a, axes:" in line and " + " in line for line in rules(found, Scored()))
    assert sources(found)["w.weight"] == "w"


def test_exchanged_scores_are_another_way_to_make_the_vector() -> None:
    found = derive(source(PRODUCTS), Scored(exchanged=True), SHAPES)
    assert found.proof is not None
    leaves = [part.leaf for tensor in found.tensors if tensor.name == "a" for part in tensor.parts]
    assert leaves[0] == "right"


@pytest.mark.slow
def test_scores_that_are_added_over_another_axis_are_a_difference() -> None:
    found = derive(source(lambda w, h: (SUMS(w, h)[0], (h * w["right"]).sum(-1)[..., ::-1])), Scored(), SHAPES)
    assert found.differences or any(tensor.grade is not Grade.DERIVED for tensor in found.tensors)
