"""`infer` finds factors that the source has folded into a weight, and says so only where the source applies no other one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import HEADS, WIDTH, derive, rules, sources, tokens

D, N, H = WIDTH, HEADS, WIDTH // HEADS
SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys("qkv", (D, N, H)), **dict.fromkeys(("bq", "bk", "bv"), (N, H)), "o": (N, H, D),
}  # fmt: skip


def attention(scale: float) -> Any:
    """A scale of 1 is none."""

    def function(w: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[c]) + w.get(f"b{c}", 0) for c in "qkv")
        p = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) * scale)
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


@pytest.mark.slow
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


class Fused(torch.nn.Module):
    """Queries, keys and values from one matrix, below each other or head by head."""

    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.a, self.o, self.by_head = torch.nn.Linear(D, 3 * D), torch.nn.Linear(D, D, bias=False), by_head

    def forward(self, x: Any) -> Any:
        shape, order = ((N, 3, H), (3, 0, 2, 1, 4)) if self.by_head else ((3, N, H), (2, 0, 3, 1, 4))
        q, k, v = self.a(x).unflatten(-1, shape).permute(order)
        return self.o(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("by_head", [False, True])
def test_a_factor_of_one_part_of_a_fused_matrix(by_head):
    module = Fused(by_head)
    found = derive(attention(1.0), module, SHAPES)
    assert [[part.factor for part in found.tensor(f"a.{of}").parts] for of in ("weight", "bias")] == [[2.0, 1, 1]] * 2
    axes = 'axes: "(N (1 + 1 + 1) H)D", ' if by_head else ""
    assert rules(found, module)[:3] == [
        f'- einsum: ...D,DNH->...NH\n  from: {c}\n  bias: b{c}\n{factor}  linear: {{module: a, {axes}part: "{k} of 3"}}'
        for k, (c, factor) in enumerate(zip("qkv", ("  prescaled_by: 1/sqrt(H)\n", "", ""), strict=True), 1)
    ]


def test_a_factor_where_only_some_parts_have_a_bias():
    """As in Whisper, whose keys have none."""
    found = derive(attention(1.0), Fused(False), {name: shape for name, shape in SHAPES.items() if name != "bk"})
    assert [part.factor for part in found.tensor("a.weight").parts] == [2.0, 1, 1]
    assert sources(found)["a.bias"] == ("bq", 0.0, "bv") and found.complete


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
    assert "prescaled_by: 4\n" in rules(found, module)[0]
