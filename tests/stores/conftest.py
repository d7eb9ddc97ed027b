from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from convert.stores import client
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
