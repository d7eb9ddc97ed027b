"""What is asked of a store: list, size, ranges of bytes. obstore asks, with retries; TensorStore gets the same place (`kvstore`).

The credentials are those of the environment and of AWS's files; none are options, and none appear in an error.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from convert.stores import amazon, google, hub
from convert.stores.entry import Entry
from convert.stores.errors import StoreError, gone, missing_extra, refusal, unavailable

T = TypeVar("T")
RETRIES = 6
BACKOFF = 0.1, 5.0  # seconds before the first retry, and the most
TIMEOUT = 60  # seconds of one request
# A web server has no listing. These names are looked for instead: what the readers of the formats look for.
HTTP_NAMES = (
    "_METADATA", "_CHECKPOINT_METADATA", "_sharding", "checkpoint", "commit_success.txt", "config.json", "diffusion_flax_model.msgpack",
    "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json", "flax_model.msgpack",
    "flax_model.msgpack.index.json", "generation_config.json", "manifest.ocdbt", "model.safetensors", "model.safetensors.index.json",
)  # fmt: skip
HTTP_FOLDERS = ("default", "params", "state")


@functools.cache
def bucket(scheme: str, name: str) -> Bucket | hub.Repository:
    """Return the bucket, server or repository, the same one for the whole process."""
    return hub.Repository(name) if scheme == "hf" else Bucket(scheme, name)


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
            settings = amazon.s3()
            client["allow_http"] = (settings.endpoint or "").startswith("http://")
            return stores.S3Store(self.name, client_options=client, retry_config=retry, **settings.obstore())
        if self.scheme == "gs":
            place = google.google()
            client["allow_http"] = place.endpoint.startswith("http://")
            return stores.GCSStore(self.name, client_options=client, retry_config=retry, **place.obstore())
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
        folder, _, name = key.rpartition("/")
        with self._lock:
            above = self._listings.get(folder) if key else None
        if above is not None:  # no request for each of thousands of objects
            return name in above[0]
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
            options["if_match"] = f'"{entry.etag}"'

        def ask() -> memoryview:
            got = memoryview(self._store.get(key, options=options).bytes())
            if len(got) != stop - start:
                raise ConnectionError(f"{len(got)} bytes came instead of {stop - start}")
            return got

        try:
            return self._asked(key, ask)
        except FileNotFoundError as error:
            raise gone(f"{self.url}/{key}", "was removed") from error

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
                raise gone(place, "has changed") from None
            except (refusals.NotSupportedError, NotImplementedError):
                problem = "the server does not answer requests for ranges of bytes"
                raise StoreError(problem, place, "copy the checkpoint to a disk or to a bucket") from None
            except (refusals.BaseError, ConnectionError, ValueError) as error:
                if (known := refusal(str(error), place)) is not None:
                    raise known from None
                if isinstance(error, ValueError):
                    raise
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
            _ = self._store  # finds an emulator
            return {"driver": "gcs", "bucket": self.name, "path": prefix}
        if self.scheme.startswith("http"):
            return {"driver": "http", "base_url": self.url, "path": f"/{prefix}"}
        return {"driver": "s3", "bucket": self.name, "path": prefix, **amazon.s3().tensorstore()}


def context() -> dict[str, Any]:
    """Return how often TensorStore repeats a request, as resources of its context."""
    waits = {"max_retries": RETRIES, "initial_delay": f"{int(BACKOFF[0] * 1000)}ms", "max_delay": f"{int(BACKOFF[1])}s"}
    return {"s3_request_retries": waits, "gcs_request_retries": waits, "http_request_retries": waits}


def _entry(meta: Mapping[str, Any]) -> Entry:
    """Return a listed object as one that was asked for: a listing may lack quotes, and have parts of seconds."""
    return Entry(meta["size"], (meta.get("e_tag") or "").strip('"'), int(meta["last_modified"].timestamp()) * 10**9)
