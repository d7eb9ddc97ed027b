"""An axis of one tensor from several leaves: element by element, as in the experts of GPT-OSS, or one after the other, as in Gemma 4's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert.core.errors import ConvertError
from convert.planning.plan import Plan
from convert.verify.layers.level import check_layers
from convert.verify.report.report import Verdict
from convert.writing.execute import execute
from convert.writing.written import open_written
from support.memory_source import rule_file
from support.saved_network import assert_levels_pass, plan_saved, write
from support.weights_level import check_weights

LAYERS, E, D, F = 2, 3, 4, 5
HEAD = """model: columns
title: columns
targets: {torch: {loads: Torch}}
root: params
"""
RULES = """
- from: experts/{gate,up}
  axes: EDF
  stacked: {i: 1}
  parameter: {name: "layers.{i}.gate_up", axes: "ED(F (1 + 1))"}
- from: experts/{gate,up}_bias
  axes: EF
  stacked: {i: 1}
  parameter: {name: "layers.{i}.gate_up_bias", axes: "E(F + F)"}
- from: middle/{gate,up}
  axes: EDF
  stacked: {i: 1}
  parameter: {name: "layers.{i}.middle", axes: "E(F + F)D"}
- from: thirds/{a,b,c}
  axes: FD
  parameter: {name: thirds, axes: "D(F (1 + 1 + 1))"}
- einsum: ...D,DF->...F
  from: glu/{gate,up}
  bias: glu/{gate,up}_bias
  linear: {module: glu, axes: (F (1 + 1))D}
- from: tables/{a,b}
  axes: FD
  parameter: {name: tables, axes: (1 + 1)FD}
- from: ends/{a,b}
  axes: D.
  parameter: {name: ends, axes: (D + D).}
- from: row
  axes: ..D
  parameter: {name: tokens, axes: .D, part: 1 of 2}
- from: rows
  parameter: {name: tokens, part: 2 of 2}
- from: wide
  axes: FD
  parameter: {name: unequal, axes: D(F + E), part: 1 of 2}
- from: short
  axes: ED
  parameter: {name: unequal, axes: D(F + E), part: 2 of 2}
- from: both
  axes: (D + D).
  parameter: {name: "{left,right}", axes: .D}
