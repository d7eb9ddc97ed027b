"""Files that are not paxml's, damaged or truncated ones, and msgpack of any bytes."""

import contextlib
import pickle
import random
import re
import shutil
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert.checkpoints.encodings.flax_arrays import packed_array
from convert.checkpoints.encodings.msgpack_tokens import Walker
from convert.checkpoints.errors import COPY_AGAIN
from convert.checkpoints.formats.paxml import looks_like_pax, open_pax
from convert.core.errors import CheckpointError
from support.effort import calls_at_most
from support.paths import GOLDEN
from support.paxml_checkpoints import CHUNKED, STEP, ndarray, packed, refusal, save, state


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
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


@pytest.mark.slow
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
