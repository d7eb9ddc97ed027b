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

LEVELS = ("coverage", "weights", "layers", "model")


def fails(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(f"{np.zeros((50, 50))} is not in list")


def checked(folder: Path, monkeypatch: pytest.MonkeyPatch, search: str) -> tuple[Report, dict[str, LevelReport]]:
    """Check a file with a wrong kernel, while a search fails."""
    rules, out = folder / "conv-norm.yaml", folder / "out.safetensors"
    rules.write_text(conv_norm.RULES)
    convert(str(rules), conv_norm.source(), out)
    with safe_open(out, "np") as file:
        metadata = file.metadata()
    tensors = load_file(out)
    save_file({**tensors, "head.weight": tensors["head.weight"] + 1}, out, metadata)
    monkeypatch.setattr(search, fails)
    report = check(out, conv_norm.source(), model=str(rules), reference="support.conv_norm:reference")
    return report, {level.level: level for level in report.levels}


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
