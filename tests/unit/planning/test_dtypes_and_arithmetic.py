"""Dtypes and the arithmetic of norms, against exact numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from support.memory_source import HEAD, run, zeros
from support.small_plans import BF16, findings, plan


def test_dtype_override_leaves_integers_alone() -> None:
    tree = {
        "f": np.ones(2, np.float32),
        "b": np.ones(2, BF16),
        "i": np.ones(2, np.int32),
        "u": np.ones(2, np.uint8),
        "t": np.ones(2, bool),
        "x": np.ones(2, ml_dtypes.int4),
        "k": np.ones(2, np.float32),
    }
    rules = "".join(f"- from: {n}\n  parameter: {n}\n" for n in tree) + "  dtype: float16\n"
    dtypes = {step.name: step.spec.dtype for step in plan(rules, tree, dtype="bfloat16").steps}
    assert dtypes == {
        "f": "bfloat16",
        "b": "bfloat16",
        "i": "int32",
        "u": "uint8",
        "t": "bool",
        "x": "int8",  # safetensors has no int4
        "k": "float16",  # the rule's word counts more
    }
    made = plan(rules, tree)
    assert {step.name: step.spec.dtype for step in made.steps} == {**dtypes, "f": "float32"}
    assert {s.name: s.loses for s in made.steps if s.loses} == {"k": "rounded from float32 to float16"}
    for name, array in run(made).items():
        assert array.dtype.name == {**dtypes, "f": "float32"}[name]
        assert array.astype(np.float32).tolist() == [1, 1]


def test_int4_becomes_int8_value_by_value() -> None:
    values = np.arange(-8, 8, dtype=np.int8)
    made = plan("- from: w\n  parameter: p", {"w": values.astype(ml_dtypes.int4)})
    assert run(made)["p"].tolist() == values.tolist()
    assert made.steps[0].loses == ""


def test_dtypes_that_safetensors_cannot_hold() -> None:
    assert findings("- from: w\n  parameter: p", {"w": np.zeros(2, np.complex128)}) == [
        "r.yaml:5: w: complex128[2] -> p: safetensors cannot hold complex128"
    ]
    assert findings("- from: w\n  dtype: int4\n  parameter: p", {"w": np.zeros(2, np.float32)}) == [
        "r.yaml:5: w: float32[2] -> p: safetensors cannot hold int4; choose another `dtype:`"
    ]
    assert findings("- from: w\n  dtype: float32\n  parameter: p", {"w": np.zeros(2, np.complex64)}) == [
        "r.yaml:5: w: complex64[2] -> p: complex64 as float32 would lose the imaginary part"
    ]


NORM = "- from: w\n  multiplies_by: %s\n  epsilon: 1e-6\n  rms_norm: {module: n, multiplies_by: %s}"


def rounded(value: Fraction, bits: int) -> Fraction:
    """The nearest number with a significand of so many bits, ties to even; no matter of range."""
    if value == 0:
        return value
    exponent = math.floor(math.log2(abs(value))) - bits + 1
    while abs(value) >= Fraction(2) ** (exponent + bits):
        exponent += 1
    unit = Fraction(2) ** exponent
    return round(value / unit) * unit  # Python rounds ties to even


def test_one_plus_scale_is_added_in_float32_and_then_cast() -> None:
    scale = np.random.default_rng(0).standard_normal(3000) * 0.05
    scale = np.concatenate([scale, [2.0**-9, 3 * 2.0**-9, 2.0**-8, -(2.0**-9), 2.0**-30, 0.0]]).astype(BF16)
    made = plan(NORM % ("1+scale", "weight"), {"w": scale})
    (step,) = made.steps
    assert (step.arithmetic, step.spec.dtype, step.loses) == ("+ 1", "bfloat16", "rounded from float32 to bfloat16")
    assert [str(op) for op in step.parts[0].ops] == ["to float32", "+ 1", "to bfloat16"]
    exact = [rounded(rounded(Fraction(float(v)) + 1, 24), 8) for v in scale]
    assert [Fraction(float(v)) for v in run(made)["n.weight"]] == exact
    # Kept in float32, the scale survives, and the plan says that nothing is lost.
    wide = plan(NORM % ("1+scale", "weight") + "\n  dtype: float32", {"w": scale})
    assert (wide.steps[0].spec.dtype, wide.steps[0].loses) == ("float32", "")
    assert [Fraction(float(v)) for v in run(wide)["n.weight"]] == [rounded(Fraction(float(v)) + 1, 24) for v in scale]


def test_folding_in_bfloat16_shows_why() -> None:
    """Multiplied by 3, two scales that differ by 10 % become one: the note on the plan is not idle."""
    scale = np.array([0.0101, 0.0111], BF16)
    folded = run(plan(NORM % ("1+scale", "weight"), {"w": scale}))["n.weight"]
    assert scale[0] != scale[1]
    assert folded[0] == folded[1]


@pytest.mark.parametrize(
    ("source", "target", "arithmetic", "offset"),
    [
        ("scale", "weight", "", 0),
        ("1+scale", "weight", "+ 1", 1),
        ("scale", "1+weight", "- 1", -1),
        ("1+scale", "1+weight", "", 0),
    ],
)
def test_both_sides_state_what_they_multiply_by(source: str, target: str, arithmetic: str, offset: int) -> None:
    scale = np.array([0.25, -0.5, 1.0], np.float32)
    made = plan(NORM % (source, target), {"w": scale})
    assert made.steps[0].arithmetic == arithmetic
    assert run(made)["n.weight"].tolist() == (scale + offset).tolist()
    assert made.layers[0]["source_multiplies_by"] == source
    assert made.layers[0]["target_multiplies_by"] == target


def test_a_bias_of_a_norm_is_not_added_to() -> None:
    rule = "- from: s\n  bias: b\n  multiplies_by: 1+scale\n  epsilon: 1e-6\n  layer_norm: n"
    out = run(plan(rule, {"s": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}))
    assert (out["n.weight"].tolist(), out["n.bias"].tolist()) == ([1, 1], [0, 0])


def test_arithmetic_on_integers_is_refused() -> None:
    assert findings(NORM % ("1+scale", "weight"), {"w": np.zeros(3, np.int32)}) == [
        "r.yaml:5: w: int32[3] -> n.weight: + 1 needs floating-point values"
    ]


def test_float64_is_computed_in_float64() -> None:
    out = run(plan(NORM % ("1+scale", "weight"), {"w": np.array([2.0**-40])}))
    assert out["n.weight"].tolist() == [1 + 2.0**-40]


def test_activation_of_a_layer_is_a_fact() -> None:
    rule = "- einsum: ...D,DF->...F\n  from: w\n  activation: gelu_tanh\n  linear: m"
    made = plan(rule, zeros(w=(7, 11)))
    assert made.layers == ({"layer": "m", "kind": "linear", "activation": "gelu_tanh"},)
    assert plan(rule.replace("  activation: gelu_tanh\n", ""), zeros(w=(7, 11))).layers == ()


def test_epsilon_of_a_layer_is_the_fact() -> None:
    rule = NORM.replace("1e-6", "$eps") % ("scale", "weight")
    head = HEAD + "facts: {eps: 1e-5}\n"
    assert plan(rule, zeros(w=(2,)), head).layers[0]["epsilon"] == 1e-5
    assert plan(rule, zeros(w=(2,)), head, settings={"eps": 1e-3}).layers[0]["epsilon"] == 1e-3
