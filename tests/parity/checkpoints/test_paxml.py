"""Checkpoints of paxml: the goldens bit for bit, steps, what a file may hold, and its metadata."""

import random
import shutil
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import flax.serialization
import flax.struct
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert import open_source
from convert.checkpoints.formats.paxml import looks_like_pax, open_pax
from convert.checkpoints.source import Absent, Source
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec, numpy_dtype
from support.paths import GOLDEN
from support.paxml_checkpoints import (
    STEP,
    Adam,
    Empty,
    TrainState,
    entry,
    notes,
    packed,
    refusal,
    save,
    save_metadata,
    state,
)
from support.source_contract import SourceContract


class TestContract(SourceContract):
    sorted_by_name = False  # the step comes first

    @pytest.fixture(scope="class", params=["timesfm-1.0", "timesfm-2.0"])
    @classmethod
    def source(cls, request: pytest.FixtureRequest) -> Source:
        return open_source(GOLDEN / request.param)

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, source: Source) -> dict[str, np.ndarray]:
        restored = flax.serialization.msgpack_restore(source.path.read_bytes())
        return dict(zip(source.leaves, restored["flattened_state"], strict=True))


@pytest.mark.parametrize("case", ["timesfm-1.0", "timesfm-2.0"])
def test_golden_bit_for_bit(case: str) -> None:
    source = open_pax(GOLDEN / case)
    restored = flax.serialization.msgpack_restore((GOLDEN / case / STEP / "state" / "checkpoint").read_bytes())
    assert len(source.leaves) == len(restored["flattened_state"])
    for (name, leaf), array in zip(source.leaves.items(), restored["flattened_state"], strict=True):
        read = source.read(name)
        assert leaf.spec == TensorSpec(array.shape, array.dtype.name) == TensorSpec(read.shape, read.dtype.name)
        assert read.tobytes() == array.tobytes()
        assert not np.shares_memory(read, source.read(name))
        assert read.flags.c_contiguous
    assert source.nbytes == sum(array.nbytes for array in restored["flattened_state"])
    assert source.absent == (Absent(("opt_states",), "empty list"), Absent(("extra_state",), "empty tuple"))
    assert source.format == "paxml FLAX (msgpack)"
    assert notes(source) == [
        "step 1100000 of 1100000",
        f"names and shapes of {len(source.leaves) - 1} leaves agree with metadata/metadata",
    ]
    assert [note.code for note in source.notes] == ["step-chosen", "checkpoint-note"]


def test_golden_names_in_the_order_of_the_tree() -> None:
    source = open_pax(GOLDEN / "timesfm-2.0")
    names = list(source.leaves)
    assert names[:3] == [
        "step",
        "mdl_vars/params/freq_emb/emb_var",
        "mdl_vars/params/horizon_ff_layer/hidden_layer/bias/b",
    ]
    layers = list(dict.fromkeys(name.split("/")[3] for name in names if "x_layers_" in name))
    assert layers == [f"x_layers_{i}" for i in (0, 1, 10, 11, *range(2, 10))]
    prefix = "mdl_vars/params/stacked_transformer_layer/x_layers_10/self_attention"
    assert source.leaves[f"{prefix}/query/w"].spec == TensorSpec((32, 2, 16), "float32")
    assert source.leaves[f"{prefix}/per_dim_scale/per_dim_scale"].spec == TensorSpec((16,), "float32")
    assert source.read("step") == 1100000


