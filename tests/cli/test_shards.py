"""`convert batch --shard`: the shards of a batch are the batch, and the examples that run them on several machines do so."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import convert
from support.command_line import Run
from support.paths import EXAMPLES
from support.small_conversion import write_checkpoint, write_rules

NAMES = "abcde"
SLURM = EXAMPLES / "slurm" / "convert.sbatch"
PARALLEL = EXAMPLES / "gnu-parallel" / "convert.sh"
# What the example asks of GNU parallel, where that is not installed: the command of the last `convert`, for each argument after `:::`.
STAND_IN = """\
#!/usr/bin/env bash
until [ "$1" = convert ]; do shift; done
while [ "$1" != ::: ]; do command+=("$1"); shift; done
shift
printf '%s\\n' "$@" | xargs -P 2 -I{} "${command[@]}"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five jobs in a file whose name has a blank."""
    monkeypatch.chdir(tmp_path)
    write_rules(tmp_path)
    jobs = []
    for k, name in enumerate(NAMES):
        write_checkpoint(tmp_path / f"{name}.npz", k)
        jobs.append({"model": "small.yaml", "checkpoint": f"{name}.npz", "out": f"out/{name}.safetensors"})
    (tmp_path / "my jobs.yaml").write_text(json.dumps({"jobs": jobs}))
    return tmp_path


def shell(*command: object, code: int = 0, path: str = "", **variables: str) -> str:
    """Run a script as a user does, with `convert` on the PATH."""
    env = {**os.environ, "PATH": f"{path}{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
    env |= {"HOME": str(Path.cwd())}
    done = subprocess.run(["bash", *map(str, command)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def assert_all_once(reports: list[Path]) -> None:
    """Every job is in one report and has the output of a conversion by itself."""
    cases = [case.get("name") for report in reports for case in ET.parse(report).getroot().iter("testcase")]
    assert sorted(map(str, cases)) == [f"out/{name}.safetensors" for name in NAMES]
    assert sorted(path.name for path in Path("out").iterdir()) == [f"{name}.safetensors" for name in NAMES]
    for name in NAMES:
        convert.convert("./small.yaml", f"{name}.npz", "alone.safetensors", overwrite=True)
        assert Path("out", f"{name}.safetensors").read_bytes() == Path("alone.safetensors").read_bytes()


def test_the_shards_of_a_batch_print_each_command_once(folder: Path, run: Run) -> None:
    whole, _ = run("batch", "my jobs.yaml", "--dry-run")
    for count in (2, 7):
        shards = [run("batch", "my jobs.yaml", "--dry-run", "--shard", f"{k}/{count}")[0] for k in range(1, count + 1)]
        lines = [line for shard in shards for line in shard.splitlines()]
        assert sorted(lines) == sorted(whole.splitlines()) and len(whole.splitlines()) == len(NAMES)
        assert max(len(shard.splitlines()) for shard in shards) - min(len(shard.splitlines()) for shard in shards) <= 1


def test_a_shard_without_jobs_ends_well_and_a_wrong_one_is_an_error(folder: Path, run: Run) -> None:
    made = json.loads(run("batch", "my jobs.yaml", "--shard", "7/8", "--json")[0])
    assert (made["jobs"], made["counts"]) == ([], {}) and not Path("out").exists()
    for wrong in ("0/2", "3/2", "2", "x/2", "1/0"):
        assert "error[usage]: --shard: expected K/N" in run("batch", "my jobs.yaml", "--shard", wrong, code=2)[1]


def test_a_shard_finds_what_another_one_would_overwrite(folder: Path, run: Run) -> None:
    jobs = json.loads(Path("my jobs.yaml").read_text())
    jobs["jobs"][3]["out"] = jobs["jobs"][0]["out"]
    Path("my jobs.yaml").write_text(json.dumps(jobs))
    for k in (1, 2, 3):
        assert "two jobs have this output" in run("batch", "my jobs.yaml", "--shard", f"{k}/3", code=2)[1]
    assert not Path("out").exists()


def test_slurm_s_directives_agree_with_the_script() -> None:
    text = SLURM.read_text()
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    (shards,) = re.findall(r"SHARDS:-(\d+)", text)
    assert directives["array"] == f"1-{shards}"
    assert {"requeue", "mem", "cpus-per-task"} <= directives.keys()


@pytest.mark.slow
def test_the_slurm_example_converts_each_job_once(folder: Path) -> None:
    """Three tasks of an array; one of them was requeued after its end, and starts again."""
    for k in (2, 1, 3, 2):
        shell(SLURM, "my jobs.yaml", SHARDS="3", SLURM_ARRAY_TASK_ID=str(k))
    assert_all_once([folder / f"convert-{k}.xml" for k in (1, 2, 3)])
    assert "SLURM_ARRAY_TASK_ID: is not set" in shell(SLURM, "my jobs.yaml", code=1)
    shell(SLURM, "my jobs.yaml", SHARDS="3", SLURM_ARRAY_TASK_ID="4", code=2)


@pytest.mark.slow
@pytest.mark.parametrize("installed", [True, False])
def test_the_parallel_example_converts_each_job_once(folder: Path, installed: bool) -> None:
    """Two "hosts" on this machine, with GNU parallel where it is installed, and with its equivalent."""
    if installed and shutil.which("parallel") is None:
        pytest.skip("GNU parallel is not installed")
    (folder / "hosts").write_text(":\n2/:\n")  # the second is this machine under another name
    (folder / "bin").mkdir()
    if not installed:
        (folder / "bin" / "parallel").write_text(STAND_IN)
        (folder / "bin" / "parallel").chmod(0o755)
    shell(PARALLEL, "hosts", "my jobs.yaml", path=f"{folder}/bin:")
    assert_all_once([folder / "convert-1.xml", folder / "convert-2.xml"])
