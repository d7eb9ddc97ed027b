"""`action/`: its script runs as the runner of GitHub starts it, and its inputs are those that it declares."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from convert.core.yaml_nodes import load_yaml
from support.paths import ROOT
from support.small_conversion import write_checkpoint, write_rules

ACTION = ROOT / "action"


def step(folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run the step with the defaults of its inputs, and some others."""
    declared = load_yaml((ACTION / "action.yml").read_text(), "action.yml").plain()
    defaults = {name.upper(): value.get("default", "") for name, value in declared["inputs"].items()}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    files = {"GITHUB_OUTPUT": str(folder / "outputs"), "GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    env = {**os.environ, "PATH": path, **defaults, **files, **inputs}
    return subprocess.run(["bash", str(ACTION / "check.sh")], cwd=folder, env=env, capture_output=True, text=True)


def test_the_inputs_reach_the_script_as_variables() -> None:
    action = load_yaml((ACTION / "action.yml").read_text(), "action.yml").plain()
    steps = action["runs"]["steps"]
    used = {name for one in steps for name in re.findall(r"inputs\.(\w+)", json.dumps(one["env"]))}
    assert used == {*action["inputs"]}
    assert not any("${{" in one["run"] for one in steps), "an input in a script would be run"
    script = (ACTION / "check.sh").read_text()
    assert all(f"${name}" in script or f"${{{name}" in script for name in steps[1]["env"])


@pytest.mark.slow
def test_it_converts_checks_and_attests_and_fails_on_other_weights(tmp_path: Path) -> None:
    write_rules(tmp_path)
    write_checkpoint(tmp_path / "source.npz")
    inputs = {"MODEL": "./small.yaml", "CHECKPOINT": "source.npz"}
    done = step(tmp_path, **inputs)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "convert-reports" / "convert.intoto.json").read_text())["subject"]
    assert "statement=convert-reports/convert.intoto.json" in (tmp_path / "outputs").read_text()
    assert "weights   passed" in (tmp_path / "summary.md").read_text()
    (tmp_path / "convert-reports" / "convert.intoto.json").unlink()
    write_checkpoint(tmp_path / "source.npz", seed=1)
    assert step(tmp_path, **inputs).returncode == 1
    assert not (tmp_path / "convert-reports" / "convert.intoto.json").exists()
    assert json.loads((tmp_path / "convert-reports" / "convert.sarif").read_text())["runs"][0]["results"]
    assert step(tmp_path, MODEL="./small.yaml").returncode == 2


def test_the_hook_finds_rule_files() -> None:
    (hook,) = load_yaml((ROOT / ".pre-commit-hooks.yaml").read_text(), "hooks").plain()
    assert hook["entry"] == "convert rules validate"
    assert re.search(hook["files"], "rules/a.yaml") and not re.search(hook["files"], "other/a.yaml")
