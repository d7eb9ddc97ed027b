"""paxml's msgpack checkpoints: real ones against flax, written ones of every shape, and damaged ones."""

import contextlib
import json
import pickle
import random
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections import namedtuple
from pathlib import Path
from typing import Any

import flax.serialization
import flax.struct
import jax
import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert import open_source
from convert.checkpoints.encodings.flax_arrays import packed_array
from convert.checkpoints.encodings.msgpack_tokens import Walker
from convert.checkpoints.errors import COPY_AGAIN
from convert.checkpoints.formats.paxml import looks_like_pax, open_pax
from convert.checkpoints.source import Absent, Source
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec, numpy_dtype
from support.effort import calls_at_most
from support.paths import GOLDEN
from support.source_contract import SourceContract

STEP = Path("checkpoints", "checkpoint_1100000")
Adam = namedtuple("Adam", "count mu nu")
Empty = namedtuple("Empty", "")


@flax.struct.dataclass
class TrainState:  # the fields of paxml's
    step: Any
    mdl_vars: Any
    opt_states: Any
    extra_state: Any = ()


def packed(tree: Any, *, as_map: bool = False) -> bytes:
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    state = {str(i): leaf for i, leaf in enumerate(leaves)} if as_map else leaves
    return flax.serialization.msgpack_serialize({"flattened_state": state, "str_pytree_state": str(treedef)})


def save(folder: Path, content: bytes | Any, step: int = 7) -> Path:
    file = folder / "checkpoints" / f"checkpoint_{step}" / "state" / "checkpoint"
    file.parent.mkdir(parents=True)
    file.write_bytes(content if isinstance(content, bytes) else packed(content))
    return file


def save_metadata(file: Path, document: Any) -> None:
    path = file.parent.parent / "metadata" / "metadata"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())


def entry(shape: list[int], dtype: str = "float32", masked: bool = False) -> dict[str, Any]:
    tagged = {"_array_metadata_tag": True, "is_optax_masked_node": masked}
    return tagged if masked else {**tagged, "unpadded_shape": shape, "dtype": dtype}


def state(**params: Any) -> TrainState:
    return TrainState(np.int32(7), {"params": params}, [])


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


# --- real checkpoints -----------------------------------------------------------------------------------------------


def notes(source: Source) -> list[str]:
    return [str(note) for note in source.notes]


def refusal(path: Path, **options: Any) -> Finding:
    """Open a damaged checkpoint and return the only finding."""
    with pytest.raises(CheckpointError) as caught:
        open_pax(path, **options)
    (finding,) = caught.value.findings
    return finding


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


# --- steps ----------------------------------------------------------------------------------------------------------


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


# --- what a file may hold -------------------------------------------------------------------------------------------


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


# --- metadata -------------------------------------------------------------------------------------------------------


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


# --- what is not paxml's --------------------------------------------------------------------------------------------


def test_pickle_is_refused_and_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    file = save(tmp_path, pickle.dumps({"flattened_state": [Trap()]}))
    assert not looks_like_pax(tmp_path)
    finding = refusal(file)
    assert (finding.code, finding.path) == ("pickle-refused", str(file))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("content", "code", "got"),
    [
        (b"PK\x03\x04 a zip", "checkpoint-unknown-format", "the bytes 50 4b 03 04 20 61 20 7a"),
        (msgpack.packb({"params": {"w": 1}}), "checkpoint-unknown-format", "the keys params"),
        (msgpack.packb({1: 2}), "checkpoint-unknown-format", "the keys (int)"),
        (msgpack.packb([1, 2]), "checkpoint-unknown-format", "the bytes "),
        (b"\xc1", "checkpoint-corrupt", "the byte 0xc1"),
    ],
)
def test_other_formats(tmp_path: Path, content: bytes, code: str, got: str) -> None:
    file = save(tmp_path, content)
    if len(content) > 1:
        assert not looks_like_pax(file)
    finding = refusal(file)
    assert (finding.code, finding.path) == (code, str(file))
    assert finding.expected and finding.got.startswith(got)


