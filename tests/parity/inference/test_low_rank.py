"""`infer` finds a kernel that the source keeps as a product of two leaves, alone or added to a third (LoRA)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Grade
from convert.planning.planner import make_plan
from convert.rules.parse import parse_rules
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
