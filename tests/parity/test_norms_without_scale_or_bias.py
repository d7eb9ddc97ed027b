"""Norms without a scale, without a bias or without both, from the real libraries in float64, to torch's modules as they are made.

What the source does nothing with is written as ones and zeros, shown in the plan, checked like everything else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

from convert import PlanError, RuleError
from convert.numerics.lift_jax import lift
from convert.planning.planner import make_plan
from convert.verify.layers.level import check_layers
from convert.verify.report.report import Verdict
from convert.writing.execute import execute
from convert.writing.written import open_written
from support.live_layers import converted, draw, drawn, first, last, loaded, names, same
from support.memory_source import MemorySource, rule_file
from support.weights_level import check_weights


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"), jax.disable_jit():
        yield


def norm_rule(word: str, tree: Any, *more: str, target: str = "m", epsilon: float = 1e-5) -> str:
    """The rule of a norm whose leaves are called scale, bias, mean and var, as far as the tree has them."""
    paths = {key: path for path in tree for key in ("scale", "bias", "mean", "var") if path.rpartition("/")[2] == key}
    lines = [f"from: {paths.pop('scale')}", "multiplies_by: scale"] if "scale" in paths else ["multiplies_by: 1"]
    lines += [f"{key}: {path}" for key, path in paths.items()]
    lines += [f"epsilon: {epsilon}", *more, f"{word}: {target}"]
    return "- " + "\n  ".join(lines)


PAIRS = [(False, False), (False, True), (True, False)]  # scale, bias; with both: test_layer_kinds


@pytest.mark.parametrize(("scaled", "biased"), PAIRS)
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_flax_batch_norm(library: str, scaled: bool, biased: bool) -> None:
    """To the module as torch makes it by default, and to one that has no more than the source has."""
    x = draw(3, 4, 5, 6) * 2 + 1
    options: dict[str, Any] = {
        "use_scale": scaled,
        "use_bias": biased,
        "use_running_average": True,
        "param_dtype": jnp.float64,
    }
    if library == "linen":
        layer = linen.BatchNorm(dtype=jnp.float64, **options)
        variables = drawn(layer.init(jax.random.key(0), x))
        want, tree = layer.apply(variables, x), names(variables)
    else:
        nn = nnx.BatchNorm(6, rngs=nnx.Rngs(0), **options)
        tree = {key: np.abs(draw(6)) + 0.2 for key in ("mean", "var", *["scale"] * scaled, *["bias"] * biased)}
        for key, value in tree.items():
            getattr(nn, key).set_value(jnp.asarray(value))
        want = nn(jnp.asarray(x))
    state = converted(norm_rule("batch_norm", tree), tree)
    assert list(state) and {"m.weight", "m.bias", "m.num_batches_tracked"} <= state.keys()
    same(last(loaded(torch.nn.BatchNorm2d(6), state)(first(x))), want)
    if not biased:
        has, made = (
            ("weight", torch.nn.BatchNorm2d(6, bias=False))
            if scaled
            else ("nothing", torch.nn.BatchNorm2d(6, affine=False))
        )
        bare = converted(norm_rule("batch_norm", tree, target=f"{{module: m, parameters: {has}}}"), tree)
        same(last(loaded(made, bare)(first(x))), want)


@pytest.mark.parametrize(("scaled", "biased"), PAIRS[1:])
def test_flax_group_and_layer_norm(scaled: bool, biased: bool) -> None:
    x = draw(2, 4, 3, 6) * 2 + 1
    group = linen.GroupNorm(num_groups=3, use_scale=scaled, use_bias=biased, param_dtype=jnp.float64, dtype=jnp.float64, use_fast_variance=False)  # fmt: skip
    variables = drawn(group.init(jax.random.key(0), x))
    tree, want = names(variables), group.apply(variables, x)
    rules = norm_rule("group_norm", tree, "num_groups: 3", "axes: C", epsilon=1e-6)
    same(last(loaded(torch.nn.GroupNorm(3, 6, eps=1e-6), converted(rules, tree))(first(x))), want)
    if scaled:
        rules = norm_rule("group_norm", tree, "num_groups: 3", target="{module: m, parameters: weight}", epsilon=1e-6)
        same(last(loaded(torch.nn.GroupNorm(3, 6, eps=1e-6, bias=False), converted(rules, tree))(first(x))), want)

    layer = linen.LayerNorm(use_scale=scaled, use_bias=biased, param_dtype=jnp.float64, dtype=jnp.float64, use_fast_variance=False)  # fmt: skip
    variables = drawn(layer.init(jax.random.key(0), x))
    tree, want = names(variables), layer.apply(variables, x)
    if scaled:  # torch's without a bias, as before; and as torch makes it by default
        plain = converted(norm_rule("layer_norm", tree, epsilon=1e-6), tree)
        same(loaded(torch.nn.LayerNorm(6, eps=1e-6, bias=False), plain)(torch.tensor(x)).numpy(), want)
    target = "{module: m, parameters: weight and bias}" if scaled else "m"
    state = converted(norm_rule("layer_norm", tree, "axes: D", target=target, epsilon=1e-6), tree)
    same(loaded(torch.nn.LayerNorm(6, eps=1e-6), state)(torch.tensor(x)).numpy(), want)


@pytest.mark.parametrize(("scaled", "biased"), PAIRS)
def test_keras_batch_normalization(scaled: bool, biased: bool) -> None:
    import keras

    x = draw(3, 4, 5, 6)
    norm = keras.layers.BatchNormalization(scale=scaled, center=biased, dtype="float64")  # in float32 all the same
    norm.build(x.shape)
    tree = {variable.name: np.abs(draw(6)) + 0.3 for variable in norm.variables}
    for variable in norm.variables:
        variable.assign(tree[variable.name])
    words = {"gamma": "scale", "beta": "bias", "moving_mean": "mean", "moving_variance": "var"}
    tree = {words[name]: value for name, value in tree.items()}
    assert len(tree) == 2 + scaled + biased
    state = converted(norm_rule("batch_norm", tree, epsilon=1e-3), tree)
    same(last(loaded(torch.nn.BatchNorm2d(6, eps=1e-3), state)(first(x))), lift(lambda x: norm(x, training=False))(x))


def test_keras_layer_normalization_without_a_scale() -> None:
    import keras

    x = draw(3, 4, 6)
    norm = keras.layers.LayerNormalization(scale=False, dtype="float64")
    norm.build(x.shape)
    tree = {"bias": draw(6)}
    norm.beta.assign(tree["bias"])
    state = converted(norm_rule("layer_norm", tree, epsilon=1e-3), tree)
    same(loaded(torch.nn.LayerNorm(6, eps=1e-3), state)(torch.tensor(x)).numpy(), lift(norm)(x))


@pytest.mark.parametrize(("scaled", "biased"), PAIRS)
def test_haiku_batch_and_layer_norm(scaled: bool, biased: bool) -> None:
    """Their leaves have axes of size 1; what is written beside them has not."""
    import haiku as hk

    x = draw(3, 4, 5, 6)
    layer = hk.without_apply_rng(hk.transform_with_state(lambda x, training: hk.BatchNorm(scaled, biased, 0.9, name="m")(x, training)))  # fmt: skip
    params, state = layer.init(jax.random.key(0), x, True)
    params = drawn(params) if params else params
    state = {path: {key: np.abs(draw(*np.shape(v))) + 0.2 for key, v in of.items()} for path, of in state.items()}
    want, _ = layer.apply(params, state, x, False)
    tree = {"bias" if key == "offset" else key: np.asarray(v) for key, v in params.get("m", {}).items()}
    tree |= {path.split("/")[-1].removesuffix("_ema"): of["average"] for path, of in state.items()}
    made = converted(norm_rule("batch_norm", tree, "axes: ...C"), tree)
    assert made["m.weight"].shape == made["m.bias"].shape == (6,)
    same(last(loaded(torch.nn.BatchNorm2d(6), made)(first(x))), want)
    if not (scaled or biased):
        return
    plain = hk.without_apply_rng(hk.transform(lambda x: hk.LayerNorm(-1, scaled, biased, name="m")(x)))
    params = drawn(plain.init(jax.random.key(0), x))
    tree = {"bias" if key == "offset" else key: np.asarray(v) for key, v in params["m"].items()}
    state = converted(norm_rule("layer_norm", tree, target="{module: m, parameters: weight and bias}"), tree)
    same(loaded(torch.nn.LayerNorm(6), state)(torch.tensor(x)).numpy(), plain.apply(params, x))


# ---- the plan, and the check

TREE = {"n/bias": (6,), "n/mean": (6,), "n/var": (6,)}


def arrays(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: (np.abs(draw(*shape)) + 0.3).astype(np.float32) for name, shape in shapes.items()}


def test_the_plan_shows_what_is_written_of_nothing() -> None:
    plan = make_plan(rule_file(norm_rule("batch_norm", TREE)), MemorySource(arrays(TREE)))
    said = {step.name: (str(step.spec), step.arithmetic) for step in plan.steps if not step.parts}
    assert said == {
        "m.weight": ("float32[6]", "ones: the source has no scale, the target multiplies by weight"),
        "m.num_batches_tracked": ("int64[]", "zero: the source does not count, and torch needs no count where `momentum` is a number"),
    }  # fmt: skip
    assert plan.layers[0]["source_multiplies_by"] == "1"
    with_scale = make_plan(rule_file(norm_rule("group_norm", {"scale": ()}, "num_groups: 2")), MemorySource(arrays({"scale": (6,)})))  # fmt: skip
    assert [(step.name, step.arithmetic) for step in with_scale.steps] == [
        ("m.weight", ""),
        ("m.bias", "zeros: the source adds nothing, and the target has a bias"),
    ]
    narrow = make_plan(rule_file(norm_rule("batch_norm", TREE)), MemorySource(arrays(TREE)), dtype="bfloat16")
    assert {step.name: step.spec.dtype for step in narrow.steps}["m.weight"] == "bfloat16"


def test_a_target_that_adds_one_gets_zeros() -> None:
    tree = {"scale": (6,), "bias": (6,)}
    del tree["scale"]
    rules = norm_rule("layer_norm", tree, target="{module: m, weight: scale, multiplies_by: 1+weight}")
    plan = make_plan(rule_file(rules), MemorySource(arrays(tree)))
    (step,) = (step for step in plan.steps if not step.parts)
    assert (step.name, step.value) == ("m.scale", 0.0)
    assert step.arithmetic == "zeros: the source has no scale, the target multiplies by 1+weight"


def test_a_stack_of_bare_norms() -> None:
    """One constant for each layer of the stack, and each alternative."""
    tree = arrays({"layers/{a}/bias": (), "x": ()}) and arrays({"layers/a/bias": (3, 6), "layers/b/bias": (3, 6)})
    rules = (
        "- multiplies_by: 1\n  bias: layers/{a,b}/bias\n  epsilon: 1e-5\n  stacked: {i: 0}\n  layer_norm: l.{i}.{a,b}"
    )
    plan = make_plan(rule_file(rules), MemorySource(tree))
    assert {step.name for step in plan.steps} == {f"l.{i}.{x}.{role}" for i in range(3) for x in "ab" for role in ("weight", "bias")}  # fmt: skip
    assert all(step.spec.shape == (6,) for step in plan.steps)


CHECKED = [
    ("batch_norm", TREE, "m", "m.weight", "scale that the source does not multiply by"),
    ("batch_norm", {"scale": (6,), "mean": (6,), "var": (6,)}, "m", "m.bias", "bias that the source does not add"),
    ("batch_norm", {"mean": (6,), "var": (6,)}, "m", "m.bias", "bias that the source does not add"),
    ("group_norm", {"bias": (6,)}, "m", "m.weight", "scale that the source does not multiply by"),
    ("group_norm", {"scale": (6,)}, "m", "m.bias", "bias that the source does not add"),
    ("layer_norm", {"bias": (6,)}, "m", "m.weight", "scale that the source does not multiply by"),
    ("layer_norm", {"scale": (6,)}, "{module: m, parameters: weight and bias}", "m.bias", "bias that the source does not add"),
    ("layer_norm", {"bias": (6,)}, "{module: m, multiplies_by: 1+weight}", "m.weight", "scale that the source does not multiply by"),
]  # fmt: skip


@pytest.mark.parametrize(("word", "tree", "target", "name", "diagnosis"), CHECKED)
def test_the_check_passes_and_catches_a_fault(
    word: str, tree: dict[str, tuple[int, ...]], target: str, name: str, diagnosis: str, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    more = ("num_groups: 3",) if word == "group_norm" else ()
    plan = make_plan(rule_file(norm_rule(word, tree, *more, target=target)), MemorySource(arrays(tree)))
    out = tmp_path / "out.safetensors"
    list(execute(plan, out))
    written = open_written(out)
    assert check_weights(plan, written).verdict is Verdict.PASSED
    level = check_layers(plan, written)
    assert level.verdict is Verdict.PASSED, level.findings
    assert all(measure.float64 is not None and measure.float64.relative < 1e-14 for measure in level.measures)
    tensors = load_file(out)
    tensors[name] = tensors[name] + np.float32(0.5) * (np.arange(6) > 3)
    save_file(tensors, out, metadata=dict(written.metadata))
    wrong = check_weights(plan, open_written(out))
    assert wrong.verdict is Verdict.FAILED
    (finding,) = wrong.findings
    assert finding.path == name and finding.data["diagnosis"] == diagnosis
    said = next(step.arithmetic for step in plan.steps if step.name == name)
    number = said.startswith("ones") * 1
    assert (finding.code, finding.rule) == ("weights-differ", "r.yaml:5") and finding.got == "2 of 6 values differ"
    assert finding.expected == f"{number} everywhere ({said})"
    assert check_layers(plan, open_written(out)).verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("- from: s\n  multiplies_by: 1\n  epsilon: 0\n  layer_norm: m", "r.yaml:5:3: `multiplies_by: 1` declares that the source has no scale, and `from` names one, s; leave one of the two out"),
        ("- bias: b\n  multiplies_by: scale\n  epsilon: 0\n  layer_norm: m", "r.yaml:5:3: a norm needs the key 'from', the path of its scale; write `multiplies_by: 1` if the source has none"),
        ("- multiplies_by: 1\n  epsilon: 0\n  layer_norm: m", "r.yaml:5:3: a norm without scale and bias has no leaf and needs no rule; build the target's module without them, torch.nn.LayerNorm(..., elementwise_affine=False)"),
        ("- multiplies_by: 1\n  epsilon: 0\n  num_groups: 2\n  group_norm: m", "torch.nn.GroupNorm(..., affine=False)"),
        ("- from: s\n  multiplies_by: scale\n  epsilon: 0\n  layer_norm: {module: m, parameters: nothing}", "r.yaml:5:3: the source multiplies by a scale, which would be lost: the target says `parameters: nothing`"),
        ("- from: s\n  bias: b\n  multiplies_by: scale\n  epsilon: 0\n  num_groups: 2\n  group_norm: {module: m, parameters: weight}", "r.yaml:5:3: the source adds a bias, which would be lost: the target says `parameters: weight`"),
        ("- from: s\n  multiplies_by: scale\n  epsilon: 0\n  num_groups: 2\n  group_norm: {module: m, part: 1 of 2}", "r.yaml:5:3: a norm without a scale or a bias makes whole tensors; leave `part` out"),
        ("- from: s\n  multiplies_by: 2\n  epsilon: 0\n  layer_norm: m", "r.yaml:6:18: expected one of scale, 1+scale, 1, got 2"),
        ("- multiplies_by: 1\n  bias: b_{i}\n  mean: m\n  var: v_{i}\n  epsilon: 0\n  batch_norm: m.{i}", "`mean` and `bias` do not have the same indices"),
    ],
)  # fmt: skip
def test_what_a_rule_may_not_say(rules: str, said: str) -> None:
    with pytest.raises(RuleError) as refused:
        rule_file(rules)
    assert said in str(refused.value)


def test_statistics_of_another_shape() -> None:
    rules = norm_rule("batch_norm", TREE)
    with pytest.raises(PlanError) as refused:
        make_plan(rule_file(rules), MemorySource(arrays({**TREE, "n/var": (5,)})))
    assert "n/var: " in str(refused.value)
    assert "expected the shape of n/bias: float32[6], got float32[5]; " in str(refused.value)


def test_the_schema_knows_a_norm_without_a_scale() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    from convert.core.yaml_nodes import load_yaml
    from convert.rules.schema import schema

    head = "model: m\ntitle: M\ntargets: {torch: {loads: T}}\nrules:\n"
    validator = jsonschema.Draft202012Validator(schema())
    good = norm_rule("batch_norm", TREE)
    validator.validate(load_yaml(head + good, "r.yaml").plain())
    for wrong in (good.replace("multiplies_by: 1", "multiplies_by: scale"), good + "\n  from: s"):
        assert not validator.is_valid(load_yaml(head + wrong, "r.yaml").plain())


# ---- Burn


@pytest.mark.parametrize("target", ["m", "{module: m, parameters: nothing}"])
def test_burn_has_gamma_and_beta(target: str, tmp_path: Path) -> None:
    tree = {"mean": (6,), "var": (6,)}
    plan = make_plan(rule_file(norm_rule("batch_norm", tree, target=target)), MemorySource(arrays(tree)), to="burn")
    assert [(step.name, step.value) for step in plan.steps] == [("m.running_mean", None), ("m.gamma", 1.0), ("m.beta", 0.0), ("m.running_var", None)]  # fmt: skip
    alone = make_plan(
        rule_file(norm_rule("layer_norm", {"bias": (6,)})), MemorySource(arrays({"bias": (6,)})), to="burn"
    )
    assert [(step.name, step.value) for step in alone.steps] == [("m.beta", None), ("m.gamma", 1.0)]


def test_what_burn_cannot_be_without() -> None:
    head = "model: m\ntitle: M\ntargets: {rust: {loads: T, format: burn}}\n"
    tree = {"mean": (6,), "var": (6,)}
    with pytest.raises(PlanError) as refused:
        make_plan(
            rule_file(norm_rule("batch_norm", tree, target="{module: m, parameters: nothing}"), head),
            MemorySource(arrays(tree)),
        )
    assert "r.yaml:5: m: Burn's BatchNorm has both gamma and beta, always; leave `parameters` out" in str(refused.value)  # fmt: skip
