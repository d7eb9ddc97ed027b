"""A format is recognised by its content, or refused with what is understood; folders, links, shards."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert import CheckpointError, open_source
from convert.core.findings import Finding
from support import writers
from support.open_refused import refusal
from support.writers import float8, plain


def all_formats(folder: Path) -> dict[str, Path]:
    folder.mkdir(exist_ok=True)
    made = {
        "flax msgpack": writers.msgpack(folder / "a", plain()),
        "NumPy .npz": writers.npz(folder / "b.npz", plain()).rename(folder / "b"),
        "safetensors": writers.safetensors(folder / "c", float8()),
        "Equinox": writers.equinox(folder / "d", [np.ones(2)]),
        "T5X": writers.t5x(folder / "t" / "e", {"target/w": np.ones(3)}),
    }
    import h5py

    with h5py.File(folder / "f", "w") as file:
        file["layers/dense/vars/0"] = np.ones(3)
    return made | {"Keras 3": folder / "f"}


@pytest.mark.slow
def test_formats_are_told_by_content_whatever_the_name(tmp_path: Path) -> None:
    made = all_formats(tmp_path / "files")
    for wrong in ("x.npz", "x.eqx", "x.msgpack", "x.safetensors", "x.h5", "x.bin"):
        for name, path in made.items():
            if path.is_dir():
                continue
            copy = shutil.copy(path, tmp_path / wrong)
            assert open_source(copy, leaf_names=[["w"]]).format.startswith(name.split(" .")[0]), (wrong, name)
    assert open_source(made["T5X"]).format == "T5X, version 3"


def test_a_pointer_of_git_lfs_is_called_so(tmp_path: Path) -> None:
    """What `git clone` of a repository of the Hub leaves where Git LFS is not installed."""
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "flax_model.msgpack"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 498\n")
    for given in (tmp_path, file):
        with pytest.raises(CheckpointError) as caught:
            open_source(given)
        (finding,) = caught.value.findings
        assert finding.code == "checkpoint-unknown-format" and finding.path == str(file)
        assert "Git LFS" in finding.got and "git lfs pull" in finding.fix


def test_several_checkpoints_in_a_folder_must_be_named(tmp_path: Path) -> None:
    writers.msgpack(tmp_path / "flax_model.msgpack", {"w": np.ones(2)})
    assert list(open_source(tmp_path).leaves) == ["w"]
    writers.npz(tmp_path / "other.npz", {"w": np.ones(2)})
    with pytest.raises(CheckpointError) as caught:
        open_source(tmp_path)
    (finding,) = caught.value.findings
    assert (finding.code, finding.path) == ("checkpoint-ambiguous", str(tmp_path))
    assert all(name in finding.problem for name in ("flax_model.msgpack (flax msgpack)", "other.npz (NumPy .npz)"))


def test_the_optimizer_beside_a_model_is_not_taken_for_it(tmp_path: Path) -> None:
    """transformers' training scripts wrote both; alone, the file is read."""
    writers.msgpack(tmp_path / "opt_state.msgpack", {"0": {"count": np.ones(2)}})
    assert list(open_source(tmp_path).leaves) == ["0/count"]
    writers.msgpack(tmp_path / "flax_model.msgpack", {"w": np.ones(2)})
    assert list(open_source(tmp_path).leaves) == ["w"]


@pytest.mark.parametrize("present", [(1, 2), (2,)])
@pytest.mark.parametrize("name", ["flax_model-0000{}-of-00002.msgpack", "model-0000{}-of-00002.safetensors"])
def test_shards_without_their_index_are_refused_with_its_name(
    name: str, present: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "ckpt").mkdir()
    for k in present:
        write = writers.msgpack if name.endswith("msgpack") else writers.safetensors
        write(tmp_path / "ckpt" / name.format(k), {f"w{k}": np.ones(2, np.float32)})
    finding = refusal(tmp_path / "ckpt")
    assert (finding.code, finding.path) == ("checkpoint-incomplete", "ckpt")
    index = name.replace("-0000{}-of-00002", "") + ".index.json"
    assert finding.problem == f"{index} is missing, which names the shards"


