"""Parts that the two models put side by side in different orders: a rule without the key, or with a wrong order, is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import convert
from convert.references.protocol import Reference
from convert.verify.run import check

pytestmark = pytest.mark.slow

X, A, B, C, OUT, T = 3, 5, 7, 11, 13, 17
RULES = """model: parts
title: parts in another order
targets:
  torch: {loads: a module of the test}
axes:
  A: {is: the first}
  B: {is: the second}
  C: {is: the third}
rules:
- {einsum: "...X,XA->...A", from: a/kernel, bias: a/bias, linear: a}
- {einsum: "...X,XB->...B", from: b/kernel, bias: b/bias, linear: b}
- {einsum: "...X,XC->...C", from: c/kernel, bias: c/bias, linear: c}
- einsum: ...D,DF->...F
  from: head/kernel
  bias: head/bias
  concatenated: {D: A + B + C}
  linear: {module: head, concatenated: {D: C + A + B}}
"""
ORDERS = "concatenated: {{D: {}}}\n  linear: {{module: head, concatenated: {{D: {}}}}}"
SHAPES = {"a": (X, A), "b": (X, B), "c": (X, C), "head": (A + B + C, OUT)}


class Flax(flax.linen.Module):
    names: str

    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        dense = flax.linen.Dense
        values = [flax.linen.tanh(dense(SHAPES[name][1], name=name)(x)) for name in self.names]
        return dense(OUT, name="head")(jnp.concatenate(values, -1))


class Torch(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        for name in sorted(order):
            self.add_module(name, nn.Linear(*SHAPES[name]))
        self.head = nn.Linear(sum(SHAPES[name][1] for name in order), OUT)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.cat([self.get_submodule(name)(x).tanh() for name in self.order], -1))


def _pair(order: str, modules: bool = False) -> Reference:
    """The two models; with `modules` the values between the layers are seen."""
    names = "".join(sorted(order))

    def jax_side(w: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        if not modules:
            values = [jnp.tanh(inputs["x"] @ w[f"{name}/kernel"] + w[f"{name}/bias"]) for name in names]
            return {"y": jnp.concatenate(values, -1) @ w["head/kernel"] + w["head/bias"]}
        params = {name: {leaf: w[f"{name}/{leaf}"] for leaf in ("kernel", "bias")} for name in (*names, "head")}
        return {"y": Flax(names).apply({"params": params}, inputs["x"])}

    def build(state: Mapping[str, torch.Tensor]) -> nn.Module:
        module = Torch(order)
        module.load_state_dict(dict(state), strict=True, assign=True)
        return module.eval()

    return Reference(
        inputs=lambda seed: {"x": np.random.default_rng(seed).normal(size=(T, X)).astype(np.float32)},
        jax=jax_side,
        build=build,
        run=lambda module, inputs: {"y": module(inputs["x"])},
        outputs=("y",),
        reduction=A + B + C,
        depth=2,
    )


def two(plan: Any) -> Reference:
    return _pair("ba")


def two_of_linen(plan: Any) -> Reference:
    return _pair("ba", modules=True)


def three(plan: Any) -> Reference:
    return _pair("cab")


def three_of_linen(plan: Any) -> Reference:
    return _pair("cab", modules=True)


def diagnosis(tmp_path: Path, name: str, rules: str) -> dict[str, Any] | None:
    rng = np.random.default_rng(0)
    widths = {n: SHAPES[n] for n in ("ab" if name.startswith("two") else "abc")}
    shapes = {**widths, "head": (sum(shape[1] for shape in widths.values()), OUT)}
    leaves: dict[str, Any] = {f"{n}/kernel": rng.normal(size=shape) for n, shape in shapes.items()}
    leaves |= {f"{n}/bias": rng.normal(size=shape[1]) for n, shape in shapes.items()}
    np.savez(tmp_path / "ckpt.npz", **{leaf: x.astype(np.float32) for leaf, x in leaves.items()})
    file, out = tmp_path / "rules.yaml", tmp_path / "out.safetensors"
    file.write_text(rules)
    convert.convert(str(file), tmp_path / "ckpt.npz", out)
    report = check(out, tmp_path / "ckpt.npz", model=str(file), reference=f"{__name__}:{name}")
    assert [level.verdict.value for level in report.levels[:3]] == ["passed"] * 3, report.levels[:3]
    return report.levels[-1].diagnosis


def of_two(rules: str) -> str:
    lines = [line for line in rules.splitlines() if "c/kernel" not in line and "the third" not in line]
    return "\n".join(lines).replace("A + B + C", "A + B").replace("C + A + B", "B + A")


def without_key(rules: str) -> str:
    return rules.replace("  concatenated: {D: A + B}\n", "").replace(", concatenated: {D: B + A}", "")


def test_the_right_rule_passes(tmp_path: Path) -> None:
    assert diagnosis(tmp_path, "three", RULES) is None


def test_a_rule_that_does_not_say_it_is_named(tmp_path: Path) -> None:
    found = diagnosis(tmp_path, "two", without_key(of_two(RULES)))
    assert found is not None and found["name"] == "parts joined in another order", found
    assert "say both orders in the rule of the layer with `concatenated`" in found["fix"]


def test_a_rule_that_does_not_say_it_is_named_by_what_the_layer_is_given(tmp_path: Path) -> None:
    found = diagnosis(tmp_path, "two_of_linen", without_key(of_two(RULES)))
    assert found is not None and (found["name"], found["boundary"]) == ("values in another order", "head:in"), found
    assert "say both orders in the rule of head with `concatenated`" in found["fix"]


@pytest.mark.parametrize("models", ["three", "three_of_linen"])
@pytest.mark.parametrize(
    ("source", "target", "name"),
    [
        ("A + B + C", "B + C + A", "concatenated in a third order"),
        ("C + A + B", "A + B + C", "orders of the two sides exchanged"),
    ],
)
def test_a_wrong_order_is_named(tmp_path: Path, models: str, source: str, target: str, name: str) -> None:
    old, new = ORDERS.format("A + B + C", "C + A + B"), ORDERS.format(source, target)
    assert old in RULES
    rules = RULES.replace(old, new)
    found = diagnosis(tmp_path, models, rules)
    assert found is not None and found["name"] == name, found
    assert found["rule"].endswith("rules.yaml:13")


def test_the_orders_of_the_two_sides_exchanged_are_named(tmp_path: Path) -> None:
    old, new = ORDERS.format("A + B", "B + A"), ORDERS.format("B + A", "A + B")
    assert old in of_two(RULES)
    rules = of_two(RULES).replace(old, new)
    found = diagnosis(tmp_path, "two", rules)
    assert found is not None and found["name"] == "orders of the two sides exchanged", found
