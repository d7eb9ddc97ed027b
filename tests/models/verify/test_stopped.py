"""An error of this package while it looks for a mistake: the level keeps what it measured, and so do the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from convert.api import convert
from convert.verify import stopped
from convert.verify.report.report import LevelReport, Report, Verdict
from convert.verify.run import check
from support import conv_norm
from support.command_line import Run

LEVELS = ("coverage", "weights", "layers", "model")


def fails(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(f"{np.zeros((50, 50))} is not in list")


def planted() -> Any:
    """A function that fails, in code that is no user's."""
    made: dict[str, Any] = {"__name__": "planted"}
    exec(compile("def fails(*_, **__): raise ValueError('planted')", "<planted>", "exec"), made)
    return made["fails"]


def checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, search: str, *, wrong: bool = True, failing: Any = fails
) -> tuple[Report, dict[str, LevelReport]]:
    """Check a file, with a wrong kernel or without, while a step fails."""
    rules, out = folder / "conv-norm.yaml", folder / "out.safetensors"
    rules.write_text(conv_norm.RULES)
    convert(str(rules), conv_norm.source(), out)
    with safe_open(out, "np") as file:
        metadata = file.metadata()
    tensors = load_file(out)
    if wrong:
        save_file({**tensors, "head.weight": tensors["head.weight"] + 1}, out, metadata)
    monkeypatch.setattr(search, failing)
    report = check(out, conv_norm.source(), model=str(rules), reference="support.conv_norm:reference")
    return report, {level.level: level for level in report.levels}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "level"),
    [
        ("convert.verify.weights.level.diagnose", "weights"),
        ("convert.verify.layers.level.mistake_in", "layers"),
        ("convert.verify.diagnosis.diagnose.other_recurrence", "model"),
    ],
)
def test_the_verdicts_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: str, level: str) -> None:
    monkeypatch.setattr(stopped, "STOPS", (Exception,))  # as users have it
    report, levels = checked(tmp_path, monkeypatch, search)
    assert [levels[name].verdict for name in LEVELS] == [Verdict.PASSED, *[Verdict.FAILED] * 3]
    found = levels[level]
    said = str(found.diagnosis["problem"]) if found.diagnosis else str(found.findings[0])
    assert "ValueError" in said and "(test_stopped.py:" in said and len(said) < 1000
    assert report.exit_code == 1


def test_the_tests_of_this_package_see_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="not in list"):
        checked(tmp_path, monkeypatch, "convert.verify.weights.level.diagnose")


STEPS: dict[str, str] = {  # -> the level that it leaves open
    "convert.verify.run.check_coverage": "coverage",
    "convert.verify.weights.level.compare_tied": "weights",
    "convert.verify.weights.level.compare_computed": "weights",
    "convert.verify.weights.level.check_provenance": "weights",
    "convert.verify.weights.level.count_special_values": "weights",
    "convert.verify.layers.level.measure_activations": "layers",
    "convert.verify.run.check_facts": "layers",
    "convert.verify.sides.run_jax.live_evidence": "model",
    "convert.verify.model.level.within_bounds": "model",
    "convert.verify.model.level.second_call": "model",
}
TESTS = {
    "convert.verify.model.dependence.independent",
    "convert.verify.model.choices.check_choices",
    "convert.verify.run.with_measured",
    "convert.verify.model.unseen.unseen",
    "convert.verify.run.read_by_the_model",
    "convert.verify.run.of_names",
}


@pytest.mark.parametrize("step", STEPS)
def test_the_other_levels_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(stopped, "STOPS", (Exception,))  # as users have it
    report, levels = checked(tmp_path, monkeypatch, step, wrong=False, failing=planted())
    open_ = {name for name in LEVELS if levels[name].verdict is Verdict.INCONCLUSIVE}
    assert open_ >= {STEPS[step]} and {levels[name].verdict for name in {*LEVELS} - open_} == {Verdict.PASSED}
    assert open_ <= {STEPS[step], "layers"}  # which waits for the weights
    assert "ValueError: planted (<planted>:1, in fails)" in levels[STEPS[step]].reason
    assert report.exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize("step", sorted(TESTS))
def test_what_was_not_tested_is_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(stopped, "STOPS", (Exception,))
    report, levels = checked(tmp_path, monkeypatch, step, wrong=False, failing=planted())
    assert [levels[name].verdict for name in LEVELS] == [Verdict.PASSED] * 4 and report.exit_code == 0
    assert [fact.name for fact in report.facts if "ValueError: planted" in fact.next and fact.open]


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", ["convert.verify.model.level._rounding", "convert.verify.model.dependence.jax_without_weights"]
)
def test_a_difference_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(stopped, "STOPS", (Exception,))
    report, levels = checked(tmp_path, monkeypatch, step, failing=planted())
    assert levels["model"].verdict is Verdict.FAILED and report.exit_code == 1


def test_a_report_that_cannot_be_written_has_the_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    rules, out, source = tmp_path / "conv-norm.yaml", tmp_path / "out.safetensors", tmp_path / "source.npz"
    rules.write_text(conv_norm.RULES)
    np.savez(source, **conv_norm.source().arrays)
    run(str(rules), str(source), str(out))
    monkeypatch.setattr(stopped, "STOPS", (Exception,))
    monkeypatch.setattr("convert.cli.check_text._conclusion", planted())
    text, _ = run("check", str(out), "--from", str(source), "--model", str(rules), "--level", "weights")
    assert "weights: passed" in text and "ValueError: planted" in text
