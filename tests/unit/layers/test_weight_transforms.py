"""Prescaled weights and RoPE pairs: source and target must compute the same."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import convert
from convert import PlanError, RuleError
from convert.core import ops
from convert.core.tensor_spec import TensorSpec
from convert.layers.transforms.probe import rope_pairs
from convert.layers.weight_keys import parse_factor
from convert.planning.planner import make_plan
from convert.verify.mistakes.catalogue import known_mistakes
from support.memory_source import HEAD, MemorySource, rule_file, run

RULE = """
- einsum: BTD,DNH->BTNH
  from: w
  prescaled_by: {factor}
  rope: {{H: {source}}}
  linear: {{module: q, rope: {target}}}
"""
CONVENTIONS = ("interleaved", "half-split")


def turned(y: np.ndarray, convention: str) -> np.ndarray:
    """RoPE on axes (..., time, heads, features), each pair by an angle of its own, as the definition has it."""
    out = np.empty_like(y)
    for k, (one, other) in enumerate(rope_pairs(y.shape[-1], convention)):
        angle = np.arange(y.shape[-3])[:, None] / 10.0**k
        out[..., one] = y[..., one] * np.cos(angle) - y[..., other] * np.sin(angle)
        out[..., other] = y[..., other] * np.cos(angle) + y[..., one] * np.sin(angle)
    return out


@pytest.mark.slow
@given(
    st.tuples(*(st.integers(1, n) for n in (5, 4, 4))),
    st.sampled_from(CONVENTIONS),
    st.sampled_from(CONVENTIONS),
    st.sampled_from(["1/sqrt(H)", "sqrt(D)", "0.25", "1/3", "N"]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_attention_scores_are_those_of_the_source(
    sizes: tuple[int, int, int], source: str, target: str, factor: str, seed: int
) -> None:
    """Whatever the conventions: turned in the source's pairs or in the target's, scores differ by the factor alone."""
    D, N, half = sizes
    rng = np.random.default_rng(seed)
    w, x = rng.standard_normal((D, N, 2 * half)), rng.standard_normal((6, D))
    plan = make_plan(rule_file(RULE.format(factor=factor, source=source, target=target)), MemorySource({"w": w}))
    made = run(plan)["q.weight"]
    ours = turned(np.einsum("td,dnh->tnh", x, w), source)
    theirs = turned((x @ made.T).reshape(6, N, 2 * half), target) * parse_factor(factor).value(plan.sizes)
    np.testing.assert_allclose(
        np.einsum("tnh,snh->nts", ours, ours), np.einsum("tnh,snh->nts", theirs, theirs), rtol=1e-9, atol=1e-9
    )
    (part,) = plan.steps[0].parts  # and the operations lead back
    back = ops.apply(ops.inverse(part.ops, TensorSpec(w.shape, "float64")), made)
    np.testing.assert_allclose(back, w, rtol=1e-12)


def test_pairs_alone_move_bits() -> None:
    w = np.random.default_rng(0).standard_normal((3, 2, 4)).astype(ml_dtypes.bfloat16)
    text = RULE.format(factor="1", source="interleaved", target="half-split").replace("  prescaled_by: 1\n", "")
    plan = make_plan(rule_file(text), MemorySource({"w": w}))
    assert plan.steps[0].arithmetic == "" and plan.steps[0].layouts == (
        "D N H -> (N H) D, H from interleaved to half-split pairs",
    )
    assert np.array_equal(run(plan)["q.weight"], w[..., [0, 2, 1, 3]].reshape(3, 8).T)


FLAT = """
- einsum: ...D,DE->...E
  from: w
  bias: b
  rope: {AXIS: SOURCE}
  linear: {module: q, rope: TARGET}
