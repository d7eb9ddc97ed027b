"""Every file format meets the contract of `Source`, is recognised by its content, and fails cleanly when it is damaged."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import convert
from convert import CheckpointError, open_source
from convert.checkpoints.chunks import PIECE
from convert.checkpoints.source import Absent, Source
from convert.core.findings import Finding
from support import writers
from support.source_contract import SourceContract, same
from support.writers import float8, native, odd, plain


@pytest.fixture(scope="session", autouse=True)
def _on_cpu() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("KERAS_BACKEND", "jax")


def refusal(path: Path, **options: Any) -> Finding:
    """Open a damaged or unknown checkpoint; return the only finding, with paths relative to the folder of `path`."""
    with pytest.raises(CheckpointError) as caught:
        open_source(path, **options)
    (finding,) = caught.value.findings
    return replace(finding, path=finding.path.replace(f"{path.parent}/", ""))


def values_without(*names: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in (plain() | float8()).items() if name not in names}


# ---- the contract


class TestMsgpack(SourceContract):
    @pytest.fixture(scope="class", params=["file", "hub", "shards", "chunked", "steps"])
    @classmethod
    def source(cls, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Source:
        folder = tmp_path_factory.mktemp("msgpack") / "model"
        if request.param == "shards":
            return open_source(writers.msgpack_shards(folder, plain() | float8()))
        folder.mkdir()
        if request.param == "chunked":
            import flax.serialization

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 20)
                file = writers.msgpack(folder / "x", plain() | float8())
            assert b"__msgpack_chunked_array__" in file.read_bytes()
            return open_source(file)
        if request.param == "steps":
            writers.msgpack(folder / "checkpoint_9", {"w": np.ones(1)})
            writers.msgpack(folder / "checkpoint_10", plain() | float8())
            return open_source(folder)
        if request.param == "hub":  # among the other files of a repository
            (folder / "config.json").write_text("{}")
            writers.msgpack(folder / "flax_model.msgpack", plain() | float8())
            return open_source(folder)
        return open_source(writers.msgpack(folder / "any-name", plain() | float8()))

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls) -> Mapping[str, np.ndarray]:
        return plain() | float8()


class TestNpz(SourceContract):
    @pytest.fixture(scope="class", params=[False, True])
    @classmethod
    def source(cls, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Source:
        return open_source(writers.npz(tmp_path_factory.mktemp("npz") / "x.npz", odd(), compressed=request.param))

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls) -> Mapping[str, np.ndarray]:
        return native(odd())


class TestSafetensors(SourceContract):
    NAMES = ("blocks/2/scale", "größe")  # float64 and int64, which JAX makes narrower

    @pytest.fixture(scope="class", params=["file", "shards"])
    @classmethod
    def source(cls, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Source:
        folder = tmp_path_factory.mktemp("safetensors") / "model"
        if request.param == "shards":
            return open_source(writers.safetensors_shards(folder, values_without(*cls.NAMES)))
        return open_source(writers.safetensors(folder, values_without(*cls.NAMES)))

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls) -> Mapping[str, np.ndarray]:
        return values_without(*cls.NAMES)


class TestEquinox(SourceContract):
    sorted_by_name = False  # the order is the file's

    @pytest.fixture(scope="class", params=["plain", "hyperparameters"])
    @classmethod
    def source(cls, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Source:
        folder = tmp_path_factory.mktemp("eqx")
        line = {"width": 4, "text": "ä{"} if request.param == "hyperparameters" else None
        path = writers.equinox(folder / "model.eqx", list(cls.values().values()), line)
        rows = [
            {"path": name.split("/"), "shape": array.shape, "dtype": array.dtype.name}
            for name, array in cls.values().items()
        ]
        (folder / "s.json").write_text(json.dumps({"format": "convert skeleton 1", "records": rows}))
        cls.options = {"skeleton": folder / "s.json"}
        return open_source(path, skeleton=folder / "s.json")

    @staticmethod
    def values() -> dict[str, np.ndarray]:
        return native(odd()) | float8()

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls) -> Mapping[str, np.ndarray]:
        return cls.values()


class TestKeras(SourceContract):
    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> Any:
        return writers.keras_model()

    @pytest.fixture(scope="class", params=["model.weights.h5", "model.keras", "model.weights.json"])
    @classmethod
    def source(cls, tmp_path_factory: pytest.TempPathFactory, model: Any, request: pytest.FixtureRequest) -> Source:
        path = tmp_path_factory.mktemp("keras") / request.param
        if request.param.endswith(".keras"):
            model.save(path)
        elif request.param.endswith(".json"):
            model.save_weights(path, max_shard_size=3.5e-7)
            assert len(list(path.parent.glob("*.h5"))) > 1
        else:
            model.save_weights(path)
        return open_source(path)

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, model: Any) -> Mapping[str, np.ndarray]:
        return writers.keras_expected(model)

    def test_tells_the_layers_own_names(self, source: Source) -> None:
        assert "first is chosen_name" in str(source.notes[0])


class TestT5X(SourceContract):
    @pytest.fixture(scope="class", params=["tensorstore", "partly", "inline", "version 2", "steps"])
    @classmethod
    def source(cls, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Source:
        values = {f"target/{name}": array for name, array in plain().items()}
        inline = {"partly": tuple(values)[::2], "inline": tuple(values)}.get(request.param, ())
        folder = tmp_path_factory.mktemp("t5x")
        path = writers.t5x(folder / "checkpoint_1000", values, inline, version=2 if request.param == "version 2" else 3)
        if request.param == "steps":
            writers.t5x(folder / "checkpoint_90", {"target/w": np.ones(2)})
            (folder / "checkpoint_2000.tmp-1234").mkdir()
            source = open_source(folder)
            (note,) = source.notes
            assert note.code == "step-chosen"
            assert note.data == {"step": 1000, "steps": [90, 1000], "not_finished": ["checkpoint_2000.tmp-1234"]}
            assert list(open_source(folder, step=90).leaves) == ["target/w"]
            return source
        source = open_source(path / "checkpoint" if request.param == "inline" else path)
        assert source.format == f"T5X, version {2 if request.param == 'version 2' else 3}"
        return source

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls) -> Mapping[str, np.ndarray]:
        return {f"target/{name}": array for name, array in plain().items()}


# ---- what is particular to one format


def test_msgpack_of_numbers_lists_and_nothing(tmp_path: Path) -> None:
    import flax.serialization

    tree = {"opt": [np.float32(1), {"mu": (1, True, 2.5, 1j)}], "none": None, "empty": {}, "list": [], "text": "x"}
    (tmp_path / "x").write_bytes(flax.serialization.to_bytes(tree))
    source = open_source(tmp_path / "x")
    assert {name: source.read(name).tolist() for name in source.leaves} == {
        "opt/0": 1.0,
        "opt/1/mu/0": 1,
        "opt/1/mu/1": True,
        "opt/1/mu/2": 2.5,
        "opt/1/mu/3": 1j,
    }
    assert source.leaves["opt/0"].spec.dtype == "float32"
    assert set(source.absent) == {
        Absent(("none",), "None"),
        Absent(("empty",), "empty dict"),
        Absent(("list",), "empty dict"),
        Absent(("text",), "string"),
    }


def test_msgpack_of_a_single_array(tmp_path: Path) -> None:
    import flax.serialization

    array = np.arange(6.0).reshape(2, 3)
    (tmp_path / "x").write_bytes(flax.serialization.msgpack_serialize(array))
    assert same(open_source(tmp_path / "x").read(""), array)


def test_equinox_without_names_says_how_to_get_them(tmp_path: Path) -> None:
    path = writers.equinox(tmp_path / "m.eqx", [np.ones((16, 3), np.float32), 5])
    finding = refusal(path)
    assert (finding.code, finding.path) == ("leaf-names-unknown", "m.eqx")
    assert finding.got == "2 records (0 float32[16,3], 1 int64[])"
    assert "convert skeleton module:factory > skeleton.json" in finding.fix
    assert "`leaf_names:` in the rule file" in finding.fix
    finding = refusal(path, leaf_names=[["a"], ["a", "b", "c"]])
    assert (finding.code, finding.expected) == ("leaf-names-unknown", "1 or 3 records as in the rules")
    finding = refusal(path, leaf_names=[["a", "b"], ["b", "a"]])
    assert (finding.code, finding.expected) == ("leaf-names-unknown", "the names of one rule file")
    assert list(open_source(path, leaf_names=[["x"], ["a/w", "n"]]).leaves) == ["a/w", "n"]
    finding = refusal(path, leaf_names=[["a", "a"]])
    assert (finding.code, finding.path, finding.data["leaf"]) == ("leaf-name-clash", "the rules", "a")


def test_a_skeleton_of_another_model_is_refused(tmp_path: Path) -> None:
    path = writers.equinox(tmp_path / "m.eqx", [np.ones((16, 3), np.float32), np.ones(3, ml_dtypes.bfloat16)])
    file = tmp_path / "s.json"

    def refused(*rows: tuple[list[str], list[int], str]) -> Finding:
        keys = ("path", "shape", "dtype")
        records = [dict(zip(keys, row, strict=True)) for row in rows]
        file.write_text(json.dumps({"format": "convert skeleton 1", "records": records}))
        return refusal(path, skeleton=file)

    for rows in ([(["a"], [16, 3], "float32")], []):
        finding = refused(*rows)
        assert (finding.code, finding.path) == ("skeleton-mismatch", "m.eqx")
        assert finding.expected == f"{len(rows)} records of {file}" and finding.got.startswith("2 records (0 ")
    finding = refused((["a", "w"], [3, 16], "float32"), (["b"], [3], "bfloat16"))
    assert (finding.code, finding.expected, finding.got) == (
        "skeleton-mismatch",
        "float32[3,16] for a/w",
        "float32[16,3]",
    )
    finding = refused((["a"], [16, 3], "float32"), (["b"], [3], "float16"))
    assert (finding.expected, finding.got) == ("float16[3] for b", "bfloat16[3]")
    finding = refused((["a"], [16, 3], "float32"), (["b"], [-3], "float16"))
    assert finding.code == "skeleton-invalid" and "record 1" in finding.problem
    file.write_text("[]")
    finding = refusal(path, skeleton=file)
    assert (finding.code, finding.path) == ("skeleton-invalid", "s.json")
    assert "convert skeleton module:factory > s.json" in finding.fix


FACTORY = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np

class Model(eqx.Module):
    mlp: eqx.nn.MLP
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    width: int
    half: jax.Array
    table: dict
    f8: jax.Array
    name: str = "x"

def make():
    def build(key):
        return Model(eqx.nn.MLP(2, 3, 4, 1, key=key), eqx.nn.BatchNorm(3, "b", mode="batch"), eqx.nn.Dropout(0.5), 7,
                     jax.random.normal(key, (3,), jnp.bfloat16), {"b": np.arange(3, dtype=np.int32), "a": (1.5, True)},
                     jnp.ones(2, jnp.float8_e5m2))
    return eqx.nn.make_with_state(build)(jax.random.key(0))

def key():
    return jax.random.key(0)

def nothing():
    return None

def broken():
    raise LookupError("no such thing")

if __name__ == "__main__":
    eqx.tree_serialise_leaves("model.eqx", make())
"""


