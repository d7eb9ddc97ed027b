"""Files of a few bytes that declare much: they are refused before they take time or memory. No JAX, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import tensorstore as ts

from convert.checkpoints import Boundary, chunks, open_source
from convert.checkpoints.encodings import msgpack_tokens
from convert.checkpoints.encodings.ocdbt import Database
from convert.checkpoints.orbax import arrays, stores
from convert.core.errors import CheckpointError
from support.effort import calls_at_most


def refusal(path: Path) -> CheckpointError:
    with calls_at_most(6_000_000), pytest.raises(CheckpointError) as caught:
        open_source(path)
    return caught.value


# ---- absent chunks


def orbax(path: Path, shape: list[int], chunks: list[int], stored: int = 0) -> Path:
    (path / "w").mkdir(parents=True)
    (path / "checkpoint").write_bytes(msgpack.packb({"w": "PLACEHOLDER://w"}))
    metadata = {"zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": "<f4", "order": "C", "filters": None, "compressor": None, "fill_value": 0}  # fmt: skip
    (path / "w" / ".zarray").write_text(json.dumps(metadata))
    for k in range(stored):
        (path / "w" / str(k)).write_bytes(np.ones(chunks, np.float32).tobytes())
    return path


def test_ten_million_absent_chunks_are_refused(tmp_path: Path) -> None:
    error = refusal(orbax(tmp_path / "c", [10_000_000], [1]))
    assert error.code == "checkpoint-corrupt" and "10000000 chunks" in error.findings[0].got
    assert "w" in error.findings[0].path


@pytest.mark.slow
def test_absent_chunks_are_the_fill_value(tmp_path: Path) -> None:
    source = open_source(orbax(tmp_path / "c", [3000], [2], stored=2))
    assert np.array_equal(source.read("w"), [1] * 4 + [0] * 2996)


# ---- msgpack


@pytest.mark.parametrize("tree", [{"a": [1] * 6000}, {"a": [[1] * 3000] * 2}, {"a": {str(k): 1 for k in range(6000)}}])
@pytest.mark.parametrize("name", ["x.msgpack", "checkpoint"])
def test_a_tree_of_too_many_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: object, name: str
) -> None:
    """At the real limit, a byte for each number would take a gigabyte."""
    assert msgpack_tokens.MAX_NODES == 500_000
    monkeypatch.setattr(msgpack_tokens, "MAX_NODES", 5000)
    path = tmp_path / name
    path.write_bytes(msgpack.packb(tree))
    assert refusal(path if name == "x.msgpack" else tmp_path).code == "checkpoint-corrupt"


def test_a_wide_and_deep_tree_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgpack_tokens, "MAX_NODES", 5000)
    tree: object = {str(k): 1 for k in range(2000)}
    for _ in range(90):
        tree = {"a": tree}
    (tmp_path / "x.msgpack").write_bytes(msgpack.packb(tree))
    assert refusal(tmp_path / "x.msgpack").code == "checkpoint-corrupt"


# ---- OCDBT trees whose checksums are valid


def crc32c(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return (crc ^ 0xFFFFFFFF).to_bytes(4, "little")


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


class Tree:
    """A database of several levels, written by TensorStore with small nodes, without compression."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        self.base = ts.KvStore.open({"driver": "file", "path": f"{path}/"}).result()
        config = {"compression": None, "max_decoded_node_bytes": 200, "max_inline_value_bytes": 16}
        store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/", "config": config}).result()
        with ts.Transaction() as transaction:
            for k in range(40):
                store.with_transaction(transaction).write(f"key{k:03}", b"v").result()

    def dump(self, location: str | None = None) -> dict[str, object]:
        return ts.ocdbt.dump(self.base, node=location).result() if location else ts.ocdbt.dump(self.base).result()

    @property
    def root(self) -> str:
        return str(self.dump()["versions"][-1]["root"]["location"])  # type: ignore[index]

    def inner(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each inner node with the locations of its children, the root first."""
        left = [self.root]
        while left:
            node = left.pop(0)
            content = self.dump(node)
            if content["height"]:
                children = [entry["location"] for entry in content["entries"]]  # type: ignore[attr-defined]
                left += children
                yield node, children

    def redirect(self, node: str, child: int, other: str) -> bool:
        """Let a child of a node be another node; return whether the bytes can be changed so."""
        _, directory, name, offset, length = node.split(":")
        file, start, size = self.path / directory / name, int(offset), int(length)
        before = file.read_bytes()
        old = self.dump(node)["entries"][child]["location"].split(":")  # type: ignore[index]
        new = other.split(":")
        for what in (3, 4):  # offset, length: columns of the table of entries
            one, two = varint(int(old[what])), varint(int(new[what]))
            if one == two:
                continue
            if len(one) != len(two):
                file.write_bytes(before)
                return False
            raw = file.read_bytes()[start : start + size]
            places = [k for k in range(18, size - 4) if raw[k : k + len(one)] == one]
            for place in places:
                changed = raw[:place] + two + raw[place + len(one) : -4]
                whole = file.read_bytes()
                file.write_bytes(whole[:start] + changed + crc32c(changed) + whole[start + size :])
                try:
                    entries = self.dump(node)["entries"]
                    if entries[child]["location"].split(":")[what] == new[what]:  # type: ignore[index]
                        break
                except ValueError:
                    pass
                file.write_bytes(whole)
            else:
                file.write_bytes(before)
                return False
        return self.dump(node)["entries"][child]["location"] == other  # type: ignore[index]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path / "db")
    assert len(Database(made.path, ts.Context(), Boundary(made.path)).values) == 40
    return made


def test_a_node_that_two_entries_share_is_refused(tree: Tree) -> None:
    """With 20 such levels, two entries each, a reader would take a million reads."""
    assert any(tree.redirect(node, 1, children[0]) for node, children in tree.inner() if len(children) > 1)
    with pytest.raises(ValueError, match="two entries"):
        Database(tree.path, ts.Context(), Boundary(tree.path))
    with pytest.raises(CheckpointError) as caught:
        stores.open_store(tree.path, use_ocdbt=True, boundary=Boundary(tree.path))
    assert caught.value.code == "checkpoint-unreadable"


def test_a_cycle_is_refused(tree: Tree) -> None:
    nodes = list(tree.inner())
    assert any(tree.redirect(node, k, node) for node, children in nodes for k in range(len(children)))
    with calls_at_most(100_000), pytest.raises(ValueError, match="height|two entries"):
        Database(tree.path, ts.Context(), Boundary(tree.path))


# ---- deep trees, shared groups, missing chunks of any size


DEEP = "a/" * 300 + "x"  # steps whose time or memory grows with the square of the depth would not end


@pytest.mark.parametrize("kind", ["_METADATA", "checkpoint", "msgpack", "npz", "safetensors"])
def test_a_path_of_many_keys_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "c"
    keys = DEEP.split("/")
    if kind == "_METADATA":
        path.mkdir()
        entry = {"key_metadata": [{"key": key} for key in keys], "value_metadata": {"value_type": "None"}}
        (path / kind).write_text(json.dumps({"tree_metadata": {"x": entry}}))
    elif kind in ("checkpoint", "msgpack"):
        packed = b"\x81\xa1a" * 300 + b"\xc0"
        path = path if kind == "msgpack" else path / kind
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(packed)
    elif kind == "npz":
        path = tmp_path / "c.npz"
        np.savez(path, **{DEEP: np.ones(2, np.float32)})
    else:
        header = json.dumps({DEEP: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        path = tmp_path / "c.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    error = refusal(path.parent if kind == "checkpoint" else path)
    assert (error.code, error.findings[0].problem) == ("checkpoint-corrupt", "the tree is too deep")


def test_groups_with_two_names_are_refused(tmp_path: Path) -> None:
    """With 20 levels of two names each, 30 kB have a million groups."""
    import h5py

    with h5py.File(tmp_path / "x.weights.h5", "w") as file:
        group = file.create_group("vars")
        group["0"] = np.ones(2, np.float32)
        for _ in range(20):
            above = h5py.Group(h5py.h5g.create(file.id, None))
            above["a"] = above["b"] = group
            group = above
        file["top"] = group
    error = refusal(tmp_path / "x.weights.h5")
    assert error.code == "checkpoint-link-refused" and "same group" in error.findings[0].problem


def test_a_missing_chunk_is_made_in_parts(tmp_path: Path) -> None:
    source = open_source(orbax(tmp_path / "c", [3, 1 << 22], [3, 1 << 22]))
    reads: list[int] = []
    original = arrays.read_array

    def counted(*args: Any) -> Any:
        result = original(*args)
        reads.append(result.nbytes)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "read_array", counted)
        assert not source.read("w").any()
    assert len(reads) > 3 and max(reads) <= chunks.PIECE
