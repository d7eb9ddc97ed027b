"""``convert MODEL CKPT OUT --check``: conversion and proof in one go."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from convert.rules.library import shipped_rules_dir
from support.command_line import Run
from support.goldens import checkpoint


@pytest.mark.slow
def test_a_correct_conversion_is_equal_at_all_levels(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    stdout, stderr = run("timesfm", checkpoint("timesfm-2.5"), out, "--check", code=0)
    assert out.exists() and f"wrote {out}" in stderr
    for level in ("coverage", "weights", "layers", "model"):
        assert f"{level}: passed" in stdout or f"{level}  " in stdout
    assert stdout.rstrip().endswith("(exit code 0)")


@pytest.mark.slow
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


@pytest.mark.slow
def test_json_holds_both(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    stdout, stderr = run("timesfm", checkpoint("timesfm-2.5"), out, "--check", "--json", code=0)
    said = json.loads(stdout)
    assert stderr == "" and said["tensors"] == 45
    assert said["check"]["exit_code"] == 0 and [level["level"] for level in said["check"]["levels"]][-1] == "model"


@pytest.mark.slow
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
    assert "error[usage]: --dry-run writes nothing that --check could check" in stderr


@pytest.mark.slow
def test_a_reference_and_levels_that_must_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `convert check` takes them; what is wrong with them is said before anything is written."""
    np.savez(tmp_path / "c.npz", k=np.arange(12, dtype=np.float32).reshape(3, 4) / 12)
    rules, out = tmp_path / "r.yaml", tmp_path / "out.safetensors"
    rules.write_text(
        "model: m\ntitle: m\ntargets: {torch: {loads: x}}\nrules:\n- {einsum: '...D,DF->...F', from: k, linear: l}\n"
    )
    (tmp_path / "at_once_pair.py").write_text(PAIR)
    monkeypatch.syspath_prepend(tmp_path)
    convert = (rules, tmp_path / "c.npz", out)
    for wrong, said in {
        ("--require", "modle"): "did you mean 'model'?",
        ("--reference", "at_once_pair:absent"): "at_once_pair has no 'absent'",
    }.items():
        assert said in run(*convert, "--check", *wrong, code=2)[1] and not out.exists()
        assert f"{wrong[0]} is an option of the check; add --check" in run(*convert, *wrong, code=2)[1]
    stdout, _ = run(*convert, "--check", "--require", "model", code=2)
    assert "inconclusive: model was skipped (exit code 2)" in stdout and out.exists()
    stdout, _ = run(*convert, "--overwrite", "--check", "--require", "layers,model", "--reference", "at_once_pair:pair", code=0)  # fmt: skip
    assert stdout.rstrip().endswith("(exit code 0)")
    wrong = rules.read_text().replace("...D,DF->...F", "...F,DF->...D")
    rules.write_text(wrong)
    stdout, _ = run(*convert, "--overwrite", "--check", "--reference", "at_once_pair:pair", code=1)
    assert stdout.rstrip().endswith("(exit code 1)")


PAIR = """
import numpy as np
import torch
from convert.references.protocol import Reference


def build(state):
    net = torch.nn.Sequential()
    net.add_module("l", torch.nn.Linear(3, 4, bias=False))
    net.load_state_dict(dict(state), strict=True, assign=True)
    return net.eval()


def pair(plan):
    def draw(seed):
        return {"x": np.random.default_rng(seed).normal(size=(2, 3)).astype(np.float32)}
    return Reference(inputs=draw, jax=lambda w, i: {"y": i["x"] @ w["k"]}, build=build,
                     run=lambda net, i: {"y": net(i["x"])}, outputs=("y",), reduction=3, depth=1)
"""
SETTINGS = ("--set", "vocab_size=250", "--set", "sliding_window=8", "--set", "query_pre_attn_scalar=12")


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


@pytest.mark.slow
def test_the_card_of_a_directory_has_the_figures_of_a_check_that_passed(run: Run, tmp_path: Path) -> None:
    plain, again, checked = tmp_path / "plain", tmp_path / "again", tmp_path / "checked"
    for out in (plain, again):
        run("gemma", checkpoint("gemma2-2b"), out, *SETTINGS)
    assert contents(plain) == contents(again)  # byte for byte, card and configuration included
    run("gemma", checkpoint("gemma2-2b"), checked, *SETTINGS, "--check")
    before, after = contents(plain), contents(checked)
    card = after["README.md"].decode()
    assert {k: v for k, v in before.items() if k != "README.md"} == {k: v for k, v in after.items() if k != "README.md"}
    assert card.startswith(before["README.md"].decode()) and "## Checked" not in before["README.md"].decode()
    rows = [line for line in card.partition("## Checked")[2].splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[:2] for row in rows[1:]] == [
        *([f"| {level}", "passed"] for level in ("coverage", "weights", "layers", "model")),
        *[["| facts", "not verified"]] * 3,
    ]
    model, fact = rows[4], rows[-1]
    assert "largest relative error in float64 (casts removed)" in model
    assert "top-1 agreement 100% of 54 positions" in model
    assert "query_pre_attn_scalar = 12 (--set query_pre_attn_scalar=12)" in fact
    assert str(tmp_path) not in card and len(list(checked.iterdir())) == len(before)
    run("check", checked, "--from", checkpoint("gemma2-2b"), "--level", "weights")
    assert contents(checked) == after  # a check alone writes nothing
    run("gemma", checkpoint("gemma2-2b"), checked, *SETTINGS, "--overwrite")
    assert contents(checked) == before


@pytest.mark.slow
def test_a_check_that_fails_leaves_the_card_as_it_was(run: Run, tmp_path: Path) -> None:
    text = (shipped_rules_dir() / "gemma.yaml").read_text()
    wrong, out = tmp_path / "mine.yaml", tmp_path / "out"
    wrong.write_text(text.replace("{gate,up}_proj", "{up,gate}_proj"))
    run(wrong, checkpoint("gemma2-2b"), out, *SETTINGS, "--check", code=1)
    assert "Checked" not in (out / "README.md").read_text() and len(list(out.iterdir())) > 3
