"""Tables of position biases that one program looks up, and the other multiplies by rows of zeros and one 1."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import HEADS, WIDTH, derive, floats, grades, rules, sources

D, N, T, BUCKETS = WIDTH, HEADS, 6, 7
ROWS = np.clip(np.arange(T) - np.arange(T)[:, None] + 3, 0, BUCKETS - 1)
HOT = np.eye(BUCKETS)[ROWS]


def _source(*, hot: bool) -> Any:
    def function(w: Any, x: Any) -> Any:
        q, k, v = ((x @ w[c]).reshape(-1, T, N, D // N) for c in "qkv")
        table = jnp.einsum("tsb,bn->nts", HOT, w["t"]) if hot else w["t"][:, ROWS]
        scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / 2 + table, -1)
        return jnp.einsum("bnts,bsnh->btnh", scores, v).reshape(x.shape) @ w["o"]

    return function


class Attention(torch.nn.Module):
    def __init__(self, hot: Any = None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(D, D, bias=False) for _ in range(4))
        self.hot = None if hot is None else torch.as_tensor(hot)
        self.t = torch.nn.Embedding(BUCKETS, N) if hot is None else torch.nn.Linear(BUCKETS, N, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = (m(x).view(len(x), T, N, D // N).transpose(1, 2) for m in (self.q, self.k, self.v))
        table = self.t(torch.as_tensor(ROWS) if self.hot is None else self.hot.to(x.dtype)).permute(2, 0, 1)
        y = (q @ k.mT / 2 + table).softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("to_hot", [False, True], ids=["to lookups", "to products"])
def test_a_table_that_is_multiplied_is_the_one_that_is_looked_up(to_hot: bool) -> None:
    module = Attention(HOT if to_hot else None)
    shapes = {**dict.fromkeys("qkvo", (D, D)), "t": (N, BUCKETS) if to_hot else (BUCKETS, N)}
    found = derive(_source(hot=not to_hot), module, shapes, floats(2, T, D))
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert sources(found.tensor("t.weight")) == "t" and rules(found, module)


@pytest.mark.slow
def test_other_rows_of_the_table_are_never_derived() -> None:
    module = Attention(HOT[:, ::-1].copy())
    found = derive(_source(hot=False), module, {**dict.fromkeys("qkvo", (D, D)), "t": (N, BUCKETS)}, floats(2, T, D))
    assert not found.complete and found.differences and found.proof is None
