from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from convert.stores import client
from support.google_store import GoogleStore, serve_google
from support.object_store import ObjectStore, credentials, serve

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[ObjectStore]:
    """One S3 server for all tests of a process."""
    with serve() as store:
        yield store


@pytest.fixture
def s3(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The server, the credentials of a user in the environment, and short waits before a request is repeated."""
    monkeypatch.setattr(client, "BACKOFF", (0.002, 0.01))
    monkeypatch.setattr(client, "RETRIES", 3)
    client.bucket.cache_clear()
    with credentials(server):
        server.requests.clear()
        yield server


@pytest.fixture
def bucket(s3: ObjectStore) -> str:
    """An empty bucket."""
    return s3.bucket(f"bucket-{next(_numbers)}")


@pytest.fixture(scope="session")
def google_server() -> Iterator[GoogleStore]:
    """One server of Google Cloud Storage for all tests of a process."""
    with serve_google() as store:
        yield store


@pytest.fixture
def gs(google_server: GoogleStore, monkeypatch: pytest.MonkeyPatch) -> GoogleStore:
    """The server as an emulator, and short waits before a request is repeated."""
    monkeypatch.setattr(client, "BACKOFF", (0.002, 0.01))
    monkeypatch.setattr(client, "RETRIES", 3)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", google_server.url)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "")  # set again by what is tested; restored afterwards
    client.bucket.cache_clear()
    google_server.requests.clear()
    google_server.seen.clear()
    google_server.needs_token = False
    return google_server


@pytest.fixture
def gs_bucket(gs: GoogleStore) -> str:
    """An empty bucket."""
    return gs.bucket(f"bucket-{next(_numbers)}")
