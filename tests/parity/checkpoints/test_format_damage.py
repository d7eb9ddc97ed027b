"""Damaged files of the other formats, and properties of any array and any name."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from convert import CheckpointError, open_source
from convert.checkpoints.chunks import PIECE
from support import writers
from support.open_refused import refusal
from support.source_contract import same
from support.writers import native


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