@pytest.mark.slow
def test_skeleton_of_a_real_model(tmp_path: Path) -> None:
    """Names from `convert skeleton` in the order in which the real Equinox writes; every value in its place."""
    (tmp_path / "my_model.py").write_text(FACTORY)
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    assert run("my_model.py").returncode == 0
    done = run("-m", "convert", "skeleton", "my_model:make")
    assert done.returncode == 0, done.stderr
    (tmp_path / "skeleton.json").write_text(done.stdout)
    source = open_source(tmp_path / "model.eqx", skeleton=tmp_path / "skeleton.json")
    assert {
        "0/mlp/layers/0/weight", "0/mlp/layers/1/bias", "0/norm/inference", "0/drop/p", "0/drop/inference", "0/width",
        "0/half", "0/table/a/0", "0/table/a/1", "0/table/b", "0/f8", "1/0",
    } <= set(source.leaves)  # fmt: skip
    assert source.leaves["0/half"].spec.dtype == "bfloat16" and source.leaves["0/f8"].spec.dtype == "float8_e5m2"
    assert source.read("0/width") == 7 and source.read("0/table/a/0") == 1.5 and source.read("0/drop/p") == 0.5
    assert source.read("0/table/b").tolist() == [0, 1, 2]
    for factory, why in {
        "my_model:key": "got key<fry>; for a PRNG key, store jax.random.key_data(key)",
        "my_model:nothing": "no arrays; return the model, or (model, state)",
        "my_model:broken": "my_model:broken: LookupError: no such thing (my_model.py:",
        "my_model:gone": "my_model has no 'gone'",
        "my_modell:make": "No module named 'my_modell'",
        "my_model": "expected module:function, such as my_package.model:make",
    }.items():
        done = run("-m", "convert", "skeleton", factory)
        assert done.returncode == 2 and why in done.stderr, done.stderr


