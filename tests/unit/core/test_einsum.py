"""The einsum law: for any equation, the derived Linear computes what the equation says.

The law is stated with `numpy.einsum` and nothing of `convert.core.einsum`: axes are classified here anew. It goes through the
real path: a rule file, a plan, the plan's operations.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

import einops
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from convert import RuleError, parse_rules
from convert.core.einsum import group, parse_projection
from convert.layers import Linear
from convert.planning.planner import make_plan
from support.memory_source import MemorySource, rule_file, run

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
EXACT = 1e-12  # float64 rounds a sum of at most 1001 products to 1e-13 of its largest term


@dataclass(frozen=True)
class Equation:
    """A random ``X,W->Y``; `dots` are the sizes of the ellipsis, None when there is none."""

    x: str
    w: str
    y: str
    sizes: dict[str, int]
    dots: tuple[int, ...] | None

    def __str__(self) -> str:
        dots = "" if self.dots is None else "..."
        return f"{dots}{self.x},{self.w}->{dots}{self.y}"

    @property
    def inputs(self) -> str:
        return "".join(a for a in self.x if a in self.w)

    @property
    def outputs(self) -> str:
        return "".join(a for a in self.y if a in self.w)

    @property
    def batch(self) -> str:
        return "".join(a for a in self.x if a not in self.w)

    def shape(self, letters: str) -> tuple[int, ...]:
        return tuple(self.sizes[a] for a in letters)

    @property
    def bias_letters(self) -> str:
        """Axes of the result from the first output on: a bias is broadcast over the others."""
        return self.y[min(self.y.index(a) for a in self.outputs) :]

    def bias_shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[a] if a in self.outputs else 1 for a in self.bias_letters)

    def input_array(self, rng: np.random.Generator) -> np.ndarray:
        return rng.standard_normal((self.dots or ()) + self.shape(self.x))

    def reference(self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
        """What the source computes; the axes of the result put in the order of `linear`."""
        result = np.einsum(str(self), x, w, optimize=True) + (0 if b is None else b)
        n = len(self.dots or ())
        return result.transpose(*range(n), *(n + self.y.index(a) for a in self.batch + self.outputs))

    def linear(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        """What ``torch.nn.Linear`` computes, x's input axes moved last in X's order and flattened."""
        n = len(self.dots or ())
        moved = x.transpose(*range(n), *(n + self.x.index(a) for a in self.batch + self.inputs))
        lead = (self.dots or ()) + self.shape(self.batch)
        result = moved.reshape(*lead, weight.shape[1]) @ weight.T + (0 if bias is None else bias)
        return result.reshape(*lead, *self.shape(self.outputs))


@st.composite
def equations(draw: st.DrawFn, min_outputs: int = 1) -> Equation:
    letters = draw(st.permutations(string.ascii_letters))
    n_out, n_in = draw(st.integers(min_outputs, 3)), draw(st.integers(1, 3))
    n_batch = draw(st.integers(0, 2))
    out, inp, batch = letters[:n_out], letters[n_out : n_out + n_in], letters[n_out + n_in : n_out + n_in + n_batch]
    weight_sizes = draw(st.permutations(PRIMES[:6]))
    sizes = dict(zip([*out, *inp, *batch], [*weight_sizes, *PRIMES[6:]], strict=False))
    dots = draw(st.none() | st.lists(st.integers(1, 3), max_size=2).map(tuple))
    mix = lambda group: "".join(draw(st.permutations(group)))  # noqa: E731
    return Equation(mix([*inp, *batch]), mix([*out, *inp]), mix([*out, *batch]), sizes, dots)


def error(measured: np.ndarray, expected: np.ndarray) -> float:
    assert measured.shape == expected.shape
    return float(np.abs(measured - expected).max() / np.abs(expected).max())


@dataclass(frozen=True)
class Case:
    """An equation, with what a rule may add to it."""

    equation: Equation
    stacked: tuple[int, ...]
    bias: bool
    spaces: bool
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    equation = draw(equations())
    bias = draw(st.booleans())
    own = min(len(equation.w), len(equation.bias_shape()) if bias else 99)
    depth = draw(st.integers(0, 2))
    stacked = tuple(draw(st.permutations(range(own + depth)))[:depth])  # axes of the stacked leaf, in any order
    return Case(equation, stacked, bias, draw(st.booleans()), draw(st.integers(0, 2**32 - 1)))


def insert_axes(shape: tuple[int, ...], stacked: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with an axis of size 2, 3 at each of the positions."""
    full = list(shape)
    for position, size in sorted(zip(stacked, (2, 3), strict=False)):
        full.insert(position, size)
    return tuple(full)


