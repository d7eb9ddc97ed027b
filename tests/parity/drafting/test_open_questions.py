"""Files with open questions, the survey of a checkpoint by such a file, and the commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from convert import (
    ConvertError,
    PlanError,
    draft_rules,
    survey_rules,
)
from convert.planning.planner import make_plan
from support.command_line import Run
from support.drafts import tree
from support.memory_source import MemorySource, rule_file, zeros

OPEN = """
- einsum: ask
  from: dense/kernel
  linear: ask
- from: norm/scale
  multiplies_by: ask
  epsilon: 1e-6
  layer_norm: norm
"""


def test_a_file_with_questions_is_valid_and_converts_nothing() -> None:
    rules = rule_file(OPEN)
    assert [(str(q.at), q.key, q.path) for q in rules.questions] == [
        ("r.yaml:5:11", "einsum", "dense/kernel"),
        ("r.yaml:7:11", "linear", "dense/kernel"),
        ("r.yaml:9:18", "multiplies_by", "norm/scale"),
    ]
    with pytest.raises(PlanError) as error:
        make_plan(rules, MemorySource(zeros(**{"dense/kernel": (3, 3), "norm/scale": (3,)})))
    assert "r.yaml:9:18: `multiplies_by` of norm/scale is open; write what the source does in place of `ask`" in str(error.value)  # fmt: skip


def test_a_buffer_may_be_asked_for() -> None:
    head = "model: m\ntitle: M\nfacts: {min_timescale: 1, max_timescale: 9}\ntargets:\n  torch: {loads: T}\n"
    rules = rule_file("- timescales: D\n  buffer: ask\n- from: a\n  axes: D\n  parameter: b", head)
    assert [str(q) for q in rules.questions] == [
        "r.yaml:8:11: `buffer` of buffer is open; write the module or tensor of the target that is made of it in place of `ask`"
    ]
    with pytest.raises(PlanError, match="^r.yaml is not finished: 1 question is open"):
        make_plan(rules, MemorySource(zeros(a=(4,))))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            "- from: a\n  multiplies_by: asked\n  epsilon: 1\n  rms_norm: n",
            "r.yaml:6:18: expected one of scale, 1+scale",
        ),
        ("- from: a\n  optional: ask\n  parameter: n", "r.yaml:6:13: expected true or false"),
        ("- from: a\n  epsilom: ask\n  rms_norm: ask", "r.yaml:6:3 [rule-unknown-key]: unknown key 'epsilom'"),
    ],
)
def test_errors_around_questions_say_where(rule: str, said: str) -> None:
    with pytest.raises(ConvertError, match=re.escape(said)):
        rule_file(rule)


def test_the_nearest_rule_and_why_it_does_not_match() -> None:
    rules = rule_file("""
- einsum: ...D,DE->...E
  from: block_0/mlp/kernel
  linear: blocks.0.mlp
- from: block_{i}/norm/scale
  multiplies_by: scale
  epsilon: 1e-6
  layer_norm: blocks.{i}.norm
- einsum: ...D,DF->...F
  from: head/kernel
  linear: head