def test_records_in_the_rules_name_an_equinox_file(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    writers.equinox(tmp_path / "m.eqx", [weight, 7])
    rules = tmp_path / "r.yaml"
    rules.write_text(
        "model: m\ntitle: M\ntargets: {torch: {loads: T}}\nleaf_names: [layer/weight, size]\nrules:\n"
        "- {from: layer/weight, parameter: w}\n- {drop: size, because: no weight}\n"
    )
    convert.convert(str(rules), tmp_path / "m.eqx", tmp_path / "out.safetensors")
    from safetensors.numpy import load_file

    assert same(load_file(tmp_path / "out.safetensors")["w"], weight)


def test_keras_links_to_other_files_are_not_followed(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["vars/0"] = np.ones(3)
    for kind in ("soft", "external", "virtual", "storage"):
        path = tmp_path / f"{kind}.weights.h5"
        with h5py.File(path, "w") as file:
            group = file.create_group("layers/dense/vars")
            if kind == "soft":
                group["0"] = h5py.SoftLink("/nowhere")
            elif kind == "external":
                group["0"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "vars/0")
            elif kind == "virtual":
                layout = h5py.VirtualLayout((3,), "f8")
                layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "vars/0", (3,))
                group.create_virtual_dataset("0", layout)
            else:
                group.create_dataset("0", (3,), "f8", external=[(str(tmp_path / "other.h5"), 0, 24)])
        finding = refusal(path)
        assert finding.code == "checkpoint-link-refused"
        assert finding.path == f"{kind}.weights.h5: leaf layers/dense/vars/0"


def test_keras_of_another_age_is_refused(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "old.h5", "w") as file:
        file["model_weights/dense/kernel:0"] = np.ones(3)
    finding = refusal(tmp_path / "old.h5")
    assert (finding.code, finding.path) == ("checkpoint-unknown-format", "old.h5")
    assert finding.got == "HDF5 with model_weights/dense/kernel:0"


def test_without_h5py_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import h5py

    with h5py.File(tmp_path / "x.weights.h5", "w") as file:
        file["vars/0"] = np.ones(3)
    monkeypatch.setitem(sys.modules, "h5py", None)
    finding = refusal(tmp_path / "x.weights.h5")
    assert finding.code == "package-missing" and "pip install 'ckpt-convert[keras]'" in finding.fix


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("../outside", "checkpoint-link-refused"),
        ("/etc", "checkpoint-link-refused"),
        ("..", "checkpoint-link-refused"),
        ("", "checkpoint-link-refused"),
        ("missing", "checkpoint-incomplete"),
        ("linked", "checkpoint-link-refused"),
    ],
)
def test_t5x_reads_nothing_outside_its_folder(tmp_path: Path, path: str, code: str) -> None:
    outside = writers.t5x(tmp_path / "outside", {"w": np.ones(3)})
    folder = writers.t5x(tmp_path / "checkpoint_1", {"target/w": np.ones(3)}, kvstore={"driver": "file", "path": path})
    (folder / "linked").symlink_to(outside / "w")
    finding = refusal(folder)
    assert finding.code == code and "checkpoint: leaf target/w" in finding.path


