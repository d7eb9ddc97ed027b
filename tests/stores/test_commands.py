"""The commands with URLs: an output in a bucket is checked, compared, attested, kept and replaced as one on a disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import convert
from convert.outputs import completed
from convert.writing.execute import Result, execute
from support.command_line import Run
from support.kills import content
from support.object_store import SECRET, Fault, ObjectStore, serve_folder
from support.paths import EXAMPLES
from support.small_conversion import write_checkpoint, write_rules

pytestmark = pytest.mark.slow

TIMESFM = EXAMPLES / "checkpoints" / "timesfm-2.5"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rules, and two checkpoints of 240 bytes."""
    monkeypatch.chdir(tmp_path)
    write_rules(tmp_path)
    for k, name in enumerate("ab"):
        write_checkpoint(tmp_path / f"{name}.npz", k)
    return tmp_path


def below(s3: ObjectStore, bucket: str, key: str) -> dict[str, bytes]:
    return {each.removeprefix(f"{key}/"): s3.get(bucket, each) for each in s3.keys(bucket) if each.startswith(f"{key}/")}  # fmt: skip


def flip(s3: ObjectStore, bucket: str, key: str) -> None:
    """Flip a bit of the last value of an object."""
    damaged = bytearray(s3.get(bucket, key))
    damaged[-1] ^= 1
    s3.client.put_object(Bucket=bucket, Key=key, Body=bytes(damaged))


@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_two_buckets_are_compared(out: str, s3: ObjectStore, bucket: str, folder: Path, run: Run) -> None:
    for name in "ab":
        convert.convert("./small.yaml", "a.npz", f"s3://{bucket}/{name}/{out}", max_shard_bytes=60 if out == "out" else None)  # fmt: skip
    urls = [f"s3://{bucket}/{name}/{out}" for name in "ab"]
    assert "5 of 5 tensors equal bit for bit" in run("diff", *urls)[0]
    source = s3.put(bucket, "source.npz", Path("a.npz"))
    assert "5 of 5 tensors equal bit for bit" in run("diff", urls[0], source, "--model", "./small.yaml")[0]
    flip(s3, bucket, next(key for key in s3.keys(bucket) if key.startswith("b/") and key.endswith(".safetensors")))
    found = json.loads(run("diff", *urls, "--json", code=1)[0])
    assert (found["a"], found["b"]) == (urls[0], urls[1]) and [each["count"] for each in found["differing"]] == [1]
    s3.client.delete_object(Bucket=bucket, Key=next(key for key in s3.keys(bucket) if key.endswith(".safetensors")))
    assert f"s3://{bucket}/a/out" in run("diff", *urls, code=2)[1]


@pytest.mark.parametrize("levels", ["coverage,weights", "coverage,weights,layers,model"])  # fmt: skip
def test_a_bucket_is_checked_against_a_bucket(levels: str, s3: ObjectStore, bucket: str, tmp_path: Path, run: Run) -> None:  # fmt: skip
    source, out = s3.put(bucket, "ckpt", TIMESFM), f"s3://{bucket}/out"
    convert.convert("timesfm", TIMESFM, out, max_shard_bytes=200_000)
    given = ("check", out, "--from", source, "--level", levels, "--require", levels)
    report = json.loads(run(*given, "--json", "--junit", tmp_path / "junit.xml")[0])
    assert report["out"] == out and report["source"].startswith(source)
    assert {level["level"]: level["verdict"] for level in report["levels"]} == dict.fromkeys(
        levels.split(","), "passed"
    )
    flip(s3, bucket, next(key for key in s3.keys(bucket) if key.startswith("out/") and key.endswith(".safetensors")))
    assert "weights   FAILED" in run(*given, code=1)[0]
    with s3.failing(Fault(lambda method, path, query: path.endswith(".safetensors"), 403, "AccessDenied")):
        _, err = run(*given, code=2)
    assert "refused the credentials" in err and SECRET not in err


def test_the_report_is_not_written_to_a_url(s3: ObjectStore, bucket: str, folder: Path, run: Run) -> None:
    out = f"s3://{bucket}/out.safetensors"
    convert.convert("./small.yaml", "a.npz", out)
    for given in (("check", out, "--from", "a.npz", "--junit"), ("verify", out, "--attest")):
        assert "this is not written to a URL" in run(*given, f"s3://{bucket}/report", code=2)[1]
    assert s3.keys(bucket) == ["out.safetensors"]


def test_a_conversion_into_a_bucket_is_checked_and_its_card_gets_the_figures(
    s3: ObjectStore, bucket: str, tmp_path: Path, run: Run
) -> None:
    run("timesfm", TIMESFM, tmp_path / "out", "--check")
    run("timesfm", TIMESFM, f"s3://{bucket}/out", "--check")
    assert "## Checked" in (tmp_path / "out" / "README.md").read_text()
    found = below(s3, bucket, "out")
    assert found.keys() == content(tmp_path / "out").keys() and b"## Checked" in found["README.md"]
    run("verify", f"s3://{bucket}/out")


