"""Recurrent layers: a correct conversion passes all levels, and a wrong derivation does not. Their faults are in the catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

import convert
from convert.verify.report.report import Report, Verdict
from convert.verify.run import check
from faults.planted.cells import CELL_FAULTS
from support import cell_model
from support.cell_model import HIDDEN, RULES
from support.memory_source import MemorySource


def report_of(folder: Path, source: MemorySource) -> Report:
    """Converts, and checks."""
    file, out = folder / "rules.yaml", folder / "out.safetensors"
    file.write_text(RULES)
    convert.convert(convert.load_rules(file), source, out)
    return check(out, source, model=str(file), reference="support.cell_model:reference")


@pytest.mark.slow  # the catalogue has it as well: the case `cells`
def test_a_correct_conversion_passes(tmp_path: Path) -> None:
    report = report_of(tmp_path, cell_model.source())
    assert [level.verdict for level in report.levels] == [Verdict.PASSED] * 4, report.to_dict()
    worst = {m.name: m.float64.relative for level in report.levels for m in level.measures if m.float64}
    assert {"gru (l0)", "gru (l0), random weights", "lstm (l0)", "lstm (l0), random weights"} <= set(worst)
    assert all(worst[name] < 1e-14 for name in ("gru (l0)", "gru (l0), random weights"))
    assert HIDDEN > 1  # a state of one element hides half of the faults


def test_every_fault_is_in_the_catalogue() -> None:
    assert len(CELL_FAULTS) == 19 and all(fault.diagnosis for fault in CELL_FAULTS)


@pytest.mark.slow
def test_a_wrong_layout_fails_the_layers_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A derivation that forgot to negate, or to reorder, cannot hide behind its own plan."""
    from convert.layers.recurrent import compile as recurrent

    original = recurrent._arithmetic
    for word, broken in (("Add", lambda *a: ()), ("Multiply", lambda *a: (*original(*a), recurrent.Multiply(-1.0)))):
        monkeypatch.setattr(recurrent, "_arithmetic", broken)
        (tmp_path / word).mkdir()
        levels = {level.level: level.verdict for level in report_of(tmp_path / word, cell_model.source()).levels}
        assert levels["weights"] is Verdict.PASSED and levels["layers"] is Verdict.FAILED
