"""Wrong tensors with one cause are one finding, named by the cause: experts exchanged, layers reversed, one stale file of several."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from convert.core.findings import Finding
from convert.layers.step_tensor import expected
from convert.planning.plan import Plan
from convert.planning.planner import make_plan
from convert.verify.mistakes.index_moves import find_move
from convert.verify.weights.other_values import NEAR, UNRELATED
from convert.writing.written import open_written
from support.memory_source import MemorySource, rule_file
from support.weights_level import check_weights

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]
RANDOM = np.random.default_rng(0)
LAYERS, EXPERTS, D, F = 4, 3, 6, 10
RULES = """
- einsum: ...D,DE->...E
  from: block_{i}/router
  linear: blocks.{i}.moe.router
- einsum: ...D,EDF->...EF
  from: block_{i}/up
  linear: blocks.{i}.moe.experts.{E}.up
- einsum: ...F,EFD->...ED
  from: block_{i}/down
  linear: blocks.{i}.moe.experts.{E}.down
"""
LEAVES = {
    f"block_{i}/{name}": RANDOM.standard_normal(shape).astype(np.float32)
    for i in range(LAYERS)
    for name, shape in (("router", (D, EXPERTS)), ("up", (EXPERTS, D, F)), ("down", (EXPERTS, F, D)))
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(rule_file(RULES), MemorySource(LEAVES))


def found(plan: Plan, tmp_path: Path, edit: Callable[[Tensors], object], files: int = 1) -> list[Finding]:
    """The findings for an edited file, or for several files with an index."""
    tensors = {step.name: np.ascontiguousarray(expected(step, plan.source)) for step in plan.steps}
    edit(tensors)
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    names = {name: f"model-{k * files // len(tensors) + 1}.safetensors" for k, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: x for name, x in tensors.items() if names[name] == file}, tmp_path / file)
    if files > 1:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    out = tmp_path if files > 1 else tmp_path / "model-1.safetensors"
    return list(check_weights(plan, open_written(out)).findings)


def expert(i: int, k: int, name: str) -> str:
    return f"blocks.{i}.moe.experts.{k}.{name}.weight"


def exchange(t: Tensors, a: str, b: str) -> None:
    t[a], t[b] = t[b], t[a]


def experts(names: tuple[str, ...], layers: range, router: bool) -> Callable[[Tensors], None]:
    """The first and the last expert of some layers exchanged."""

    def edit(t: Tensors) -> None:
        for i in layers:
            for name in names:
                exchange(t, expert(i, 0, name), expert(i, 2, name))
            if router:
                t[f"blocks.{i}.moe.router.weight"] = t[f"blocks.{i}.moe.router.weight"][::-1]

    return edit


def reordered(order: list[int]) -> Callable[[Tensors], None]:
    """Layers in another order."""

    def edit(t: Tensors) -> None:
        old = dict(t)
        for name in t:
            _, i, rest = name.split(".", 2)
            t[name] = old[f"blocks.{order[int(i)]}.{rest}"]

    return edit


def test_experts_of_one_kind_are_exchanged(plan: Plan, tmp_path: Path) -> None:
    (finding,) = found(plan, tmp_path, experts(("up",), range(2, 3), router=False))
    assert finding.data["diagnosis"] == "of another expert"
    assert (
        finding.problem == f"of another expert: of the experts, 0 and 2 are exchanged; the same in {expert(2, 2, 'up')}"
    )


def test_experts_and_the_rows_of_their_router(plan: Plan, tmp_path: Path) -> None:
    """One cause, which leaves the function as it is."""
    (finding,) = found(plan, tmp_path, experts(("up", "down"), range(LAYERS), router=True))
    assert finding.data["diagnosis"] == "of another expert" and len(finding.data["tensors"]) == 5 * LAYERS
    assert "of the experts, 0 and 2 are exchanged" in finding.problem
    assert (
        "have the same order: if no other tensor has this axis, the model computes the same function" in finding.problem
    )


def test_experts_without_a_part_of_them_change_the_function(plan: Plan, tmp_path: Path) -> None:
    (finding,) = found(plan, tmp_path, experts(("up",), range(1), router=True))
    assert "exchanged" in finding.problem and "same function" not in finding.problem


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ([3, 2, 1, 0], "the 4 layers are in the reverse order"),
        ([1, 2, 3, 0], "the layers are moved back by 1: index 0 holds 1"),
        ([0, 2, 1, 3], "of the layers, 1 and 2 are exchanged"),
        ([0, 1, 2, 2], "layer 3 holds what belongs to layer 2"),
    ],
)
def test_layers_in_another_order(order: list[int], text: str, plan: Plan, tmp_path: Path) -> None:
    (finding,) = found(plan, tmp_path, reordered(order))
    assert finding.data["diagnosis"] == "of another layer" and text in finding.problem
    assert finding.rule == "" and len(finding.data["rules"]) == 3


@pytest.mark.slow
def test_many_layers_are_one_cause_beyond_those_that_are_searched(tmp_path: Path) -> None:
    """After 64 tensors only the causes that were found are tried."""
    leaves = {f"w_{i}": RANDOM.standard_normal((3, 4)).astype(np.float32) for i in range(70)}
    plan = make_plan(
        rule_file('- einsum: "...I,IO->...O"\n  from: w_{i}\n  linear: layers.{i}.l'), MemorySource(leaves)
    )

    def shift(t: Tensors) -> None:
        old = dict(t)
        for i in range(70):
            t[f"layers.{i}.l.weight"] = old[f"layers.{(i + 1) % 70}.l.weight"]

    first, *rest = found(plan, tmp_path, shift)
    assert first.data["diagnosis"] == "of another layer" and len(first.data["tensors"]) >= 69
    assert len(rest) <= 1


def test_the_words_that_are_exchanged(tmp_path: Path) -> None:
    """In two rules, one cause."""
    leaves = {f"{name}_{i}": RANDOM.standard_normal((4, 4)).astype(np.float32) for name in "qk" for i in range(3)}
    rules = "\n".join(
        f'- einsum: "...I,IO->...O"\n  from: {n}_{{i}}\n  linear: layers.{{i}}.attn.{n}_proj' for n in "qk"
    )
    plan = make_plan(rule_file(rules), MemorySource(leaves))

    def edit(t: Tensors) -> None:
        for i in range(3):
            exchange(t, f"layers.{i}.attn.q_proj.weight", f"layers.{i}.attn.k_proj.weight")

    (finding,) = found(plan, tmp_path, edit)
    assert finding.problem.startswith("of another tensor: k_proj and q_proj are exchanged; the same in 5 more tensors")


def test_a_file_of_zeros_among_several(plan: Plan, tmp_path: Path) -> None:
    (finding,) = found(plan, tmp_path, lambda t: t.update({name: 0 * t[name] for name in list(t)[21:]}), files=4)
    assert finding.data["diagnosis"] == "all zeros"
    assert "these are the tensors of model-4.safetensors, and those of the other files are right" in finding.problem


def near(t: Tensors, names: list[str]) -> None:
    for name in names:
        t[name] = t[name] * (1 + 1e-3 * np.random.default_rng(1).standard_normal(t[name].shape).astype(np.float32))


def test_one_stale_file_of_several(plan: Plan, tmp_path: Path) -> None:
    (finding,) = found(plan, tmp_path, lambda t: near(t, list(t)[7:14]), files=4)
    assert finding.data["diagnosis"] == NEAR and finding.data["files"] == "model-2.safetensors"
    assert (
        "the tensors of model-2.safetensors are of other weights, and those of the other files are right"
        in finding.problem
    )
    assert finding.data["relative"] == pytest.approx(1e-3, rel=0.3) and len(finding.data["tensors"]) == 7


def test_another_checkpoint_near_this_one(plan: Plan, tmp_path: Path) -> None:
    (finding,) = found(plan, tmp_path, lambda t: near(t, list(t)))
    assert finding.data["diagnosis"] == NEAR and len(finding.data["tensors"]) == len(plan.steps)
    assert "of another training step" in finding.problem and finding.data["files"] == ""


def test_an_unrelated_model(plan: Plan, tmp_path: Path) -> None:
    def edit(t: Tensors) -> None:
        other = np.random.default_rng(5)
        t.update({name: other.standard_normal(x.shape).astype(np.float32) for name, x in t.items()})

    findings = found(plan, tmp_path, edit)
    assert findings[0].data["diagnosis"] == UNRELATED and len(findings) == 1


def test_one_cause_of_all_tensors(plan: Plan, tmp_path: Path) -> None:
    (finding,) = found(plan, tmp_path, lambda t: t.update({name: x * np.float32(0.25) for name, x in t.items()}))
    assert finding.data["diagnosis"] == "multiplied by a number" and len(finding.data["tensors"]) == len(plan.steps)
    assert f"the same in {len(plan.steps) - 1} more tensors of 3 rules" in finding.problem


def test_hidden_features_in_one_order(plan: Plan, tmp_path: Path) -> None:
    """Of the first layer and of the one that reads it: the function is the same."""
    order = np.random.default_rng(3).permutation(F)

    def edit(t: Tensors, *, read: bool = True) -> None:
        t[expert(0, 1, "up")] = t[expert(0, 1, "up")][order]
        if read:
            t[expert(0, 1, "down")] = t[expert(0, 1, "down")][:, order]

    (finding,) = found(plan, tmp_path, edit)
    assert "all have the same order" in finding.problem and "same function" in finding.problem
    (alone,) = found(plan, tmp_path, lambda t: edit(t, read=False))
    assert "same function" not in alone.problem


@pytest.mark.parametrize(
    ("name", "other", "word"),
    [
        ("h.1.w", "h.2.w", "layer"),
        ("model.layers.1.w", "model.layers.2.w", "layer"),
        ("layers.1.experts.0.w", "layers.1.experts.5.w", "expert"),
        ("layers.1.experts.0.w", "layers.2.experts.0.w", "layer"),
        ("codebooks.1.w", "codebooks.2.w", "codebook"),
        ("layers.1.experts.0.w", "layers.2.experts.5.w", None),
        ("layers.1.q", "layers.1.k", None),
    ],
)
def test_the_number_that_differs_has_a_name(name: str, other: str, word: str | None) -> None:
    move = find_move(name, other)
    assert (move.word if move is not None else None) == word


def test_three_heads_in_several_weights_are_no_parts_of_a_fused_one(tmp_path: Path) -> None:
    """One weight alone may have three parts; two weights with one order have heads."""
    leaves = {name: RANDOM.standard_normal((6, 6)).astype(np.float32) for name in "qko"}
    rules = "\n".join(f'- einsum: "...I,IO->...O"\n  from: {name}\n  linear: l.0.{name}' for name in "qko")
    plan = make_plan(rule_file(rules), MemorySource(leaves))
    rows = [2, 3, 0, 1, 4, 5]

    def edit(t: Tensors, names: str) -> None:
        for name in names:
            x = t[f"l.0.{name}.weight"]
            t[f"l.0.{name}.weight"] = x[:, rows] if name == "o" else x[rows]

    (alone,) = found(plan, tmp_path, lambda t: edit(t, "q"))
    assert alone.data["diagnosis"] == "thirds in another order" and "same function" not in alone.problem
    (both,) = found(plan, tmp_path, lambda t: edit(t, "qko"))
    assert both.data["diagnosis"] != "thirds in another order" and "as of heads" in both.problem
    assert "same function" in both.problem


def test_a_tensor_with_one_equal_value_is_not_stale_in_part(plan: Plan, tmp_path: Path) -> None:
    def edit(t: Tensors) -> None:
        old = dict(t)
        near(t, list(t))
        t["blocks.0.moe.router.weight"][0, 0] = old["blocks.0.moe.router.weight"][0, 0]

    (finding,) = found(plan, tmp_path, edit)
    assert len(finding.data["tensors"]) == len(plan.steps)


@pytest.mark.slow
def test_a_file_made_of_the_tree_that_the_rules_drop(tmp_path: Path) -> None:
    """The moving average in place of the weights; more tensors than are searched for all mistakes."""
    weights = {f"params/w_{i}": RANDOM.standard_normal((3, 4)).astype(np.float32) for i in range(70)}
    average = {f"ema_{name}": (0.99 * x).astype(np.float32) + np.float32(0.1) * x[::-1] for name, x in weights.items()}
    rules = (
        '- einsum: "...I,IO->...O"\n  from: params/w_{i}\n  linear: l.{i}\n- drop: ema_params/**\n  because: an average'
    )
    plan = make_plan(rule_file(rules), MemorySource(weights | average))

    def edit(t: Tensors) -> None:
        t.update({f"l.{i}.weight": average[f"ema_params/w_{i}"].T for i in range(70)})

    (finding,) = found(plan, tmp_path, edit)
    assert finding.data["diagnosis"] == "of a dropped tree" and len(finding.data["tensors"]) == 70
    assert "it is made of ema_params" in finding.problem
