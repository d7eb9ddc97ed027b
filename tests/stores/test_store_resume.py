"""A run into a store that was interrupted or killed is continued: what is there is verified and kept, and the bytes are those of an undisturbed run."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import convert
from convert.core.errors import ConvertError
from convert.stores import unfinished, upload
from convert.writing.destination import store as destination
from convert.writing.execute import Result, execute
from support import writers
from support.command_line import Run
from support.kills import CONVERT, content, kill_after
from support.object_store import Fault, ObjectStore
from support.small_conversion import write_rules
from support.store_contract import completing, local_files, stored, the_last

pytestmark = pytest.mark.slow

LAYERS, SHARD = 8, 1_600_000  # 512 KB each, three of them in a file, which has several parts


@pytest.fixture
def url(s3: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An output in parts of 256 KiB, of a checkpoint that is there, and its conversion to a disk; every line of a journal is written at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(upload, "PART", 1 << 18)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr(unfinished, "EVERY", 0)
    monkeypatch.setattr("convert.writing.transfer.BATCH", 1)  # a thread takes one leaf at a time
    write_rules(tmp_path)
    source(0)
    convert.convert("./small.yaml", "source.safetensors", "here", max_shard_bytes=SHARD)
    return f"s3://{bucket}/models/out"


def source(seed: int) -> None:
    values = np.random.default_rng(seed).random((LAYERS, 1 << 8, 1 << 9), np.float32)
    writers.safetensors(Path("source.safetensors"), {f"layer_{k}/w": values[k] for k in range(LAYERS)})


def events(url: str, **options: object) -> Iterator[object]:
    plan = convert.plan_conversion("./small.yaml", "source.safetensors", **options)  # type: ignore[arg-type]
    return execute(plan, url, max_shard_bytes=SHARD if url.endswith("out") else None, jobs=1, resume=True)


def interrupt(url: str, leaves: int) -> None:
    running = events(url)
    for _ in range(leaves + 1):
        next(running)
    running.close()  # type: ignore[attr-defined]


def finish(url: str) -> Result:
    *_, result = events(url)
    assert isinstance(result, Result)
    return result


def assert_whole(s3: ObjectStore, bucket: str) -> None:
    """The bytes of an undisturbed run, and nothing else."""
    assert stored(s3, bucket, "") == {f"models/out/{name}": data for name, data in content(Path("here")).items()}
    assert s3.unfinished(bucket) == []


def parts_sent(s3: ObjectStore) -> int:
    return sum("partNumber" in query for method, _, query in s3.requests if method == "PUT")


def test_what_is_there_is_neither_read_nor_sent_again(s3: ObjectStore, bucket: str, url: str) -> None:
    interrupt(url, 5)
    first = parts_sent(s3)
    assert s3.keys(bucket) and all(key.startswith("models/.out.unfinished/") for key in s3.keys(bucket))
    s3.requests.clear()
    read: list[str] = []
    for event in events(url):
        read += [event.leaf] if not isinstance(event, Result) and event.leaf else []  # type: ignore[attr-defined]
    assert first > 4 and len(read) <= LAYERS - 4
    whole = sum(-(-len(data) // upload.PART) for name, data in content(Path("here")).items() if name.endswith("s"))
    assert parts_sent(s3) <= whole - first + 6
    assert_whole(s3, bucket)


def test_a_run_that_is_interrupted_again_and_again(s3: ObjectStore, bucket: str, url: str) -> None:
    for leaves in (1, 2, 0, 3):
        interrupt(url, leaves)
    assert finish(url).restored >= 4
    assert_whole(s3, bucket)


def first_upload(s3: ObjectStore, bucket: str) -> dict[str, str]:
    found = s3.client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    return {key: min(found, key=lambda each: each["Key"])[key] for key in ("Key", "UploadId")}


def abort(s3: ObjectStore, bucket: str) -> None:
    s3.client.abort_multipart_upload(Bucket=bucket, **first_upload(s3, bucket))


def replace_part(s3: ObjectStore, bucket: str) -> None:
    s3.client.upload_part(Bucket=bucket, **first_upload(s3, bucket), PartNumber=3, Body=bytes(1 << 18))


def shorten_part(s3: ObjectStore, bucket: str) -> None:
    s3.client.upload_part(Bucket=bucket, **first_upload(s3, bucket), PartNumber=3, Body=b"short")


def beside(name: str, change: Callable[[bytes], bytes | None]) -> Callable[[ObjectStore, str], None]:
    """Change the first of the objects beside the output whose name ends or begins so; None removes it."""

    def apply(s3: ObjectStore, bucket: str) -> None:
        key = next(key for key in s3.keys(bucket) if name in key)
        if (changed := change(s3.get(bucket, key))) is None:
            s3.client.delete_object(Bucket=bucket, Key=key)
        else:
            s3.put_bytes(bucket, key, changed)

    return apply


@pytest.mark.parametrize(
    "change",
    [
        abort,
        replace_part,
        shorten_part,
        beside(".head", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        beside(".head", lambda data: None),
        beside("lines-000001", lambda data: None),
        beside("lines-000004", lambda data: data[:9]),
    ],
    ids=["no upload", "other bytes", "a shorter part", "a flipped bit", "no head", "no first line", "a line cut off"],
)
def test_what_was_damaged_meanwhile_is_written_again(
    change: Callable[[ObjectStore, str], None], s3: ObjectStore, bucket: str, url: str
) -> None:
    interrupt(url, 6)
    change(s3, bucket)
    assert finish(url).restored < LAYERS
    assert_whole(s3, bucket)


def test_without_the_comparison_damage_is_kept(
    s3: ObjectStore, bucket: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above finds a program that does not compare the ETags."""
    interrupt(url, 6)
    replace_part(s3, bucket)
    known, every = destination.known_files, dict.fromkeys(range(1, 100), mock.ANY)
    monkeypatch.setattr(destination, "known_files", lambda notes: {f: replace(k, parts=every) for f, k in known(notes).items()})  # fmt: skip
    finish(url)
    with pytest.raises(AssertionError):
        assert_whole(s3, bucket)


