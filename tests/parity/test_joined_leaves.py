"""Leaves that stand one after the other along an axis of inputs: ``from: [x/kernel, h/kernel]``, with the sum in the equation."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import convert
from convert import PlanError, RuleError
from convert.planning.merged_leaf import Joined
from convert.planning.planner import make_plan
from convert.reversing.plan import reverse
from convert.verify.layers.level import check_layers
from convert.verify.report.report import Verdict
from convert.writing.execute import Result, execute
from convert.writing.written import open_written
from support.memory_source import HEAD, MemorySource, rule_file, run
from support.weights_level import check_weights

CELL = "- {einsum: '...(D + E),(D + E)F->...F', from: ['c/{i,f}/w', 'c/{i,f}/u'], bias: 'c/{i,f}/b', linear: both}"
X, H = 3, 5


def drawn(dtype: str = "float32", inputs: int = X) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    sizes = {"w": (inputs, H), "u": (H, H), "b": (H,)}
    return {f"c/{gate}/{leaf}": rng.standard_normal(sizes[leaf]).astype(kind) for gate in "if" for leaf in sizes}


def wanted(tree: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([np.concatenate([tree[f"c/{g}/w"], tree[f"c/{g}/u"]]).T for g in "if"])


def written(tmp_path: Path, tree: dict[str, np.ndarray], rules: str = CELL) -> tuple[convert.Plan, Path]:
    plan = make_plan(rule_file(rules, HEAD), MemorySource(tree))
    out = tmp_path / "out.safetensors"
    assert isinstance([*execute(plan, out, overwrite=True)][-1], Result)
    return plan, out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_inputs_and_states_of_each_gate(dtype: str, tmp_path: Path) -> None:
    tree = drawn(dtype)
    plan, out = written(tmp_path, tree)
    made = run(plan)
    assert made["both.weight"].dtype == tree["c/i/w"].dtype and np.array_equal(made["both.weight"], wanted(tree))
    assert plan.steps[0].arithmetic == "2 leaves, one after the other" and plan.notes == ()
    assert check_weights(plan, open_written(out)).verdict is Verdict.PASSED
    assert check_layers(plan, open_written(out)).verdict is Verdict.PASSED


def test_stacked_layers_of_which_a_piece_is_that_of_the_whole() -> None:
    tree = {f"s/{name}": np.stack([x, 2 * x, 3 * x]) for name, x in drawn().items()}
    rules = CELL.replace("c/", "s/c/").replace("linear: both", "stacked: {k: 0}, linear: 'l.{k}'")
    plan = make_plan(rule_file(rules), MemorySource(tree))
    assert np.array_equal(run(plan)["l.2.weight"], 3 * wanted(drawn()))
    merge = plan.merges["[s/c/i/w, s/c/i/u]"]
    assert isinstance(merge, Joined)
    whole, parts = plan.source.read(merge.name), [tree[leaf] for leaf in merge.terms]
    for start in range(X + H - 1):
        out = np.empty((2, 2, H), np.float32)
        merge.fill_piece(out, (1, start, 0), parts, None)
        assert np.array_equal(out, whole[1:, start : start + 2])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("(D + E)", "D", "has 2 leaves, one after the other; the equation then has one axis of inputs"),
        ("(D + E)", "(D + E + G)", "has 2 leaves, one after the other"),
        ("...(D + E),(D + E)F->...F", "...D,D(E + F)->...(E + F)", "has 2 leaves, one after the other"),
        ("linear: both", "part: 1 of 2, linear: both", "has 2 leaves, one after the other"),
        ("'c/{i,f}/u'", "'c/{i,f,g}/u'", "do not have the same indices and alternatives"),
    ],
)
def test_what_is_no_such_rule_is_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(RuleError) as refused:
        rule_file(CELL.replace(old, new))
    assert said in str(refused.value)


def test_leaves_that_do_not_fit_or_are_missing_are_named() -> None:
    tree = drawn()
    with pytest.raises(PlanError, match="F = 4"):
        make_plan(rule_file(CELL), MemorySource({**tree, "c/f/u": np.ones((H, 4), np.float32)}))
    with pytest.raises(PlanError, match=r"c/\{i,f\}/u"):
        make_plan(rule_file(CELL), MemorySource({name: x for name, x in tree.items() if not name.endswith("u")}))


def test_leaves_in_another_order_are_named(tmp_path: Path) -> None:
    """Planted: the states in front of the inputs."""
    tree = drawn(inputs=H)
    plan, out = written(tmp_path, tree)
    swapped = np.concatenate([np.concatenate([tree[f"c/{g}/u"], tree[f"c/{g}/w"]]).T for g in "if"])
    save_file({**load_file(out), "both.weight": np.ascontiguousarray(swapped)}, out, {"format": "pt"})
    level = check_weights(plan, open_written(out))
    assert level.verdict is Verdict.FAILED and "leaves joined in another order" in str(level.findings[0])
    assert check_layers(plan, open_written(out)).verdict is Verdict.FAILED


def test_the_way_back_is_refused(tmp_path: Path) -> None:
    plan, out = written(tmp_path, drawn())
    with pytest.raises(PlanError, match="the values of several leaves, one after the other .*keep the leaves apart"):
        reverse(plan, open_written(out))
    with pytest.raises(PlanError, match="the values of several leaves, one after the other; it does not tell them"):
        convert.load_pytree(rule_file(CELL, HEAD), out)
