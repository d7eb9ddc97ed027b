"""Leaves that a rule adds up: ``bias: x/bias + h/bias``. The sum is rounded once, whatever the dtypes, the layout and the chunks."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import convert
from convert import PlanError, RuleError
from convert.core.path_pattern import escape_path, parse_pattern
from convert.core.tensor_spec import TensorSpec
from convert.layers.leaf_sums import parse_sum
from convert.planning.merged_leaf import Sum
from convert.planning.planner import make_plan
from convert.reversing.plan import reverse
from convert.verify.layers.level import check_layers
from convert.verify.layers.placement import misplaced
from convert.verify.report.report import Verdict
from convert.writing.execute import Result, execute
from convert.writing.written import open_written
from support.memory_source import HEAD, MemorySource, rule_file, run
from support.weights_level import check_weights

GATED = """
- {einsum: "...D,DF->...F", from: x/kernel, bias: x/bias + h/bias, linear: x}
- {einsum: "...E,EF->...F", from: h/kernel, linear: h}
"""
SHAPES = {"x/kernel": (7, 5), "x/bias": (5,), "h/kernel": (3, 5), "h/bias": (5,)}
DTYPES = ("float16", "bfloat16", "float32", "float64")


def drawn(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return {name: rng.standard_normal(shape).astype(kind) for name, shape in shapes.items()}


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_sum_is_rounded_once(data: st.DataObject) -> None:
    """From leaves of any dtypes, whole or in pieces."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=2, max_size=4))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    leaves = {f"l{k}": np.asarray(rng.standard_normal(shape)).astype(np.dtype(dtype)) for k, dtype in enumerate(dtypes)}
    rules = rule_file(f"- {{from: {' + '.join(leaves)}, parameter: p}}")
    plan = make_plan(rules, MemorySource(leaves))
    (merge,) = plan.merges.values()
    assert isinstance(merge, Sum) and merge.name == " + ".join(leaves)
    assert merge.spec.dtype == ("float64" if "float64" in dtypes else "float32")
    exact = reduce(np.add, (leaf.astype(np.float64) for leaf in leaves.values()))
    whole = plan.source.read(merge.name)
    assert whole.tobytes() == np.asarray(exact).astype(merge.spec.dtype).tobytes()
    assert plan.steps[0].spec.dtype == merge.dtype
    if shape:  # a piece is that of the whole
        kept = next(iter(leaves.values()))[-1:]
        out = np.empty(kept.shape, merge.spec.dtype)
        others = list(leaves.values())[1:]
        merge.fill_piece(out, (shape[0] - 1, *[0] * (len(shape) - 1)), others, kept)
        assert out.tobytes() == whole[-1:].tobytes()


def test_a_sum_has_the_layout_of_its_leaf() -> None:
    """With indices, alternatives, a stacked axis, and parts that go to several tensors."""
    indices = "- {einsum: '...D,DF->...F', from: 'b_{i}/{q,v}/w', bias: 'b_{i}/{q,v}/b + b_{i}/{s,t}/c', linear: 'l.{i}.{q,v}'}"
    tree = drawn({f"b_{i}/{m}/{n}": s for i in range(2) for m, n, s in (("q", "w", (3, 4)), ("v", "w", (3, 4)), ("q", "b", (4,)), ("v", "b", (4,)), ("s", "c", (4,)), ("t", "c", (4,)))})  # fmt: skip
    made = run(make_plan(rule_file(indices), MemorySource(tree)))
    assert np.array_equal(made["l.1.v.bias"], tree["b_1/v/b"] + tree["b_1/t/c"])
    fused = indices.replace("l.{i}.{q,v}", "l.{i}.qv")
    made = run(make_plan(rule_file(fused), MemorySource(tree)))
    want = [tree["b_0/q/b"] + tree["b_0/s/c"], tree["b_0/v/b"] + tree["b_0/t/c"]]
    assert np.array_equal(made["l.0.qv.bias"], np.concatenate(want))
    stacked = "- {einsum: '...D,D(C F)->...(C F)', from: w, bias: b + c, stacked: {i: 0}, linear: 'l.{i}.{gate,up}'}"
    tree = drawn({"w": (2, 3, 8), "b": (2, 8), "c": (2, 8)})
    made = run(make_plan(rule_file(stacked), MemorySource(tree)))
    assert np.array_equal(made["l.1.up.bias"], (tree["b"] + tree["c"])[1, 4:])
    turned = "- {from: p + q, axes: AB, parameter: {name: p, axes: B.A}}"
    tree = drawn({"p": (2, 3), "q": (2, 3)})
    made = run(make_plan(rule_file(turned), MemorySource(tree)))
    assert np.array_equal(made["p"], (tree["p"] + tree["q"]).T[:, None])


