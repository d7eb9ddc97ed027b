"""Conversions from bucket to bucket while the store fails at random: each ends with the bytes of an undisturbed one, or with one clear error.

    PYTHONPATH=src:tests python -m support.store_faults FOLDER --runs 200 --json benchmarks/results/store-faults.json

After an error nothing is there that looks complete, and no multipart upload that the error does not name; `--resume` then gives the bytes.
Every second conversion keeps what is done for that run.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import convert
from convert.core.errors import ConvertError
from convert.outputs.difference import compare_weights
from convert.outputs.integrity import verify_output
from convert.stores import client
from convert.writing.execute import Result, execute
from convert.writing.written import open_written
from support import writers
from support.kills import content, format_jobs
from support.object_store import KEY_ID, SECRET, TOKEN, Fault, ObjectStore, credentials, serve

PART, TIMEOUT = 1 << 14, 3  # bytes of a part; seconds until a request is repeated
Answer = Callable[[Any, dict[str, Any], Any], Iterable[bytes]]


def _late(inner: Any, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    """No answer in time; a write is not carried out."""
    time.sleep(TIMEOUT + 0.3)
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError("late")


def _short(inner: Any, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    """Half of a body, with the length of this half."""
    answer: list[Any] = []
    whole = b"".join(inner(environ, lambda *given: answer.extend(given) or (lambda _: None)))
    half = whole[: len(whole) // 2]
    headers = [(name, value) for name, value in answer[1] if name.lower() != "content-length"]
    start(answer[0], [*headers, ("Content-Length", str(len(half)))])
    return [half]


def _other_etag(inner: Any, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    """The answer to a part with the ETag of other bytes: the store has not what was sent."""

    def wrong(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
        return start(status, [(n, '"0123456789abcdef0123456789abcdef"' if n.lower() == "etag" else v) for n, v in headers], *rest)  # fmt: skip

    return inner(environ, wrong)  # type: ignore[no-any-return]


# name -> (status, code, another answer), what it may meet
KINDS: Mapping[str, tuple[int, str, Answer | None, str]] = {
    "timeout": (0, "", _late, "all"),
    "503 SlowDown": (503, "SlowDown", None, "all"),
    "429": (429, "TooManyRequests", None, "all"),
    "500": (500, "InternalError", None, "all"),
    "cut within the answer": (0, "", None, "all"),
    "cut before a write": (-1, "", None, "writes"),
    "expired credentials": (400, "ExpiredToken", None, "all"),
    "refused credentials": (403, "AccessDenied", None, "all"),
    "another ETag": (412, "PreconditionFailed", None, "reads"),
    "wrong ETag of a part": (0, "", _other_etag, "parts"),
    "short body": (0, "", _short, "reads"),
}


def _meets(what: str, method: str, path: str, query: str) -> bool:
    if what == "reads":
        return method == "GET" and "list-type" not in query and "uploads" not in query
    if what == "parts":
        return "partNumber" in query
    return what == "all" or method in ("PUT", "POST", "DELETE")


@dataclass
class Drawn:
    """A fault, which requests it may meet, and how many it has met."""

    kind: str
    what: str
    after: int
    times: int
    met: int = 0

    def fault(self) -> Fault:
        """Return the fault for the server: it meets `times` requests after the first `after`."""
        status, code, answer, _ = KINDS[self.kind]
        seen = 0

        def matches(method: str, path: str, query: str) -> bool:
            nonlocal seen
            if not _meets(self.what, method, path, query):
                return False
            seen += 1
            hit = self.after < seen <= self.after + self.times
            self.met += hit
            return hit

        return Fault(matches, status, code, answer=answer)


@dataclass(frozen=True)
class Faults:
    """What `run_faults` did.

    Attributes:
        runs: number of runs; `met` of them met a fault.
        kinds: how many runs met each kind.
        ends: how many ended with the same bytes, with an error, or with an error that names an upload that stays.
        errors: how often each kind of error.
        versions: of the libraries.
    """

    runs: int
    met: int
    kinds: Mapping[str, int]
    ends: Mapping[str, int]
    errors: Mapping[str, int]
    seconds: float
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Source:
    """A checkpoint in the bucket, its rules and options, and the bytes of its conversion."""

    name: str
    url: str
    model: str
    options: Mapping[str, Any]
    out: str
    shards: int | None
    expected: Mapping[str, bytes]

    def plan(self) -> Any:
        return convert.plan_conversion(self.model, self.url, **self.options)


def sources(folder: Path, s3: ObjectStore, bucket: str) -> Iterator[Source]:
    """Put a checkpoint of each format into the bucket, and one that needs several requests and parts."""
    jobs = format_jobs(folder)
    random = np.random.default_rng(0)
    writers.safetensors(folder / "large.safetensors", {f"layer_{k}/w": random.random((64, 300), np.float32) for k in range(4)})  # fmt: skip
    jobs["large.safetensors"] = {"model": "small.yaml", "checkpoint": "large.safetensors", "max_shard_size": "160kB"}
    for name, job in jobs.items():
        path = folder / job["checkpoint"]
        url = s3.put(bucket, f"in/{name}", path)
        options = {"skeleton": str(folder / job["skeleton"])} if "skeleton" in job else {}
        shards = {"3kB": 3000, "160kB": 160_000}.get(job.get("max_shard_size", ""))
        out = "out" if shards else "out.safetensors"
        model = str(folder / job["model"])
        there = folder / f"expected-{name.replace('/', '-')}" / out
        there.parent.mkdir()
        convert.convert(model, path, there, max_shard_bytes=shards, **options)
        expected = {("" if out.endswith(".safetensors") else f"/{file}"): data for file, data in content(there).items()}
        yield Source(name, url, model, options, out, shards, expected)


@contextmanager
def short_waits() -> Iterator[None]:
    """Small parts, short timeouts, and retries without long waits."""
    changed = {
        "convert.stores.client.BACKOFF": (0.002, 0.01),
        "convert.stores.client.RETRIES": 3,
        "convert.stores.client.TIMEOUT": TIMEOUT,
        "convert.stores.upload.PART": PART,
        "convert.stores.unfinished.EVERY": 0,
        "moto.s3.models.S3_UPLOAD_PART_MIN_SIZE": 1,
        "botocore.retries.standard.ExponentialBackoff.delay_amount": lambda self, context: 0.01,
    }
    with ExitStack() as stack:
        for name, value in changed.items():
            stack.enter_context(mock.patch(name, value))
        client.bucket.cache_clear()
        yield
    client.bucket.cache_clear()


def run_faults(folder: Path, runs: int, seed: int = 0) -> Faults:
    """Convert, verify or compare from bucket to bucket, `runs` times, each time with one to three faults.

    Raises:
        AssertionError: other bytes; something that looks complete; an upload that nobody names; a wrong verdict; or a secret in an error.
    """
    draw, started = random.Random(seed), time.monotonic()
    kinds: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    met = 0
    with serve() as s3, credentials(s3), short_waits():
        bucket = s3.bucket("faults")
        all_sources = list(sources(folder, s3, bucket))
        for k in range(runs):
            source = draw.choice(all_sources)
            drawn = [_draw(draw) for _ in range(draw.choice((1, 1, 2, 3)))]
            run = draw.choice((_convert, _convert, _convert, _convert, _verify, _diff))
            try:
                end, error = run(s3, bucket, source, f"out-{k}", [one.fault() for one in drawn])
            except AssertionError as wrong:
                raise AssertionError(f"run {k} of seed {seed}: {source.name}, {drawn}: {wrong}") from wrong
            hit = {one.kind for one in drawn if one.met}
            met += bool(hit)
            kinds.update(hit)
            ends[end] += 1
            if error:
                errors[error] += 1
    libraries = {name: version(name) for name in ("obstore", "boto3", "botocore", "tensorstore", "moto")}
    seconds = round(time.monotonic() - started, 1)
    return Faults(runs, met, dict(kinds.most_common()), dict(ends), dict(errors.most_common()), seconds, libraries)


def _draw(draw: random.Random) -> Drawn:
    """Draw a fault: at one of the first requests or later; once, a few times, or from then on."""
    kind = draw.choice(list(KINDS))
    what = draw.choice(("all", "writes", "writes")) if KINDS[kind][3] == "all" else KINDS[kind][3]
    after = draw.choice((0, 0, 1, 2, draw.randrange(3, 12), draw.randrange(3, 40)))
    return Drawn(kind, what, after, draw.choice((1, 1, 2, 3, 1 << 30)))


def _convert(s3: ObjectStore, bucket: str, source: Source, key: str, faults: list[Fault]) -> tuple[str, str]:
    """Convert into the bucket, every second time such that what is done is kept; after an error, continue without faults."""
    keeps = int(key.rpartition("-")[2]) % 2 == 1
    url = f"s3://{bucket}/{key}/{source.out}"

    def convert_to(resume: bool) -> None:
        for event in execute(source.plan(), url, max_shard_bytes=source.shards, jobs=2, resume=resume):
            assert isinstance(event, Result) or event.total >= event.done

    def there() -> dict[str, bytes]:
        return {name.removeprefix(f"{key}/{source.out}"): s3.get(bucket, name) for name in s3.keys(bucket) if name.startswith(f"{key}/")}  # fmt: skip

    end, error = "same bytes", ""
    try:
        with s3.failing(*faults):
            convert_to(resume=keeps)
    except ConvertError as raised:
        error, end = _clear(raised), "clear error"
        left = [name for name in s3.unfinished(bucket) if name.startswith(f"{key}/")]
        objects = there()
        if (left or objects) and not keeps:
            assert "could not be removed from the store" in str(raised), f"{left} {sorted(objects)} stay: {raised}"
            assert all(name in str(raised) for name in {*left, *(f"{key}/{source.out}{name}" for name in objects)}), (
                f"{left} {sorted(objects)} are not all named: {raised}"
            )
            end = "clear error that names what the store did not remove"
        if keeps:
            end = "clear error, and what is done is kept"
        complete = {"", "/model.safetensors", "/model.safetensors.index.json"} & objects.keys()
        assert not complete or objects == source.expected, f"{sorted(complete)} looks complete"
        if objects != source.expected:
            with mock.patch("convert.stores.client.TIMEOUT", 60):  # no fault now, but the machine may be slow
                client.bucket.cache_clear()
                convert_to(resume=True)
            client.bucket.cache_clear()
    assert there() == source.expected, f"other bytes: {sorted(there())}"
    assert not [name for name in s3.unfinished(bucket) if name.startswith(f"{key}/")], "an upload stays"
    return end, error


def _verify(s3: ObjectStore, bucket: str, source: Source, key: str, faults: list[Fault]) -> tuple[str, str]:
    """Verify an intact output: it is never called damaged."""
    url = _put(s3, bucket, source, key)
    try:
        with s3.failing(*faults):
            found = verify_output(url)
    except ConvertError as raised:
        return "clear error", _clear(raised)
    assert found.intact, f"an intact output is called damaged: {found.findings}"
    return "same bytes", ""


def _diff(s3: ObjectStore, bucket: str, source: Source, key: str, faults: list[Fault]) -> tuple[str, str]:
    """Compare two equal outputs: they never differ."""
    urls = [_put(s3, bucket, source, f"{key}/{side}") for side in "ab"]
    try:
        with s3.failing(*faults):
            found = compare_weights(*(open_written(url) for url in urls))
    except ConvertError as raised:
        return "clear error", _clear(raised)
    assert not found.differing and found.tensors, f"equal outputs differ: {found.differing}"
    return "same bytes", ""


def _put(s3: ObjectStore, bucket: str, source: Source, key: str) -> str:
    for name, data in source.expected.items():
        s3.client.put_object(Bucket=bucket, Key=f"{key}/{source.out}{name}", Body=data)
    return f"s3://{bucket}/{key}/{source.out}"


def _clear(error: ConvertError) -> str:
    """Return what kind of error it is, without its place and numbers."""
    text = str(error)
    assert not any(secret in text for secret in (SECRET, TOKEN, KEY_ID)), "a secret"
    assert "s3://faults" in text and "Traceback" not in text, f"no place: {text}"
    first = error.findings[0]
    return f"{first.code}: {re.sub(r'[0-9]+', 'N', first.problem.partition(': ')[2] or first.problem)[:90]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    text = json.dumps(asdict(run_faults(options.folder, options.runs, options.seed)), indent=1)
    sys.stdout.write(f"{text}\n")
    if options.json:
        options.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
