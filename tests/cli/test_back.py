"""``convert MODEL IN OUT --to orbax --like CKPT``: forth and back on the command line."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import convert
from convert.checkpoints import open_source
from support.command_line import Run
from support.paths import ROOT

LIKE = ROOT / "examples" / "checkpoints" / "timesfm-2.5"


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    convert.convert("timesfm", LIKE, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


@pytest.mark.parametrize(("to", "name"), [("orbax", "out"), ("msgpack", "out.msgpack"), ("npz", "out.npz")])
def test_forth_and_back_and_forth(to: str, name: str, tensors: Path, run: Run, tmp_path: Path) -> None:
    out = tmp_path / name
    printed, said = run("timesfm", tensors, out, "--to", to, "--like", LIKE)
    assert printed == "" and f"wrote {out}: 25 leaves" in said
    first, second = open_source(LIKE), open_source(out)
    assert {name: leaf.spec for name, leaf in first.leaves.items()} == {name: leaf.spec for name, leaf in second.leaves.items()}  # fmt: skip
    assert all(first.read(name).tobytes() == second.read(name).tobytes() for name in first.leaves)
    run("timesfm", out, tmp_path / "again.safetensors", "-q")
    one, two = load_file(tensors), load_file(tmp_path / "again.safetensors")
    assert one.keys() == two.keys() and all(one[name].tobytes() == two[name].tobytes() for name in one)
    if to == "orbax":  # the header, too: its digest of the leaves depends on their chunks, which are those of LIKE
        assert (tmp_path / "again.safetensors").read_bytes() == tensors.read_bytes()


def test_without_a_checkpoint_the_rules_give_the_tree(tensors: Path, run: Run, tmp_path: Path) -> None:
    printed, _ = run("plan", "timesfm", tensors, "--to", "orbax")
    assert "-> the layout NNX" in printed and "--layout also knows NNX_PURE" in printed
    run("timesfm", tensors, tmp_path / "out", "--to", "orbax")
    run("timesfm", tensors, tmp_path / "out.npz", "--to", "npz", "--layout", "NNX_PURE")
    first, second, pure = open_source(LIKE), open_source(tmp_path / "out"), open_source(tmp_path / "out.npz")
    assert list(first.leaves.items()) == list(second.leaves.items())
    assert all(first.read(name).tobytes() == second.read(name).tobytes() for name in first.leaves)
    assert [leaf.keys for leaf in pure.leaves.values()] == [leaf.keys[:-1] for leaf in first.leaves.values()]
    assert second.format == "Orbax, OCDBT, zarr3"


def test_a_reversed_conversion_is_checked_as_it_is(tensors: Path, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    run("timesfm", tensors, out, "--to", "npz", "--like", LIKE)
    printed, _ = run("check", tensors, "--from", out, "--level", "coverage,weights")
    assert "45 of 45 tensors compared bit for bit" in printed


def test_the_plan_names_every_leaf(tensors: Path, run: Run, tmp_path: Path) -> None:
    printed, _ = run("plan", "timesfm", tensors, "--to", "orbax", "--like", LIKE)
    assert "Leaves: 25, each made of the tensors below it" in printed
    assert "stacked_xf.{0..2}.attn.qkv_proj.weight rows 32:64  i (N H) D -> i D N H" in printed
    dry, _ = run("timesfm", tensors, tmp_path / "o", "--to", "orbax", "--like", LIKE, "--dry-run", "--json")
    plan = json.loads(dry)
    assert {leaf["leaf"] for leaf in plan["leaves"]} == set(open_source(LIKE).leaves) and plan["kept"] == []
    assert not (tmp_path / "o").exists()


def test_what_the_way_back_cannot_take_is_refused(tensors: Path, run: Run, tmp_path: Path) -> None:
    out = str(tmp_path / "out")

    def problem(*arguments: str) -> str:
        printed, said = run(*arguments, code=2)
        assert printed == "" and not (tmp_path / "out").exists()
        return said

    back = ("timesfm", str(tensors), out, "--to", "orbax")
    assert "a checkpoint given with --like has its layout" in problem(*back, "--like", str(LIKE), "--layout", "NNX")
    assert "expected one of NNX, NNX_PURE, got NESTED" in problem(*back, "--layout", "NESTED")
    assert "expected a dtype at least as wide as float32, got bfloat16" in problem(*back, "--dtype", "bfloat16")
    assert "only the way back to JAX has a choice of layout" in problem("timesfm", str(LIKE), f"{out}.safetensors", "--layout", "NNX")  # fmt: skip
    assert "--max-shard-size is an option of a conversion to PyTorch" in problem(*back, "--like", str(LIKE), "--max-shard-size", "1GB")  # fmt: skip
    (tmp_path / "file").write_text("")
    _, said = run("timesfm", tensors, tmp_path / "file", "--to", "orbax", code=2)
    assert "is a file; give a directory\n" in said
    held = load_file(tensors)
    gone = held.pop("stacked_xf.1.ff0.weight")
    save_file(held, tensors)
    said = problem(*back, "--like", str(LIKE))
    assert "rules/timesfm-2.5.yaml:145: stacked_xf.1.ff0.weight: expected float32[32,32]" in said
    save_file({**held, "stacked_xf.1.ff0.weight": gone[:1]}, tensors)
    assert "expected float32[32,32], got float32[1,32]" in problem(*back, "--like", str(LIKE))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def pickled(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + bytes(100))
    (path / "config.json").write_text("{}")


def unfinished(path: Path) -> None:
    whole = path.read_bytes()
    path.unlink()
    path.mkdir()
    (path / "model-00001-of-00002.safetensors").write_bytes(whole)
    files = dict.fromkeys(load_file(path / "model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors")
    index = {"weight_map": {**files, "gone.weight": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


BAD = {  # what is done to the tensors; code and words of the error
    "truncated": (truncated, "safetensors-damaged", "its tensors stop at byte"),
    "GGUF": (lambda path: path.write_bytes(b"GGUF\x03" + bytes(100)), "safetensors-damaged", "another format"),
    "a pickle": (lambda path: path.write_bytes(b"PK\x03\x04" + b"x" * 100), "safetensors-damaged", "another format"),
    "a directory of pickles": (pickled, "converted-not-found", "pytorch_model.bin is a pickle, which is not loaded"),
    "an unfinished directory": (unfinished, "output-incomplete", "there is no such file"),
    "nothing": (Path.unlink, "converted-not-found", "there is no such file or directory"),
    "an empty file": (lambda path: path.write_bytes(b""), "safetensors-damaged", "the file has 0"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("like", [[], ["--like", LIKE]], ids=["", "like"])
def test_tensors_that_cannot_be_read_are_one_error(bad: str, like: list[object], tensors: Path, run: Run, tmp_path: Path) -> None:  # fmt: skip
    damage, code, words = BAD[bad]
    damage(tensors)
    printed, said = run("timesfm", tensors, tmp_path / "out", "--to", "orbax", *like, code=2)
    assert printed == "" and said.count("error[") == 1 and said.startswith(f"error[{code}]: ") and words in said
    assert {path.name for path in tmp_path.iterdir()} <= {"in.safetensors"}


def test_the_output_may_not_be_the_input(tmp_path: Path, run: Run) -> None:
    given = tmp_path / "in"
    given.mkdir()
    convert.convert("timesfm", LIKE, given / "model.safetensors")
    for out, to in ((given, "orbax"), (given / "ckpt", "orbax"), (tmp_path, "orbax"), (given / "x.npz", "npz")):
        _, said = run("timesfm", given, out, "--to", to, "--overwrite", code=2)
        assert said.startswith("error[output-within-input]: "), said
    assert [path.name for path in given.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(("to", "name"), [("orbax", "out"), ("msgpack", "out.msgpack"), ("npz", "out.npz")])
def test_a_full_disk_leaves_nothing_behind(to: str, name: str, tensors: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("convert.reversing.write.os.fsync", full)  # where a disk says so that gave space before
    _, said = run("timesfm", tensors, tmp_path / name, "--to", to, code=2)
    assert said.startswith("error[disk-full]: ") and "make room, or write elsewhere" in said
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


FACTOR_RULES = """model: m
title: M
targets: {torch: {loads: T}}
axes: {D: {is: width, equals: 6}}
rules:
- einsum: ...D,DF->...F
  from: w
  prescaled_by: 1/sqrt(D)
  linear: w
