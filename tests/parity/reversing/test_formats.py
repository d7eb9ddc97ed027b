"""Checkpoints that are written back, read by the libraries of JAX code: Orbax, TensorStore, flax, NumPy."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax import serialization
from safetensors.numpy import load_file, save_file

import convert
from convert.checkpoints import open_source
from convert.checkpoints.chunks import Grid
from convert.reversing.formats import flax_msgpack, ocdbt
from convert.reversing.formats.orbax import write_orbax
from convert.reversing.write import write_checkpoint
from support import gemma_models
from support.goldens import checkpoint
from support.memory_source import MemorySource, rule_file
from support.paths import GOLDEN

RULES = """
- from: table
  axes: VD
  embedding: embed
- einsum: ...D,DF->...F
  from: layers/up/kernel
  stacked: {i: 0}
  bias: layers/up/bias
  linear: layers.{i}.up
- drop: step
  because: not a weight
- drop: rest/list/{j}
  because: not a weight
"""


def tree(dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "table": rng.standard_normal((7, 4)).astype(dtype),
        "layers": {"up": {"kernel": rng.standard_normal((3, 4, 6)).astype(dtype), "bias": rng.standard_normal((3, 6)).astype(dtype)}},
        "step": np.asarray(5, np.int32),
        "rest": {"list": [np.arange(3, dtype=np.int8), np.ones((2, 2), bool)], "empty": {}, "none": None},
    }  # fmt: skip


def saved(folder: Path, dtype: Any = np.float32, **options: Any) -> Path:
    """The tree, as Orbax saves it."""
    handler = ocp.PyTreeCheckpointHandler(**options)
    ocp.Checkpointer(handler).save(folder / "first", jax.tree.map(jnp.asarray, tree(dtype)))
    return folder / "first"


def back(like: Path, out: Path, to: str, **options: Any) -> Path:
    """The checkpoint, converted forth and back."""
    rules, file = rule_file(RULES), like.parent / "tensors.safetensors"
    convert.convert(rules, like, file, overwrite=True)
    write_checkpoint(convert.plan_reverse(rules, file, like), out, to, **options)
    return out


def assert_same_tree(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("zarr3", [False, True])
def test_orbax_restores_the_tree_without_arguments(zarr3: bool, dtype: Any, tmp_path: Path) -> None:
    """Lists, empty dicts, None and scalars included; the driver is that of the checkpoint that gives the tree."""
    like = saved(tmp_path, dtype, use_zarr3=zarr3)
    out = back(like, tmp_path / "second", "orbax")
    assert ("zarr3" in open_source(out).format) == zarr3
    assert_same_tree(ocp.StandardCheckpointer().restore(out), ocp.StandardCheckpointer().restore(like))
    assert not (out / "_sharding").exists()


def test_the_structure_for_old_versions_is_the_one_that_orbax_0_5_writes(tmp_path: Path) -> None:
    """Orbax before 0.6 takes the tree from this file, even where there is `_METADATA`."""
    import msgpack

    golden = GOLDEN / "orbax-0.5" / "ocdbt"
    write_orbax(open_source(golden), tmp_path, jobs=1, done=lambda leaf: None)
    ours, theirs = (msgpack.unpackb((folder / "checkpoint").read_bytes()) for folder in (tmp_path, golden))
    assert ours == theirs


OLD = """
import sys, numpy as np, orbax.checkpoint as ocp
out, leaf = sys.argv[1:]
for checkpointer in (ocp.StandardCheckpointer(), ocp.PyTreeCheckpointer()):
    tree = checkpointer.restore(out)
np.save(leaf, np.asarray(tree["stacked_xf"]["attn"]["out"]["kernel"]["value"]))
print(ocp.__version__)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "OLD_ORBAX_PYTHON" not in os.environ, reason="OLD_ORBAX_PYTHON names no Python with orbax-checkpoint 0.5"
)
def test_an_old_orbax_restores_what_is_written(tmp_path: Path) -> None:
    """Run with orbax-checkpoint 0.5.20, jax 0.4.30 and tensorstore 0.1.66 on Python 3.10; both drivers."""
    like = checkpoint("timesfm-2.5")
    convert.convert("timesfm", like, tmp_path / "in.safetensors")
    for k, given in enumerate((None, like)):  # zarr3, and zarr as in the golden
        out, leaf = tmp_path / f"out{k}", tmp_path / f"leaf{k}.npy"
        convert.convert_back("timesfm", tmp_path / "in.safetensors", out, given)
        command = [os.environ["OLD_ORBAX_PYTHON"], "-c", OLD, str(out), str(leaf)]
        version = subprocess.run(command, check=True, capture_output=True, text=True, env={}).stdout
        assert version.startswith("0.5")
        assert np.array_equal(np.load(leaf), open_source(like).read("stacked_xf/attn/out/kernel/value"))