def test_nothing_there(tmp_path: Path) -> None:
    assert not looks_like_pax(tmp_path / "no")
    finding = refusal(tmp_path / "no")
    assert (finding.code, finding.path) == ("checkpoint-missing", str(tmp_path / "no"))
    assert not looks_like_pax(tmp_path)
    finding = refusal(tmp_path)
    assert (finding.code, finding.path) == ("checkpoint-unknown-format", str(tmp_path))
    assert not looks_like_pax(GOLDEN / "timesfm-2.5" / "ckpt")
    file = save(tmp_path, b"")
    assert looks_like_pax(tmp_path)
    finding = refusal(tmp_path)
    assert (finding.code, finding.path) == ("checkpoint-truncated", str(file))
    file.unlink()
    file.mkdir()
    finding = refusal(tmp_path)
    assert (finding.code, finding.path) == ("checkpoint-incomplete", str(file.parent.parent))


def test_file_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save(tmp_path, state(a=np.ones(2)))

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("convert.core.system.regular_file.os.open", refuse)
    assert looks_like_pax(file)  # by its name, like an empty file
    finding = refusal(file)
    assert (finding.code, finding.path) == ("checkpoint-unreadable", str(file))
    assert "Permission denied" in finding.problem
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert not looks_like_pax(tmp_path)
    finding = refusal(tmp_path)
    assert (finding.code, finding.path) == ("checkpoint-unreadable", str(tmp_path))


# --- damage ---------------------------------------------------------------------------------------------------------


def ndarray(shape: Any, dtype: Any, data: Any, code: int = 1) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb((shape, dtype, data)))


CHUNKED = {"__msgpack_chunked_array__": True, "shape": {"0": 2}, "chunks": {"0": ndarray([2], "int8", b"ab")}}


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (ndarray([2, 3], "float32", bytes(20)), r"expected 24 bytes for float32\[2,3\], got 20 bytes"),
        (ndarray([2], "float33", bytes(8)), "unknown dtype: expected one of bool, int8.*, got 'float33'"),
        (ndarray([2], "str32", bytes(8)), "unknown dtype"),
        (ndarray([2], b"\xff", bytes(8)), "is not UTF-8"),
        (ndarray([2], 3, bytes(8)), "expected a string before byte .*, got int"),
        (ndarray([-1], "int8", b""), "the shape at byte .*, got -1"),
        (ndarray([1.0], "int8", b""), r"the shape at byte .*, got 1\.0"),
        (ndarray([True], "int8", b"a"), "the shape at byte .*, got True"),
        (ndarray([1] * 33, "int8", b"a"), "is not possible for an array"),
        (ndarray([2**62, 0], "int8", b""), "is not possible for an array"),
        (ndarray([1], "int8", "a"), "the bytes of the array at byte .* do not end where the array ends"),
        (ndarray([1], "int8", [b"a"]), "the bytes of the array at byte .* do not end where the array ends"),
        (ndarray(1, "int8", b"a"), "expected a list at byte .*, got int"),
        (ndarray([1], "int8", b"a", code=4), "expected an extension of type 1, 2 or 3 at byte .*, got type 4"),
        (msgpack.ExtType(1, msgpack.packb([1, 2])), r"expected \(shape, dtype, bytes\) at byte"),
        (msgpack.ExtType(1, msgpack.packb(1)), r"expected \(shape, dtype, bytes\) at byte .*, got int"),
        (msgpack.ExtType(2, msgpack.packb([1.0])), "expected two elements at byte .*, got 1"),
        (msgpack.ExtType(2, msgpack.packb([1.0, "x"])), "expected the two floats of a complex number"),
        ([1, 2], "expected the bytes of an array at byte .*, got a list"),
        ({"a": 1}, "expected an array at byte .*, got a map with the keys a;"),
        ({}, "got a map with the keys -"),
        ({**CHUNKED, "shape": {"0": 3}}, r"expected 3 bytes for int8\[3\], got 2 bytes"),
        ({**CHUNKED, "shape": {"1": 2}}, "stands for a list: expected the keys '0', '1', ..."),
        ({**CHUNKED, "chunks": {}}, "expected one dtype, got no chunks"),
        ({**CHUNKED, "chunks": {"0": 5}}, "expected a chunk of an array at byte .*, got int"),
        ({**CHUNKED, "chunks": {"0": CHUNKED}}, "expected a chunk of an array at byte .*, got map"),
        (
            {**CHUNKED, "chunks": [ndarray([1], "int8", b"a"), ndarray([1], "uint8", b"b")]},
            "expected one dtype, got int8, uint8",
        ),
    ],
)
def test_damaged_leaf_is_named(tmp_path: Path, leaf: Any, text: str) -> None:
    content = msgpack.packb({"flattened_state": [1, leaf], "str_pytree_state": "PyTreeDef({'a': *, 'b': {'w': *}})"})
    file = save(tmp_path, content)
    assert looks_like_pax(file)
    finding = refusal(file)
    assert (finding.code, finding.path) == ("checkpoint-corrupt", f"{file}: leaf b/w")
    assert finding.data["leaf"] == "b/w" and finding.fix == COPY_AGAIN
    assert re.search(text, str(finding))


