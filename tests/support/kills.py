"""Batches that are killed at random points and resumed until they are complete, and compared with an undisturbed run.

    PYTHONPATH=src:tests python -m support.kills FOLDER --kills 100 --json benchmarks/results/kills.json

runs the batch of all goldens and formats; the tests run a part of it. A third of the jobs read a bucket of S3 and write to it, a third one
of Google; in the next round others do.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from support import maxtext, writers
from support.google_store import emulator, serve_google
from support.object_store import ObjectStore, credentials, serve
from support.paths import GOLDEN
from support.small_conversion import RULES

CONVERT = (sys.executable, "-m", "convert")
Job = dict[str, Any]
SHARDS = {"max_shard_size": "50kB"}
GEMMA = {"set": {"vocab_size": 256}}
FLAX = [
    "bert",
    "bert-answers",
    "bert-classification",
    "bert-model",
    "bert-pretraining",
    "bert-tokens",
    "dinov2",
    "dinov2-classification",
    "gpt2",
    "gpt2-model",
    "llama",
    "llama-model",
    "mistral",
    "mistral-model",
    "t5",
    "t5-v1.1",
    "whisper",
    "gemma-flax",
    "gemma-flax-model",
    "gemma-flax-untied",
    "drafts/dinov2",
    "drafts/gemma",
    "drafts/llama",
    "drafts/resnet",
    "drafts/vit",
]
_OLD_ORBAX = """\
model: old
title: Old
targets: {torch: {loads: "`torch.nn.Module`"}}
rules:
- {from: params/blocks.0/w, axes: DF, parameter: w}
- {from: params/blocks.0/zeros, axes: EG, parameter: zeros}
- {from: params/half, axes: H, parameter: half}
- {drop: "opt/**", because: optimizer}
- {drop: "{rate,step}", because: optimizer}
"""


def golden_jobs() -> dict[str, Job]:
    """Return a job for each golden that is a checkpoint, by its name; some write shards."""
    models = {
        **{name: ("flax-transformers", f"{name}/ckpt", {}) for name in FLAX},
        **{f"gemma{name}": ("gemma", f"gemma{name}/ckpt", GEMMA) for name in ("1-mha", "1-mqa", "2-2b", "2-9b")},
        **{f"gemma3{name}": ("gemma", f"gemma3{name}/ckpt", GEMMA) for name in ("", "-kauldron", "-stacked")},
        **{f"timesfm-{k}.0": ("timesfm", f"timesfm-{k}.0/checkpoints", SHARDS) for k in (1, 2)},
        "timesfm-2.5": ("timesfm", "timesfm-2.5/ckpt", SHARDS),
        "gemma3-lora": ("gemma", "gemma3-lora/ckpt", {"set": {"vocab_size": 61}}),
        "gemma3-vision": ("gemma", "gemma3-vision/ckpt", {"set": {"vocab_size": 131}}),
        **{f"paligemma{k}": ("gemma", f"paligemma{k}/ckpt.npz", {"set": {"vocab_size": 101}}) for k in (1, 2)},
        "recurrentgemma": ("recurrentgemma", "recurrentgemma/ckpt", {}),
        "siglip": ("siglip", "siglip/ckpt.npz", {}),
        **{f"tabfm-{name}": ("tabfm", f"tabfm-{name}/ckpt", {}) for name in ("classification", "regression")},
        **{
            f"maxtext/{path.name}": (maxtext.rules(path.name), f"maxtext/{path.name}/ckpt", {"set": maxtext.settings(path.name)})
            for path in sorted((GOLDEN / "maxtext").iterdir())
            if not path.name.startswith("gemma")
        },
        **{f"maxtext/{name}": ("maxtext", f"maxtext/{name}/ckpt", {"set": {"vocab_size": 40}}) for name in ("gemma2", "gemma2-unscanned", "gemma3", "gemma3-unscanned", "gemma3-vision")},
    }  # fmt: skip
    return {
        name: {"model": model, "checkpoint": str(GOLDEN / path), "out": _out(name, more), **more}
        for name, (model, path, more) in models.items()
    }


def _out(name: str, more: Mapping[str, Any]) -> str:
    return f"out/{name.replace('/', '-')}" + ("" if "max_shard_size" in more else ".safetensors")


def format_jobs(folder: Path) -> dict[str, Job]:
    """Write a small tree in the formats that no golden has, and return a job for each."""
    import h5py

    random = np.random.default_rng(0)
    arrays = {f"layer_{k}/w": random.random((16, 24), np.float32) for k in range(6)}
    writers.npz(folder / "plain.npz", arrays)
    writers.npz(folder / "compressed.npz", arrays, compressed=True)
    writers.msgpack_shards(folder / "msgpack-shards", arrays)
    writers.safetensors(folder / "one.safetensors", arrays)
    writers.safetensors_shards(folder / "safetensors-shards", arrays)
    writers.t5x(folder / "t5x" / "checkpoint_7", arrays)
    writers.equinox(folder / "model.eqx", list(arrays.values()))
    records = [{"path": name.split("/"), "shape": [16, 24], "dtype": "float32"} for name in arrays]
    (folder / "skeleton.json").write_text(json.dumps({"format": "convert skeleton 1", "records": records}))
    with h5py.File(folder / "model.weights.h5", "w") as file:
        for name, array in arrays.items():
            file[f"layers/{name.partition('/')[0]}/vars/0"] = array
    (folder / "small.yaml").write_text(RULES)
    (folder / "keras.yaml").write_text(RULES.replace("layer_{i}/w", "layers/layer_{i}/vars/0"))
    (folder / "old.yaml").write_text(_OLD_ORBAX)
    small = [
        "plain.npz",
        "compressed.npz",
        "msgpack-shards",
        "one.safetensors",
        "safetensors-shards",
        "t5x/checkpoint_7",
    ]
    old = [f"orbax-0.5/{name}" for name in ("ocdbt", "leaf-directories", "aggregated", "zarr3")]
    jobs = {name: ("small.yaml", name, {"max_shard_size": "3kB"}) for name in small}
    jobs |= {name: ("old.yaml", str(GOLDEN / name), {}) for name in old}
    jobs |= {
        "model.eqx": ("small.yaml", "model.eqx", {"skeleton": "skeleton.json"}),
        "model.weights.h5": ("keras.yaml", "model.weights.h5", {}),
    }
    return {
        name: {"model": model, "checkpoint": path, "out": _out(f"format-{name.replace('.', '-')}", more), **more}
        for name, (model, path, more) in jobs.items()
    }


def content(out: Path) -> dict[str, bytes]:
    """Return the files of an output."""
    return {path.name: path.read_bytes() for path in (out.iterdir() if out.is_dir() else [out])}


def kill_after(
    command: Sequence[str], folder: Path, seconds: float | None, began: Callable[[], bool] | None = None
) -> bool:
    """Kill a command so long after it began, or after its start; return whether it had ended with 0 before."""
    process = subprocess.Popen([*CONVERT, *command], cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    while began is not None and process.poll() is None and not began():
        time.sleep(0.02)
    try:
        _, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return False
    assert process.returncode == 0, error.decode()
    return True


@dataclass(frozen=True)
class Kills:
    """What `kill_and_resume` did: jobs and kills, undisturbed seconds, and how many outputs were complete at each kill."""

    jobs: int
    kills: int
    kills_before_the_first_byte: int
    rounds: int
    jobs_in_a_bucket: tuple[int, ...]
    whole_seconds: float
    outputs_complete_at_kills: tuple[int, ...]


class Bucket:
    """A bucket with the checkpoints of the jobs, and the outputs of some."""

    def __init__(self, store: ObjectStore, jobs: Sequence[Job], folder: Path) -> None:
        self._store = store
        self._name = store.bucket(f"kills-{store.scheme}")  # all of moto's servers in a process have the same buckets
        self._in = {job["out"]: store.put(self._name, f"in/{Path(job['out']).name}/{Path(job['checkpoint']).name}", folder / job["checkpoint"]) for job in jobs}  # fmt: skip

    def placed(self, job: Job) -> Job:
        """Move a job into the bucket."""
        out = f"{self._store.scheme}://{self._name}/{job['out']}"
        return {**job, "checkpoint": self._in[job["out"]], "out": out}

    def outputs(self) -> dict[str, dict[str, bytes]]:
        """Return the files of each output."""
        found: dict[str, dict[str, bytes]] = {}
        for key in self._keys():
            _, out, *file = key.split("/")
            found.setdefault(out, {})[file[0] if file else out] = self._store.get(self._name, key)
        return found

    def names(self) -> set[str]:
        """Return the names of outputs of which there is an object."""
        return {key.split("/")[1] for key in self._keys()}

    def _keys(self) -> list[str]:
        return self._store.keys(self._name, "out/")

    def writes(self) -> int:
        """Return how many requests sent bytes; a batch begins uploads with POST, and ends them, to see whether it may."""
        return sum(method == "PUT" for method, _, _ in self._store.requests)

    def unfinished(self) -> list[str]:
        return self._store.unfinished(self._name)

    def clear(self) -> None:
        for key in self._keys():
            self._store.delete(self._name, key)


def kill_and_resume(
    jobs: Sequence[Job],
    folder: Path,
    *,
    kills: int,
    each: int,
    seed: int = 0,
    stores: Sequence[ObjectStore] = (),
    shards: int = 1,
) -> Kills:
    """Run a batch undisturbed, then kill and resume it, and compare the bytes of all outputs.

    The jobs are in another order in each run, so that kills fall into all of them. Every tenth kill comes while the run plans, the others
    after its first change of an output: how long it takes to plan depends on what else the machine does. A round ends after `each` kills
    with a run to the end.

    Args:
        stores: places of the jobs, beside the disk.
        shards: a run that is killed has one of so many parts of the jobs.

    Raises:
        AssertionError: an output is another one, or something unfinished stays.
    """
    draw, jobs = random.Random(seed), list(jobs)
    file, out = folder / "jobs.yaml", folder / "out"
    command = ("batch", "jobs.yaml", "--resume", "--jobs", "2")
    buckets = [Bucket(store, jobs, folder) for store in stores]
    places: list[Callable[[Job], Job]] = [lambda job: job, *(bucket.placed for bucket in buckets)]
    turns = range(len(places))
    placed = [[places[(k + turn) % len(places)](job) for k, job in enumerate(jobs)] for turn in turns]

    def writes() -> tuple[set[str], int]:
        return {path.name for path in out.glob("*")}, sum(bucket.writes() for bucket in buckets)

    def run(seconds: float | None, *, early: bool = False) -> bool:
        now, before = placed[rounds % len(placed)], writes()
        file.write_text(json.dumps({"jobs": draw.sample(now, len(now))}))
        began = None if early or seconds is None else lambda: writes() != before
        return kill_after((*command, *(shard if seconds is not None else ())), folder, seconds, began)

    def names() -> set[str]:
        here = {path.name for path in out.glob("*") if not path.name.startswith(".")}
        return here.union(*(bucket.names() for bucket in buckets))

    rounds, moved, shard = 0, list[int](), ("--shard", f"1/{shards}")
    file.write_text(json.dumps({"jobs": placed[0]}))
    started = time.monotonic()
    assert kill_after(("batch", "jobs.yaml", "--dry-run", *shard), folder, None)
    planned = time.monotonic() - started
    file.write_text(json.dumps({"jobs": jobs}))
    assert kill_after(command, folder, None)
    whole = time.monotonic() - started - planned
    expected = {path.name: content(path) for path in out.iterdir()}
    assert len(expected) == len(jobs)
    killed, before_the_first_byte, complete = 0, 0, []
    while killed < kills:
        shutil.rmtree(out)
        for bucket in buckets:
            bucket.clear()
        for _ in range(min(each, kills - killed)):
            early = draw.random() < 0.1
            if not run(draw.uniform(0, planned if early else 2 * whole / each), early=early):
                killed, before_the_first_byte = killed + 1, before_the_first_byte + early
                complete.append(len(names()))
        assert run(None)
        found = {path.name: content(path) for path in out.iterdir()}
        in_bucket = [item for bucket in buckets for item in bucket.outputs().items()]
        assert sorted([*found, *(name for name, _ in in_bucket)]) == sorted(expected), "missing, twice, or unfinished"
        assert len(in_bucket) == sum("://" in job["out"] for job in placed[rounds % len(placed)])
        assert found | dict(in_bucket) == expected, "other bytes, or something unfinished"
        assert not any(bucket.unfinished() for bucket in buckets), "an upload stays"
        rounds, moved = rounds + 1, [*moved, len(in_bucket)]
    return Kills(len(jobs), killed, before_the_first_byte, rounds, tuple(moved), round(whole, 1), tuple(complete))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--each", type=int, default=20, help="kills of a round")
    parser.add_argument(
        "--shards", type=int, default=4, help="parts of the jobs, of which a run that is killed has one"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    jobs = [*golden_jobs().values(), *format_jobs(options.folder).values()]
    with serve() as s3, credentials(s3), serve_google() as gs, emulator(gs):
        done = kill_and_resume(
            jobs, options.folder, kills=options.kills, each=options.each, stores=(s3, gs), shards=options.shards
        )
    text = json.dumps(vars(done), indent=1)
    sys.stdout.write(f"{text}\n")
    if options.json:
        options.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
