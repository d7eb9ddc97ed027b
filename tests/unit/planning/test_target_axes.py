"""`axes` of a target: another order of the axes, axes of size 1 that are added or left out, and axes that are joined."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert import PlanError, RuleError
from convert.planning.planner import make_plan
from convert.writing.scatter import destination_view
from support.memory_source import HEAD, MemorySource, rule_file, run

PRIMES = st.sampled_from([2, 3, 5, 7])


def planned(rules: str, tree: dict[str, np.ndarray], header: str = HEAD) -> dict[str, np.ndarray]:
    """The tensors of the plan; each leaf is streamed directly to its place."""
    plan = make_plan(rule_file(rules, header), MemorySource(tree))
    for step in plan.steps:
        for part in step.parts:
            region = np.empty(step.spec.shape, step.spec.dtype)
            assert destination_view(part.ops, plan.source.leaves[part.leaf].spec, part.share(region)) is not None
    return run(plan)


def numbers(*shape: int) -> np.ndarray:
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_order_of_a_parameter(data: st.DataObject) -> None:
    letters = "ABCD"[: data.draw(st.integers(1, 4))]
    shape = [data.draw(PRIMES) for _ in letters]
    order = "".join(data.draw(st.permutations(letters)))
    units = data.draw(st.lists(st.integers(0, len(order)), max_size=3))
    written = order
    for at in sorted(units, reverse=True):
        written = written[:at] + "." + written[at:]
    x = numbers(*shape)
    made = planned(f'- from: w\n  axes: {letters}\n  parameter: {{name: p, axes: "{written}"}}', {"w": x})["p"]
    want = np.einsum(f"{letters}->{order}", x)
    for at, letter in enumerate(written):
        want = np.expand_dims(want, at) if letter == "." else want
    np.testing.assert_array_equal(made, want)


@pytest.mark.parametrize("order", list(itertools.permutations("TNH")))
def test_axes_that_are_joined_and_taken_apart(order: tuple[str, ...]) -> None:
    a, b, c = order
    x = numbers(5, 3 * 2)
    header = f"{HEAD}axes: {{N: {{is: heads, equals: 3}}}}\n"
    made = planned(f'- from: w\n  axes: T(N H)\n  parameter: {{name: p, axes: "{a}.({b} {c})"}}', {"w": x}, header)["p"]
    want = np.einsum(f"TNH->{a}{b}{c}", x.reshape(5, 3, 2))
    np.testing.assert_array_equal(made, want.reshape(want.shape[0], 1, -1))


def test_a_parameter_is_split_and_joins_nothing_by_itself() -> None:
    x = numbers(7, 2)
    header = f"{HEAD}axes: {{A: {{is: a, equals: 3}}}}\n"
    made = planned('- from: w\n  axes: (A + B)D\n  parameter: "{one,two}"', {"w": x}, header)
    np.testing.assert_array_equal(made["one"], x[:3])
    np.testing.assert_array_equal(made["two"], x[3:])
    made = planned('- from: w\n  axes: D(C F)\n  parameter: {name: "{C:a,b}", axes: .FD}', {"w": numbers(2, 6)})
    np.testing.assert_array_equal(made["b"], numbers(2, 6)[:, 3:].T[None])
    kept = planned(
        "- from: w\n  axes: D(C F)\n  parameter: whole",
        {
            "w": x,
        },
        f"{HEAD}axes: {{C: {{is: c, equals: 1}}}}\n",
    )
    np.testing.assert_array_equal(kept["whole"], x)


@settings(max_examples=20, deadline=None)
@given(PRIMES, PRIMES, st.integers(1, 3))
def test_a_dense_layer_is_a_convolution_of_one_tap(d: int, f: int, rank: int) -> None:
    w, b = numbers(d, f), numbers(f)
    rules = f'- einsum: "...D,DF->...F"\n  from: w\n  bias: b\n  linear: {{module: m, axes: FD{"." * rank}}}'
    made = planned(rules, {"w": w, "b": b})
    np.testing.assert_array_equal(made["m.weight"], w.T.reshape(f, d, *[1] * rank))
    np.testing.assert_array_equal(made["m.bias"], b)


@settings(max_examples=20, deadline=None)
@given(PRIMES, PRIMES)
def test_a_convolution_of_one_tap_is_a_linear(i: int, o: int) -> None:
    w, b = numbers(1, 1, i, o), numbers(o)
    rules = "- dimension_numbers: NHWC,HWIO->NHWC\n  axes: PQIO\n  from: w\n  bias: b\n  conv: {module: m, axes: OI}"
    made = planned(rules, {"w": w, "b": b})
    np.testing.assert_array_equal(made["m.weight"], w[0, 0].T)
    np.testing.assert_array_equal(made["m.bias"], b)


def test_patches_that_a_linear_embeds() -> None:
    w = numbers(2, 3, 5, 7)
    rules = '- dimension_numbers: NHWC,HWIO->NHWC\n  axes: PQIO\n  from: w\n  conv: {module: m, axes: "O(P Q I)"}'
    np.testing.assert_array_equal(planned(rules, {"w": w})["m.weight"], w.reshape(-1, 7).T)


@settings(max_examples=20, deadline=None)
@given(PRIMES, PRIMES, PRIMES)
def test_a_fused_target_whose_code_has_another_order(d: int, n: int, h: int) -> None:
    w, b = numbers(d, n * 3 * h), numbers(n * 3 * h)
    rules = '- einsum: "...D,D(N C H)->...(N C H)"\n  from: w\n  bias: b\n  linear: {module: qkv, axes: "(C N H)D"}'
    header = f"{HEAD}axes: {{N: {{is: heads, equals: {n}}}, C: {{is: q k v, equals: 3}}}}\n"
    made = planned(rules, {"w": w, "b": b}, header)
    np.testing.assert_array_equal(made["qkv.weight"], np.einsum("dnch->cnhd", w.reshape(d, n, 3, h)).reshape(-1, d))
    np.testing.assert_array_equal(made["qkv.bias"], np.einsum("nch->cnh", b.reshape(n, 3, h)).reshape(-1))


@pytest.mark.parametrize(
    ("rules", "shape", "code", "said"),
    [
        ("- from: w\n  parameter: {name: p, axes: .D}", (3,), "rule-layer-conflict", "give the rule `axes`"),
        ("- from: w\n  axes: D\n  parameter: {name: p, axes: .E}", (3,), "rule-layer-conflict", "name E, and the leaf has the axes D"),
        ("- from: w\n  axes: TD\n  parameter: {name: p, axes: .D}", (2, 3), "rule-layer-conflict", "leave out T"),
        ("- from: w\n  axes: TD\n  parameter: {name: p, axes: TDD}", (2, 3), "rule-wrong-value", "different letters"),
        ("- from: w\n  axes: TD\n  parameter: {name: p, axes: (T + D)}", (2, 3), "rule-layer-conflict", "has 2 parts, and the rule has 1 for it"),
        ("- from: w\n  axes: .D\n  parameter: {name: p, axes: D}", (2, 3), "shape-mismatch", "size 1 where there is a dot"),
        ("- dimension_numbers: NHWC,HWIO->NHWC\n  axes: PQIO\n  from: w\n  conv: {module: m, axes: OI}", (1, 3, 5, 7), "shape-mismatch", "Q has 3 elements, and the target's axes O I leave it out"),
        ('- einsum: "...D,DF->...F"\n  from: "{w,v}"\n  linear: {module: m, axes: FD..}', (2, 3), "rule-layer-conflict", "it is not fused"),
        ('- einsum: "...D,DF->...F"\n  from: w\n  linear: {module: m, axes: F...}', (2, 3), "rule-layer-conflict", "leave out D"),
    ],
)  # fmt: skip
def test_what_is_refused(rules: str, shape: tuple[int, ...], code: str, said: str) -> None:
    with pytest.raises((PlanError, RuleError)) as error:
        make_plan(rule_file(rules), MemorySource({"w": np.zeros(shape, np.float32)}))
    assert (code, said in str(error.value)) == (error.value.findings[0].code, True), error.value
