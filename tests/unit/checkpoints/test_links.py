"""Files of a checkpoint lie inside of it, and are regular files. No JAX, no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import tensorstore as ts
from typer.testing import CliRunner

import convert
from convert import open_source
from convert.checkpoints.access import Boundary
from convert.cli.app import app
from convert.core.errors import CheckpointError
from convert.core.findings import Finding

CODE = "checkpoint-link-refused"


def orbax(path: Path, driver: str = "zarr", compressor: Any = None, ocdbt: bool = False) -> Path:
    """Write a tree with one leaf, `w`, of four ones."""
    path.mkdir(parents=True)
    (path / "checkpoint").write_bytes(msgpack.packb({"w": "PLACEHOLDER://w"}))
    config = {"max_inline_value_bytes": 1, "compression": None}
    base = {"driver": "file", "path": f"{path}/"}
    kvstore = {"driver": "ocdbt", "base": base, "config": config, "path": "w/"} if ocdbt else {**base, "path": f"{path}/w/"}  # fmt: skip
    metadata: dict[str, Any] = {"shape": [4]}
    metadata |= {"dtype": "<f4", "compressor": compressor} if driver == "zarr" else {"data_type": "float32"}
    spec = {"driver": driver, "kvstore": kvstore, "metadata": metadata}
    ts.open(spec, create=True).result().write(np.ones(4, np.float32)).result()
    return path


def gzip(path: Path) -> Path:
    return orbax(path, compressor={"id": "gzip", "level": 1})  # TensorStore decodes it


def zarr3(path: Path) -> Path:
    return orbax(path, "zarr3")


def ocdbt(path: Path) -> Path:
    return orbax(path, ocdbt=True)


def unmerged(path: Path) -> Path:
    orbax(path, ocdbt=True)
    (path / "ocdbt.process_0").mkdir()
    for name in ("manifest.ocdbt", "d"):
        (path / name).rename(path / "ocdbt.process_0" / name)
    return path


def flax(path: Path) -> Path:
    path.mkdir()
    packed = msgpack.packb(((4,), "float32", np.ones(4, np.float32).tobytes()))
    (path / "flax_model.msgpack").write_bytes(msgpack.packb({"w": msgpack.ExtType(1, packed)}))
    return path


def flax_steps(path: Path) -> Path:
    (flax(path) / "flax_model.msgpack").rename(path / "checkpoint_3")
    return path


def npz(path: Path) -> Path:
    path.mkdir()
    np.savez(path / "x.npz", w=np.ones(4, np.float32))
    return path


def shards(path: Path) -> Path:
    path.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    content = len(header).to_bytes(8, "little") + header + np.ones(4, np.float32).tobytes()
    (path / "m-1.safetensors").write_bytes(content)
    (path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "m-1.safetensors"}}))
    return path


def keras_shards(path: Path) -> Path:
    import h5py

    path.mkdir()
    with h5py.File(path / "m_00000.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.ones(4, np.float32)
    (path / "m.weights.json").write_text(json.dumps({"weight_map": {"w": ["m_00000.weights.h5"]}}))
    return path


# What is read of a checkpoint.
PLACES: list[tuple[Callable[[Path], Path], str]] = [
    (orbax, "checkpoint"),
    (orbax, "w"),
    (orbax, "w/.zarray"),
    (orbax, "w/0"),
    (gzip, "w"),
    (gzip, "w/0"),
    (zarr3, "w/zarr.json"),
    (zarr3, "w/c"),
    (zarr3, "w/c/0"),
    (ocdbt, "manifest.ocdbt"),
    (ocdbt, "d"),
    (ocdbt, "d/*"),
    (unmerged, "ocdbt.process_0"),
    (unmerged, "ocdbt.process_0/manifest.ocdbt"),
    (unmerged, "ocdbt.process_0/d/*"),
    (flax, "flax_model.msgpack"),
    (flax_steps, "checkpoint_3"),
    (npz, "x.npz"),
    (shards, "m-1.safetensors"),
    (shards, "m.safetensors.index.json"),
    (keras_shards, "m_00000.weights.h5"),
    (keras_shards, "m.weights.json"),
]
each_place = pytest.mark.parametrize(("write", "name"), PLACES, ids=[f"{f.__name__}-{n}" for f, n in PLACES])


def moved(path: Path, name: str, to: Path) -> Path:
    """Move a file or directory of a checkpoint, and leave a link to it. Return the link."""
    link = min(path.glob(name))
    to.parent.mkdir(exist_ok=True)
    link.rename(to)
    link.symlink_to(to)
    return link


def read(path: Path, **options: Any) -> Any:
    source = open_source(path, **options)
    (name,) = source.leaves
    return source.read(name)


def refusal(path: Path) -> Finding:
    with pytest.raises(CheckpointError) as caught:
        read(path)
    return caught.value.findings[0]


@each_place
def test_a_link_out_of_the_checkpoint_is_followed_on_request_only(
    tmp_path: Path, write: Callable[[Path], Path], name: str
) -> None:
    path = write(tmp_path / "ckpt")
    link = moved(path, name, tmp_path / "elsewhere" / "real")
    finding = refusal(path)
    assert finding.code == CODE and finding.path.startswith(str(link))
    assert finding.got == str(tmp_path / "elsewhere" / "real") and "--follow-links" in finding.fix
    assert np.array_equal(read(path, follow_links=True), np.ones(4))


@each_place
def test_a_link_inside_of_the_checkpoint_is_followed(tmp_path: Path, write: Callable[[Path], Path], name: str) -> None:
    path = write(tmp_path / "ckpt")
    link = moved(path, name, path / "other")
    assert link.is_symlink() and np.array_equal(read(path), np.ones(4))


@each_place
def test_the_cache_of_the_hub_is_inside(tmp_path: Path, write: Callable[[Path], Path], name: str) -> None:
    repository = tmp_path / "models--me--mine"
    (repository / "snapshots" / "c0ffee").mkdir(parents=True)
    path = write(repository / "snapshots" / "c0ffee" / "ckpt")
    link = moved(path, name, repository / "blobs" / "0a1b")
    (tmp_path / "mine").symlink_to(path)
    assert np.array_equal(read(path), np.ones(4)) and np.array_equal(read(tmp_path / "mine"), np.ones(4))
    other = tmp_path / "models--me--other" / "0a1b"
    other.parent.mkdir()
    link.resolve().rename(other)
    link.unlink()
    link.symlink_to(other)
    assert refusal(path).code == CODE


@each_place
@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_special_files_do_not_hang(tmp_path: Path, write: Callable[[Path], Path], name: str, kind: str) -> None:
    path = write(tmp_path / "ckpt")
    place = min(path.glob(name))
    if place.is_dir() or (name.endswith(".json") and "/" not in name):
        return  # a directory, or an index, without which the only shard is read
    place.unlink()
    os.mkfifo(place) if kind == "FIFO" else place.symlink_to("/dev/zero")
    for follow_links in (False, True):
        with pytest.raises(CheckpointError) as caught:
            read(path, follow_links=follow_links)
        codes = ("checkpoint-unreadable", "checkpoint-incomplete", "checkpoint-unknown-format", CODE)
        assert caught.value.code in codes[: 4 - follow_links]


def test_links_that_are_not_read_do_not_matter(tmp_path: Path) -> None:
    for write in (orbax, ocdbt, flax, npz):
        path = write(tmp_path / write.__name__)
        (path / "README").symlink_to("/etc/passwd")
        (path / "data").symlink_to("/")
        os.mkfifo(path / "pipe")
        assert np.array_equal(read(path), np.ones(4))


def test_the_given_path_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "d").symlink_to(orbax(tmp_path / "real"))
    (tmp_path / "f.msgpack").symlink_to(flax(tmp_path / "flax") / "flax_model.msgpack")
    for path in (tmp_path / "d", tmp_path / "d" / ".." / "real", tmp_path / "f.msgpack"):
        assert np.array_equal(read(path), np.ones(4))


def test_steps_and_items_that_are_links(tmp_path: Path) -> None:
    orbax(tmp_path / "elsewhere")
    orbax(tmp_path / "run" / "1" / "params")
    (tmp_path / "run" / "2").symlink_to("1")
    (tmp_path / "run" / "3").mkdir()
    (tmp_path / "run" / "3" / "params").symlink_to(tmp_path / "elsewhere")
    assert np.array_equal(read(tmp_path / "run", step=2), np.ones(4))
    finding = refusal(tmp_path / "run")
    assert (finding.code, finding.path) == (CODE, str(tmp_path / "run" / "3" / "params"))
    assert np.array_equal(read(tmp_path / "run" / "3" / "params"), np.ones(4))  # given itself


def test_a_loop_of_links_is_an_error(tmp_path: Path) -> None:
    path = orbax(tmp_path / "ckpt")
    (path / "w" / "0").unlink()
    (path / "w" / "0").symlink_to("0")
    assert refusal(path).code == "checkpoint-unreadable"


def test_a_tree_of_links_is_walked_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "t" / name).mkdir(parents=True)
        for k in range(9):
            (tmp_path / "t" / name / f"up{k}").symlink_to("..")
    Boundary(tmp_path / "t").check_tree(tmp_path / "t")
    os.mkfifo(tmp_path / "t" / "b" / "pipe")
    with pytest.raises(CheckpointError, match="FIFO"):
        Boundary(tmp_path / "t").check_tree(tmp_path / "t")


RULES = """
model: tiny
title: Tiny
targets: {torch: {loads: tiny.Tiny}}
sidecar: {file: config.json, supported: {model_type: [tiny]}}
rules:
  - {from: w, parameter: w}
