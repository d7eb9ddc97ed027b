"""Parts of an axis that the source and the target concatenate in different orders: forth, back, errors, what the check names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import convert
from convert import PlanError, RuleError
from convert.planning.planner import make_plan
from convert.rules.file import RuleFile
from convert.verify.mistakes.named import mistake_in
from convert.writing.scatter import destination_view
from support.memory_source import HEAD, MemorySource, rule_file, run

A, B, C, F, H = 3, 5, 11, 7, 2
D = A + B + C
AXES = f"axes: {{A: {{is: a, equals: {A}}}, B: {{is: b, equals: {B}}}, C: {{is: c}}, K: {{is: k, equals: 2}}}}\n"
RULES = """
- einsum: ...D,DF->...F
  from: head/kernel
  bias: head/bias
  concatenated: {D: A + B + C, F: K + 1 + L}
  linear: {module: head, concatenated: {D: C + A + B, F: L + K + 1}}
- dimension_numbers: NHWC,HWIO->NHWC
  axes: PQDF
  from: conv/kernel
  bias: conv/bias
  concatenated: {D: A + B + C}
  conv: {module: conv, concatenated: {D: B + C + A}}
- cell: flax.linen.OptimizedLSTMCell
  from: cell
  inputs: D
  concatenated: {D: A + B + C}
  lstm: {module: rnn, concatenated: {D: C + B + A}}
- from: norm/scale
  bias: norm/bias
  axes: D
  multiplies_by: scale
  epsilon: 1e-6
  concatenated: {D: A + B + C}
  layer_norm: {module: norm, concatenated: {D: B + A + C}}
- from: table
  axes: VD
  concatenated: {D: A + B + C}
  embedding: {module: table, concatenated: {D: B + A + C}}
- einsum: ...D,DE->...E
  from: stack
  stacked: {i: 0}
  concatenated: {D: A + B + C}
  linear: {module: "layers.{i}", concatenated: {D: B + C + A}}
- from: raw
  axes: DE
  concatenated: {D: A + B + C}
  parameter: {name: raw, axes: E.D, concatenated: {D: C + A + B}}
"""


def checkpoint() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "head/kernel": (D, F),
        "head/bias": (F,),
        "conv/kernel": (2, 1, D, F),
        "conv/bias": (F,),
        "norm/scale": (D,),
        "norm/bias": (D,),
        "table": (13, D),
        "stack": (2, D, 17),
        "raw": (D, 17),
        **{f"cell/i{g}/kernel": (D, H) for g in "ifgo"},
        **{f"cell/h{g}/kernel": (H, H) for g in "ifgo"},
        **{f"cell/h{g}/bias": (H,) for g in "ifgo"},
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def rules(text: str = RULES, axes: str = AXES) -> RuleFile:
    return rule_file(text, HEAD + axes)


def parts(x: np.ndarray, axis: int, order: str) -> np.ndarray:
    named = dict(zip("ABC", np.split(x, [A, A + B], axis), strict=True))
    return np.concatenate([named[letter] for letter in order], axis)


def test_the_target_has_the_parts_in_its_own_order() -> None:
    w = checkpoint()
    made = run(make_plan(rules(), MemorySource(w)))
    rows = np.r_[3:7, 0:2, 2]  # K + 1 + L, then L + K + 1
    assert np.array_equal(made["head.weight"], parts(w["head/kernel"], 0, "CAB").T[rows])
    assert np.array_equal(made["head.bias"], w["head/bias"][rows])
    assert np.array_equal(made["conv.weight"], parts(w["conv/kernel"], 2, "BCA").transpose(3, 2, 0, 1))
    gates = np.concatenate([w[f"cell/i{g}/kernel"].T for g in "ifgo"])
    assert np.array_equal(made["rnn.weight_ih_l0"], parts(gates, 1, "CBA"))
    assert np.array_equal(made["norm.weight"], parts(w["norm/scale"], 0, "BAC"))
    assert np.array_equal(made["norm.bias"], parts(w["norm/bias"], 0, "BAC"))
    assert np.array_equal(made["table.weight"], parts(w["table"], 1, "BAC"))
    assert np.array_equal(made["layers.1.weight"], parts(w["stack"][1], 0, "BCA").T)
    assert np.array_equal(made["raw"], parts(w["raw"], 0, "CAB").T[:, None])


def test_the_plan_says_both_orders_and_that_the_shape_does_not_show_them() -> None:
    plan = make_plan(rules(), MemorySource(checkpoint()))
    layouts = {step.name: step.layouts for step in plan.steps}
    assert layouts["head.weight"] == ("D F -> F D, D from A + B + C to C + A + B, F from K + 1 + L to L + K + 1",)
    assert layouts["rnn.weight_ih_l0"][0] == "W [I, i] -> i I, D from A + B + C to C + B + A"
    found = {name: group.sum_of_parts for group in plan.shape_ambiguous for name in group.names}
    assert found["head.weight"] == "D = A + B + C and of F = K + 1 + L" and found["head.bias"] == "F = K + 1 + L"
    assert found["rnn.weight_ih_l0"] == "D = A + B + C" and not found["rnn.weight_hh_l0"]
    assert plan.sizes["C"] == C and plan.sizes["L"] == 4


def test_no_leaf_is_buffered() -> None:
    plan = make_plan(rules(), MemorySource(checkpoint()))
    for step in plan.steps:
        region = np.empty(step.spec.shape, np.float32)
        for part in step.parts:
            assert destination_view(part.ops, plan.source.leaves[part.leaf].spec, part.share(region)) is not None


@pytest.mark.parametrize("like", [True, False])
def test_the_way_back(tmp_path: Path, like: bool) -> None:
    w, file = checkpoint(), tmp_path / "out.safetensors"
    convert.convert(rules(), MemorySource(w), file)
    save_file(load_file(file), file)  # as other code writes it
    back = convert.load_pytree(rules(), file, like=MemorySource(w) if like else None)
    leaves = {"/".join(keys): leaf for keys, leaf in _flat(back)}
    assert leaves.keys() == w.keys()
    for name, leaf in leaves.items():
        assert leaf.tobytes() == w[name].tobytes(), name


def _flat(tree: Any, keys: tuple[str, ...] = ()) -> Any:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, (*keys, key))
        else:
            yield (*keys, key), value


def test_the_scale_of_a_weight_norm_follows_the_rows() -> None:
    text = """