def test_the_plan_shows_the_sum() -> None:
    plan = make_plan(rule_file(GATED), MemorySource(drawn(SHAPES)))
    (step,) = [step for step in plan.steps if step.name == "x.bias"]
    assert step.arithmetic == "the sum of 2 leaves, added up in float64" and step.loses == ""
    assert step.parts[0].leaf == "x/bias + h/bias"
    assert plan.notes == ("1 weight is computed from several leaves, which the output does not keep: x/bias + h/bias",)


def test_the_same_bytes_whatever_the_parallelism(tmp_path: Path) -> None:
    files = [written(tmp_path, drawn(SHAPES, "bfloat16"), jobs)[1].read_bytes() for jobs in (1, 4)]
    assert files[0] == files[1]


def test_a_path_may_have_a_plus_of_its_own() -> None:
    leaves = {"a + b": np.ones(3, np.float32), "c": np.ones(3, np.float32)}
    text = f"- {{from: '{escape_path('a + b')} + c', parameter: p}}"
    assert np.array_equal(run(make_plan(rule_file(text), MemorySource(leaves)))["p"], [2, 2, 2])
    assert parse_pattern(escape_path("a + b")).match("a + b") is not None
    assert [str(path) for path in parse_sum("a_{i+1} + b_{i+1}").paths] == ["a_{i+1}", "b_{i+1}"]


