"""Modules that keep torch's weight norm where no leaf has its scale: the scale is the length of each row of the weight."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen
from torch import nn
from torch.nn.utils import parametrizations

from convert import PlanError, RuleError
from convert.planning.planner import make_plan
from convert.reversing.plan import reverse
from convert.verify.layers.level import check_layers
from convert.writing.execute import execute
from convert.writing.written import open_written
from support.live_layers import Tree, converted, draw, first, last, loaded, same
from support.memory_source import MemorySource, rule_file
from support.weights_level import check_weights

KERNELS = {"k": draw(3, 4, 5), "b": draw(5)}
KEPT = "{{module: m, parametrization: {0}}}"
WIDE = "- einsum: ...D,DNH->...NH\n  from: k\n  bias: b\n  linear: " + KEPT
CONVOLUTION = "- dimension_numbers: NWC,WIO->NWC\n  axes: WIO\n  from: k\n  bias: b\n  padding: VALID\n  conv: " + KEPT
TRANSPOSED = CONVOLUTION.replace("conv:", "strides: 2\n  conv_transpose:")
HEADS = {"k": draw(4, 5, 3), "b": draw(5, 3)}


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


def normed(module: nn.Module, old: bool) -> nn.Module:
    if not old:
        return parametrizations.weight_norm(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.weight_norm(module)


def word(old: bool) -> str:
    return "old_weight_norm" if old else "weight_norm"


@pytest.mark.parametrize("old", [False, True])
def test_a_projection_into_heads(old: bool) -> None:
    module = loaded(normed(nn.Linear(4, 15), old), converted(WIDE.format(word(old)), HEADS))
    x = draw(2, 4)
    same(module(torch.tensor(x)).numpy(), (np.einsum("bd,dnh->bnh", x, HEADS["k"]) + HEADS["b"]).reshape(2, 15))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions(transposed: bool, old: bool) -> None:
    """torch's weight norm of a transposed one has a scale for each channel that comes in."""
    rules, kind = (TRANSPOSED, nn.ConvTranspose1d) if transposed else (CONVOLUTION, nn.Conv1d)
    module = normed(kind(4, 5, 3, stride=2 if transposed else 1), old)
    module, x = loaded(module, converted(rules.format(word(old)), KERNELS)), draw(2, 9, 4)
    numbers = ("NWC", "WIO", "NWC")
    if transposed:
        y = jax.lax.conv_transpose(x, KERNELS["k"], (2,), "VALID", dimension_numbers=numbers)
    else:
        y = jax.lax.conv_general_dilated(jnp.asarray(x), KERNELS["k"], (1,), "VALID", dimension_numbers=numbers)
    same(last(module(first(x))), y + KERNELS["b"])


def test_a_stack_of_them() -> None:
    tree = {"k": draw(3, 4, 5)}
    rules = "- einsum: ...D,DF->...F\n  from: k\n  stacked: {i: 0}\n  linear: {module: 'm.{i}', parametrization: weight_norm}"
    for i in range(3):
        state = {name.replace(f".{i}.", "."): x for name, x in converted(rules, tree).items() if f".{i}." in name}
        module = loaded(parametrizations.weight_norm(nn.Linear(4, 5, bias=False)), state)
        same(module.weight.detach().numpy(), tree["k"][i].T)


@pytest.mark.parametrize("axes", [-1, (-2, -1), None])
def test_a_weight_norm_of_other_rows_is_folded_and_made_anew(axes: Any) -> None:
    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            dense = linen.DenseGeneral((5, 3), param_dtype=jnp.float64, name="dense")
            return linen.WeightNorm(dense, feature_axes=axes, param_dtype=jnp.float64, name="wn")(x)

    x, (kernel, bias) = draw(2, 4), HEADS.values()
    variables = Outer().init(jax.random.key(0), x)
    (scale,) = variables["params"]["wn"].values()
    scale = draw(*scale.shape)
    params = {"dense": {"kernel": kernel, "bias": bias}, "wn": {"dense/kernel/scale": scale}}
    want = Outer().apply({"params": params}, x)
    said = "g" if axes != (-2, -1) else "{scale: g, axes: NH}"
    rules = WIDE.format("weight_norm") + f"\n  weight_norm: {said}"
    state = converted(rules, {**HEADS, "g": scale})
    module = loaded(parametrizations.weight_norm(nn.Linear(4, 15)), state)
    same(module(torch.tensor(x)).numpy(), np.asarray(want).reshape(2, 15))


