"""Rules without a reference: the class that `config.json` names is built alone, and tells what it is configured to compute."""

from __future__ import annotations

from pathlib import Path

from convert import convert
from convert.rules.library import shipped_rules_dir
from convert.verify.report.facts import Status
from convert.verify.report.report import Report, Verdict
from convert.verify.run import check
from support.paths import GOLDEN

CHECKPOINT = GOLDEN / "siglip" / "ckpt.npz"
LAYER = "linear: vision_model.encoder.layers.{j}.mlp.fc1"


def checked(rules: Path, out: Path) -> Report:
    convert(str(rules), CHECKPOINT, out)
    return check(out, CHECKPOINT, model=str(rules), levels=("coverage", "layers"))


def test_the_module_of_the_target_is_read_without_a_reference(tmp_path: Path) -> None:
    shipped = shipped_rules_dir() / "siglip.yaml"
    right = checked(shipped, tmp_path / "right")
    assert [level.verdict for level in right.levels] == [Verdict.PASSED, Verdict.PASSED]
    assert any("load_state_dict(strict=True)" in note for note in right.levels[0].notes)
    assert not [fact for fact in right.facts if fact.status is Status.UNVERIFIED]
    path = tmp_path / "mine.yaml"
    path.write_text(
        shipped.read_text().replace(f"activation: gelu_tanh\n  {LAYER}", f"activation: gelu_erf\n  {LAYER}")
    )
    wrong = checked(path, tmp_path / "wrong").levels[1]
    assert wrong.verdict is Verdict.FAILED
    (finding,) = wrong.findings
    assert finding.path.startswith("vision_model.encoder.layers.0.mlp.fc1") and "activation" in finding.problem
