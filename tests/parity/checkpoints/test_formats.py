"""The other formats: the contract of all, and what is particular to one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convert
from convert import CheckpointError, open_source
from convert.checkpoints.source import Absent, Source
from convert.core.findings import Finding
from support import writers
from support.open_refused import refusal
from support.source_contract import SourceContract, same
from support.writers import float8, native, odd, plain


def values_without(*names: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in (plain() | float8()).items() if name not in names}


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


class TestBigVision(SourceContract):
    @pytest.fixture(scope="class", params=["step", "run"])
    @classmethod
    def source(cls, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Source:
        run = tmp_path_factory.mktemp("run") / "checkpoint.bv"
        values = {f"params/{name}": array for name, array in plain().items()}
        step = writers.big_vision(run, 1000, values)
        source = open_source(step if request.param == "step" else run.parent)
        assert source.format == "big_vision, one zarr directory per leaf"
        return source

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls) -> Mapping[str, np.ndarray]:
        return {f"params/{name}": array for name, array in plain().items()}


def test_the_last_complete_step_of_big_vision_is_read(tmp_path: Path) -> None:
    run = tmp_path / "checkpoint.bv"
    for step in (90, 100, 200):
        writers.big_vision(run, step, {"params/w": np.full(3, step, np.float32)}, keep=step < 100)
    (tmp_path / "checkpoint.bv-LAST").write_text("000000100-tmp")  # the save of step 200 has not ended
    source = open_source(tmp_path)
    assert source.read("params/w").tolist() == [100, 100, 100]
    (note,) = source.notes
    assert note.data == {"step": 100, "steps": [90, 100], "not_finished": ["checkpoint.bv-000000200-tmp"]}
    assert open_source(tmp_path, step=90).read("params/w").tolist() == [90, 90, 90]
    for path, options, code in (
        (tmp_path, {"step": 91}, "step-not-found"),
        (tmp_path / "checkpoint.bv-000000200-tmp", {}, "checkpoint-unfinished"),
        (tmp_path / "checkpoint.bv-000000090", {"step": 91}, "checkpoint-option"),
    ):
        with pytest.raises(CheckpointError) as caught:
            open_source(path, **options)  # type: ignore[arg-type]
        assert caught.value.code == code


def test_an_array_of_big_vision_without_metadata_is_incomplete(tmp_path: Path) -> None:
    step = writers.big_vision(tmp_path / "checkpoint.bv", 1, {"params/v": np.ones(3), "params/w": np.ones(3)})
    (step / "params~w" / ".zarray").unlink()
    assert refusal(step).code == "checkpoint-incomplete"


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
