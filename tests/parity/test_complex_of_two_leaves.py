"""Complex numbers of which the source has the real and the imaginary parts in two leaves: ``from: filter/real + 1j * filter/imag``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import convert
from convert import PlanError, RuleError
from convert.core.ops import Take
from convert.planning.merged_leaf import Complex
from convert.planning.planner import make_plan
from convert.reversing.plan import reverse
from convert.verify.layers.level import check_layers
from convert.verify.report.report import Verdict
from convert.writing.execute import Result, execute
from convert.writing.written import open_written
from support.memory_source import HEAD, MemorySource, rule_file, run
from support.weights_level import check_weights

SPECTRAL = "- {from: '{i}/re + 1j * {i}/im', axes: IOM, parameter: {name: 'l.{i}.w', axes: OMI}}"
LEAVES = {"0/re": (2, 3, 5), "0/im": (2, 3, 5), "1/re": (2, 3, 5), "1/im": (2, 3, 5)}


def drawn(dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return {name: rng.standard_normal(shape).astype(kind) for name, shape in LEAVES.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_parts_are_those_of_the_leaves(dtype: str) -> None:
    leaves = drawn(dtype)
    made = run(make_plan(rule_file(SPECTRAL), MemorySource(leaves)))
    assert made.keys() == {"l.0.w", "l.1.w"} and made["l.1.w"].dtype == np.complex64
    real, imaginary = (leaves[f"1/{part}"].astype(np.float32).transpose(1, 2, 0) for part in ("re", "im"))
    assert np.array_equal(made["l.1.w"].real, real) and np.array_equal(made["l.1.w"].imag, imaginary)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_a_piece_is_that_of_the_whole(shape: list[int], data: st.DataObject) -> None:
    rng = np.random.default_rng(0)
    leaves = {name: rng.standard_normal(shape).astype(np.float32) for name in ("a", "b")}
    plan = make_plan(rule_file("- {from: a + 1j * b, parameter: p}"), MemorySource(leaves))
    (merge,) = plan.merges.values()
    assert isinstance(merge, Complex) and merge.name == "a + 1j * b"
    origin = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    box = tuple(slice(start, size) for start, size in zip(origin, shape, strict=True))
    out = np.empty([size - start for start, size in zip(origin, shape, strict=True)], np.complex64)
    merge.fill_piece(out, origin, [leaves["b"]], leaves["a"][box])
    assert out.tobytes() == plan.source.read(merge.name)[box].tobytes()


def test_a_stacked_axis() -> None:
    rng = np.random.default_rng(0)
    leaves = {name: rng.standard_normal((4, 3)).astype(np.float32) for name in ("re", "im")}
    plan = make_plan(rule_file("- {from: re + 1j * im, stacked: {i: 0}, parameter: 'l.{i}.d'}"), MemorySource(leaves))
    assert all(isinstance(step.parts[0].ops[0], Take) for step in plan.steps)
    made = run(plan)
    assert [np.array_equal(made[f"l.{i}.d"], leaves["re"][i] + 1j * leaves["im"][i]) for i in range(4)] == [True] * 4


def test_float64_has_no_complex_numbers_in_a_file() -> None:
    """The same is said of a leaf with complex numbers as wide; `dtype` narrows them."""
    with pytest.raises(PlanError, match="safetensors cannot hold complex128"):
        make_plan(rule_file(SPECTRAL), MemorySource(drawn("float64")))
    plan = make_plan(rule_file(SPECTRAL.replace("{from", "{dtype: complex64, from")), MemorySource(drawn("float64")))
    assert {x.dtype.name for x in run(plan).values()} == {"complex64"}


@pytest.mark.parametrize("text", ["a + 1j * b + c", "1j * a + b", "1j * a + 1j * b", "2 + 1j * a", "1j * a"])
def test_what_is_not_two_parts_is_refused(text: str) -> None:
    with pytest.raises(RuleError, match=r"is not one leaf with the real parts and one with the imaginary ones; write REAL \+ 1j \* IMAGINARY"):  # fmt: skip
        rule_file(f"- {{from: {text}, parameter: p}}")


def test_leaves_that_do_not_fit_or_are_missing_are_named() -> None:
    leaves = drawn()
    with pytest.raises(PlanError, match=r"1/im \[shape-mismatch\]: the rule makes complex numbers of two leaves, element by element: expected the shape of 1/re"):  # fmt: skip
        make_plan(rule_file(SPECTRAL), MemorySource({**leaves, "1/im": leaves["1/im"][:1]}))
    with pytest.raises(PlanError, match="expected floating-point numbers, got int32"):
        make_plan(rule_file(SPECTRAL), MemorySource({**leaves, "1/im": leaves["1/im"].astype(np.int32)}))
    with pytest.raises(PlanError, match="1/im"):
        make_plan(rule_file(SPECTRAL), MemorySource({name: x for name, x in leaves.items() if name != "1/im"}))


# ---- the check, and the way back


def written(tmp_path: Path, leaves: dict[str, np.ndarray]) -> tuple[convert.Plan, Path]:
    plan = make_plan(rule_file(SPECTRAL, HEAD), MemorySource(leaves))
    out = tmp_path / "out.safetensors"
    assert isinstance([*execute(plan, out, jobs=2, overwrite=True)][-1], Result)
    return plan, out


def test_a_right_file_passes(tmp_path: Path) -> None:
    plan, out = written(tmp_path, drawn())
    assert check_weights(plan, open_written(out)).verdict is Verdict.PASSED
    assert check_layers(plan, open_written(out)).verdict is Verdict.SKIPPED  # layers are run with real numbers


MISTAKES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "real and imaginary parts exchanged": lambda re, im: im + 1j * re,
    "imaginary parts subtracted": lambda re, im: re - 1j * im,
    "imaginary parts left out": lambda re, im: re + 0j,
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_named(name: str, tmp_path: Path) -> None:
    leaves = drawn()
    plan, out = written(tmp_path, leaves)
    wrong = np.ascontiguousarray(MISTAKES[name](leaves["1/re"], leaves["1/im"]).transpose(1, 2, 0), np.complex64)
    save_file({**load_file(out), "l.1.w": wrong}, out, {"format": "pt"})
    level = check_weights(plan, open_written(out))
    assert level.verdict is Verdict.FAILED
    assert [finding.path for finding in level.findings] == ["l.1.w"] and name in str(level.findings[0])


def test_the_way_back_is_refused(tmp_path: Path) -> None:
    plan, out = written(tmp_path, drawn())
    said = r"complex numbers, whose parts are two leaves \(0/re \+ 1j \* 0/im\); the way back does not take them apart; keep the leaves apart in the target"
    with pytest.raises(PlanError, match=said):
        reverse(plan, open_written(out))
    with pytest.raises(PlanError, match=r"\{i\}/re \+ 1j \* \{i\}/im: the tensor is complex numbers, whose parts"):
        convert.load_pytree(rule_file(SPECTRAL), out)
