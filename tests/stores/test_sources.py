"""Checkpoints in an object store or on a web server are read as those on a disk, bit for bit, or refused with one clear error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import convert
from convert.checkpoints import open_source
from convert.core.errors import ConvertError
from convert.stores import StorePath, client, located
from convert.stores import path as store_path
from support import store_contract, writers
from support.command_line import Run
from support.object_store import KEY_ID, SECRET, TOKEN, Fault, ObjectStore, serve_folder
from support.paths import EXAMPLES, GOLDEN
from support.store_contract import assert_same

ORBAX = GOLDEN / "orbax-0.5"
TIMESFM = EXAMPLES / "checkpoints" / "timesfm-2.5"
FORMATS: dict[str, Callable[[Path], Path]] = {
    "orbax-ocdbt": lambda _: ORBAX / "ocdbt",
    "orbax-leaf-directories": lambda _: ORBAX / "leaf-directories",
    "orbax-zarr3": lambda _: ORBAX / "zarr3",
    "orbax-aggregated": lambda _: ORBAX / "aggregated",
    "orbax-steps": lambda _: ORBAX / "steps",
    "paxml": lambda _: GOLDEN / "timesfm-1.0" / "checkpoints",
    "msgpack-shards": lambda tmp: writers.msgpack_shards(tmp / "shards", writers.plain()),
    "npz": lambda tmp: writers.npz(tmp / "a.npz", writers.plain()),
    "npz-compressed": lambda tmp: writers.npz(tmp / "a.npz", writers.plain(), compressed=True),
    "safetensors": lambda tmp: writers.safetensors(tmp / "a.safetensors", writers.plain()),
    "safetensors-shards": lambda tmp: writers.safetensors_shards(tmp / "shards", writers.plain()),
}


QUICK = ("orbax-ocdbt", "orbax-leaf-directories", "npz", "safetensors-shards")


def refused(url: str) -> str:
    return store_contract.refused(url, SECRET, TOKEN, KEY_ID)


def of_formats(*names: str, quick: tuple[str, ...]) -> pytest.MarkDecorator:
    """A test of some formats, most of them slow."""
    marks = {False: [pytest.mark.slow], True: []}
    return pytest.mark.parametrize("form", [pytest.param(name, marks=marks[name in quick]) for name in names])


@pytest.mark.slow
@of_formats(*FORMATS, quick=QUICK)
def test_every_format_is_read_from_s3_bit_for_bit(form: str, s3: ObjectStore, bucket: str, tmp_path: Path) -> None:
    path = FORMATS[form](tmp_path)
    assert_same(s3.put(bucket, f"a run/{path.name}", path), path)


@of_formats("orbax-ocdbt", "orbax-leaf-directories", "npz", "safetensors", "safetensors-shards", quick=("orbax-ocdbt",))
def test_formats_are_read_from_a_web_server(form: str, s3: ObjectStore, tmp_path: Path) -> None:
    path = FORMATS[form](tmp_path)
    with serve_folder(path.parent) as url:
        assert_same(f"{url}/{path.name}", path)


@pytest.mark.slow
def test_a_conversion_from_s3_has_the_bytes_of_a_local_one(
    s3: ObjectStore, bucket: str, tmp_path: Path, run: Run
) -> None:
    url = s3.put(bucket, "timesfm", TIMESFM)
    convert.convert("timesfm", TIMESFM, tmp_path / "local.safetensors")
    _, err = run("timesfm", url, tmp_path / "s3.safetensors")
    assert f" in {url} " in err
    assert (tmp_path / "s3.safetensors").read_bytes() == (tmp_path / "local.safetensors").read_bytes()


@pytest.mark.slow
def test_a_large_object_is_read_in_ranges(
    s3: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file of 2 MB, what is needed is read: no request for more than the limit, and not much twice."""
    monkeypatch.setattr(store_path, "FIRST", 1 << 10)
    monkeypatch.setattr(store_path, "MOST", 1 << 16)
    arrays = {f"layer_{n}/kernel": np.arange(1 << 16, dtype=np.float32) + n for n in range(8)}
    path = writers.msgpack(tmp_path / "a.msgpack", writers.nested(arrays))
    url = s3.put(bucket, "a.msgpack", path)
    source = open_source(url)
    opened = [request for request in s3.requests if request[0] == "GET" and "list-type" not in request[2]]
    assert len(opened) < 40
    s3.requests.clear()
    for name, want in arrays.items():
        assert np.array_equal(source.read(name), want)
    assert 32 <= len(s3.requests) <= 60  # 2 MB in requests of 64 kB


def reading(method: str, path: str, query: str) -> bool:
    return method in ("GET", "HEAD")


