"""An output in an object store: the bytes of a local one, and nothing that looks complete before it is."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse

import convert
from convert.core.errors import ConvertError
from convert.core.system.process import PROGRESS_FD
from convert.stores import located, upload
from convert.writing.execute import Result, execute
from support import writers
from support.command_line import Run
from support.object_store import KEY_ID, SECRET, TOKEN, Fault, ObjectStore
from support.paths import EXAMPLES
from support.small_conversion import write_checkpoint, write_rules
from support.store_contract import a_part, any_write, completing, local_files, stored, the_last

TIMESFM = EXAMPLES / "checkpoints" / "timesfm-2.5"


@pytest.mark.parametrize(
    ("out", "shards"),
    [("out.safetensors", None), pytest.param("out", None, marks=pytest.mark.slow), ("out", 200_000)],
    ids=["file", "directory", "shards"],
)
def test_the_objects_are_the_files_of_a_local_conversion(
    out: str, shards: int | None, s3: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    convert.convert("timesfm", TIMESFM, tmp_path / out, max_shard_bytes=shards)
    result = convert.convert("timesfm", TIMESFM, f"s3://{bucket}/models/{out}", max_shard_bytes=shards)
    assert str(result.out) == f"s3://{bucket}/models/{out}"
    assert stored(s3, bucket, f"models/{out}") == local_files(tmp_path / out)
    assert s3.unfinished(bucket) == []


def large(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of 4 MB, and rules for it."""
    rng = np.random.default_rng(0)
    arrays = {f"layer_{n}/w": rng.random((1 << 8, 1 << 9), np.float32) for n in range(8)}
    path = writers.safetensors(tmp_path / "large.safetensors", arrays)
    rules = write_rules(tmp_path)
    return rules, path


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Parts of 256 KiB, at most two on their way."""
    monkeypatch.setattr(upload, "PART", 1 << 18)
    monkeypatch.setattr(upload, "_THREADS", 1)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    return upload.PART


@pytest.mark.slow
def test_parts_are_sent_before_the_end_and_their_space_is_given_back(
    s3: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_parts: int
) -> None:
    """The machine holds what is being filled or on its way, not the file; the part with the header is the last."""
    rules, path = large(tmp_path)
    convert.convert(str(rules), path, tmp_path / "out.safetensors")
    size = (tmp_path / "out.safetensors").stat().st_size
    made: list[int] = []
    scratch = upload.scratch
    monkeypatch.setattr(
        "convert.writing.destination.store.scratch", lambda size: made.append(fd := scratch(size)) or fd
    )
    used, sent = [], []
    for event in execute(convert.plan_conversion(str(rules), path), f"s3://{bucket}/out.safetensors", jobs=1):
        if not isinstance(event, Result):
            used.append(os.fstat(made[0]).st_blocks * 512)
            sent.append(sum(method == "PUT" for method, _, _ in s3.requests))
    puts = [query for method, _, query in s3.requests if method == "PUT"]
    assert len(puts) == -(-size // small_parts) and "partNumber=1" in puts[-1].split("&")
    assert sent[-1] > len(puts) / 2
    assert max(used) < size / 2
    assert stored(s3, bucket, "out.safetensors")[""] == (tmp_path / "out.safetensors").read_bytes()


def test_a_part_is_sent_without_a_copy_in_memory(s3: ObjectStore, bucket: str) -> None:
    """boto3 signs it, sums it up and sends it; here the request is answered when its bytes have been read."""
    path, part = located(f"s3://{bucket}/out"), memoryview(np.arange(1 << 23, dtype=np.int64)).cast("B")
    uploads, sent = upload.Uploads(path), hashlib.sha256()

    def answered(request: AWSPreparedRequest, **_: object) -> AWSResponse:
        while block := request.body.read(1 << 14):
            sent.update(block)
        return AWSResponse(request.url, 200, {"ETag": '"of the part"'}, SimpleNamespace(stream=lambda: [b""]))

    uploads.start(path)
    uploads._client.meta.events.register("before-send.s3.UploadPart", answered)
    tracemalloc.start()
    assert uploads.send(path, 1, part, lambda etag: None).result() == '"of the part"'
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < len(part) / 4 and sent.digest() == hashlib.sha256(part).digest()
    assert len(upload._Body(part).read(1 << 20)) == 1 << 17  # boto3 asks for so much, in each thread
    assert uploads.abort() == []


@pytest.fixture
def small(tmp_path: Path) -> tuple[str, Path]:
    return str(write_rules(tmp_path)), write_checkpoint(tmp_path / "small.npz")


def refused(rules: str, path: Path, url: str, **options: object) -> str:
    with pytest.raises(ConvertError) as caught:
        convert.convert(rules, path, url, **options)  # type: ignore[arg-type]
    assert not any(secret in str(caught.value) for secret in (SECRET, TOKEN, KEY_ID))
    return str(caught.value)


def test_an_existing_output_stays_unless_it_is_overwritten(
    s3: ObjectStore, bucket: str, small: tuple[str, Path]
) -> None:
    s3.client.put_object(Bucket=bucket, Key="out.safetensors", Body=b"old")
    s3.client.put_object(Bucket=bucket, Key="out/model.safetensors", Body=b"old")
    s3.client.put_object(Bucket=bucket, Key="out/notes.txt", Body=b"mine")
    for out in ("out.safetensors", "out"):
        assert "exists and is kept" in refused(*small, f"s3://{bucket}/{out}")
        assert stored(s3, bucket, "out.safetensors")[""] == b"old"
    convert.convert(*small, f"s3://{bucket}/out.safetensors", overwrite=True)
    convert.convert(*small, f"s3://{bucket}/out", overwrite=True, max_shard_bytes=40)
    assert stored(s3, bucket, "out.safetensors")[""] != b"old"
    names = stored(s3, bucket, "out/")
    assert names["notes.txt"] == b"mine" and "model.safetensors" not in names and "model.safetensors.index.json" in names  # fmt: skip


def test_an_output_that_appears_meanwhile_is_kept(s3: ObjectStore, bucket: str, small: tuple[str, Path]) -> None:
    with pytest.raises(ConvertError, match="another program created it"):
        for _ in execute(convert.plan_conversion(*small), f"s3://{bucket}/out.safetensors"):
            s3.client.put_object(Bucket=bucket, Key="out.safetensors", Body=b"other")
    assert stored(s3, bucket, "out.safetensors")[""] == b"other" and s3.unfinished(bucket) == []


@pytest.mark.slow
def test_a_job_whose_batch_has_ended_sends_nothing(s3: ObjectStore, bucket: str, small: tuple[str, Path]) -> None:
    """Its upload would stay, as the next run of the batch may have looked for uploads before."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "convert", small[0], str(small[1]), f"s3://{bucket}/out.safetensors"],
        pass_fds=(writing,),
        env={**os.environ, PROGRESS_FD: str(writing)},
        capture_output=True,
    )
    os.close(writing)
    assert done.returncode == 2 and b"error[interrupted]" in done.stderr
    assert not any(method in ("PUT", "POST") for method, _, _ in s3.requests)


