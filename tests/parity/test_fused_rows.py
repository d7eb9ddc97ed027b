"""Rows of one tensor from several leaves, or from parts of one, head by head as Megatron, GPT-NeoX and Falcon keep them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from convert.core.errors import ConvertError
from convert.planning.plan import Plan
from convert.planning.planner import make_plan
from convert.verify.layers.level import check_layers
from convert.writing.execute import execute
from convert.writing.written import open_written
from support.memory_source import rule_file
from support.saved_network import assert_levels_pass, plan_saved, write

B, T, D, N, K, H = 2, 5, 10, 4, 2, 6
G = N // K
HEAD = f"""model: rows
title: rows
targets: {{torch: {{loads: Torch}}}}
root: params
axes: {{N: {{is: heads, equals: {N}}}, K: {{is: heads of keys, equals: {K}}}, G: {{is: heads of queries for each, equals: {G}}}, H: {{is: width of a head, equals: {H}}}}}
"""
RULES = """
- einsum: ...D,DNH->...NH
  from: many/{q,k,v}/kernel
  bias: many/{q,k,v}/bias
  linear: {module: many, axes: (N (1 + 1 + 1) H)D}
- einsum: ...D,D(K G H)->...(K G H)
  from: grouped/q/kernel
  prescaled_by: 1/sqrt(H)
  rope: {H: interleaved}
  linear: {module: grouped, axes: (K (G + 1 + 1) H)D, part: 1 of 3}
- einsum: ...D,D(K H)->...(K H)
  from: grouped/k/kernel
  rope: {H: interleaved}
  linear: {module: grouped, axes: (K (G + 1 + 1) H)D, part: 2 of 3}
- einsum: ...D,D(K H)->...(K H)
  from: grouped/v/kernel
  linear: {module: grouped, axes: (K (G + 1 + 1) H)D, part: 3 of 3}
- einsum: ...D,D(K G H + K H + K H)->...(K G H + K H + K H)
  from: flat/kernel
  bias: flat/bias
  prescaled_by: {1/sqrt(H): [1]}
  linear: {module: flat, axes: (K (G + 1 + 1) H)D}
