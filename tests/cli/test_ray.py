"""`--engine ray`: on a Ray of this machine, and on two nodes of `ray start` on loopback, one of which is killed; the bytes are those of the local engine."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import convert
from convert.core.system.process import PROGRESS_FD
from support.command_line import Run
from support.goldens import checkpoint
from support.kills import content
from support.object_store import SECRET, TOKEN, ObjectStore, credentials, serve
from support.small_conversion import write_rules

LEAVES, SIZE = 24, 1024


def test_wrong_options_are_errors_without_ray(run: Run, tmp_path: Path) -> None:
    given = ("timesfm", checkpoint("timesfm-2.5"), tmp_path / "out")
    for options, expected in (
        (("--engine", "spark"), "error[usage]: --engine: expected local or ray, got spark"),
        (("--address", "auto"), "error[usage]: --address is the head of a Ray cluster; add --engine ray"),
        (("--engine", "ray", "--adapter", "peft"), "error[usage]: --engine ray writes safetensors"),
    ):
        assert expected in run(*given, *options, code=2)[1]


def test_without_ray_the_extra_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    given = ("timesfm", checkpoint("timesfm-2.5"), tmp_path / "out", "--engine", "ray")
    assert "error[package-missing]: --engine ray: Ray is not installed; run pip install" in run(*given, code=2)[1]
    assert not (tmp_path / "out").exists()


@pytest.fixture
def ray() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed (pip install 'ckpt-convert[ray]')")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of 100 MB whose tensors are a file each, and its conversion by the local engine."""
    monkeypatch.chdir(tmp_path)
    write_rules(tmp_path)
    values = np.random.default_rng(0).random((SIZE, SIZE), np.float32)
    np.savez("source.npz", **{f"layer_{k}/w": values + np.float32(k) for k in range(LEAVES)})
    convert.convert("./small.yaml", "source.npz", "here", max_shard_bytes=values.nbytes)
    return tmp_path


def processes_below(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


Nodes = tuple[str, list[subprocess.Popen[str]]]


def kill(node: subprocess.Popen[str]) -> None:
    for pid in processes_below(node.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.wait()
    assert node.stdout is not None
    node.stdout.close()


def written_address(file: Path, head: subprocess.Popen[str]) -> str:
    """Return the address of the head, which writes this file after it has said that it runs."""
    while not (file.is_file() and (address := file.read_text().strip())):
        assert head.poll() is None, "the head has ended, and written no address"
        time.sleep(0.1)
    return address


@pytest.fixture
def s3() -> Iterator[ObjectStore]:
    """A server, with its credentials in the environment of all that is started afterwards."""
    with serve() as store, credentials(store):
        yield store


@pytest.fixture
def nodes(ray: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """The address of a head, and two nodes with a processor each; a token that the test draws admits the nodes and the driver."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    short = Path(tempfile.mkdtemp(prefix="ray"))  # the path of a socket has at most 107 characters
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> None:
        command = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=1", "--memory=2000000000"]
        command += ["--object-store-memory=80000000", "--disable-usage-stats", *options]
        env = {**os.environ, "RAY_raylet_start_wait_time_s": "120", "RAY_health_check_period_ms": "1000"}
        node = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        started.append(node)
        assert node.stdout is not None
        lines = []
        for line in node.stdout:
            lines.append(line)
            if "Ray runtime started" in line:
                return
        pytest.fail("".join(lines))

    try:
        start("--head", "--port=0", "--include-dashboard=false", f"--temp-dir={short}")
        address = written_address(short / "ray_current_cluster", started[0])
        start(f"--address={address}")
        yield address, started
    finally:
        for node in reversed(started):
            kill(node)
        shutil.rmtree(short, ignore_errors=True)


def on_ray(
    out: str, *options: object, rules: str = "./small.yaml", source: str = "source.npz"
) -> subprocess.Popen[str]:
    """Start a conversion, whose standard output is its progress."""
    command = [sys.executable, "-m", "convert", rules, source, out, "--engine", "ray", *map(str, options)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, PROGRESS_FD: "1"}
    )


@pytest.mark.slow
def test_a_ray_of_this_machine(ray: None, folder: Path) -> None:
    """As a user starts it; and an error of a task is the error that the local engine gives."""
    printed, said = on_ray("there", "--max-shard-size", 4 * SIZE * SIZE).communicate()
    assert "wrote there: 24 tensors" in said, said
    assert [int(line.split()[0]) // (4 * SIZE * SIZE) for line in printed.splitlines()] == [0, *range(LEAVES + 1)]
    assert content(Path("there")) == content(Path("here"))
    np.savez("large.npz", **{"layer_0/w": np.full((3, 4), 1e30, np.float32)})
    failed = on_ray("x", "--dtype", "float16", source="large.npz")
    _, said = failed.communicate()
    assert failed.returncode == 2 and "error[value-overflow]" in said and "layer_0/w" in said, said
    assert not Path("x").exists() and not list(folder.glob(".x*"))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_two_nodes_one_of_which_is_killed(nodes: Nodes, folder: Path, killed: bool) -> None:
    address, (_, second) = nodes
    driver = on_ray("there", "--address", address, "--max-shard-size", 4 * SIZE * SIZE)
    assert driver.stdout is not None and driver.stderr is not None
    for k, _ in enumerate(driver.stdout):
        if killed and k == 4:  # three files are complete
            kill(second)
    said = driver.stderr.read()
    driver.stdout.close(), driver.stderr.close()
    assert driver.wait() == 0 and "wrote there: 24 tensors" in said, said
    assert content(Path("there")) == content(Path("here"))
    assert not list(folder.glob(".*"))


@pytest.mark.slow
def test_two_nodes_from_bucket_to_bucket_one_of_which_is_killed(s3: ObjectStore, nodes: Nodes, folder: Path) -> None:
    """The nodes have the credentials of their environment; Ray's logs and the disk have none of them, and nothing else stays."""
    address, (head, second) = nodes
    bucket = s3.bucket("ray")
    source = s3.put(bucket, "in/source.npz", Path("source.npz"))
    out = f"s3://{bucket}/models/out"
    driver = on_ray(out, "--address", address, "--max-shard-size", 4 * SIZE * SIZE, source=source)
    assert driver.stdout is not None and driver.stderr is not None
    for k, _ in enumerate(driver.stdout):
        if k == 3:  # three files are complete
            kill(second)
    said = driver.stderr.read()
    driver.stdout.close(), driver.stderr.close()
    assert driver.wait() == 0 and f"wrote {out}: 24 tensors" in said, said
    assert {key.removeprefix("models/out/"): s3.get(bucket, key) for key in s3.keys(bucket) if key.startswith("models/")} == content(Path("here"))  # fmt: skip
    assert s3.unfinished(bucket) == []
    (logs,) = (Path(part.partition("=")[2]) for part in head.args if str(part).startswith("--temp-dir="))  # type: ignore[union-attr]
    written = [file.read_bytes() for file in logs.rglob("*") if file.is_file() and not file.is_symlink()]
    assert written and not any(
        secret.encode() in text for text in (*written, said.encode()) for secret in (SECRET, TOKEN)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "problem"),
    [(("--jobs", 1024), "no machine has 1024 processors"), (("--address", "127.0.0.1:1"), "no cluster answers at")],
)
def test_a_cluster_that_is_too_small_or_absent(ray: None, folder: Path, options: tuple[object], problem: str) -> None:
    driver = on_ray("there", *options)
    _, said = driver.communicate()
    assert driver.returncode == 2 and "error[cluster-failed]" in said and problem in said, said
    assert not Path("there").exists() and not list(folder.glob(".*"))