def test_a_folder_of_checkpoints_has_a_command_for_each(tmp_path: Path) -> None:
    """A pipeline of diffusers names the library of each part; an optimizer or a tokenizer is none."""
    folder = tmp_path / "pipeline"
    for part, name in (
        ("unet", "diffusion_flax_model"),
        ("vae", "diffusion_flax_model"),
        ("text_encoder", "flax_model"),
    ):
        (folder / part).mkdir(parents=True)
        writers.msgpack(folder / part / f"{name}.msgpack", {"w": np.ones(2)})
    (folder / "tokenizer").mkdir()
    stated = {part: ["diffusers", "Any"] for part in ("unet", "vae")} | {"text_encoder": ["transformers", "Any"]}

    def lines() -> list[str]:
        with pytest.raises(CheckpointError) as caught:
            open_source(folder)
        assert caught.value.code == "checkpoint-unknown-format" and "3 checkpoints" in caught.value.findings[0].got
        return [line.replace(str(folder), "IN").split("    ")[0].strip() for line in caught.value.lines]

    assert lines()[2] == "convert MODEL IN/unet OUT_DIR/unet"
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "FlaxStableDiffusionPipeline", **stated}))
    assert lines() == [
        "mkdir OUT_DIR",
        "convert flax-transformers IN/text_encoder OUT_DIR/text_encoder",
        "convert flax-diffusers IN/unet OUT_DIR/unet",
        "convert flax-diffusers IN/vae OUT_DIR/vae",
    ]


def test_the_commands_for_a_folder_of_checkpoints_can_be_pasted(tmp_path: Path) -> None:
    """Into a shell, with any names of folders; a function stands for `convert`."""
    folder = tmp_path / "my run"
    for part in ("unet", "the vae"):
        (folder / part).mkdir(parents=True)
        writers.msgpack(folder / part / "flax_model.msgpack", {"w": np.ones(2)})
    with pytest.raises(CheckpointError) as caught:
        open_source(folder)
    script = "\n".join(("set -e", 'convert() { printf "%s\\n" "$3"; mkdir "$3"; }', *caught.value.lines))
    said = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == ["OUT_DIR/the vae", "OUT_DIR/unet"]