""")
    leaves = {f"block_{k}/mlp/kernel": (4, 6) for k in range(48)} | {f"block_{k}/norm/scale": (4,) for k in range(48)}
    leaves |= {f"block_{k}/norm/bias": (4,) for k in range(48)} | {"head/kernel": (4, 9), "heads/kernel": (4, 2, 3)}
    found = survey_rules(rules, MemorySource(zeros(**leaves)))
    assert [(c.path, c.leaves) for c in found.covered] == [
        ("block_0/mlp/kernel", 1),
        ("block_{i}/norm/scale", 48),
        ("head/kernel", 1),
    ]
    said = {u.path: (len(u.leaves), u.near.path, u.near.why) for u in found.uncovered if u.near}
    assert said == {
        "block_{1,2,3,4,5,6,7,...,47}/mlp/kernel": (
            47,
            "block_0/mlp/kernel",
            ("the index is missing: it has block_0; block_{i} would also match block_1",),
        ),
        "block_{i}/norm/bias": (48, "block_{i}/norm/scale", ("other name: the rule has scale, the leaf has bias",)),
        "heads/kernel": (
            1,
            "head/kernel",
            (
                "other name: the rule has head, the leaf has heads",
                "other shape, float32[4,2,3]: ...D,DF->...F has a weight with 2 axes (D F)",
            ),
        ),
    }


@pytest.mark.slow
def test_a_rule_that_lacks_its_main_leaf_is_not_covered(convert: Run, tmp_path: Path) -> None:
    ckpt, file = tmp_path / "net.npz", tmp_path / "mine.yaml"
    np.savez(ckpt, **{"a/kernel": np.ones((3, 4), np.float32), "a/bias": np.ones(4, np.float32)})
    file.write_text(
        "model: m\ntitle: M\ntargets: {torch: {loads: T}}\nrules:\n"
        "- einsum: ...D,DE->...E\n  from: a/kernal\n  bias: a/bias\n  linear: a\n"
    )
    out, err = convert("plan", file, ckpt, code=2)
    assert out.splitlines()[0] == "Covered: 0 of 2 leaves"
    assert "Main leaf missing: 1 rule" in out and "a/kernal  linear  matches 1 leaf" in out
    assert err.splitlines() == [
        f"error[leaf-missing]: {file} does not fit {ckpt}: 1 problem",
        f"  - {file}:5: a/kernal (linear, weight): expected a leaf with this path, got none; did you mean 'a/kernel'? "
        "Write `optional: true` only if the leaf may be absent",
    ]


def test_commands(convert: Run, tmp_path: Path) -> None:
    """`rules new`, `rules validate` and `plan` on a draft: what they print, and their exit codes."""
    ckpt, file = tmp_path / "net.npz", tmp_path / "draft.yaml"
    np.savez(ckpt, **{f"params/dense_{k}/kernel": np.ones((6, 6), np.float32) for k in range(48)}, step=np.int32(3))
    shown, _ = convert("rules", "new", ckpt)
    out, err = convert("rules", "new", ckpt, file)
    assert out == "" and file.read_text() == shown.replace("my-model", "draft")  # without a file, no name is known
    assert err == (
        f"wrote {file}: 2 rules for 49 leaves, 2 questions open; answer them, then `convert plan {file} {ckpt}`\n"
    )
    assert "# question: the sizes 6 x 6 do not tell which axes are inputs" in shown
    _, err = convert("rules", "new", ckpt, file, code=2)
    assert err.startswith("error[output-exists]: ") and str(file) in err
    out, _ = convert("rules", "validate", file, code=2)
    assert out.splitlines()[0] == f"{file}: valid so far, 2 rules for torch, 2 questions open"
    assert f"{file}:16:11: `einsum` of dense_{{i}}/kernel is open" in out
    out, err = convert("plan", file, ckpt, code=2)
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["Covered:", "48", "of", "49", "leaves"]
    assert rows[1][:4] == ["params/dense_{i}/kernel", "linear", "48", "leaves"]
    assert ["No", "rule:"] not in [row[:2] for row in rows] and f"{file} is not finished: 2 questions are open" in err
    said = json.loads(convert("plan", file, ckpt, "--json", code=2)[0])
    assert not said["complete"] and said["leaves"] == 49 and len(said["questions"]) == 2 == len(said["findings"])
    assert said["covered"][0]["open"] == ["einsum", "linear"] and said["dropped"][0]["path"] == "step"
    out, err = convert("plan", file, ckpt, "--dtype", "float3", code=2)
    assert "--dtype float3" in err and out == ""
    file.write_text(shown.replace("dense_{i}", "dens_{i}"))
    out, _ = convert("plan", file, ckpt, code=2)
    assert (
        "No rule: 48 leaves\n  params/dense_{i}/kernel  float32[6,6]  48 leaves\n      nearest: params/dens_{i}/kernel"
        in out
    )
    assert "other name: the rule has dens_{i}, the leaf has dense_0" in out


def test_a_key_of_many_numbers_takes_little_memory() -> None:
    """A key of n numbers was copied n times."""
    import tracemalloc

    source = tree(**{"1_" * 2000 + f"w{k}": (3,) for k in range(10)})
    tracemalloc.start()
    try:
        draft_rules(source)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
