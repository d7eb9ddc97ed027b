"""An output in Google Cloud Storage: the bytes of a local one, and nothing that looks complete before it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import convert
from convert.core.errors import ConvertError
from convert.stores import unfinished, upload
from convert.writing.execute import Event, Result, execute
from support.command_line import Run
from support.google_store import BEARER, GoogleStore
from support.object_store import Fault
from support.paths import EXAMPLES
from support.small_conversion import write_checkpoint, write_rules
from support.store_contract import a_part, any_write, completing, local_files, stored, the_last

pytestmark = pytest.mark.slow

TIMESFM = EXAMPLES / "checkpoints" / "timesfm-2.5"


@pytest.fixture
def small(tmp_path: Path) -> tuple[str, Path]:
    return str(write_rules(tmp_path)), write_checkpoint(tmp_path / "small.npz")


def refused(rules: str, path: Path, url: str, **options: object) -> str:
    with pytest.raises(ConvertError) as caught:
        convert.convert(rules, path, url, **options)  # type: ignore[arg-type]
    assert BEARER not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("out", "shards"), [("out é.safetensors", None), ("out", 200_000)])
def test_the_objects_are_the_files_of_a_local_conversion(
    out: str, shards: int | None, gs: GoogleStore, gs_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:  # fmt: skip
    """In several parts, of which the first, with the header, is the last; read again, and a flipped bit is named."""
    monkeypatch.setattr(upload, "PART", 1 << 17)
    monkeypatch.setattr(upload, "_THREADS", 1)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    convert.convert("timesfm", TIMESFM, tmp_path / out, max_shard_bytes=shards)
    url = f"gs://{gs_bucket}/models/{out}"
    convert.convert("timesfm", TIMESFM, url, max_shard_bytes=shards)
    assert stored(gs, gs_bucket, f"models/{out}") == local_files(tmp_path / out)
    assert gs.unfinished(gs_bucket) == [] and gs.seen == {""}
    parts = [query for method, _, query in gs.requests if "partNumber" in query]
    assert len(parts) >= 5 and "partNumber=1" in parts[-1].split("&")
    assert "intact" in run("verify", url)[0]
    key = next(key for key in gs.keys(gs_bucket) if key.endswith(".safetensors"))
    gs.put_bytes(gs_bucket, key, gs.get(gs_bucket, key)[:-1] + b"!")
    run("verify", url, code=1)


def test_writes_have_the_token_of_the_credentials(
    gs: GoogleStore, gs_bucket: str, small: tuple[str, Path], account: Callable[[str], Path], run: Run
) -> None:
    account(f"{gs.url}/token")
    said = run(*small, f"gs://{gs_bucket}/out")
    assert gs.seen == {f"Bearer {BEARER}"} and "out/model.safetensors" in gs.keys(gs_bucket)
    assert not any(BEARER in text for text in said)


@pytest.mark.parametrize("where", [any_write, a_part, completing, the_last])  # fmt: skip
@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (503, "SlowDown", "did not answer"),
        (403, "AccessDenied", "refused the credentials (403, AccessDenied)"),
    ],
)
def test_after_an_error_nothing_is_left(
    where: Callable[[str, str, str], bool], status: int, code: str, expected: str,
    gs: GoogleStore, gs_bucket: str, small: tuple[str, Path],
) -> None:  # fmt: skip
    with gs.failing(Fault(where, status, code)):
        assert expected in refused(*small, f"gs://{gs_bucket}/out", max_shard_bytes=40)
    assert gs.keys(gs_bucket) == [] and gs.unfinished(gs_bucket) == []


@pytest.mark.parametrize("status", [503, -1])
def test_a_write_that_fails_is_repeated(status: int, gs: GoogleStore, gs_bucket: str, small: tuple[str, Path], tmp_path: Path) -> None:  # fmt: skip
    convert.convert(*small, tmp_path / "out", max_shard_bytes=40)
    with gs.failing(Fault(any_write, status, "SlowDown", times=2)):
        convert.convert(*small, f"gs://{gs_bucket}/out", max_shard_bytes=40)
    assert stored(gs, gs_bucket, "out/") == local_files(tmp_path / "out") and gs.unfinished(gs_bucket) == []


@pytest.mark.parametrize("where", [any_write, completing])
@pytest.mark.parametrize("older", [False, True])
def test_lost_answers_leave_the_whole_output_or_nothing(
    where: Callable[[str, str, str], bool], older: bool, gs: GoogleStore, gs_bucket: str, small: tuple[str, Path], tmp_path: Path
) -> None:  # fmt: skip
    """Every write is carried out, and no answer arrives."""
    convert.convert(*small, tmp_path / "out.safetensors")
    if older:
        gs.put_bytes(gs_bucket, "out.safetensors", b"older")
    with gs.failing(Fault(where, 0)):
        try:
            convert.convert(*small, f"gs://{gs_bucket}/out.safetensors", overwrite=older)
        except ConvertError:
            assert where is any_write and stored(gs, gs_bucket, "out") == ({".safetensors": b"older"} if older else {})
        else:
            assert stored(gs, gs_bucket, "out.safetensors") == local_files(tmp_path / "out.safetensors")
    assert gs.unfinished(gs_bucket) == []


def test_an_interrupted_run_leaves_nothing(gs: GoogleStore, gs_bucket: str, small: tuple[str, Path]) -> None:
    events = execute(convert.plan_conversion(*small), f"gs://{gs_bucket}/out", max_shard_bytes=40)
    _ = next(events), next(events), next(events)
    assert gs.unfinished(gs_bucket) != []
    events.close()  # type: ignore[attr-defined]
    assert gs.keys(gs_bucket) == [] and gs.unfinished(gs_bucket) == []


def test_an_existing_output_stays_unless_it_is_overwritten(
    gs: GoogleStore, gs_bucket: str, small: tuple[str, Path]
) -> None:
    gs.put_bytes(gs_bucket, "out/model.safetensors", b"old")
    gs.put_bytes(gs_bucket, "out/notes.txt", b"mine")
    assert "exists and is kept" in refused(*small, f"gs://{gs_bucket}/out")
    convert.convert(*small, f"gs://{gs_bucket}/out", overwrite=True, max_shard_bytes=40)
    names = stored(gs, gs_bucket, "out/")
    assert names["notes.txt"] == b"mine" and "model.safetensors" not in names


def test_a_bucket_that_cannot_be_written_is_refused_before_anything_is_read(
    gs: GoogleStore, gs_bucket: str, small: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convert.writing.execute.stream_leaves", lambda *_, **__: pytest.fail("a leaf was read"))
    assert "there is no such bucket" in refused(*small, "gs://no-such-bucket/out")
    with gs.failing(Fault(any_write, 403, "AccessDenied")):
        assert "refused the credentials" in refused(*small, f"gs://{gs_bucket}/out")


def test_an_interrupted_run_is_continued(
    gs: GoogleStore, gs_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of uploads are listed with Google's interface, and the journal lies beside the output."""
    monkeypatch.setattr(upload, "PART", 1 << 16)
    monkeypatch.setattr(unfinished, "EVERY", 0)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr("convert.writing.transfer.BATCH", 1)
    out, plan = f"gs://{gs_bucket}/models/out", convert.plan_conversion("timesfm", TIMESFM)
    convert.convert("timesfm", TIMESFM, tmp_path / "out", max_shard_bytes=200_000)
    running = execute(plan, out, max_shard_bytes=200_000, jobs=1, resume=True)
    for event in running:
        if isinstance(event, Event) and event.done > event.total / 2:
            break
    running.close()  # type: ignore[attr-defined]
    assert gs.unfinished(gs_bucket) and all(key.startswith("models/.out.unfinished/") for key in gs.keys(gs_bucket))
    first = {query for method, _, query in gs.requests if "partNumber" in query}
    gs.requests.clear()
    *_, result = execute(plan, out, max_shard_bytes=200_000, resume=True)
    assert isinstance(result, Result) and result.restored
    assert first and not first & {query for method, _, query in gs.requests if "partNumber" in query}
    assert stored(gs, gs_bucket, "models/") == {f"out/{name}": data for name, data in local_files(tmp_path / "out").items()}  # fmt: skip
    assert gs.unfinished(gs_bucket) == []
