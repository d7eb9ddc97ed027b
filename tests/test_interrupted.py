"""What goes wrong in the middle of a conversion: an error that says where, and no output; a kill, and nothing that looks valid."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import convert
from convert.errors import CheckpointError
from convert.sources import zarr_chunks
from upstream import checkpoint

CASE = "timesfm-2.5"


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint(CASE), tmp_path / "ckpt"))


def after(reads: int, then: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Does something at the n-th read of a chunk's bytes."""
    read = zarr_chunks._Range.read
    left = [reads]

    def counted(self: zarr_chunks._Range, size: int = -1) -> bytes:
        left[0] -= 1
        if left[0] == 0:
            then()
        return read(self, size)

    monkeypatch.setattr(zarr_chunks._Range, "read", counted)


def raising(error: Exception) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


def data_files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file() and file.parent.name == "d"]


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("reads", [1, 7, 19])
def test_a_read_error_in_the_middle(reads: int, jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out" / "model.safetensors"
    out.parent.mkdir()
    after(reads, raising(OSError(5, "Input/output error")), monkeypatch)
    with pytest.raises(
        CheckpointError, match=r"leaf \S+ \(\w+\[[\d, ]*\]\) cannot be read: .*Input/output error; the checkpoint"
    ):
        convert.convert("timesfm", checkpoint(CASE), out, jobs=jobs)
    assert not any(out.parent.iterdir())


def test_a_source_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = copied(tmp_path), tmp_path / "out"
    out.mkdir()
    after(5, lambda: shutil.rmtree(source), monkeypatch)
    with pytest.raises(CheckpointError, match=r"leaf \S+ .*cannot be read: "):
        convert.convert("timesfm", source, out / "m.safetensors", jobs=1)
    assert not any(out.iterdir())


def test_a_source_that_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = copied(tmp_path), tmp_path / "out"
    out.mkdir()

    def cut() -> None:
        for file in data_files(source):
            os.truncate(file, file.stat().st_size // 8)

    after(2, cut, monkeypatch)
    with pytest.raises(CheckpointError, match=r"cannot be read: chunk .*it ends after \d+ bytes, where more are due"):
        convert.convert("timesfm", source, out / "m.safetensors", jobs=1)
    assert not any(out.iterdir())


def test_where_the_time_went(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "convert",
        "timesfm",
        str(checkpoint(CASE)),
        str(tmp_path / "m.safetensors"),
        "--json",
    ]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert set(said["spent"]) == {"read", "decode", "checksum", "transform", "write", "sync"}
    assert all(seconds >= 0 for seconds in said["spent"].values())


@pytest.mark.slow
def test_a_hundred_kills_at_random_moments(tmp_path: Path) -> None:
    """Of a checkpoint whose conversion takes a while: 40 MB, written by Orbax's own format through TensorStore."""
    source = tmp_path / "ckpt"
    _many_leaves(source)
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "model: m\ntitle: M\ntargets: {torch: {loads: x.M}}\nrules:\n"
        '- {einsum: "...D,DE->...E", from: "w_{i}", linear: "l.{i}"}\n'
    )
    out = tmp_path / "out"
    out.mkdir()
    target = out / "m.safetensors"
    command = [sys.executable, "-m", "convert", str(rules), str(source), str(target), "--overwrite"]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    whole = time.perf_counter() - started
    right = target.read_bytes()
    rng = random.Random(0)
    killed = 0
    for k in range(100):
        if k % 2:
            target.unlink(missing_ok=True)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.25, 1.1) * whole)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        assert {path.name for path in out.iterdir() if not path.name.startswith(".")} <= {target.name}
        if target.exists():
            assert target.read_bytes() == right
        for path in out.iterdir():
            if path.name.startswith("."):  # what a killed run leaves beside: no loader takes it for a model
                assert path.suffix != ".safetensors"
    assert killed > 30
    subprocess.run(command, check=True, capture_output=True)
    assert target.read_bytes() == right and [path.name for path in out.iterdir()] == [target.name]
    with safe_open(target, "np") as file:
        assert len(file.keys()) == 40


def _many_leaves(path: Path) -> None:
    import orbax.checkpoint as ocp

    rng = np.random.default_rng(0)
    tree = {f"w_{i}": rng.standard_normal((512, 512)).astype(np.float32) for i in range(40)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
