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
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors import safe_open

import convert
from convert.checkpoints.encodings import zarr_chunks
from convert.core.errors import CheckpointError
from support import writers
from support.goldens import checkpoint

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
@pytest.mark.parametrize("reads", [1, 7, 13])
def test_a_read_error_in_the_middle(reads: int, jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out" / "model.safetensors"
    out.parent.mkdir()
    after(reads, raising(OSError(5, "Input/output error")), monkeypatch)
    with pytest.raises(CheckpointError) as caught:
        convert.convert("timesfm", checkpoint(CASE), out, jobs=jobs)
    (finding,) = caught.value.findings
    assert finding.code == "checkpoint-unreadable" and "leaf" in finding.data
    assert "Input/output error" in finding.problem
    assert not any(out.parent.iterdir())


def test_a_source_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = copied(tmp_path), tmp_path / "out"
    out.mkdir()
    after(5, lambda: shutil.rmtree(source), monkeypatch)
    with pytest.raises(CheckpointError, match=r"/ckpt/\S+: was removed while the checkpoint was read"):
        convert.convert("timesfm", source, out / "m.safetensors", jobs=1)
    assert not any(out.iterdir())


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_directory_that_is_saved_again(
    jobs: int, in_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one reads as well as the old one; what was read of both is none of the two."""
    source, out, new = copied(tmp_path), tmp_path / "out", tmp_path / "new"
    out.mkdir()
    shutil.copytree(source, new, copy_function=shutil.copy)  # with a time of its own

    def saved() -> None:
        if in_place:
            shutil.copytree(new, source, dirs_exist_ok=True, copy_function=shutil.copy)
        else:
            source.rename(tmp_path / "old")
            new.rename(source)

    after(5, saved, monkeypatch)
    with pytest.raises(CheckpointError, match=r"/ckpt/\S+: was rewritten while the checkpoint was read; run again"):
        convert.convert("timesfm", source, out / "m.safetensors", jobs=jobs)
    assert not any(out.iterdir())


@pytest.mark.parametrize("kind", ["npz", "safetensors", "msgpack", "keras", "equinox", "t5x", "t5x-inline"])
def test_a_file_that_is_replaced(kind: str, tmp_path: Path) -> None:
    arrays = {"a/w": np.ones((3, 5), np.float32), "b/w": np.zeros((7, 5), np.float32)}
    path, options = _written(kind, tmp_path / "old", arrays)
    other, _ = _written(kind, tmp_path / "new", {name: -array for name, array in arrays.items()})
    source = convert.open_source(path, **options)
    assert source.changed() is None
    assert source.read(next(iter(source.leaves))).size
    held = path / "checkpoint" if path.is_dir() else path
    (other / "checkpoint" if other.is_dir() else other).replace(held)
    assert source.changed() == held


def _written(kind: str, folder: Path, arrays: dict[str, np.ndarray]) -> tuple[Path, dict[str, Any]]:
    folder.mkdir()
    if kind == "npz":
        return writers.npz(folder / "m.npz", arrays), {}
    if kind == "keras":
        with h5py.File(folder / "m.weights.h5", "w") as file:
            for name, array in arrays.items():
                file[f"{name}/vars/0"] = array
        return folder / "m.weights.h5", {}
    if kind == "equinox":
        (folder / "m").write_bytes(writers.records(*arrays.values()))
        return folder / "m", {"leaf_names": [list(arrays)]}
    if kind.startswith("t5x"):
        return writers.t5x(folder / "c", arrays, inline=tuple(arrays) if kind == "t5x-inline" else ()), {}
    return {"safetensors": writers.safetensors, "msgpack": writers.msgpack}[kind](folder / "m", arrays), {}


def test_a_source_that_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = copied(tmp_path), tmp_path / "out"
    out.mkdir()

    def cut() -> None:
        for file in data_files(source):
            os.truncate(file, file.stat().st_size // 8)

    after(2, cut, monkeypatch)
    with pytest.raises(CheckpointError, match=r"chunk .* is truncated after \d+ bytes"):
        convert.convert("timesfm", source, out / "m.safetensors", jobs=1)
    assert not any(out.iterdir())


@pytest.mark.slow
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
    spent = said["spent"]
    assert set(spent) == {
        *("plan", "prepare", "read", "decode", "checksum", "transform", "write", "steps", "wait", "sync"),
    }
    assert all(seconds >= 0 for seconds in spent.values())


@pytest.mark.parametrize("jobs", [1, 3])
def test_all_time_of_all_threads_is_told(jobs: int, tmp_path: Path) -> None:
    source = tmp_path / "ckpt"
    _many_leaves(source)
    result = convert.convert(str(_rules(tmp_path)), source, tmp_path / "m.safetensors", jobs=jobs)
    once = result.spent["prepare"] + result.spent["sync"]
    threads = sum(result.spent.values()) - once
    assert 0.9 * result.seconds < once + threads / jobs < 1.01 * result.seconds


def test_reading_is_not_counted_as_decoding_too(tmp_path: Path) -> None:
    read, tens = zarr_chunks._Range.read, []

    def slow(self: zarr_chunks._Range, size: int = -1) -> bytes:
        started = time.perf_counter()
        got = read(self, size)
        if self._meter is not None:
            tens.append(10.0)
            self._done(0, started - 10)  # as if it had taken ten seconds
        return got

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_chunks._Range, "read", slow)
        result = convert.convert("timesfm", checkpoint(CASE), tmp_path / "m.safetensors", jobs=1)
    assert sum(tens) <= result.spent["read"] < sum(tens) + 10
    assert result.spent["decode"] < 10


@pytest.mark.slow
def test_a_hundred_kills_at_random_moments(tmp_path: Path) -> None:
    """Of a checkpoint whose conversion takes a while: 40 MB, written by Orbax's own format through TensorStore."""
    source = tmp_path / "ckpt"
    _many_leaves(source)
    rules = _rules(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    target = out / "m.safetensors"
    command = [sys.executable, "-m", "convert", str(rules), str(source), str(target), "--overwrite"]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    whole = (
        time.perf_counter() - started
    )  # measured again by each run that ends before its kill: the load of the machine changes
    right = target.read_bytes()
    rng = random.Random(0)
    killed = 0
    for k in range(100):
        if k % 2:
            target.unlink(missing_ok=True)
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(rng.uniform(0.25, 1.1) * whole)
            whole = time.perf_counter() - started
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        assert {path.name for path in out.iterdir() if not path.name.startswith(".")} <= {target.name}
        if target.exists():
            assert target.read_bytes() == right
        for path in out.iterdir():
            if path.name.startswith("."):  # what a killed run leaves sidecar: no loader takes it for a model
                assert path.suffix != ".safetensors"
    assert killed > 30
    subprocess.run(command, check=True, capture_output=True)
    assert target.read_bytes() == right and [path.name for path in out.iterdir()] == [target.name]
    with safe_open(target, "np") as file:
        assert len(file.keys()) == 40


def _rules(folder: Path) -> Path:
    file = folder / "rules.yaml"
    file.write_text(
        "model: m\ntitle: M\ntargets: {torch: {loads: x.M}}\nrules:\n"
        '- {einsum: "...D,DE->...E", from: "w_{i}", linear: "l.{i}"}\n'
    )
    return file


def _many_leaves(path: Path) -> None:
    import orbax.checkpoint as ocp

    rng = np.random.default_rng(0)
    tree = {f"w_{i}": rng.standard_normal((512, 512)).astype(np.float32) for i in range(40)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
