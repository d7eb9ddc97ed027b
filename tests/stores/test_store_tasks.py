"""A conversion in tasks from bucket to bucket: each task reads and writes the store itself, here as another process would."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import convert
from convert.cluster import tasks as module
from convert.cluster.execute import Runner, execute_tasks
from convert.cluster.tasks import Done, Request, Task, run_task
from convert.core.errors import ConvertError
from convert.planning.options import ConversionOptions
from convert.stores import client, unfinished, upload
from convert.writing.execute import Result
from support import writers
from support.object_store import KEY_ID, SECRET, TOKEN, ObjectStore
from support.small_conversion import write_rules
from support.store_contract import local_files, stored

pytestmark = pytest.mark.slow

SHARD = 1_600_000  # three of eight tensors, in several parts


@pytest.fixture
def source(s3: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a checkpoint, of which ``here`` is the conversion to a disk; parts have 256 KiB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(upload, "PART", 1 << 18)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr(unfinished, "EVERY", 0)
    write_rules(tmp_path)
    values = np.random.default_rng(0).random((8, 1 << 8, 1 << 9), np.float32)
    path = writers.safetensors(tmp_path / "source.safetensors", {f"layer_{k}/w": values[k] for k in range(8)})
    convert.convert("./small.yaml", path, "here", max_shard_bytes=SHARD)
    return s3.put(bucket, "in/source.safetensors", path)


def run_each(request: Request, tasks: Sequence[Task]) -> Iterator[Done]:
    """Run the tasks in another order, each with what a process would receive, which holds no credential."""
    for task in reversed(tasks):
        module._prepared.clear()
        given = pickle.dumps((request, task))
        assert not any(secret.encode() in given for secret in (SECRET, TOKEN, KEY_ID))
        yield pickle.loads(pickle.dumps(run_task(*pickle.loads(given))))


def in_tasks(source: str, out: str, run: Runner = run_each, resume: bool = False) -> Result:
    plan, options = convert.plan_conversion("./small.yaml", source), ConversionOptions()
    *_, result = execute_tasks(plan, "./small.yaml", source, options, out, run, threads=1, max_shard_bytes=SHARD, resume=resume)  # fmt: skip
    assert isinstance(result, Result)
    return result


def assert_whole(s3: ObjectStore, bucket: str) -> None:
    assert stored(s3, bucket, "models/") == {f"out/{name}": data for name, data in local_files(Path("here")).items()}
    assert s3.unfinished(bucket) == []


def test_the_objects_are_the_files_of_the_local_engine(s3: ObjectStore, bucket: str, source: str) -> None:
    in_tasks(source, f"s3://{bucket}/models/out")
    assert_whole(s3, bucket)


def test_a_task_that_runs_twice_writes_the_same(s3: ObjectStore, bucket: str, source: str) -> None:
    def twice(request: Request, tasks: Sequence[Task]) -> Iterator[Done]:
        list(run_each(request, tasks))
        yield from run_each(request, tasks)

    in_tasks(source, f"s3://{bucket}/models/out", twice)
    assert_whole(s3, bucket)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_is_lost(resume: bool, s3: ObjectStore, bucket: str, source: str) -> None:
    """Nothing stays; with `--resume`, only the other tasks run."""
    out, ran = f"s3://{bucket}/models/out", []

    def counted(request: Request, tasks: Sequence[Task]) -> Iterator[Done]:
        ran.extend(task.file for task in tasks)
        return run_each(request, tasks)

    def lost(request: Request, tasks: Sequence[Task]) -> Iterator[Done]:
        yield from run_each(request, tasks[:1])
        raise RuntimeError

    with pytest.raises(RuntimeError):
        in_tasks(source, out, lost, resume=resume)
    assert bool(s3.unfinished(bucket)) == resume and not [key for key in s3.keys(bucket) if "/out/" in key]
    assert resume or not stored(s3, bucket, "models/")
    assert in_tasks(source, out, counted, resume=resume).restored == (3 if resume else 0)
    assert len(ran) == (2 if resume else 3)
    assert_whole(s3, bucket)


@pytest.mark.parametrize("kind", ["part", "head"])
def test_what_a_task_does_not_send_is_noticed(kind: str, s3: ObjectStore, bucket: str, source: str) -> None:
    def without(request: Request, tasks: Sequence[Task]) -> Iterator[Done]:
        for done in run_each(request, tasks):
            left = next(note for note in done.notes if note[0] == kind)
            yield replace(done, notes=tuple(note for note in done.notes if note is not left))

    with pytest.raises(ConvertError, match="was not sent as a whole"):
        in_tasks(source, f"s3://{bucket}/models/out", without)
    assert stored(s3, bucket, "models/") == {} and s3.unfinished(bucket) == []


def test_a_worker_that_does_not_reach_the_store(
    s3: ObjectStore, bucket: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker uses those of its own environment; its error has no secret, and nothing stays."""

    def elsewhere(request: Request, tasks: Sequence[Task]) -> Iterator[Done]:
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
            client.bucket.cache_clear()
            done = list(run_each(request, tasks))
        client.bucket.cache_clear()
        yield from done

    with pytest.raises(ConvertError) as caught:
        in_tasks(source, f"s3://{bucket}/models/out", elsewhere)
    assert "did not answer" in str(caught.value) and SECRET not in str(caught.value)
    assert stored(s3, bucket, "models/") == {} and s3.unfinished(bucket) == []


def test_a_credential_in_the_arguments_of_a_task_is_found(s3: ObjectStore, bucket: str, source: str) -> None:
    with pytest.raises(AssertionError):
        in_tasks(source, f"s3://{bucket}/models/out", lambda request, tasks: run_each(replace(request, model=SECRET), tasks))  # fmt: skip
    assert s3.unfinished(bucket) == []
