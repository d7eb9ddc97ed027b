"""Prescaled weights and RoPE pairs: source and target must compute the same."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import convert
from convert.core import ops
from convert.core.tensor_spec import TensorSpec
from convert.layers.transforms.probe import rope_pairs
from convert.layers.weight_keys import parse_factor
from convert.planning.planner import make_plan
from support.memory_source import MemorySource, rule_file, run

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
        ("prescaled_by: 0.5", "prescaled_by: sqrt(HD)", "r.yaml:7:17: expected a factor above 0 such as 1/sqrt(H), sqrt(D) or 0.125, not 'sqrt(HD)'"),
        ("prescaled_by: 0.5", "prescaled_by: 0", "r.yaml:7:17: expected a factor above 0 such as 1/sqrt(H), sqrt(D) or 0.125, not 0"),
        ("prescaled_by: 0.5", "prescaled_by: -1.5", "not -1.5"),
        ("{H: half-split}", "{H: halves}", "r.yaml:8:13: expected one of interleaved, half-split, got 'halves'"),
        ("{H: half-split}", "{H: half-split, N: half-split}", "r.yaml:5:3: `rope:` names one axis, such as {H: interleaved}, not 2"),
        ("{H: half-split}", "{D: half-split}", "r.yaml:5:3: RoPE rotates D, which is not among the layer's output axes NH"),
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
        ("0.5", (3, 2, 5), "r.yaml:5: w: float32[3,2,5] -> q.weight: axis 2 of float32[3,2,5] has no pairs"),
    ],
)  # fmt: skip
def test_errors_of_sizes(factor: str, shape: Any, said: str) -> None:
    text = RULE.format(factor=factor, source="interleaved", target="half-split")
    with pytest.raises(convert.PlanError) as refused:
        make_plan(rule_file(text), MemorySource({"w": np.zeros(shape, np.float32)}))
    assert said in str(refused.value)
