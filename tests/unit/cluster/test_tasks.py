"""A conversion in tasks, one for each file, gives the bytes of `execute`: here without a cluster, each task as another process would run it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.cluster import tasks as module
from convert.cluster.execute import execute_tasks
from convert.cluster.tasks import Done, Request, Task, cut, run_task
from convert.core.errors import CheckpointError, ConvertError
from convert.planning.options import ConversionOptions
from convert.writing.execute import Result, plan_layout
from convert.writing.transfer import used_leaves
from support.goldens import checkpoint
from support.marks import slow_but
from support.paths import GOLDEN
from support.small_conversion import write_rules

# A leaf for each tensor, two leaves in one tensor, a leaf of which each layer is a tensor, and a tensor without a leaf.
MIXED = """\
model: mixed
title: Mixed
targets: {torch: {loads: "`torch.nn.Module`"}}
rules:
- from: layer_{i}/w
  axes: DF
  parameter: layers.{i}.w
- from: stack
  stacked: {j: 0}
  axes: DF
  parameter: stack.{j}
- einsum: "...D,DF->...F"
  from: pair/{a,b}
  linear: pair
"""
GEMMA = {"context_length": 64, "rope_factor_global": 8.0, "query_pre_attn_scalar": 8, "sliding_window": 8}
CASES: dict[str, tuple[str, Path, dict[str, Any], int]] = {
    "stacked": ("timesfm", checkpoint("timesfm-2.5"), {}, 50_000),
    "paxml": ("timesfm", checkpoint("timesfm-2.0"), {"dtype": "bfloat16"}, 30_000),
    "constants": ("timesfm", checkpoint("timesfm-1.0"), {}, 20_000),
    "chunks": ("gemma", checkpoint("gemma3-stacked"), {"settings": {"vocab_size": 256, **GEMMA}}, 20_000),
    "merged pairs": ("gemma", checkpoint("gemma3-lora"), {"settings": {"vocab_size": 61, **GEMMA}}, 5_000),
    "one file": ("flax-transformers", GOLDEN / "bert" / "ckpt", {}, 1 << 30),
}


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def run_each(request: Request, tasks: Sequence[Task]) -> Iterator[Done]:
    """Run the tasks in another order, each with what a process would receive."""
    for task in reversed(tasks):
        module._prepared.clear()
        yield pickle.loads(pickle.dumps(run_task(*pickle.loads(pickle.dumps((request, task))))))


def in_tasks(
    model: str, source: Path, out: Path, run: Any = run_each, max_shard_bytes: int | None = None, resume: bool = False, **options: Any
) -> Result:  # fmt: skip
    given = ConversionOptions(**options)
    plan = convert.plan_conversion(model, source, given)
    *_, result = execute_tasks(
        plan, model, source, given, out, run, threads=1, max_shard_bytes=max_shard_bytes, resume=resume
    )
    assert isinstance(result, Result)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but([case for case in CASES if case != "chunks"], CASES))
def test_tasks_write_the_bytes_of_the_local_engine(case: str, tmp_path: Path) -> None:
    model, source, options, limit = CASES[case]
    here = convert.convert(model, source, tmp_path / "here", max_shard_bytes=limit, **options)
    there = in_tasks(model, source, tmp_path / "there", max_shard_bytes=limit, **options)
    assert content(tmp_path / "there") == content(tmp_path / "here")
    assert (there.files, there.tensors, there.nbytes, there.source_digest) == (
        here.files, here.tensors, here.nbytes, here.source_digest,
    )  # fmt: skip
    assert (len(here.files) > 4) == (case != "one file")
    single = tmp_path / "one.safetensors"
    in_tasks(model, source, single, **options)
    convert.convert(model, source, tmp_path / "same.safetensors", **options)
    assert single.read_bytes() == (tmp_path / "same.safetensors").read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_every_chunk_is_read_and_those_of_other_files_are_not(case: str) -> None:
    model, source, options, limit = CASES[case]
    plan = convert.plan_conversion(model, source, **options)
    _, layout = plan_layout(plan, Path("out"), limit)
    tasks = cut(plan, layout)
    assert [task.file for task in tasks] == list(layout.files)
    for leaf in used_leaves(plan):
        read = {k for task in tasks for k in task.chunks.get(leaf, ())}
        assert read == set(range(len(plan.source.chunks(leaf)))), leaf
    assert sum(task.nbytes for task in tasks) == plan.nbytes
    stored = sum(plan.source.leaves[leaf].spec.nbytes for leaf in used_leaves(plan))
    assert sum(task.read for task in tasks) == stored or case in ("stacked", "chunks", "merged pairs", "constants")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rules(tmp_path, MIXED)
    random = np.random.default_rng(0)
    arrays = {f"layer_{k}/w": random.random((3, 4), np.float32) for k in range(7)}
    arrays |= {"stack": random.random((3, 3, 4), np.float32), "pair/a": random.random((3, 4), np.float32)}
    np.savez("source.npz", **arrays, **{"pair/b": random.random((3, 4), np.float32)})
    return tmp_path


def small(out: str, **options: Any) -> Result:
    return in_tasks("./small.yaml", Path("source.npz"), Path(out), max_shard_bytes=100, **options)


def test_a_run_that_lost_its_machines_continues(folder: Path) -> None:
    def lost(request: Request, tasks: Sequence[Task]) -> Iterator[Done]:
        yield from (run_task(request, task) for task in tasks[:3])
        raise KeyboardInterrupt

    ran: list[str] = []

    def counted(request: Request, tasks: Sequence[Task]) -> Iterator[Done]:
        ran.extend(task.file for task in tasks)
        return run_each(request, tasks)

    with pytest.raises(KeyboardInterrupt):
        small("out", run=lost, resume=True)
    assert not Path("out").exists()
    done = small("out", run=counted, resume=True)
    convert.convert("./small.yaml", "source.npz", "here", max_shard_bytes=100)
    assert content(Path("out")) == content(Path("here"))
    assert done.restored > 0 and len(ran) == len([name for name in done.files if name.startswith("model-")]) - 3
    assert not list(folder.glob(".*"))
    with pytest.raises(KeyboardInterrupt):  # without --resume, nothing stays
        small("again", run=lost)
    assert not list(folder.glob(".*"))


def test_a_task_that_runs_twice_does_no_harm(folder: Path) -> None:
    def twice(request: Request, tasks: Sequence[Task]) -> Iterator[Done]:
        for task in tasks:
            run_task(request, task)
            yield run_task(request, task)

    small("out", run=twice)
    convert.convert("./small.yaml", "source.npz", "here", max_shard_bytes=100)
    assert content(Path("out")) == content(Path("here"))


def test_a_machine_with_another_plan_or_without_the_output_is_refused(folder: Path) -> None:
    def other(request: Request, tasks: Sequence[Task]) -> Iterator[Done]:
        return run_each(replace(request, identity={**request.identity, "converter": "ckpt-convert 9"}), tasks)

    def elsewhere(request: Request, tasks: Sequence[Task]) -> Iterator[Done]:
        return run_each(replace(request, place=folder / "absent"), tasks)

    for run, code in ((other, "cluster-failed"), (elsewhere, "output-not-writable")):
        with pytest.raises(ConvertError) as caught:
            small("out", run=run)
        assert caught.value.code == code
        assert not Path("out").exists() and not list(folder.glob(".*"))


def test_machines_that_read_other_values_are_noticed(folder: Path) -> None:
    def flipped(request: Request, tasks: Sequence[Task]) -> Iterator[Done]:
        for k, done in enumerate(run_each(request, tasks)):
            yield replace(done, chunks={leaf: dict.fromkeys(found, bytes([k])) for leaf, found in done.chunks.items()})

    with pytest.raises(CheckpointError) as caught:
        small("out", run=flipped)
    assert caught.value.code == "checkpoint-changed" and not Path("out").exists()


def test_a_task_that_did_not_fill_a_tensor_is_noticed(folder: Path) -> None:
    def forgetful(request: Request, tasks: Sequence[Task]) -> Iterator[Done]:
        for done in run_each(request, tasks):
            yield replace(done, tensors=dict(list(done.tensors.items())[1:]))

    with pytest.raises(ConvertError) as caught:
        small("out", run=forgetful)
    assert caught.value.code == "output-incomplete" and not Path("out").exists()


def test_the_memory_of_a_task_grows_with_what_is_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = convert.plan_conversion("timesfm", checkpoint("timesfm-2.5"))
    _, layout = plan_layout(plan, Path("out"), 50_000)
    assert {task.memory for task in cut(plan, layout)} == {module.BASE_MEMORY}
    monkeypatch.setattr(module, "DEFAULT_LIMIT", 1000)
    assert min(task.memory for task in cut(plan, layout)) > module.BASE_MEMORY