- einsum: ...D,DF->...F
  from: head/kernel
  weight_norm: head/bias
  concatenated: {F: K + L}
  linear: {module: head, concatenated: {F: L + K}}
"""
    w = {key: x.astype(np.float64) for key, x in checkpoint().items() if key.startswith("head/")}
    made = run(make_plan(rules(text), MemorySource(w)))["head.weight"]
    wanted = w["head/kernel"] / np.sqrt((w["head/kernel"] ** 2).sum(0) + 1e-12) * w["head/bias"]
    np.testing.assert_allclose(made, wanted.T[np.r_[2:7, 0:2]], rtol=1e-12)


def test_a_pair_that_is_merged_and_the_transposed_matrix_of_burn(tmp_path: Path) -> None:
    text = LINEAR.replace("  concatenated", '  plus: {einsum: "...D,DR,RF->...F", from: a, times: b}\n  concatenated')
    rng = np.random.default_rng(0)
    w = {name: rng.standard_normal(shape).astype("f4") for name, shape in (("a", (D, 2)), ("b", (2, F)))}
    w["head/kernel"] = checkpoint()["head/kernel"]
    made = run(make_plan(rules(text), MemorySource(w)))["head.weight"]
    whole = w["head/kernel"] + w["a"].astype(np.float64) @ w["b"]
    np.testing.assert_allclose(made, np.concatenate([whole[A:], whole[:A]]).T, rtol=1e-6)
    convert.convert(rules(text), MemorySource(w), tmp_path / "burn.safetensors", to="burn")
    assert np.array_equal(load_file(tmp_path / "burn.safetensors")["head.weight"], made.T)


LINEAR = """
- einsum: ...D,DF->...F
  from: head/kernel
  concatenated: {D: A + C}
  linear: {module: head, concatenated: {D: C + A}}
