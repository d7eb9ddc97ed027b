"""What the model level may conclude: what is allowed has no part of torch's own error, and what proves nothing is no pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.api import convert
from convert.numerics.lift_torch import lifted
from convert.references.protocol import Reference
from convert.verify.comparison import plan_of
from convert.verify.model.level import check_model
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.run_jax import live_evidence
from convert.writing.written import open_written
from support import conv_norm

RIGHT = conv_norm.reference(None)
JAX: Any = RIGHT.jax


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "conv-norm.yaml"
    path.write_text(conv_norm.RULES)
    return path


@pytest.fixture(scope="module")
def out(rules: Path) -> Path:
    path = rules.with_name("out.safetensors")
    convert(str(rules), conv_norm.source(), path)
    return path


def run(
    rules: Path,
    out: Path,
    reference: Reference,
    *,
    precision: str = "float32",
    evidence: Callable[[Evidence], Evidence] = lambda evidence: evidence,
) -> LevelReport:
    written = open_written(out)
    plan = plan_of(written, conv_norm.source(), model=str(rules))
    return check_model(plan, written, reference, evidence(live_evidence(plan, reference, precision=precision)))


def in_jax(name: str, change: Callable[[Any], Any]) -> Callable[[Any, Any], Mapping[str, Any]]:
    """JAX's side, with one value changed."""

    def side(weights: Any, inputs: Any) -> Mapping[str, Any]:
        made = JAX(weights, inputs)
        return {**made, name: change(made[name])}

    return side


def in_torch(change: Callable[[Any], Any]) -> Reference:
    """PyTorch's output, changed."""
    return replace(RIGHT, run=lambda module, inputs: {"y": change(RIGHT.run(module, inputs)["y"])})


# ---- as users run it


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_a_right_one_passes(rules: Path, out: Path, precision: str) -> None:
    level = run(rules, out, RIGHT, precision=precision)
    assert level.verdict is Verdict.PASSED and not level.findings
    assert all(m.tolerance is not None and m.tolerance.conclusive for m in level.measures)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "wrong", [lambda y: -y, lambda y: 1.3 * y, lambda y: y * float("nan"), torch.zeros_like, lambda y: y.flip(1)]
)
def test_a_path_that_is_wrong_in_one_precision(rules: Path, out: Path, precision: str, wrong: Any) -> None:
    """In float64 it is right. Its own error, of whatever size, must not excuse it."""
    level = run(rules, out, in_torch(lambda y: y if y.dtype == torch.float64 else wrong(y)), precision=precision)
    assert level.verdict is Verdict.FAILED and level.diagnosis is None
    (finding,) = level.findings
    assert finding.code == "outputs-differ" and finding.path == "y" and f" in {precision}" in finding.problem
    assert "the weights are right" in finding.fix and precision in finding.fix
    assert finding.data["diagnosis"] == "another function in one precision" and finding.data["differing"] == ["y"]


def test_a_small_error_of_one_precision(rules: Path, out: Path) -> None:
    """TF32 rounds to ten bits: far more than float32 does, and invisible in a printed output."""
    coarse = in_torch(lambda y: y if y.dtype == torch.float64 else (y * 2**11).round() / 2**11)
    assert run(rules, out, coarse).verdict is Verdict.FAILED


@pytest.mark.slow
def test_a_difference_of_the_functions_comes_first(rules: Path, out: Path) -> None:
    """Where both differ, the weights or the code are wrong, not one precision."""
    level = run(rules, out, in_torch(lambda y: y + (1 if y.dtype == torch.float64 else 9)))
    (finding,) = level.findings
    assert " in float64" in finding.problem and level.diagnosis is not None and "diagnosis" not in finding.data


@pytest.mark.slow
def test_weights_that_were_rounded_are_allowed_for(rules: Path, tmp_path: Path) -> None:
    """JAX's own run does not show what rounding the file to bfloat16 changes; a float64 run of it does, and no more than that."""
    narrow = tmp_path / "narrow.safetensors"
    convert(str(rules), conv_norm.source(), narrow, dtype="bfloat16")
    level = run(rules, narrow, RIGHT)
    assert level.verdict is Verdict.PASSED
    bounds = [m.tolerance.value for m in level.measures if m.tolerance is not None]
    assert all(1e-4 < bound < 2e-2 for bound in bounds)
    assert all(m.tolerance and "rounding of the weights" in m.tolerance.why for m in level.measures)
    wrong = run(rules, narrow, in_torch(lambda y: y if y.dtype == torch.float64 else 1.05 * y))
    assert wrong.verdict is Verdict.FAILED


