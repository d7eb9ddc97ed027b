"""A flax model that keeps fused projections in flat leaves, saved by Orbax; a PyTorch model with a module for each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.planning.plan import Plan
from convert.reversing.source import ReversedSource
from convert.rules.parse import parse_rules
from convert.verify.report.report import Verdict
from convert.writing.written import open_written
from support.memory_source import MemorySource
from support.saved_network import assert_levels_pass, plan_saved, write
from support.weights_level import check_weights

D, N, K, H, J, F, STEPS = 10, 6, 2, 4, 3, 7, 5

HEAD = f"""model: fused
title: fused leaves
targets: {{torch: {{loads: Torch}}}}
root: params
axes:
  N: {{is: query heads, equals: {N}}}
  H: {{is: width of a head, equals: {H}}}
  J: {{is: width of a value, equals: {J}}}
  K: {{is: key heads, equals: {K}}}
"""
RULES = """
- einsum: "...D,D(N H + K H + K J)->...(N H + K H + K J)"
  from: qkv/kernel
  bias: qkv/bias
  linear: "attn.{q,k,v}"
- einsum: "...(N J),(N J)D->...D"
  from: out/kernel
  linear: attn.o
- einsum: "...D,D(N C H)->...(N C H)"
  from: cross/kernel
  bias: cross/bias
  linear: "cross.{C:q,k,v}"
- einsum: "...D,D(G F)->...(G F)"
  from: up/kernel
  linear: "mlp.{gate,up}"
- einsum: "...F,FD->...D"
  from: down/kernel
  linear: mlp.down
"""


def attend(q: Any, k: Any, v: Any, xp: Any) -> Any:
    """Grouped attention of [steps, heads, width]."""
    k, v = (xp.stack([y[:, n * y.shape[1] // N] for n in range(N)], 1) for y in (k, v))
    scores = xp.einsum("qnh,knh->nqk", q, k) / H**0.5
    scores = scores - scores.max()
    weights = xp.exp(scores)
    weights = weights / weights.sum(-1)[..., None]
    return xp.einsum("nqk,knj->qnj", weights, v).reshape(q.shape[0], -1)


class Flax(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        fused = nn.Dense(N * H + K * H + K * J, name="qkv")(x)
        q, k, v = jnp.split(fused, [N * H, N * H + K * H], axis=-1)
        y = attend(q.reshape(-1, N, H), k.reshape(-1, K, H), v.reshape(-1, K, J), jnp)
        x = x + nn.Dense(D, use_bias=False, name="out")(y)
        three = nn.Dense(3 * N * H, name="cross")(x).reshape(-1, N, 3, H)
        x = x + attend(three[:, :, 0], three[:, :, 1], three[:, :, 2], jnp)[:, :D]
        gate, up = jnp.split(nn.Dense(2 * F, use_bias=False, name="up")(x), 2, axis=-1)
        return x + nn.Dense(D, use_bias=False, name="down")(nn.silu(gate) * up)


class Torch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.attn = torch.nn.ModuleDict({"q": linear(D, N * H), "k": linear(D, K * H), "v": linear(D, K * J), "o": linear(N * J, D, bias=False)})  # fmt: skip
        self.cross = torch.nn.ModuleDict({name: linear(D, N * H) for name in "qkv"})
        self.mlp = torch.nn.ModuleDict({name: linear(*(F, D) if name == "down" else (D, F), bias=False) for name in ("gate", "up", "down")})  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attn["q"](x), self.attn["k"](x), self.attn["v"](x)
        y = attend(q.reshape(-1, N, H), k.reshape(-1, K, H), v.reshape(-1, K, J), torch)
        x = x + self.attn["o"](y)
        q, k, v = (self.cross[name](x).reshape(-1, N, H) for name in "qkv")
        x = x + attend(q, k, v, torch)[:, :D]
        return x + self.mlp["down"](torch.nn.functional.silu(self.mlp["gate"](x)) * self.mlp["up"](x))


@pytest.fixture(scope="module")
def variables() -> Any:
    made = Flax().init(jax.random.key(0), jnp.zeros((STEPS, D)))
    return jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) * 0.3, made)


@pytest.fixture(scope="module")
def plan(variables: Any, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return plan_saved(variables, RULES, HEAD, tmp_path_factory.mktemp("fused"))


@pytest.fixture
def written(plan: Plan, tmp_path: Path) -> Path:
    return write(plan, tmp_path / "out.safetensors")


@pytest.mark.slow
def test_both_models_compute_the_same(variables: Any, written: Path) -> None:
    module = Torch()
    module.load_state_dict(load_file(written), strict=True)
    x = np.random.default_rng(0).standard_normal((STEPS, D)).astype(np.float32)
    want = np.asarray(Flax().apply(variables, x))
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach().numpy(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_levels_pass(plan: Plan, written: Path) -> None:
    assert_levels_pass(plan, written)


@pytest.mark.parametrize(
    ("change", "tensor", "named"),
    [
        (lambda t, w: t.update({f"cross.{x}.weight": w["cross"]["kernel"].reshape(D, 3, N * H)[:, c].T for c, x in enumerate("qkv")}), "cross.q.weight", "(N C H) read as (C N H)"),
        (lambda t, w: t.update({"mlp.gate.weight": t["mlp.up.weight"], "mlp.up.weight": t["mlp.gate.weight"]}), "mlp.gate.weight", "of another tensor"),
        (lambda t, w: t.update({"mlp.gate.weight": w["up"]["kernel"][:, 0::2].T, "mlp.up.weight": w["up"]["kernel"][:, 1::2].T}), "mlp.gate.weight", "(G F) read as (F G)"),
        (lambda t, w: t.update({"attn.q.weight": t["attn.q.weight"].reshape(N, H, D).swapaxes(0, 1).reshape(N * H, D)}), "attn.q.weight", "axes of a head swapped"),
    ],
)  # fmt: skip
def test_a_wrong_split_is_named(
    plan: Plan, variables: Any, written: Path, change: Any, tensor: str, named: str
) -> None:
    tensors = {name: x.numpy() for name, x in load_file(written).items()}
    change(tensors, jax.tree.map(np.asarray, variables["params"]))
    save_file({name: torch.tensor(np.ascontiguousarray(x)) for name, x in tensors.items()}, written)
    level = check_weights(plan, open_written(written))
    assert level.verdict is Verdict.FAILED
    first = level.findings[0]
    assert (first.path, named in str(first)) == (tensor, True), first


GATED = """model: gated
title: parts of a leaf in one tensor
targets: {torch: {loads: Torch}}
facts: {groups: ask}
axes: {G: {is: groups}, D: {is: model width}, Y: {is: width of a query, equals: 3}, W: {is: width of a value, equals: 4}}
products: {groups: G}
rules:
- einsum: "...D,D(G (Y + Y + W + W))->...(G (Y + Y + W + W))"
  from: qkvz
  linear: "in_{qkv,qkv,qkv,z}"