"""
FLAT_AXES = "{D: {is: width}, E: {is: all heads, equals: N*H}, N: {is: heads}, H: {is: width of a head, equals: %d}}"


def with_axes(text: str, axes: str) -> Any:
    return rule_file(text, f"{HEAD}axes: {axes}\n")


def flat_rules(axis: str, source: str, target: str, width: int) -> Any:
    text = FLAT.replace("AXIS", axis).replace("SOURCE", source).replace("TARGET", target)
    return with_axes(text, FLAT_AXES % width)


@pytest.mark.parametrize(("heads", "width"), [(2, 8), (3, 10), (5, 4), (7, 6), (13, 2), (1, 6), (4, 4)])
@pytest.mark.parametrize("source", CONVENTIONS)
def test_heads_in_one_axis_are_reordered_one_by_one(heads: int, width: int, source: str) -> None:
    """The rows of a Llama wq of Equinox or Meta's code: all heads in one axis, the features of a head next to each other."""
    target = next(word for word in CONVENTIONS if word != source)
    rng = np.random.default_rng(0)
    w, b = rng.standard_normal((5, heads * width)), rng.standard_normal(heads * width)
    plan = make_plan(flat_rules("H", source, target, width), MemorySource({"w": w, "b": b}))
    made = run(plan)
    half = width // 2
    order = [f + half * p for f in range(half) for p in range(2)]  # row 2f + p of the pairs (0, 1), ... is f + half * p
    order = np.argsort(order).tolist() if source == "interleaved" else order
    rows = [head * width + k for head in range(heads) for k in order]
    assert np.array_equal(made["q.weight"], w.T[rows]) and np.array_equal(made["q.bias"], b[rows])
    assert plan.steps[0].layouts == (f"D E -> E D, each H of E from {source} to {target} pairs",)
    x = rng.standard_normal((6, 5))
    ours = turned((x @ w + b).reshape(6, heads, width), source)
    theirs = turned((x @ made["q.weight"].T + made["q.bias"]).reshape(6, heads, width), target)
    np.testing.assert_allclose(
        np.einsum("tnh,snh->nts", ours, ours), np.einsum("tnh,snh->nts", theirs, theirs), rtol=1e-9, atol=1e-9
    )
    (part,) = plan.steps[0].parts
    assert np.array_equal(ops.apply(ops.inverse(part.ops, TensorSpec(w.shape, "float64")), made["q.weight"]), w)
    assert all(group.rope_axis == "H" for group in plan.shape_ambiguous)
    assert {name for group in plan.shape_ambiguous for name in group.names} == {"q.weight", "q.bias"}


def test_eight_rows_of_two_heads() -> None:
    w = np.arange(16.0).reshape(1, 16)
    rules = flat_rules("H", "interleaved", "half-split", 8)
    made = run(make_plan(rules, MemorySource({"w": w, "b": w[0]})))
    assert made["q.bias"].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


@pytest.mark.parametrize(
    ("axes", "axis", "expected", "got", "fix"),
    [
        (FLAT_AXES % 4, "E", "the axis of one head", "E = N*H", "write `rope: {H: interleaved}`"),
        ("{D: {is: d}, E: {is: e, equals: G*M}, M: {is: m, equals: 2*H}, H: {is: h}, G: {is: g}}", "E", "the axis of one head", "E = G*2*H", "write `rope: {H: interleaved}`"),
        ("{D: {is: d}, E: {is: e, equals: N*64}, N: {is: n}}", "E", "the axis of one head", "E = N*64", "if E is one head, remove its `equals`; otherwise write it as a product that ends with the letter of a head, such as N*H, and `rope: {H: interleaved}`"),
    ],
)  # fmt: skip
def test_an_axis_of_all_heads_is_refused(axes: str, axis: str, expected: str, got: str, fix: str) -> None:
    text = FLAT.replace("AXIS", axis).replace("SOURCE", "interleaved").replace("TARGET", "half-split")
    with pytest.raises(convert.RuleError) as refused:
        with_axes(text, axes)
    (finding,) = refused.value.findings
    assert (finding.code, finding.expected, finding.got, finding.fix) == ("rule-layer-conflict", expected, got, fix)


