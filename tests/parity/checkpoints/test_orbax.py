"""Reads what the real Orbax wrote: its layouts, its trees, its steps and items, and what is left after damage."""

import collections
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

from convert.checkpoints.orbax.reader import looks_like_orbax, open_orbax
from convert.checkpoints.orbax.stores import AGAIN
from convert.checkpoints.source import Absent, Source
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from support.orbax_writers import values as sharded_values
from support.paths import GOLDEN, TESTS
from support.source_contract import SourceContract, same

ORBAX_0_5 = GOLDEN / "orbax-0.5"

LAYOUTS = {
    "ocdbt": ({"use_ocdbt": True}, "Orbax, OCDBT, zarr"),
    "directories": ({"use_ocdbt": False}, "Orbax, one directory per leaf, zarr"),
    "zarr3": ({"use_ocdbt": True, "use_zarr3": True}, "Orbax, OCDBT, zarr3"),
    "zarr3-directories": ({"use_ocdbt": False, "use_zarr3": True}, "Orbax, one directory per leaf, zarr3"),
}
Moments = collections.namedtuple("Moments", ["mu", "nu"])
Copy = Callable[[str], Path]


def arrays() -> dict[str, np.ndarray]:
    """Name -> array of `tree()`."""
    numbers = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return numbers.normal(size=shape)

    return {
        "params/blocks.0/attn/kernel": floats(3, 4, 5).astype(np.float32),
        "params/blocks.0/attn/vec/bias": floats(5).astype(ml_dtypes.bfloat16),
        "layers/0/scale": floats(2).astype(np.float16),
        "params/ä b/w": floats(1, 1).astype(np.float32),
        "opt/0/mu": floats(4).astype(np.float32),
        "opt/0/nu": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
        "opt/1/0": np.array(3.5, np.float32),
        "opt/1/1": np.zeros((4, 300), np.float32),
        "dtypes/bool": np.array([True, False]),
        "dtypes/complex64": np.array([1 + 2j, -3j], np.complex64),
        "dtypes/float64": floats(3),
        "dtypes/float8_e4m3fn": floats(9).astype(ml_dtypes.float8_e4m3fn),
        "dtypes/float8_e5m2": floats(9).astype(ml_dtypes.float8_e5m2),
        "dtypes/int4": np.arange(-8, 8).reshape(2, 8).astype(ml_dtypes.int4),
        **{
            f"dtypes/{kind}{bits}": np.array([0, 1, np.iinfo(f"{kind}{bits}").max], f"{kind}{bits}")
            for kind in ("int", "uint")
            for bits in (8, 16, 32, 64)
        },
        "scalars/bool": np.array(True),
        "scalars/float": np.array(0.1),
        "scalars/int": np.array(-3),
        "scalars/numpy": np.array(1.5, np.float32),
    }


def tree() -> dict[str, Any]:
    import jax.numpy as jnp

    a = arrays()
    small = ("float8_e4m3fn", "float8_e5m2", "int4", "complex64")  # as JAX arrays; the others as NumPy's
    dtypes = {name.removeprefix("dtypes/"): array for name, array in a.items() if name.startswith("dtypes/")}
    return {
        "params": {
            "blocks.0": {
                "attn/kernel": jnp.asarray(a["params/blocks.0/attn/kernel"]),
                "attn": {"vec/bias": jnp.asarray(a["params/blocks.0/attn/vec/bias"])},
            },
            "ä b": {"w": a["params/ä b/w"]},
        },
        "layers": {0: {"scale": a["layers/0/scale"]}},
        "opt": [Moments(jnp.asarray(a["opt/0/mu"]), a["opt/0/nu"]), (a["opt/1/0"], jnp.asarray(a["opt/1/1"]))],
        "dtypes": {name: jnp.asarray(array) if name in small else array for name, array in dtypes.items()},
        "scalars": {"bool": True, "float": 0.1, "int": -3, "numpy": np.float32(1.5)},
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "none": None,
        "text": "not an array",
    }


def save(path: Path, values: Any, **options: Any) -> Path:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, values)
    return path


def replace_in(file: Path, **entries: Any) -> None:
    """Changes entries of a JSON file; None takes one away."""
    content = {**json.loads(file.read_text()), **entries}
    gone = {name for name, value in entries.items() if value is None}
    file.write_text(json.dumps({name: value for name, value in content.items() if name not in gone}))


WAIT = "wait for the save to end, or choose another step with --step"


