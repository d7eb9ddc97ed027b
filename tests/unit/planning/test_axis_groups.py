"""Composite axes, as einops writes them: ``(N C H)``, ``(N H + K H + K H)``; and axes that the target's names list."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from convert import PlanError, RuleError
from convert.core.axis_groups import parse_group
from convert.core.ops import Deinterleave, apply, inverse
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
        ("...(A + B),(A + B)(C + D)->...(C + D)", "(A + B) and (C + D) are both sums"),
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


def test_one_row_of_each_group_is_a_number_of_the_bias() -> None:
    """The boxes of each anchor, and one score."""
    d, n, h = 3, 2, 4
    rules = """
- einsum: "...D,D(N H)->...(N H)"
  from: boxes
  bias: box_bias
  linear: {module: head, axes: "(N (H + 1))D", part: "1 of 2"}
- einsum: ...D,DN->...N
  from: scores
  bias: score_bias
  linear: {module: head, axes: "(N (H + 1))D", part: "2 of 2"}
"""
    tree = {"boxes": numbers(d, n * h), "box_bias": numbers(n * h), "scores": -numbers(d, n), "score_bias": -numbers(n)}
    made = planned(rules, tree, head(N=n, H=h))
    joined = np.concatenate([tree["boxes"].reshape(d, n, h), tree["scores"][..., None]], 2)
    np.testing.assert_array_equal(made["head.weight"], joined.reshape(d, -1).T)
    biases = np.concatenate([tree["box_bias"].reshape(n, h), tree["score_bias"][:, None]], 1)
    np.testing.assert_array_equal(made["head.bias"], biases.ravel())


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


HEADS = {"N": 2, "K": 1, "H": 6, "J": 6}
QKV = "(N H + K H + K J)"


def de_interleaved(rows: np.ndarray, *heads: int, width: int = 6) -> np.ndarray:
    """Reorder the rows of the heads that begin at these rows to 0, 2, 4, 1, 3, 5."""
    order = list(range(len(rows)))
    for first in heads:
        order[first : first + width] = [first + k for k in (*range(0, width, 2), *range(1, width, 2))]
    return rows[order]


@pytest.mark.parametrize(
    ("axis", "rope", "header", "heads"),
    [
        (QKV, "{H: interleaved}", head(**HEADS), (0, 6, 12)),
        (QKV, "{H: interleaved, parts: [2]}", head(**HEADS), (12,)),
        ("(N H + K H + K H)", "{H: interleaved, parts: [1, 2]}", head(N=2, K=1, H=6), (0, 6, 12)),
        ("(K (N + 1 + 1) H)", "{H: interleaved, parts: [2, 1]}", head(N=1, K=2, H=4), (0, 4, 12, 16)),
        ("(N (1 + 1 + 1) H)", "{H: interleaved, parts: [1, 2]}", head(N=2, H=4), (0, 4, 12, 16)),
        ("(E + J + Z)", "{H: interleaved}", head(N=2, K=1, H=6, Z=6) + "  E: {is: q, equals: N*H}\n  J: {is: k, equals: K*H}\n", (0, 6, 12)),
        ("(E + E + E)", "{H: interleaved, parts: [1, 2]}", head(N=2, H=4) + "  E: {is: q, equals: N*H*1}\n", (0, 4, 8, 12)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stacked", [False, True])
def test_rope_reorders_its_rows_of_a_sum_in_one_tensor_and_in_several(
    axis: str, rope: str, header: str, heads: tuple[int, ...], stacked: bool
) -> None:
    rows = 24
    tree = {"w": numbers(2, 3, rows)} if stacked else {"w": numbers(3, rows), "b": numbers(rows)}
    more, place = ("  stacked: {i: 0}\n", "{i}.") if stacked else ("  bias: b\n", "")
    rules = f'- einsum: "...D,D{axis}->...{axis}"\n  from: w\n{more}  rope: {rope}\n  linear: "{place}%s"'
    plan = make_plan(rule_file(rules % "qkv", header), MemorySource(tree))
    made, wanted = run(plan), tree["w"][1].T if stacked else tree["w"].T
    width = 4 if "H: {is: size, equals: 4}" in header else 6
    np.testing.assert_array_equal(made["1.qkv.weight" if stacked else "qkv.weight"], de_interleaved(wanted, *heads, width=width))  # fmt: skip
    if not stacked:
        np.testing.assert_array_equal(made["qkv.bias"], de_interleaved(tree["b"], *heads, width=width))
    for step in plan.steps:
        (part,) = step.parts
        spec = plan.source.leaves[part.leaf].spec
        np.testing.assert_array_equal(apply(part.ops, apply(inverse(part.ops, spec), made[step.name])), made[step.name])
        assert "from interleaved to half-split pairs" in str(part.layout) and " z" not in str(part.layout)
    assert {name for group in plan.shape_ambiguous for name in group.names} == set(made)
    assert all(group.rope_axis == "H" and group.sum_of_parts == axis for group in plan.shape_ambiguous)

    apart = run(make_plan(rule_file(rules % "{q,k,v}", header), MemorySource(tree)))
    each = [de_interleaved(wanted, *heads, width=width)[places] for places in _places(axis)]
    for name, values in zip("qkv", each, strict=True):
        np.testing.assert_array_equal(apart[f"1.{name}.weight" if stacked else f"{name}.weight"], values)


def _places(axis: str) -> list[list[int]]:
    """The rows of q, k and v, of 24."""
    if axis == "(K (N + 1 + 1) H)" or axis == "(N (1 + 1 + 1) H)":
        return [[outer + 4 * part + k for outer in (0, 12) for k in range(4)] for part in range(3)]
    ends = (8, 16) if axis == "(E + E + E)" else (12, 18)
    return [[*range(a, b)] for a, b in ((0, ends[0]), ends, (ends[1], 24))]


def test_rope_reorders_heads_next_to_a_sum() -> None:
    w = numbers(3, 6, 4)
    rules = '- einsum: "...D,D(N + K + K)H->...(N + K + K)H"\n  from: w\n  rope: {H: interleaved, parts: [1, 2]}\n  linear: "{q,k,v}"'
    made = run(make_plan(rule_file(rules, head(N=4, K=1)), MemorySource({"w": w})))
    rows = w.reshape(3, 24).T
    np.testing.assert_array_equal(made["q.weight"], de_interleaved(rows, 0, 4, 8, 12, width=4)[:16])
    np.testing.assert_array_equal(made["k.weight"], de_interleaved(rows, 16, width=4)[16:20])
    np.testing.assert_array_equal(made["v.weight"], rows[20:])


@pytest.mark.parametrize(
    ("axis", "rope", "module", "said"),
    [
        ("(N H + K H + K H)", "{H: interleaved}", '"{q,k,v}"', "all parts of (N H + K H + K H) have H, and RoPE does not rotate values; name the parts that it rotates, such as `rope: {H: interleaved, parts: [1, 2]}`"),
        ("(N H + K H + K H)", "{H: interleaved}", "qkv", "all parts of"),
        ("(K (N + 1 + 1) H)", "{H: interleaved}", "qkv", "all parts of"),
        ("(N + K + K)H", "{H: interleaved}", "qkv", "all parts of"),
        ("(N + K + K)H", "{H: interleaved, parts: [1, 2]}", "qkv", "the heads are an axis of their own, and qkv has all parts; name one target for each part"),
        ("(H N + K J)", "{H: interleaved}", "qk", "H is not the last axis of part 1; name one target for each part"),
        (QKV, "{H: interleaved, parts: [3]}", "qkv", "RoPE rotates H of part 3, and (N H + K H + K J) has 3 parts, of which 1, 2 have H"),
        (QKV, "{H: interleaved, parts: [4]}", "qkv", "RoPE rotates H of part 4"),
        (QKV, "{H: interleaved, parts: [0]}", "qkv", "`parts` of `rope:` numbers different parts from 1, such as [1, 2], not [0]"),
        (QKV, "{H: interleaved, parts: [1, 1]}", "qkv", "different parts"),
        (QKV, "{H: interleaved, parts: []}", "qkv", "different parts"),
        (QKV, "{H: interleaved, parts: [q]}", "qkv", "expected an integer"),
        (QKV, "{parts: [1]}", "qkv", "`rope:` names one axis, such as {H: interleaved}, not 0"),
        ("(N H)", "{H: interleaved, parts: [1]}", "q", "names parts of an axis that is a sum, such as (N H + K H + K H), and the rule has none"),
        ("(N C H)", "{H: interleaved}", '"{C:q,k,v}"', "one leaf holds q, k, v, and RoPE would rotate all of them; write the axis as a sum of parts, such as (N (1 + 1 + 1) H)"),
        ("(C N H)", "{H: interleaved}", '"{q,k,v}"', "one leaf holds q, k, v"),
        ("CKH", "{H: interleaved}", '"{C:k,v}"', "one leaf holds k, v"),
    ],
)  # fmt: skip
def test_rope_on_values_is_refused(axis: str, rope: str, module: str, said: str) -> None:
    rules = f'- einsum: "...D,D{axis}->...{axis}"\n  from: w\n  rope: {rope}\n  linear: {module}'
    with pytest.raises(RuleError) as error:
        rule_file(rules, head(**HEADS))
    assert said in str(error.value)


def test_rope_on_leaves_that_are_called_as_values_is_refused() -> None:
    rules = (
        "- einsum: ...D,DNH->...NH\n  from: '{query,key,value}/w'\n  rope: {H: interleaved}\n  linear: '{q,k,v}_proj'"
    )
    with pytest.raises(
        RuleError, match="RoPE would rotate q, k, v, and v is the name of values; write a rule of their own"
    ):
        rule_file(rules)
    assert rule_file(rules.replace("query,key,value", "query,key").replace("q,k,v", "q,k")).rules


def test_the_parts_of_a_sum_are_shape_ambiguous() -> None:
    rules = '- einsum: "...D,D(A + B)->...(A + B)"\n  from: w\n  linear: %s'
    for module in ("both", '"{one,other}"'):
        plan = make_plan(rule_file(rules % module, head(A=3)), MemorySource({"w": numbers(2, 8)}))
        assert {name for group in plan.shape_ambiguous for name in group.names} == {step.name for step in plan.steps}
        assert all(group.to_dict()["sum_of_parts"] == "(A + B)" for group in plan.shape_ambiguous)


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


def test_both_sides_of_a_square_are_one_unknown() -> None:
    """Patches that a Dense embeds, and a torch.nn.Conv3d of one frame."""
    rules = '- einsum: "...(P Q R),(P Q R)D->...D"\n  from: w\n  linear: {module: conv, axes: DR.PQ}'
    header = SIZES + "  R: {is: colours, equals: 3}\n  P: {is: side}\n  Q: {is: the other, equals: P}\n"
    values = numbers(2 * 2 * 3, 5)
    made = planned(rules, {"w": values}, header)["conv.weight"]
    np.testing.assert_array_equal(made, np.einsum("pqrd->drpq", values.reshape(2, 2, 3, 5))[:, :, None])


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
            '- einsum: "...(P Q R),(P Q R)D->...D"\n  from: w\n  linear: {module: conv, axes: DR.PQ}',
            {"w": (24, 5)},
            SIZES + "  R: {is: colours, equals: 3}\n  P: {is: side}\n  Q: {is: the other, equals: P}\n",
            ("size-conflict", "with R=3, 24 elements are left for P*P", "not 3 times an integer to the power 2"),
        ),
        (
            '- einsum: "...D,D(N H + K H)->...(N H + K H)"\n  from: w\n  linear: "{q,k}"',
            {"w": (2, 30)},
            head(N=2, K=1, H=7),
            ("size-conflict", "30 elements", "its parts have 21 together"),
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
                "one name for each element of N in {q,k,v} (another axis is named as in {H:a,b})",
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
            ("rule-layer-conflict", "composite axes"),
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit(rules: str, tree: dict[str, tuple[int, ...]], header: str, said: tuple[str, ...]) -> None:
    text = refused(rules, {name: np.zeros(shape, np.float32) for name, shape in tree.items()}, header)
    assert [word for word in said if word not in text] == [], text