@pytest.mark.parametrize(
    ("out", "where"),
    [
        *((out, where) for out in ("out.safetensors", "out") for where in (any_write, a_part, completing)),
        ("out", the_last),
    ],
)
@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        pytest.param(503, "SlowDown", "did not answer", marks=pytest.mark.slow),
        pytest.param(500, "InternalError", "did not answer", marks=pytest.mark.slow),
        pytest.param(-1, "", "did not answer", marks=pytest.mark.slow),
        (403, "AccessDenied", "refused the credentials (403, AccessDenied)"),
        pytest.param(400, "ExpiredToken", "have expired", marks=pytest.mark.slow),
    ],
)
def test_after_an_error_nothing_is_left(
    out: str, where: Callable[[str, str, str], bool], status: int, code: str, expected: str,
    s3: ObjectStore, bucket: str, small: tuple[str, Path],
) -> None:  # fmt: skip
    with s3.failing(Fault(where, status, code)):
        assert expected in refused(*small, f"s3://{bucket}/{out}", max_shard_bytes=40 if out == "out" else None)
    assert s3.keys(bucket) == [] and s3.unfinished(bucket) == []


@pytest.mark.slow
@pytest.mark.parametrize("status", [503, 500, 0, -1])
def test_a_write_that_fails_is_repeated(status: int, s3: ObjectStore, bucket: str, small: tuple[str, Path], tmp_path: Path) -> None:  # fmt: skip
    convert.convert(*small, tmp_path / "out", max_shard_bytes=40)
    with s3.failing(Fault(any_write, status, "SlowDown", times=2)):
        convert.convert(*small, f"s3://{bucket}/out", max_shard_bytes=40)
    assert stored(s3, bucket, "out/") == local_files(tmp_path / "out") and s3.unfinished(bucket) == []


@pytest.mark.slow
@pytest.mark.parametrize("out", ["out.safetensors", "out"])
@pytest.mark.parametrize("where", [any_write, completing])
def test_lost_answers_leave_the_whole_output_or_nothing(
    out: str,
    where: Callable[[str, str, str], bool],
    s3: ObjectStore,
    bucket: str,
    small: tuple[str, Path],
    tmp_path: Path,
) -> None:
    """Every write is carried out, and no answer arrives."""
    shards = 40 if out == "out" else None
    convert.convert(*small, tmp_path / out, max_shard_bytes=shards)
    with s3.failing(Fault(where, 0)):
        try:
            convert.convert(*small, f"s3://{bucket}/{out}", max_shard_bytes=shards)
        except ConvertError:
            assert s3.keys(bucket) == []
        else:
            assert stored(s3, bucket, out) == local_files(tmp_path / out)
    assert s3.unfinished(bucket) == []