@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_a_statement_about_a_url_is_that_about_the_files(
    out: str, s3: ObjectStore, bucket: str, folder: Path, run: Run
) -> None:
    run("./small.yaml", "a.npz", out, "--attest", "here.json")
    run("./small.yaml", "a.npz", f"s3://{bucket}/{out}", "--attest", "there.json")
    assert Path("there.json").read_bytes() == Path("here.json").read_bytes()
    run("verify", f"s3://{bucket}/{out}", "--attest", "again.json")
    assert Path("again.json").read_bytes() == Path("here.json").read_bytes()
    flip(s3, bucket, next(key for key in s3.keys(bucket) if key.endswith(".safetensors")))
    run("verify", f"s3://{bucket}/{out}", "--attest", "damaged.json", code=1)
    assert not Path("damaged.json").exists()


def test_weights_in_a_bucket_lead_back_to_jax(s3: ObjectStore, bucket: str, folder: Path, run: Run) -> None:
    url = f"s3://{bucket}/out"
    convert.convert("./small.yaml", "a.npz", url, max_shard_bytes=60)
    run("run", "./small.yaml", url, "back.npz", "--to", "npz", "--like", "a.npz")
    with np.load("a.npz") as first, np.load("back.npz") as second:
        assert first.files and all(np.array_equal(first[name], second[name]) for name in first.files)
    run("run", "./small.yaml", "b.npz", "like.safetensors", "--like", url)