def test_another_conversion_is_refused_and_nothing_is_changed(s3: ObjectStore, bucket: str, url: str) -> None:
    interrupt(url, 4)
    before = stored(s3, bucket, "")

    def refused(**options: object) -> str:
        with pytest.raises(ConvertError) as caught:
            list(events(url, **options))
        assert stored(s3, bucket, "") == before and len(s3.unfinished(bucket)) == 3
        return str(caught.value)

    assert "another --dtype" in refused(dtype="bfloat16")
    rules = Path("small.yaml").read_text()
    Path("small.yaml").write_text(f"{rules}# other rules\n")
    assert "other rules" in refused()
    Path("small.yaml").write_text(rules)
    source(1)
    assert "the checkpoint has changed since" in refused()
    source(0)  # at another time
    assert "the checkpoint has changed since" in refused()
    convert.convert(
        "./small.yaml", "source.safetensors", url, max_shard_bytes=SHARD
    )  # without --resume, from the start
    assert_whole(s3, bucket)


def test_a_checkpoint_that_gives_other_values_and_looks_the_same_is_noticed(
    s3: ObjectStore, bucket: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the last tensor shares a part with the next one, and was not sent; its beginning was."""
    monkeypatch.setattr("convert.writing.conversion_identity.source_stamp", lambda *paths: "the same")
    url += ".safetensors"
    interrupt(url, 3)
    source(1)
    with pytest.raises(ConvertError, match="the checkpoint has changed since"):
        finish(url)
    assert not [key for key in s3.keys(bucket) if key.endswith("out.safetensors")]


def killed_when(url: str, s3: ObjectStore, fault: Fault) -> None:
    with s3.failing(fault), pytest.raises(ConvertError):
        finish(url)


def second_completion() -> Fault:
    seen = iter(range(99))
    return Fault(lambda *request: completing(*request) and next(seen) > 0, 403, "AccessDenied")


@pytest.mark.parametrize("change", [None, "object"])
def test_objects_that_have_appeared_are_kept_if_they_are_the_same(
    change: str | None, s3: ObjectStore, bucket: str, url: str
) -> None:
    killed_when(url, s3, second_completion())
    assert [key for key in s3.keys(bucket) if key.endswith("safetensors")] == ["models/out/model-00001-of-00003.safetensors"]  # fmt: skip
    if change:
        s3.put_bytes(bucket, "models/out/model-00001-of-00003.safetensors", b"other")
    s3.requests.clear()
    assert finish(url).restored == LAYERS - (3 if change else 0)
    begun = [path for method, path, query in s3.requests if method == "POST" and query == "uploads"]
    assert len(begun) == bool(change)
    assert_whole(s3, bucket)


def test_with_the_old_model_overwritten(s3: ObjectStore, bucket: str, url: str, run: Run) -> None:
    source(1)
    convert.convert("./small.yaml", "source.safetensors", url, max_shard_bytes=SHARD)
    source(0)
    plan = convert.plan_conversion("./small.yaml", "source.safetensors")
    with s3.failing(second_completion()), pytest.raises(ConvertError):
        list(execute(plan, url, max_shard_bytes=SHARD, resume=True, overwrite=True))
    assert not [key for key in s3.keys(bucket) if key.endswith("index.json")]
    s3.requests.clear()
    list(execute(plan, url, max_shard_bytes=SHARD, resume=True, overwrite=True))
    assert not [path for method, path, query in s3.requests if method == "POST" and query == "uploads"]
    assert_whole(s3, bucket)


def test_before_the_index_there_is_no_model_and_all_is_kept(s3: ObjectStore, bucket: str, url: str, run: Run) -> None:
    killed_when(url, s3, Fault(the_last, 403, "AccessDenied"))
    assert "model.safetensors.index.json" in run("verify", url, code=1)[0]
    _, err = run("diff", url, "here", code=2)
    assert "error[output-incomplete]" in err and "no index" in err
    assert finish(url).restored == LAYERS
    assert_whole(s3, bucket)


def test_a_journal_that_outlives_its_output_goes(
    s3: ObjectStore, bucket: str, url: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was killed after its last object."""
    with monkeypatch.context() as patch:
        patch.setattr(unfinished.Unfinished, "remove", lambda self: None)
        finish(url)
    assert any("unfinished" in key for key in s3.keys(bucket))
    assert "kept" in run("./small.yaml", "source.safetensors", url, "--max-shard-size", SHARD, "--resume")[1]
    assert_whole(s3, bucket)


@pytest.mark.parametrize("out", ["out.safetensors", "out"])
def test_a_single_file(out: str, s3: ObjectStore, bucket: str, url: str) -> None:
    plan = convert.plan_conversion("./small.yaml", "source.safetensors")
    url = f"s3://{bucket}/{out}"
    running = execute(plan, url, jobs=1, resume=True)
    for _ in range(5):
        next(running)
    running.close()  # type: ignore[attr-defined]
    *_, result = execute(plan, url, resume=True)
    Path("local").mkdir()
    convert.convert("./small.yaml", "source.safetensors", f"local/{out}")
    assert isinstance(result, Result) and result.restored >= 3
    assert stored(s3, bucket, out) == local_files(Path("local") / out)
    assert s3.unfinished(bucket) == [] and not [key for key in s3.keys(bucket) if "unfinished" in key]


def test_runs_that_are_killed(s3: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of processes, with parts of 8 MiB; nothing that looks complete is there before a run has ended."""
    monkeypatch.chdir(tmp_path)
    write_rules(tmp_path)
    values = np.random.default_rng(0).random((1024, 2048), np.float32)
    np.savez("source.npz", **{f"layer_{k}/w": values + np.float32(k) for k in range(24)})
    shards = ("--max-shard-size", str(6 * values.nbytes))
    convert.convert("./small.yaml", "source.npz", "here", max_shard_bytes=6 * values.nbytes)
    expected, draw, restored, kills = content(Path("here")), random.Random(0), 0, 0
    program = "import sys; from convert.stores import unfinished; unfinished.EVERY = 0.05; from convert.cli import program; program()"
    monkeypatch.setattr("support.kills.CONVERT", (CONVERT[0], "-c", program))

    def sent() -> int:
        return sum("partNumber" in query for _, _, query in s3.requests)

    def four_parts_later() -> Callable[[], bool]:
        """Return what says when the next run is killed, however long it takes to plan."""
        enough = sent() + 4
        return lambda: sent() >= enough

    for k in range(2):
        command = ("./small.yaml", "source.npz", f"s3://{bucket}/out-{k}", "--resume", *shards)
        while not kill_after(command, tmp_path, draw.random(), four_parts_later()):
            kills += 1
            names = stored(s3, bucket, f"out-{k}/")
            assert "model.safetensors.index.json" not in names or names == expected
            if kills % 3 == 0:
                done = subprocess.run([*CONVERT, *command, "--json"], capture_output=True, check=True)
                restored += json.loads(done.stdout)["restored"]
                break
        assert stored(s3, bucket, f"out-{k}/") == expected
    assert kills and restored and s3.unfinished(bucket) == []
    assert not [key for key in s3.keys(bucket) if "unfinished" in key]
    shutil.rmtree("here")
