"""`infer` finds factors that the source has folded into a weight, and says so only where the source applies no other one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import HEADS, WIDTH, derive, rules, tokens

D, N, H = WIDTH, HEADS, WIDTH // HEADS
SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys("qkv", (D, N, H)), **dict.fromkeys(("bq", "bk", "bv"), (N, H)), "o": (N, H, D),
}  # fmt: skip


def attention(scale: float) -> Any:
    def function(w: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[c]) + w[f"b{c}"] for c in "qkv")
        logits = jnp.einsum("btnh,bsnh->bnts", q, k)
        p = jax.nn.softmax(logits if scale == 1 else logits * scale)
        return jnp.einsum("btnh,nhd->btd", jnp.einsum("bnts,bsnh->btnh", p, v), w["o"])

    return function


class Attention(torch.nn.Module):
    """Divides the scores by sqrt(H)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(D, D) for _ in range(3))
        self.o = torch.nn.Linear(D, D, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = (p(x).unflatten(-1, (N, H)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_queries_that_the_source_stores_divided_by_the_root_of_a_head():
    module = Attention()
    found = derive(attention(1.0), module, SHAPES)
    carried = {t.name: (t.grade, t.parts[0].factor) for t in found.tensors if t.name[0] in "qk"}
    assert carried == {
        "q.weight": (Grade.INTERCHANGEABLE, 2.0), "q.bias": (Grade.INTERCHANGEABLE, 2.0),
        "k.weight": (Grade.INTERCHANGEABLE, 1.0), "k.bias": (Grade.INTERCHANGEABLE, 1.0),
    }, "the keys could carry it as well"  # fmt: skip
    assert found.tensor("v.weight").grade is Grade.DERIVED
    assert "from: q\n  bias: bq\n  prescaled_by: 1/sqrt(H)\n" in rules(found, module)[0]


@pytest.mark.slow
def test_a_scale_that_the_source_has_as_well_is_another_one_and_no_factor_of_a_weight():
    found = derive(attention(0.3), Attention(), SHAPES)
    assert not found.complete and found.differences


def test_a_table_that_the_target_multiplies_when_it_is_looked_up():
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.l = torch.nn.Embedding(11, D), torch.nn.Linear(D, D)

        def forward(self, x: Any) -> Any:
            return torch.tanh(self.l(self.e(x) * D**0.5))

    module = Model()
    shapes = {"e": (11, D), "l": (D, D), "b": (D,)}
    found = derive(lambda w, x: jnp.tanh(w["e"][x] @ w["l"] + w["b"]), module, shapes, tokens(11, 3, 9))
    assert rules(found, module)[0] == "- from: e\n  prescaled_by: sqrt(D)\n  axes: VD\n  embedding: e"


def test_a_number_in_the_source():
    module = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh())
    found = derive(lambda w, x: jnp.tanh(x @ (w["a"] * 0.25)), module, {"a": (D, D)})
    assert "prescaled_by: 4.0\n" in rules(found, module)[0]
