"""Tensors that no leaf holds: one number in all elements, and zeros in front of an axis."""

from __future__ import annotations

import numpy as np
import pytest

from convert import PlanError, RuleError
from convert.planning.planner import make_plan
from support.memory_source import MemorySource, rule_file, run

RULES = """
- from: layers_{i}/w
  axes: TD
  parameter: {name: "layers.{i}.w", axes: ".TD", zeros_before: {T: 2}}
- value: 1
  axes: .D
  because: the source does not scale
  constant: layers.{i}.scale{1,2}
"""
TREE = {f"layers_{i}/w": np.full((3, 4), 1.0 + i, np.float32) for i in range(2)}


def test_tensors_of_every_layer_are_filled() -> None:
    made = run(make_plan(rule_file(RULES), MemorySource(TREE)))
    assert {name for name in made if "scale" in name} == {f"layers.{i}.scale{k}" for i in (0, 1) for k in (1, 2)}
    assert all(np.array_equal(x, np.ones((1, 4))) for name, x in made.items() if "scale" in name)
    assert np.array_equal(made["layers.1.w"], np.pad(TREE["layers_1/w"], ((2, 0), (0, 0)))[None])
    plan = make_plan(rule_file(RULES), MemorySource(TREE), dtype="bfloat16")
    assert {step.spec.dtype for step in plan.steps} == {"bfloat16"}
    assert plan.notes == (
        "layers.{i}.w has zeros that no leaf holds: 2 in front of T",
        "layers.{i}.scale{1,2} is 1 in all elements: the source does not scale",
    )


def test_numbers_of_a_rule_fill_the_last_axes() -> None:
    more = """
- {value: [[1, -inf], [0.5, 2]], axes: D.., because: a mask, constant: "m.{0,1}.mask"}
- {value: [[2, 0]], axes: .., dtype: int64, because: places, constant: places}
- {value: {below: 1, diagonal: true, above: 0}, axes: .TD, dtype: bool, because: causal, constant: seen}
- {value: 7, axes: "", dtype: int64, because: a counter, constant: step}
"""
    plan = make_plan(rule_file(RULES + more), MemorySource(TREE), dtype="bfloat16")
    assert "m.{0,1}.mask is made of numbers of the rule: a mask" in plan.notes
    made = run(plan)
    assert np.array_equal(made["m.1.mask"], np.broadcast_to([[1, -np.inf], [0.5, 2]], (4, 2, 2)))
    assert made["m.0.mask"].dtype.name == "bfloat16" and made["places"].tolist() == [[2, 0]]
    assert np.array_equal(made["seen"], np.tri(3, 4, dtype=bool)[None]) and made["step"].shape == ()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[[1, 2], [3]]", "not of one length"),
        ("[]", "empty"),
        ("[1, many]", "is no number"),
        ("[[[1]]]", "`value` has 3 axes, and `axes` has 2"),
        ("{below: 1, above: 0}", "needs the key 'diagonal'"),
    ],
)
def test_numbers_without_a_shape_are_refused(value: str, said: str) -> None:
    with pytest.raises(RuleError, match=said):
        rule_file(RULES.replace("value: 1", f"value: {value}"))


def test_lists_that_do_not_fit_the_axes_are_refused() -> None:
    with pytest.raises(PlanError, match=r"expected \[1, 4\], got lists of \[3\]"):
        make_plan(rule_file(RULES.replace("value: 1", "value: [1, 2, 3]")), MemorySource(TREE))


def test_a_name_with_a_wildcard_is_refused() -> None:
    with pytest.raises(RuleError, match=r"the target layers.\*\* has a wildcard"):
        rule_file(RULES.replace("layers.{i}.scale{1,2}", "layers.**"))


def test_a_letter_without_a_size_is_refused() -> None:
    with pytest.raises(PlanError, match="no leaf gives E a size"):
        make_plan(rule_file(RULES.replace("axes: .D", "axes: .E")), MemorySource(TREE))


@pytest.mark.parametrize(
    ("wrong", "said"), [("{E: 2}", "names E, and the target's `axes` do not"), ("{T: 0}", "at least 1")]
)
def test_zeros_in_front_of_no_axis_are_refused(wrong: str, said: str) -> None:
    with pytest.raises(RuleError, match=said):
        rule_file(RULES.replace("{T: 2}", wrong))
