"""Shifts, scales and gates that a condition makes, as DiT's adaLN: six parts of one layer, taken in other orders."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation, Grade
from support.inferred import WIDTH, derive, grades, layer_norm, rules

D, LAYERS = WIDTH, 3
OF_BLOCK = {"ada": (D, 6 * D), "ada_bias": (6 * D,), "a": (D, D), "b": (D, D)}


class Block(nn.Module):
    """A block with one layer for the six, or one for each of its branches.

    Args:
        order: which of its parts are the scale, the shift and the gate of a branch.
        fault: whether the gate of the first branch is that of the second.
    """

    def __init__(self, order: tuple[int, ...], *, fault: bool = False) -> None:
        super().__init__()
        self.order, self.fault = order, fault
        self.ada = nn.ModuleList(nn.Linear(D, len(order) * D) for _ in range(6 // len(order)))
        self.norm, self.a, self.b = (
            nn.LayerNorm(D, 1e-6, elementwise_affine=False),
            *(nn.Linear(D, D, bias=False) for _ in "ab"),
        )

    def forward(self, x: Any, c: Any) -> Any:
        made = [
            part
            for layer in self.ada
            for part in np.array([*layer(c).chunk(len(self.order), -1), None], object)[[*self.order]]
        ]
        scale, shift, gate, scale_2, shift_2, gate_2 = (part[:, None] for part in made)
        gate = gate_2 if self.fault else gate
        x = x + gate * self.a(torch.addcmul(shift, self.norm(x), 1 + scale)).tanh()
        return x + gate_2 * self.b(self.norm(x) * (1 + scale_2) + shift_2).sin()


class Model(nn.Module):
    def __init__(self, order: tuple[int, ...], **how: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(order, **how) for _ in range(LAYERS))

    def forward(self, x: Any) -> Any:
        c = nn.functional.silu(x[:, 0])
        for block in self.blocks:
            x = block(x, c)
        return x


def function(w: Any, x: Any) -> Any:
    c = jax.nn.silu(x[:, 0])
    for k in range(LAYERS):
        made = c @ w[f"{k}/ada"] + w[f"{k}/ada_bias"]
        shift, scale, gate, shift_2, scale_2, gate_2 = jnp.split(made[:, None], 6, -1)
        x = x + gate * jnp.tanh((layer_norm(x, 1, 0) * (1 + scale) + shift) @ w[f"{k}/a"])
        x = x + gate_2 * jnp.sin((layer_norm(x, 1, 0) * (1 + scale_2) + shift_2) @ w[f"{k}/b"])
    return x


def derived(order: tuple[int, ...], **how: Any) -> tuple[Derivation, nn.Module]:
    module, shapes = (
        Model(order, **how),
        {f"{k}/{name}": shape for k in range(LAYERS) for name, shape in OF_BLOCK.items()},
    )
    return derive(function, module, shapes), module


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [
        (0, 1, 2),
        pytest.param((5, 3, 1, 0, 4, 2), marks=pytest.mark.slow),
        pytest.param((1, 0, 2), marks=pytest.mark.slow),
    ],
)
def test_parts_that_are_used_alike(order: tuple[int, ...]) -> None:
    found, module = derived(order)
    assert found.complete and grades(found) == {Grade.DERIVED}, found.differences
    assert any("concatenated" in rule for rule in rules(found, module)) or order == (1, 0, 2)


@pytest.mark.slow
def test_another_gate_is_not_derived() -> None:
    found, _ = derived((0, 1, 2), fault=True)
    assert found.differences and not found.complete
