"""Low-rank products and LoRA pairs: merged as the source computes them, or kept apart in PEFT's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import convert
from convert import PlanError, RuleError
from convert.core.tensor_spec import TensorSpec
from convert.layers.low_rank import parse_product, parse_scale
from convert.planning.low_rank_source import Merge
from convert.planning.planner import make_plan
from convert.verify.layers.level import check_layers
from convert.verify.report.report import Verdict
from convert.writing.execute import Result, execute
from convert.writing.written import open_written
from support.memory_source import HEAD, MemorySource, rule_file, run
from support.weights_level import check_weights

LORA = """
- einsum: ...D,DE->...E
  from: "{q,v}/kernel"
  bias: "{q,v}/bias"
  plus: {einsum: "...D,DR,RE->...E", from: "{q,v}/lora/lora_a", times: "{q,v}/lora/lora_b", scale: SCALE}
  linear: TARGET
"""


def tree(rng: np.random.Generator, dtype: str = "float32", layers: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
    shapes = {"kernel": (7, 5), "bias": (5,), "lora/lora_a": (7, 3), "lora/lora_b": (3, 5)}
    return {f"{m}/{n}": rng.standard_normal((*layers, *s)).astype(dtype) for m in "qv" for n, s in shapes.items()}


def lora(scale: str = "8/R", target: str = '"{q,v}_proj"', head: str = HEAD) -> convert.RuleFile:
    return rule_file(LORA.replace("SCALE", scale).replace("TARGET", target), head)


# ---- equations and scales


def test_a_pair_is_one_weight() -> None:
    product = parse_product("...D, RD, NRH -> ...NH")
    assert (product.first, product.second, product.shared, product.whole.equation) == (
        "RD",
        "NRH",
        "R",
        "...D,DNH->...NH",
    )


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        ("...D,DR->...R", "not an einsum of three operands"),
        ("...D,DR,SE->...E", "share no axis"),
        ("...hD,hDR,hRE->...hE", "block diagonal"),
        ("...D,DE,E->...E", "a scale of the inputs has their axes alone"),
        ("...D,D,DE->...E", "and comes second"),
        ("...D,D.,RE->...E", "is not a sequence of different letters"),
        ("...D,DR,RE->...EF", "is in no operand"),
    ],
)
def test_equations_that_are_no_pair(equation: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_product(equation)


@pytest.mark.parametrize(("text", "value"), [("2", 2), (0.5, 0.5), ("16/R", 4), ("$alpha/R", 2), ("$alpha/sqrt(R)", 4), ("1/8", 0.125)])  # fmt: skip
def test_scales(text: Any, value: float) -> None:
    assert parse_scale(text).value({"R": 4}, {"alpha": 8}) == value


@pytest.mark.parametrize("text", ["R", "0", "16/RS", "nan", "alpha/R", "16/0", "2*R", "sqrt(R)"])
def test_what_is_no_scale(text: str) -> None:
    with pytest.raises(ValueError, match="expected a factor such as 2, 16/R or"):
        parse_scale(text)


# ---- a scale of the inputs, which several kernels may share

SCALED = """
- {einsum: "...D,DE,D->...E", from: pre, times: norm/scale, linear: {module: mix, weight: fn, part: 1 of 2}}
- {einsum: "...D,DF,D->...F", from: res, times: norm/scale, linear: {module: mix, weight: fn, part: 2 of 2}}
"""
SCALED_LEAVES = {"pre": (7, 2), "res": (7, 4), "norm/scale": (7,)}


@pytest.mark.parametrize("layers", [(), (3,)])
def test_a_scale_is_multiplied_into_each_kernel_behind_it(layers: tuple[int, ...], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    leaves = {name: rng.standard_normal((*layers, *shape)).astype(np.float32) for name, shape in SCALED_LEAVES.items()}
    stacked = SCALED.replace("linear: {module: mix", 'stacked: {i: 0}, linear: {module: "{i}"')
    rules, out = rule_file(stacked if layers else SCALED), tmp_path / "out.safetensors"
    convert.convert(rules, MemorySource(leaves), out)
    plan = make_plan(rules, MemorySource(leaves))
    assert plan.steps[0].arithmetic == "a kernel times a scale"
    kernels = np.concatenate([leaves["pre"], leaves["res"]], -1) * leaves["norm/scale"][..., None]
    for k, kernel in enumerate(kernels if layers else [kernels]):
        np.testing.assert_array_equal(load_file(out)[f"{k}.fn" if layers else "mix.fn"], kernel.T)
    bare = make_plan(
        rule_file((stacked if layers else SCALED).replace("DF,D->", "DF->").replace("res, times: norm/scale", "res")),
        MemorySource(leaves),
    )
    level = check_weights(bare, open_written(out))
    assert level.verdict is Verdict.FAILED
    assert "is multiplied by a number of its own" in " ".join(map(str, level.findings))


def test_a_scale_is_a_scale_of_every_rule_that_has_it() -> None:
    leaves = {name: np.ones(shape, np.float32) for name, shape in SCALED_LEAVES.items()}
    both = SCALED + "- {from: norm/scale, axes: D, parameter: scale}\n"
    with pytest.raises(PlanError, match="two rules match this leaf"):
        make_plan(rule_file(both), MemorySource(leaves))


# ---- what is computed


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_the_merge_is_the_einsum(data: st.DataObject) -> None:
    """Any order of axes, any number of stacked layers in any place, with a weight below it or none."""
    mix = lambda text: "".join(data.draw(st.permutations(text)))  # noqa: E731
    first, second, letters = mix("DCR"), mix("RNH"), mix("DCNH")
    sizes = {"D": 2, "C": 3, "R": 4, "N": 5, "H": 2}
    stack = data.draw(st.sampled_from([(), (0,), (1,), (0, 2)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))

    def leaf(own: str) -> np.ndarray:
        shape = [sizes[x] for x in own]
        for k, axis in enumerate(stack):
            shape.insert(axis, 2 + k)
        return rng.standard_normal(shape)

    leaves = {"a": leaf(first), "b": leaf(second), "w": leaf(letters)}
    base = data.draw(st.sampled_from(["w", None]))
    product = parse_product(f"...DC,{first},{second}->...NH")
    merge = Merge("a", "b", base, product, letters, stack, 0.5, TensorSpec(leaves["w"].shape, "float64"), "float64")
    names = {axis: "xy"[k] for k, axis in enumerate(stack)}

    def named(own: str) -> str:
        for axis in stack:
            own = own[:axis] + names[axis] + own[axis:]
        return own

    want = 0.5 * np.einsum(f"{named(first)},{named(second)}->{named(letters)}", leaves["a"], leaves["b"])
    got = merge.make(leaves.__getitem__)
    np.testing.assert_allclose(got, want + (leaves["w"] if base else 0), rtol=1e-13, atol=1e-13)
    assert got.flags.c_contiguous and got.dtype == np.float64


def test_blocks_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    leaves = {"a": rng.standard_normal((33, 4)).astype("float32"), "b": rng.standard_normal((4, 29)).astype("float32")}
    merge = Merge(
        "a", "b", None, parse_product("...D,DR,RE->...E"), "DE", (), 1.0, TensorSpec((33, 29), "float32"), "float32"
    )
    whole = merge.make(leaves.__getitem__)
    monkeypatch.setattr("convert.planning.low_rank_source.BLOCK", 50)
    assert merge.make(leaves.__getitem__).tobytes() == whole.tobytes()


def test_lora_is_merged_in_the_target_s_layout() -> None:
    leaves = tree(np.random.default_rng(1))
    plan = make_plan(lora(), MemorySource(leaves))
    made = run(plan)
    for m in "qv":
        want = (
            leaves[f"{m}/kernel"].astype(float)
            + 8 / 3 * leaves[f"{m}/lora/lora_a"].astype(float) @ leaves[f"{m}/lora/lora_b"]
        )
        np.testing.assert_allclose(made[f"{m}_proj.weight"], want.T, rtol=2e-7, atol=1e-7)
        assert np.array_equal(made[f"{m}_proj.bias"], leaves[f"{m}/bias"])
    step = next(step for step in plan.steps if step.name == "q_proj.weight")
    assert step.parts[0].leaf == "q/kernel + 2.66667 x q/lora/lora_a q/lora/lora_b"
    assert str(step.parts[0].layout) == "D E -> E D" and step.arithmetic == "+ 2.66667 x a product over R"
    assert plan.notes == (
        "2 weights are computed from several leaves, which the output does not keep: q/kernel + 2.66667 x q/lora/lora_a q/lora/lora_b, ...",
    )
    assert {*plan.checkpoint.leaves} == {*leaves} and len(plan.source.leaves) == 4


def test_fused_targets_and_stacked_layers() -> None:
    leaves = tree(np.random.default_rng(2), layers=(4,))
    text = LORA.replace("SCALE", "1").replace("TARGET", "layers.{i}.qv") + "  stacked: {i: 0}\n"
    made = run(make_plan(rule_file(text), MemorySource(leaves)))
    want = [leaves[f"{m}/kernel"][2] + leaves[f"{m}/lora/lora_a"][2] @ leaves[f"{m}/lora/lora_b"][2] for m in "qv"]
    np.testing.assert_allclose(made["layers.2.qv.weight"], np.concatenate([w.T for w in want]), rtol=1e-5, atol=1e-6)


def test_a_bfloat16_weight_is_merged_in_float32_and_stays_bfloat16() -> None:
    leaves = tree(np.random.default_rng(3))
    leaves["q/kernel"] = leaves["q/kernel"].astype(ml_dtypes.bfloat16)
    leaves["v/kernel"] = leaves["v/kernel"].astype(ml_dtypes.bfloat16)
    plan = make_plan(lora("1"), MemorySource(leaves))
    made = run(plan)["q_proj.weight"]
    want = leaves["q/kernel"].astype(np.float32) + leaves["q/lora/lora_a"] @ leaves["q/lora/lora_b"]
    assert made.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(made.astype(np.float32), want.T, rtol=2**-8)
    assert {step.loses for step in plan.steps if step.role == "weight"} == {"rounded from float32 to bfloat16"}


LOW_RANK = '- einsum: "...D,DR,RNH->...NH"\n  from: u\n  times: v\n  bias: b\n  linear: m\n'


def test_a_low_rank_product_is_one_weight() -> None:
    rng = np.random.default_rng(4)
    leaves = {"u": rng.standard_normal((7, 3)), "v": rng.standard_normal((3, 2, 5)), "b": rng.standard_normal((2, 5))}
    made = run(make_plan(rule_file(LOW_RANK), MemorySource(leaves)))
    x = rng.standard_normal((4, 7))
    want = np.einsum("bd,dr,rnh->bnh", x, leaves["u"], leaves["v"]) + leaves["b"]
    got = torch.nn.functional.linear(*map(torch.tensor, (x, made["m.weight"], made["m.bias"])))
    np.testing.assert_allclose(got.numpy(), want.reshape(4, 10), rtol=1e-12, atol=1e-12)


# ---- the real library


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q = nnx.LoRALinear(7, 5, lora_rank=3, rngs=rngs)
        self.v = nnx.LoRALinear(7, 5, lora_rank=3, rngs=rngs)


def nnx_tree(seed: int) -> tuple[Model, dict[str, np.ndarray]]:
    model = Model(nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    _, state = nnx.split(model)
    flat = {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    leaves = {}
    for name, variable in flat.items():
        drawn = rng.standard_normal(variable[...].shape).astype(np.float32)  # lora_b begins as zeros
        variable.set_value(drawn)
        leaves[name] = drawn
    nnx.update(model, state)
    return model, leaves


@pytest.mark.slow
def test_nnx_lora_linear_merged() -> None:
    model, leaves = nnx_tree(5)
    assert {"q/kernel", "q/lora/lora_a", "q/lora/lora_b"} <= {*leaves}
    made = run(make_plan(lora("1"), MemorySource(leaves)))
    x = np.random.default_rng(6).standard_normal((4, 7)).astype(np.float32)
    want = np.asarray(model.q(x))
    got = torch.nn.functional.linear(*map(torch.tensor, (x, made["q_proj.weight"], made["q_proj.bias"]))).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


KEPT = """
- einsum: ...D,DE->...E
  from: "{q,v}/kernel"
  bias: "{q,v}/bias"
  linear: base_model.model.{q,v}_proj.base_layer
