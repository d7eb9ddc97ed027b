"""Axes that are made of others, as einops writes them: ``(N C H)``, ``(N H + K H + K H)``; and axes that the target's names list."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from convert import PlanError, RuleError
from convert.core.axis_groups import parse_group
from convert.core.ops import Deinterleave
from convert.planning.planner import make_plan
from convert.writing.execute import Result, execute
from convert.writing.scatter import destination_view
from support.memory_source import HEAD, MemorySource, rule_file, run

PRIMES = st.sampled_from([1, 2, 3, 5, 7])
SIZES = "model: m\ntitle: M\ntargets: {torch: {loads: T}}\naxes:\n"


def head(**sizes: int) -> str:
    return SIZES + "".join(f"  {x}: {{is: size, equals: {n}}}\n" for x, n in sizes.items())


def numbers(*shape: int) -> np.ndarray:
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


def planned(rules: str, tree: dict[str, np.ndarray], header: str = HEAD) -> dict[str, np.ndarray]:
    """The tensors of the plan; each leaf is streamed directly to its place."""
    plan = make_plan(rule_file(rules, header), MemorySource(tree))
    for step in plan.steps:
        for part in step.parts:
            region = np.empty(step.spec.shape, step.spec.dtype)
            assert destination_view(part.ops, plan.source.leaves[part.leaf].spec, part.share(region)) is not None
    return run(plan)


def refused(rules: str, tree: dict[str, np.ndarray], header: str = HEAD) -> str:
    with pytest.raises((PlanError, RuleError)) as error:
        make_plan(rule_file(rules, header), MemorySource(tree))
    return f"{[finding.code for finding in error.value.findings]} {error.value}"


# ---- the notation


@pytest.mark.parametrize(
    ("text", "shown", "terms"),
    [
        ("(N C H)", "(N C H)", ("NCH",)),
        ("(NH)", "(N H)", ("NH",)),
        ("(N H + K H + K J)", "(N H + K H + K J)", ("NH", "KH", "KJ")),
        ("(K (G+1+1) H)", "(K (G + 1 + 1) H)", ("KGH", "KH", "KH")),
        ("((A + B) H)", "((A + B) H)", ("AH", "BH")),
        ("(N (H + J))", "(N (H + J))", ("NH", "NJ")),
    ],
)
def test_groups(text: str, shown: str, terms: tuple[str, ...]) -> None:
    group = parse_group(text)
    assert (str(group), group.terms, parse_group(str(group))) == (shown, terms, group)


@pytest.mark.parametrize("text", ["()", "(N +)", "(N N)", "(N (C H))", "(A (B + C) + D)", "(A (B + (C + D)))", "(2 N)"])
def test_what_is_no_group(text: str) -> None:
    with pytest.raises(ValueError, match=r"letter|sum"):
        parse_group(text)


@pytest.mark.parametrize(
    ("equation", "said"),
    [
        ("...D,D(C F)->...CF", "is an axis of the weight alone"),
        ("...D,D(C F)->...(F C)", "is not an axis of the weight"),
        ("...D,D(C F->...(C F)", "'(' without ')'"),
        ("...D,DC F)->...(C F)", "')' without '('"),
        ("...D,(A + B)(C + D)->...(A + B)(C + D)", "are both sums"),
        ("...D,D(D F)->...(D F)", "occurs twice"),
    ],
)
def test_equations_with_groups_that_are_refused(equation: str, said: str) -> None:
    with pytest.raises(RuleError) as error:
        rule_file(f'- einsum: "{equation}"\n  from: w\n  linear: m')
    assert said in str(error.value)
    assert "r.yaml:5" in str(error.value)


# ---- one leaf, several modules


@settings(max_examples=25, deadline=None)
@given(PRIMES, PRIMES, PRIMES)
def test_a_flat_leaf_is_split_among_modules(d: int, f: int, layers: int) -> None:
    w, b = numbers(layers, d, 2 * f), numbers(layers, 2 * f)
    rules = '- einsum: "...D,D(C F)->...(C F)"\n  from: w\n  bias: b\n  stacked: {i: 0}\n  linear: "{i}.{gate,up}"'
    made = planned(rules, {"w": w, "b": b})
    for i in range(layers):
        for c, name in enumerate(("gate", "up")):
            np.testing.assert_array_equal(made[f"{i}.{name}.weight"], w[i].reshape(d, 2, f)[:, c].T)
            np.testing.assert_array_equal(made[f"{i}.{name}.bias"], b[i].reshape(2, f)[c])


@settings(max_examples=25, deadline=None)
@given(PRIMES, PRIMES, PRIMES)
def test_the_name_of_a_letter_says_which_axis_is_split(d: int, n: int, h: int) -> None:
    w, b = numbers(d, 3 * n * h), numbers(3 * n * h)
    rules = '- einsum: "...D,D(N C H)->...(N C H)"\n  from: w\n  bias: b\n  linear: "attn.{C:q,k,v}_proj"'
    made = planned(rules, {"w": w, "b": b}, head(N=n))
    for c, name in enumerate("qkv"):
        want = np.einsum("dnh->nhd", w.reshape(d, n, 3, h)[:, :, c]).reshape(n * h, d)
        np.testing.assert_array_equal(made[f"attn.{name}_proj.weight"], want)
        np.testing.assert_array_equal(made[f"attn.{name}_proj.bias"], b.reshape(n, 3, h)[:, c].reshape(-1))


@settings(max_examples=25, deadline=None)
@given(PRIMES, PRIMES, PRIMES, PRIMES, st.booleans())
def test_unequal_parts(d: int, n: int, k: int, h: int, rows_first: bool) -> None:
    w, b = numbers((n + 2 * k) * h, d), numbers((n + 2 * k) * h)
    stored = w if rows_first else w.T
    weight = "(N H + K H + K H)D" if rows_first else "D(N H + K H + K H)"
    rules = f'- einsum: "...D,{weight}->...(N H + K H + K H)"\n  from: w\n  bias: b\n  linear: "{{q,k,v}}"'
    made = planned(rules, {"w": np.ascontiguousarray(stored), "b": b}, head(N=n, H=h))
    for name, values, want in zip("qkv", np.split(w, [n * h, (n + k) * h]), np.split(b, [n * h, (n + k) * h]), strict=True):  # fmt: skip
        np.testing.assert_array_equal(made[f"{name}.weight"], values)
        np.testing.assert_array_equal(made[f"{name}.bias"], want)


@settings(max_examples=25, deadline=None)
@given(PRIMES, PRIMES, PRIMES, PRIMES)
def test_parts_within_each_group_of_heads(d: int, k: int, g: int, h: int) -> None:
    """InternLM2, Falcon, Megatron: for each key head its queries, the key and the value."""
    w = numbers(d, k * (g + 2) * h)
    rules = '- einsum: "...D,D(K (G + 1 + 1) H)->...(K (G + 1 + 1) H)"\n  from: w\n  linear: "{q,k,v}"'
    made = planned(rules, {"w": w}, head(K=k, H=h))
    apart = w.reshape(d, k, g + 2, h)
    for name, values in (("q", apart[:, :, :g]), ("k", apart[:, :, g]), ("v", apart[:, :, g + 1])):
        np.testing.assert_array_equal(made[f"{name}.weight"], values.reshape(d, -1).T)


@settings(max_examples=15, deadline=None)
@given(PRIMES, PRIMES, PRIMES)
def test_parts_of_the_input_and_parts_of_an_axis_that_is_not_flat(d: int, a: int, b: int) -> None:
    w, heads = numbers(a + b, d), numbers(d, a + b, 2)
    rules = '- einsum: "...(A + B),(A + B)D->...D"\n  from: w\n  linear: "{h,x}"\n'
    rules += '- einsum: "...D,D(A + B)H->...(A + B)H"\n  from: heads\n  linear: "{k,v}"'
    made = planned(rules, {"w": w, "heads": heads}, head(A=a))
    np.testing.assert_array_equal(made["h.weight"], w[:a].T)
    np.testing.assert_array_equal(made["x.weight"], w[a:].T)
    np.testing.assert_array_equal(made["k.weight"], heads[:, :a].reshape(d, -1).T)
    np.testing.assert_array_equal(made["v.weight"], heads[:, a:].reshape(d, -1).T)


def test_each_expert_is_a_module_or_none_is() -> None:
    w = numbers(3, 2, 5)
    targets = "model: m\ntitle: M\ntargets: {apart: {loads: T}, together: {loads: T}}\n"
    whole = '{module: experts, einsum: "E...D,EFD->E...F"}'
    rules = rule_file(
        f'- einsum: "E...D,EDF->E...F"\n  from: w\n  linear: {{apart: "experts.{{E}}", together: {whole}}}', targets
    )
    made = run(make_plan(rules, MemorySource({"w": w}), to="apart"))
    assert sorted(made) == [f"experts.{e}.weight" for e in range(3)]
    for e in range(3):
        np.testing.assert_array_equal(made[f"experts.{e}.weight"], w[e].T)
    together = run(make_plan(rules, MemorySource({"w": w}), to="together"))
    np.testing.assert_array_equal(together["experts.weight"], w.swapaxes(1, 2))


def test_a_fused_target_keeps_the_parts_in_their_order() -> None:
    w = numbers(2, 7 * 3)
    targets = "model: m\ntitle: M\ntargets: {apart: {loads: T}, fused: {loads: T}}\naxes: {N: {is: heads, equals: 3}, H: {is: width, equals: 3}}\n"
    rules = rule_file(
        '- einsum: "...D,D(N H + K H + K H)->...(N H + K H + K H)"\n  from: w\n  linear: {apart: "{q,k,v}", fused: qkv}',
        targets,
    )
    assert {name: x.shape for name, x in run(make_plan(rules, MemorySource({"w": w}), to="apart")).items()} == {
        "q.weight": (9, 2),
        "k.weight": (6, 2),
        "v.weight": (6, 2),
    }
    np.testing.assert_array_equal(run(make_plan(rules, MemorySource({"w": w}), to="fused"))["qkv.weight"], w.T)


def test_rope_reorders_the_heads_of_the_parts_that_have_its_letter() -> None:
    w = numbers(2, (3 + 1) * 4 + 5)
    rules = '- einsum: "...D,D(N H + K H + K J)->...(N H + K H + K J)"\n  from: w\n  rope: {H: interleaved}\n  linear: "{q,k,v}"'
    plan = make_plan(rule_file(rules, head(N=3, H=4, K=1)), MemorySource({"w": w}))
    moved = {step.name: any(isinstance(op, Deinterleave) for op in step.parts[0].ops) for step in plan.steps}
    assert moved == {"q.weight": True, "k.weight": True, "v.weight": False}
    made = run(plan)
    rows = w.T[:12].reshape(3, 4, 2)[:, [0, 2, 1, 3]].reshape(12, 2)
    np.testing.assert_array_equal(made["q.weight"], rows)
    np.testing.assert_array_equal(made["v.weight"], w.T[16:])


def test_the_file_is_what_the_plan_says(tmp_path: Path) -> None:
    tree = {"w": numbers(5, (3 + 2 + 2) * 7), "b": numbers((3 + 2 + 2) * 7)}
    rules = '- einsum: "...D,D(N H + K H + K H)->...(N H + K H + K H)"\n  from: w\n  bias: b\n  linear: "{q,k,v}"'
    plan = make_plan(rule_file(rules, head(N=3, H=7)), MemorySource(tree))
    assert isinstance(list(execute(plan, tmp_path / "out.safetensors"))[-1], Result)
    written, wanted = load_file(tmp_path / "out.safetensors"), run(plan)
    assert written.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(written[name], values)


def test_the_plan_shows_the_axes_as_the_rule_has_them() -> None:
    rules = '- einsum: "...D,D(N C H)->...(N C H)"\n  from: w\n  stacked: {i: 0}\n  linear: "{i}.{C:q,k,v}"'
    plan = make_plan(rule_file(rules, head(N=2)), MemorySource({"w": numbers(1, 5, 2 * 3 * 7)}))
    assert str(plan.steps[1].parts[0].layout) == "i D (N C H) -> i C (N H) D"
    assert plan.steps[1].parts[0].at == "i=0, C=1"
    assert plan.steps[1].siblings == 3
    assert dict(plan.sizes) | {"i": 1} == {"D": 5, "N": 2, "C": 3, "H": 7, "i": 1}


# ---- sizes and what contradicts them


@pytest.mark.parametrize(
    ("rules", "tree", "header", "said"),
    [
        (
            '- einsum: "...D,D(N C H)->...(N C H)"\n  from: w\n  linear: "{C:q,k,v}"',
            {"w": (2, 30)},
            HEAD,
            ("size-unknown", "nothing gives N and H a size", "--set N=8"),
        ),
        (
            '- einsum: "...D,D(N C H)->...(N C H)"\n  from: w\n  linear: "{C:q,k,v}"',
            {"w": (2, 31)},
            head(N=2),
            ("size-conflict", "31", "no multiple of 6"),
        ),
        (
            '- einsum: "...D,D(N H + K H)->...(N H + K H)"\n  from: w\n  linear: "{q,k}"',
            {"w": (2, 30)},
            head(N=2, K=1, H=7),
            ("size-conflict", "30 elements", "makes it 21"),
        ),
        (
            '- einsum: "...D,D(N H + K H)->...(N H + K H)"\n  from: w\n  linear: "{q,k,v}"',
            {"w": (2, 30)},
            HEAD,
            ("rule-index-mismatch", "the leaf has 2 parts", "lists 3 tensors"),
        ),
        (
            '- einsum: "...D,D(N C H)->...(N C H)"\n  from: w\n  linear: "{q,k,v}"',
            {"w": (2, 30)},
            head(N=5, H=2),
            (
                "size-conflict",
                "one name for each element of N in {q,k,v} (another axis is named as in {H:a,b}) makes it 3",
            ),
        ),
        (
            '- einsum: "...D,DCH->...CH"\n  from: w\n  linear: "{C:q,k}"',
            {"w": (2, 3, 5)},
            HEAD,
            ("shape-mismatch", "C is split among the targets {C:q,k}", "C with 2 elements", "got 3"),
        ),
        (
            '- einsum: "...D,DCH->...CH"\n  from: w\n  linear: "{X:q,k}"',
            {"w": (2, 3, 5)},
            HEAD,
            ("rule-index-mismatch", "{X}"),
        ),
        (
            '- einsum: "...(A + B),(A + B)D->...D"\n  from: w\n  bias: b\n  linear: "{h,x}"',
            {"w": (5, 2), "b": (2,)},
            head(A=2),
            ("each module", "would add the bias"),
        ),
        (
            '- einsum: "...D,D(N H + K H)->...(N H + K H)"\n  from: w\n  prescaled_by: 1/8\n  linear: "{q,k}"',
            {"w": (2, 30)},
            HEAD,
            ("rule-layer-conflict", "prescaled_by"),
        ),
        (
            '- einsum: "...D,D(C F)->...(C F)"\n  from: w\n  weight_norm: g\n  linear: "{q,k}"',
            {"w": (2, 30), "g": (30,)},
            HEAD,
            ("rule-layer-conflict", "weight_norm"),
        ),
        (
            '- einsum: "...D,D(C F)->...(C F)"\n  from: w\n  linear: "{q,k}"',
            {"w": (2, 3, 10)},
            HEAD,
            ("shape-mismatch", "...D,D(C F)->...(C F) has a weight with 2 axes (D (C F))"),
        ),
        (
            '- einsum: "...D,D(C F)->...(C F)"\n  from: w\n  linear: {module: m, einsum: "...D,CFD->...CF"}',
            {"w": (2, 30)},
            HEAD,
            ("rule-layer-conflict", "made of others"),
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit(rules: str, tree: dict[str, tuple[int, ...]], header: str, said: tuple[str, ...]) -> None:
    text = refused(rules, {name: np.zeros(shape, np.float32) for name, shape in tree.items()}, header)
    assert [word for word in said if word not in text] == [], text
