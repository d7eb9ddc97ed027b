"""Indices that are written as words, or whose numbers start above 0, in paths of the source and of the target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert import PlanError, RuleError
from convert.core.path_pattern import parse_pattern
from convert.planning.planner import make_plan
from convert.verify.layers.placement import misplaced
from convert.verify.layers.samples import rule_of
from convert.writing.execute import execute
from convert.writing.written import open_written
from support.memory_source import HEAD, MemorySource, rule_file, run
from support.weights_level import check_weights

TABLE = "  axes: VD\n  embedding: "


def numbers(*shape: int) -> np.ndarray:
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_number_that_starts_above_zero(value: int, offset: int) -> None:
    pattern = parse_pattern(f"layers.{{i+{offset}}}.w")
    text = pattern.fill({"i": value})
    assert text == f"layers.{value + offset}.w"
    match = pattern.match(text)
    assert match is not None
    assert dict(match.indices) == {"i": value}
    assert offset == 0 or pattern.match(f"layers.{offset - 1}.w") is None


@pytest.mark.parametrize("text", ["{i+2:a,b}", "{i+1}/{i}", "{i+}", "{i-1}"])
def test_indices_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_pattern(text)


CASES = {
    "a stacked index with names": ("- from: w\n  stacked: {p: 0}\n" + TABLE + '"{p:q1,q2}"', {"w": (2, 3, 5)}, {"q1": ("w", 0), "q2": ("w", 1)}),
    "a stacked index with an offset": ("- from: w\n  stacked: {i: 0}\n" + TABLE + '"layers.{i+12}"', {"w": (2, 3, 5)}, {"layers.12": ("w", 0), "layers.13": ("w", 1)}),
    "two stacked indices": ("- from: w\n  stacked: {i: 0, p: 1}\n" + TABLE + '"{i+1}.{p:q1,q2}"', {"w": (1, 2, 3, 5)}, {"1.q1": ("w", 0, 0), "1.q2": ("w", 0, 1)}),
    "an index of the path with an offset in the target": ("- from: w/{i}\n" + TABLE + '"layers.{i+12}"', {"w/0": (3, 5), "w/1": (3, 5)}, {"layers.12": ("w/0",), "layers.13": ("w/1",)}),
    "an index of the path that starts at 1": ("- from: w/{i+1}\n" + TABLE + '"layers.{i}"', {"w/1": (3, 5), "w/2": (3, 5)}, {"layers.0": ("w/1",), "layers.1": ("w/2",)}),
    "a computed index with an offset": ("- from: w/{s}/{p:a,b}\n  index_from: {i: [s, p]}\n" + TABLE + '"layers.{i+4}"', {"w/0/a": (3, 5), "w/0/b": (3, 5)}, {"layers.4": ("w/0/a",), "layers.5": ("w/0/b",)}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_names_of_the_target(case: str, tmp_path: Path) -> None:
    rules, shapes, wanted = CASES[case]
    tree = {name: numbers(*shape) + k for k, (name, shape) in enumerate(shapes.items())}
    plan = make_plan(rule_file(rules), MemorySource(tree))
    made = run(plan)
    assert made.keys() == {f"{name}.weight" for name in wanted}
    for name, (leaf, *element) in wanted.items():
        np.testing.assert_array_equal(made[f"{name}.weight"], tree[leaf][tuple(element)])
    assert [misplaced(plan, rule_of(part), step, part) for step in plan.steps for part in step.parts] == [None] * len(wanted)  # fmt: skip
    list(execute(plan, tmp_path / "out.safetensors"))
    assert check_weights(plan, open_written(tmp_path / "out.safetensors")).findings == ()


def test_targets_of_one_file_stack_differently() -> None:
    head = "model: m\ntitle: M\ntargets: {apart: {loads: A}, named: {loads: N}, together: {loads: T}}\n"
    rules = rule_file(
        '- einsum: "L...D,LDF->L...F"\n  from: w\n  linear:\n    apart: "layers.{L+2}"\n    named: "{L:first,second}"\n'
        '    together: {module: layers, einsum: "L...D,LFD->L...F"}\n'
        '- from: g\n  axes: LD\n  parameter: {apart: "layers.{L+2}.gain", named: "{L:first,second}.gain", together: gains}',
        head,
    )
    tree = {"w": numbers(2, 3, 5), "g": numbers(2, 3)}
    apart, named, together = (run(make_plan(rules, MemorySource(tree), to=to)) for to in ("apart", "named", "together"))
    assert list(apart) == ["layers.2.weight", "layers.3.weight", "layers.2.gain", "layers.3.gain"]
    assert list(named) == ["first.weight", "second.weight", "first.gain", "second.gain"]
    assert {name: x.shape for name, x in together.items()} == {"layers.weight": (2, 5, 3), "gains": (2, 3)}
    np.testing.assert_array_equal(apart["layers.3.weight"], tree["w"][1].T)
    np.testing.assert_array_equal(named["second.gain"], tree["g"][1])


@pytest.mark.parametrize(
    ("rules", "tree", "code", "said"),
    [
        ("- from: w\n  stacked: {p: 0}\n" + TABLE + '"{p:q1,q2}"', {"w": (3, 3, 5)}, "shape-mismatch", "expected p with 2 elements, got 3"),
        ("- from: w\n  stacked: {p: 0}\n" + TABLE + '"{p:q1,q2}"', {"w": (1, 3, 5)}, "shape-mismatch", "expected p with 2 elements, got 1"),
        ("- from: w/{i}\n" + TABLE + '"{i:q1,q2}"', {"w/0": (3, 5), "w/1": (3, 5), "w/2": (3, 5)}, "shape-mismatch", "none for element 2"),
        ("- from: w/{i+1}\n" + TABLE + '"{i}"', {"w/0": (3, 5), "w/1": (3, 5)}, "leaf-without-rule", "w/0"),
        ("- from: w/{i+1}\n" + TABLE + '"{i}"', {"w/1": (3, 5), "w/3": (3, 5)}, "layers-missing", "w/{i+1}"),
    ],
)  # fmt: skip
def test_what_does_not_fit(rules: str, tree: dict[str, tuple[int, ...]], code: str, said: str) -> None:
    with pytest.raises((PlanError, RuleError)) as error:
        make_plan(rule_file(rules, HEAD), MemorySource({name: np.zeros(shape, np.float32) for name, shape in tree.items()}))  # fmt: skip
    assert (error.value.findings[0].code, said in str(error.value)) == (code, True), error.value