"""


@pytest.mark.parametrize(
    ("axes", "problem", "expected"),
    [
        ("A: {is: a, equals: 4}, C: {is: c, equals: 14}", "the axis has 19 elements; with A=4, C=14, its parts have 18 together", "float32[19,7] as D F, D = A + C"),
        ("A: {is: a, equals: 19}", "the axis has 19 elements; with A=19, its other parts have 19, and none are left for C", "float32[19,7] as D F, D = A + C"),
    ],
)  # fmt: skip
def test_sizes_that_are_not_the_axis(axes: str, problem: str, expected: str) -> None:
    source = MemorySource({"head/kernel": checkpoint()["head/kernel"]})
    with pytest.raises(PlanError) as error:
        make_plan(rules(LINEAR, f"axes: {{{axes}}}\n"), source)
    first = error.value.findings[0]
    assert (first.code, first.problem, first.expected, first.path) == (
        "size-conflict",
        problem,
        expected,
        "head/kernel",
    )
    assert first.fix.startswith("correct the equation, or the sizes in `axes`")


def test_sizes_that_nothing_gives() -> None:
    with pytest.raises(PlanError, match="nothing gives A and C a size; declare all but one in `axes`") as error:
        make_plan(rules(LINEAR, ""), MemorySource({"head/kernel": checkpoint()["head/kernel"]}))
    assert error.value.code == "size-unknown"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (", concatenated: {D: C + A}", "", "the target does not say its own order; write such as `linear: {module: ..., concatenated: {D: C + A}}`"),
        ("  concatenated: {D: A + C}\n", "", "write the source's order"),
        ("D: C + A", "D: C + B", "the target's D is C + B, and the source's A + C: not the same parts"),
        ("D: A + C}\n  linear: {module: head, concatenated: {D: C + A", "X: A + C}\n  linear: {module: head, concatenated: {X: C + A", "`concatenated` names X, and the leaf has the axes D F"),
        ("D: A + C", "D: A + D", "not the same parts"),
        ("D: A + C", "D: A + A", "two parts of 'A + A' have the same letters"),
        ("D: A + C", "D: A", "expected the parts of an axis, one after the other, such as A + B, not 'A'"),
        ("D: A + C", "D: A (B + C)", "expected the parts of an axis"),
        ("from: head/kernel\n", "from: head/kernel\n  flattened: {D: AC}\n", "`concatenated` and `flattened` both name D"),
    ],
)  # fmt: skip
def test_what_a_rule_cannot_say(old: str, new: str, message: str) -> None:
    assert old in LINEAR
    with pytest.raises(RuleError) as error:
        rules(LINEAR.replace(old, new))
    assert message in str(error.value)


SUM = "- {einsum: EINSUM, from: w, KIND: {module: m, axes: AXES}}\n"


@pytest.mark.parametrize(
    ("einsum", "axes"), [("...(A + B),(A + B)F->...F", "F(B + A)"), ("...F,F(A + B)->...(A + B)", "(B + A)F")]
)
def test_a_sum_in_another_order_is_said_with_the_key(einsum: str, axes: str) -> None:
    text = SUM.replace("EINSUM", f'"{einsum}"').replace("KIND", "linear").replace("AXES", axes)
    with pytest.raises(RuleError, match="say both orders with `concatenated`"):
        rules(text)


def test_a_kernel_with_a_sum_is_said_with_the_key() -> None:
    text = '- {dimension_numbers: "NWC,WIO->NWC", axes: P(A + B)F, from: w, conv: m}\n'
    with pytest.raises(RuleError, match="give the axis one letter, and say its parts with `concatenated`"):
        rules(text)


def test_a_cell_needs_the_letter_of_its_input() -> None:
    with pytest.raises(RuleError, match="give the rule `inputs:` with the letter of the input"):
        rules(RULES.replace("  inputs: D\n", ""))


@pytest.mark.parametrize(
    ("source", "target", "name"),
    [
        ("A + B + C", "A + B + C", "concatenated in the source's order"),
        ("A + B + C", "B + A + C", "concatenated in a third order"),
        ("C + A + B", "A + B + C", "orders of the two sides exchanged"),
    ],
)
def test_another_order_is_named(source: str, target: str, name: str) -> None:
    """The file was written by a rule with another order."""
    w = MemorySource(checkpoint())
    plan = make_plan(rules(), w)
    right, wrong = "D: A + B + C, F: K + 1 + L}\n  linear: {module: head, concatenated: {D: C + A + B", f"D: {source}, F: K + 1 + L}}\n  linear: {{module: head, concatenated: {{D: {target}"  # fmt: skip
    made = run(make_plan(rules(RULES.replace(right, wrong)), w))["head.weight"]
    step = next(step for step in plan.steps if step.name == "head.weight")
    found = mistake_in(step, made, plan, "float32")
    assert found is not None and found.name == name