def test_orbax_restores_onto_given_shapes(tmp_path: Path) -> None:
    like = saved(tmp_path)
    out = back(like, tmp_path / "second", "orbax")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree())
    assert_same_tree(ocp.StandardCheckpointer().restore(out, given), jax.tree.map(jnp.asarray, tree()))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave(jax.tree.map(jnp.zeros_like, tree())))
        manager.wait_until_finished()
        of_orbax = (tmp_path / "run" / "3" / "_CHECKPOINT_METADATA").read_bytes()
        back(like, tmp_path / "run" / "3" / "default", "orbax", overwrite=True)
        assert (tmp_path / "run" / "3" / "_CHECKPOINT_METADATA").read_bytes() == of_orbax
        assert_same_tree(manager.restore(3, args=ocp.args.StandardRestore()), jax.tree.map(jnp.asarray, tree()))
    (tmp_path / "new" / "5").mkdir(parents=True)  # a step that Orbax has not begun
    back(like, tmp_path / "new" / "5" / "default", "orbax")
    with ocp.CheckpointManager(tmp_path / "new") as manager:
        assert manager.latest_step() == 5
        assert_same_tree(manager.restore(5), ocp.StandardCheckpointer().restore(like))
    assert open_source(tmp_path / "new").leaves == open_source(tmp_path / "new" / "5" / "default").leaves


@pytest.mark.parametrize("out", ["5/weights", "run/default"])
def test_only_the_item_of_a_step_gets_files_beside_it(out: str, tmp_path: Path) -> None:
    (tmp_path / out).parent.mkdir()
    back(saved(tmp_path), tmp_path / out, "orbax")
    assert [path.name for path in (tmp_path / out).parent.iterdir()] == [Path(out).name]


MESH = """
import sys, jax, numpy as np, orbax.checkpoint as ocp
out, leaf = sys.argv[1:]
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
shapes = ocp.StandardCheckpointer().metadata(out).item_metadata.tree
place = lambda s: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x") if s.shape and s.shape[0] % 4 == 0 else jax.sharding.PartitionSpec())
given = jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=place(m)), shapes)
got = ocp.StandardCheckpointer().restore(out, given)
x = got["output_projection_point"]["hidden_layer"]["kernel"]["value"]
assert len(x.sharding.device_set) == 8 and x.addressable_shards[0].data.shape == (8, 32)
np.save(leaf, np.asarray(x))
"""


@pytest.mark.slow
def test_orbax_restores_onto_a_mesh(tmp_path: Path) -> None:
    like = checkpoint("timesfm-2.5")
    convert.convert("timesfm", like, tmp_path / "t.safetensors")
    write_checkpoint(convert.plan_reverse("timesfm", tmp_path / "t.safetensors", like), tmp_path / "out", "orbax")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", MESH, str(tmp_path / "out"), str(tmp_path / "leaf.npy")]
    subprocess.run(command, check=True, env=environment)
    want = open_source(like).read("output_projection_point/hidden_layer/kernel/value")
    assert np.array_equal(np.load(tmp_path / "leaf.npy"), want)


