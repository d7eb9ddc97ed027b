"""Batches that are killed at random points and resumed until they are complete, and compared with an undisturbed run.

    PYTHONPATH=src:tests python -m support.kills FOLDER --kills 100 --json benchmarks/results/kills.json

runs the batch of all goldens and formats; the tests run a part of it.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from support import writers
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
MAXTEXT = {"llama3": "maxtext-llama3", "llama3.1": "maxtext-llama3.1", "mistral": "maxtext-mistral"}
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
            f"maxtext/{path.name}": (MAXTEXT.get(path.name.partition("-")[0], "maxtext"), f"maxtext/{path.name}/ckpt", {})
            for path in sorted((GOLDEN / "maxtext").iterdir())
            if not path.name.startswith("gemma")
        },
        **{f"maxtext/{name}": ("maxtext", f"maxtext/{name}/ckpt", {"set": {"vocab_size": 40}}) for name in ("gemma2", "gemma2-unscanned", "gemma3", "gemma3-unscanned")},
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


def kill_after(command: Sequence[str], folder: Path, seconds: float | None) -> bool:
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


@dataclass(frozen=True)
class Kills:
    """What `kill_and_resume` did: jobs and kills, undisturbed seconds, and how many of the runs that followed a kill kept something."""

    jobs: int
    kills: int
    rounds: int
    whole_seconds: float
    outputs_complete_at_kills: tuple[int, ...]


def kill_and_resume(jobs: Sequence[Job], folder: Path, *, kills: int, each: int, seed: int = 0) -> Kills:
    """Run a batch undisturbed, then kill and resume it, and compare the bytes of all outputs.

    The jobs are in another order in each run, so that kills fall into all of them. A round ends after `each` kills with a run to the end.

    Raises:
        AssertionError: an output is another one, or something unfinished stays.
    """
    draw, jobs = random.Random(seed), list(jobs)
    file, out = folder / "jobs.yaml", folder / "out"
    command = ("batch", "jobs.yaml", "--resume", "--jobs", "2")

    def run(seconds: float | None) -> bool:
        file.write_text(json.dumps({"jobs": draw.sample(jobs, len(jobs))}))
        return kill_after(command, folder, seconds)

    file.write_text(json.dumps({"jobs": jobs}))
    started = time.monotonic()
    assert kill_after(("batch", "jobs.yaml", "--dry-run"), folder, None)
    planned = time.monotonic() - started
    assert run(None)
    whole = time.monotonic() - started - planned
    expected = {path.name: content(path) for path in out.iterdir()}
    assert len(expected) == len(jobs)
    killed, rounds, complete = 0, 0, []
    while killed < kills:
        shutil.rmtree(out)
        for _ in range(min(each, kills - killed)):
            if not run(planned + draw.uniform(-0.1 * planned, min(whole, 8 * whole / each))):
                killed += 1
                complete.append(len([p for p in out.glob("*") if not p.name.startswith(".")]))
        assert run(None)
        rounds += 1
        assert {path.name: content(path) for path in out.iterdir()} == expected, "other bytes, or something unfinished"
    return Kills(len(jobs), killed, rounds, round(whole, 1), tuple(complete))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--each", type=int, default=20, help="kills of a round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    jobs = [*golden_jobs().values(), *format_jobs(options.folder).values()]
    done = kill_and_resume(jobs, options.folder, kills=options.kills, each=options.each)
    text = json.dumps(vars(done), indent=1)
    sys.stdout.write(f"{text}\n")
    if options.json:
        options.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