"""


def test_parts_with_the_same_name_follow_each_other_in_one_tensor(tmp_path: Path) -> None:
    """Of two groups: the queries of both, the keys of both, the values of both; and the gates of both in another tensor."""
    leaf = np.random.default_rng(0).standard_normal((5, 2 * 14)).astype(np.float32)
    rules, out = parse_rules(GATED, "gated.yaml"), tmp_path / "out.safetensors"
    plan = convert.convert(rules, MemorySource({"qkvz": leaf}), out, settings={"groups": 2})
    assert plan is not None
    q, k, v, z = np.split(leaf.T.reshape(2, 14, 5), [3, 6, 10], axis=1)
    made = {name: x.numpy() for name, x in load_file(out).items()}
    np.testing.assert_array_equal(made["in_qkv.weight"], np.concatenate([x.reshape(-1, 5) for x in (q, k, v)]))
    np.testing.assert_array_equal(made["in_z.weight"], z.reshape(-1, 5))
    back = ReversedSource(convert.plan_reverse(rules, out, settings={"groups": 2}))
    np.testing.assert_array_equal(back.read("qkvz"), leaf)


def test_a_size_that_no_leaf_shows_is_asked_for_and_compared() -> None:
    source = MemorySource({"qkvz": np.zeros((5, 28), np.float32)})
    with pytest.raises(convert.PlanError, match="expected groups to be 2, got groups = 3"):
        convert.plan_conversion(parse_rules(GATED, "gated.yaml"), source, settings={"groups": 3})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("qkvz\n", "qkvz_{a,b,a}\n"),
        ("D(G (Y + Y + W + W))->...(G (Y + Y + W + W))", "DGY->...GY"),
    ],
)
def test_only_parts_of_a_leaf_may_have_the_same_name(old: str, new: str) -> None:
    with pytest.raises(convert.RuleError) as refused:
        parse_rules(GATED.replace(old, new), "gated.yaml")
    assert any("the same alternative twice" in found.problem for found in refused.value.findings)