def contents(out: Path) -> dict[str, str]:
    files = [out] if out.is_file() else [file for file in sorted(out.rglob("*")) if file.is_file()]
    return {str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("to", ["orbax", "msgpack", "npz"])
def test_twice_is_the_same_byte_for_byte(to: str, tmp_path: Path) -> None:
    like = saved(tmp_path)
    endings = {"orbax": "", "msgpack": ".msgpack", "npz": ".npz"}
    one = back(like, tmp_path / f"one{endings[to]}", to, jobs=1)
    two = back(like, tmp_path / f"two{endings[to]}", to, jobs=3)
    assert contents(one) == contents(two)


def test_chunks_and_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves in several chunks, of which the last is cut; each large leaf in a file that its thread writes."""
    monkeypatch.setattr("convert.reversing.formats.orbax.OWN_FILE", 500)

    class Chunked(MemorySource):
        format = "memory"

        def chunks(self, name: str) -> Grid:
            shape = self.leaves[name].spec.shape
            return Grid(shape, tuple(max(1, (n + 1) // 2 - 1) for n in shape))

    rng = np.random.default_rng(0)
    arrays = {
        "a/b": rng.standard_normal((7, 9, 5)),
        "a/c": rng.standard_normal((4, 3)).astype(np.float16),
        "d": np.ones(()),
    }
    source, seen = Chunked(arrays), list[str]()
    write_orbax(source, tmp_path, jobs=2, done=seen.append)
    assert seen == list(arrays)
    read = open_source(tmp_path)
    assert all(np.array_equal(read.read(name), x) for name, x in arrays.items())
    assert [list(read.chunks(name)) for name in arrays] == [list(source.chunks(name)) for name in arrays]
    restored = ocp.StandardCheckpointer().restore(tmp_path)
    assert np.asarray(restored["a"]["c"]).tobytes() == arrays["a/c"].tobytes()


def test_tensorstore_reads_the_database(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "one").write_bytes(b"0123456789")
    values: dict[str, bytes | ocdbt.Stored] = {f"key{k:04d}": bytes([k % 256]) * (k % 7) for k in range(3000)}
    values |= {"x/1": ocdbt.Stored("d/one", 2, 3), "x/2": ocdbt.Stored("d/two", 0, 1), "ü": b"utf-8"}
    (tmp_path / "d" / "two").write_bytes(b"z" + ocdbt.encode_node(values))
    place = ocdbt.Stored("d/two", 1, len(ocdbt.encode_node(values)))
    (tmp_path / "manifest.ocdbt").write_bytes(ocdbt.encode_manifest(place, values))
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
    assert sorted(key.decode() for key in store.list().result()) == sorted(values)
    read = {key: store.read(key).result().value for key in values}
    assert read.pop("x/1") == b"234" and read.pop("x/2") == b"z"
    assert all(read[key] == value for key, value in values.items() if key in read)


def test_flax_reads_the_msgpack_that_it_would_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    like = saved(tmp_path)
    out = back(like, tmp_path / "out.msgpack", "msgpack")
    restored = serialization.msgpack_restore(out.read_bytes())
    assert serialization.to_bytes(restored) == out.read_bytes()
    assert_same_tree(restored["layers"], tree()["layers"])
    assert restored["rest"]["none"] is None and restored["rest"]["empty"] == {} and restored["step"] == 5
    monkeypatch.setattr(flax_msgpack, "MOST", 64)  # as an array above 1 GiB
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 64)
    cut = back(like, tmp_path / "cut.msgpack", "msgpack")
    assert serialization.to_bytes(restored) == cut.read_bytes()


def test_numpy_reads_the_npz(tmp_path: Path) -> None:
    out = back(saved(tmp_path, ml_dtypes.bfloat16), tmp_path / "out.npz", "npz")
    with np.load(out) as held:
        assert held["layers/up/bias"].view(ml_dtypes.bfloat16).tobytes() == tree(ml_dtypes.bfloat16)["layers"]["up"]["bias"].tobytes()  # fmt: skip
        assert held["step"] == 5 and held["rest/list/0"].dtype == np.int8


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    rules = rule_file("- from: t\n  axes: VD\n  embedding: t\n- from: s\n  axes: D\n  multiplies_by: 1+scale\n  epsilon: 1e-6\n  rms_norm: s")  # fmt: skip
    source = MemorySource({"t": np.ones((3, 4), np.float32), "s": np.ones(4, np.float32)})
    file = tmp_path / "in.safetensors"
    convert.convert(rules, source, file)
    save_file({**load_file(file), "s.weight": np.full(4, 1e-30, np.float32)}, file)
    plan = convert.plan_reverse(rules, file, source)
    for name, to in (("out", "orbax"), ("out.msgpack", "msgpack"), ("out.npz", "npz")):
        with pytest.raises(convert.PlanError) as error:
            write_checkpoint(plan, tmp_path / name, to)
        assert error.value.code == "value-not-reversible"
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.parametrize(
    ("name", "to", "code"),
    [
        ("out.npz", "orbax", "output-name-invalid"),
        ("out", "npz", "output-name-invalid"),
        ("there", "orbax", "output-exists"),
        ("first", "orbax", "output-within-input"),
        ("first/inner", "orbax", "output-within-input"),
        ("none/out", "orbax", "output-not-writable"),
    ],
)
def test_an_output_that_cannot_be_is_refused(name: str, to: str, code: str, tmp_path: Path) -> None:
    like = saved(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    with pytest.raises(convert.OutputError) as error:
        back(like, tmp_path / name, to)
    assert error.value.code == code


def test_the_tree_of_another_format_has_keys_of_dicts(tmp_path: Path) -> None:
    like = checkpoint("timesfm-2.0")
    convert.convert("timesfm", like, tmp_path / "t.safetensors")
    plan = convert.plan_reverse("timesfm", tmp_path / "t.safetensors", like)
    write_checkpoint(plan, tmp_path / "out", "orbax")
    metadata = json.loads((tmp_path / "out" / "_METADATA").read_text())
    assert metadata["use_zarr3"] and len(metadata["tree_metadata"]) >= 206
    restored = ocp.StandardCheckpointer().restore(tmp_path / "out")
    name = "x_layers_10"
    got = restored["mdl_vars"]["params"]["stacked_transformer_layer"][name]["self_attention"]["query"]["w"]
    want = open_source(like).read(f"mdl_vars/params/stacked_transformer_layer/{name}/self_attention/query/w")
    assert np.asarray(got).tobytes() == want.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma1-mqa", "gemma2-9b", "gemma3-stacked", "gemma3-kauldron", "recurrentgemma"])
def test_orbax_restores_the_layouts_of_published_families(case: str, tmp_path: Path) -> None:
    """FLAT, NESTED, STACKED and KAULDRON, and keys with a dot: the tree is that of the golden, as Orbax restores it."""
    model, like = "recurrentgemma" if case == "recurrentgemma" else "gemma", checkpoint(case)
    said = {} if case == "recurrentgemma" else gemma_models.settings(case)
    convert.convert(model, like, tmp_path / "t.safetensors", settings=said)
    convert.convert_back(model, tmp_path / "t.safetensors", tmp_path / "out", like=like, settings=said)
    got = ocp.StandardCheckpointer().restore(tmp_path / "out")
    assert_same_tree(got, ocp.PyTreeCheckpointer().restore(tmp_path / "out"))
    assert all(
        isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(got)
    )  # of no device: every machine can restore them
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the golden holds the sharding of the machine that wrote it
        assert_same_tree(got, ocp.PyTreeCheckpointer().restore(like))


def test_leaves_that_orbax_would_overwrite_are_refused(tmp_path: Path) -> None:
    source = MemorySource({"a.b": np.ones(2), "a/b": np.zeros(3)})
    with pytest.raises(convert.CheckpointError) as error:
        write_orbax(source, tmp_path, jobs=1, done=lambda name: None)
    assert error.value.code == "leaf-name-clash"


def test_an_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    like = saved(tmp_path)
    rules, file = rule_file(RULES), tmp_path / "tensors.safetensors"
    convert.convert(rules, like, file)

    def stop(event: convert.Event) -> None:
        raise KeyboardInterrupt

    for name, form in (("out", "orbax"), ("out.msgpack", "msgpack"), ("out.npz", "npz")):
        with pytest.raises(KeyboardInterrupt):
            convert.convert_back(rules, file, tmp_path / name, like=like, form=form, on_event=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "tensors.safetensors"]


def test_an_output_that_is_replaced_keeps_what_is_not_of_a_checkpoint(tmp_path: Path) -> None:
    like = saved(tmp_path)
    out = back(like, tmp_path / "out", "orbax")
    (out / "notes.txt").write_text("mine")
    (out / "ocdbt.process_0").mkdir()
    (out / "_sharding").write_text("{}")
    (out / "d" / "stale").write_text("old")
    back(like, out, "orbax", overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert not any((out / name).exists() for name in ("ocdbt.process_0", "_sharding", "d/stale"))
    assert_same_tree(ocp.StandardCheckpointer().restore(out), ocp.StandardCheckpointer().restore(like))
