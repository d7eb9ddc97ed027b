"""Data that is repeated for each matrix of a parameter, as the capsules below those of the next layer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import torch

from support.inferred import derive, floats

INPUTS, OUTPUTS, SIZE = 5, 4, 4


class Votes(torch.nn.Module):
    def __init__(self, *, left: bool, offset: float) -> None:
        super().__init__()
        self.left, self.offset = left, offset
        self.w = torch.nn.Parameter(torch.zeros(1, INPUTS, OUTPUTS, SIZE, SIZE))

    def forward(self, x: Any) -> Any:
        each = torch.tanh(x)[:, :, None, :, None].expand(-1, -1, OUTPUTS, -1, -1)
        if self.offset:
            each = each + self.offset * torch.arange(OUTPUTS)[:, None, None]
        votes = each.mT @ self.w if self.left else self.w @ each
        return votes.flatten(3)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("offset", [0, 0.1])
def test_votes_of_capsules(left: bool, offset: float) -> None:
    def function(w: Any, x: Any) -> Any:
        return jnp.einsum("bid,iode->bioe", jnp.tanh(x), w["w"])

    shapes = {"w": (INPUTS, OUTPUTS, SIZE, SIZE)}
    found = derive(function, Votes(left=left, offset=offset), shapes, floats(6, INPUTS, SIZE))
    assert found.complete == (not offset)
    assert bool(found.differences) == bool(offset)
