"""Write objects to S3 and Google Cloud Storage.

A part is sent when it is complete, in any order; the object appears with the last request.

obstore sends the parts of an object in their order alone. The header of a safetensors file comes first and is known last, so that
boto3 sends the parts here. Google has the same interface for uploads in parts (its XML API), and takes its own tokens for it.
"""

from __future__ import annotations

import errno
import io
import os
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from convert.stores import amazon, client, google
from convert.stores.entry import Entry
from convert.stores.errors import StoreError, missing_extra, refusal, unavailable
from convert.stores.path import StorePath

T = TypeVar("T")
PART = 8 << 20  # bytes; S3 takes from 5 MiB, and at most 10,000 parts
_MOST_PARTS = 9_000
_THREADS = 4
_BLOCK = 1 << 17  # bytes; what boto3 sends at once
_NOT_THERE = "(404"  # in the text of an error: NoSuchUpload or NoSuchKey; that there is no bucket is another text


class Uploads:
    """The objects of one output. Nothing is visible before `publish`.

    Attributes:
        out: the URL of the output.
    """

    def __init__(self, out: StorePath) -> None:
        self.out = out
        self._bucket = out.bucket.name
        self._client = _client(out)
        self._started: dict[str, str] = {}  # key -> id of its multipart upload
        self._before: dict[str, Entry | None] = {}  # what was there when the upload began
        self._published: list[str] = []
        self._doubtful: set[str] = set()  # keys of which an upload may have begun whose answer was lost
        self._others = self._unfinished()  # of other runs
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="convert-upload")
        self._turn = threading.Semaphore(2 * _THREADS)
        self._failed: list[BaseException] = []

    def part_size(self, size: int) -> int:
        """Return the bytes of each part but the last of an object of `size` bytes."""
        return max(PART, -(-size // _MOST_PARTS // PART) * PART)

    def start(self, path: StorePath) -> str:
        """Begin a multipart upload; return its id.

        Raises:
            StoreError: the store refused, or did not answer.
        """
        kind = "application/octet-stream"
        self._before[path.key] = path.bucket.head(path.key)
        self._doubtful.add(path.key)
        answer = self._ask(path, lambda: self._client.create_multipart_upload(Bucket=self._bucket, Key=path.key, ContentType=kind))  # fmt: skip
        self._started[path.key] = answer["UploadId"]
        if not answer["ResponseMetadata"].get("RetryAttempts"):
            self._doubtful.discard(path.key)
        return self._started[path.key]

    def resume(self, path: StorePath, upload: str) -> dict[int, tuple[int, str]] | None:
        """Continue an upload of an earlier run: return size and ETag of each part that is there, by number; None where it has ended.

        Raises:
            StoreError: the store refused, or did not answer.
        """
        found, last, more = dict[int, tuple[int, str]](), 0, True
        while more:
            try:
                answer = self._ask(path, lambda after=last: self._client.list_parts(Bucket=self._bucket, Key=path.key, UploadId=upload, PartNumberMarker=after))  # type: ignore[misc]  # fmt: skip
            except StoreError as error:
                if _NOT_THERE in str(error):
                    return None
                raise
            found |= {part["PartNumber"]: (part["Size"], part["ETag"]) for part in answer.get("Parts", [])}
            last, more = answer.get("NextPartNumberMarker", 0), bool(answer.get("IsTruncated"))
        self._before[path.key] = path.bucket.head(path.key)
        self._started[path.key] = upload
        return found

    def join(self, path: StorePath, upload: str) -> None:
        """Send parts of an upload that another process has begun, and that it completes or aborts."""
        self._started[path.key] = upload

    def id_of(self, path: StorePath) -> str:
        """Return the id of an upload that was begun or continued; empty where there is none."""
        return self._started.get(path.key, "")

    def send(self, path: StorePath, number: int, content: memoryview, sent: Callable[[str], None]) -> Future[str]:
        """Send a part in a thread; wait where many are on their way.

        Args:
            number: of the part, from 1.
            content: its bytes, of which no copy is made.
            sent: called afterwards, with its ETag.

        Raises:
            StoreError: an earlier part could not be sent.
        """
        upload = self._started[path.key]

        def work() -> str:
            answer = self._ask(path, lambda: self._client.upload_part(Bucket=self._bucket, Key=path.key, UploadId=upload, PartNumber=number, Body=_Body(content)))  # fmt: skip
            sent(etag := str(answer["ETag"]))
            return etag

        return self.later(work)

    def later(self, work: Callable[[], T]) -> Future[T]:
        """Do something in a thread that sends parts; wait where many are on their way.

        Raises:
            StoreError: an earlier part could not be sent.
        """
        self._turn.acquire()
        if self._failed:
            self._turn.release()
            raise self._failed[0]

        def done() -> T:
            try:
                return work()
            except BaseException as error:
                self._failed.append(error)
                raise
            finally:
                self._turn.release()

        return self._threads.submit(done)

    def complete(self, path: StorePath, parts: Iterable[tuple[int, str]]) -> str:
        """Let the object of a multipart upload appear; return its ETag.

        Raises:
            StoreError: the store refused, or did not answer.
        """
        listed = {"Parts": [{"PartNumber": number, "ETag": etag} for number, etag in parts]}
        upload = self._started[path.key]
        try:
            answer = self._ask(path, lambda: self._client.complete_multipart_upload(Bucket=self._bucket, Key=path.key, UploadId=upload, MultipartUpload=listed))  # fmt: skip
        except StoreError:
            if not self._has_appeared(path, upload):
                raise
            answer = {}
        del self._started[path.key]
        self._published.append(path.key)
        return str(answer.get("ETag", "")).strip('"')

    def _has_appeared(self, path: StorePath, upload: str) -> bool:
        """Whether the object is there, although the answer to `complete` was lost: the upload has ended, and there is a new object."""
        ask = self._client.list_parts
        try:
            self._ask(path, lambda: ask(Bucket=self._bucket, Key=path.key, UploadId=upload))
        except StoreError as error:
            if _NOT_THERE in str(error):
                with suppress(StoreError):
                    return path.bucket.head(path.key) not in (None, self._before[path.key])
        return False

    def put(self, path: StorePath, content: bytes) -> None:
        """Write a small object in one request.

        Raises:
            StoreError: the store refused, or did not answer.
        """
        self._published.append(path.key)  # also where the answer is lost
        self.write(path, memoryview(content))

    def write(self, path: StorePath, content: memoryview) -> None:
        """Write a small object that does not belong to the output.

        Raises:
            StoreError: the store refused, or did not answer.
        """
        self._ask(path, lambda: self._client.put_object(Bucket=self._bucket, Key=path.key, Body=_Body(content)))

    def remove(self, path: StorePath) -> None:
        """Remove an object, if there is one.

        Raises:
            StoreError: the store refused, or did not answer.
        """
        try:
            self._ask(path, lambda: self._client.delete_object(Bucket=self._bucket, Key=path.key))
        except StoreError as error:
            if _NOT_THERE not in str(error):  # of Google; S3 says nothing
                raise

    def finished(self) -> list[str]:
        """End: what was published stays. Return the keys of lost uploads that stay."""
        self._published.clear()
        self._threads.shutdown()
        return self._sweep()

    def leave(self) -> list[str]:
        """End: what was sent and what was published stays for another run. Return the keys of lost uploads that stay."""
        self._failed.append(StoreError("the run ends", str(self.out), ""))
        self._threads.shutdown(cancel_futures=True)
        return self._sweep()

    def abort(self) -> list[str]:
        """Remove what was sent and what was published. Return the keys of which something could not be removed."""
        left = self.leave()
        for key, upload in list(self._started.items()):
            if self._tried(self._client.abort_multipart_upload, Key=key, UploadId=upload):
                del self._started[key]
            else:
                left.append(key)
        for key in list(self._published):
            if self._tried(self._client.delete_object, Key=key):
                self._published.remove(key)
            else:
                left.append(key)
        return left

    def _sweep(self) -> list[str]:
        """Abort uploads that began without this run learning their id. Return the keys where that was not possible."""
        now = self._unfinished() if self._doubtful else set()
        if now is None or self._others is None:
            left = sorted(self._doubtful)
        else:
            lost = {(key, upload) for key, upload in now - self._others if key in self._doubtful}
            lost -= set(self._started.items())
            left = [key for key, upload in sorted(lost) if not self._tried(self._client.abort_multipart_upload, Key=key, UploadId=upload)]  # fmt: skip
        self._doubtful.clear()
        return left

    def forget(self, path: StorePath, upload: str) -> None:
        """Abort an upload of another run.

        Raises:
            StoreError: the store refused.
        """
        if not self._tried(self._client.abort_multipart_upload, Key=path.key, UploadId=upload):
            fix = "abort the multipart uploads of this key, or let a rule of the bucket do it"
            raise StoreError("what a killed run left cannot be removed", str(path), fix)

    def abort_others(self, paths: Iterable[StorePath], but: Collection[str] = ()) -> None:
        """Abort the uploads of these objects that a killed run left.

        Args:
            but: ids of uploads that this run continues.

        Raises:
            StoreError: the store refused.
        """
        of = {path.key: path for path in paths}
        for key, upload in sorted(self._others or ()):
            if key in of and upload not in but:
                self.forget(of[key], upload)

    def _unfinished(self) -> set[tuple[str, str]] | None:
        """Return key and id of the uploads below the output that are not complete; None where the store does not list them."""
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=self.out.key)
        try:
            found = self._ask(self.out, lambda: [upload for page in pages for upload in page.get("Uploads", [])])
        except OSError:
            return None
        return {(upload["Key"], upload["UploadId"]) for upload in found}

    def _tried(self, ask: Callable[..., Any], **arguments: str) -> bool:
        """Whether something was removed, or was not there."""
        try:
            self._ask(self.out, lambda: ask(Bucket=self._bucket, **arguments))
        except OSError as error:
            return _NOT_THERE in str(error)
        return True

    def _ask(self, path: StorePath, ask: Callable[[], T]) -> T:
        """Ask; botocore repeats it. Its errors become those of a store, without its text, which may hold a credential."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return ask()
        except ClientError as error:
            answer: Any = error.response
            code = answer.get("Error", {}).get("Code", "")
            text = f"status {answer.get('ResponseMetadata', {}).get('HTTPStatusCode', 0)} <Code>{code}</Code>"
            raise refusal(text, str(path)) or unavailable(text, str(path)) from None
        except BotoCoreError as error:
            if type(error).__name__ in ("NoCredentialsError", "TokenRetrievalError", "UnauthorizedSSOTokenError"):
                raise refusal("Unauthenticated", str(path)) from None  # type: ignore[misc]
            raise unavailable(type(error).__name__, str(path)) from None


class _Body(io.RawIOBase):
    """Bytes as a file, of which boto3 reads a block at a time: a part is never in memory as a whole."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._at = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._content)}[whence]
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """Return at most a block: to sum a part up, boto3 asks for 1 MiB in each thread."""
        if size < 0:
            return self.readall()
        block = bytes(self._content[self._at : self._at + min(size, _BLOCK)])
        self._at += len(block)
        return block


def write_object(path: StorePath, content: bytes) -> None:
    """Write or replace one small object.

    Raises:
        StoreError: the store refused, or did not answer.
    """
    uploads = Uploads(path)
    uploads.put(path, content)
    uploads.finished()
    path.bucket.forget()


def check_destination(out: StorePath) -> None:
    """Check that a URL can be written.

    Raises:
        StoreError: it is on a web server or the Hub, or a bucket.
    """
    if (scheme := out.bucket.scheme) not in ("s3", "gs"):
        fix = "write to a disk, with --push owner/name" if scheme == "hf" else "write to s3://, gs:// or a disk"
        raise StoreError(f"{scheme}:// is read, not written", str(out), fix)
    if not out.key:
        raise IsADirectoryError(errno.EISDIR, "it is a bucket; give a name in it", str(out))


def _client(out: StorePath) -> Any:
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
    except ImportError:
        raise missing_extra(out.bucket.scheme, "boto3", "remote", str(out)) from None
    config: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": client.RETRIES + 1},
        "connect_timeout": 10,
        "read_timeout": client.TIMEOUT,
        "max_pool_connections": 2 * _THREADS,
    }
    if out.bucket.scheme == "gs":
        place = google.google()
        unlike_s3 = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
        config |= {"signature_version": UNSIGNED, "s3": {"addressing_style": "path"}, **unlike_s3}
        session = boto3.Session(aws_access_key_id="", aws_secret_access_key="")
        made = session.client("s3", region_name="auto", endpoint_url=place.endpoint, config=Config(**config))
        if place.credentials is not None:
            made.meta.events.register("before-send.s3", lambda request, **_: request.headers.__setitem__("Authorization", f"Bearer {place.token()}"))  # fmt: skip
        return made
    settings = amazon.s3()
    if settings.endpoint:
        config["s3"] = {"addressing_style": "path"}
    if not settings.known:
        config["signature_version"] = UNSIGNED
    session = settings.session or boto3.Session()
    return session.client("s3", region_name=settings.region, endpoint_url=settings.endpoint, config=Config(**config))


def scratch(size: int) -> int:
    """Return the descriptor of a new sparse file without a name, which goes with the process. It lies in ``TMPDIR``.

    Raises:
        OSError: there is no such directory.
    """
    with tempfile.TemporaryFile(prefix="convert-") as file:
        file.truncate(size)
        return os.dup(file.fileno())
