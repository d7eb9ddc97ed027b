"""Every known mistake is a tensor that could have been written; and a tensor that was written with a mistake is found by it."""

from __future__ import annotations

import numpy as np
import pytest

from convert.core.tensor_spec import is_float
from convert.layers.base import Step
from convert.layers.step_tensor import expected
from convert.numerics.bits import nearly, same_bits
from convert.planning.plan import Plan
from convert.planning.planner import make_plan
from convert.verify.mistakes.catalogue import group_mistakes, known_mistakes
from convert.verify.sides.float64_plan import float64_plan
from support.memory_source import MemorySource, rule_file

RULES = """
- embedding: embed
  from: embed/table
  axes: VD
- einsum: ...D,DNH->...NH
  from: layers_{i}/{query,key}/w
  bias: layers_{i}/{query,key}/b
  linear: layers.{i}.qk
- einsum: ...D,DNH->...NH
  from: value
  linear: value
- einsum: ...D,DF->...F
  from: first
  plus: {einsum: "...D,DR,RF->...F", from: lora/a, times: lora/b, scale: 4/R}
  linear: first
- einsum: ...D,DF->...F
  from: flat
  flattened: {D: YXC}
  linear: flat
- einsum: ...D,DF->...F
  from: normed/kernel
  weight_norm: normed/scale
  linear: normed
- einsum: ...TD,GDF->G...TF
  from: gated/w
  bias: gated/b    # [G, 1, 1, F]: axes of size 1 that no letter names
  linear: "gated.{one,two}"
- from: norm/scale
  bias: norm/bias
  multiplies_by: 1+scale
  epsilon: 1e-6
  layer_norm: norm
- from: batch/scale
  bias: batch/bias
  mean: batch/mean
  var: batch/var
  multiplies_by: scale
  epsilon: 1e-5
  batch_norm: batch
- dimension_numbers: NHWC,HWIO->NHWC
  axes: PQIO
  from: conv
  weight_standardization: (w - mean) / (std + 1e-5)
  conv: conv
- dimension_numbers: NHWC,HWIO->NHWC
  axes: PQIO
  from: up
  conv_transpose: up
- einsum: "...D,D(K N H)->...(K N H)"
  from: fused
  linear: fused
- cell: flax.linen.GRUCell
  from: gru
  gru: gru
- cubic_spline: path
  from: path
"""
HEAD = "model: m\ntitle: M\naxes: {Y: {is: height, equals: 2}, X: {is: width, equals: 2}, C: {is: channels, equals: 2}, K: {is: parts, equals: 3}, N: {is: heads, equals: 2}, H: {is: width of a head, equals: 4}}\ntargets: {torch: {loads: T}}\n"