- einsum: ...D,DR->...R
  from: "{q,v}/lora/lora_a"
  linear: base_model.model.{q,v}_proj.lora_A
- einsum: ...R,RE->...E
  from: "{q,v}/lora/lora_b"
  linear: base_model.model.{q,v}_proj.lora_B
"""


def test_nnx_lora_kept_in_peft_s_names() -> None:
    """PEFT: ``base(x) + lora_B(lora_A(x)) * lora_alpha / r``, whose alpha is r where the source has no scale."""
    model, leaves = nnx_tree(7)
    made = {name.removeprefix("base_model.model."): torch.tensor(x) for name, x in run(make_plan(rule_file(KEPT), MemorySource(leaves))).items()}  # fmt: skip
    x = np.random.default_rng(8).standard_normal((4, 7)).astype(np.float32)
    given = torch.tensor(x)
    low = given @ made["v_proj.lora_A.weight"].T @ made["v_proj.lora_B.weight"].T
    got = torch.nn.functional.linear(given, made["v_proj.base_layer.weight"], made["v_proj.base_layer.bias"]) + low
    np.testing.assert_allclose(got.numpy(), np.asarray(model.v(x)), rtol=1e-5, atol=1e-5)
    assert made["v_proj.lora_A.weight"].shape == (3, 7) and made["v_proj.lora_B.weight"].shape == (5, 3)


# ---- the check


def written(tmp_path: Path, leaves: dict[str, np.ndarray], jobs: int = 2) -> tuple[convert.Plan, Path]:
    plan = make_plan(lora(), MemorySource(leaves))
    out = tmp_path / "out.safetensors"
    assert isinstance([*execute(plan, out, jobs=jobs, overwrite=True)][-1], Result)
    return plan, out


def test_the_same_bytes_whatever_the_parallelism(tmp_path: Path) -> None:
    leaves = tree(np.random.default_rng(9))
    files = [written(tmp_path, leaves, jobs)[1].read_bytes() for jobs in (1, 4)]
    assert files[0] == files[1]


def test_weights_and_layers_pass(tmp_path: Path) -> None:
    plan, out = written(tmp_path, tree(np.random.default_rng(10)))
    assert check_weights(plan, open_written(out)).verdict is Verdict.PASSED
    report = check_layers(plan, open_written(out))
    assert report.verdict is Verdict.PASSED
    weight = next(m for m in report.measures if m.name.endswith("_proj.weight"))
    assert weight.float64 is not None and 0 < weight.float64.relative < 2e-7  # rounded to float32 once


A, B, W = "q/lora/lora_a", "q/lora/lora_b", "q/kernel"
MISTAKES = {
    "LoRA pair not merged": lambda t: t[W],
    "LoRA pair merged twice": lambda t: t[W] + 16 / 3 * t[A] @ t[B],
    "LoRA pair subtracted": lambda t: t[W] - 8 / 3 * t[A] @ t[B],
    "LoRA pair without its weight": lambda t: 8 / 3 * t[A] @ t[B],
    "another scale of a pair": lambda t: t[W] + 8 * t[A] @ t[B],
    "transposed": None,
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_named(name: str, tmp_path: Path) -> None:
    leaves = {k: x[:5] if x.shape[0] == 7 else x for k, x in tree(np.random.default_rng(11)).items()}  # square
    plan, out = written(tmp_path, leaves)
    tensors = load_file(out)
    make = MISTAKES[name]
    right = tensors["q_proj.weight"]
    wide = {k: x.astype(np.float64) for k, x in leaves.items()}
    tensors["q_proj.weight"] = np.ascontiguousarray(right.T if make is None else make(wide).T.astype(np.float32))
    save_file(tensors, out, {"format": "pt"})
    report = check_weights(plan, open_written(out))
    assert report.verdict is Verdict.FAILED
    assert [finding.data["diagnosis"] for finding in report.findings] == [name]
    assert check_layers(plan, open_written(out)).verdict is Verdict.FAILED


def test_the_layers_level_does_not_trust_the_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product with its factors the wrong way round is what the weights level would compute as well."""
    right = Merge.fill
    monkeypatch.setattr(
        Merge, "fill", lambda self, *part, base=1.0, scale=None: right(self, *part[:5], base, -self.scale)
    )
    plan, out = written(tmp_path, tree(np.random.default_rng(12)))
    assert check_weights(plan, open_written(out)).verdict is Verdict.PASSED
    assert check_layers(plan, open_written(out)).verdict is Verdict.FAILED


