"""Conversions and batches that are killed at random points and resumed end with the bytes of an undisturbed run."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import convert
from support.paths import GOLDEN
from support.small_conversion import write_rules

CONVERT = (sys.executable, "-m", "convert")


def kill_after(command: Sequence[str], folder: Path, seconds: float) -> bool:
    """Kill a command after so long; return whether it had ended with 0 before."""
    process = subprocess.Popen([*CONVERT, *command], cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        _, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return False
    assert process.returncode == 0, error.decode()
    return True


def journal_lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob(".*.journal"))


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


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out.iterdir() if out.is_dir() else [out])}


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
            assert not (folder / "out").exists()
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


SHARDS = {"max_shard_size": "50kB"}
GOLDENS: dict[str, tuple[str, str, dict[str, object]]] = {  # one of each format, as a file or as shards
    "timesfm-2.5": ("timesfm", "timesfm-2.5/ckpt", SHARDS),
    "timesfm-1.0": ("timesfm", "timesfm-1.0/checkpoints", SHARDS),
    "gemma3.safetensors": ("gemma", "gemma3/ckpt", {"set": {"vocab_size": 256}}),
    "bert": ("flax-transformers", "bert/ckpt", SHARDS),
    "siglip.safetensors": ("siglip", "siglip/ckpt.npz", {}),
}


@pytest.mark.slow
def test_a_batch_of_goldens_that_is_killed_and_resumed(tmp_path: Path) -> None:
    """Kill the batch at random moments: its running job ends, the next batch keeps what is complete and continues."""
    jobs = [
        {"model": model, "checkpoint": str(GOLDEN / path), "out": f"out/{name}", **more}
        for name, (model, path, more) in GOLDENS.items()
    ]
    (tmp_path / "jobs.yaml").write_text(json.dumps({"jobs": jobs}))
    command = ("batch", "jobs.yaml", "--resume", "--jobs", "2")
    started = time.monotonic()
    assert kill_after(command, tmp_path, 120)
    whole = time.monotonic() - started
    expected = {path.name: content(path) for path in (tmp_path / "out").iterdir()}
    assert expected.keys() == GOLDENS.keys()
    draw, kills = random.Random(3), 0
    while kills < 30:
        shutil.rmtree(tmp_path / "out")
        while not kill_after(command, tmp_path, draw.uniform(0.2, whole)):
            kills += 1
        assert {path.name: content(path) for path in (tmp_path / "out").iterdir()} == expected