"""
SHAPES = {
    "experts/gate": (E, LAYERS, D, F),
    "experts/gate_bias": (E, LAYERS, F),
    "middle/gate": (E, LAYERS, D, F),
    "thirds/a": (F, D),
    "glu/gate": (D, F),
    "glu/up": (D, F),
    "glu/gate_bias": (F,),
    "glu/up_bias": (F,),
    "tables/a": (F, D),
    "tables/b": (F, D),
    "ends/a": (D, 1),
    "ends/b": (D, 1),
    "row": (1, 1, D),
    "rows": (F, D),
    "wide": (F, D),
    "short": (E, D),
    "both": (2 * D, 1),
}


@pytest.fixture(scope="module")
def leaves() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    names = {**SHAPES, "experts/up": SHAPES["experts/gate"], "experts/up_bias": SHAPES["experts/gate_bias"]}
    names |= {"middle/up": SHAPES["middle/gate"]}
    names |= {f"thirds/{x}": SHAPES["thirds/a"] for x in "bc"}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in names.items()}


@pytest.fixture(scope="module")
def plan(leaves: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Plan:
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        folder, _, key = name.rpartition("/")
        (tree.setdefault(folder, {}) if folder else tree)[key] = leaf
    return plan_saved({"params": tree}, RULES, HEAD, tmp_path_factory.mktemp("columns"))


def test_elements_alternate_or_follow_each_other(plan: Plan, leaves: dict[str, np.ndarray], tmp_path: Path) -> None:
    path = write(plan, tmp_path / "out.safetensors")
    made = load_file(path)
    for i in range(LAYERS):
        gate_up = made[f"layers.{i}.gate_up"]
        assert gate_up.shape == (E, D, 2 * F)
        np.testing.assert_array_equal(gate_up[..., 0::2], leaves["experts/gate"][:, i])
        np.testing.assert_array_equal(gate_up[..., 1::2], leaves["experts/up"][:, i])
        halves = [leaves[f"experts/{x}_bias"][:, i] for x in ("gate", "up")]
        np.testing.assert_array_equal(made[f"layers.{i}.gate_up_bias"], np.concatenate(halves, -1))
    for k, x in enumerate("abc"):
        np.testing.assert_array_equal(made["thirds"][:, k::3], leaves[f"thirds/{x}"].T)
    for k, x in enumerate(("gate", "up")):
        np.testing.assert_array_equal(made["glu.weight"][k::2], leaves[f"glu/{x}"].T)
        np.testing.assert_array_equal(made["glu.bias"][k::2], leaves[f"glu/{x}_bias"])
    np.testing.assert_array_equal(made["tables"], np.stack([leaves["tables/a"], leaves["tables/b"]]))
    np.testing.assert_array_equal(made["ends"], np.concatenate([leaves["ends/a"], leaves["ends/b"]]))
    np.testing.assert_array_equal(made["tokens"], np.concatenate([leaves["row"][0], leaves["rows"]]))
    np.testing.assert_array_equal(made["unequal"], np.concatenate([leaves["wide"], leaves["short"]]).T)
    np.testing.assert_array_equal(np.concatenate([made["left"], made["right"]], 1), leaves["both"].T)
    assert_levels_pass(plan, path)


def test_the_plan_says_where_each_leaf_goes(plan: Plan) -> None:
    places = {step.name: [(part.leaf.split("/")[-1], part.place) for part in step.parts] for step in plan.steps}
    assert places["layers.0.gate_up"] == [("gate", "0:10:2"), ("up", "1:10:2")]
    assert places["layers.1.gate_up_bias"] == [("gate_bias", "0:5"), ("up_bias", "5:10")]
    assert places["thirds"] == [("a", "0:15:3"), ("b", "1:15:3"), ("c", "2:15:3")]


@pytest.mark.parametrize(
    ("tensor", "wrong", "named"),
    [
        ("layers.0.gate_up", lambda x: np.concatenate([x[..., 0::2], x[..., 1::2]], -1), "one after the other"),
        ("layers.0.gate_up", lambda x: x.reshape(E, D, F, 2)[..., ::-1].reshape(x.shape), "in another order"),
        ("layers.1.gate_up", lambda x: np.where(np.arange(2 * F) % 2, np.roll(x, 1, 0), x), "in its part 1 to 9 in steps of 2"),
        ("layers.0.gate_up_bias", lambda x: np.roll(x, F, -1), "in another order"),
        ("layers.0.gate_up_bias", lambda x: x.reshape(E, 2, F).swapaxes(1, 2).reshape(x.shape), "a grid of 2 x 5"),
        ("thirds", lambda x: x.reshape(D, F, 3).swapaxes(1, 2).reshape(x.shape), "one after the other"),
        ("glu.weight", lambda x: np.concatenate([x[::2], x[1::2]]), "glu.weight"),
        ("glu.bias", lambda x: np.concatenate([x[::2], x[1::2]]), "one after the other"),
        ("tables", lambda x: x[::-1], "in another order"),
        ("ends", lambda x: np.roll(x, D, 0), "in another order"),
        ("unequal", lambda x: np.roll(x, F, 1), "unequal"),
        ("tokens", lambda x: np.roll(x, 1, 0), "rows"),
    ],
)  # fmt: skip
def test_a_wrong_order_is_named(
    tensor: str, wrong: Callable[[np.ndarray], np.ndarray], named: str, plan: Plan, tmp_path: Path
) -> None:
    path = write(plan, tmp_path / "out.safetensors")
    made = load_file(path)
    made[tensor] = np.ascontiguousarray(wrong(made[tensor]))
    save_file(made, path)
    report = check_weights(plan, open_written(path))
    said = " ".join(map(str, report.findings))
    assert report.verdict is Verdict.FAILED and tensor in said and named in said, said


def test_leaves_in_each_others_columns_are_found_without_the_plan(plan: Plan, tmp_path: Path) -> None:
    (step,) = (step for step in plan.steps if step.name == "layers.1.gate_up")
    gate, up = step.parts
    exchanged = replace(step, parts=(replace(gate, rows=up.rows), replace(up, rows=gate.rows)))
    wrong = replace(plan, steps=tuple(exchanged if s is step else s for s in plan.steps))
    list(execute(wrong, tmp_path / "wrong.safetensors"))
    level = check_layers(wrong, open_written(tmp_path / "wrong.safetensors"))
    assert any(finding.path == step.name for finding in level.findings), level


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("ED(F (1 + 1))", "ED(F (1 + 1 + 1))", "has 3 parts, and the rule has 2 for it"),
        ("ED(F (1 + 1))", "E(D (1 + 1))F", "alternate one by one along the last axis"),
        ("ED(F (1 + 1))", "E(F (1 + 1))", "have the letters E F for a part, and the leaf has E D F"),
        ("ED(F (1 + 1))", "E(D (F + F))", "alternate one by one"),
        ("ED(F (1 + 1))", "(E (1 + 1))DF", "alternate one by one along the last axis"),
        ("axes: .D}", "axes: .F}", "the target's `axes` name F, and the leaf has the axes D"),
        ("D(F (1 + 1 + 1))", "D(F G (1 + 1 + 1))", "have the letters D F G for a part"),
    ],
)
def test_what_does_not_fit_is_refused(old: str, new: str, told: str) -> None:
    with pytest.raises(ConvertError) as refused:
        rule_file(RULES.replace(old, new, 1), HEAD)
    assert told in str(refused.value)