@of_formats("orbax-ocdbt", "orbax-leaf-directories", "safetensors", quick=("orbax-ocdbt",))
@pytest.mark.parametrize("status", [503, 500, 429, 0], ids=["503", "500", "429", "cut"])
def test_a_request_that_fails_is_repeated(form: str, status: int, s3: ObjectStore, bucket: str, tmp_path: Path) -> None:
    path = FORMATS[form](tmp_path)
    url = s3.put(bucket, path.name, path)
    with s3.failing(Fault(reading, status, "SlowDown", times=2)):
        assert_same(url, path)
        assert s3.faults[0].times == 0


def data(method: str, path: str, query: str) -> bool:
    return method == "GET" and "list-type" not in query


@of_formats("orbax-ocdbt", "safetensors", quick=("safetensors",))
@pytest.mark.parametrize("where", [reading, data], ids=["all", "data"])
@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (503, "SlowDown", "did not answer"),
        (0, "", "did not answer"),
        (403, "AccessDenied", "refused the credentials (403"),
        (403, "InvalidAccessKeyId", "refused the credentials (403"),
        (400, "ExpiredToken", "have expired"),
    ],
)
def test_a_store_that_refuses_is_one_clear_error(
    form: str, where: Callable[[str, str, str], bool], status: int, code: str, expected: str,
    s3: ObjectStore, bucket: str, tmp_path: Path,
) -> None:  # fmt: skip
    path = FORMATS[form](tmp_path)
    url = s3.put(bucket, path.name, path)
    with s3.failing(Fault(where, status, code)):
        text = refused(url)
    assert expected in text and bucket in text


def test_a_bucket_that_does_not_exist(s3: ObjectStore) -> None:
    assert "there is no such bucket" in refused("s3://no-such-bucket/run")


@pytest.mark.parametrize(("key", "shown"), [("run//a.npz", "'run//'"), ("run/a\x01", r"'run/a\x01'"), ("run/..", "'run/..'")])  # fmt: skip
def test_a_name_that_no_path_has_is_one_clear_error(key: str, shown: str, s3: ObjectStore, bucket: str) -> None:
    s3.put_bytes(bucket, key, b"")
    assert f"{shown} has an empty part" in refused(f"s3://{bucket}/run")
    for path in ("run/../a.npz", "a\nb.npz"):
        assert f"{path!r} has an empty part" in refused(f"s3://{bucket}/{path}")


def test_a_prefix_without_objects(s3: ObjectStore, bucket: str) -> None:
    text = refused(f"s3://{bucket}/run")
    assert f"s3://{bucket}/run" in text and "there is no such file or directory" in text


@pytest.mark.slow
def test_a_folder_of_thousands_of_objects_is_listed_once(s3: ObjectStore, bucket: str, tmp_path: Path) -> None:
    from moto.s3.models import s3_backends

    path = writers.safetensors(tmp_path / "model.safetensors", writers.plain())
    s3.put(bucket, "run/model.safetensors", path)
    backend = next(iter(s3_backends.values()))["aws"]
    for n in range(3_000):
        backend.put_object(bucket, f"run/log-{n:05}", b"")
    s3.requests.clear()
    assert_same(f"s3://{bucket}/run", path)
    assert sum("list-type" in query for _, _, query in s3.requests) < 10  # four pages, and no request for each object


def test_an_object_that_changes_while_it_is_read_is_refused(s3: ObjectStore, bucket: str, tmp_path: Path) -> None:
    path = writers.safetensors(tmp_path / "a.safetensors", {"a": np.zeros(1 << 16, np.float32)})
    source = open_source(s3.put(bucket, "a.safetensors", path))
    s3.client.put_object(Bucket=bucket, Key="a.safetensors", Body=path.read_bytes()[:-4] + b"1234")
    with pytest.raises(ConvertError, match="has changed while it was read"):
        source.read("a")
    assert source.changed() is not None