def take_layer(array: np.ndarray, stacked: tuple[int, ...], at: tuple[int, ...]) -> np.ndarray:
    where: list[Any] = [slice(None)] * array.ndim
    for position, k in zip(stacked, at, strict=True):
        where[position] = k
    return array[tuple(where)]


def law(case: Case) -> None:
    """The converted Linear is the equation: for every element of the stack, with the bias if there is one."""
    eq, rng = case.equation, np.random.default_rng(case.seed)
    names = ("layer", "stack")[: len(case.stacked)]
    tree = {"a/w": rng.standard_normal(insert_axes(eq.shape(eq.w), case.stacked))}
    if case.bias:
        tree["a/b"] = rng.standard_normal(insert_axes(eq.bias_shape(), case.stacked))
    text = str(eq).replace(",", " , ").replace("->", " -> ") if case.spaces else str(eq)
    rule = f'- einsum: "{text}"\n  from: a/w\n'
    rule += "  bias: a/b\n" if case.bias else ""
    rule += f"  stacked: {{{', '.join(f'{n}: {k}' for n, k in zip(names, case.stacked, strict=True))}}}\n"
    rule += f'  linear: "{".".join(["m", *(f"{{{n}}}" for n in names)])}"\n'
    out = run(make_plan(rule_file(rule), MemorySource(tree)))
    x = eq.input_array(rng)
    layers = list(np.ndindex(*(2, 3)[: len(case.stacked)]))
    assert len(out) == len(layers) * (1 + case.bias)
    for at in layers:
        module = ".".join(["m", *map(str, at)])
        w = take_layer(tree["a/w"], case.stacked, at)
        b = take_layer(tree["a/b"], case.stacked, at) if case.bias else None
        weight, bias = out[f"{module}.weight"], out.get(f"{module}.bias")
        assert weight.ndim == 2
        assert bias is None or bias.shape == weight.shape[:1]
        assert error(eq.linear(x, weight, bias), eq.reference(x, w, b)) <= EXACT


@pytest.mark.slow
@given(cases())
@settings(max_examples=150, deadline=None)
def test_derived_linear_is_the_einsum(case: Case) -> None:
    law(case)