"""


@pytest.mark.parametrize("to", [(), ("--to", "flax")])
def test_tensors_without_a_format_of_jax_are_told_the_way(to: tuple[str, ...], tensors: Path, run: Run, tmp_path: Path) -> None:  # fmt: skip
    _, said = run("timesfm", tensors, tmp_path / "out", *to, code=2)
    assert said.startswith("error[rules-of-another-model]: ") and "with --to orbax, msgpack or npz; " in said


def test_the_plan_names_what_the_rules_drop(run: Run, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"{FACTOR_RULES}- drop: /step\n  because: the training step\n")
    save_file({"w.weight": np.zeros((7, 6), ml_dtypes.bfloat16)}, tmp_path / "in.safetensors")
    np.savez(tmp_path / "like.npz", w=np.zeros((6, 7), np.float32), step=np.int32(3))
    back = ("plan", tmp_path / "r.yaml", tmp_path / "in.safetensors", "--to", "npz")
    printed, _ = run(*back, "--dtype", "float32")
    head, _, line = printed.rstrip().rpartition("\n")
    assert head.endswith("not written without --like (where the model has them)")
    assert line.split("  ")[1:] == ["/step", f"the training step ({tmp_path / 'r.yaml'}:10)"]
    dumped, _ = run(*back, "--dtype", "float32", "--json")
    assert json.loads(dumped)["unwritten"] == [{"leaves": "/step", "because": "the training step"}]
    printed, _ = run(*back, "--like", tmp_path / "like.npz", "--dtype", "bfloat16")
    assert "not written" not in printed and "Leaves of --like: 1" in printed


def test_wider_leaves_are_written_and_checked_in_one_command(run: Run, tmp_path: Path) -> None:
    """The check compares with the dtype of the tensors, although --dtype is that of the leaves."""
    (tmp_path / "r.yaml").write_text(FACTOR_RULES)
    weight = np.random.default_rng(0).standard_normal((7, 6)).astype(ml_dtypes.bfloat16)
    save_file({"w.weight": weight, "p.position_ids": np.arange(3)}, tmp_path / "in.safetensors")
    back = (tmp_path / "r.yaml", tmp_path / "in.safetensors", tmp_path / "out.npz", "--to", "npz", "--dtype", "float32")
    printed, _ = run("plan", *back[:2], *back[3:])
    assert "Tensors left out: 1" in printed and "p.position_ids  positions, which the constructor counts" in printed
    save_file({"w.weight": weight}, tmp_path / "in.safetensors")
    printed, said = run(*back, "--check")
    assert "wrote" in said and "1 of 1 tensors compared bit for bit" in printed
    assert np.load(tmp_path / "out.npz")["w"].dtype == np.float32