@pytest.mark.parametrize("below", ["", "checkpoints", STEP, STEP / "state", STEP / "state" / "checkpoint"])
def test_any_directory_above_the_file_will_do(below: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = GOLDEN / "timesfm-1.0" / below
    assert looks_like_pax(path)
    assert open_pax(path).path == GOLDEN / "timesfm-1.0" / STEP / "state" / "checkpoint"
    assert open_pax(path, step=1100000).notes[0].data["step"] == 1100000
    if path.is_dir():
        monkeypatch.chdir(path)
        assert looks_like_pax(Path())
        assert open_pax(Path()).path == open_pax(path).path


def test_links_of_a_hugging_face_snapshot(tmp_path: Path) -> None:
    repository = tmp_path / "models--google--timesfm-1.0-200m"
    (repository / "blobs").mkdir(parents=True)
    shutil.copy(GOLDEN / "timesfm-1.0" / STEP / "state" / "checkpoint", repository / "blobs" / "0a1b")
    file = repository / "snapshots" / "c0ffee" / STEP / "state" / "checkpoint"
    file.parent.mkdir(parents=True)
    file.symlink_to(repository / "blobs" / "0a1b")
    assert notes(open_pax(repository / "snapshots" / "c0ffee")) == ["step 1100000 of 1100000"]
    assert looks_like_pax(repository / "blobs" / "0a1b")
    assert notes(open_pax(repository / "blobs" / "0a1b")) == []


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    for step in (1000000, 900000, 1100000):
        save(tmp_path, state(w=np.full(2, step)), step)
    return tmp_path


def test_latest_step_or_the_one_asked_for(steps: Path) -> None:
    for path in (steps, steps / "checkpoints"):
        source = open_pax(path)
        assert source.read("mdl_vars/params/w")[0] == 1100000
        assert notes(source) == ["step 1100000 of 900000, 1000000, 1100000"]
        source = open_pax(path, step=900000)
        assert source.read("mdl_vars/params/w")[0] == 900000
        assert notes(source) == ["step 900000 of 900000, 1000000, 1100000"]


def test_absent_step_lists_the_others(steps: Path) -> None:
    finding = refusal(steps, step=5)
    assert (finding.code, finding.path) == ("step-not-found", str(steps / "checkpoints"))
    assert (finding.expected, finding.got) == ("one of 900000, 1000000, 1100000", "5")
    finding = refusal(steps / "checkpoints" / "checkpoint_900000", step=5)
    assert finding.code == "checkpoint-option" and "step 900000, not 5" in finding.problem


def test_other_names_of_steps(tmp_path: Path) -> None:
    digits = save(tmp_path / "a", state(w=np.ones(2))).parent.parent
    digits.rename(digits.parent / "7")
    assert notes(open_pax(tmp_path / "a")) == ["step 7 of 7"]
    (digits.parent / "checkpoint_00000007").mkdir()
    finding = refusal(tmp_path / "a")
    assert finding.code == "checkpoint-ambiguous" and "7 and checkpoint_00000007" in finding.problem
    # version 0.0 of paxml's checkpoints: the file in checkpoint_7, or called so
    (tmp_path / "b" / "checkpoint_7").mkdir(parents=True)
    (tmp_path / "b" / "checkpoint_7" / "checkpoint").write_bytes(packed(state(w=np.ones(2))))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "checkpoint_7").write_bytes(packed(state(w=np.ones(2))))
    for folder in ("b", "c"):
        assert notes(open_pax(tmp_path / folder)) == ["step 7 of 7"]
        assert notes(open_pax(tmp_path / folder / "checkpoint_7")) == ["step 7"]
    shutil.copy(tmp_path / "c" / "checkpoint_7", tmp_path / "x")
    assert notes(open_pax(tmp_path / "x")) == []
    finding = refusal(tmp_path / "x", step=7)
    assert (finding.code, finding.path) == ("checkpoint-option", str(tmp_path / "x"))
    assert "checkpoint_7" in finding.fix


@pytest.mark.parametrize(
    "name", ["checkpoint_1200000.orbax-checkpoint-tmp-1700000000", "tmp_1700000000.checkpoint_1200000"]
)
def test_unfinished_steps(steps: Path, name: str) -> None:
    folder = steps / "checkpoints"
    shutil.copytree(folder / "checkpoint_900000", folder / name)
    (note,) = open_pax(steps).notes
    assert note.data == {"step": 1100000, "steps": [900000, 1000000, 1100000], "not_finished": [name]}
    for path in (folder / name, folder / name / "state" / "checkpoint"):
        assert looks_like_pax(path)
        finding = refusal(path)
        assert (finding.code, finding.path) == ("checkpoint-unfinished", str(folder / name))
    for child in list(folder.iterdir()):
        if child.name != name:
            shutil.rmtree(child)
    assert looks_like_pax(steps)
    assert refusal(steps).path == str(folder / name)


def test_step_whose_state_is_unfinished_or_missing(steps: Path) -> None:
    state = steps / "checkpoints" / "checkpoint_1100000" / "state"
    state.rename(state.parent / "state.orbax-checkpoint-tmp-17")
    assert looks_like_pax(steps)
    finding = refusal(steps)
    assert (finding.code, finding.path) == (
        "checkpoint-unfinished",
        str(state.parent / "state.orbax-checkpoint-tmp-17"),
    )
    assert open_pax(steps, step=900000).read("mdl_vars/params/w")[0] == 900000
    shutil.rmtree(state.parent / "state.orbax-checkpoint-tmp-17")
    assert not looks_like_pax(steps)
    finding = refusal(steps)
    assert (finding.code, finding.path) == ("checkpoint-incomplete", str(state.parent))
    assert "900000, 1000000, 1100000" in finding.fix