@pytest.mark.slow
def test_credentials_are_in_no_output(
    s3: ObjectStore, bucket: str, tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    url = s3.put(bucket, "timesfm", TIMESFM)
    said = [*run("timesfm", url, tmp_path / "out"), *run("inspect", url), *run("plan", "timesfm", url, "--json")]
    for fault in (Fault(reading, 403, "SignatureDoesNotMatch"), Fault(reading, 503, "SlowDown"), Fault(reading, 400, "ExpiredToken")):  # fmt: skip
        with s3.failing(fault):
            said += run("timesfm", url, tmp_path / "other", code=2)
    written = [file.read_bytes() for file in (tmp_path / "out").iterdir()]
    assert len(written) > 1
    for secret in (SECRET, TOKEN, KEY_ID):
        assert secret not in "".join(said) + caplog.text
        assert not any(secret.encode() in content for content in written)


@pytest.mark.parametrize(("package", "scheme"), [("obstore", "s3"), ("boto3", "s3"), ("obstore", "https")])
def test_without_the_extra_the_error_names_it(
    package: str, scheme: str, s3: ObjectStore, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    _, err = run("inspect", f"{scheme}://host/run", code=2)
    assert f"needs {package}, which is not installed; run pip install 'ckpt-convert[remote]'" in err


@pytest.mark.slow
def test_without_credentials_a_public_bucket_is_read(
    s3: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    url = s3.put(bucket, "ocdbt", ORBAX / "ocdbt")
    assert "refused the credentials" in refused(url)
    client.bucket.cache_clear()
    s3.client.put_bucket_acl(Bucket=bucket, ACL="public-read")
    for key in s3.keys(bucket):
        s3.client.put_object_acl(Bucket=bucket, Key=key, ACL="public-read")
    assert_same(url, ORBAX / "ocdbt")


def test_a_profile_of_aws_gives_the_credentials(
    s3: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(
        "[other]\naws_access_key_id = c\naws_secret_access_key = d\n[work]\naws_access_key_id = a\naws_secret_access_key = b\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert_same(s3.put(bucket, "zarr3", ORBAX / "zarr3"), ORBAX / "zarr3")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("AWS_PROFILE", "absent", "The config profile (absent) could not be found"),
        ("AWS_PROFILE", "process", "Error when retrieving credentials from custom-process"),
        ("AWS_PROFILE", "login", "Error loading SSO Token"),
        ("AWS_ACCESS_KEY_ID", "half", "Partial credentials found in env"),
        ("AWS_ENDPOINT_URL", "localhost:9000", "AWS_ENDPOINT_URL is not a URL"),
        ("AWS_ENDPOINT_URL", "nonsense", "AWS_ENDPOINT_URL is not a URL"),
    ],
)
def test_settings_of_aws_that_are_wrong_are_one_clear_error(
    name: str, value: str, problem: str, s3: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for secret in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(secret)
    (tmp_path / "config").write_text(
        "[profile process]\ncredential_process = false\n[profile login]\nsso_session = me\nsso_account_id = 1\nsso_role_name = a\n"
        "[sso-session me]\nsso_start_url = https://me.example\nsso_region = us-east-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv(name, value)
    assert problem in refused("s3://bucket/run")


def test_a_web_server_without_ranges_is_refused(s3: ObjectStore, tmp_path: Path) -> None:
    path = writers.safetensors(tmp_path / "a.safetensors", {"a": np.zeros(1 << 20, np.float32)})
    with serve_folder(tmp_path, ranges=False) as url:
        assert "ranges" in refused(f"{url}/{path.name}")


@pytest.mark.parametrize(
    "url",
    ["https://user:pass-word@host/run", "https://host/run?X-Amz-Signature=pass-word", "s3://key:pass-word@bucket/run"],
)
def test_a_url_with_a_secret_is_refused_without_it(url: str) -> None:
    with pytest.raises(ConvertError) as caught:
        open_source(url)
    assert caught.value.code == "store-url" and "pass-word" not in str(caught.value)


def test_other_schemes_are_refused() -> None:
    with pytest.raises(ConvertError) as caught:
        open_source("az://container/run")
    assert caught.value.code == "store-url" and "s3://" in str(caught.value)


@pytest.mark.parametrize("text", ["run", "/run/s3:/x", "s3:", "s3", "a:b", "./s3://x"])
def test_a_local_path_stays_one(text: str) -> None:
    assert not isinstance(located(text), StorePath)


def paths() -> Iterator[tuple[Path, str]]:
    path = located("s3://bucket/run/200/")
    yield path, "s3://bucket/run/200"
    yield located(Path("s3://bucket/run/200")), "s3://bucket/run/200"  # pathlib joins the slashes
    yield path / "default" / "a.b", "s3://bucket/run/200/default/a.b"
    yield path.parent, "s3://bucket/run"
    yield path.with_name("x"), "s3://bucket/run/x"
    yield (path / ".." / "x").resolve(), "s3://bucket/run/x"
    yield (path / "d" / "x").relative_to(path), "d/x"
    yield located("https://host/a%20b/c"), "https://host/a b/c"


@pytest.mark.parametrize(("path", "text"), list(paths()))
def test_a_path_of_a_store_is_shown_as_its_url(path: Path, text: str) -> None:
    assert str(path) == text and f"{path}" == text


def test_no_system_call_takes_a_path_of_a_store() -> None:
    with pytest.raises(TypeError, match="not a path of this machine"):
        open(located("s3://bucket/run"))  # noqa: PTH123, SIM115


def test_a_link_out_of_the_checkpoint_is_refused(s3: ObjectStore, bucket: str, tmp_path: Path) -> None:
    folder = writers.safetensors_shards(tmp_path / "shards", writers.plain())
    index = next(folder.glob("*.index.json"))
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    assert "not a plain file name" in refused(s3.put(bucket, "shards", folder))
