"""`convert batch`: jobs run as processes, a failure holds its command, and the reports have a row for each job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import convert
from convert.batch.run import _reason
from support.command_line import Run
from support.small_conversion import write_checkpoint, write_rules

FLOAT16 = ("--dtype", "float16", "--overwrite")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rules(tmp_path)
    for k, name in enumerate("ab"):
        write_checkpoint(tmp_path / f"{name}.npz", k)
    return tmp_path


@pytest.mark.slow
def test_a_batch_writes_what_single_conversions_write(folder: Path, run: Run) -> None:
    made = json.loads(run("batch", "./small.yaml", "*.npz", "out/{name}.safetensors", "--jobs", 2, "--json")[0])
    assert made["counts"] == {"converted": 2}
    for name, job in zip("ab", made["jobs"], strict=True):
        convert.convert("./small.yaml", f"{name}.npz", f"{name}.safetensors")
        assert Path(job["out"]).read_bytes() == Path(f"{name}.safetensors").read_bytes()
        assert (job["tensors"], job["bytes"], job["error"]) == (5, 240, "")


@pytest.mark.slow
def test_a_failure_holds_its_command_and_the_others_go_on(folder: Path, run: Run) -> None:
    """The values of the first checkpoint do not fit the dtype, which only its data tells."""
    np.savez("a.npz", **{"layer_0/w": np.full((3, 4), 1e30, np.float32)})
    reports = ("--junit", "batch.xml", "--html", "batch.html")
    for options, counts in ((("--keep-going",), "1 converted, 1 failed"), ((), "1 failed, 1 not run")):
        stdout, _ = run("batch", "./small.yaml", "*.npz", "out", *FLOAT16, *options, *reports, code=1)
        failed, summary = stdout.splitlines()
        assert failed.startswith("failed: error[") and failed.endswith(
            ": convert ./small.yaml a.npz out/a --dtype float16 --overwrite"
        )
        assert summary.startswith(counts)
    root = ET.parse("batch.xml").getroot()
    assert (root.get("tests"), root.get("failures"), root.get("skipped")) == ("2", "1", "1")
    assert [case.get("name") for case in root.iter("testcase")] == ["out/a", "out/b"]
    page = Path("batch.html").read_text()
    assert "convert ./small.yaml a.npz out/a" in page and page.count("<tr>") == 4


def test_nothing_starts_when_a_job_cannot(folder: Path, run: Run) -> None:
    Path("b.npz").unlink()
    Path("jobs.yaml").write_text(
        "jobs:\n- {model: small.yaml, checkpoint: a.npz, out: out/a}\n- {model: small.yaml, checkpoint: b.npz, out: out/b}\n"
    )
    _, stderr = run("batch", "jobs.yaml", code=2)
    assert (
        "error[checkpoint-missing]: Nothing was converted: 1 problem in 2 jobs:" in stderr and "jobs.yaml:3" in stderr
    )
    assert not Path("out").exists()
    for arguments in ((), ("gemma",), ("small.yaml", "a.npz", "b.npz", "out")):
        assert "error[" in run("batch", *arguments, code=2)[1]


def test_further_problems_of_a_job_follow_the_first_one(folder: Path, run: Run) -> None:
    """The first, a shape that contradicts its equation, has no advice."""
    np.savez("a.npz", **{"layer_0/w": np.zeros((3, 4, 5), np.float32), "other": np.zeros(1, np.float32)})
    _, stderr = run("batch", "small.yaml", "a.npz", "out", code=2)
    assert (
        "1 problem in 1 job:" in stderr and "; 1 more: convert plan small.yaml a.npz" in stderr and "; ;" not in stderr
    )


def test_a_report_that_cannot_be_written_is_refused_before_a_job_starts(folder: Path, run: Run) -> None:
    for report, problem in ((".", "is a directory"), ("absent/report.xml", "does not exist")):
        assert problem in run("batch", "small.yaml", "a.npz", "out", "--junit", report, code=2)[1]
    assert not (folder / "out").exists()


def test_a_dry_run_prints_the_commands(folder: Path, run: Run) -> None:
    stdout, _ = run("batch", "./small.yaml", "*.npz", "out", "--shard", "2/2", "--dtype", "bfloat16", "--dry-run")
    assert stdout == "convert ./small.yaml b.npz out/b --dtype bfloat16  # 120 B\n"
    assert not Path("out").exists()


@pytest.mark.slow
def test_a_check_that_does_not_pass_is_a_failure(folder: Path, run: Run) -> None:
    made = json.loads(run("batch", "./small.yaml", "a.npz", "out", "--check", "coverage,weights", "--json")[0])
    assert made["jobs"][0]["check"] == {"coverage": "passed", "weights": "passed"}
    stdout, _ = run("batch", "./small.yaml", "a.npz", "out", "--overwrite", "--check", "model", code=1)
    assert "--level model --require model" in stdout.splitlines()[0]


@pytest.mark.slow
def test_a_job_ends_with_its_batch(folder: Path) -> None:
    """A job whose batch was killed must not write on, while another run continues its work."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "convert", "./small.yaml", "a.npz", "out.safetensors"]
    done = subprocess.run(
        command, pass_fds=(writing,), env={**os.environ, "CONVERT_PROGRESS_FD": str(writing)}, capture_output=True
    )
    os.close(writing)
    assert done.returncode == 2 and b"error[interrupted]" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["a.npz", "b.npz", "small.yaml"]


@pytest.mark.slow
def test_a_signal_ends_the_jobs_and_leaves_nothing_unfinished(folder: Path) -> None:
    """The disk is slow, so the signal comes while a part is written."""
    (folder / "sitecustomize.py").write_text("import os, time\nos.fsync = lambda fd: time.sleep(1)\n")
    command = [sys.executable, "-m", "convert", "batch", "./small.yaml", "*.npz", "out", "--jobs", "2"]
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    batch = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": paths})
    while not any((folder / "out").glob(".a.tmp-*")):
        assert batch.poll() is None
        time.sleep(0.01)
    batch.send_signal(signal.SIGTERM)
    assert batch.wait(30) == 143
    assert not any((folder / "out").glob(".*"))


def test_the_reason_of_a_failure_is_one_line() -> None:
    assert _reason(2, "note: x\nerror[disk-full]: no room\n") == "error[disk-full]: no room"
    assert _reason(-9, "") == "ended by SIGKILL; the system may have run out of memory"