@pytest.mark.slow
def test_a_bound_that_allows_everything_proves_nothing(rules: Path, out: Path) -> None:
    """A model so deep that bfloat16 may change all of it: only float64 decides, and a note reports it.

    No model has more layers than numbers: the depth is bounded by its size.
    """
    deep = replace(RIGHT, depth=10**4)
    level = run(rules, out, deep, precision="bfloat16")
    assert level.verdict is Verdict.PASSED
    start = f"in bfloat16, {len(level.measures)} of {len(level.measures)} comparisons prove nothing"
    assert any(note.startswith(start) and note.endswith("only float64 decides") for note in level.notes)
    assert level.to_dict()["measures"][-1]["tolerance"]["conclusive"] is False

    alone = run(rules, out, deep, precision="bfloat16", evidence=lambda known: replace(known, float64_values=None))
    assert alone.verdict is Verdict.INCONCLUSIVE
    assert alone.reason.startswith("y is known only in bfloat16") and "tolerance 2.9e+00" in alone.reason
    known = run(rules, out, RIGHT, evidence=lambda known: replace(known, float64_values=None))
    assert known.verdict is Verdict.PASSED


def test_jax_that_is_wrong_in_one_precision_is_said(rules: Path, out: Path) -> None:
    """Its native run then says nothing about PyTorch's: float64 decides, and a note reports it."""
    level = run(rules, out, replace(RIGHT, jax=in_jax("y", lambda y: y if y.dtype == jnp.float64 else -y)))
    (note,) = (note for note in level.notes if "prove nothing" in note)
    assert note.startswith("in float32, 1 of 3 comparisons prove nothing") and "(y: tolerance 1.0e+01)" in note


def test_code_that_casts_is_known_from_the_lifted_run() -> None:
    for code, casts in (
        (lambda x: x * 2, False),
        (lambda x: x.float(), True),
        (lambda x: x.to(torch.bfloat16), True),
        (lambda x: x * torch.arange(3, dtype=torch.float32), True),
        (lambda x: x * torch.arange(3), False),
        (lambda x: torch.softmax(x, 0, dtype=torch.float32), True),
        (lambda x: x * torch.as_tensor(np.ones(3, np.float32)), True),
    ):
        with lifted() as mode:
            code(torch.ones(3, dtype=torch.float64))
        assert bool(mode.casts) is casts


# ---- what proves nothing


def test_nan_on_both_sides_proves_nothing(rules: Path, out: Path) -> None:
    bad = replace(in_torch(lambda y: y * math.nan), jax=in_jax("y", lambda y: y * math.nan))
    level = run(rules, out, bad)
    assert level.verdict is Verdict.INCONCLUSIVE
    assert level.reason.startswith("y is NaN on both sides at 160 of the 160 numbers that count")
    assert "the reference's `masks`" in level.reason


@pytest.mark.slow
def test_some_nan_that_count(rules: Path, out: Path) -> None:
    """One position is enough; when the reference says that it is padding, it is left out."""

    def torch_side(y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        y[0, 3, 2] = math.nan
        return y

    bad = replace(in_torch(torch_side), jax=in_jax("y", lambda y: y.at[0, 3, 2].set(math.nan)))
    level = run(rules, out, bad)
    assert level.verdict is Verdict.INCONCLUSIVE and level.reason.startswith("y is NaN on both sides at 1 of the 160")
    counts = np.ones((2, 16), bool)
    counts[0, 3] = False
    assert run(rules, out, replace(bad, masks=lambda inputs: {"y": counts})).verdict is Verdict.PASSED
    one = run(rules, out, replace(RIGHT, jax=bad.jax))
    assert one.verdict is Verdict.FAILED


def test_an_output_that_is_not_in_the_evidence(rules: Path, out: Path) -> None:
    """Of a recording, say, of which the outputs were left out."""

    def without(known: Evidence) -> Evidence:
        cut = {
            name: {k: v for k, v in getattr(known, name).items() if k != "y"}
            for name in ("float64_values", "native_values")
        }
        return replace(known, origin="recorded in r", **cut)

    level = run(rules, out, RIGHT, evidence=without)
    assert level.verdict is Verdict.INCONCLUSIVE and len(level.measures) == 2
    assert (
        level.reason.startswith("the output y was not compared (recorded in r, ") and "record it again" in level.reason
    )
