"""`infer` finds a kernel that the source keeps as a product of two leaves, alone or added to a third (LoRA)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Grade
from convert.inference.rule_file.computed import NO_WORDS
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.planning.planner import make_plan
from convert.rules.parse import parse_rules
from convert.verify.target_model import model_of_module
from support.inferred import WIDTH, derive, floats, grades, rules, sources
from support.memory_source import MemorySource, run

D, RANK = WIDTH, 3
HEAD = "model: m\ntitle: m\naxes:\n  D: {is: a width}\n  C: {is: a width, equals: D}\n  A: {is: a rank}\ntargets:\n  torch: {loads: m}\nrules:\n"


@pytest.mark.slow
def test_the_lora_of_flax_nnx_is_merged():
    from flax import nnx

    base = nnx.Linear(D, D, rngs=nnx.Rngs(0))
    model = nnx.LoRA(D, RANK, D, base_module=base, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    shapes = {"/".join(map(str, path)): value.shape for path, value in nnx.to_flat_state(state)}

    def function(w: Mapping[str, Any], x: Any) -> Any:
        own = jax.tree.map(lambda value: value, state)
        nested: dict[str, Any] = {}
        for name, leaf in w.items():
            *steps, last = name.split("/")
            at = nested
            for step in steps:
                at = at.setdefault(step, {})
            at[last] = leaf
        nnx.replace_by_pure_dict(own, nested)
        return jnp.tanh(nnx.merge(graph, own)(x))

    module = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh())
    found = derive(function, module, shapes)
    assert grades(found) == {Grade.DERIVED} and not found.dropped
    assert sources(found.tensor("0.weight")) == ("base_module/kernel", "lora_a", "lora_b")
    (rule,) = rules(found, module)
    assert '  plus: {einsum: "...D,DA,AC->...C", from: lora_a, times: lora_b}\n' in rule
    rng = np.random.default_rng(1)
    tree = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    made = run(make_plan(parse_rules(HEAD + rule + "\n"), MemorySource(tree)))
    want = tree["base_module/kernel"] + tree["lora_a"] @ tree["lora_b"]
    assert np.allclose(made["0.weight"], want.T, rtol=1e-12)


@pytest.mark.parametrize("behind", [False, True], ids=["scaled before", "scaled behind"])
def test_a_scale_of_the_product(behind):
    def function(w: Any, x: Any) -> Any:
        more = (x @ w["a"]) @ w["b"] * 0.5 if behind else (x @ w["a"] * 0.5) @ w["b"]
        return jnp.tanh(x @ w["k"] + w["c"] + more)

    module = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh())
    found = derive(function, module, {"a": (D, RANK), "b": (RANK, D), "k": (D, D), "c": (D,)})
    assert "from: a, times: b, scale: 0.5}" in rules(found, module)[0]


def test_a_product_of_two_leaves_alone():
    module = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh())
    shapes = {"u": (D, RANK), "v": (D, RANK), "b": (D,)}
    found = derive(lambda w, x: jnp.tanh((x @ w["u"]) @ w["v"].T + w["b"]), module, shapes, floats(4, 5, D))
    assert rules(found, module) == [
        '- einsum: ...D,DA,CA->...C\n  from: u\n  times: v\n  bias: b\n  activation: tanh\n  linear: "0"'
    ]


@pytest.mark.slow
def test_another_scale_than_that_of_the_target_is_no_derivation():
    class Model(torch.nn.Module):
        """The pair is kept apart, and scaled by another number."""

        def __init__(self) -> None:
            super().__init__()
            self.k, self.a, self.b = (torch.nn.Linear(i, o, bias=False) for i, o in ((D, D), (D, RANK), (RANK, D)))

        def forward(self, x: Any) -> Any:
            return torch.tanh(self.k(x) + self.b(self.a(x)) * 0.25)

    def function(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w["k"] + (x @ w["a"]) @ w["b"] * 0.5)

    found = derive(function, Model(), {"a": (D, RANK), "b": (RANK, D), "k": (D, D)})
    assert not found.complete and found.differences


def _before_data(w: Any, x: Any, scale: float = 4 / 3) -> Any:
    """Three layers whose kernels are added up before data meets them; of one, the leaves are stored as [out, in]."""
    for i, turned in enumerate((False, True, False)):
        k, a, b = (w[f"{i}/{name}"] for name in "kab")
        kernel = (k + scale * b @ a).T if turned else k + scale * a @ b
        x = x + jnp.tanh(x @ kernel + w[f"{i}/c"]) @ w[f"{i}/o"]
    return x


class BeforeData(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = torch.nn.ModuleList(torch.nn.Linear(5, 7) for _ in range(3))
        self.o = torch.nn.ModuleList(torch.nn.Linear(7, 5, bias=False) for _ in range(3))

    def forward(self, x: Any) -> Any:
        for k, o in zip(self.k, self.o, strict=True):
            x = x + o(torch.tanh(k(x)))
        return x


BEFORE: dict[str, tuple[int, ...]] = {"1/k": (7, 5), "1/a": (2, 5), "1/b": (7, 2)}
BEFORE |= {f"{i}/{n}": of for i in (0, 2) for n, of in {"k": (5, 7), "a": (5, 2), "b": (2, 7)}.items()}
BEFORE |= {f"{i}/{n}": of for i in range(3) for n, of in {"c": (7,), "o": (7, 5)}.items()}


def test_a_product_that_is_added_before_data_meets_the_kernel():
    module = BeforeData()
    found = derive(_before_data, module, BEFORE, floats(3, 8, 5))
    written = rules(found, module)
    assert '  plus: {einsum: "...D,AD,CA->...C", from: 1/a, times: 1/b, scale: 1.3333333333333}\n' in written[1]
    (two,) = (rule for rule in written if "D,DA,AC->" in rule)
    assert '  plus: {einsum: "...D,DA,AC->...C", from: "{0,2}/a", times: "{0,2}/b", scale: 1.3333333333333}\n' in two
    text = write_rules(found, model_of_module(module, "Model")).text
    assert compare_rules(text.replace("scale: 1.3333333333333", "scale: 1.33"), found)  # planted


@pytest.mark.parametrize("function", [lambda ab: jnp.tanh(ab), lambda ab: ab * np.arange(7)], ids=["tanh", "columns"])
def test_what_is_no_product_of_two_leaves_has_no_rule(function):
    """Planted: the kernel is computed of the same leaves in another way."""

    def other(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ (w["0/k"] + function(w["0/a"] @ w["0/b"])) + w["0/c"])

    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh())
    found = derive(other, module, {f"0/{name}": BEFORE[f"0/{name}"] for name in "kabc"}, floats(3, 8, 5))
    assert found.complete
    assert NO_WORDS in write_rules(found, model_of_module(module, "Model")).open["0"]


@pytest.mark.parametrize("where", ["kernel", "data", "head by head"])
def test_a_product_that_is_added_to_a_kernel_with_heads(where):
    """Planted: one product for each head is none of two matrices."""
    by_head = where == "head by head"
    of_b = "nrh" if by_head else "rnh"

    def function(w: Any, x: Any) -> Any:
        added = jnp.einsum(f"{'ndr' if by_head else 'dr'},{of_b}->dnh", w["a"], w["b"]) / 2
        y = jnp.einsum("btd,dnh->btnh", x, w["k"] + (0 if where == "data" else added)) + w["c"]
        y = y + (jnp.einsum("btr,rnh->btnh", x @ w["a"], w["b"]) / 2 if where == "data" else 0)
        return jnp.einsum("btnh,nhd->btd", jnp.tanh(y), w["o"] + jnp.einsum("nhr,rd->nhd", w["oa"], w["ob"]))

    module = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4, bias=False))
    shapes = {"k": (5, 2, 3), "c": (2, 3), "o": (2, 3, 4), "oa": (2, 3, 2), "ob": (2, 4)}
    shapes |= {"a": (2, 5, 4), "b": (2, 4, 3)} if by_head else {"a": (5, 4), "b": (4, 2, 3)}
    found = derive(function, module, shapes, floats(3, 8, 5))
    written = write_rules(found, model_of_module(module, "Model"))
    assert ('  plus: {einsum: "...D,DA,ANH->...NH", from: a, times: b, scale: 0.5}\n' in written.text) is not by_head
    assert re.search(r'plus: {einsum: "...NH,NH(\w),\1(\w)->...\2", from: oa, times: ob}', written.text)
    assert found.complete and list(written.open) == (["0"] if by_head else [])
    assert compare_rules(written.decided, found, written.open) == []


class FusedLayers(torch.nn.Module):
    """Two layers with queries, keys and values in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.ModuleList(torch.nn.Linear(5, 18) for _ in range(2))
        self.o = torch.nn.ModuleList(torch.nn.Linear(6, 5, bias=False) for _ in range(2))

    def forward(self, x: Any) -> Any:
        for a, o in zip(self.a, self.o, strict=True):
            q, k, v = a(x).chunk(3, -1)
            x = x + o((q @ k.mT).softmax(-1) @ v)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("planted", [False, True])
