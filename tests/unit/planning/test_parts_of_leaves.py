"""Leaves whose parts go to several rules: the gates of a recurrent cell, whose matrices have rows for the input and for the state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import convert
from convert.planning.planner import make_plan
from convert.reversing.source import ReversedSource
from support.memory_source import MemorySource, rule_file, run

D, H = 5, 4
HEAD = "model: m\ntitle: M\ntargets: {torch: {loads: T}}\naxes: {D: {is: inputs, equals: 5}}\n"
EQUATION = '- einsum: "...(D + E),(D + E)(F + G)->...(F + G)"\n  from: zr\n'
RULES = (
    "".join(
        f"{EQUATION}  part: [{side} of 2, {gate} of 2]\n  linear: {{module: {module}, part: {gate} of 3}}\n"
        for side, module in ((1, "ih"), (2, "hh"))
        for gate in (1, 2)
    )
    + """- einsum: "...(D + E),(D + E)F->...F"
  from: n
  part: 1 of 2
  linear: {module: ih, part: 3 of 3}
- einsum: "...(D + E),(D + E)F->...F"
  from: n
  part: 2 of 2
  linear: {module: hh, part: 3 of 3}
- from: b
  axes: (F + F + F)
  part: 1 of 3
  parameter: z.bias
- from: b
  axes: (F + F + F)
  part: 2 of 3
  parameter: {name: rn.bias, part: 1 of 2}
- from: b
  axes: (F + F + F)
  part: 3 of 3
  parameter: {name: rn.bias, part: 2 of 2}
- from: taps
  axes: (1 + 1)FE
  part: 1 of 2
  parameter: {name: first, axes: EF}
- from: taps
  axes: (1 + 1)FE
  part: 2 of 2
  parameter: second
"""
)
SHAPES = {"zr": (D + H, 2 * H), "n": (D + H, H), "b": (3 * H,), "taps": (2, H, H)}


@pytest.fixture
def leaves() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def test_parts_of_leaves_make_parts_of_tensors(leaves: dict[str, np.ndarray]) -> None:
    plan = make_plan(rule_file(RULES, HEAD), MemorySource(leaves))
    made = run(plan)
    z, r = np.split(leaves["zr"], 2, axis=1)
    whole = np.concatenate([z, r, leaves["n"]], axis=1).T
    np.testing.assert_array_equal(made["ih.weight"], whole[:, :D])
    np.testing.assert_array_equal(made["hh.weight"], whole[:, D:])
    np.testing.assert_array_equal(np.concatenate([made["z.bias"], made["rn.bias"]]), leaves["b"])
    np.testing.assert_array_equal(made["first"], leaves["taps"][0].T)
    np.testing.assert_array_equal(made["second"], leaves["taps"][1])
    assert [part.at for part in plan.steps[0].parts] == [
        "part [1 of 2, 1 of 2]",
        "part [1 of 2, 2 of 2]",
        "part 1 of 2",
    ]


@pytest.mark.parametrize("like", [True, False])
def test_the_way_back_puts_the_parts_together(leaves: dict[str, np.ndarray], like: bool, tmp_path: Path) -> None:
    rules, source = rule_file(RULES, HEAD), MemorySource(leaves)
    path = tmp_path / "tensors.safetensors"
    save_file({name: np.ascontiguousarray(x) for name, x in run(make_plan(rules, source)).items()}, path)
    back = ReversedSource(convert.plan_reverse(rules, path, **({"like": source} if like else {})))
    for name, wanted in leaves.items():
        np.testing.assert_array_equal(back.read(name), wanted)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("  part: [2 of 2, 1 of 2]\n", "", "(D + E) and (F + G) are both sums; one axis can be split into parts, or a rule takes one part of each with `part`"),
        ("part: [2 of 2, 1 of 2]", "part: 1 of 2", "`part` has 1 entry, and the leaf has the sums (D + E) and (F + G)"),
        ("(F + F + F)\n  part: 1 of 3", "(F + F + F)\n  part: 1 of 2", "`part` is 1 of 2, and (F + F + F) has 3 parts"),
        ("axes: (F + F + F)\n  part: 1 of 3", "part: 1 of 3", "none of the leaf's axes is a sum, such as D(F + F)"),
        ("(F + F + F)\n  part: 1 of 3", "(F + F + F)\n  part: 4 of 3", "expected a part such as 1 of 2, not '4 of 3'"),
    ],
)  # fmt: skip
def test_a_part_that_the_leaf_does_not_have_is_refused(old: str, new: str, told: str) -> None:
    assert RULES.count(old) == 1
    with pytest.raises(convert.RuleError) as error:
        rule_file(RULES.replace(old, new), HEAD)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "code", "told"),
    [
        ("2 of 3\n  parameter: {name: rn", "1 of 3\n  parameter: {name: rn", "leaf-claimed-twice", "two rules take part 1 of 3 of this leaf (float32[12]), r.yaml:30 and r.yaml:34"),
        ("2 of 3\n  parameter: {name: rn", "1 of 3\n  parameter: {name: rn", "leaf-would-be-lost", "no rule takes part 2 of 3 of this leaf (float32[12], (F + F + F))"),
        ("axes: (1 + 1)FE\n  part: 2 of 2", "axes: (C + C)FE\n  part: 2 of 2", "leaf-claimed-twice", "rules take parts of this leaf (float32[2,4,4]), and it is (1 + 1) in r.yaml:42, (C + C) in r.yaml:46"),
        ("  axes: (1 + 1)FE\n  part: 2 of 2\n", "", "leaf-claimed-twice", "two rules match this leaf (float32[2,4,4])"),
    ],
)  # fmt: skip
def test_each_part_has_one_rule(old: str, new: str, code: str, told: str, leaves: dict[str, np.ndarray]) -> None:
    assert RULES.count(old) == 1
    with pytest.raises(convert.ConvertError) as error:
        make_plan(rule_file(RULES.replace(old, new), HEAD), MemorySource(leaves))
    assert (code, True) in {(finding.code, told in str(finding)) for finding in error.value.findings}


def test_a_part_of_the_last_rule_that_is_missing_is_lost(leaves: dict[str, np.ndarray]) -> None:
    rules = RULES[: RULES.rindex("- from: taps")]
    with pytest.raises(
        convert.ConvertError, match=r"no rule takes part 2 of 2 .* r.yaml:42 takes others; write a rule"
    ):
        make_plan(rule_file(rules, HEAD), MemorySource(leaves))