@pytest.mark.parametrize("as_map", [False, True])
def test_every_dtype_and_kind_of_leaf(tmp_path: Path, as_map: bool) -> None:
    rng = np.random.default_rng(0)
    params: dict[str, Any] = {
        name: rng.integers(0, 2, (2, 3)).astype(numpy_dtype(name)) for name in SAFETENSORS_TAGS if "int2" not in name
    }
    params |= {"scalar": np.float32(1.5), "0d": np.array(2, ml_dtypes.bfloat16), "empty": np.zeros((0, 3), np.int8)}
    params |= {"python": {"int": 3, "big": 2**64 - 1, "neg": -5, "float": 0.1, "bool": True, "complex": 1 + 2j}}
    params |= {"nested": [{"x": (np.ones(1), None)}, [], (), {}], 'it\'s "é"\n/': np.ones(2), "text": "a word"}
    source = open_pax(save(tmp_path, packed(state(**params), as_map=as_map)))
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    for path, leaf in paths:
        if isinstance(leaf, str):
            continue
        name = "/".join(["mdl_vars", "params", *(str(getattr(k, "key", getattr(k, "idx", None))) for k in path)])
        read = source.read(name)
        expected = np.asarray(leaf)
        assert read.dtype == expected.dtype, name
        assert read.tobytes() == expected.tobytes(), name
        assert (
            source.leaves[name].spec
            == TensorSpec(expected.shape, expected.dtype.name)
            == TensorSpec(read.shape, read.dtype.name)
        )
        assert not np.shares_memory(read, source.read(name))
    assert len(source.leaves) == len(paths)  # without the word, with the step
    absent = {"/".join(node.keys[2:]): node.why for node in source.absent if node.keys[0] == "mdl_vars"}
    assert absent == {
        "nested/0/x/1": "None",
        "nested/1": "empty list",
        "nested/2": "empty tuple",
        "nested/3": "empty dict",
        "text": "string",
    }
    with pytest.raises(KeyError):
        source.read("nothing")


def test_optimizer_states(tmp_path: Path) -> None:
    adam = Adam(np.int32(3), {"w": np.ones(2)}, {"w": np.zeros(2)})
    source = open_pax(
        save(tmp_path, TrainState(np.int32(7), {"params": {"w": np.ones(2)}}, [(Empty(), adam)], {"e": np.ones(1)}))
    )
    assert list(source.leaves) == [
        "step", "mdl_vars/params/w", "opt_states/0/1/0", "opt_states/0/1/1/w", "opt_states/0/1/2/w", "extra_state/e",
    ]  # fmt: skip
    assert source.absent == (Absent(("opt_states", "0", "0"), "empty Empty"),)


def test_masked_leaves_are_nil(tmp_path: Path) -> None:
    content = flax.serialization.msgpack_serialize(
        {"flattened_state": [np.ones(1), None], "str_pytree_state": "PyTreeDef({'a': *, 'b': *})"}
    )
    source = open_pax(save(tmp_path, content))
    assert list(source.leaves) == ["a"]
    assert source.absent == (Absent(("b",), "None"),)


