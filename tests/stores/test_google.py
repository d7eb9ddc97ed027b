"""Google Cloud Storage: what is read has the bits of a disk, with an emulator and with credentials."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import convert
from convert.checkpoints import open_source
from convert.core.errors import ConvertError
from convert.stores import client
from support import store_contract, writers
from support.command_line import Run
from support.google_store import BEARER, GoogleStore
from support.object_store import Fault
from support.paths import EXAMPLES, GOLDEN
from support.store_contract import assert_same

ORBAX = GOLDEN / "orbax-0.5"
TIMESFM = EXAMPLES / "checkpoints" / "timesfm-2.5"
SLOW = pytest.mark.slow
FORMATS = [
    ORBAX / "ocdbt",
    ORBAX / "leaf-directories",
    *(pytest.param(path, marks=SLOW) for path in (ORBAX / "zarr3", ORBAX / "aggregated", ORBAX / "steps", GOLDEN / "timesfm-1.0" / "checkpoints")),
]  # fmt: skip


def refused(url: str) -> str:
    return store_contract.refused(url, BEARER)


@pytest.mark.parametrize("path", FORMATS, ids=lambda path: path.name)
def test_every_format_is_read_bit_for_bit(path: Path, gs: GoogleStore, gs_bucket: str) -> None:
    assert_same(gs.put(gs_bucket, f"a run/{path.name}", path), path)
    assert gs.seen == {""}  # an emulator gets no credentials


@pytest.mark.parametrize("status", [503, pytest.param(429, marks=SLOW), 0])
def test_a_request_that_fails_is_repeated(status: int, gs: GoogleStore, gs_bucket: str) -> None:
    url = gs.put(gs_bucket, "run", ORBAX / "ocdbt")
    with gs.failing(Fault(lambda method, path, query: method in ("GET", "HEAD"), status, "SlowDown", times=2)):
        assert_same(url, ORBAX / "ocdbt")
        assert gs.faults[0].times == 0


@pytest.mark.parametrize("path", [ORBAX / "ocdbt", pytest.param(ORBAX / "leaf-directories", marks=SLOW)], ids=lambda path: path.name)  # fmt: skip
@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [(503, "SlowDown", "did not answer"), (403, "AccessDenied", "refused the credentials (403")],
)
def test_a_store_that_refuses_is_one_clear_error(path: Path, status: int, code: str, expected: str, gs: GoogleStore, gs_bucket: str) -> None:  # fmt: skip
    url = gs.put(gs_bucket, "run", path)
    for where in (lambda *_: True, lambda method, path, query: "list-type" not in query):
        with gs.failing(Fault(where, status, code)):
            text = refused(url)
        assert expected in text and gs_bucket in text


def test_a_bucket_that_does_not_exist_and_a_prefix_without_objects(gs: GoogleStore, gs_bucket: str) -> None:
    assert "there is no such bucket" in refused("gs://no-such-bucket/run")
    assert "there is no such file or directory" in refused(f"gs://{gs_bucket}/run")


def test_an_object_that_is_missing_is_named(gs: GoogleStore, gs_bucket: str, tmp_path: Path) -> None:
    shards = writers.safetensors_shards(tmp_path / "shards", writers.plain())
    lost = next(shards.glob("*-00001-of-*.safetensors"))
    lost.unlink()
    assert lost.name in refused(gs.put(gs_bucket, "shards", shards))


def test_an_object_that_changes_while_it_is_read_is_refused(gs: GoogleStore, gs_bucket: str, tmp_path: Path) -> None:
    path = writers.safetensors(tmp_path / "a.safetensors", {"a": np.zeros(1 << 16, np.float32)})
    source = open_source(gs.put(gs_bucket, "a.safetensors", path))
    gs.put_bytes(gs_bucket, "a.safetensors", path.read_bytes()[:-4] + b"1234")
    with pytest.raises(ConvertError, match="has changed while it was read"):
        source.read("a")
    assert source.changed() is not None


@pytest.mark.slow
def test_requests_have_the_token_of_the_credentials(gs: GoogleStore, gs_bucket: str, tmp_path: Path, account: Callable[[str], Path], run: Run) -> None:  # fmt: skip
    account(f"{gs.url}/token")
    path = writers.safetensors(tmp_path / "a.safetensors", writers.plain())
    url = gs.put(gs_bucket, "a.safetensors", path)
    assert_same(url, path)
    assert gs.seen == {f"Bearer {BEARER}"}
    assert not any(BEARER in text for text in run("inspect", url))


def test_credentials_that_give_no_token_are_one_clear_error(gs: GoogleStore, gs_bucket: str, account: Callable[[str], Path]) -> None:  # fmt: skip
    path = account(f"{gs.url}/none")
    text = refused(f"gs://{gs_bucket}/run")
    assert "no token for these credentials" in text and "gcloud auth application-default login" in text
    path.write_text("{}")
    client.bucket.cache_clear()
    assert "names a file that has no credentials" in refused(f"gs://{gs_bucket}/run")


def test_without_google_auth_the_error_names_the_extra(
    account: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google.auth", None)
    client.bucket.cache_clear()
    assert "needs google-auth, which is not installed; run pip install 'ckpt-convert[remote]'" in refused(
        "gs://bucket/run"
    )


def test_without_credentials_requests_are_not_signed(gs: GoogleStore, gs_bucket: str, account: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # fmt: skip
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    assert "refused the credentials (401" in refused(f"gs://{gs_bucket}/run")
    gs.needs_token = False
    client.bucket.cache_clear()
    path = writers.safetensors(tmp_path / "a.safetensors", writers.plain())
    assert_same(gs.put(gs_bucket, "a.safetensors", path), path)


@pytest.mark.slow
def test_a_conversion_has_the_bytes_of_a_local_one(gs: GoogleStore, gs_bucket: str, tmp_path: Path, run: Run) -> None:
    url = gs.put(gs_bucket, "timesfm", TIMESFM)
    convert.convert("timesfm", TIMESFM, tmp_path / "local.safetensors")
    _, err = run("timesfm", url, tmp_path / "gs.safetensors")
    assert f" in {url} " in err
    assert (tmp_path / "gs.safetensors").read_bytes() == (tmp_path / "local.safetensors").read_bytes()