@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_a_complete_output_is_kept_after_its_bytes_are_compared(
    out: str, s3: ObjectStore, bucket: str, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, shards = f"s3://{bucket}/{out}", ("--max-shard-size", "60B") if out == "out" else ()
    run("./small.yaml", "a.npz", url, *shards)
    s3.requests.clear()
    assert f"kept {url}" in run("./small.yaml", "a.npz", url, *shards, "--resume")[1]
    assert not [method for method, _, _ in s3.requests if method not in ("GET", "HEAD")]
    _, err = run("./small.yaml", "a.npz", url, *shards, "--resume", "--dtype", "float16", code=2)
    assert "error[resume-mismatch]" in err and "another --dtype" in err
    monkeypatch.setattr(completed, "_SKEW", 0)
    write_checkpoint(Path("a.npz"), 7)
    assert "the checkpoint has changed since" in run("./small.yaml", "a.npz", url, *shards, "--resume", code=2)[1]
    write_checkpoint(Path("a.npz"), 0)
    flip(s3, bucket, next(key for key in s3.keys(bucket) if key.endswith(".safetensors")))
    assert "is damaged" in run("./small.yaml", "a.npz", url, *shards, "--resume", code=2)[1]
    run("./small.yaml", "a.npz", url, *shards, "--resume", "--overwrite")
    run("verify", url)


def test_clocks_that_differ_hide_no_change_of_the_checkpoint(
    s3: ObjectStore, bucket: str, folder: Path, run: Run
) -> None:
    """The checkpoint was changed after the conversion, as far as the clock of the store can be trusted."""
    url = f"s3://{bucket}/out.safetensors"
    run("./small.yaml", "a.npz", url)
    shutil.copy("b.npz", "a.npz")
    assert "the checkpoint has changed since" in run("./small.yaml", "a.npz", url, "--resume", code=2)[1]


def left_by_a_killed_run(s3: ObjectStore, url: str, bucket: str, after: str) -> None:
    """Leave what is in the bucket when a run is killed: uploads, or also the first objects."""
    events = execute(convert.plan_conversion("./small.yaml", "a.npz"), url, max_shard_bytes=60 if url.endswith("out") else None)  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:  # a killed process removes nothing
        patch.setattr("convert.stores.upload.Uploads.abort", lambda self: [])
        if after == "uploads":
            _ = next(events), next(events)
            events.close()  # type: ignore[attr-defined]
        else:
            last = Fault(lambda method, path, query: method == "PUT" and path.endswith("index.json"), 403, "AccessDenied")  # fmt: skip
            with s3.failing(last), pytest.raises(convert.ConvertError):
                assert not any(isinstance(event, Result) for event in events)
    assert s3.unfinished(bucket) if after == "uploads" else len(s3.keys(bucket)) > 5


@pytest.mark.parametrize(
    ("out", "after"),
    [
        ("out", "uploads"),
        ("out", "objects"),
        ("out.safetensors", "uploads"),
    ],
)
def test_what_a_killed_run_left_goes_with_resume(
    out: str, after: str, s3: ObjectStore, bucket: str, folder: Path, run: Run
) -> None:
    shards = ("--max-shard-size", "60B") if out == "out" else ()
    run("./small.yaml", "a.npz", out, *shards)
    left_by_a_killed_run(s3, f"s3://{bucket}/{out}", bucket, after)
    if after == "objects":
        _, err = run("./small.yaml", "a.npz", f"s3://{bucket}/{out}", *shards, code=2)
        assert "exists and is kept" in err
    run("./small.yaml", "a.npz", f"s3://{bucket}/{out}", *shards, "--resume")
    expected = content(Path(out))
    assert {name.rpartition("/")[2]: s3.get(bucket, name) for name in s3.keys(bucket)} == expected
    assert s3.unfinished(bucket) == []


def test_objects_of_others_stay_with_resume(s3: ObjectStore, bucket: str, folder: Path, run: Run) -> None:
    s3.client.put_object(Bucket=bucket, Key="out/notes.txt", Body=b"mine")
    assert "exists and is kept" in run("./small.yaml", "a.npz", f"s3://{bucket}/out", "--resume", code=2)[1]
    assert below(s3, bucket, "out") == {"notes.txt": b"mine"}


def test_a_batch_from_bucket_to_bucket(s3: ObjectStore, bucket: str, folder: Path, run: Run) -> None:
    for name in "ab":
        s3.put(bucket, f"runs/{name}/last/params.npz", Path(f"{name}.npz"))
        convert.convert("./small.yaml", f"{name}.npz", f"{name}.safetensors")
    jobs = [
        {"checkpoint": f"s3://{bucket}/runs/{name}/last", "out": f"s3://{bucket}/out/{name}.safetensors"}
        for name in "ab"
    ]
    Path("jobs.yaml").write_text(json.dumps({"defaults": {"model": "./small.yaml", "check": "weights"}, "jobs": jobs}))
    made = json.loads(run("batch", "jobs.yaml", "--json")[0])
    assert [(job["out"], job["status"], job["check"]) for job in made["jobs"]] == [
        (job["out"], "converted", {"weights": "passed"}) for job in jobs
    ]
    assert below(s3, bucket, "out") == {f"{n}.safetensors": Path(f"{n}.safetensors").read_bytes() for n in "ab"}
    s3.client.delete_object(Bucket=bucket, Key="out/a.safetensors")
    assert "exists and is kept" in run("batch", "jobs.yaml", code=2)[1]
    again = json.loads(run("batch", "jobs.yaml", "--resume", "--json")[0])
    assert [job["restored"] for job in again["jobs"]] == [0, 5]
    assert below(s3, bucket, "out") == {f"{n}.safetensors": Path(f"{n}.safetensors").read_bytes() for n in "ab"}


def test_a_pattern_of_a_bucket(s3: ObjectStore, bucket: str, folder: Path, run: Run) -> None:
    for name in ("a", "b", ".c"):
        s3.put(bucket, f"runs/{name}/{name}.npz", Path("a.npz"))
    run("batch", "./small.yaml", f"s3://{bucket}/runs/*/[ab].npz", f"s3://{bucket}/out")
    assert {key.split("/")[1] for key in s3.keys(bucket) if key.startswith("out/")} == {"a", "b"}
    _, err = run("batch", "./small.yaml", f"s3://{bucket}/run/*", "out", code=2)
    assert "no checkpoint matches the pattern" in err and f"s3://{bucket}/run/*" in err
    with serve_folder(folder) as url:
        _, err = run("batch", "./small.yaml", f"{url}/*.npz", "out", code=2)
    assert "http:// has no listing" in err


def test_a_batch_finds_before_a_byte_is_read_what_a_store_refuses(
    s3: ObjectStore, bucket: str, folder: Path, run: Run
) -> None:
    """One error with a line for each problem, and nothing is written, not even a job that could run."""
    outs = [f"s3://{bucket}/x/out", f"s3://{bucket}/x/out", "s3://no-such-bucket/out", f"s3://{bucket}/free", f"s3://{bucket}/src/a.npz/out"]  # fmt: skip
    s3.put(bucket, "src/a.npz", Path("a.npz"))
    jobs = [{"checkpoint": "a.npz" if k else f"s3://{bucket}/src/a.npz", "out": out} for k, out in enumerate(outs)]
    Path("jobs.yaml").write_text(json.dumps({"defaults": {"model": "./small.yaml"}, "jobs": jobs}))
    _, err = run("batch", "jobs.yaml", code=2)
    for expected in ("two jobs have this output", "there is no such bucket", "lies in the checkpoint"):
        assert expected in err
    Path("jobs.yaml").write_text(json.dumps({"defaults": {"model": "./small.yaml"}, "jobs": jobs[3:4]}))
    with s3.failing(Fault(lambda method, path, query: method == "POST", 403, "AccessDenied")):
        _, err = run("batch", "jobs.yaml", code=2)
    assert "refused the credentials (403, AccessDenied)" in err and "Nothing was converted" in err
    assert s3.keys(bucket) == ["src/a.npz"] and s3.unfinished(bucket) == []