def refusal(path: Path, **options: Any) -> Finding:
    """Open a damaged checkpoint; return the first finding, with paths relative to the test's directory."""
    assert looks_like_orbax(path)
    with pytest.raises(CheckpointError) as caught:
        open_orbax(path, **options)
    return relative(caught.value, path)


def read_refusal(path: Path, name: str) -> Finding:
    """Read a damaged leaf; return the finding, with paths relative to the test's directory."""
    source = open_orbax(path)
    with pytest.raises(CheckpointError) as caught:
        source.read(name)
    finding = relative(caught.value, path)
    assert finding.path == f"{path.name}: leaf {name}" and finding.data["leaf"] == name and finding.fix
    return finding


def relative(error: CheckpointError, path: Path) -> Finding:
    finding = error.findings[0]
    return replace(finding, path=finding.path.replace(f"{path.parent}/", ""))


def chosen(source: Source) -> list[tuple[str, Any, Any]]:
    """The choices on the way to a tree: code, what was chosen, and the others."""
    keys = {"step-chosen": ("step", "steps"), "item-chosen": ("item", "others")}
    return [(note.code, *(note.data[key] for key in keys[note.code])) for note in source.notes]


@pytest.fixture(scope="session", autouse=True)
def _on_cpu() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tree()` in every layout."""
    root = tmp_path_factory.mktemp("layouts")
    for name, (options, _) in LAYOUTS.items():
        save(root / name, tree(), **options)
    return root


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few leaves in every layout, to be damaged. `long` is too long for OCDBT to keep it inside its own nodes."""
    root = tmp_path_factory.mktemp("small")
    values = {"a": {"long": arrays_to_damage()["a/long"], "short": np.arange(3.0)}, "zeros": np.zeros(900, np.float32)}
    for name, (options, _) in LAYOUTS.items():
        save(root / name, values, **options)
    return root


def arrays_to_damage() -> dict[str, np.ndarray]:
    long = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)
    return {"a/long": long, "a/short": np.arange(3.0), "zeros": np.zeros(900, np.float32)}


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Copy:
    """Copies one of `small`'s layouts, to be changed."""

    def _copy(layout: str) -> Path:
        return shutil.copytree(small / layout, tmp_path / "checkpoint")

    return _copy


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written from eight devices of one process."""
    root = tmp_path_factory.mktemp("devices")
    _run(["devices", str(root)])
    return root


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by two processes of four devices each; `*-unmerged` is what is there before the first one merges."""
    root = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    _run(["process", "0", port, str(root)], ["process", "1", port, str(root)])
    for name in ("ocdbt", "zarr3"):
        unmerged = shutil.copytree(root / name, root / f"{name}-unmerged")
        (unmerged / "manifest.ocdbt").unlink()
        shutil.rmtree(unmerged / "d")
    return root


def _run(*commands: list[str]) -> None:
    script = str(TESTS / "support" / "orbax_writers.py")
    running = [
        subprocess.Popen([sys.executable, script, *command], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


# --- What is in it, bit for bit


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


def test_random_keys_are_their_data(tmp_path: Path) -> None:
    import jax

    keys = {"one": jax.random.key(3), "many": jax.random.split(jax.random.key(4, impl="rbg"), 3)}
    source = open_orbax(save(tmp_path / "keys", keys))
    for name, key in keys.items():
        assert same(source.read(name), np.asarray(jax.random.key_data(key)))


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


# --- The aggregate file


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


# --- Steps and items


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import jax
    import orbax.checkpoint as ocp

    root = tmp_path_factory.mktemp("managed")
    options = ocp.CheckpointManagerOptions(max_to_keep=None)
    with ocp.CheckpointManager(root / "plain", options=options) as manager:
        for step in (0, 100, 200):
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(2, step)}))
    options = ocp.CheckpointManagerOptions(step_prefix="checkpoint", step_format_fixed_length=8)
    names = ("state", "config", "array", "key")
    with ocp.CheckpointManager(root / "items", options=options, item_names=names) as manager:
        for step in (5, 10):
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave({"w": np.full(2, step)}),
                    config=ocp.args.JsonSave({"layers": 2}),
                    array=ocp.args.ArraySave(np.ones(2)),
                    key=ocp.args.JaxRandomKeySave(jax.random.key(0)),
                ),
                metrics={"loss": 0.5},
            )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        trees = {name: ocp.args.StandardSave({"w": np.full(2, i)}) for i, name in enumerate(("params", "opt"))}
        checkpointer.save(root / "two", args=ocp.args.Composite(**trees, config=ocp.args.JsonSave({})))
        checkpointer.save(root / "none", args=ocp.args.Composite(config=ocp.args.JsonSave({})))
    return root


@pytest.fixture
def steps(managed: Path, tmp_path: Path) -> Path:
    """Three steps, to be changed."""
    return shutil.copytree(managed / "plain", tmp_path / "run")


def test_takes_the_latest_step(managed: Path) -> None:
    source = open_orbax(managed / "plain")
    assert chosen(source) == [("step-chosen", 200, [0, 100, 200]), ("item-chosen", "default", [])]
    assert [str(note) for note in source.notes] == ["step 200 of 0, 100, 200", "reads the item default"]
    assert source.path == managed / "plain" / "200" / "default"
    assert same(source.read("w"), np.full(2, 200))


@pytest.mark.parametrize("step", [0, 100, 200])
def test_takes_the_step_that_was_asked_for(managed: Path, step: int) -> None:
    source = open_orbax(managed / "plain", step=step)
    assert chosen(source)[0] == ("step-chosen", step, [0, 100, 200])
    assert same(source.read("w"), np.full(2, step))


def test_a_step_that_is_not_there(managed: Path) -> None:
    finding = refusal(managed / "plain", step=150)
    assert (finding.code, finding.path, finding.expected) == ("step-not-found", "plain", "one of 0, 100, 200")


def test_steps_with_prefix_and_zeros(managed: Path) -> None:
    source = open_orbax(managed / "items", step=5)
    assert chosen(source) == [("step-chosen", 5, [5, 10]), ("item-chosen", "state", ["array", "config", "key"])]
    assert same(source.read("w"), np.full(2, 5))
    assert chosen(open_orbax(managed / "items"))[0] == ("step-chosen", 10, [5, 10])


def test_the_directory_of_a_step_or_an_item(managed: Path) -> None:
    for step in (None, 100):
        assert same(open_orbax(managed / "plain" / "100", step=step).read("w"), np.full(2, 100))
        assert same(open_orbax(managed / "plain" / "100" / "default", step=step).read("w"), np.full(2, 100))
    finding = refusal(managed / "plain" / "100", step=3)
    assert (finding.code, finding.path, finding.fix) == ("checkpoint-option", "100", "leave out --step 3")


def test_items(managed: Path) -> None:
    finding = refusal(managed / "two")
    assert (finding.code, finding.path) == ("checkpoint-ambiguous", "two")
    assert "config (JSON), opt (tree), params (tree)" in finding.problem and "--item" in finding.fix
    for i, name in enumerate(("params", "opt")):
        source = open_orbax(managed / "two", item=name)
        assert chosen(source) == [("item-chosen", name, [])]
        assert same(source.read("w"), np.full(2, i))
    for item in ("ema", "config"):
        finding = refusal(managed / "two", item=item)
        assert (finding.code, finding.path) == ("item-not-found", "two") and item in finding.problem
        assert finding.got == "config (JSON), opt (tree), params (tree)"
    finding = refusal(managed / "none")
    assert (finding.code, finding.got) == ("item-not-found", "config (JSON)")
    finding = refusal(managed / "plain" / "0" / "default", item="params")
    assert (finding.code, finding.fix) == ("checkpoint-option", "leave out --item params")


def test_a_single_array_can_be_named_as_item(managed: Path) -> None:
    assert same(open_orbax(managed / "items", item="array").read("checkpoint"), np.ones(2))


def test_steps_that_are_trees_themselves(small: Path, tmp_path: Path) -> None:
    for name in ("step_1", "step_20"):
        shutil.copytree(small / "ocdbt", tmp_path / "run" / name)
    (tmp_path / "run" / "logs_3").mkdir()
    assert chosen(open_orbax(tmp_path / "run")) == [("step-chosen", 20, [1, 20])]
    shutil.copytree(small / "ocdbt", tmp_path / "run" / "other_20")
    finding = refusal(tmp_path / "run")
    assert (finding.code, finding.path) == ("checkpoint-ambiguous", "run")
    assert "other_20, step_20" in finding.problem


def test_many_steps_are_not_all_listed(small: Path, tmp_path: Path) -> None:
    for step in range(20):
        (tmp_path / "run" / str(step)).mkdir(parents=True)
        shutil.copy(small / "ocdbt" / "_METADATA", tmp_path / "run" / str(step))
    finding = refusal(tmp_path / "run", step=99)
    assert (finding.code, finding.path, finding.got) == ("step-not-found", "run", "99")
    assert finding.expected == "one of 0, 1, 2, ... 17, 18, 19 (20 steps)"
    assert finding.data["steps"] == list(range(20))


def test_a_directory_called_checkpoints_is_looked_into(managed: Path, tmp_path: Path) -> None:
    shutil.copytree(managed / "plain", tmp_path / "run" / "checkpoints")
    assert looks_like_orbax(tmp_path / "run")
    assert chosen(open_orbax(tmp_path / "run"))[0] == ("step-chosen", 200, [0, 100, 200])


# --- Not finished


def test_a_name_of_a_save_that_has_not_ended(copy: Copy, tmp_path: Path) -> None:
    path = copy("ocdbt").rename(tmp_path / "ckpt.orbax-checkpoint-tmp-17")
    (tmp_path / "latest").symlink_to(path)
    for name in (path.name, "ckpt", "latest"):
        finding = refusal(tmp_path / name)
        assert (finding.code, finding.path, finding.fix) == ("checkpoint-unfinished", name, WAIT)
        assert "ckpt.orbax-checkpoint-tmp-17" in finding.problem


def test_unfinished_steps_are_passed_over(steps: Path) -> None:
    (steps / "200").rename(steps / "200.orbax-checkpoint-tmp")
    assert chosen(open_orbax(steps))[0] == ("step-chosen", 100, [0, 100])
    assert open_orbax(steps).notes[0].data["not_finished"] == ["200.orbax-checkpoint-tmp"]
    finding = refusal(steps, step=200)
    assert (finding.code, finding.path) == ("checkpoint-unfinished", "run/200.orbax-checkpoint-tmp")


def test_only_unfinished_steps(steps: Path) -> None:
    shutil.rmtree(steps / "0")
    shutil.rmtree(steps / "100")
    (steps / "200").rename(steps / "200.orbax-checkpoint-tmp-4")
    finding = refusal(steps)
    assert (finding.code, finding.path) == ("checkpoint-unfinished", "run")
    assert "200.orbax-checkpoint-tmp-4" in finding.problem


def test_a_step_without_commit_time(steps: Path) -> None:
    metadata = steps / "200" / "_CHECKPOINT_METADATA"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "commit_timestamp_nsecs": None}))
    (steps / "200" / "commit_success.txt").unlink()
    for path, step in ((steps / "200", None), (steps / "200" / "default", None), (steps, 200)):
        finding = refusal(path, step=step)
        assert (finding.code, finding.fix) == ("checkpoint-unfinished", WAIT)
        assert finding.path == ("run/200" if step else path.name)
        assert "_CHECKPOINT_METADATA has no commit time" in finding.problem
    assert chosen(open_orbax(steps))[0] == ("step-chosen", 100, [0, 100])
    assert open_orbax(steps).notes[0].data["not_finished"] == ["200"]


def test_commit_success_is_due_where_earlier_steps_have_it(steps: Path) -> None:
    # As on GCS before 0.5.11: no commit time, and no other sign.
    for step in ("0", "100", "200"):
        (steps / step / "_CHECKPOINT_METADATA").unlink()
    (steps / "200" / "commit_success.txt").unlink()
    assert chosen(open_orbax(steps))[0] == ("step-chosen", 100, [0, 100])
    assert open_orbax(steps).notes[0].data["not_finished"] == ["200"]
    finding = refusal(steps, step=200)
    assert (finding.code, finding.path) == ("checkpoint-unfinished", "run/200")
    assert "commit_success.txt" in finding.problem


def test_commit_success_is_not_due_before_orbax_0_12_3(steps: Path) -> None:
    # 0.5.11 to 0.12.2 on a disk: a commit time, and no file. Before 0.5.11: neither.
    for file in steps.rglob("commit_success.txt"):
        file.unlink()
    assert chosen(open_orbax(steps))[0] == ("step-chosen", 200, [0, 100, 200])
    for file in steps.rglob("_CHECKPOINT_METADATA"):
        file.unlink()
    assert chosen(open_orbax(steps))[0] == ("step-chosen", 200, [0, 100, 200])


def test_commit_success_after_an_upgrade(steps: Path) -> None:
    for step in ("0", "100"):
        (steps / step / "_CHECKPOINT_METADATA").unlink()
        (steps / step / "commit_success.txt").unlink()
    assert chosen(open_orbax(steps, step=100))[0] == ("step-chosen", 100, [0, 100, 200])


def test_a_damaged_step_is_not_passed_over(steps: Path) -> None:
    (steps / "200" / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {')
    finding = refusal(steps)
    assert (finding.code, finding.path) == ("checkpoint-corrupt", "run/200/_CHECKPOINT_METADATA")
    assert chosen(open_orbax(steps, step=100))[0] == ("step-chosen", 100, [0, 100, 200])


def test_an_item_that_is_not_finished(steps: Path) -> None:
    (steps / "200" / "default").rename(steps / "200" / "default.orbax-checkpoint-tmp")
    finding = refusal(steps / "200")
    assert (finding.code, finding.path) == ("checkpoint-unfinished", "200")
    assert "default.orbax-checkpoint-tmp" in finding.problem


# --- Damage


def test_a_lost_chunk(copy: Copy) -> None:
    path = copy("directories")
    (path / "a.long" / "0.0").unlink()
    finding = read_refusal(path, "a/long")
    assert (finding.code, finding.fix) == ("checkpoint-unreadable", AGAIN)
    assert 'float32[40,50]: chunk {0, 0} stored at local file "a.long/0.0" is missing' in finding.problem


def test_a_lost_chunk_of_zeros(copy: Copy) -> None:
    path = copy("directories")
    (path / "zeros" / "0").unlink()
    assert 'local file "zeros/0" is missing' in read_refusal(path, "zeros").problem
    # Orbax before 0.10.0 did not say that it stores zeros, but with zarr it did.
    replace_in(path / "_METADATA", store_array_data_equal_to_fill_value=None)
    assert 'local file "zeros/0" is missing' in read_refusal(path, "zeros").problem


def test_zarr3_may_lack_chunks_of_zeros_before_orbax_0_10(copy: Copy) -> None:
    path = copy("zarr3-directories")
    (path / "zeros" / "c" / "0").unlink()
    assert 'local file "zeros/c/0" is missing' in read_refusal(path, "zeros").problem
    for flag in (None, False):
        replace_in(path / "_METADATA", store_array_data_equal_to_fill_value=flag)
        assert same(open_orbax(path).read("zeros"), np.zeros(900, np.float32))


def test_a_lost_chunk_of_several_devices(devices: Path, tmp_path: Path) -> None:
    path = shutil.copytree(devices / "directories", tmp_path / "checkpoint")
    (path / "rows" / "5.0").unlink()
    assert 'chunk {5, 0} stored at local file "rows/5.0" is missing' in read_refusal(path, "rows").problem


def test_a_lost_process(processes: Path, tmp_path: Path) -> None:
    path = shutil.copytree(processes / "ocdbt-unmerged", tmp_path / "checkpoint")
    shutil.rmtree(path / "ocdbt.process_1")
    # Which of the lost chunks is named depends on which of the concurrent reads fails first.
    finding = read_refusal(path, "matrix")
    assert re.search(r'chunk \{([23]), ([01])\} stored at "matrix/\1\.\2" is missing', finding.problem)
    assert "ocdbt.process_* directories of all processes" in finding.fix and AGAIN in finding.fix


def test_a_process_without_its_manifest(processes: Path, tmp_path: Path) -> None:
    path = shutil.copytree(processes / "ocdbt-unmerged", tmp_path / "checkpoint")
    (path / "ocdbt.process_1" / "manifest.ocdbt").unlink()
    finding = refusal(path)
    assert (finding.code, finding.path) == ("checkpoint-incomplete", "checkpoint/ocdbt.process_1")
    assert "manifest.ocdbt is missing" in finding.problem and finding.fix == AGAIN


def test_a_lost_manifest(copy: Copy) -> None:
    path = copy("ocdbt")
    (path / "manifest.ocdbt").unlink()
    assert open_orbax(path).format == "Orbax, OCDBT, not merged (1 process), zarr"  # the process has all arrays
    shutil.rmtree(path / "ocdbt.process_0")
    finding = refusal(path)
    assert (finding.code, finding.path) == ("checkpoint-incomplete", "checkpoint")
    assert "manifest.ocdbt is missing" in finding.problem and finding.fix == AGAIN


def test_lost_data_of_ocdbt(copy: Copy) -> None:
    path = copy("ocdbt")
    file = max((path / "ocdbt.process_0" / "d").iterdir(), key=lambda file: file.stat().st_size)
    os.truncate(file, 5_000)
    finding = refusal(path)
    assert (finding.code, finding.path, finding.fix) == ("checkpoint-truncated", "checkpoint", AGAIN)
    assert f"ocdbt.process_0/d/{file.name}" in finding.problem and "a.long/0.0" in finding.problem
    assert finding.got == "5000 bytes" and re.fullmatch(r"\d+ bytes", finding.expected)
    file.unlink()
    finding = refusal(path)
    assert (finding.code, finding.path, finding.fix) == ("checkpoint-incomplete", "checkpoint", AGAIN)
    assert f"ocdbt.process_0/d/{file.name}" in finding.problem and "a.long/0.0" in finding.problem


def test_lost_nodes_of_ocdbt(copy: Copy) -> None:
    path = copy("ocdbt")
    (file,) = (path / "d").iterdir()
    size = file.stat().st_size
    file.unlink()
    finding = refusal(path)
    assert (finding.code, finding.path, finding.fix) == ("checkpoint-unreadable", "checkpoint", AGAIN)
    assert (
        f"d/{file.name} at byte 0: Error reading Byte range [0, {size}) of local file "
        f'"d/{file.name}" (there is no such file)'
    ) in finding.problem
    (path / "manifest.ocdbt").write_bytes(b"")
    finding = refusal(path)
    assert finding.code == "checkpoint-unreadable" and 'Error decoding local file "manif' in finding.problem


@pytest.mark.parametrize("kind", ["single", "numbered"])
def test_a_tree_of_many_nodes(copy: Copy, kind: str) -> None:
    path = copy("ocdbt")
    old = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result()
    new = {"max_decoded_node_bytes": 300, "max_inline_value_bytes": 50, "manifest_kind": kind}
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/new/", "config": new}).result()
    for key in old.list().result():
        store.write(key, old.read(key).result().value).result()
    for name in ("d", "manifest.ocdbt", "ocdbt.process_0"):
        shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()
    shutil.copytree(path / "new", path, dirs_exist_ok=True)
    shutil.rmtree(path / "new")
    assert (path / "manifest.0000000000000001").exists() == (kind == "numbered")
    source = open_orbax(path)
    assert {name: array for name, array in arrays_to_damage().items() if not same(source.read(name), array)} == {}


def test_lost_metadata(copy: Copy) -> None:
    path = copy("directories")
    (path / "a.short" / ".zarray").unlink()
    finding = refusal(path)
    assert (finding.code, finding.path, finding.fix) == ("checkpoint-incomplete", "checkpoint: leaf a/short", AGAIN)
    (path / "_METADATA").unlink()
    finding = refusal(path)
    assert (finding.code, finding.path) == ("checkpoint-incomplete", "checkpoint")
    assert "_METADATA is missing" in finding.problem and "copy the checkpoint again" in finding.fix


@pytest.mark.parametrize("layout", ["ocdbt", "zarr3"])
def test_lost_metadata_of_ocdbt(copy: Copy, layout: str) -> None:
    path = copy(layout)
    (path / "_METADATA").unlink()
    finding = refusal(path)
    assert (finding.code, finding.path) == ("checkpoint-incomplete", "checkpoint")
    assert "_METADATA is missing" in finding.problem


def test_truncated_metadata(copy: Copy) -> None:
    path = copy("ocdbt")
    content = (path / "_METADATA").read_bytes()
    (path / "_METADATA").write_bytes(content[:300])
    finding = refusal(path)
    assert (finding.code, finding.path) == ("checkpoint-corrupt", "checkpoint/_METADATA")
    assert "truncated or corrupt" in finding.problem and "copy the checkpoint again" in finding.fix


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "expected a JSON object, got list"),
        ("{}", "tree_metadata is missing"),
        ('{"tree_metadata": {"x": 1}}', "the entry x has no key_metadata or value_metadata"),
        ('{"tree_metadata": {}, "use_zarr3": "no"}', "use_zarr3 is not valid: expected true or false, got 'no'"),
        ('{"tree_metadata": {"x": {"key_metadata": [], "value_metadata": {"value_type": 3}}}}', "x is not valid"),
        ("[" * 100_000, "not valid JSON"),
        ("\udcff", "not valid JSON"),
    ],
)
def test_corrupt_metadata(copy: Copy, content: str, said: str) -> None:
    path = copy("ocdbt")
    (path / "_METADATA").write_text(content, errors="surrogateescape")
    finding = refusal(path)
    assert (finding.code, finding.path) == ("checkpoint-corrupt", "checkpoint/_METADATA")
    assert said in str(finding)


@pytest.mark.parametrize(
    ("change", "problem", "got"),
    [
        ({"shape": [-3]}, "the shape is not valid", "[-3]"),
        ({"shape": "x"}, "the shape is not valid", "'x'"),
        ({"shape": [True]}, "the shape is not valid", "[True]"),
        ({"shape": [1] * 40}, "the shape is not valid", "[1, 1"),
        ({"chunks": [0]}, "the chunk shape is not valid", "[0]"),
        ({"chunks": [3, 3]}, "the chunks do not fit the array", "[3, 3]"),
        ({"shape": [2]}, "the chunks do not fit the array", "[3]"),
        ({"shape": [10**12]}, "the size of the array is not possible", "float64[1000000000000] in 333333333334 chunks"),
        ({"dtype": ">f8"}, "unknown dtype", "'>f8'"),
        ({"dtype": "<f3"}, "unknown dtype", "'<f3'"),
        ({"dtype": [["x", "<f8"]]}, "unknown dtype", "[['x', '<f8']]"),
    ],
)
def test_corrupt_array_metadata(copy: Copy, change: dict[str, Any], problem: str, got: str) -> None:
    path = copy("directories")
    replace_in(path / "a.short" / ".zarray", **change)
    finding = refusal(path)
    assert (finding.code, finding.path) == ("checkpoint-corrupt", "checkpoint: leaf a/short: a.short/.zarray")
    assert finding.problem == problem and finding.got.startswith(got)


def test_a_shape_that_became_larger(copy: Copy) -> None:
    path = copy("directories")
    replace_in(path / "a.short" / ".zarray", shape=[9_000])
    problem = read_refusal(path, "a/short").problem  # TensorStore names any of the missing chunks
    assert re.search(r'chunk \{(\d+)\} stored at local file "a.short/\1" is missing', problem)
    replace_in(path / "a.short" / ".zarray", shape=[90_000])
    assert "expected 30000 chunks and their metadata, got 2 files" in read_refusal(path, "a/short").problem


def test_an_array_that_does_not_fit_into_memory(copy: Copy) -> None:
    path = copy("directories")
    replace_in(path / "a.short" / ".zarray", shape=[10**13], chunks=[10**13])
    finding = read_refusal(path, "a/short")
    assert finding.code == "out-of-memory" and "Unable to allocate 72.8 TiB" in finding.problem


def test_a_shape_that_became_smaller_than_what_was_written(devices: Path, tmp_path: Path) -> None:
    path = shutil.copytree(devices / "chunked-directories", tmp_path / "checkpoint")
    replace_in(path / "replicated" / ".zarray", shape=[5], chunks=[1])
    finding = refusal(path)
    assert (finding.code, finding.path, finding.fix) == ("checkpoint-corrupt", "checkpoint: leaf replicated", AGAIN)
    assert (finding.expected, finding.got) == ("float32[5]", "_METADATA with a written part of [7]")


def test_two_leaves_under_one_name(copy: Copy) -> None:
    path = copy("ocdbt")
    content = json.loads((path / "_METADATA").read_text())
    entry = next(iter(content["tree_metadata"].values()))
    joined = {**entry, "key_metadata": [{"key": "a.long", "key_type": 2}]}
    content["tree_metadata"]["('a.long',)"] = joined
    (path / "_METADATA").write_text(json.dumps(content))
    finding = refusal(path)
    assert (finding.code, finding.path, finding.data["leaf"]) == ("leaf-name-clash", "checkpoint", "a.long")
    assert "['a', 'long'] and ['a.long']" in finding.problem


def test_names_do_not_lead_out_of_the_checkpoint(copy: Copy, tmp_path: Path) -> None:
    path = copy("directories")
    (path / "a.short").rename(tmp_path / "elsewhere")
    content = json.loads((path / "_METADATA").read_text())
    content["tree_metadata"]["('a', 'short')"]["key_metadata"] = [{"key": "../elsewhere", "key_type": 2}]
    (path / "_METADATA").write_text(json.dumps(content))
    finding = refusal(path)
    assert (finding.code, finding.path) == ("checkpoint-link-refused", "checkpoint")
    assert "'../elsewhere/.zarray'" in finding.problem


def _damaged(path: Path, random: random.Random) -> Iterator[tuple[str, bytes | None]]:
    """Each file of `path` lost, truncated, and with flipped bits: its name and its new content."""
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        content = file.read_bytes()
        name = str(file.relative_to(path))
        yield name, None
        for _ in range(3):
            yield name, content[: random.randrange(len(content))]
        for _ in range(8):
            flipped = bytearray(content)
            flipped[random.randrange(len(content))] ^= 1 << random.randrange(8)
            yield name, bytes(flipped)


@pytest.mark.parametrize("layout", [*LAYOUTS, "unmerged"])
def test_damage_is_an_error_or_does_no_harm(small: Path, tmp_path: Path, layout: str) -> None:
    """No crash, no other exception, no wrong data: but for the values themselves, which no layout has checksums of.

    What the values are: the chunks of directories, and what OCDBT keeps outside its nodes (`ocdbt.process_0/d`, where
    the nodes are not needed once they are merged). zstd finds damage only where it no longer decodes.
    """
    path = shutil.copytree(small / ("ocdbt" if layout == "unmerged" else layout), tmp_path / "checkpoint")
    if layout == "unmerged":
        (path / "manifest.ocdbt").unlink()
        shutil.rmtree(path / "d")
    expected = arrays_to_damage()
    caught = 0
    for name, content in _damaged(path, random.Random(layout)):
        file = path / name
        before = file.read_bytes()
        file.unlink() if content is None else file.write_bytes(content)
        values = re.fullmatch(r"ocdbt\.process_0/d/.*|.*/(c/)?[0-9./]+", name) is not None
        try:
            source = open_orbax(path)
            wrong = [leaf for leaf in source.leaves if not same(source.read(leaf), expected[leaf])]
            assert source.leaves.keys() == expected.keys()
            assert wrong == [] or (values and content is not None and len(content) == len(before)), (name, content)
        except CheckpointError as error:
            text = str(error)
            assert "copy" in text or error.code == "checkpoint-unfinished"
            assert "source locations" not in text and "tensorstore_spec" not in text
            assert len(text) < 700 and str(path) in text
            caught += 1
        file.write_bytes(before)
    assert caught > 20


@pytest.mark.parametrize("layout", ["ocdbt", "zarr3"])
def test_all_damage_to_the_nodes_of_ocdbt_is_found(small: Path, tmp_path: Path, layout: str) -> None:
    path = shutil.copytree(small / layout, tmp_path / "checkpoint")
    for name, content in _damaged(path, random.Random(0)):
        if content is not None and (name == "manifest.ocdbt" or name.startswith("d/")):
            before = (path / name).read_bytes()
            (path / name).write_bytes(content)
            finding = refusal(path)
            assert (finding.code, finding.path) == ("checkpoint-unreadable", "checkpoint")
            (path / name).write_bytes(before)


# --- What is none


def test_what_is_no_orbax_checkpoint(tmp_path: Path) -> None:
    assert not looks_like_orbax(tmp_path / "nothing")
    assert not looks_like_orbax(tmp_path)
    (tmp_path / "model.npz").write_bytes(b"PK")
    assert not looks_like_orbax(tmp_path / "model.npz")
    for name, code in {
        "nothing": "checkpoint-missing",
        "": "checkpoint-unknown-format",
        "model.npz": "checkpoint-unknown-format",
    }.items():
        with pytest.raises(CheckpointError) as caught:
            open_orbax(tmp_path / name)
        assert caught.value.code == code and caught.value.findings[0].path == str(tmp_path / name)


@pytest.mark.parametrize(
    "content",
    [
        b'model_checkpoint_path: "model.ckpt-100"\n',  # TensorFlow
        b"\x80\x04\x95",  # a pickle
        b"PK\x03\x04",  # torch.save
        b"\x82\xafflattened_state\x90\xb0str_pytree_state\xa0",  # paxml
    ],
)
def test_files_of_others_called_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "checkpoint").write_bytes(content)
    assert not looks_like_orbax(tmp_path)


def test_looks_like_orbax(managed: Path, written: Path, processes: Path) -> None:
    for path in (managed, written, processes):
        assert all(looks_like_orbax(child) for child in path.iterdir())
    assert looks_like_orbax(managed / "plain" / "100" / "default")
    assert all(looks_like_orbax(path) for path in ORBAX_0_5.iterdir() if path.is_dir())
    assert not looks_like_orbax(TESTS)


def test_neither_jax_nor_orbax_is_needed(written: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from convert.checkpoints.orbax.reader import open_orbax\n"
        "source = open_orbax(Path(sys.argv[1])); [source.read(name) for name in source.leaves]\n"
        "print(sorted({'jax', 'jaxlib', 'flax', 'orbax', 'torch', 'etils'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(written / "ocdbt")], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr
