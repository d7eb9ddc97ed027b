"""What is asked of a store: list, size, ranges of bytes. obstore asks, with retries; TensorStore gets the same place (`kvstore`).

The credentials are those of the environment and of AWS's files; none are options, and none appear in an error.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
RETRIES = 6
BACKOFF = 0.1, 5.0  # seconds before the first retry, and the most
TIMEOUT = 60  # seconds of one request
# A web server has no listing. These names are looked for instead: what the readers of the formats look for.
HTTP_NAMES = (
    "_METADATA", "_CHECKPOINT_METADATA", "_sharding", "checkpoint", "commit_success.txt", "config.json", "flax_model.msgpack",
    "flax_model.msgpack.index.json", "generation_config.json", "manifest.ocdbt", "model.safetensors", "model.safetensors.index.json",
)  # fmt: skip
HTTP_FOLDERS = ("default", "params", "state")
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN")


@dataclass(frozen=True, slots=True)
class Entry:
    """An object.

    Attributes:
        size: in bytes.
        etag: changes with its content; empty where the store gives none.
        modified: when, in nanoseconds.
    """

    size: int
    etag: str
    modified: int


class StoreError(OSError):
    """A store refused, or did not answer.

    Attributes:
        fix: the next step.
    """

    def __init__(self, problem: str, place: str, fix: str) -> None:
        super().__init__(errno.EIO, problem, place)
        self.fix = fix


def missing_extra(scheme: str, package: str, extra: str, place: str) -> StoreError:
    """Return the error for a library that is not installed."""
    return StoreError(
        f"{scheme}:// needs {package}, which is not installed", place, f"run pip install 'ckpt-convert[{extra}]'"
    )


@functools.cache
def bucket(scheme: str, name: str) -> Bucket:
    """Return the bucket or server, the same one for the whole process."""
    return Bucket(scheme, name)


class Bucket:
    """A bucket of a store, or a web server."""

    def __init__(self, scheme: str, name: str) -> None:
        self.scheme, self.name = scheme, name
        self._listings: dict[str, tuple[set[str], dict[str, Entry]]] = {}
        self._heads: dict[str, Entry | None] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Its URL."""
        return f"{self.scheme}://{self.name}"

    def forget(self) -> None:
        """Forget what was listed."""
        with self._lock:
            self._listings.clear()
            self._heads.clear()

    @functools.cached_property
    def _store(self) -> Any:
        try:
            import obstore.store as stores
        except ImportError:
            raise missing_extra(self.scheme, "obstore", "remote", self.url) from None
        retry: Any = {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=TIMEOUT),
            "backoff": {
                "init_backoff": timedelta(seconds=BACKOFF[0]),
                "max_backoff": timedelta(seconds=BACKOFF[1]),
                "base": 2,
            },
        }
        client: Any = {"timeout": timedelta(seconds=TIMEOUT), "connect_timeout": timedelta(seconds=10)}
        if self.scheme == "s3":
            settings = s3()
            client["allow_http"] = (settings.endpoint or "").startswith("http://")
            return stores.S3Store(self.name, client_options=client, retry_config=retry, **settings.obstore())
        if self.scheme == "gs":
            return stores.GCSStore(self.name, client_options=client, retry_config=retry)
        return stores.HTTPStore(self.url, client_options=client | {"allow_http": True}, retry_config=retry)

    def find(self, key: str) -> Entry | None:
        """Return an object as the listing of its directory has it; None where it has none."""
        if self.scheme.startswith("http"):
            with self._lock:
                if key in self._heads:
                    return self._heads[key]
            found = self.head(key)
            with self._lock:
                return self._heads.setdefault(key, found)
        folder, _, name = key.rpartition("/")
        return self._listing(folder)[1].get(name)

    def head(self, key: str) -> Entry | None:
        """Ask the store for an object; None where there is none.

        Raises:
            StoreError: the store refused, or did not answer.
        """
        try:
            return _entry(self._asked(key, lambda: self._store.head(key)))
        except FileNotFoundError:
            return None

    def is_directory(self, key: str) -> bool:
        """Whether objects lie below a name."""
        if self.scheme.startswith("http"):
            return self.find(key) is None and bool(self.names(key))
        folders, files = self._listing(key)
        return bool(folders or files)

    def names(self, key: str) -> list[str]:
        """Return the names in a directory."""
        below = f"{key}/" if key else ""
        if self.scheme.startswith("http"):
            names = [name for name in HTTP_NAMES if self.find(below + name) is not None]
            return names or [name for name in HTTP_FOLDERS if any(self.find(f"{below}{name}/{each}") for each in HTTP_NAMES[:1])]  # fmt: skip
        folders, files = self._listing(key)
        return sorted({*folders, *files})

    def _listing(self, key: str) -> tuple[set[str], dict[str, Entry]]:
        with self._lock:
            if key in self._listings:
                return self._listings[key]
        try:
            found = self._asked(key, lambda: self._store.list_with_delimiter(key or None))
        except FileNotFoundError as error:
            raise StoreError(
                "there is no such bucket, or these credentials do not see it",
                self.url,
                "correct the name of the bucket",
            ) from error
        folders = {prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"]}
        files = {meta["path"].rpartition("/")[2]: _entry(meta) for meta in found["objects"] if meta["path"] != key}
        with self._lock:
            return self._listings.setdefault(key, (folders, files))

    def read(self, key: str, start: int, stop: int, entry: Entry) -> memoryview:
        """Return a range of bytes of an object.

        Raises:
            StoreError: the object changed since it was listed; or the store refused, or did not answer.
        """
        options: Any = {"range": (start, stop)}
        if entry.etag and not entry.etag.startswith("W/"):
            options["if_match"] = entry.etag

        def ask() -> memoryview:
            got = memoryview(self._store.get(key, options=options).bytes())
            if len(got) != stop - start:
                raise ConnectionError(f"{len(got)} bytes came instead of {stop - start}")
            return got

        try:
            return self._asked(key, ask)
        except FileNotFoundError as error:
            raise _gone(f"{self.url}/{key}", "was removed") from error

    def _asked(self, key: str, ask: Callable[[], T]) -> T:
        """Ask; repeat what obstore does not repeat itself, such as a connection that was cut inside of an object."""
        _ = self._store  # says which package is missing
        import obstore.exceptions as refusals

        place = f"{self.url}/{key}"
        for attempt in range(RETRIES + 1):
            try:
                return ask()
            except FileNotFoundError:
                raise
            except refusals.PreconditionError:
                raise _gone(place, "has changed") from None
            except (refusals.NotSupportedError, NotImplementedError):
                problem = "the server does not answer requests for ranges of bytes"
                raise StoreError(problem, place, "copy the checkpoint to a disk or to a bucket") from None
            except (refusals.BaseError, ConnectionError) as error:
                if (known := refusal(str(error), place)) is not None:
                    raise known from None
                if attempt == RETRIES or re.search(r"retries: [1-9]", str(error)):  # obstore has repeated it
                    raise unavailable(str(error), place) from None
                time.sleep(min(BACKOFF[0] * 2**attempt, BACKOFF[1]))
        raise AssertionError("the last attempt returns or raises")

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """Return the TensorStore spec of a directory.

        Args:
            prefix: empty, or with a slash at its end.
        """
        if self.scheme == "gs":
            return {"driver": "gcs", "bucket": self.name, "path": prefix}
        if self.scheme.startswith("http"):
            return {"driver": "http", "base_url": self.url, "path": f"/{prefix}"}
        return {"driver": "s3", "bucket": self.name, "path": prefix, **s3().tensorstore()}


def context() -> dict[str, Any]:
    """Return how often TensorStore repeats a request, as resources of its context."""
    waits = {"max_retries": RETRIES, "initial_delay": f"{int(BACKOFF[0] * 1000)}ms", "max_delay": f"{int(BACKOFF[1])}s"}
    return {"s3_request_retries": waits, "gcs_request_retries": waits, "http_request_retries": waits}


@dataclass(frozen=True)
class S3:
    """Where requests to S3 go, and with which credentials.

    Attributes:
        endpoint: of the environment; None is AWS.
        region: of the environment or the profile.
        session: boto3's, which finds profiles, SSO and roles; None where the environment has the keys.
        known: whether there are credentials; without, requests are not signed, as public buckets need none.
    """

    endpoint: str | None
    region: str
    session: Any
    known: bool

    def obstore(self) -> dict[str, Any]:
        """Return the settings of obstore's store."""
        config: dict[str, Any] = {"region": self.region}
        if self.endpoint:
            config["endpoint"] = self.endpoint
        if not self.known:
            config["skip_signature"] = True
        elif self.session is not None:
            from obstore.auth.boto3 import Boto3CredentialProvider

            config["credential_provider"] = Boto3CredentialProvider(self.session)
        return config

    def tensorstore(self) -> dict[str, Any]:
        """Return the settings of TensorStore's driver, which looks for the credentials itself."""
        spec: dict[str, Any] = {"endpoint": self.endpoint, "aws_region": self.region} if self.endpoint else {}
        return {**spec, "aws_credentials": self._tensorstore_credentials()}

    def _tensorstore_credentials(self) -> dict[str, str]:
        if not self.known:
            return {"type": "anonymous"}
        if self.session is None:
            return {"type": "environment"}
        if self.session.get_credentials().method not in ("shared-credentials-file", "config-file"):
            return {"type": "default"}
        files = {
            "credentials_file": os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
            "config_file": os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
        }
        places = {name: str(Path(file).expanduser()) for name, file in files.items()}  # one of them may be missing
        return {"type": "profile", "profile": self.session.profile_name, **places}


def s3() -> S3:
    """Find the endpoint, the region and the credentials of S3."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    session, known = None, True
    if not (os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY")):
        try:
            from boto3 import Session
        except ImportError:
            raise missing_extra("s3", "boto3", "remote", "s3://") from None
        session = Session()
        region, known = region or session.region_name, session.get_credentials() is not None
    return S3(endpoint, region or "us-east-1", session, known)


def _entry(meta: Mapping[str, Any]) -> Entry:
    return Entry(meta["size"], meta.get("e_tag") or "", int(meta["last_modified"].timestamp() * 10**6) * 1000)


def _gone(place: str, what: str) -> StoreError:
    return StoreError(f"it {what} while it was read", place, "run again when nothing writes the checkpoint")


def refusal(text: str, place: str) -> StoreError | None:
    """Return the error for an answer that a repetition does not change; None for others."""
    status = re.search(r"status(?: code)?:? (\d{3})", text)
    code = re.search(r"<Code>(\w{1,60})</Code>", text)
    name = code[1] if code else ""
    if name == "NoSuchBucket":
        return StoreError("there is no such bucket", place, "correct the name of the bucket")
    if "Expired" in name or "ExpiredToken" in text:
        return StoreError(
            f"the credentials have expired ({name or 'ExpiredToken'})", place, "get new credentials, and run again"
        )
    number = int(status[1]) if status else 0
    if number in (401, 403) or "Unauthenticated" in text[:40]:
        why = f"{number}{f', {name}' if name else ''}" if number else "no credentials"
        fix = "give credentials that may do this; docs/guides/object-stores.md says where they are looked for"
        return StoreError(f"the store refused the credentials ({why})", place, fix)
    if 400 <= number < 500 and number not in (408, 429):
        return StoreError(
            f"the store refused the request ({number}{f', {name}' if name else ''})",
            place,
            "check the URL and the region",
        )
    return None


def unavailable(text: str, place: str) -> StoreError:
    """Return the error for a store that did not answer."""
    status = re.search(r"status(?: code)?:? (\d{3})", text)
    why = f"the last answer was {status[1]}" if status else reason(text)
    return StoreError(f"the store did not answer, also when asked again ({why})", place, "run again later, or check the network")  # fmt: skip


def reason(text: str) -> str:
    """Return the last cause in the text of a library's error, in one line and without credentials."""
    text = text.partition("\n\nDebug source")[0]
    text = re.sub(r"\s+", " ", text.rpartition(" - ")[2] or text)
    text = re.sub(r"(?i)(x-amz-[a-z-]+|signature|token|authorization)[=:]\s*\S+", r"\1=...", text)
    for name in _SECRETS:
        if len(secret := os.environ.get(name, "")) > 3:
            text = text.replace(secret, "...")
    return text[:200]
