"""``convert MODEL CKPT OUT --check``: conversion and proof in one go."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import Run
from convert.library import shipped_rules_dir
from upstream import checkpoint


def test_a_correct_conversion_is_equal_at_all_levels(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    stdout, stderr = run("timesfm", checkpoint("timesfm-2.5"), out, "--check", code=0)
    assert out.exists() and f"wrote {out}" in stderr
    for level in ("coverage", "weights", "layers", "model"):
        assert f"{level}: passed" in stdout or f"{level}  " in stdout
    assert stdout.rstrip().endswith("(exit code 0)")


def test_a_wrong_rule_is_written_and_then_found(run: Run, tmp_path: Path) -> None:
    """The file is what the rules say, so it is written; what is wrong with the rules is the check's to say."""
    out = tmp_path / "out.safetensors"
    text = (shipped_rules_dir() / "timesfm-2.5.yaml").read_text()
    wrong = tmp_path / "mine.yaml"
    wrong.write_text(text.replace("multiplies_by: scale\n", "multiplies_by: 1+scale\n", 1))
    assert wrong.read_text() != text
    stdout, _ = run(wrong, checkpoint("timesfm-2.5"), out, "--check", code=1)
    assert out.exists()
    assert "model: FAILED" in stdout and "mine.yaml:" in stdout and stdout.rstrip().endswith("(exit code 1)")


def test_json_holds_both(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    stdout, stderr = run("timesfm", checkpoint("timesfm-2.5"), out, "--check", "--json", code=0)
    said = json.loads(stdout)
    assert stderr == "" and said["tensors"] == 45
    assert said["check"]["exit_code"] == 0 and [level["level"] for level in said["check"]["levels"]][-1] == "model"


def test_settings_and_dtype_are_those_of_the_conversion(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    options = (
        "--to",
        "transformers",
        "--dtype",
        "bfloat16",
        "--set",
        "use_positional_embedding=true",
        "--set",
        "context_length=512",
        "--check",
    )
    stdout, _ = run("timesfm", checkpoint("timesfm-1.0"), out, *options, code=0)
    assert "-> transformers" in stdout


def test_dry_run_has_nothing_to_check(run: Run, tmp_path: Path) -> None:
    _, stderr = run("timesfm", checkpoint("timesfm-2.5"), tmp_path / "out", "--check", "--dry-run", code=2)
    assert "--dry-run writes nothing, so there is nothing to --check" in stderr