def test_t5x_arrays_must_agree_with_the_file(tmp_path: Path) -> None:
    folder = writers.t5x(tmp_path / "checkpoint_1", {"target/w": np.ones(3)}, metadata={"shape": [4]})
    finding = refusal(folder)
    assert (finding.code, finding.path) == ("checkpoint-corrupt", "checkpoint_1/checkpoint: leaf target/w")
    assert (finding.expected, finding.got) == ("[4] as in the file", "float64[3] in target.w/.zarray")
    other = writers.t5x(tmp_path / "checkpoint_2", {"target/w": np.ones(3)})
    (other / "target.w" / "0").unlink()
    source = open_source(other)
    with pytest.raises(CheckpointError) as caught:
        source.read("target/w")
    assert caught.value.code == "checkpoint-unreadable" and "leaf target/w" in caught.value.findings[0].path
    (other / "target.w" / "0").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError) as caught:
        open_source(other).read("target/w")
    assert caught.value.code == "checkpoint-link-refused" and "target.w/0" in caught.value.findings[0].path


# ---- recognised by content, or refused with what is understood


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


def test_formats_are_told_by_content_whatever_the_name(tmp_path: Path) -> None:
    made = all_formats(tmp_path / "files")
    for wrong in ("x.npz", "x.eqx", "x.msgpack", "x.safetensors", "x.h5", "x.bin"):
        for name, path in made.items():
            if path.is_dir():
                continue
            copy = shutil.copy(path, tmp_path / wrong)
            assert open_source(copy, leaf_names=[["w"]]).format.startswith(name.split(" .")[0]), (wrong, name)
    assert open_source(made["T5X"]).format == "T5X, version 3"