@pytest.mark.slow
@given(equations(), st.integers(2, 3), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_fused_linear_is_the_einsums_side_by_side(eq: Equation, count: int, bias: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    members = ["query", "key", "value"][:count]
    tree = {f"{m}/w": rng.standard_normal(eq.shape(eq.w)) for m in reversed(members)}  # the rule's order counts
    if bias:
        tree |= {f"{m}/b": rng.standard_normal(eq.bias_shape()) for m in members}
    rule = f'- einsum: "{eq}"\n  from: "{{{",".join(members)}}}/w"\n  linear: qkv\n'
    rule += f'  bias: "{{{",".join(members)}}}/b"\n' if bias else ""
    out = run(make_plan(rule_file(rule), MemorySource(tree)))
    assert sorted(out) == (["qkv.bias"] if bias else []) + ["qkv.weight"]
    x = eq.input_array(rng)
    rows = np.split(out["qkv.weight"], count)
    biases = np.split(out["qkv.bias"], count) if bias else [None] * count
    for m, w, b in zip(members, rows, biases, strict=True):
        assert error(eq.linear(x, w, b), eq.reference(x, tree[f"{m}/w"], tree.get(f"{m}/b"))) <= EXACT


@pytest.mark.slow
@given(equations(min_outputs=2), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_split_linears_are_slices_of_the_einsum(eq: Equation, bias: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    first = eq.outputs[0]
    targets = [f"t{k}" for k in range(eq.sizes[first])]
    tree = {"a/w": rng.standard_normal(eq.shape(eq.w))}
    if bias:
        tree["a/b"] = rng.standard_normal(eq.bias_shape())
    rule = f'- einsum: "{eq}"\n  from: a/w\n  linear: "m.{{{",".join(targets)}}}"\n'
    rule += "  bias: a/b\n" if bias else ""
    out = run(make_plan(rule_file(rule), MemorySource(tree)))
    assert len(out) == len(targets) * (1 + bias)
    x = eq.input_array(rng)
    whole = eq.reference(x, tree["a/w"], tree.get("a/b"))
    at = len(eq.dots or ()) + len(eq.batch)  # of the split axis, in the order that `reference` gives
    rest = Equation(eq.x, eq.w.replace(first, ""), eq.y.replace(first, ""), eq.sizes, eq.dots)
    for k, target in enumerate(targets):
        result = rest.linear(x, out[f"m.{target}.weight"], out.get(f"m.{target}.bias"))
        assert error(result, whole.take(k, axis=at)) <= EXACT


# --- the law is able to fail ----------------------------------------------------------------------------------------

Groups = tuple[str, ...]


def by_stored_order(self: Linear, role: str, letters: str, variant: str | None, layer: Any) -> Groups:
    eq = self._equation(variant)
    outputs = "".join(a for a in letters if a in eq.outputs)
    return (outputs,) if role == "bias" else (outputs, "".join(a for a in letters if a in eq.inputs))


def inputs_reversed(self: Linear, role: str, letters: str, variant: str | None, layer: Any) -> Groups:
    eq = self._equation(variant)
    return (eq.outputs,) if role == "bias" else (eq.outputs, eq.inputs[::-1])


def not_transposed(self: Linear, role: str, letters: str, variant: str | None, layer: Any) -> Groups:
    eq = self._equation(variant)
    return (eq.outputs,) if role == "bias" else (eq.inputs, eq.outputs)


def bias_reversed(self: Linear, role: str, letters: str, variant: str | None, layer: Any) -> Groups:
    eq = self._equation(variant)
    return (eq.outputs[::-1],) if role == "bias" else (eq.outputs, eq.inputs)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [by_stored_order, inputs_reversed, not_transposed, bias_reversed])
def test_the_law_catches_a_wrong_derivation(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(case: Case) -> bool:
        try:
            law(case)
        except (AssertionError, ValueError):  # a wrong number; or features that do not even multiply
            return True
        return False

    once = settings(
        max_examples=300, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck), deadline=None
    )
    with pytest.raises(NoSuchExample):
        find(cases(), breaks, settings=settings(once, max_examples=30), random=__import__("random").Random(0))
    monkeypatch.setattr(Linear, "groups", fault)
    assert find(cases(), breaks, settings=once, random=__import__("random").Random(0))


# --- the table of design.md, row by row -----------------------------------------------------------------------------

SIZES = {"D": 7, "N": 3, "H": 5, "C": 2, "K": 3, "h": 3, "i": 5, "j": 2}


@pytest.mark.parametrize(
    ("equation", "target", "layout", "rearranged"),
    [
        ("BTD,NDH->BTNH", "q", "N D H -> (N H) D", "N D H -> (N H) D"),
        ("BSD,CKDH->CBSKH", "{k,v}", "C K D H -> C (K H) D", "C K D H -> C (K H) D"),
        ("BTNH,NHD->BTD", "o", "N H D -> D (N H)", "N H D -> D (N H)"),
        ("...D,DNH->...NH", "q", "D N H -> (N H) D", "D N H -> (N H) D"),
        ("...NH,DNH->...D", "o", "D N H -> D (N H)", "D N H -> D (N H)"),
        ("...D,DF->...F", "up", "D F -> F D", "D F -> F D"),
    ],
)
def test_rows_of_the_table(equation: str, target: str, layout: str, rearranged: str) -> None:
    letters = equation.split(",")[1].split("->")[0]
    w = np.random.default_rng(0).standard_normal([{**SIZES, "F": 11}[a] for a in letters])
    plan = make_plan(rule_file(f'- einsum: "{equation}"\n  from: w\n  linear: "m.{target}"'), MemorySource({"w": w}))
    expected = einops.rearrange(w, rearranged)
    out = run(plan)
    for k, step in enumerate(plan.steps):
        assert step.layouts == (layout,)
        np.testing.assert_array_equal(out[step.name], expected[k] if len(plan.steps) > 1 else expected)
    assert [s.name for s in plan.steps] == (
        ["m.k.weight", "m.v.weight"] if target == "{k,v}" else [f"m.{target}.weight"]
    )


def test_the_two_output_projections_differ_only_by_their_equations() -> None:
    """praxis stores D N H and needs no transpose, Gemma stores N H D and does; nothing but the equation says so."""
    w = np.arange(3 * 5 * 7.0).reshape(3, 5, 7)
    as_nhd = run(make_plan(rule_file('- einsum: "...NH,NHD->...D"\n  from: w\n  linear: o'), MemorySource({"w": w})))
    as_dnh = run(make_plan(rule_file('- einsum: "...NH,DNH->...D"\n  from: w\n  linear: o'), MemorySource({"w": w})))
    np.testing.assert_array_equal(as_nhd["o.weight"], w.reshape(15, 7).T)
    np.testing.assert_array_equal(as_dnh["o.weight"], w.reshape(3, 35))


def test_block_diagonal_is_refused() -> None:
    with pytest.raises(RuleError) as refused:
        rule_file('- einsum: "...hi,hij->...hj"\n  from: w\n  linear: m')
    assert str(refused.value) == (
        "r.yaml:5:3: h of ...hi,hij->...hj is an axis of all three operands: the matrices are block diagonal, "
        "which a Linear cannot hold; give the target the `einsum:` of its code, or keep them as stored with `parameter:`"
    )
    assert parse_projection("...hi,hij->...hj").batch == "h"


def test_a_weight_without_inputs_or_outputs_keeps_an_axis_of_one() -> None:
    w = np.arange(3.0)
    for equation, shape in (("BD,D->B", (1, 3)), ("B,D->BD", (3, 1)), ("...D,D->...", (1, 3))):
        out = run(make_plan(rule_file(f'- einsum: "{equation}"\n  from: w\n  linear: m'), MemorySource({"w": w})))
        np.testing.assert_array_equal(out["m.weight"], w.reshape(shape))


# --- biases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("equation", "shape", "axes"),
    [
        ("...D,DNH->...NH", (3, 5), "NH"),
        ("BTD,NDH->BTNH", (3, 5), "NH"),
        ("BTD,NDH->BTNH", (1, 3, 5), ".NH"),  # T is the input's: an axis without a name, so no size of T follows
        ("...TD,CDF->C...TF", (2, 1, 1, 11), "C..F"),
        ("...TD,CDF->C...TF", (2, 1, 11), "C.F"),
        ("...D,D->...", (), ""),
    ],
)
def test_bias_axes(equation: str, shape: tuple[int, ...], axes: str) -> None:
    assert parse_projection(equation).bias_axes(shape) == axes


@pytest.mark.parametrize(
    ("equation", "shape", "message"),
    [
        (
            "...D,DNH->...NH",
            (5,),
            "a bias with 1 axes lines up with H of the result of ...D,DNH->...NH and leaves out N",
        ),
        (
            "...D,DNH->...NH",
            (),
            "a bias with 0 axes lines up with no axis of the result of ...D,DNH->...NH and leaves out N, H",
        ),
        ("...D,DNH->...NH", (2, 3, 5), "a bias with 3 axes cannot be added to the result of ...D,DNH->...NH"),
        ("BTD,NDH->BTNH", (1, 1, 1, 3, 5), "a bias with 5 axes cannot be added to the result of BTD,NDH->BTNH"),
        (
            "BTD,NDH->BTNH",
            (4, 3, 5),
            "the bias of BTD,NDH->BTNH has a size above 1 on an axis of the input (T)",
        ),
    ],
)
def test_bias_that_cannot_be_added(equation: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_projection(equation).bias_axes(shape)
    assert str(refused.value) == message


def test_a_broadcast_axis_of_a_bias_binds_no_letter() -> None:
    """T of this equation is a position, of size 1 in the bias; it must not be taken for the T of another equation."""
    rng = np.random.default_rng(0)
    tree = {"w": rng.standard_normal((3, 7, 5)), "b": rng.standard_normal((1, 3, 5)), "v": rng.standard_normal((7, 11))}
    rules = rule_file(
        '- einsum: "BTD,NDH->BTNH"\n  from: w\n  bias: b\n  linear: m\n- einsum: "BD,DT->BT"\n  from: v\n  linear: n'
    )
    plan = make_plan(rules, MemorySource(tree))
    assert plan.sizes["T"] == 11
    np.testing.assert_array_equal(run(plan)["m.bias"], tree["b"].reshape(15))


# --- parsing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        ("", "'' is not an einsum of two operands, X,W->Y with the weight second"),
        ("BD,DF", "'BD,DF' is not an einsum of two operands, X,W->Y with the weight second"),
        ("BD->BF", "'BD->BF' is not an einsum of two operands, X,W->Y with the weight second"),
        ("B,D,F,G->BF", "'B,D,F,G->BF' is not an einsum of two operands, X,W->Y with the weight second"),
        ("B1,DF->BF", "'B1' in 'B1,DF->BF' is not letters with at most one '...'"),
        ("..D,DF->..F", "'..D' in '..D,DF->..F' is not letters with at most one '...'"),
        ("...D...,DF->...F", "'...D...' in '...D...,DF->...F' is not letters with at most one '...'"),
        ("BD,DF->BF->C", "'BF->C' in 'BD,DF->BF->C' is not letters with at most one '...'"),
        (
            "BD,DF->B(F)",
            "(F) of 'BD,DF->B(F)' is not an axis of the weight; write a composite axis in the same way in the "
            "weight and in the input or the result",
        ),
        ("...D,...DF->...F", "the weight of '...D,...DF->...F' has an ellipsis; name its axes"),
        (
            "...D,DF->F",
            "'...' of '...D,DF->F' is on one side only, but the result has the input's batch axes",
        ),
        (
            "D,DF->...F",
            "'...' of 'D,DF->...F' is on one side only, but the result has the input's batch axes",
        ),
        ("BD,->BD", "the weight of 'BD,->BD' has no axes"),
        ("BDD,DF->BF", "D occurs twice in 'BDD' of 'BDD,DF->BF': a diagonal is not a projection"),
        ("BD,DFF->BF", "F occurs twice in 'DFF' of 'BD,DFF->BF': a diagonal is not a projection"),
        ("BD,DF->BFF", "F occurs twice in 'BFF' of 'BD,DF->BFF': a diagonal is not a projection"),
        ("BD,DF->BFG", "G of the result of 'BD,DF->BFG' is in no operand"),
        (
            "BD,DFG->BF",
            "G of the weight of 'BD,DFG->BF' is in neither input nor result: it would be summed away; add G to the input or to the result",
        ),
        ("BTD,DF->BF", "T of the input of 'BTD,DF->BF' is summed without the weight: not a projection"),
    ],
)
def test_what_is_no_projection(equation: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_projection(equation)
    assert str(refused.value) == message
    if equation:  # the rule file says where
        with pytest.raises(RuleError) as refused_rule:
            rule_file(f'- einsum: "{equation}"\n  from: w\n  linear: m')
        assert str(refused_rule.value) == f"r.yaml:5:11: {message}"


@pytest.mark.slow
@given(equations())
@settings(deadline=None)
def test_axes_are_classified_by_where_they_occur(eq: Equation) -> None:
    projection = parse_projection(f" {eq} ".replace("->", " ->  "))
    assert projection.equation == str(eq)
    assert (projection.outputs, projection.inputs, projection.batch) == (eq.outputs, eq.inputs, "")
    assert projection.weight == eq.w
    assert sorted(projection.outputs + projection.inputs) == sorted(eq.w)


@given(st.text("ABCD.,->() 1", max_size=14))
def test_any_text_is_a_projection_or_a_value_error(text: str) -> None:
    try:
        projection = parse_projection(text)
    except ValueError:
        return
    assert sorted(projection.outputs + projection.inputs + projection.batch) == sorted(projection.weight)
    shape = {letter: k + 2 for k, letter in enumerate("ABCD")}
    x, w, y = projection.equation.replace("->", ",").split(",")
    dots = (9,) if "." in x else ()
    operand = np.zeros([n for part in x.replace("...", ".") for n in (dots if part == "." else (shape[part],))])
    assert np.einsum(projection.equation, operand, np.zeros([shape[a] for a in w])).ndim == len(y.replace("...", "."))


def test_group_is_written_as_einops_writes_it() -> None:
    assert [group(axes) for axes in ("", "N", "NH")] == ["1", "N", "(N H)"]


def test_bare_equation_in_a_file_keeps_its_position() -> None:
    with pytest.raises(RuleError, match=r"^r\.yaml:5:11: 'q' is not an einsum of two operands"):
        parse_rules(
            "model: m\ntitle: M\ntargets: {torch: {loads: T}}\nrules:\n- einsum: q\n  from: w\n  linear: m\n", "r.yaml"
        )


@pytest.mark.slow
@given(equations())
@settings(max_examples=30, deadline=None)
def test_reference_is_blind_to_nothing(eq: Equation) -> None:
    """The reference itself can tell: another order of the weight's input or output axes gives another result."""
    assume(len(eq.outputs) > 1 or len(eq.inputs) > 1)
    rng = np.random.default_rng(0)
    x, w = eq.input_array(rng), rng.standard_normal(eq.shape(eq.w))
    right = einops.rearrange(w, f"{' '.join(eq.w)} -> ({' '.join(eq.outputs)}) ({' '.join(eq.inputs)})")
    wrong = einops.rearrange(w, f"{' '.join(eq.w)} -> ({' '.join(eq.outputs[::-1])}) ({' '.join(eq.inputs[::-1])})")
    assert error(eq.linear(x, right), eq.reference(x, w)) <= EXACT
    assert error(eq.linear(x, wrong), eq.reference(x, w)) > 1e-3
