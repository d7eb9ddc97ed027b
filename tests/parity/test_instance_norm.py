"""Instance norms of flax, in float64, as torch.nn.InstanceNorm1d, 2d and 3d: converted, probed, diagnosed and drafted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

from convert import PlanError, RuleError, draft_rules, parse_rules
from convert.planning.planner import make_plan
from convert.verify.layers.level import check_layers
from convert.verify.mistakes.catalogue import known_mistakes
from convert.verify.report.report import Verdict
from convert.writing.execute import execute
from convert.writing.written import open_written
from support.live_layers import converted, draw, drawn, first, last, loaded, names, same
from support.memory_source import MemorySource, rule_file

BOTH = """
- from: params/scale
  bias: params/bias
  multiplies_by: scale
  epsilon: 1e-6
  axes: C
  instance_norm: m
"""
MODULES = (torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"), jax.disable_jit():
        yield


def tree_of(**leaves: np.ndarray) -> dict[str, np.ndarray]:
    return {f"params/{name}": value for name, value in leaves.items()}


@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_flax_instance_norm(library: str, spatial: int) -> None:
    x = draw(3, *(5, 4, 2)[:spatial], 6) * 2 + 1
    if library == "linen":
        layer = linen.InstanceNorm(dtype=jnp.float64, param_dtype=jnp.float64)
        variables = drawn(layer.init(jax.random.key(0), x))
        want, tree = layer.apply(variables, x), names(variables)
    else:
        nn = nnx.InstanceNorm(6, dtype=jnp.float64, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        tree = tree_of(scale=draw(6), bias=draw(6))
        for path, value in tree.items():
            getattr(nn, path.removeprefix("params/")).set_value(jnp.asarray(value))
        want = nn(jnp.asarray(x))
    module = MODULES[spatial - 1](6, 1e-6, affine=True)
    same(last(loaded(module, converted(BOTH, tree))(first(x))), want)


@pytest.mark.parametrize(("scaled", "biased"), [(True, False), (False, True)])
def test_a_missing_scale_or_bias_is_written_as_ones_or_zeros(scaled: bool, biased: bool) -> None:
    x = draw(3, 5, 4, 6) * 2 + 1
    layer = linen.InstanceNorm(use_scale=scaled, use_bias=biased, dtype=jnp.float64, param_dtype=jnp.float64)
    variables = drawn(layer.init(jax.random.key(0), x))
    lines = ["from: params/scale", "multiplies_by: scale"] if scaled else ["multiplies_by: 1", "bias: params/bias"]
    rule = "- " + "\n  ".join([*lines, "epsilon: 1e-6", "instance_norm: m"])
    state = converted(rule, names(variables))
    assert (bool((state["m.weight"] == 1).all()), bool((state["m.bias"] == 0).all())) == (not scaled, not biased)
    module = torch.nn.InstanceNorm2d(6, 1e-6, affine=True)
    same(last(loaded(module, state)(first(x))), layer.apply(variables, x))


@pytest.mark.slow
@pytest.mark.parametrize("factor", ["scale", "1+scale"])
@pytest.mark.parametrize("target", ["m", "{module: m, multiplies_by: 1+weight}"])
def test_the_probe_runs_both_sides(tmp_path: Path, factor: str, target: str) -> None:
    rules = BOTH.replace("by: scale", f"by: {factor}").replace("norm: m", f"norm: {target}")
    plan = make_plan(rule_file(rules), MemorySource(tree_of(scale=draw(6), bias=draw(6))))
    out = tmp_path / "m.safetensors"
    list(execute(plan, out))
    level = check_layers(plan, open_written(out))
    assert level.verdict is Verdict.PASSED and len(level.measures) == 2
    assert max(measure.float64.relative for measure in level.measures if measure.float64) < 1e-12


def test_the_probe_sees_another_factor(tmp_path: Path) -> None:
    source = MemorySource(tree_of(scale=draw(6), bias=draw(6)))
    plan = make_plan(rule_file(BOTH), source)
    wrong = make_plan(rule_file(BOTH.replace("by: scale", "by: 1+scale")), source)
    out = tmp_path / "m.safetensors"
    list(execute(wrong, out))
    assert check_layers(plan, open_written(out)).verdict is Verdict.FAILED


def test_mistakes() -> None:
    """The bias in place of the scale, and a 1 that is added, have names; each equals the tensor that it claims."""
    tree = tree_of(scale=draw(6), bias=draw(6))
    plan = make_plan(rule_file(BOTH), MemorySource(tree))
    weight = next(step for step in plan.steps if step.role == "weight")
    made: dict[str, Any] = {mistake.name: mistake.make() for mistake in known_mistakes(weight, plan)}
    np.testing.assert_array_equal(made["scale and bias exchanged"], tree["params/bias"])
    np.testing.assert_array_equal(made["1+scale on a plain norm"], tree["params/scale"] + 1)


def test_draft() -> None:
    tree = tree_of(InstanceNorm_0__scale=draw(6), InstanceNorm_0__bias=draw(6))
    text = draft_rules(MemorySource({name.replace("__", "/"): value for name, value in tree.items()}))
    assert "# instance_norm: InstanceNorm_0    # guess: by its name" in text
    assert [rule.kind_name for rule in parse_rules(text).rules] == ["instance_norm"]


def test_errors() -> None:
    with pytest.raises(PlanError) as refused:
        make_plan(
            rule_file(BOTH.replace("axes: C", "axes: CD")), MemorySource(tree_of(scale=draw(6, 2), bias=draw(6, 2)))
        )
    assert "one scale and one bias for each channel" in str(refused.value)
    with pytest.raises(RuleError) as invalid:
        rule_file("- multiplies_by: 1\n  epsilon: 1e-6\n  instance_norm: m")
    assert "torch.nn.InstanceNorm1d" in str(invalid.value)


def test_burn() -> None:
    """Burn's InstanceNorm has gamma and beta, and is made with the epsilon."""
    plan = make_plan(rule_file(BOTH), MemorySource(tree_of(scale=draw(6), bias=draw(6))), to="burn")
    assert [step.name for step in plan.steps] == ["m.gamma", "m.beta"]
    assert any("InstanceNormConfig::new(..).with_epsilon(1e-06)" in str(layer) for layer in plan.layers)