"""


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_the_sidecar_is_a_file_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    path = flax(tmp_path / "ckpt")
    (tmp_path / "rules.yaml").write_text(RULES)
    (tmp_path / "secret.json").write_text('{"password": "1234"}')
    (path / name).symlink_to(tmp_path / "secret.json")
    for checkpoint in (path, path / "flax_model.msgpack"):
        with pytest.raises(CheckpointError) as caught:
            convert.convert(str(tmp_path / "rules.yaml"), checkpoint, tmp_path / "out")
        assert caught.value.code == CODE and name in caught.value.findings[0].path
    assert not (tmp_path / "out").exists()
    convert.convert(str(tmp_path / "rules.yaml"), path, tmp_path / "out", follow_links=True)


@pytest.mark.slow
def test_every_command_that_opens_a_checkpoint_takes_the_option(tmp_path: Path) -> None:
    path = flax(tmp_path / "ckpt")
    moved(path, "flax_model.msgpack", tmp_path / "elsewhere" / "real")
    (tmp_path / "rules.yaml").write_text(RULES)
    rules, out = str(tmp_path / "rules.yaml"), str(tmp_path / "out.safetensors")
    for command in (
        ["plan", rules, str(path)],
        ["inspect", str(path)],
        ["rules", "new", str(path)],
        [rules, str(path), out],
        ["check", out, "--from", str(path), "--model", rules, "--level", "weights"],
        ["record", rules, str(path), str(tmp_path / "r.safetensors")],
    ):
        caught = CliRunner().invoke(app, command).exception
        assert isinstance(caught, CheckpointError) and caught.code == CODE, command
        done = CliRunner().invoke(app, [*command, "--follow-links"])
        code = done.exception.code if isinstance(done.exception, CheckpointError) else ""
        assert code != CODE and (command[0] == "record" or done.exit_code == 0), (command, done.output, done.exception)
