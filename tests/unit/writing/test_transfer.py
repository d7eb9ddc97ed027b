"""The engine: leaves go piece by piece to where they belong, whatever the order, the chunks and the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.checkpoints import Boundary
from convert.checkpoints import chunks as module
from convert.checkpoints.chunks import Box, Grid, cut, full_box, pieces
from convert.checkpoints.digest import digest_leaf
from convert.checkpoints.orbax.arrays import pieces as stored_pieces
from convert.checkpoints.orbax.arrays import read_array
from convert.checkpoints.orbax.stores import open_store
from convert.checkpoints.orbax.zarr_metadata import read_metadata
from convert.core.errors import ConvertError
from convert.core.ops import Deinterleave, Flip, Interleave, Op, Permute, Reorder, Reshape, Slice, Take, apply, out_spec
from convert.core.tensor_spec import TensorSpec
from convert.core.value_ops import Add, AddIdentity, Cast, Multiply
from convert.planning.planner import make_plan
from convert.writing.execute import execute
from convert.writing.scatter import BufferedLeaf, destination_view
from support.memory_source import MemorySource, rule_file

# ---- a tensor seen through its leaf's axes


@st.composite
def chains(draw: st.DrawFn) -> tuple[TensorSpec, tuple[Op, ...]]:
    """A leaf and operations that fit it, as plans have them: movements, with arithmetic in between."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), min_size=0, max_size=4)))
    first = spec = TensorSpec(shape, "float32")
    ops: list[Op] = []
    for _ in range(draw(st.integers(0, 6))):
        rank = len(spec.shape)
        kinds: list[Callable[[], Op]] = [lambda: Multiply(2.0), lambda: Add(1.0), lambda: Cast("float64")]
        if rank:
            axis = draw(st.integers(0, rank - 1))
            size = spec.shape[axis]
            start = draw(st.integers(0, size - 1))
            stop = draw(st.integers(start + 1, size))
            order = tuple(draw(st.permutations(range(rank))))
            merged = (*spec.shape[:axis], int(np.prod(spec.shape[axis : axis + 2])), *spec.shape[axis + 2 :])
            kinds += [
                lambda axis=axis, start=start: Take(axis, start),
                lambda axis=axis, start=start, stop=stop: Slice(axis, start, stop),
                lambda order=order: Permute(order),
                lambda merged=merged: Reshape(merged),
                lambda axis=axis: Flip((axis,)),
                lambda axis=axis, n=size, k=start: Reorder(axis, (k, n - k), (1, 0)),
            ]
            if size % 2 == 0:
                kinds += [
                    lambda axis=axis, size=size, s=spec.shape: Reshape((*s[:axis], 2, size // 2, *s[axis + 1 :])),
                    lambda axis=axis: Deinterleave(axis),
                    lambda axis=axis: Interleave(axis),
                    *(
                        lambda axis=axis, kind=kind, width=width: kind(axis, width)
                        for kind in (Deinterleave, Interleave)
                        for width in range(2, size, 2)
                        if size % width == 0
                    ),
                ]
            if rank == 2 and spec.shape[0] == spec.shape[1]:
                kinds.append(lambda: AddIdentity(1.0))
        op = draw(st.sampled_from(kinds))()
        ops.append(op)
        spec = op.out_spec(spec)
    return first, tuple(ops)


@pytest.mark.slow
@given(chains(), st.integers(1, 40), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_pieces_in_any_order_give_what_the_operations_give(
    chain: tuple[TensorSpec, tuple[Op, ...]], nbytes: int, random: Any
) -> None:
    spec, ops = chain
    leaf = np.arange(1, spec.size + 1, dtype=np.float32).reshape(spec.shape)
    made = out_spec(ops, spec)
    region = np.full(made.shape, np.nan, made.dtype)
    found = destination_view(ops, spec, region)
    gathered = BufferedLeaf(ops, spec) if found is None else None
    target = found or gathered.view  # type: ignore[union-attr]
    given = [(box, leaf[box.within((0,) * leaf.ndim)]) for box in _split(spec.shape, nbytes)]
    random.shuffle(given)
    left = target.size
    for box, values in given:
        for view, part in target.parts(box.origin, values):
            assert np.shares_memory(part, leaf) and view.shape == part.shape
            view[...] = apply(target.ops, part)
            left -= part.size
    assert left == 0
    if gathered is not None:
        for box in _split(made.shape, nbytes):
            cut = box.within((0,) * region.ndim)
            region[cut] = gathered.result(cut)
    np.testing.assert_array_equal(region, apply(ops, leaf))


def test_movements_need_no_copy_of_the_leaf() -> None:
    """What the plans of dense, attention and stacked layers are made of is placed piece by piece."""
    spec = TensorSpec((5, 7, 2, 3), "float32")
    chains: list[tuple[Op, ...]] = [
        (Take(0, 4), Permute((1, 2, 0)), Reshape((6, 7))),
        (Take(1, 6), Cast("bfloat16")),
        (Slice(0, 0, 3), Flip((1, 2)), Multiply(0.5)),
        (Reshape((35, 6)), Permute((1, 0))),
        (Take(0, 1), Reorder(0, (2, 5), (1, 0)), Reorder(2, (1, 2), (1, 0)), Permute((2, 0, 1)), Reshape((3, 14))),
    ]
    for ops in chains:
        assert destination_view(ops, spec, np.zeros(*_region(ops, spec))) is not None
    even = TensorSpec((6, 4, 10), "float32")
    turned: list[tuple[Op, ...]] = [
        (Take(0, 1), Deinterleave(1), Permute((1, 0))),
        (Permute((1, 2, 0)), Interleave(1), Reshape((40, 6))),
        (Reshape((6, 40)), Reshape((6, 2, 20)), Take(1, 1), Interleave(1)),  # a member of what is fused, and its heads
        (Interleave(2), Slice(2, 2, 6), Reshape((6, 16))),
        (Deinterleave(0), Flip((0, 2)), Deinterleave(1)),
        (Reshape((6, 40)), Deinterleave(1, 10), Permute((1, 0))),  # four heads in one axis
    ]
    for ops in turned:
        assert destination_view(ops, even, np.zeros(*_region(ops, even))) is not None, ops
    assert destination_view((AddIdentity(1.0),), TensorSpec((3, 3), "float32"), np.zeros((3, 3))) is None


def _region(ops: tuple[Op, ...], spec: TensorSpec) -> tuple[tuple[int, ...], Any]:
    made = out_spec(ops, spec)
    return made.shape, np.dtype(getattr(ml_dtypes, made.dtype, None) or made.dtype)


def _split(shape: tuple[int, ...], chunk: int) -> Iterator[Box]:
    yield from Grid(shape, tuple(max(1, min(n, 1 + (chunk + k) % 3)) for k, n in enumerate(shape)))


# ---- chunks and pieces

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


@pytest.mark.slow
@given(st.data(), SHAPES, st.integers(16, 99), st.sampled_from(["<f4", "<i2", "|u1", "<c16"]))
@settings(max_examples=200, deadline=None)
def test_pieces_tile_a_chunk(data: st.DataObject, shape: tuple[int, ...], limit: int, dtype: str) -> None:
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    chunk = tuple(data.draw(st.integers(1, n + 2)) for n in shape)
    seen = np.zeros(shape, int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", limit)
        for box in Grid(shape, chunk):
            stored = np.zeros(chunk, dtype)  # a chunk at the upper edge is stored whole
            stored[tuple(slice(0, n) for n in box.shape)] = array[box.within((0,) * len(shape))]
            raw = memoryview(stored.tobytes())
            at = 0

            def fill(buffer: memoryview, raw: memoryview = raw) -> None:
                nonlocal at
                buffer[:] = raw[at : at + len(buffer)]
                at += len(buffer)

            for origin, values in pieces(fill, chunk, box, np.dtype(dtype)):
                assert values.nbytes <= limit
                there = full_box(()).within(()) if not shape else Box(origin, values.shape).within((0,) * len(shape))
                np.testing.assert_array_equal(values, array[there])
                seen[there] += 1
            assert at == len(raw)  # so that what follows is seen
        again = np.zeros(shape, int)
        for origin, values in cut((0,) * len(shape), array):
            there = Box(origin, values.shape).within((0,) * len(shape))
            np.testing.assert_array_equal(values, array[there])
            again[there] += 1
    assert (seen == 1).all() and (again == 1).all()


def _write(path: Path, driver: str, array: np.ndarray, **metadata: Any) -> None:
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{path}/x/"}, "metadata": metadata}
    dtype = ts.bfloat16 if array.dtype == ml_dtypes.bfloat16 else None
    store = ts.open(spec, create=True, dtype=dtype or array.dtype, shape=array.shape).result()
    store.write(array).result()


def _zarr3(chunk: list[int], codecs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}}, "codecs": codecs, **more}


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD = {"name": "zstd", "configuration": {"level": 1}}
FORMS: dict[str, tuple[str, dict[str, Any], bool]] = {  # driver, metadata, whether it is decoded without TensorStore
    "zarr zstd": ("zarr", {"chunks": [3, 4, 2], "compressor": {"id": "zstd", "level": 1}}, True),
    "zarr zstd nested": (
        "zarr",
        {"chunks": [3, 4, 2], "compressor": {"id": "zstd", "level": 5}, "dimension_separator": "/"},
        True,
    ),
    "zarr raw": ("zarr", {"chunks": [3, 4, 2], "compressor": None}, True),
    "zarr blosc": ("zarr", {"chunks": [3, 4, 2], "compressor": {"id": "blosc", "cname": "lz4"}}, False),
    "zarr gzip": ("zarr", {"chunks": [3, 4, 2], "compressor": {"id": "gzip", "level": 1}}, False),
    "zarr fortran": ("zarr", {"chunks": [3, 4, 2], "compressor": {"id": "zstd"}, "order": "F"}, False),
    "zarr3 zstd": ("zarr3", _zarr3([3, 4, 2], [LITTLE, ZSTD]), True),
    "zarr3 raw": ("zarr3", _zarr3([3, 4, 2], [LITTLE]), True),
    "zarr3 flat keys": (
        "zarr3",
        _zarr3([3, 4, 2], [LITTLE, ZSTD], chunk_key_encoding={"name": "v2", "configuration": {"separator": "."}}),
        True,
    ),
    "zarr3 transposed": (
        "zarr3",
        _zarr3([3, 4, 2], [{"name": "transpose", "configuration": {"order": [2, 0, 1]}}, LITTLE, ZSTD]),
        False,
    ),
    "zarr3 big endian": (
        "zarr3",
        _zarr3([3, 4, 2], [{"name": "bytes", "configuration": {"endian": "big"}}, ZSTD]),
        False,
    ),
    "zarr3 shards": (
        "zarr3",
        _zarr3(
            [6, 4, 2],
            [{"name": "sharding_indexed", "configuration": {"chunk_shape": [3, 4, 1], "codecs": [LITTLE, ZSTD]}}],
        ),
        False,
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex64", "bool"])
@pytest.mark.parametrize("form", FORMS)
def test_chunks_are_what_tensorstore_reads(form: str, dtype: str, tmp_path: Path) -> None:
    driver, metadata, ours = FORMS[form]
    numbers = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 100, (7, 5, 3))
    array = numbers.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    _write(tmp_path, driver, array, **metadata)
    store = open_store(tmp_path, use_ocdbt=False, boundary=Boundary(tmp_path))
    found = read_metadata(store, ["x"], driver == "zarr3")["x"]
    assert found is not None and not isinstance(found, Exception)
    assert (found.encoding is not None) is (ours or ("big endian" in form and array.itemsize == 1))
    np.testing.assert_array_equal(read_array(store, found, False), array)
    seen = np.zeros(array.shape, int)
    for chunk in found.grid:
        for origin, values in stored_pieces(store, found, False, chunk):  # zarr3 leaves out what is zero
            there = Box(origin, values.shape).within((0, 0, 0))
            assert values.dtype == array.dtype
            np.testing.assert_array_equal(values, array[there])
            seen[there] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_an_array_without_axes(driver: str, tmp_path: Path) -> None:
    metadata = {"compressor": {"id": "zstd"}, "chunks": []} if driver == "zarr" else _zarr3([], [LITTLE, ZSTD])
    _write(tmp_path, driver, np.array(2.5, np.float32), **metadata)
    store = open_store(tmp_path, use_ocdbt=False, boundary=Boundary(tmp_path))
    found = read_metadata(store, ["x"], driver == "zarr3")["x"]
    assert found is not None and not isinstance(found, Exception) and found.encoding is not None
    ((origin, values),) = (piece for chunk in found.grid for piece in stored_pieces(store, found, True, chunk))
    assert origin == () and values.shape == () and values == 2.5


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda raw: raw[: len(raw) // 2], r"chunk \[0, 0\] .*the chunk is truncated after \d+ bytes"),
        (lambda raw: raw + raw, r"chunk \[0, 0\] .*the chunk has more than the expected 24000 bytes"),
        (lambda raw: raw + b"junk", r"chunk \[0, 0\] .*zstd, after 24000 bytes"),
        (lambda raw: b"\0" * len(raw), r"chunk \[0, 0\] .*zstd, after 0 bytes"),
        (lambda raw: b"", r"chunk \[0, 0\] .*the chunk is truncated after 0 bytes"),
    ],
    ids=["cut off", "twice", "followed by junk", "zeros", "empty"],
)
def test_a_damaged_chunk_is_an_error(damage: Callable[[bytes], bytes], said: str, tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((60, 100)).astype(np.float32)
    _write(tmp_path, "zarr", array, chunks=[60, 100], compressor={"id": "zstd", "level": 1})
    file = tmp_path / "x" / "0.0"
    file.write_bytes(damage(file.read_bytes()))
    store = open_store(tmp_path, use_ocdbt=False, boundary=Boundary(tmp_path))
    found = read_metadata(store, ["x"], False)["x"]
    assert found is not None and not isinstance(found, Exception)
    with pytest.raises(ValueError, match=said):
        list(stored_pieces(store, found, True, found.grid[0]))


# ---- checksums


def test_the_digest_of_a_leaf_is_that_of_its_chunks_in_order() -> None:
    array = np.arange(60, dtype=np.float32).reshape(6, 10)
    one, two = digest_leaf("a", array), digest_leaf("a", array, Grid((6, 10), (4, 10)))
    assert one != two  # it says how the leaf was stored, too
    assert two == digest_leaf("a", np.asfortranarray(array), Grid((6, 10), (4, 10)))
    others = [
        digest_leaf("b", array),
        digest_leaf("a", array.T),
        digest_leaf("a", array.view(np.int32)),
        digest_leaf("a", -array),
    ]
    assert len({one, two, *others}) == 6


# ---- a reader's promise


@pytest.mark.parametrize(
    "given", [np.zeros((6, 4), np.float32), np.zeros((5, 4), np.float16), np.zeros(20, np.float32)]
)
def test_a_leaf_that_is_not_as_announced(given: np.ndarray, tmp_path: Path) -> None:
    class Lying(MemorySource):
        def read(self, name: str) -> np.ndarray:
            return given

    plan = make_plan(rule_file("- parameter: p\n  from: p"), Lying({"p": np.zeros((5, 4), np.float32)}))
    with pytest.raises(ConvertError) as caught:
        list(execute(plan, tmp_path / "out.safetensors"))
    (finding,) = caught.value.findings
    assert (finding.code, finding.path, finding.expected) == ("reader-invalid", "p", "float32[5,4]")
    assert finding.got == str(TensorSpec(given.shape, given.dtype.name))
    assert not any(tmp_path.iterdir())
