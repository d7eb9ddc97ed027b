"""An S3 server (moto's) and a web server on loopback, which fail where a test says so."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

SECRET, KEY_ID, TOKEN = "wJalrXUtnFEMI-very-secret", "AKIALOOPBACKTEST", "session-token-very-secret"
XML = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message><AWSAccessKeyId>{key}</AWSAccessKeyId></Error>'


@dataclass
class Fault:
    """What becomes of some requests.

    Attributes:
        matches: method, path and query of a request -> whether it fails.
        status: the answer; 0 cuts the connection in the middle of the answer to a GET, and before that to another request, which
            was carried out; -1 cuts it before the request is carried out.
        code: of the XML.
        times: how many requests fail; None is all.
        answer: what becomes of them instead: the application, the request and `start_response` -> the body.
    """

    matches: Callable[[str, str, str], bool]
    status: int
    code: str = ""
    times: int | None = None
    answer: Callable[[Any, dict[str, Any], Any], Iterable[bytes]] | None = None


@dataclass
class ObjectStore:
    """The server.

    Attributes:
        url: of the server.
        client: boto3's client for it, to look and to prepare.
        requests: (method, path, query) of each, since `clear`.
        faults: that are active.
    """

    scheme: ClassVar[str] = "s3"

    url: str
    client: Any
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def bucket(self, name: str) -> str:
        self.client.create_bucket(Bucket=name)
        return name

    def put(self, bucket: str, key: str, path: Path) -> str:
        """Upload a file, or all files of a directory; return the URL."""
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                below = "" if file == path else f"/{file.relative_to(path)}"
                self.put_bytes(bucket, key + below, file.read_bytes())
        return f"{self.scheme}://{bucket}/{key}"

    def put_bytes(self, bucket: str, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=bucket, Key=key, Body=content)

    def get(self, bucket: str, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return sorted(entry["Key"] for page in pages for entry in page.get("Contents", []))

    def delete(self, bucket: str, key: str) -> None:
        self.client.delete_object(Bucket=bucket, Key=key)

    def unfinished(self, bucket: str) -> list[str]:
        """Keys of multipart uploads that were neither completed nor aborted."""
        return [each["Key"] for each in self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]

    @contextmanager
    def failing(self, *faults: Fault) -> Iterator[None]:
        self.faults[:] = faults
        try:
            yield
        finally:
            self.faults.clear()


@contextmanager
def serve() -> Iterator[ObjectStore]:
    """Run the server in a thread of this process."""
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app

    with listening() as (url, apps):
        credentials = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=url, **credentials)
        client.meta.events.register("before-send.s3", lambda request, **_: request.headers.__setitem__("X-Test", "1"))
        store = ObjectStore(url, client)
        apps.append(with_faults(DomainDispatcherApplication(create_backend_app), store))
        yield store


App = Callable[[dict[str, Any], Any], Iterable[bytes]]


def with_faults(inner: App, store: ObjectStore) -> App:
    """An application that records its requests, and fails where the store says so."""

    def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        method, path, query = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        if environ.get("HTTP_X_TEST") != "1":
            store.requests.append((method, path, query))
            for fault in store.faults:
                if fault.times != 0 and fault.matches(method, path, query):
                    if fault.times is not None:
                        fault.times -= 1
                    if fault.answer is not None:
                        return fault.answer(inner, environ, start)
                    if method in ("PUT", "POST") and fault.status <= 0:
                        if not fault.status:
                            b"".join(inner(environ, lambda *_: lambda _: None))
                        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                        raise ConnectionAbortedError("cut")
                    if fault.status <= 0:
                        return _cut(inner(environ, start))
                    text = XML.format(code=fault.code, message="no", key=KEY_ID).encode()
                    if length := int(environ.get("CONTENT_LENGTH") or 0):
                        environ["wsgi.input"].read(length)
                    start(
                        f"{fault.status} X", [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))]
                    )
                    return [text if method != "HEAD" else b""]
        return inner(environ, start)

    return app


@contextmanager
def listening() -> Iterator[tuple[str, list[App]]]:
    """Serve on loopback: the URL, and a list that takes the application."""
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    apps: list[App] = []
    server = make_server("127.0.0.1", 0, lambda environ, start: apps[0](environ, start), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", apps
    finally:
        server.shutdown()
        server.server_close()


def _cut(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Half of an answer; then the server closes the connection."""
    whole = b"".join(parts)
    yield whole[: len(whole) // 2]
    raise ConnectionAbortedError("cut")


def credentials(store: ObjectStore) -> mock._patch_dict:
    """The environment of a user of the server."""
    return mock.patch.dict(
        "os.environ",
        {
            "AWS_ENDPOINT_URL": store.url,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_SESSION_TOKEN": TOKEN,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        },
    )


@contextmanager
def serve_folder(folder: Path, ranges: bool = True) -> Iterator[str]:
    """Run a web server of a folder: no listings; ranges of bytes unless told otherwise."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from urllib.parse import unquote

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            file = folder / unquote(self.path).lstrip("/")
            content = file.read_bytes() if file.is_file() else b""
            size, status, asked = len(content), 200 if file.is_file() else 404, self.headers.get("Range", "")
            headers = {"Last-Modified": "Mon, 02 Nov 2026 10:00:00 GMT", "ETag": f'"{size}"'} if file.is_file() else {}
            if ranges and status == 200 and asked.startswith("bytes="):
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start, stop = int(first), min(int(last or size) + 1, size)
                content, status = content[start:stop], 206
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
