"""A repository of the Hugging Face Hub is read as a directory of a disk, and each refusal is one clear error."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import convert
from convert.checkpoints import open_source
from convert.core.system.regular_file import open_regular
from convert.stores import client, located
from support import store_contract, writers
from support.command_line import Run
from support.hub_server import HF_TOKEN, Hub
from support.object_store import Fault
from support.paths import EXAMPLES, GOLDEN
from support.source_contract import same
from support.store_contract import assert_same

ORBAX = GOLDEN / "orbax-0.5"
TIMESFM = EXAMPLES / "checkpoints" / "timesfm-2.5"


def refused(url: str) -> str:
    return store_contract.refused(url, HF_TOKEN)


def downloads(hub: Hub) -> set[str]:
    return {path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path}


@pytest.mark.parametrize("path", [ORBAX / "ocdbt", ORBAX / "leaf-directories", pytest.param(ORBAX / "zarr3", marks=pytest.mark.slow)], ids=lambda path: path.name)  # fmt: skip
def test_an_orbax_tree_is_read_bit_for_bit(path: Path, hub: Hub) -> None:
    hub.upload("org/name", path)
    assert_same("hf://org/name", path)


def test_what_is_not_read_is_not_downloaded_and_the_cache_is_used_again(hub: Hub, tmp_path: Path) -> None:
    path = writers.safetensors_shards(tmp_path / "shards", writers.plain())
    (path / "pytorch_model.bin").write_bytes(b"x" * 1000)
    (path / "below").mkdir()
    (path / "below" / "model.safetensors").write_bytes(writers.safetensors(tmp_path / "b.safetensors", writers.plain()).read_bytes())  # fmt: skip
    repo = hub.upload("org/name", path)
    sha = next(iter(repo.commits))
    assert_same("hf://org/name/below", path / "below")
    assert downloads(hub) == {"model.safetensors"}
    assert_same(f"hf://org/name@{sha}", path)
    assert "pytorch_model.bin" not in downloads(hub) and len(downloads(hub)) > 3
    hub.requests.clear()
    assert_same("hf://org/name", path)
    assert downloads(hub) == set()
    repo.commit({"other.txt": b""})
    assert_same(f"hf://org/name@{sha}", path)  # the older commit
    assert "hf://org/name" in refused("hf://org/name")


@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_offline_the_cache_is_read(form: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orbax = form == "orbax"
    path = ORBAX / "ocdbt" if orbax else writers.safetensors(tmp_path / "model.safetensors", writers.plain())
    url = "hf://org/name" if orbax else "hf://org/name/model.safetensors"
    hub.upload("org/name", path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, and the cache has nothing of this revision" in refused("hf://org/name")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert_same(url, path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert_same(url, path)
    assert hub.requests == []


def test_a_commit_while_it_is_read_is_noticed(hub: Hub, tmp_path: Path) -> None:
    path = writers.safetensors_shards(tmp_path / "shards", writers.plain())
    repo = hub.upload("org/name", path)
    listed = located("hf://org/name")
    assert [child.name for child in listed.iterdir()] == sorted(file.name for file in path.iterdir())
    repo.commit(dict(repo.main) | {"new.txt": b""})
    with pytest.raises(OSError, match="got a new commit while it was read"):
        next(listed.glob("*.safetensors")).read_bytes()
    large = writers.safetensors(tmp_path / "a.safetensors", {"a": np.zeros(1 << 16, np.float32)})
    repo = hub.upload("org/large", large)
    source = open_source("hf://org/large/a.safetensors")
    with open_regular(located("hf://org/large/a.safetensors")) as opened:
        repo.commit({"a.safetensors": large.read_bytes()[:-4] + b"1234"})
        located("hf://org/large")  # lists again
        with pytest.raises(OSError, match="has changed while it was read"):
            opened.read()
    assert source.changed() is not None


@pytest.mark.slow
def test_a_conversion_has_the_bytes_of_a_local_one(hub: Hub, tmp_path: Path, run: Run) -> None:
    hub.upload("org/timesfm", TIMESFM)
    convert.convert("timesfm", TIMESFM, tmp_path / "local.safetensors")
    out, err = run("timesfm", "hf://org/timesfm", tmp_path / "hub.safetensors")
    assert " in hf://org/timesfm " in err and HF_TOKEN not in out + err
    assert (tmp_path / "hub.safetensors").read_bytes() == (tmp_path / "local.safetensors").read_bytes()
    hub.upload("org/converted", tmp_path / "hub.safetensors")
    assert "intact" in run("verify", "hf://org/converted/hub.safetensors")[0]
    run("timesfm", "hf://org/converted/hub.safetensors", tmp_path / "back", "--to", "orbax")
    back, here = open_source(tmp_path / "back"), open_source(TIMESFM)
    assert all(same(back.read(name), here.read(name)) for name in here.leaves)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hf://org/none", "there is no such repository, or this account does not see it"),
        ("hf://org/name@v2", "there is no such branch, tag or commit; correct the revision after the @"),
        ("hf://org/gated", "the repository is gated, and this account has no access"),
        ("hf://org/private", "there is no such repository, or this account does not see it"),
        ("hf://org/name/below", "there is no such file or directory"),
        ("hf://org/na--me", "this is no name of a repository"),
        ("hf://name", "expected hf://owner/name"),
        ("hf://user:secret@org/name", "a URL without a password"),
    ],
)
def test_what_is_missing_or_not_allowed_is_one_clear_error(url: str, expected: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    path = writers.safetensors(tmp_path / "model.safetensors", writers.plain())
    hub.upload("org/name", path)
    hub.upload("org/gated", path).gated = True
    hub.upload("org/private", path).private = True
    assert_same("hf://org/private/model.safetensors", path)
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    text = refused(url)
    assert expected in text and "secret" not in text


@pytest.mark.parametrize(
    ("status", "expected"),
    [(503, "did not answer"), (0, "did not answer"), (403, "refused the credentials (403)"), (429, "did not answer")],
)
@pytest.mark.parametrize("where", ["/api/", "/resolve/"])
def test_a_hub_that_fails_is_one_clear_error(status: int, expected: str, where: str, hub: Hub, tmp_path: Path) -> None:
    path = writers.safetensors(tmp_path / "model.safetensors", writers.plain())
    hub.upload("org/name", path)
    with hub.failing(Fault(lambda method, path, query: where in path, status)):
        assert expected in refused("hf://org/name/model.safetensors")
    with hub.failing(Fault(lambda method, path, query: "/resolve/" in path and method == "GET", status, times=1)):
        if status in (0, 503):
            assert_same("hf://org/name/model.safetensors", path)


def test_without_the_extra_the_error_names_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    client.bucket.cache_clear()
    assert "hf:// needs huggingface_hub, which is not installed; run pip install 'ckpt-convert[hub]'" in refused("hf://org/name")  # fmt: skip


def test_the_files_of_tokenizer_come_from_a_repository(hub: Hub, run: Run, tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    for name in ("tokenizer.json", "LICENSE", "pytorch_model.bin"):
        (tmp_path / "published" / name).write_text(f'"{name}"')
    hub.upload("org/published", tmp_path / "published")
    _, said = run("gpt2", GOLDEN / "gpt2" / "ckpt", tmp_path / "out", "--tokenizer", "hf://org/published")
    assert "copied LICENSE, tokenizer.json from hf://org/published" in said
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '"tokenizer.json"'
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    assert downloads(hub) == {"tokenizer.json", "LICENSE"}
    _, said = run("gpt2", GOLDEN / "gpt2" / "ckpt", tmp_path / "other", "--tokenizer", "hf://org/nothing", code=2)
    assert "hf://org/nothing" in said and not (tmp_path / "other").exists()