"""
ANGLES = np.outer(np.arange(T), 0.7 ** np.arange(H // 2)).astype(np.float32)[:, None]


def rotated(np_: Any, first: Any, second: Any) -> tuple[Any, Any]:
    cos, sin = np.cos(ANGLES), np.sin(ANGLES)
    if np_ is torch:
        cos, sin = torch.from_numpy(cos), torch.from_numpy(sin)
    return first * cos - second * sin, second * cos + first * sin


class Flax(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = Heads(N, name="many")(x).values()
        y = jnp.einsum("btnh,bsnh->btsn", q, k)[..., None] * v[:, None]
        made = Grouped(name="grouped")(x)
        q, k, v = made["q"].reshape(B, T, K, G, H), made["k"].reshape(B, T, K, 1, H), made["v"].reshape(B, T, K, 1, H)
        turned = [
            rotated(jnp, z[..., 0::2].reshape(B, T, -1, H // 2), z[..., 1::2].reshape(B, T, -1, H // 2)) for z in (q, k)
        ]
        q, k = (jnp.stack(pair, -1).reshape(of.shape) for pair, of in zip(turned, (q, k), strict=True))
        z = jnp.einsum("btkgh,bskxh->btskg", q, k)[..., None] * v[:, None]
        flat = nn.Dense((N + 2 * K) * H, name="flat")(x)
        q, k, v = jnp.split(flat, [N * H, (N + K) * H], axis=-1)
        w = q.reshape(B, T, K, G, H) * k.reshape(B, T, K, 1, H) + v.reshape(B, T, K, 1, H)
        return jnp.concatenate([y.reshape(B, T, -1), z.reshape(B, T, -1), w.reshape(B, T, -1)], -1)


class Heads(nn.Module):
    number: int

    @nn.compact
    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        return {name: nn.DenseGeneral((self.number, H), name=name)(x) for name in "qkv"}


class Grouped(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        return {
            name: nn.Dense(width * H, use_bias=False, name=name)(x) for name, width in (("q", N), ("k", K), ("v", K))
        }


class Torch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = torch.nn.Linear(D, 3 * N * H)
        self.grouped = torch.nn.Linear(D, (N + 2 * K) * H, bias=False)
        self.flat = torch.nn.Linear(D, (N + 2 * K) * H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.many(x).view(B, T, N, 3, H).unbind(3)
        y = torch.einsum("btnh,bsnh->btsn", q, k)[..., None] * v[:, None]
        q, k, v = self.grouped(x).view(B, T, K, G + 2, H).split([G, 1, 1], 3)
        turned = [rotated(torch, *z.reshape(B, T, -1, H).chunk(2, -1)) for z in (q, k)]
        q, k = (torch.cat(pair, -1).view(of.shape) for pair, of in zip(turned, (q, k), strict=True))
        z = torch.einsum("btkgh,bskxh->btskg", q, k)[..., None] / H**0.5 * v[:, None]
        q, k, v = self.flat(x).view(B, T, K, G + 2, H).split([G, 1, 1], 3)
        return torch.cat([y.reshape(B, T, -1), z.reshape(B, T, -1), (q * k / H**0.5 + v).reshape(B, T, -1)], -1)


@pytest.fixture(scope="module")
def variables() -> Any:
    made, rng = jax.eval_shape(Flax().init, jax.random.key(0), jnp.zeros((B, T, D))), np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), made)


@pytest.fixture(scope="module")
def plan(variables: Any, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return plan_saved(variables, RULES, HEAD, tmp_path_factory.mktemp("rows"))


@pytest.mark.slow
def test_both_models_compute_the_same(plan: Plan, variables: Any, tmp_path: Path) -> None:
    path = write(plan, tmp_path / "out.safetensors")
    module = Torch()
    module.load_state_dict(load_file(path), strict=True)
    x = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)
    want = np.asarray(Flax().apply(variables, x))
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach().numpy(), want, rtol=1e-4, atol=1e-5)
    assert_levels_pass(plan, path)


def test_the_plan_says_which_parts_a_shape_does_not_tell(plan: Plan) -> None:
    found = {ambiguity.names[0]: ambiguity for ambiguity in plan.shape_ambiguous}
    assert found["many.weight"].parts == ("params/many/q/kernel", "params/many/k/kernel", "params/many/v/kernel")
    assert found["flat.weight"].sum_of_parts == "(K G H + K H + K H)" and found["grouped.weight"].rope_axis == "H"


@pytest.mark.parametrize("tensor", ["many.weight", "many.bias", "grouped.weight", "flat.weight"])
@pytest.mark.parametrize("exchanged", [(1, 2), (0, 3), (4, 5)])
def test_rows_in_another_place_are_found_without_the_plan(tensor: str, exchanged: tuple[int, int], plan: Plan, tmp_path: Path) -> None:  # fmt: skip
    """Two pieces of the rows exchanged: two parts of one head, two heads of one part."""
    one, other = exchanged
    (step,) = (step for step in plan.steps if step.name == tensor)
    parts = list(step.parts)
    parts[one], parts[other] = replace(parts[one], rows=parts[other].rows), replace(parts[other], rows=parts[one].rows)
    wrong = replace(plan, steps=tuple(replace(s, parts=tuple(parts)) if s is step else s for s in plan.steps))
    path = tmp_path / "wrong.safetensors"
    list(execute(wrong, path))
    level = check_layers(wrong, open_written(path))
    assert any(finding.path == tensor and "rows" in finding.problem for finding in level.findings), level


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("axes: (N (1 + 1 + 1) H)D", "axes: (N (1 + 1) H)D", "has 2 parts, and the rule makes 3"),
        ("axes: (N (1 + 1 + 1) H)D", "axes: D(N (1 + 1 + 1) H)", "of the target's axes is a sum; that is for a `parameter`"),
        ("axes: (N (1 + 1 + 1) H)D", "axes: (N (1 + 1 + 1) K)D", "has the letters N K, and D; the leaf has the output axes N H"),
        ("part: 1 of 3", "part: 1 of 2", "has 3 parts, and the rule makes 2"),
        ("linear: {module: flat, axes: (K (G + 1 + 1) H)D}", "linear: {module: 'flat.{a,b,c}', axes: (K (G + 1 + 1) H)D}", "write one of them"),
        ("from: flat/kernel\n", "from: flat/kernel\n  plus: {einsum: '...D,DR,RE->...E', from: a, times: b}\n", "letters"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(old: str, new: str, told: str) -> None:
    assert old in RULES
    with pytest.raises(ConvertError) as refused:
        rule_file(RULES.replace(old, new, 1), HEAD)
    assert told in str(refused.value)


SPLIT = """
- einsum: ...D,D(N H + K H + K H)->...(N H + K H + K H)
  from: flat/kernel
  bias: flat/bias
  prescaled_by: {1/sqrt(H): [1]}
  linear: "{q,k,v}"
