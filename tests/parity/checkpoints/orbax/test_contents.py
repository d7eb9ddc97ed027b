"""What an Orbax checkpoint holds, bit for bit: every layout, several devices and processes, old versions, and the aggregate file."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

from convert.checkpoints.orbax.reader import looks_like_orbax, open_orbax
from convert.checkpoints.orbax.stores import AGAIN
from convert.checkpoints.source import Absent, Source
from convert.core.errors import CheckpointError
from support.orbax_checkpoints import LAYOUTS, ORBAX_0_5, Copy, arrays, chosen, refusal, save
from support.orbax_writers import values as sharded_values
from support.source_contract import SourceContract, same


class TestLayouts(SourceContract):
    @pytest.fixture(scope="class", params=LAYOUTS)
    @classmethod
    def layout(cls, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, written: Path, layout: str) -> Source:
        return open_orbax(written / layout)

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls) -> Mapping[str, np.ndarray]:
        return arrays()

    def test_says_what_it_is(self, source: Source, layout: str, written: Path) -> None:
        assert source.format == LAYOUTS[layout][1]
        assert source.path == written / layout
        assert source.notes == ()

    def test_keys_keep_their_dots_and_slashes(self, source: Source) -> None:
        assert source.leaves["params/blocks.0/attn/kernel"].keys == ("params", "blocks.0", "attn/kernel")
        assert source.leaves["params/blocks.0/attn/vec/bias"].keys == ("params", "blocks.0", "attn", "vec/bias")
        assert source.leaves["layers/0/scale"].keys == ("layers", "0", "scale")
        assert source.leaves["opt/1/0"].keys == ("opt", "1", "0")
        assert source.leaves["opt/0/mu"].keys == ("opt", "0", "mu")

    def test_tells_what_has_no_array(self, source: Source) -> None:
        assert set(source.absent) == {
            Absent(("empty", "dict"), "empty dict"),
            Absent(("empty", "list"), "empty list"),
            Absent(("empty", "tuple"), "empty tuple"),
            Absent(("none",), "None"),
            Absent(("text",), "string"),
        }


class TestDevices(SourceContract):
    @pytest.fixture(
        scope="class",
        params=["ocdbt", "directories", "zarr3", "zarr3-directories", "chunks", "chunked-directories", "small-files"],
    )
    @classmethod
    def source(cls, devices: Path, request: pytest.FixtureRequest) -> Source:
        return open_orbax(devices / request.param)

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls) -> Mapping[str, np.ndarray]:
        return sharded_values()


class TestProcesses(SourceContract):
    @pytest.fixture(scope="class", params=["ocdbt", "zarr3", "ocdbt-unmerged", "zarr3-unmerged"])
    @classmethod
    def source(cls, processes: Path, request: pytest.FixtureRequest) -> Source:
        source = open_orbax(processes / request.param)
        assert ("not merged (2 processes)" in source.format) == ("unmerged" in request.param)
        return source

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls) -> Mapping[str, np.ndarray]:
        return sharded_values()


class TestOldOrbax(SourceContract):
    """Written by Orbax 0.5.0 of January 2024; see tests/golden/make_orbax_0_5.py."""

    FORMATS = {  # noqa: RUF012
        "ocdbt": "Orbax, OCDBT, zarr",
        "leaf-directories": "Orbax, one directory per leaf, zarr",
        "without-metadata": "Orbax, one directory per leaf, zarr",
        "aggregated": "Orbax, aggregate file (msgpack)",
        "aggregated-without-metadata": "Orbax, aggregate file (msgpack)",
        "zarr3": "Orbax, one directory per leaf, zarr3",
    }

    @pytest.fixture(scope="class", params=FORMATS)
    @classmethod
    def source(cls, request: pytest.FixtureRequest) -> Source:
        source = open_orbax(ORBAX_0_5 / request.param)
        assert source.format == cls.FORMATS[request.param]
        return source

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, source: Source) -> Mapping[str, np.ndarray]:
        expected = dict(np.load(ORBAX_0_5 / "expected.npz"))
        expected["params/half"] = expected["params/half"].view(ml_dtypes.bfloat16)
        return {name: array for name, array in expected.items() if "zarr3" not in source.format or "params" in name}

    def test_keys_are_not_split_at_dots(self, source: Source) -> None:
        assert source.leaves["params/blocks.0/w"].keys == ("params", "blocks.0", "w")

    def test_tells_what_has_no_array(self, source: Source) -> None:
        absent = {Absent(("empty",), "empty dict"), Absent(("none",), "None")}
        assert set(source.absent) == (set() if "zarr3" in source.format else absent)


def test_old_steps() -> None:
    source = open_orbax(ORBAX_0_5 / "steps")
    assert chosen(source) == [("step-chosen", 2, [1, 2]), ("item-chosen", "default", [])]
    assert same(source.read("w"), np.array([2, 2], np.float32))
    assert same(open_orbax(ORBAX_0_5 / "steps", step=1).read("w"), np.array([1, 1], np.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tree_may_be_a_single_array_or_a_list(tmp_path: Path, layout: str) -> None:
    options = LAYOUTS[layout][0]
    array = np.arange(6.0).reshape(2, 3)
    assert same(open_orbax(save(tmp_path / "array", array, **options)).read(""), array)
    assert same(open_orbax(save(tmp_path / "list", [array], **options)).read("0"), array)
    assert same(open_orbax(save(tmp_path / "nameless", {"": array}, **options)).read(""), array)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_characters_in_the_path(small: Path, tmp_path: Path, layout: str) -> None:
    path = shutil.copytree(small / layout, tmp_path / "ä [1]*%20 ?#:{x}'\"")
    assert looks_like_orbax(path)
    assert same(open_orbax(path).read("a/short"), np.arange(3.0))


def test_any_way_to_write_the_path(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small)
    for path in (Path("ocdbt"), Path("zarr3/../ocdbt"), Path("./ocdbt/"), small / "zarr3" / ".." / "ocdbt"):
        assert same(open_orbax(path).read("a/short"), np.arange(3.0))
    for path in (Path("directories"), Path("zarr3/../directories")):
        assert same(open_orbax(path).read("a/short"), np.arange(3.0))


@pytest.mark.slow
def test_random_keys_are_their_data(tmp_path: Path) -> None:
    import jax

    keys = {"one": jax.random.key(3), "many": jax.random.split(jax.random.key(4, impl="rbg"), 3)}
    source = open_orbax(save(tmp_path / "keys", keys))
    for name, key in keys.items():
        assert same(source.read(name), np.asarray(jax.random.key_data(key)))


@pytest.mark.slow
def test_nnx_keeps_the_last_key(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp
    from flax import nnx

    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", state)
    source = open_orbax(tmp_path / "model")
    assert [leaf.keys for leaf in source.leaves.values()] == [("bias", "value"), ("kernel", "value")]
    assert same(source.read("kernel/value"), np.asarray(state["kernel"][...]))


def test_chunks_need_not_divide_the_array(copy: Copy) -> None:
    path = copy("directories")
    shutil.rmtree(path / "a.short")
    want = np.arange(35.0).reshape(5, 7)
    metadata = {"shape": [5, 7], "chunks": [2, 3], "dtype": "<f8"}
    store = {"driver": "file", "path": f"{path}/a.short/"}
    ts.open({"driver": "zarr", "kvstore": store, "metadata": metadata}, create=True).result().write(want).result()
    assert same(open_orbax(path).read("a/short"), want)


def test_a_tree_without_arrays(tmp_path: Path) -> None:
    source = open_orbax(save(tmp_path / "empty", {"nothing": None}))
    assert (source.format, dict(source.leaves)) == ("Orbax, no arrays", {})
    assert source.absent == (Absent(("nothing",), "None"),)


def test_a_data_file_that_is_a_directory_is_called_so(copy: Copy) -> None:
    path = copy("ocdbt")
    size, file = max((file.stat().st_size, file) for file in path.rglob("d/*") if file.is_file())
    assert size
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointError) as error:
        open_orbax(path)
    text = str(error.value)
    assert "directory" in text and "truncated" not in text and "4096 bytes" not in text


def test_a_container_that_was_filled_later_is_no_leaf(copy: Copy) -> None:
    path = copy("ocdbt")
    content = json.loads((path / "_METADATA").read_text())
    content["tree_metadata"]["('a',)"] = {
        "key_metadata": [{"key": "a", "key_type": 2}],
        "value_metadata": {"value_type": "Dict", "skip_deserialize": True},
    }
    (path / "_METADATA").write_text(json.dumps(content))
    source = open_orbax(path)
    assert source.absent == ()
    assert len(source.leaves) == 3


def test_a_type_with_a_handler_of_its_own_is_absent(copy: Copy) -> None:
    path = copy("directories")
    content = (path / "_METADATA").read_text().replace('"np.ndarray"', '"my.Quantized"', 1)
    (path / "_METADATA").write_text(content)
    shutil.rmtree(path / "a.long")
    source = open_orbax(path)
    assert list(source.leaves) == ["a/short", "zeros"]
    assert source.absent == (Absent(("a", "long"), "my.Quantized, not stored as an array"),)


def test_aggregate_file_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import msgpack
    from flax import serialization

    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 64)
    values = {
        "chunked": np.arange(100, dtype=np.int16).reshape(4, 25),
        "bfloat16": np.arange(5).astype(ml_dtypes.bfloat16),
        "complex": 1 + 2j,
        "scalar": np.float32(1.5),
        "int": 2**40,
        "float": 0.1,
        "bool": True,
        "none": None,
        "text": "words",
        "empty": {},
        "nested": {"a.b/c": np.ones((2, 0), np.float32)},
    }
    packed = serialization.msgpack_serialize(values)
    # A tuple as Orbax packs it, in an extension of its own.
    extra = msgpack.packb({"tuple": msgpack.ExtType(4, msgpack.packb([7, 0.5]))}, use_bin_type=True)
    content = bytes([packed[0] + 1]) + packed[1:] + extra[1:]
    (tmp_path / "checkpoint").write_bytes(content)
    source = open_orbax(tmp_path)
    assert source.format == "Orbax, aggregate file (msgpack)"
    want = {
        "chunked": values["chunked"],
        "bfloat16": values["bfloat16"],
        "complex": np.array(1 + 2j),
        "scalar": np.array(1.5, np.float32),
        "int": np.array(2**40),
        "float": np.array(0.1),
        "bool": np.array(True),
        "nested/a.b/c": np.ones((2, 0), np.float32),
        "tuple/0": np.array(7),
        "tuple/1": np.array(0.5),
    }
    assert set(source.leaves) == set(want)
    assert [name for name in want if not same(source.read(name), want[name])] == []
    assert set(source.absent) == {
        Absent(("none",), "None"),
        Absent(("text",), "string"),
        Absent(("empty",), "empty dict"),
    }


def test_values_of_the_aggregate_file_go_before_metadata(tmp_path: Path) -> None:
    shutil.copytree(ORBAX_0_5 / "leaf-directories", tmp_path / "ckpt")
    file = tmp_path / "ckpt" / "checkpoint"
    content = file.read_bytes()
    assert content.endswith(b"\xa4step\xb2PLACEHOLDER://step")
    file.write_bytes(content.removesuffix(b"\xb2PLACEHOLDER://step") + b"\x2a")
    shutil.rmtree(tmp_path / "ckpt" / "step")
    assert same(open_orbax(tmp_path / "ckpt").read("step"), np.array(42))


def test_a_damaged_placeholder_does_not_hide_an_array(tmp_path: Path) -> None:
    shutil.copytree(ORBAX_0_5 / "leaf-directories", tmp_path / "ckpt")
    file = tmp_path / "ckpt" / "checkpoint"
    file.write_bytes(file.read_bytes().replace(b"PLACEHOLDER://step", b"PLACEHOLDEX://step"))
    source = open_orbax(tmp_path / "ckpt")
    assert same(source.read("step"), np.array(7))


def test_placeholder_without_its_directory(tmp_path: Path) -> None:
    shutil.copytree(ORBAX_0_5 / "without-metadata", tmp_path / "ckpt")
    shutil.rmtree(tmp_path / "ckpt" / "params.half")
    finding = refusal(tmp_path / "ckpt")
    assert (finding.code, finding.path, finding.fix) == ("checkpoint-incomplete", "ckpt: leaf params/half", AGAIN)


@pytest.mark.parametrize("golden", ["aggregated", "aggregated-without-metadata", "without-metadata"])
def test_truncated_aggregate_file(tmp_path: Path, golden: str) -> None:
    shutil.copytree(ORBAX_0_5 / golden, tmp_path / "ckpt")
    file = tmp_path / "ckpt" / "checkpoint"
    content = file.read_bytes()
    for size in (0, 1, 20, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        finding = refusal(tmp_path / "ckpt")
        assert finding.code == "checkpoint-truncated" and finding.path.startswith("ckpt/checkpoint"), size
        assert "copy the checkpoint again" in finding.fix