def test_several_checkpoints_in_a_folder_must_be_named(tmp_path: Path) -> None:
    writers.msgpack(tmp_path / "flax_model.msgpack", {"w": np.ones(2)})
    assert list(open_source(tmp_path).leaves) == ["w"]
    writers.npz(tmp_path / "other.npz", {"w": np.ones(2)})
    with pytest.raises(CheckpointError) as caught:
        open_source(tmp_path)
    (finding,) = caught.value.findings
    assert (finding.code, finding.path) == ("checkpoint-ambiguous", str(tmp_path))
    assert all(name in finding.problem for name in ("flax_model.msgpack (flax msgpack)", "other.npz (NumPy .npz)"))


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


# ---- folders, links, shards


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


# ---- damage


def damaged_files(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    arrays = {"first": np.arange(40, dtype=np.float32), "second": np.arange(60, dtype=np.float32).reshape(3, 20)}
    model = folder / "k.weights.h5"
    import h5py

    with h5py.File(model, "w") as file:
        for name, array in arrays.items():
            file[f"{name}/vars/0"] = array
    return {
        "msgpack": (writers.msgpack(folder / "m", arrays), {}),
        "npz": (writers.npz(folder / "n.npz", arrays), {}),
        "deflated": (writers.npz(folder / "c.npz", arrays, compressed=True), {}),
        "safetensors": (writers.safetensors(folder / "s", arrays), {}),
        "equinox": (writers.equinox(folder / "e", list(arrays.values())), {"leaf_names": [list(arrays)]}),
        "keras": (model, {}),
        "t5x": (writers.t5x(folder / "t" / "c", arrays, tuple(arrays)) / "checkpoint", {}),
    }


def read_all(path: Path, options: dict[str, Any]) -> None:
    source = open_source(path, **options)
    for name in source.leaves:
        assert source.read(name).nbytes == source.leaves[name].spec.nbytes


@pytest.mark.parametrize("kind", ["msgpack", "npz", "deflated", "safetensors", "equinox", "keras", "t5x"])
def test_a_file_cut_anywhere_is_an_error(tmp_path: Path, kind: str) -> None:
    path, options = damaged_files(tmp_path)[kind]
    whole = path.read_bytes()
    read_all(path, options)
    for length in {*range(0, len(whole), 1 + len(whole) // 150), len(whole) - 1}:
        path.write_bytes(whole[:length])
        try:
            read_all(path, options)
        except CheckpointError as error:
            assert all(str(path) in finding.path for finding in error.findings)
        else:
            pytest.fail(f"cut to {length} of {len(whole)} bytes, and read")


@pytest.mark.parametrize("kind", ["msgpack", "npz", "safetensors", "equinox", "keras", "t5x"])
def test_a_file_that_shrinks_after_it_was_opened_names_the_leaf(tmp_path: Path, kind: str) -> None:
    path, options = damaged_files(tmp_path)[kind]
    source = open_source(path, **options)
    os.truncate(path, path.stat().st_size // 2 if kind == "keras" else 60)
    failed = 0
    for name in source.leaves:
        try:
            source.read(name)
        except CheckpointError as error:
            (finding,) = error.findings
            assert finding.path == f"{path}: leaf {name}"
            failed += 1
    assert failed


def test_damage_names_the_leaf_as_soon_as_its_name_is_known(tmp_path: Path) -> None:
    made = damaged_files(tmp_path)
    path, options = made["msgpack"]
    path.write_bytes(path.read_bytes()[:-10])
    finding = refusal(path)
    assert (finding.code, finding.path) == ("checkpoint-truncated", "m: leaf second")
    assert finding.data["leaf"] == "second" and finding.got == f"{path.stat().st_size} bytes"
    path, options = made["equinox"]
    path.write_bytes(path.read_bytes()[:-10])
    finding = refusal(path, **options)
    size = path.stat().st_size
    assert (finding.code, finding.path) == ("checkpoint-truncated", "e") and "record 1" in finding.problem
    assert (finding.expected, finding.got) == (f"{size + 10} bytes", f"{size} bytes")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_flipped_bit_in_an_npz_is_found_by_its_checksum(tmp_path: Path, compressed: bool) -> None:
    path = writers.npz(tmp_path / "x.npz", {"w": np.random.default_rng(0).normal(size=500)}, compressed)
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 4
    path.write_bytes(whole)
    with pytest.raises(CheckpointError) as caught:
        read_all(path, {})
    assert caught.value.code == "checkpoint-corrupt" and caught.value.findings[0].path == f"{path}: leaf w"


def test_sizes_that_a_file_cannot_hold_cost_nothing(tmp_path: Path) -> None:
    """A terabyte, promised by a few bytes."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (2**38,)})
    (tmp_path / "e").write_bytes(head.getvalue() + b"1234")
    finding = refusal(tmp_path / "e", leaf_names=[["a"]])
    assert finding.code == "checkpoint-truncated" and "record 0 (float32[274877906944])" in finding.problem
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", head.getvalue() + bytes(1000))
    finding = refusal(tmp_path / "x.npz")
    assert (finding.code, finding.path) == ("checkpoint-corrupt", "x.npz: leaf a")
    assert finding.expected == "1099511627776 bytes for float32[274877906944]"
    import h5py

    with h5py.File(tmp_path / "k.h5", "w") as file:
        file.create_dataset("vars/0", (2**38,), "f4", chunks=(2**20,), compression="gzip")
    finding = refusal(tmp_path / "k.h5")
    assert (finding.code, finding.path) == ("checkpoint-corrupt", "k.h5: leaf vars/0")
    assert (finding.expected, finding.got) == ("1099511627776 bytes for float32[274877906944]", "0 bytes")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["msgpack", "npz", "deflated", "safetensors", "equinox", "keras", "t5x"])
def test_one_leaf_is_read_without_the_others(tmp_path: Path, kind: str) -> None:
    """In a process that may take much less memory than the file: 200 MB beyond what it has after the imports."""
    leaves = {
        f"w{k}": np.tile(np.random.default_rng(k).integers(0, 255, 10 << 10, np.uint8), 4 << 10) for k in range(6)
    }
    path, records = tmp_path / "x", [list(leaves)]
    if kind == "t5x":
        path = writers.t5x(tmp_path / "c", leaves)
    elif kind == "keras":
        import h5py

        with h5py.File(path, "w") as file:
            for name, array in leaves.items():
                file[f"{name}/vars/0"] = array
    elif kind == "equinox":
        path.write_bytes(writers.records(*leaves.values()))
    elif kind in ("npz", "deflated"):
        path = writers.npz(tmp_path / "x.npz", leaves, kind == "deflated")
    elif kind == "safetensors":
        from safetensors.numpy import save_file

        save_file(leaves, path)
    else:
        writers.msgpack(path, leaves)
    code = (
        "import sys, resource, convert, convert.checkpoints.formats.npz, convert.checkpoints.formats.keras, zlib\n"
        + ("import h5py\n" if kind == "keras" else "import convert.checkpoints.orbax.reader\n" if kind == "t5x" else "")
        + f"source = convert.open_source({str(path)!r}, leaf_names={records!r})\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "total = 0\n"
        "for name in source.leaves: total += source.read(name).nbytes\n"
        "print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    total, grown = map(int, done.stdout.split())
    assert total == 6 * (40 << 20)
    assert grown < 120_000, f"{grown} kB for leaves of 40 MiB"


# ---- properties

any_array = hnp.arrays(
    st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(endianness="?"),
        hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
        hnp.complex_number_dtypes(endianness="?"),
    ),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)
any_name = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), max_size=8)


@settings(deadline=None, max_examples=60)
@given(st.lists(any_array, max_size=5), st.booleans())
def test_any_arrays_come_back_from_npz_and_equinox(
    tmp_path_factory: pytest.TempPathFactory, arrays: list[np.ndarray], fortran: bool
) -> None:
    arrays = [np.asfortranarray(x) if fortran and x.ndim else x for x in arrays]
    folder = tmp_path_factory.mktemp("any")
    named = {f"w{k}": x for k, x in enumerate(arrays)}
    for compressed in (False, True):
        source = open_source(writers.npz(folder / "x.npz", named, compressed))
        assert all(same(source.read(name), x) for name, x in native(named).items()) and len(source.leaves) == len(named)
    if arrays:
        (folder / "e").write_bytes(writers.records(*arrays))
        source = open_source(folder / "e", leaf_names=[list(named)])
        assert all(same(source.read(name), x) for name, x in native(named).items())


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(any_name, st.dictionaries(any_name, any_array, min_size=1, max_size=3), min_size=1, max_size=3))
def test_any_tree_comes_back_from_msgpack(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, dict[str, np.ndarray]]
) -> None:
    import flax.serialization

    tree = {a: {b: native({"": x})[""] for b, x in inner.items()} for a, inner in tree.items()}
    path = tmp_path_factory.mktemp("any") / "m"
    path.write_bytes(flax.serialization.msgpack_serialize(tree, in_place=False))
    source = open_source(path)
    assert {leaf.keys for leaf in source.leaves.values()} == {(a, b) for a, inner in tree.items() for b in inner}
    for name, leaf in source.leaves.items():
        assert same(source.read(name), tree[leaf.keys[0]][leaf.keys[1]])


def test_memory_is_limited_by_the_machine_not_by_a_crash(tmp_path: Path) -> None:
    path = writers.npz(tmp_path / "x.npz", {"w": np.zeros(300 << 20, np.uint8)}, compressed=True)
    code = (
        f"import resource, convert; source = convert.open_source({str(path)!r})\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1, 1))\n"
        "try: source.read('w')\nexcept convert.CheckpointError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "leaf w: not enough memory for uint8[314572800]" in done.stdout, (done, resource.RLIMIT_AS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["msgpack", "npz", "npz-compressed", "safetensors", "equinox", "keras", "big-endian", "t5x"]
)
def test_a_large_leaf_takes_the_memory_of_a_piece(tmp_path: Path, kind: str) -> None:
    big = np.arange(6 << 20, dtype=np.float32).reshape(-1, 3)  # 24 MB, six pieces
    path, options = tmp_path / "m", {}
    if kind.startswith("npz"):
        writers.npz(path := tmp_path / "m.npz", {"w": big}, compressed=kind == "npz-compressed")
    elif kind == "keras":
        with h5py.File(path := tmp_path / "m.weights.h5", "w") as file:
            file["layers/dense/vars/0"] = big
    elif kind in ("equinox", "big-endian"):
        path.write_bytes(writers.records(big if kind == "equinox" else big.astype(">f4")))
        options["leaf_names"] = [["w"]]
    else:
        getattr(writers, kind)(path, {"w": big}, **({"inline": ("w",)} if kind == "t5x" else {}))
    source = open_source(path, **options)
    (name,) = source.leaves
    at = 0
    tracemalloc.start()
    try:
        for chunk in source.chunks(name):
            for origin, values in source.pieces(name, chunk):
                assert origin == (at, 0) and np.array_equal(values, big[at : at + len(values)])
                at += len(values)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert at == len(big)
    assert peak < 4 * PIECE, (
        f"{peak:,} bytes"
    )  # a piece, its bytes in this machine's order, and the test's own comparison
