"""What `python -m fuzz` and `test_fuzz.py` run: cases in a child that may take little memory and open no other file."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from support import writers
from support.paths import GOLDEN

HERE = Path(__file__).parent
MEMORY = 3 << 30  # of address space beyond what the imports took; the checkpoints have a few kB
CASE_LIMIT = 20.0  # seconds that one case may take


@dataclass
class Done:
    """What came of it. `failures` are (seed of the case, what happened)."""

    cases: int = 0
    refused: int = 0
    read: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)


def arrays() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(0)
    return {
        "a/w": numbers.normal(size=(3, 4)).astype(np.float32),
        "a/b": np.arange(5, dtype=np.int16),
        "s": np.array(2.0),
    }


def _npz(folder: Path) -> Path:
    return writers.npz(folder / "x.npz", arrays())


def _deflated(folder: Path) -> Path:
    return writers.npz(folder / "x.npz", arrays(), compressed=True)


def _equinox(folder: Path) -> Path:
    path = folder / "x.eqx"
    path.write_bytes(b'{"width": 3}\n' + writers.records(*arrays().values()))
    return path


def _keras(folder: Path) -> Path:
    import h5py

    with h5py.File(folder / "x.weights.h5", "w") as file:
        for name, array in arrays().items():
            file[f"layers/{name}/vars/0"] = array
    return folder / "x.weights.h5"


def _keras_archive(folder: Path) -> Path:
    import zipfile

    inner = _keras(folder)
    with zipfile.ZipFile(folder / "x.keras", "w") as archive:
        archive.write(inner, "model.weights.h5")
    inner.unlink()
    return folder / "x.keras"


def _safetensors(folder: Path) -> Path:
    from safetensors.numpy import save_file

    save_file(arrays(), folder / "x.safetensors")
    return folder / "x.safetensors"


def _index(folder: Path) -> Path:
    return writers.msgpack_shards(folder / "m", arrays(), 2)


def _golden(name: str) -> Callable[[Path], Path]:
    return lambda folder: Path(shutil.copytree(GOLDEN / name, folder / "golden"))


def _rules(folder: Path) -> Path:
    shutil.copy(HERE.parents[1] / "rules" / "timesfm-2.5.yaml", folder / "r.yaml")
    return folder / "r.yaml"


KINDS: dict[str, Callable[[Path], Path]] = {
    "msgpack": lambda folder: writers.msgpack(folder / "x.msgpack", arrays()),
    "index": _index,
    "npz": _npz,
    "deflated": _deflated,
    "equinox": _equinox,
    "safetensors": _safetensors,
    "keras": _keras,
    "keras-zip": _keras_archive,
    "t5x": lambda folder: writers.t5x(folder / "checkpoint_1", arrays(), ("s",)),
    "orbax": _golden("orbax-0.5/ocdbt"),
    "orbax-files": _golden("orbax-0.5/leaf-directories"),
    "paxml": _golden("timesfm-1.0/checkpoints"),
    "rules": _rules,
}
_PIECES = (
    b"\xff" * 4,
    b"\x00" * 4,
    b"\x7f" * 8,
    b"..",
    b"/",
    b"\x80",
    b"\xdf",
    b"-1",
    b"9" * 18,
    b"[]",
    b"null",
    b"{i}",
    b"*" * 9,
    b"&a",
)


def mutate(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """`data` with a few faults."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        if rng.random() < 0.3:  # near the start or the end, where formats keep their structure
            at = rng.choice((at % 64, max(len(out) - 1 - at % 64, 0)))
        kind = rng.randrange(8)
        if kind <= 1 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 3:
            piece = rng.choice(_PIECES)
            out[at : at + (len(piece) if rng.random() < 0.6 else 0)] = piece
        elif kind == 4:
            del out[at : at + rng.randrange(1, 40)]
        elif kind == 5:
            start = rng.randrange(len(other) + 1)
            out[at:at] = other[start : start + rng.randrange(60)]
        elif kind == 6 and rng.random() < 0.3:
            del out[at:]
        elif kind == 7:  # a number in text made extreme
            found = list(re.finditer(rb"\d+", bytes(out[at : at + 200])))
            if found:
                a, b = found[0].span()
                out[at + a : at + b] = rng.choice((b"0", b"-1", b"4294967296", b"18446744073709551615", b"1e9", b"3"))
    return bytes(out)


def damage(folder: Path, rng: random.Random) -> None:
    """Damages one file of a checkpoint, or takes one away."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = rng.choice(files)
    if len(files) > 1 and rng.random() < 0.05:
        file.unlink()
        return
    file.write_bytes(mutate(file.read_bytes(), rng, rng.choice(files).read_bytes()))


def fuzz(kind: str, folder: Path, seconds: float, seed: int, cases: int | None = None) -> Done:
    """Runs cases of a kind for some time; the case `n` of a seed is the same each time."""
    folder.mkdir(parents=True)
    made = folder / "made"
    made.mkdir()
    named = KINDS[kind](made).relative_to(made)
    done, number, deadline = Done(), 0, time.monotonic() + seconds
    while time.monotonic() < deadline and (cases is None or number < cases):
        batch = range(number, number + (min(50, cases - number) if cases else 50))
        _run_batch(kind, made, named, folder / "case", batch, seed, done)
        number = batch.stop
    return done


def _run_batch(kind: str, made: Path, named: Path, work: Path, batch: range, seed: int, done: Done) -> None:
    """A child per batch; where it dies, the case that it was at is a failure, and the next child goes on after it."""
    work.mkdir(exist_ok=True)
    at = batch.start
    while at < batch.stop:
        for number in range(at, batch.stop):
            case = work / str(number)
            shutil.copytree(made, case)
            damage(case, random.Random(f"{kind} {seed} {number}"))
        jobs = [str(work / str(number) / named) for number in range(at, batch.stop)]
        command = [sys.executable, str(HERE / "child.py"), kind, str(MEMORY)]
        limit = CASE_LIMIT * 2 + len(jobs)
        try:
            run = subprocess.run(
                command,
                input="\n".join(jobs),
                capture_output=True,
                text=True,
                check=False,
                timeout=limit,
                env={**os.environ, "HDF5_PLUGIN_PATH": "/nonexistent"},
            )
            code, said, errors = run.returncode, run.stdout, run.stderr
        except subprocess.TimeoutExpired as error:
            code, said, errors = (
                -1,
                (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else error.stdout or "",
                "too slow",
            )
        results = [json.loads(line) for line in said.splitlines()]
        for number, (result, detail, took) in zip(range(at, batch.stop), results, strict=False):
            done.cases += 1
            done.refused += result == "refused"
            done.read += result == "read"
            if result == "failure":
                done.failures.append((number, detail))
            elif took > CASE_LIMIT:
                done.failures.append((number, f"took {took:.0f} s"))
        at += len(results)
        if at < batch.stop:
            done.cases += 1
            done.failures.append((at, f"the process ended with {code}: {errors[-300:]}"))
            at += 1
        shutil.rmtree(work)
        work.mkdir()