# ---- refusals


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (LOW_RANK.replace("  times: v\n", ""), "a pair, X,A,B->Y, has its first leaf in `from:` and its second in `times:`"),
        ("- einsum: ...D,DE->...E\n  from: u\n  times: v\n  linear: m\n", "one weight has no `times:`"),
        (LORA.replace("...D,DR,RE->...E", "...D,ER,RD->...E").replace("SCALE", "1").replace("TARGET", '"{q,v}"'), None),
        (LORA.replace("...D,DR,RE->...E", "...E,ER,RD->...D").replace("SCALE", "1").replace("TARGET", '"{q,v}"'), "whose inputs or results differ from ...D,DE->...E"),
        (LORA.replace("{q,v}/lora/lora_b", "q/lora/lora_b").replace("SCALE", "1").replace("TARGET", '"{q,v}"'), "`plus: times` and `from` do not have the same indices"),
        (LORA.replace("SCALE", "$alpha/R").replace("TARGET", '"{q,v}"'), "refers to 'alpha', which is not declared in `facts`"),
        (LORA.replace("SCALE", "R").replace("TARGET", '"{q,v}"'), "expected a factor such as 2, 16/R"),
    ],
)  # fmt: skip
def test_rules_that_contradict_themselves(rules: str, message: str | None) -> None:
    if message is None:  # the order of letters within a leaf is the source's own affair
        rule_file(rules)
        return
    with pytest.raises(RuleError) as caught:
        rule_file(rules)
    assert message in str(caught.value)


def test_trees_that_do_not_fit() -> None:
    leaves = tree(np.random.default_rng(13))
    with pytest.raises(PlanError, match=r"q/lora/lora_b.*R = 2"):
        make_plan(lora(), MemorySource({**leaves, "q/lora/lora_b": np.zeros((2, 5), np.float32)}))
    with pytest.raises(PlanError, match="v/lora/lora_b"):
        make_plan(lora(), MemorySource({k: x for k, x in leaves.items() if k != "v/lora/lora_b"}))
    with pytest.raises(PlanError, match="q/lora/lora_a: expected a floating-point dtype, .* got int32"):
        make_plan(lora(), MemorySource({**leaves, "q/lora/lora_a": np.zeros((7, 3), np.int32)}))
    head = HEAD + "facts: {alpha: ask}\n"
    with pytest.raises(PlanError, match=r"scaled by \$alpha/R; give it with --set alpha="):
        make_plan(lora("$alpha/R", head=head), MemorySource(leaves))
    made = make_plan(lora("$alpha/R", head=head), MemorySource(leaves), settings={"alpha": 6})
    assert made.steps[0].arithmetic == "+ 2 x a product over R"