@pytest.mark.parametrize(
    ("content", "code", "text"),
    [
        ({"flattened_state": [1, 2], "str_pytree_state": "PyTreeDef(*)"}, "corrupt", r"expected 2 leaves .*, got 1"),
        ({"flattened_state": [1], "str_pytree_state": "PyTreeDef([*, *])"}, "corrupt", r"expected 1 leaves .*, got 2"),
        ({"flattened_state": [1], "str_pytree_state": "PyTreeDef([*)"}, "corrupt", "column 13 .*: expected ', '"),
        ({"flattened_state": [1], "str_pytree_state": 5}, "corrupt", "expected a string before byte .*, got int"),
        ({"flattened_state": 5, "str_pytree_state": "PyTreeDef(*)"}, "corrupt", "expected a list at byte .*, got int"),
        ({"flattened_state": {"a": 1}, "str_pytree_state": "PyTreeDef(*)"}, "corrupt", "stands for a list"),
        ({"flattened_state": [1]}, "unknown-format", "got the keys flattened_state"),
    ],
)
def test_damaged_document(tmp_path: Path, content: Any, code: str, text: str) -> None:
    file = save(tmp_path, msgpack.packb(content))
    finding = refusal(file)
    assert (finding.code, finding.path) == (f"checkpoint-{code}", str(file))
    assert re.search(text, str(finding))


def test_two_leaves_with_one_name(tmp_path: Path) -> None:
    content = {"flattened_state": [1, 1], "str_pytree_state": "PyTreeDef({'a': *, 'a': *})"}
    finding = refusal(save(tmp_path, msgpack.packb(content)))
    assert (finding.code, finding.data["leaf"]) == ("leaf-name-clash", "a")


def test_leaves_whose_joined_names_are_equal_keep_apart(tmp_path: Path) -> None:
    source = open_pax(save(tmp_path, {"a": {"b": np.ones(1)}, "a/b": np.zeros(1)}))
    assert list(source.leaves) == ["a/b", "a\\/b"]
    assert source.read("a\\/b") == 0


def test_data_after_the_end(tmp_path: Path) -> None:
    finding = refusal(save(tmp_path, packed(state(a=np.ones(2))) + b"abc"))
    assert finding.code == "checkpoint-corrupt" and finding.problem.startswith("3 bytes after the end")


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "timesfm-1.0" / STEP, tmp_path / "checkpoint_1100000")
    return tmp_path / "checkpoint_1100000" / "state" / "checkpoint"


def test_truncation_says_where_and_how_much(golden: Path) -> None:
    whole = golden.read_bytes()
    golden.write_bytes(whole[:1000])
    element = "element 3 of 62, from byte 584"
    finding = refusal(golden)
    assert (finding.code, finding.expected, finding.got) == (
        "checkpoint-truncated",
        "at least 4699 bytes",
        "1000 bytes",
    )
    assert finding.path == f"{golden}: leaf mdl_vars/params/horizon_ff_layer/hidden_layer/linear/w: {element}"
    (golden.parent.parent / "metadata" / "metadata").unlink()  # which has the name of the leaf
    assert refusal(golden).path == f"{golden}: {element}"


def test_the_name_of_a_truncated_leaf_is_the_right_one(golden: Path) -> None:
    """Cut before each leaf's end in turn; the whole file's names, in order, are what the errors must say."""
    whole = golden.read_bytes()
    names = list(open_pax(golden).leaves)
    for k, (_, stop) in enumerate(Walker(whole).sequence(Walker(whole).token(0).stop + 16)):
        if stop < 100:  # too short for a list of 62, which is what the error says then
            continue
        golden.write_bytes(whole[: stop - 1])
        finding = refusal(golden)
        assert finding.data["leaf"] == names[k] and f"element {k} of 62" in finding.path


