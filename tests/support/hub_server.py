"""The few requests of the Hugging Face Hub that huggingface_hub needs, on loopback: commits, files, large files."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from support.object_store import App, ObjectStore, listening, with_faults

HF_TOKEN = "hf_very_secret_token_of_a_test"
_LARGE = (".safetensors", ".msgpack")


@dataclass
class Repo:
    """A repository.

    Attributes:
        commits: files of each, by hash; the last one is main's.
        private: seen with the token alone.
        gated: its files are seen by nobody.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[sha] = files
        return sha

    @property
    def main(self) -> dict[str, bytes]:
        return list(self.commits.values())[-1]


@dataclass
class Hub(ObjectStore):
    """The server. `requests`, `faults` and `failing` are those of `ObjectStore`.

    Attributes:
        repos: by name.
        large: large files that were uploaded, by SHA-256.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)

    def upload(self, name: str, path: Path) -> Repo:
        """Make a repository of a file or of all files of a directory."""
        files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        repo = self.repos[name] = Repo()
        repo.commit(files or {path.name: path.read_bytes()})
        return repo


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Run the server in a thread of this process."""
    with listening() as (url, apps):
        hub = Hub(url, None)
        apps.append(with_faults(_app(hub), hub))
        yield hub


def _app(hub: Hub) -> App:
    def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)) if method in ("POST", "PUT") else b""
        if environ.get("wsgi.input_terminated") and "CONTENT_LENGTH" not in environ:
            body = environ["wsgi.input"].read()
        status, headers, content = _answer(hub, method, path, body, environ)
        start(f"{status} X", [*headers.items(), ("Content-Length", str(len(content)))])
        return [content if method != "HEAD" else b""]

    return app


Answer = tuple[int, dict[str, str], bytes]


def _json(content: Any, status: int = 200) -> Answer:
    return status, {"Content-Type": "application/json"}, json.dumps(content).encode()


def _error(status: int, code: str) -> Answer:
    return status, {"X-Error-Code": code, "X-Error-Message": code}, b""


def _answer(hub: Hub, method: str, path: str, body: bytes, environ: dict[str, Any]) -> Answer:
    known = environ.get("HTTP_AUTHORIZATION") == f"Bearer {HF_TOKEN}"
    if path == "/api/whoami-v2":
        return _json({"name": "me", "type": "user"}) if known else (401, {}, b"")
    if path == "/api/repos/create":
        if not known:
            return 401, {}, b""
        asked = json.loads(body)
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if name in hub.repos:
            return _json({"url": f"{hub.url}/{name}"}, 409)
        hub.repos[name] = Repo(private=asked.get("visibility") == "private")
        hub.repos[name].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        return _json({"url": f"{hub.url}/{name}", "name": name})
    if path == "/api/validate-yaml":
        return _json({"errors": [], "warnings": []})
    if path.startswith("/large/"):
        hub.large[path.removeprefix("/large/")] = body
        return 200, {}, b""
    parts = path.removeprefix("/api/models").strip("/").split("/")
    name = f"{parts[0]}/{parts[1].removesuffix('.git')}" if len(parts) > 1 else ""
    repo = hub.repos.get(name)
    if repo is None or (repo.private and not known):
        return _error(401 if not known else 404, "RepoNotFound")
    if method in ("POST", "PUT") and not known:
        return 401, {}, b""
    kind, rest = parts[2] if len(parts) > 2 else "revision", parts[3:] or ["main"]
    if kind == "info":
        objects = [{"oid": each["oid"], "size": each["size"], "actions": {"upload": {"href": f"{hub.url}/large/{each['oid']}"}}} for each in json.loads(body)["objects"]]  # fmt: skip
        return _json({"transfer": "basic", "objects": objects})
    if kind == "preupload":
        files = [{"path": each["path"], "uploadMode": "lfs" if each["path"].endswith(_LARGE) else "regular", "shouldIgnore": False} for each in json.loads(body)["files"]]  # fmt: skip
        return _json({"files": files})
    if kind == "commit":
        if json.loads(body.splitlines()[0])["value"].get("parentCommit") != list(repo.commits)[-1]:
            return 412, {}, b""
        sha = repo.commit(_changed(hub, dict(repo.main), body))
        return _json({"success": True, "commitOid": sha, "commitUrl": f"{hub.url}/{name}/commit/{sha}"})
    revision = unquote(rest[0])
    sha = list(repo.commits)[-1] if revision == "main" else revision
    if sha not in repo.commits:
        return _error(404, "RevisionNotFound")
    files = repo.commits[sha]
    if kind == "revision":
        return _json({"id": name, "sha": sha, "siblings": [], "private": repo.private, "tags": []})
    if kind == "tree":
        return _json([_listed(key, content) for key, content in sorted(files.items())])
    assert kind == "resolve", path
    if repo.gated:
        return _error(403, "GatedRepo")
    content = files.get("/".join(rest[1:]))
    if content is None:
        return _error(404, "EntryNotFound")
    entry = _listed("/".join(rest[1:]), content)
    headers = {"X-Repo-Commit": sha, "ETag": f'"{entry.get("lfs", entry)["oid"]}"', "Accept-Ranges": "bytes"}
    if asked := environ.get("HTTP_RANGE", "").removeprefix("bytes="):
        first, _, last = asked.partition("-")
        begin, end = int(first), min(int(last or len(content)) + 1, len(content))
        return 206, headers | {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}, content[begin:end]
    return 200, headers, content


def _listed(key: str, content: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": key, "size": len(content), "oid": git}
    if key.endswith(_LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


def _changed(hub: Hub, files: dict[str, bytes], body: bytes) -> dict[str, bytes]:
    for line in body.splitlines():
        operation = json.loads(line)
        value = operation["value"]
        if operation["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif operation["key"] == "lfsFile":
            files[value["path"]] = hub.large[value["oid"]]
        elif operation["key"] == "deletedFile":
            del files[value["path"]]
    return files