def tree() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embed/table": (6, 8),
        "value": (8, 2, 4),
        "first": (8, 8),
        "lora/a": (8, 2),
        "lora/b": (2, 8),
        "flat": (8, 8),
        "fused": (8, 24),
        "gated/w": (2, 8, 8),
        "gated/b": (2, 1, 1, 8),
        "normed/kernel": (8, 8),
        "normed/scale": (8,),
        "conv": (3, 3, 4, 4),
        "up": (3, 3, 4, 4),
    }
    for i in range(2):
        for name in ("query", "key"):
            shapes |= {f"layers_{i}/{name}/w": (8, 2, 4), f"layers_{i}/{name}/b": (2, 4)}
    shapes |= {f"norm/{name}": (8,) for name in ("scale", "bias")}
    shapes |= {f"batch/{name}": (8,) for name in ("scale", "bias", "mean", "var")}
    for gate in "rzn":
        shapes |= {f"gru/i{gate}/kernel": (4, 4), f"gru/i{gate}/bias": (4,), f"gru/h{gate}/kernel": (4, 4)}
    shapes["gru/hn/bias"] = (4,)
    shapes |= {f"path/coeffs/{k}": (4, 4, 2) for k in range(4)}
    shapes["path/ts"] = (5,)
    return {name: rng.uniform(0.5, 2, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(rule_file(RULES, HEAD), MemorySource(tree()))


def step(plan: Plan, name: str) -> Step:
    return next(step for step in plan.steps if step.name == name)


def test_every_mistake_gives_a_tensor_that_could_have_been_written(plan: Plan) -> None:
    for step in plan.steps:
        for mistake in known_mistakes(step, plan):
            made = mistake.make()
            assert made.shape == step.spec.shape and made.dtype.name == step.spec.dtype, (step.name, mistake.name)
            assert mistake.gives and mistake.instead and mistake.converse


def test_every_mistake_can_be_made_of_the_plan_in_float64(plan: Plan) -> None:
    """The diagnosis tries the mistakes there."""
    exact = float64_plan(plan)
    for step in exact.steps:
        for mistake in known_mistakes(step, exact):
            made = mistake.make()
            assert made.shape == step.spec.shape and made.dtype.name == step.spec.dtype, (step.name, mistake.name)


def test_a_mistake_gives_another_tensor(plan: Plan) -> None:
    """Except mistakes with rounding, which the values may hide, and with a bias that flax's GRU has for one gate of three."""
    for step in plan.steps:
        if step.name == "gru.bias_hh_l0":
            continue
        right = expected(step, plan.source) if step.parts else np.zeros(())
        for mistake in known_mistakes(step, plan):
            assert mistake.rounding or not same_bits(mistake.make(), right), (step.name, mistake.name, mistake.gives)


@pytest.mark.parametrize(
    ("tensor", "names"),
    [
        ("embed.weight", {"weight rescaled although the source does not prescale it"}),
        ("layers.0.qk.weight", {"fused parts in another order", "of another layer", "axes of a head swapped"}),
        ("layers.0.qk.bias", {"bias dropped", "fused parts in another order"}),
        (
            "value.weight",
            {"transposed", "RoPE pairs de-interleaved needlessly", "flattened in another order needlessly"},
        ),
        ("first.weight", {"LoRA pair not merged", "LoRA pair merged twice", "another scale of a pair", "transposed"}),
        ("flat.weight", {"flattened in the source's order"}),
        ("normed.weight", {"normalisation of the weight left out"}),
        ("gated.one.bias", {"RoPE pairs de-interleaved needlessly", "bias dropped"}),
        ("norm.weight", {"1+scale missing", "1+scale doubled", "folded in bfloat16"}),
        ("batch.running_mean", {"mean and variance exchanged"}),
        ("batch.running_var", {"standard deviation for the variance"}),
        ("conv.weight", {"kernel flipped", "standardisation left out", "epsilon on the other side of the root"}),
        (
            "up.weight",
            {"kernel flipped", "transpose_kernel the other way round", "input and output channels exchanged"},
        ),
        ("gru.weight_ih_l0", {"gates in another order", "update gate polarity", "transposed"}),
        ("gru.bias_ih_l0", {"b_hn folded into b_in", "input and hidden tensors exchanged"}),
        ("path._three_d", {"factors 2 and 3 missing", "time axis exchanged with another one"}),
    ],
)
def test_which_mistakes_are_tried(tensor: str, names: set[str], plan: Plan) -> None:
    found = {mistake.name for mistake in known_mistakes(step(plan, tensor), plan)}
    assert names <= found, sorted(found)


def test_mistakes_with_equal_keys_are_made_in_all_tensors_of_a_layer(plan: Plan) -> None:
    by_tensor = [
        {(mistake.name, mistake.key) for mistake in group_mistakes(step, plan) if mistake.key}
        for step in plan.steps
        if step.group is not None and step.group.module == "gru"
    ]
    assert len(by_tensor) == 4
    assert ("update gate polarity", "z") in set.intersection(*by_tensor)


def test_a_scale_that_lost_its_one_is_found_up_to_rounding(plan: Plan) -> None:
    norm = step(plan, "norm.weight")
    written = expected(norm, plan.source) - np.float32(1)
    (first, *_) = [m for m in known_mistakes(norm, plan) if same_bits(written, m.make()) or nearly(written, m.make())]
    assert first.name == "1+scale missing" and is_float(norm.spec.dtype)


def test_the_fact_of_a_factor_is_the_one_that_the_rule_names() -> None:
    """Another fact may have the same number by chance: it is named second, and as the same number."""
    head = "model: m\ntitle: M\ntargets: {torch: {loads: T}}\nfacts: {ratio: 2, value: 0.5}\n"
    rules = "- from: scale\n  axes: D\n  prescaled_by: 1/$value\n  parameter: scale"
    (step,) = (plan := make_plan(rule_file(rules, head), MemorySource({"scale": np.ones(4, np.float32)}))).steps
    made = "the weight without the factor 1/$value"
    found = {m.gives: m.instead for m in known_mistakes(step, plan) if "the same number" in m.gives}
    assert found == {
        "the weight without a factor $value^2 (the same number as 1/$ratio^2), as if the source had folded it in": made,
        "the weight without a factor 1/$value^2 (the same number as $ratio^2), as if the source had folded it in": made,
        "the weight without a factor $value (the same number as 1/$ratio), as if the source had folded it in": made,
    }