def test_truncation_anywhere_is_an_error(golden: Path) -> None:
    whole = golden.read_bytes()
    rng = random.Random(0)
    for length in [
        *range(1, 700),
        *range(len(whole) - 300, len(whole)),
        *(rng.randrange(len(whole)) for _ in range(200)),
    ]:
        golden.write_bytes(whole[:length])
        assert looks_like_pax(golden)
        finding = refusal(golden)
        assert (finding.code, finding.got) == ("checkpoint-truncated", f"{length} bytes")


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bits_give_an_error_or_other_data(golden: Path, seed: int) -> None:
    whole = golden.read_bytes()
    source = open_pax(golden)
    leaves = {name: leaf.spec for name, leaf in source.leaves.items()}
    del source
    rng = random.Random(seed)
    outcomes = {"error": 0, "data": 0}
    # Everywhere, but mostly where the structure is: heads of small leaves, and the tree's text at the end.
    places = [rng.randrange(len(whole)) for _ in range(100)]
    places += [rng.randrange(600) for _ in range(100)] + [len(whole) - 1 - rng.randrange(2500) for _ in range(200)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        golden.write_bytes(damaged)
        looks_like_pax(golden)
        try:
            source = open_pax(golden)
        except CheckpointError as error:
            assert str(golden.parent.parent) in str(error)
            outcomes["error"] += 1
            continue
        outcomes["data"] += 1
        for name in source.leaves:
            assert source.read(name).nbytes == source.leaves[name].spec.nbytes
        # The names of mdl_vars are checked against the metadata: damage to the tree's text cannot rename a weight.
        weights = {name: spec for name, spec in leaves.items() if name.startswith("mdl_vars/")}
        assert weights == {name: leaf.spec for name, leaf in source.leaves.items() if name.startswith("mdl_vars/")}
    assert min(outcomes.values()) > 20, outcomes


@given(st.binary(max_size=60))
def test_any_bytes_are_walked_as_msgpack_walks_them(data: bytes) -> None:
    unpacker = msgpack.Unpacker(strict_map_key=False, raw=True)
    unpacker.feed(data)
    try:
        unpacker.skip()
    except (msgpack.OutOfData, ValueError):
        with pytest.raises(CheckpointError):
            Walker(data).skip(0)
    else:
        assert Walker(data).skip(0) == unpacker.tell()
    with contextlib.suppress(CheckpointError):
        packed_array(Walker(data), 0)


json_like = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(width=32), st.text(), st.binary()),
    lambda children: st.one_of(st.lists(children), st.dictionaries(st.text(), children)),
)


@given(json_like, st.binary(max_size=20))
def test_skipping_ends_where_msgpack_does(value: Any, after: bytes) -> None:
    for single in (False, True):
        data = msgpack.packb(value, use_single_float=single)
        assert Walker(data + after).skip(0) == len(data)


@pytest.mark.parametrize("size", [0, 1, 2, 4, 8, 16, 31, 32, 255, 256, 65535, 65536])
def test_heads_of_every_width(size: int) -> None:
    for value in (b"a" * size, "a" * size, [1] * size, {i: i for i in range(size)}, msgpack.ExtType(5, b"a" * size)):
        data = msgpack.packb(value)
        assert Walker(data).skip(0) == len(data)


def test_counts_that_promise_more_than_the_file_holds_cost_nothing() -> None:
    for head in (
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
    ):
        with calls_at_most(1000), pytest.raises(CheckpointError) as caught:
            Walker(head.ljust(20, b"\xc0")).skip(0)
        assert caught.value.code == "checkpoint-truncated" and caught.value.findings[0].got == "20 bytes"


def test_too_many_objects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.checkpoints.encodings.msgpack_tokens.MAX_OBJECTS", 100)
    with pytest.raises(CheckpointError) as caught:
        Walker(msgpack.packb([None] * 200)).skip(0)
    assert caught.value.code == "checkpoint-corrupt" and caught.value.findings[0].expected == "at most 100"