def test_the_head_is_the_last_factor() -> None:
    axes = "{D: {is: d}, E: {is: e, equals: H*N}, N: {is: n}, H: {is: h}}"
    text = FLAT.replace("AXIS", "H").replace("SOURCE", "interleaved").replace("TARGET", "half-split")
    with pytest.raises(convert.RuleError, match="not the last factor of one of them"):
        with_axes(text, axes)


def test_the_width_of_a_head_must_be_known() -> None:
    axes = "{D: {is: d}, E: {is: e, equals: N*H}, N: {is: n}, H: {is: h}}"
    text = FLAT.replace("AXIS", "H").replace("SOURCE", "interleaved").replace("TARGET", "half-split")
    source = MemorySource({"w": np.zeros((5, 12)), "b": np.zeros(12)})
    with pytest.raises(convert.PlanError, match="nothing gives H a size"):
        make_plan(with_axes(text, axes), source)
    plan = make_plan(with_axes(text, axes), source, settings={"H": 4})
    assert "axis 1 de-interleaved in runs of 4" in map(str, plan.steps[0].parts[0].ops)


def test_a_factor_is_taken_out_in_float32() -> None:
    w = np.random.default_rng(0).standard_normal((3, 2, 6)).astype(ml_dtypes.bfloat16)
    text = RULE.format(factor="1/sqrt(H)", source="half-split", target="half-split")
    plan = make_plan(rule_file(text), MemorySource({"w": w}))
    assert plan.steps[0].arithmetic == "x 2.44949, as the source's weight carries 1/sqrt(H)"
    assert plan.steps[0].loses == "rounded from float32 to bfloat16"
    want = (w.astype(np.float32) * np.float32(np.sqrt(6))).astype(ml_dtypes.bfloat16).reshape(3, 12).T
    assert np.array_equal(run(plan)["q.weight"], want)
    assert {"weight_carries": "1/sqrt(H)", "source_rope": "half-split"}.items() <= plan.layers[0].items()


def test_the_scale_of_a_norm_and_a_bias_follow_their_layer() -> None:
    rng = np.random.default_rng(0)
    tree = {"s": rng.random(4), "w": rng.random((3, 2, 4)), "b": rng.random((2, 4))}
    made = run(make_plan(rule_file("""
- from: s
  multiplies_by: scale
  epsilon: 1e-6
  axes: H
  rope: {H: interleaved}
  rms_norm: q_norm
- einsum: BTD,DNH->BTNH
  from: w
  bias: b
  prescaled_by: 0.5
  rope: {H: interleaved}
  linear: q
"""), MemorySource(tree)))  # fmt: skip
    assert np.array_equal(made["q_norm.weight"], tree["s"][[0, 2, 1, 3]])
    assert np.array_equal(made["q.bias"], 2 * tree["b"][:, [0, 2, 1, 3]].reshape(8))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("prescaled_by: 0.5", "prescaled_by: sqrt(HD)", "r.yaml:7:17: expected a factor other than 0 such as 1/sqrt(H), sqrt(D), 0.125 or -1, not 'sqrt(HD)'"),
        ("prescaled_by: 0.5", "prescaled_by: 0", "r.yaml:7:17: expected a factor other than 0 such as 1/sqrt(H), sqrt(D), 0.125 or -1, not 0"),
        ("prescaled_by: 0.5", "prescaled_by: --1", "not '--1'"),
        ("{H: half-split}", "{H: halves}", "r.yaml:8:13: expected one of interleaved, half-split, got 'halves'"),
        ("{H: half-split}", "{H: half-split, N: half-split}", "r.yaml:5:3: `rope:` names one axis, such as {H: interleaved}, not 2"),
        ("{H: half-split}", "{D: half-split}", "r.yaml:5:3: RoPE rotates D, which is not among the layer's output axes NH, and is not the last factor"),
        ("  rope: {H: half-split}\n", "", "r.yaml:5:3: the target has `rope:` and the rule has none; write the key for the source, too"),
    ],
)  # fmt: skip
def test_errors_in_rules(old: str, new: str, said: str) -> None:
    text = RULE.format(factor="0.5", source="half-split", target="interleaved")
    assert old in text
    with pytest.raises(convert.RuleError) as refused:
        rule_file(text.replace(old, new))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("factor", "shape", "said"),
    [
        ("1/sqrt(Q)", (3, 2, 4), "r.yaml:5: q.weight: the weight is prescaled by 1/sqrt(Q), and no leaf gives Q a size; correct the letter"),
        ("0.5", (3, 2, 5), "float32[3,2,5] -> q.weight: axis 2 of float32[3,2,5] has no pairs"),
    ],
)  # fmt: skip
def test_errors_of_sizes(factor: str, shape: Any, said: str) -> None:
    text = RULE.format(factor=factor, source="interleaved", target="half-split")
    with pytest.raises(convert.PlanError) as refused:
        make_plan(rule_file(text), MemorySource({"w": np.zeros(shape, np.float32)}))
    assert said in str(refused.value)