# ---- what is refused


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ("x/bias + x/bias", "adds a leaf to itself"),
        ("x/bias + {h,g}/bias", "`bias` and `from` do not have the same indices and alternatives"),
        ("x/bias + ", "empty"),
    ],
)
def test_a_sum_that_is_none_is_refused_by_the_rules(bias: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        rule_file(GATED.replace("x/bias + h/bias", f"'{bias}'"))


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"h/bias": (4,)}, "F = 4"),
        ({"h/bias": (1, 5)}, "a bias with 2 axes"),
        ({"h/bias": ()}, "a bias with 0 axes"),
    ],
)
def test_leaves_of_other_shapes_are_not_added(leaves: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(rule_file(GATED), MemorySource(drawn({**SHAPES, **leaves})))


def test_parameters_of_other_shapes_or_of_integers_are_not_added() -> None:
    rules = rule_file("- {from: p + q, parameter: p}")
    with pytest.raises(PlanError, match="the shape of p: float32.2,3."):
        make_plan(rules, MemorySource(drawn({"p": (2, 3), "q": (3, 2)})))
    with pytest.raises(PlanError, match="expected floating-point numbers, got int32"):
        make_plan(rules, MemorySource({"p": np.ones(2, np.float32), "q": np.ones(2, np.int32)}))


def test_a_leaf_that_is_missing_or_that_another_rule_has_is_named() -> None:
    leaves = drawn(SHAPES)
    with pytest.raises(PlanError, match="take the path out of the sum only if the source does not add it"):
        make_plan(rule_file(GATED), MemorySource({k: x for k, x in leaves.items() if k != "h/bias"}))
    with pytest.raises(PlanError, match="two rules match this leaf"):
        make_plan(rule_file(GATED + "- {from: h/bias, parameter: b}"), MemorySource(leaves))


def test_a_sum_is_not_taken_apart(tmp_path: Path) -> None:
    plan, out = written(tmp_path, drawn(SHAPES))
    with pytest.raises(PlanError, match="it does not tell them apart; keep the leaves apart in the target"):
        reverse(plan, open_written(out))
    with pytest.raises(PlanError, match=r"x/bias \+ h/bias: the tensor is a sum or product of several leaves"):
        convert.load_pytree(rule_file(GATED), out)


# ---- the check


def written(tmp_path: Path, leaves: dict[str, np.ndarray], jobs: int = 2) -> tuple[convert.Plan, Path]:
    plan = make_plan(rule_file(GATED, HEAD), MemorySource(leaves))
    out = tmp_path / "out.safetensors"
    assert isinstance([*execute(plan, out, jobs=jobs, overwrite=True)][-1], Result)
    return plan, out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_layers_pass(dtype: str, tmp_path: Path) -> None:
    plan, out = written(tmp_path, drawn(SHAPES, dtype))
    assert check_weights(plan, open_written(out)).verdict is Verdict.PASSED
    assert check_layers(plan, open_written(out)).verdict is Verdict.PASSED


MISTAKES = {
    "leaf of a sum left out": (1, 0),
    "leaf of a sum added twice": (2, 1),
    "leaf of a sum subtracted": (1, -1),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_named(name: str, tmp_path: Path) -> None:
    leaves = drawn(SHAPES)
    plan, out = written(tmp_path, leaves)
    x, h = MISTAKES[name]
    save_file({**load_file(out), "x.bias": x * leaves["x/bias"] + h * leaves["h/bias"]}, out, {"format": "pt"})
    level = check_weights(plan, open_written(out))
    assert level.verdict is Verdict.FAILED
    assert [finding.rule for finding in level.findings] == ["r.yaml:5"]
    assert name in str(level.findings[0])


def test_leaves_of_two_layers_are_not_one_sum() -> None:
    """Planted: a plan that adds the bias of another layer."""
    rules = "- {einsum: '...D,DF->...F', from: 'b_{i}/w', bias: 'b_{i}/b + b_{i}/c', linear: 'l.{i}'}"
    tree = drawn({f"b_{i}/{n}": s for i in range(2) for n, s in (("w", (3, 4)), ("b", (4,)), ("c", (4,)))})
    plan = make_plan(rule_file(rules), MemorySource(tree))
    spec = TensorSpec((4,), "float32")
    swapped = {name: Sum(("b_0/b", "b_1/c"), spec, "float32") if name == "b_0/b + b_0/c" else merge for name, merge in plan.merges.items()}  # fmt: skip
    (step,) = [step for step in plan.steps if step.name == "l.0.bias"]
    (part,) = step.parts
    assert part.rule is not None and misplaced(plan, part.rule, step, part) is None
    finding = misplaced(replace(plan, merges=swapped), part.rule, step, part)
    assert finding is not None and "the leaves of a sum belong to different layers" in str(finding)


# ---- a leaf and a number

FORGET = (
    "- {einsum: '...D,DF->...F', from: w, bias: 'b + 1', linear: x}\n- {from: p - 0.5, prescaled_by: 2, parameter: p}"
)
NUMBERED = {"w": (3, 4), "b": (4,), "p": (5,)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_leaf_and_a_number(dtype: str, tmp_path: Path) -> None:
    """The number is added before the factor is undone, the check confirms both, and the way back subtracts it."""
    leaves = drawn(NUMBERED, dtype)
    plan = make_plan(rule_file(FORGET, HEAD), MemorySource(leaves))
    assert [step.arithmetic for step in plan.steps[1:]] == ["+ 1", "- 0.5, x 0.5, as the source's weight carries 2"]
    out = tmp_path / "out.safetensors"
    assert isinstance([*execute(plan, out, overwrite=True)][-1], Result)
    bias, p = leaves["b"].astype(np.float32) + 1, (leaves["p"].astype(np.float32) - 0.5) / 2
    made = {name: x.astype(np.float32) for name, x in run(plan).items()}
    assert np.array_equal(made["x.bias"], bias.astype(leaves["b"].dtype)) and np.allclose(made["p"], p, rtol=0.01)
    assert check_weights(plan, open_written(out)).verdict is Verdict.PASSED
    assert check_layers(plan, open_written(out)).verdict is Verdict.PASSED
    if dtype == "float32":
        tree = convert.load_pytree(rule_file(FORGET, HEAD), out)
        assert np.allclose(tree["b"], leaves["b"], atol=1e-6) and np.allclose(tree["p"], leaves["p"], atol=1e-6)


@pytest.mark.parametrize(("times", "name"), [(0, "left out"), (2, "added twice"), (-1, "subtracted")])
def test_a_planted_mistake_with_the_number_is_named(times: int, name: str, tmp_path: Path) -> None:
    leaves = drawn(NUMBERED)
    plan = make_plan(rule_file(FORGET, HEAD), MemorySource(leaves))
    out = tmp_path / "out.safetensors"
    assert isinstance([*execute(plan, out, overwrite=True)][-1], Result)
    save_file({**load_file(out), "x.bias": leaves["b"] + np.float32(times)}, out, {"format": "pt"})
    level = check_weights(plan, open_written(out))
    assert level.verdict is Verdict.FAILED and f"number of a sum {name}" in str(level.findings[0])
    assert check_layers(plan, open_written(out)).verdict is Verdict.FAILED


def test_leaves_with_numbers_for_names_are_written_with_a_backslash() -> None:
    leaves = {"0": np.ones(2, np.float32), "1": np.full(2, 5, np.float32), "a - 1": np.full(2, 7, np.float32)}
    for text, wanted in ((r"\0 + \1", 6), (r"\0 + 1", 2), ("0", 1), (f"{escape_path('a - 1')} - 3", 4)):
        plan = make_plan(rule_file(f"- {{from: '{text}', parameter: p}}\n- {{drop: '/**', rest: true, because: x}}"), MemorySource(leaves))  # fmt: skip
        assert run(plan)["p"].tolist() == [wanted, wanted]


@pytest.mark.parametrize("text", ["1 + 2", "b + 1 + 2", "b + 0"])
def test_numbers_alone_several_or_none_are_no_sum(text: str) -> None:
    with pytest.raises(RuleError, match="a sum has one number other than 0, and a path"):
        rule_file(f"- {{from: '{text}', parameter: p}}")


# ---- leaves with different axes

AXIAL = "- {from: row + col, axes: R.D + DC, parameter: {name: p, axes: '.(R C)D'}}"
AXIAL_SHAPES = {"row": (3, 1, 4), "col": (4, 5)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_leaves_with_different_axes_are_repeated(dtype: str, tmp_path: Path) -> None:
    leaves = drawn(AXIAL_SHAPES, dtype)
    plan = make_plan(rule_file(AXIAL, HEAD), MemorySource(leaves))
    out = tmp_path / "out.safetensors"
    assert isinstance([*execute(plan, out, overwrite=True)][-1], Result)
    want = leaves["row"].astype(np.float64) + leaves["col"].astype(np.float64).T
    made = load_file(out)["p"]
    assert np.array_equal(made, want.astype(np.float32).astype(made.dtype).reshape(1, 15, 4))
    assert check_weights(plan, open_written(out)).verdict is Verdict.PASSED
    assert check_layers(plan, open_written(out)).verdict is Verdict.PASSED
    merge = plan.merges["row + col"]
    piece = np.empty((2, 4, 2), np.float32)
    merge.fill_piece(piece, (1, 0, 3), [leaves[leaf] for leaf in merge.whole], None)
    assert np.array_equal(piece, plan.source.read(merge.name)[1:, :, 3:])
    without = want.astype(np.float32) - leaves["col"].astype(np.float32).T  # planted
    save_file({"p": np.ascontiguousarray(without.astype(made.dtype).reshape(1, 15, 4))}, out, {"format": "pt"})
    level = check_weights(plan, open_written(out))
    assert level.verdict is Verdict.FAILED
    assert dtype == "bfloat16" or "leaf of a sum left out" in str(level.findings[0])


def test_leaves_with_different_axes_in_a_stack() -> None:
    leaves = {name: np.stack([x, 2 * x]) for name, x in drawn(AXIAL_SHAPES).items()}
    rules = AXIAL.replace("parameter: {name: p", "stacked: {i: 0}, parameter: {name: 'l.{i}.p'")
    made = run(make_plan(rule_file(rules), MemorySource(leaves)))
    assert np.array_equal(made["l.1.p"].reshape(3, 5, 4), leaves["row"][1] + leaves["col"][1].T)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("R.D + DC", "R.D", "the leaf has the axes R D"),
        ("R.D + DC", "R.D + DC + D", "has the letters of 3 leaves that are added up, and `from` has 2"),
        ("row + col", "row", "has the letters of 2 leaves that are added up, and `from` has 1"),
        ("R.D + DC", "R.D + D(C E)", "letter"),
        ("R.D + DC", "R.D + CR", "R = "),
    ],
)
def test_axes_that_are_not_those_of_the_leaves(old: str, new: str, message: str) -> None:
    with pytest.raises((RuleError, PlanError), match=message):
        make_plan(rule_file(AXIAL.replace(old, new)), MemorySource(drawn(AXIAL_SHAPES)))
