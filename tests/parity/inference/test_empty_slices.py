"""Code that turns the first part of each head, and passes on the rest, with a part that is the whole head: the rest is empty."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from support.inferred import derive, floats

T, HEADS, HEAD = 7, 2, 4
ANGLES = np.arange(T)[:, None] / 10.0 ** np.arange(HEAD // 2)


def _pairs(x: Any) -> Any:
    one, two = x[..., ::2], x[..., 1::2]
    cos, sin = jnp.cos(ANGLES)[:, None], jnp.sin(ANGLES)[:, None]
    return jnp.stack([one * cos - two * sin, two * cos + one * sin], -1).reshape(x.shape)


class Turned(nn.Module):
    def __init__(self, rest: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HEADS * HEAD, HEADS * HEAD, bias=False) for _ in range(3))
        self.rest = rest

    def turn(self, x: Any) -> Any:
        first, rest = x[..., :HEAD], x[..., HEAD:]
        cos, sin = (torch.as_tensor(f(np.concatenate([ANGLES] * 2, -1))).to(x.dtype) for f in (np.cos, np.sin))
        one, two = first.chunk(2, -1)
        turned = first * cos + torch.cat([-two, one], -1) * sin
        return torch.cat([turned, rest], -1) if self.rest else turned

    def forward(self, x: Any) -> Any:
        q, k, v = (of(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for of in (self.q, self.k, self.v))
        return ((self.turn(q) @ self.turn(k).mT).softmax(-1) @ v).transpose(1, 2).flatten(2).tanh()


@pytest.mark.parametrize("rest", [False, True])
def test_a_head_that_is_turned_as_a_whole(rest: bool) -> None:
    def function(w: Any, x: Any) -> Any:
        q, k, v = ((x @ w[name]).reshape(*x.shape[:2], HEADS, HEAD) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", _pairs(q), _pairs(k)))
        return jnp.tanh(jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape))

    found = derive(
        function, Turned(rest), dict.fromkeys("qkv", (HEADS * HEAD, HEADS * HEAD)), floats(3, T, HEADS * HEAD)
    )
    assert found.complete, found.differences