SCALED = """
- from: w
  axes: D
  prescaled_by: {factor}
  parameter: p
"""


@pytest.mark.parametrize(
    ("factor", "times"), [("1/$f^2", 0.09), ("$f^2", 1 / 0.09), ("1/$f", 0.3), ("$f", 1 / 0.3), ("0.5", 2), ("1/D", 3)]
)
def test_a_parameter_without_the_factor_of_a_fact(factor: str, times: float) -> None:
    w = np.asarray([1.0, -2.0, 5.0])
    rules = rule_file(SCALED.format(factor=factor), f"{HEAD}facts: {{f: 0.3}}\n")
    plan = make_plan(rules, MemorySource({"w": w}))
    np.testing.assert_allclose(run(plan)["p"], times * w, rtol=1e-12)
    assert plan.layers[0]["weight_carries"] == factor


@pytest.mark.parametrize(
    ("factor", "facts", "said"),
    [
        ("1/$g^2", "{f: 1}", "refers to 'g'"),
        ("1/$f^2", "{f: 0}", "f is 0; give a number above 0 with --set f=..."),
        ("1/$f^2", "{f: ask}", "f is None; give a number above 0 with --set f=..."),
        ("1/$f^2", "{f: [1, 2]}", "give a number above 0"),
        ("sqrt($f)^2", "{f: 1}", "expected a factor other than 0"),
        ("$f^3", "{f: 1}", "expected a factor other than 0"),
    ],
)
def test_a_fact_that_gives_no_factor(factor: str, facts: str, said: str) -> None:
    with pytest.raises((PlanError, RuleError)) as refused:
        make_plan(rule_file(SCALED.format(factor=factor), f"{HEAD}facts: {facts}\n"), MemorySource({"w": np.ones(3)}))
    assert said in str(refused.value)


@pytest.mark.parametrize("factor", ["-1", "{-1: [2]}", "-1/sqrt(H)"])
def test_a_negative_factor(factor: str) -> None:
    """A gate 1 - z where the source has z: its weight and its bias have the other sign, there and back, bit by bit."""
    rng = np.random.default_rng(0)
    tree = {"w": rng.standard_normal((3, 8)).astype(np.float32), "b": rng.standard_normal(8).astype(np.float32)}
    axes = "(H + H)" if "[" in factor else "H"
    rules = rule_file(
        f"- einsum: '...D,D{axes}->...{axes}'\n  from: w\n  bias: b\n  prescaled_by: {factor}\n  linear: {{module: x, axes: '{axes}D'}}"
    )
    plan = make_plan(rules, MemorySource(tree))
    made = run(plan)
    sign = np.repeat([1, -1], 4) if "[" in factor else np.full(8, -np.sqrt(8) if "H" in factor else -1)
    assert np.allclose(made["x.weight"], sign[:, None] * tree["w"].T) and np.allclose(made["x.bias"], sign * tree["b"])
    names = {mistake.name for step in plan.steps for mistake in known_mistakes(step, plan)}
    assert ("prescale applied twice" in names) == ("H" in factor), "the other sign twice is the same"
