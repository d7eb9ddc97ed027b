"""A gated attention unit: queries and keys of one value, with a scale and an offset for each, in a stack or one by one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import UNPROVEN, WIDTH, derive, floats, grades, rules

D, T = WIDTH, 6
MATRICES = {**dict.fromkeys("uvzo", (D, D)), **dict.fromkeys(("ub", "vb", "zb"), (D,))}
STACKED = {**MATRICES, "g": (2, D), "b": (2, D)}
SINGLE = {**MATRICES, **dict.fromkeys(("g0", "g1", "b0", "b1"), (D,))}


def _unit(w: Any, x: Any) -> Any:
    u, v, z = (jax.nn.silu(x @ w[name] + w[f"{name}b"]) for name in "uvz")
    if "g" in w:
        both = jnp.einsum("btd,hd->bthd", z, w["g"]) + w["b"]
        q, k = both[:, :, 0], both[:, :, 1]
    else:
        q, k = (z * w[f"g{i}"] + w[f"b{i}"] for i in range(2))
    weights = jax.nn.relu(jnp.einsum("btd,bsd->bts", q, k) / T) ** 2
    return (u * (weights @ v)) @ w["o"]


class Unit(nn.Module):
    """`power`: of the weights."""

    def __init__(self, stacked: bool, power: int = 2) -> None:
        super().__init__()
        self.u, self.v, self.z = (nn.Linear(D, D) for _ in range(3))
        self.o, self.power, shape = nn.Linear(D, D, bias=False), power, (2, D) if stacked else (D,)
        self.g, self.b = (nn.ParameterList(torch.zeros(shape) for _ in range(1 if stacked else 2)) for _ in range(2))

    def forward(self, x: Any) -> Any:
        u, v, z = (functional.silu(layer(x)) for layer in (self.u, self.v, self.z))
        if len(self.g) == 1:
            q, k = (torch.einsum("...d,hd->...hd", z, self.g[0]) + self.b[0]).unbind(-2)
        else:
            q, k = (z * g + b for g, b in zip(self.g, self.b, strict=True))
        weights = functional.relu(q @ k.mT / T) ** self.power
        return self.o(u * (weights @ v))


@pytest.mark.parametrize(
    ("shapes", "stacked"),
    [(STACKED, False), (SINGLE, True), pytest.param(STACKED, True, marks=pytest.mark.slow)],
)
def test_scales_and_offsets_in_a_stack_or_one_by_one(shapes: dict[str, Any], stacked: bool) -> None:
    module = Unit(stacked)
    found = derive(_unit, module, shapes, floats(3, T, D))
    assert grades(found) == {Grade.DERIVED}
    assert rules(found, module)


@pytest.mark.slow
@pytest.mark.parametrize(("shapes", "stacked"), [(STACKED, False), (SINGLE, True)])
def test_another_function_of_the_scores_is_a_difference(shapes: dict[str, Any], stacked: bool) -> None:
    found = derive(_unit, Unit(stacked, power=3), shapes, floats(3, T, D))
    assert not found.complete and found.proof is None and grades(found) <= UNPROVEN
