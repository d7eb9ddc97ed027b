from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from convert.stores import client, google
from support.google_store import GoogleStore, serve_google
from support.hub_server import HF_TOKEN, Hub, serve_hub
from support.object_store import ObjectStore, credentials, serve

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[ObjectStore]:
    """One S3 server for all tests of a process."""
    with serve() as store:
        yield store


def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF", (0.002, 0.01))
    monkeypatch.setattr(client, "RETRIES", 3)
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)


@pytest.fixture
def s3(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The server, the credentials of a user in the environment, and short waits before a request is repeated."""
    short_waits(monkeypatch)
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
    short_waits(monkeypatch)
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


@pytest.fixture
def account(gs: GoogleStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """The server in Google's place, and a function that writes the file of a service account, whose tokens it issues."""
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    def write(token_uri: str) -> Path:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        content = {"type": "service_account", "client_email": "me@test", "private_key": text, "private_key_id": "1", "project_id": "test", "token_uri": token_uri}  # fmt: skip
        path = tmp_path / "account.json"
        path.write_text(json.dumps(content))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
        client.bucket.cache_clear()
        return path

    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    monkeypatch.setattr(google, "URL", gs.url)
    gs.needs_token = True
    return write


@pytest.fixture(scope="session")
def hub_server() -> Iterator[Hub]:
    """One server of the Hugging Face Hub for all tests of a process."""
    with serve_hub() as hub:
        yield hub


@pytest.fixture
def hub(hub_server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """The server without repositories, an empty cache, and a token. What huggingface_hub read from the environment is set anew."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub_server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub_server.url + "/{repo_id}/resolve/{revision}/{filename}")  # fmt: skip
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setenv("HF_TOKEN", HF_TOKEN)
    client.bucket.cache_clear()
    hub_server.repos.clear()
    hub_server.large.clear()
    hub_server.requests.clear()
    return hub_server