def written(rules: str, tree: Tree, tmp_path: Path) -> tuple[Any, Path]:
    single = {name: value.astype(np.float32) for name, value in tree.items()}
    plan, out = make_plan(rule_file(rules), MemorySource(single)), tmp_path / "out.safetensors"
    list(execute(plan, out))
    return plan, out


@pytest.mark.parametrize(("rules", "tree"), [(WIDE, HEADS), (CONVOLUTION, KERNELS), (TRANSPOSED, KERNELS)])
def test_the_check_compares_both_tensors(rules: str, tree: Tree, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    plan, out = written(rules.format("weight_norm"), tree, tmp_path)
    assert check_weights(plan, open_written(out)).verdict == "passed"
    level = check_layers(plan, open_written(out))
    assert level.verdict == "passed", level.findings
    scale = "m.parametrizations.weight.original0"
    metadata, tensors = dict(open_written(out).metadata), load_file(out)
    for wrong in (np.ones_like(tensors[scale]), 1.01 * tensors[scale], tensors[scale][::-1]):
        save_file(tensors | {scale: np.ascontiguousarray(wrong)}, out, metadata=metadata)
        (finding,) = check_weights(plan, open_written(out)).findings
        assert finding.path == scale
        assert check_layers(plan, open_written(out)).verdict == "failed"


def test_the_plan_says_what_the_scale_is(tmp_path: Path) -> None:
    plan, _ = written(WIDE.format("weight_norm"), HEADS, tmp_path)
    step = next(step for step in plan.steps if step.name.endswith("original0"))
    assert step.arithmetic == "|w| of each row" and step.spec.shape == (15, 1)


def test_the_way_back_is_refused(tmp_path: Path) -> None:
    plan, out = written(WIDE.format("weight_norm"), HEADS, tmp_path)
    with pytest.raises(PlanError) as refused:
        reverse(plan, open_written(out))
    assert "m.parametrizations.weight.original0: from k: the scale of a weight norm is computed from the leaf" in str(
        refused.value
    )


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (
            "- einsum: ...D,DF->...F\n  from: '{q,k}'\n  linear: {module: m, parametrization: weight_norm}",
            "a module with a `parametrization` can be neither fused nor split, and not be used by an einsum of the target",
        ),
        (
            "- einsum: ...D,DF->...F\n  from: k\n  linear: {module: m, parametrization: weight_norm, part: 1 of 2}",
            "a module with a `parametrization` is made of whole leaves; leave `part` out",
        ),
    ],
)
def test_what_is_refused(rules: str, said: str) -> None:
    with pytest.raises(RuleError) as refused:
        rule_file(rules)
    assert said in str(refused.value)


def test_a_matrix_as_a_convolution_of_one_tap() -> None:
    tree = {"k": draw(4, 5)}
    target = "{module: m, axes: FD.., parametrization: weight_norm}"
    state = converted(f"- einsum: ...D,DF->...F\n  from: k\n  linear: {target}", tree)
    module = loaded(parametrizations.weight_norm(nn.Conv2d(4, 5, 1, bias=False)), state)
    same(module.weight.detach().numpy()[..., 0, 0], tree["k"].T)
    with pytest.raises(RuleError, match="not be used by an einsum of the target"):
        rule_file(f"- einsum: ...D,DF->...F\n  from: k\n  linear: {target.replace('FD..', 'DF..')}")