def test_what_is_unknown_is_answered_with_what_is_understood(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello, this is no checkpoint")
    with pytest.raises(CheckpointError) as caught:
        convert.open_source(tmp_path / "x")
    text = str(caught.value)
    assert caught.value.code == "checkpoint-unknown-format"
    for format in (
        "flax msgpack: ",
        "Equinox: ",
        "NumPy .npz: ",
        "safetensors: ",
        "Keras 3: ",
        "T5X: ",
        "Orbax: ",
        "paxml: ",
    ):
        assert f"\n  {format}" in text
    (tmp_path / "x").write_bytes(b"")
    assert refusal(tmp_path / "x").code == "checkpoint-unknown-format"


def test_options_of_other_formats_are_refused(tmp_path: Path) -> None:
    path = writers.npz(tmp_path / "x.npz", {"w": np.ones(2)})
    for option, value in {"step": 3, "item": "params", "skeleton": "s.json"}.items():
        finding = refusal(path, **{option: value})
        assert (finding.code, finding.path) == ("checkpoint-option", "x.npz")
        assert finding.fix == f"leave out --{option} {value}"


class Trap:
    """Unpickling it leaves a file behind."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, ("unpickled", "w")


@pytest.mark.parametrize("kind", [*(f"pickle {n}" for n in range(6)), "npy", "npz", "eqx", "torch", "directory"])
def test_pickles_are_refused_and_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    objects = np.array([Trap(), 1], object)
    path = tmp_path / "x.pkl"
    if kind.startswith("pickle"):
        path.write_bytes(pickle.dumps(Trap(), int(kind[-1])))
    elif kind == "npy":
        path.write_bytes(writers.records(objects))
    elif kind == "npz":
        path = writers.npz(tmp_path / "x.npz", {"good": np.ones(2), "bad": objects})
    elif kind == "eqx":
        path.write_bytes(writers.records(np.ones(2), objects))
    elif kind == "torch":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Trap()))
    else:
        path = tmp_path / "folder"
        path.mkdir()
        (path / "weights.pkl").write_bytes(pickle.dumps(Trap()))
    finding = refusal(path, leaf_names=[["a"]])
    assert finding.code == "pickle-refused"
    assert "numpy.savez(path, **flat_dict), flax.serialization.to_bytes or safetensors.flax.save_file" in finding.fix
    assert ("leaf bad" in finding.path) == (kind == "npz") and ("record 1, " in finding.path) == (kind == "eqx")
    assert not Path("unpickled").exists()


@pytest.mark.slow
def test_an_entry_point_adds_a_source(tmp_path: Path) -> None:
    """A package with one module, as pip would install it."""
    site = tmp_path / "site"
    info = site / "my_source-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-source\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[convert.checkpoints]\nmine = my_source:FORMAT\n")
    module = """
import numpy as np
from convert import Format, Leaf, Source, TensorSpec

class Mine(Source):
    def __init__(self, path):
        self.path, self.format = path, "mine"
        self.leaves = {"w": Leaf(("w",), TensorSpec((2,), "float32"))}
    def read(self, name):
        return np.frombuffer(self.path.read_bytes()[4:], "<f4").copy()

FORMAT = Format("mine", "a file of mine", lambda p: [p] if p.is_file() and p.read_bytes()[:4] == b"MINE" else [],
                lambda path, options: Mine(path))
"""
    (site / "my_source.py").write_text(module)
    (tmp_path / "x").write_bytes(b"MINE" + np.array([1, 2], "<f4").tobytes())
    code = "import convert; s = convert.open_source('x'); print(s.format, s.read('w').tolist())"
    env = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{site}"}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    assert run().stdout == "mine [1.0, 2.0]\n"
    (site / "my_source.py").write_text("FORMAT = 1")
    assert "the format mine of my-source: expected a convert.Format, got int; repair or uninstall" in run().stderr
    (site / "my_source.py").write_text("1 / 0")
    assert "the format mine of my-source: cannot be loaded: division by zero" in run().stderr


@pytest.mark.parametrize("format", ["msgpack", "safetensors"])
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, format: str) -> None:
    write = writers.msgpack_shards if format == "msgpack" else writers.safetensors_shards
    folder = write(tmp_path / "m", {"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)}, 2)
    (index,) = folder.glob("*.index.json")
    whole = json.loads(index.read_text())
    shard = whole["weight_map"]["a"]
    outside = str(shutil.copy(folder / shard, tmp_path / shard))

    def refused(**weight_map: Any) -> Finding:
        index.write_text(json.dumps({"weight_map": {**whole["weight_map"], **weight_map}}))
        return refusal(index)

    for name in (f"../{shard}", outside, "..", "", 3, None, "a\0b"):
        assert refused(a=name).code == "checkpoint-link-refused"
    finding = refused(a="gone")
    assert finding.code == "checkpoint-incomplete" and "the shard gone with the leaf a is missing" in finding.problem
    finding = refused(c=shard)
    assert (finding.code, finding.path) == ("checkpoint-corrupt", f"{shard}: leaf c")
    index.write_text(json.dumps({"weight_map": {"b": whole["weight_map"]["b"], "a": whole["weight_map"]["b"]}}))
    assert refusal(index).path.endswith(": leaf a")
    index.write_text(json.dumps({"weight_map": {}}))
    assert refusal(index).code == "checkpoint-corrupt"
    index.write_text('{"weight_map": ')
    finding = refusal(index)
    assert (finding.code, finding.path) == ("checkpoint-corrupt", index.name)
    index.write_text(json.dumps(whole))
    (folder / shard).unlink()
    (folder / shard).symlink_to(outside)
    finding = refusal(index)
    assert (finding.code, finding.path) == ("checkpoint-link-refused", shard)


def test_the_cache_of_the_hub_is_links_to_its_blobs(tmp_path: Path) -> None:
    made = writers.msgpack_shards(tmp_path / "made", {"a": np.ones(2), "b": np.ones(3)}, 2)
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "1234"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(made.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert list(open_source(snapshot).leaves) == ["a", "b"]


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    import msgpack

    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        data = writers.records(np.ones(2))
        archive.writestr("a.npy", data)
        archive.writestr("a", data)
    finding = refusal(tmp_path / "x.npz")
    assert (finding.code, finding.data["leaf"]) == ("leaf-name-clash", "a")
    packed = msgpack.packb({"a": 1.5}) + b""
    (tmp_path / "m").write_bytes(b"\x82" + packed[1:] * 2)
    finding = refusal(tmp_path / "m")
    assert (finding.code, finding.data["leaf"]) == ("leaf-name-clash", "a")
    (tmp_path / "m").write_bytes(msgpack.packb({"a": {"1": 1.5, 1: 2.5}}))
    finding = refusal(tmp_path / "m")
    assert (finding.code, finding.data["leaf"]) == ("leaf-name-clash", "a/1")
    # A slash in a key is told from a level.
    (tmp_path / "m").write_bytes(msgpack.packb({"a": {"b": 1.5}, "a/b": 2.5, "": {"": 3.5}}))
    source = open_source(tmp_path / "m")
    assert {name: float(source.read(name)) for name in source.leaves} == {"/": 3.5, "a/b": 1.5, "a\\/b": 2.5}
