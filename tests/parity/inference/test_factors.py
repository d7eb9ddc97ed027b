"""`infer` finds factors that the source has folded into a weight, and says so only where the source applies no other one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.cli import infer_text
from convert.inference.derivation import Grade
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import HEADS, WIDTH, derive, floats, rules, sources, tokens

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
    assert found.notes[-1].startswith("q.weight and 1 more are their leaves times 2 (`prescaled_by`): ")
    said = list(infer_text.summary(found, {}))
    assert any("interchangeable: k.weight: its leaf times 2 gives the same outputs" in line for line in said), said
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
    module = Fused(False)
    found = derive(attention(1.0), module, {name: shape for name, shape in SHAPES.items() if name != "bk"})
    written = write_rules(found, model_of_module(module, "Model"))
    assert list(written.open) == ["a.bias"] and 'linear: {module: a, part: "3 of 3"}' in written.text
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


class Split(torch.nn.Module):
    """Queries, keys and values of three layers, each a part of one matrix; the scores have no factor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.ModuleList(torch.nn.Linear(5, 21) for _ in range(3))
        self.o = torch.nn.ModuleList(torch.nn.Linear(9, 5, bias=False) for _ in range(3))

    def forward(self, x: Any) -> Any:
        for a, o in zip(self.a, self.o, strict=True):
            q, k, v = a(x).split((6, 6, 9), -1)
            x = x + o((q @ k.mT).softmax(-1) @ v)
        return x


def _with_factors(factors: Any) -> tuple[Any, dict[str, tuple[int, ...]]]:
    def function(w: Any, x: Any) -> Any:
        for i in range(3):
            q, k, v = jnp.split(x @ (w[f"{i}/a"] * factors) + w[f"{i}/b"], (6, 12), -1)
            x = x + jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2)) @ v @ w[f"{i}/o"]
        return x

    return function, {f"{i}/{n}": of for i in range(3) for n, of in {"a": (5, 21), "b": (21,), "o": (9, 5)}.items()}


def test_a_factor_of_one_part_of_a_fused_leaf():
    function, shapes = _with_factors(np.repeat([0.25, 1.0], [6, 15]))
    module = Split()
    found = derive(function, module, shapes, floats(3, 7, 5))
    equation = '- einsum: "...D,D(C + E)->...(C + E)"\n  from: "{i}/a"\n'
    assert rules(found, module)[:2] == [
        equation + '  prescaled_by: 4\n  part: 1 of 2\n  linear: {module: "a.{i}", part: "1 of 2"}',
        equation + '  part: 2 of 2\n  linear: {module: "a.{i}", part: "2 of 2"}',
    ]
    text = write_rules(found, model_of_module(module, "Model")).text
    assert compare_rules(text.replace("prescaled_by: 4", "prescaled_by: 3"), found)  # planted


def test_a_factor_of_each_column_is_none_of_parts():
    """Planted: no two columns of the leaf have the same factor."""
    function, shapes = _with_factors(1 + np.arange(21))
    module = Split()
    found = derive(function, module, shapes, floats(3, 7, 5))
    assert found.complete and "a.0" in write_rules(found, model_of_module(module, "Model")).open