@pytest.mark.slow
def test_before_the_index_there_is_no_model(s3: ObjectStore, bucket: str, small: tuple[str, Path]) -> None:
    """The index is the last request; of the older model nothing is left when the first object of the new one appears."""
    convert.convert(*small, f"s3://{bucket}/out", max_shard_bytes=40)
    s3.requests.clear()
    convert.convert(*small, f"s3://{bucket}/out", max_shard_bytes=60, overwrite=True)
    writes = [(method, path) for method, path, query in s3.requests if method in ("PUT", "POST", "DELETE") and "partNumber" not in query and "uploads" not in query]  # fmt: skip
    deleted = max(n for n, (method, _) in enumerate(writes) if method == "DELETE")
    assert all(method == "DELETE" for method, _ in writes[: deleted + 1])
    assert writes[-1] == ("PUT", f"/{bucket}/out/model.safetensors.index.json")


@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing(s3: ObjectStore, bucket: str, small: tuple[str, Path]) -> None:
    events = execute(convert.plan_conversion(*small), f"s3://{bucket}/out", max_shard_bytes=40)
    _ = next(events), next(events), next(events)
    assert s3.unfinished(bucket) != []
    events.close()  # type: ignore[attr-defined]
    assert s3.keys(bucket) == [] and s3.unfinished(bucket) == []


def test_what_cannot_be_removed_is_named(s3: ObjectStore, bucket: str, small: tuple[str, Path]) -> None:
    after = Fault(lambda method, path, query: "uploadId" in query, 403, "AccessDenied")
    with s3.failing(after):
        text = refused(*small, f"s3://{bucket}/out.safetensors")
    assert "could not be removed from the store" in text and "abort the multipart uploads" in text


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://no-such-bucket/out", "there is no such bucket"),
        ("https://host/out", "is read, not written"),
    ],
)
def test_a_destination_that_cannot_be_written_is_refused_before_anything_is_read(
    url: str, expected: str, s3: ObjectStore, small: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convert.writing.execute.stream_leaves", lambda *_, **__: pytest.fail("a leaf was read"))
    assert expected in refused(*small, url)


def test_other_outputs_are_not_written_to_a_url(
    s3: ObjectStore, bucket: str, small: tuple[str, Path], run: Run, tmp_path: Path
) -> None:
    convert.convert(*small, tmp_path / "out.safetensors")
    for arguments in (("run", small[0], tmp_path / "out.safetensors", f"s3://{bucket}/back.npz", "--to", "npz"),):
        _, err = run(*arguments, code=2)
        assert "this is not written to a URL" in err
    assert s3.keys(bucket) == []


def test_dry_run_and_summary(s3: ObjectStore, bucket: str, small: tuple[str, Path], run: Run) -> None:
    url = f"s3://{bucket}/out.safetensors"
    run(*small, url, "--dry-run")
    assert s3.keys(bucket) == []
    _, err = run(*small, url)
    assert f"wrote {url}:" in err
    _, err = run(*small, url, "--dry-run", code=2)
    assert "exists and is kept" in err


def test_from_bucket_to_bucket(s3: ObjectStore, bucket: str, tmp_path: Path, run: Run) -> None:
    source = s3.put(bucket, "in", TIMESFM)
    convert.convert("timesfm", TIMESFM, tmp_path / "out.safetensors")
    run("timesfm", source, f"s3://{bucket}/out.safetensors")
    assert stored(s3, bucket, "out.safetensors")[""] == (tmp_path / "out.safetensors").read_bytes()
    _, err = run("timesfm", source, f"s3://{bucket}/in/out.safetensors", code=2)
    assert "lies inside the checkpoint" in err


@pytest.mark.parametrize("out", ["out", pytest.param("out.safetensors", marks=pytest.mark.slow)])
def test_an_output_in_a_bucket_is_verified_and_a_flipped_bit_is_named(
    out: str, s3: ObjectStore, bucket: str, small: tuple[str, Path], run: Run
) -> None:
    url = f"s3://{bucket}/{out}"
    convert.convert(*small, url, max_shard_bytes=100 if out == "out" else None)
    text, _ = run("verify", url)
    assert text.startswith(f"{url}: 5 tensors") and "intact" in text
    key = next(key for key in s3.keys(bucket) if key.endswith(".safetensors"))
    content = bytearray(s3.get(bucket, key))
    content[-1] ^= 1
    s3.client.put_object(Bucket=bucket, Key=key, Body=bytes(content))
    text, _ = run("verify", url, code=1)
    assert "the bytes of layers." in text
    with s3.failing(Fault(lambda method, path, query: True, 403, "AccessDenied")):
        _, err = run("verify", url, code=2)
    assert "refused the credentials" in err and SECRET not in err