- drop: "**"
  rest: true
  because: r
"""


def test_a_factor_of_one_part_where_each_part_is_a_tensor(plan: Plan, variables: Any, tmp_path: Path) -> None:
    split = make_plan(rule_file(SPLIT, HEAD), plan.checkpoint)
    assert [step.name for step in split.steps if "weight carries" in step.arithmetic] == ["q.weight", "q.bias"]
    assert {fact.get("weight_carries") for fact in split.layers} == {"1/sqrt(H) in part 1"}
    path = write(split, tmp_path / "out.safetensors")
    made, flat = load_file(path), variables["params"]["flat"]
    np.testing.assert_allclose(made["q.weight"], flat["kernel"].T[: N * H] * H**0.5, rtol=1e-6)
    np.testing.assert_array_equal(made["v.bias"], flat["bias"][(N + K) * H :])
    assert_levels_pass(split, path)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("{1/sqrt(H): [1]}", "1/sqrt(H)", "would apply to all parts of the leaf; name those that have the factor"),
        ("{1/sqrt(H): [1]}", "{1/sqrt(H): [4]}", "names part 4, and the leaf has 3"),
        ("{1/sqrt(H): [1]}", "{1/sqrt(H): [0]}", "numbers different parts from 1"),
        ("{1/sqrt(H): [1]}", "{1/sqrt(H): [1], 2: [2]}", "has one factor"),
        ("{1/sqrt(H): [1]}", "{no: [1]}", "expected a factor other than 0"),
        ('linear: "{q,k,v}"', "linear: qkv", "name one target for each part, or give the target `axes`"),
        ("(N H + K H + K H)", "E", "the leaf has no parts; write the factor alone"),
    ],
)
def test_a_factor_that_fits_no_part_is_refused(old: str, new: str, told: str) -> None:
    with pytest.raises(ConvertError) as refused:
        rule_file(SPLIT.replace(old, new), HEAD)
    assert told in str(refused.value)


def test_a_part_that_no_rule_makes_is_missed(plan: Plan) -> None:
    lacking = RULES[: RULES.index("- einsum: ...D,D(K H)->...(K H)\n  from: grouped/v")] + "- drop: grouped/v/**\n  because: r\n- drop: flat/**\n  because: r\n"  # fmt: skip
    with pytest.raises(ConvertError, match="3 parts, each from one rule"):
        make_plan(rule_file(lacking, HEAD), plan.checkpoint)
    unsized = HEAD.replace(f"G: {{is: heads of queries for each, equals: {G}}}, ", "")
    assert make_plan(rule_file(RULES, unsized), plan.checkpoint).sizes["G"] == G