@pytest.mark.slow
@given(
    st.integers(1, 40),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.sampled_from(["int8", "bfloat16", "float64"]),
)
def test_chunked_arrays(tmp_path_factory: pytest.TempPathFactory, limit: int, shape: list[int], dtype: str) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(numpy_dtype(dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flax.serialization, "MAX_CHUNK_SIZE", limit)
        content = packed({"a": array, "b": np.ones(1, np.int8)}, as_map=True)
    assert (b"__msgpack_chunked_array__" in content) == (array.nbytes > limit)
    source = open_pax(save(tmp_path_factory.mktemp("chunked"), content))
    assert source.leaves["a"].spec == TensorSpec(array.shape, dtype)
    assert source.read("a").tobytes() == array.tobytes()
    assert source.read("a").shape == array.shape
    assert source.read("b") == 1


def test_keys_in_the_other_order_and_unknown_ones(tmp_path: Path) -> None:
    restored = {"flattened_state": [np.ones(2)], "str_pytree_state": "PyTreeDef(*)"}
    swapped = dict(reversed(restored.items()))
    file = save(tmp_path, flax.serialization.msgpack_serialize(swapped))
    assert looks_like_pax(file)
    assert list(open_pax(file).leaves) == [""]
    file.write_bytes(flax.serialization.msgpack_serialize({**restored, "more": [1, {"x": 2}]}))
    assert list(open_pax(file).leaves) == [""]


def test_an_array_takes_its_own_size_and_outlives_the_source(tmp_path: Path) -> None:
    file = save(tmp_path, state(big=np.ones(8 << 20, np.uint8)))
    tracemalloc.start()
    source = open_pax(file)
    array = source.read("mdl_vars/params/big")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 9 << 20
    del source
    file.unlink()
    assert array.sum() == 8 << 20


def test_reading_from_many_threads() -> None:
    source = open_pax(GOLDEN / "timesfm-2.0")
    expected = {name: source.read(name).tobytes() for name in source.leaves}
    wrong = []

    def read(seed: int) -> None:
        names = list(source.leaves)
        random.Random(seed).shuffle(names)
        wrong.extend(name for name in names if source.read(name).tobytes() != expected[name])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.slow
def test_reading_imports_no_framework() -> None:
    code = """
        import sys
        from pathlib import Path
        from convert.checkpoints.formats.paxml import looks_like_pax, open_pax
        assert looks_like_pax(Path(sys.argv[1]))
        source = open_pax(Path(sys.argv[1]))
        for name in source.leaves:
            source.read(name)
        print(*({"jax", "jaxlib", "flax", "torch", "tensorflow", "orbax", "pickle5"} & sys.modules.keys()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), GOLDEN / "timesfm-1.0"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "\n"


def test_metadata_agrees(tmp_path: Path) -> None:
    file = save(tmp_path, state(a=np.ones((2, 3), np.float32), b=[np.ones(1, np.float32)]))
    listed = {"params": {"a": entry([2, 3]), "b": [entry([1])], "c": entry([], masked=True)}}
    save_metadata(file, {"version": 1.1, "train_state_metadata": {"mdl_vars": listed}})
    assert notes(open_pax(file)) == ["step 7", "names and shapes of 2 leaves agree with metadata/metadata"]
    listed["params"]["a"]["dtype"] = "bfloat16"
    save_metadata(file, {"version": 9.9, "later": 1, "train_state_metadata": {"mdl_vars": listed}})
    assert notes(open_pax(file))[1] == "mdl_vars/params/a is float32; metadata/metadata says bfloat16"


@pytest.mark.parametrize(
    ("listed", "leaf", "expected", "got"),
    [
        ({"a": entry([3, 2])}, "a", "[3, 2]", "[2, 3]"),
        ({}, "a", "no such leaf", "float32[2,3]"),
        ({"A": entry([2, 3])}, "a", "no such leaf", "float32[2,3]"),
        ({"a": entry([2, 3]), "z": {"w": entry([4])}}, "z/w", "the shape [4]", "no such leaf"),
    ],
)
def test_metadata_contradicts(tmp_path: Path, listed: dict[str, Any], leaf: str, expected: str, got: str) -> None:
    file = save(tmp_path, state(a=np.ones((2, 3), np.float32)))
    save_metadata(file, {"version": 1.1, "train_state_metadata": {"mdl_vars": {"params": listed}}})
    finding = refusal(file)
    assert (finding.code, finding.path) == ("checkpoint-corrupt", f"{file}: leaf mdl_vars/params/{leaf}")
    assert (finding.expected, finding.got) == (f"{expected} as in metadata/metadata", got)
    assert "copy both again" in finding.fix


@pytest.mark.parametrize(
    ("document", "note"),
    [
        ({"version": 1.0}, "metadata/metadata lists no shapes, so none were compared with it"),
        ([1], "metadata/metadata lists no shapes"),
        ({"train_state_metadata": None}, "metadata/metadata lists no shapes"),
        ({"train_state_metadata": {"other": {"x": 1}}}, "names and shapes of 0 leaves agree"),
        (
            b"{",
            "metadata/metadata was not compared with names and shapes: not valid JSON (truncated or corrupt): Expecting",
        ),
        (b"\xff\xfe{", "metadata/metadata was not compared with names and shapes: not valid JSON"),
        (b"[" * 100_000, "metadata/metadata was not compared with names and shapes: not valid JSON"),
    ],
)
def test_metadata_of_another_kind_is_noted(tmp_path: Path, document: Any, note: str) -> None:
    file = save(tmp_path, state(a=np.ones(2)))
    save_metadata(file, document)
    assert notes(open_pax(file))[1].startswith(note)


def test_metadata_that_cannot_be_matched_or_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save(tmp_path, state(a=Adam(np.ones(1), 2, 3)))
    save_metadata(file, {"train_state_metadata": {"mdl_vars": {"params": {"a": {"count": entry([1])}}}}})
    assert notes(open_pax(file))[1] == (
        "mdl_vars was not compared with metadata/metadata: the tree does not name all of its fields"
    )
    monkeypatch.setattr("convert.checkpoints.formats.paxml._METADATA_LIMIT", 10)
    assert notes(open_pax(file))[1] == "metadata/metadata was not compared with names and shapes: the file is too large"