def test_products_that_are_added_to_parts_of_a_fused_matrix(planted):
    """Planted: what is added to the values is no product."""

    def added(w: Any, i: int, of: str) -> Any:
        product = w[f"{i}/{of}/a"] @ w[f"{i}/{of}/b"]
        return jnp.tanh(product) if planted and of == "v" else product

    def function(w: Any, x: Any) -> Any:
        for i in range(2):
            q, k, v = (
                x @ (w[f"{i}/{of}/k"] + (0 if of == "k" else added(w, i, of))) + w[f"{i}/{of}/c"] for of in "qkv"
            )
            x = x + jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2)) @ v @ w[f"{i}/o"]
        return x

    shapes: dict[str, tuple[int, ...]] = {f"{i}/o": (6, 5) for i in range(2)}
    shapes |= {f"{i}/{of}/{n}": s for i in range(2) for of in "qkv" for n, s in (("k", (5, 6)), ("c", (6,)))}
    shapes |= {f"{i}/{of}/{n}": s for i in range(2) for of in "qv" for n, s in (("a", (5, 2)), ("b", (2, 6)))}
    module = FusedLayers()
    found = derive(function, module, shapes, floats(3, 8, 5))
    written = write_rules(found, model_of_module(module, "Model"))
    assert found.complete and sorted(written.open) == (["a.0", "a.1"] if planted else [])
    assert compare_rules(written.decided, found, written.open) == []
    for k, of in enumerate("qkv", 1):
        pair = (
            f'  plus: {{einsum: "...D,DA,AC->...C", from: "{{i}}/{of}/a", times: "{{i}}/{of}/b"}}\n'
            if of != "k"
            else ""
        )
        rule = (
            f'  from: "{{i}}/{of}/k"\n  bias: "{{i}}/{of}/c"\n{pair}  linear: {{module: "a.{{i}}", part: "{k} of 3"}}'
        )
        assert (rule in written.text) is not planted
