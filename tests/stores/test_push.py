"""--push: the files of the output in one commit, and nothing of them before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from convert.stores.errors import StoreError
from convert.stores.publish import find_target, push
from support.command_line import Run
from support.hub_server import HF_TOKEN, Hub
from support.object_store import Fault
from support.small_conversion import write_checkpoint, write_rules

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"
)  # how huggingface_hub calls its own HTTP library


@pytest.fixture
def small(tmp_path: Path) -> tuple[str, Path]:
    return str(write_rules(tmp_path)), write_checkpoint(tmp_path / "small.npz")


def local_files(out: Path) -> dict[str, bytes]:
    return {file.relative_to(out).as_posix(): file.read_bytes() for file in out.rglob("*") if file.is_file()}


def test_the_commit_has_the_files_of_the_output(hub: Hub, small: tuple[str, Path], tmp_path: Path, run: Run) -> None:
    out, err = run(*small, tmp_path / "out", "--max-shard-size", "40", "--push", "org/name", "--private")
    repo = hub.repos["org/name"]
    files = {name: content for name, content in repo.main.items() if name != ".gitattributes"}
    assert files == local_files(tmp_path / "out") and len(files) > 3
    assert repo.private and len(repo.commits) == 2  # the first is of the new repository
    assert f"pushed to {hub.url}/org/name/commit/" in err and HF_TOKEN not in out + err
    batches = [path for method, path, _ in hub.requests if path.endswith("/objects/batch")]
    assert len(batches) == sum(name.endswith(".safetensors") for name in files)  # each shard by itself
    assert "intact" in run("verify", "hf://org/name")[0]


def test_of_an_older_model_nothing_stays_and_other_files_do(hub: Hub, small: tuple[str, Path], tmp_path: Path, run: Run) -> None:  # fmt: skip
    (tmp_path / "old").mkdir()
    for name in ("model-00001-of-00009.safetensors", "model.safetensors.index.json", "notes.txt"):
        (tmp_path / "old" / name).write_text("old")
    repo = hub.upload("org/name", tmp_path / "old")
    run(*small, tmp_path / "out", "--push", "hf://org/name")
    assert repo.main == local_files(tmp_path / "out") | {"notes.txt": b"old"}
    assert not repo.private and len(repo.commits) == 2


@pytest.mark.parametrize("where", ["/preupload/", "/objects/batch", "/large/", "/commit/"])
@pytest.mark.parametrize(("status", "expected"), [(403, "refused the credentials (403)"), pytest.param(500, "did not answer", marks=pytest.mark.slow)])  # fmt: skip
def test_after_an_error_the_repository_is_as_it_was_and_a_second_run_pushes(
    where: str, status: int, expected: str, hub: Hub, small: tuple[str, Path], tmp_path: Path, run: Run
) -> None:
    repo = hub.upload("org/name", small[1])
    with hub.failing(Fault(lambda method, path, query: method in ("POST", "PUT") and where in path, status)):
        _, err = run(*small, tmp_path / "out", "--push", "org/name", code=2)
    assert expected in err and "hf://org/name" in err and HF_TOKEN not in err
    assert list(repo.main) == ["small.npz"]
    run(*small, tmp_path / "out", "--resume", "--push", "org/name")  # the output is kept, and pushed
    assert repo.main == local_files(tmp_path / "out") | {"small.npz": small[1].read_bytes()}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--push", "name"], "expected hf://owner/name"),
        (["--push", "org/name/more"], "this is no name of a repository"),
        (["--push", "org/name@v2"], "there is no such branch, tag or commit"),
        (["--push", "org/new@v2"], "there is no such repository, or this account does not see it"),
        (["--private"], "--private is for a repository of --push"),
        (["--push", "org/name", "--dry-run"], "--push does not go with --dry-run"),
        (["--push", "org/name", "--adapter", "peft"], "--push does not go with the way back and adapters"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_read(
    arguments: list[str], expected: str, hub: Hub, small: tuple[str, Path], tmp_path: Path, run: Run
) -> None:
    hub.upload("org/name", small[1])
    _, err = run(*small, tmp_path / "out", *arguments, code=2)
    assert expected in err and not (tmp_path / "out").exists()
    _, err = run(*small, "hf://org/name", code=2)
    assert "is read, not written; write to a disk, with --push owner/name" in err
    _, err = run(*small, tmp_path / "out.safetensors", "--push", "org/name", code=2)
    assert "no directory of this machine" in err


@pytest.mark.parametrize("token", ["", "hf_another"])
def test_without_a_token_nothing_is_read(token: str, hub: Hub, small: tuple[str, Path], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    _, err = run(*small, tmp_path / "out", "--push", "org/name", code=2)
    assert ("refused the credentials (401)" if token else "there is no token; set HF_TOKEN") in err
    assert not (tmp_path / "out").exists() and "another" not in err


def test_another_commit_meanwhile_is_not_overwritten(hub: Hub, small: tuple[str, Path], tmp_path: Path, run: Run) -> None:  # fmt: skip
    repo = hub.upload("org/name", small[1])
    target = find_target("org/name")
    repo.commit({"theirs.txt": b"new"})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"ours")
    with pytest.raises(StoreError, match="refused the request .412"):
        list(push(tmp_path / "out", target, False, lambda _: True))
    assert repo.main == {"theirs.txt": b"new"}
