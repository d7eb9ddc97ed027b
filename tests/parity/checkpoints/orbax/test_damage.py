"""Lost and damaged files: each is an error that names the leaf, or does no harm."""

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from convert.checkpoints.orbax.reader import open_orbax
from convert.checkpoints.orbax.stores import AGAIN
from convert.core.errors import CheckpointError
from support.orbax_checkpoints import LAYOUTS, Copy, arrays_to_damage, read_refusal, refusal, replace_in
from support.source_contract import same


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


@pytest.mark.slow
def test_a_lost_chunk_of_several_devices(devices: Path, tmp_path: Path) -> None:
    path = shutil.copytree(devices / "directories", tmp_path / "checkpoint")
    (path / "rows" / "5.0").unlink()
    assert 'chunk {5, 0} stored at local file "rows/5.0" is missing' in read_refusal(path, "rows").problem


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
