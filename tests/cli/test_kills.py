"""Conversions and batches that are killed at random points and resumed end with the bytes of an undisturbed run."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import convert
from support.google_store import emulator, serve_google
from support.kills import CONVERT, content, format_jobs, golden_jobs, kill_and_resume
from support.object_store import credentials, serve
from support.small_conversion import write_rules


def journal_lines(folder: Path) -> int:
    lines = 0
    for path in folder.glob(".*.journal"):
        with suppress(FileNotFoundError):  # the conversion has just ended
            lines += path.read_bytes().count(b"\n")
    return lines


def kill_at(command: Sequence[str], folder: Path, lines: int) -> bool:
    """Kill a command when its journal has so many lines; return whether it had ended with 0 before."""
    process = subprocess.Popen([*CONVERT, *command], cwd=folder, stderr=subprocess.PIPE)
    while process.poll() is None:
        if journal_lines(folder) >= lines:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.0005)
    _, error = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), error.decode()
    return process.returncode == 0


def kill_one_conversion(folder: Path, layers: int, size: int, kills: int, draw: random.Random) -> None:
    """Kill until the conversion has ended, from a new start each time, `kills` times in all."""
    write_rules(folder)
    values = np.random.default_rng(0).random((size, size), np.float32)
    np.savez(folder / "source.npz", **{f"layer_{k}/w": values + np.float32(k) for k in range(layers)})
    options = ("--max-shard-size", str(3 * values.nbytes))
    convert.convert(
        str(folder / "small.yaml"), folder / "source.npz", folder / "whole", max_shard_bytes=3 * values.nbytes
    )
    expected, restored = content(folder / "whole"), 0
    command = ("./small.yaml", "source.npz", "out", "--resume", "--jobs", "2", *options)
    while kills:
        while kills and not kill_at(command, folder, journal_lines(folder) + draw.randrange(2, layers)):
            kills -= 1
            if (folder / "out").exists():  # killed behind the last rename
                break
        if not (folder / "out").exists():
            done = subprocess.run([*CONVERT, *command, "--json"], cwd=folder, capture_output=True, check=True)
            restored += json.loads(done.stdout)["restored"]
        assert content(folder / "out") == expected
        assert not list(folder.glob(".*"))
        shutil.rmtree(folder / "out")
    assert restored


def test_a_killed_conversion_continues_to_the_same_bytes(tmp_path: Path) -> None:
    kill_one_conversion(tmp_path, layers=24, size=256, kills=2, draw=random.Random(1))


@pytest.mark.slow
def test_a_hundred_kills_of_a_conversion(tmp_path: Path) -> None:
    kill_one_conversion(tmp_path, layers=30, size=300, kills=100, draw=random.Random(2))


@pytest.mark.slow
def test_a_batch_of_one_golden_of_each_kind_that_is_killed_and_resumed(tmp_path: Path) -> None:
    """Its running job ends with the batch; the next batch keeps what is complete and continues."""
    goldens = golden_jobs()
    chosen = [goldens[name] for name in ("timesfm-2.5", "timesfm-1.0", "gemma3", "gemma1-mqa", "bert", "siglip")]
    jobs = [*chosen, *list(format_jobs(tmp_path).values())[1::3]]
    with serve() as s3, credentials(s3), serve_google() as gs, emulator(gs):
        done = kill_and_resume(jobs, tmp_path, kills=10, each=5, stores=(s3, gs))
    assert done.kills == 10 and len(set(done.outputs_complete_at_kills)) > 2, (
        "the kills did not fall into the conversions"
    )


@pytest.mark.slow
def test_the_batch_of_all_goldens_has_every_format_and_can_start(tmp_path: Path) -> None:
    jobs = [*golden_jobs().values(), *format_jobs(tmp_path).values()]
    (tmp_path / "jobs.yaml").write_text(json.dumps({"jobs": jobs}))
    done = subprocess.run(
        [*CONVERT, "batch", "jobs.yaml", "--dry-run"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == len(jobs)
    opened = (
        convert.open_source(
            tmp_path / job["checkpoint"], skeleton=tmp_path / job["skeleton"] if "skeleton" in job else None
        )
        for job in jobs
    )
    assert {source.format for source in opened} == {
        *("Orbax, OCDBT, zarr", "Orbax, OCDBT, zarr3", "Orbax, aggregate file (msgpack)"),
        *("Orbax, one directory per leaf, zarr", "Orbax, one directory per leaf, zarr3"),
        *("flax msgpack", "flax msgpack, 3 shards", "paxml FLAX (msgpack)", "T5X, version 3"),
        *("Equinox", "Keras 3 weights (HDF5)", "NumPy .npz", "NumPy .npz, compressed"),
        *("safetensors", "safetensors, 2 shards"),
    }
