"""`examples/ci`: the script as CI runs it, and the workflow's own commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from safetensors.numpy import load_file, save_file

from convert.api import convert, plan_conversion
from convert.core.yaml_nodes import load_yaml
from convert.verify.recording.record import record
from convert.writing.written import open_written
from support import conv_norm
from support.paths import EXAMPLES, TESTS

pytestmark = pytest.mark.slow  # takes long, as each test starts programs or models of its own

CI = EXAMPLES / "ci"
OPTIONS = ("--reference", "support.conv_norm:reference", "--model", "rules.yaml")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with weights, a recording and the script, as a repository that uses them has it."""
    folder = tmp_path_factory.mktemp("ci")
    rules, out = folder / "rules.yaml", folder / "weights" / "out.safetensors"
    rules.write_text(conv_norm.RULES)
    out.parent.mkdir()
    convert(str(rules), conv_norm.source(), out)
    plan = plan_conversion(str(rules), conv_norm.source())
    record(plan, conv_norm.reference(plan), folder / "recording.safetensors", factory="support.conv_norm:reference")
    (folder / "ci").symlink_to(CI)
    return folder


def shell(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(TESTS), "JAX_PLATFORMS": "cpu", **variables}
    return subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_script_passes_and_leaves_reports(job: Path) -> None:
    done = shell(f"bash ci/check.sh weights/out.safetensors recording.safetensors {' '.join(OPTIONS)}", job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ElementTree.parse(job / "reports" / "weights.xml").getroot().tag == "testsuites"
    assert "<html" in (job / "reports" / "weights.html").read_text()


def test_the_script_fails_on_other_weights(job: Path) -> None:
    out = job / "weights" / "out.safetensors"
    tensors = load_file(out)
    tensors["head.weight"] = tensors["head.weight"][::-1].copy()
    save_file(tensors, job / "weights" / "wrong.safetensors", metadata=dict(open_written(out).metadata))
    command = f"bash ci/check.sh weights/wrong.safetensors recording.safetensors {' '.join(OPTIONS)}"
    done = shell(command, job, REPORTS="elsewhere")
    assert done.returncode == 1, done.stdout + done.stderr
    assert (job / "elsewhere" / "weights.xml").exists()


def test_a_required_level_that_is_skipped_is_no_pass(job: Path) -> None:
    command = f"bash ci/check.sh weights/out.safetensors recording.safetensors {' '.join(OPTIONS)} --require layers"
    done = shell(command, job)
    assert done.returncode == 2 and "inconclusive" in done.stdout


def test_the_workflow_is_valid_and_its_check_step_runs(job: Path) -> None:
    workflow: dict[str, Any] = load_yaml((CI / "check-weights.yml").read_text(), "check-weights.yml").plain()
    jobs = workflow["jobs"]
    assert set(workflow["on"]) == {"push", "workflow_dispatch"} and set(jobs) == {"check", "record"}
    steps = {step.get("name"): step for each in jobs.values() for step in each["steps"]}
    assert all("uses" in step or "run" in step for each in jobs.values() for step in each["steps"])
    assert set(workflow["env"]) == {"MODEL", "CKPT", "OUT", "RECORDING"}
    command = f"{steps['check']['run']} {' '.join(OPTIONS)}"
    done = shell(command, job, OUT="weights/out.safetensors", RECORDING="recording.safetensors")
    assert done.returncode == 0, done.stdout + done.stderr
    words = steps["record"]["run"].split()
    known = shell("convert record --help", job).stdout
    assert words[:2] == ["convert", "record"] and all(word in known for word in words if word.startswith("--"))
