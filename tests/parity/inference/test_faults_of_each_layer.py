"""A fault of each layer is found with few candidates: behind the first, the values of the source's next layer are tried before others."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import torch

from support.inferred import WIDTH, derive

D, LAYERS = WIDTH, 6
VECTORS = ("scale", "shift", "bias")
SHAPES = {f"h{i}/{name}": (D,) for i in range(LAYERS) for name in VECTORS} | {f"h{i}/w": (D, D) for i in range(LAYERS)}


def blocks(w: Any, x: Any) -> Any:
    for i in range(LAYERS):
        p = {name: w[f"h{i}/{name}"] for name in (*VECTORS, "w")}
        apart = x - x.mean(-1, keepdims=True)
        norm = apart / jnp.sqrt((apart**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["shift"]
        x = x + jnp.tanh(norm @ p["w"] + p["bias"])
    return x


class Blocks(torch.nn.Module):
    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(D, eps=epsilon) for _ in range(LAYERS))
        self.dense = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(LAYERS))

    def forward(self, x: Any) -> Any:
        for norm, dense in zip(self.norms, self.dense, strict=True):
            x = x + torch.tanh(dense(norm(x)))
        return x


@pytest.mark.slow
def test_another_epsilon_in_each_layer() -> None:
    right, wrong = (derive(blocks, Blocks(epsilon), SHAPES) for epsilon in (1e-6, 1e-5))
    assert right.complete and not wrong.complete and wrong.proof is None
    assert wrong.tried < 1300, (
        "what was refuted with the same parameters, or in another layer, is not searched whole again"
    )
    guessed = {tensor.name: {part.leaf for part in tensor.parts} for tensor in wrong.tensors}
    assert guessed == {tensor.name: {part.leaf for part in tensor.parts} for tensor in right.tensors}
    (difference,) = wrong.differences
    assert "1e-05" in difference.problem and "1e-06" in difference.problem, difference.problem
