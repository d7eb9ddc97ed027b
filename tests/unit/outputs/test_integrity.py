"""`convert verify`: any change of an output is found, by the digests in its own headers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.outputs.difference import compare_weights
from convert.outputs.integrity import verify_output
from convert.writing.written import open_written
from support.small_conversion import small_output

SHARDS = 50  # bytes: one tensor of 48 in each file


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def findings(out: Path, *ignore: str) -> tuple[Finding, ...]:
    return verify_output(out, ignore, jobs=1).findings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return small_output(tmp_path, "out.safetensors")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    out = small_output(tmp_path, "out", max_shard_bytes=SHARDS)
    assert len(list(out.glob("*.safetensors"))) == 5
    return out


def test_an_untouched_output_is_intact(file: Path, directory: Path) -> None:
    for out, count in ((file, 1), (directory, 7)):
        found = verify_output(out)
        assert found.intact and not found.notes
        assert (found.files, found.tensors, found.nbytes) == (count, 5, 5 * 48)
        assert verify_output(next(directory.glob("*.safetensors"))).files == 1  # those beside it are not compared
        assert found.provenance["model"] == "small" and found.provenance["source_digest"].startswith("xxh3_128:")


def every_bit(out: Path, step: int) -> None:
    original = out.read_bytes()
    untouched = open_written(shutil.copy(out, out.with_name("untouched.safetensors")))
    begin = 8 + int.from_bytes(original[:8], "little")
    for bit in range(0, 8 * len(original), step):
        flip(out, bit)
        (first, *_) = findings(out)
        assert first.code == "output-damaged" and first.path == str(out), bit
        if bit // 8 >= begin:
            assert first.data["tensor"] == f"layers.{(bit // 8 - begin) // 48}.w"
            (differing,) = compare_weights(open_written(out), untouched, jobs=1).differing
            assert (differing.name, differing.count) == (first.data["tensor"], 1), bit
        out.write_bytes(original)


@pytest.mark.slow
def test_a_flipped_bit_is_found_in_header_and_data_and_its_tensor_named_by_both_commands(file: Path) -> None:
    every_bit(file, 61)


@pytest.mark.slow
def test_every_flipped_bit_is_found(file: Path) -> None:
    every_bit(file, 1)


@pytest.mark.parametrize("name", ["README.md", "model.safetensors.index.json", "model-00003-of-00005.safetensors"])
def test_a_flipped_bit_is_found_in_every_file_of_a_directory(directory: Path, name: str) -> None:
    path = directory / name
    original = path.read_bytes()
    for bit in range(0, 8 * len(original), 409):
        flip(path, bit)
        assert str(path) in [finding.path for finding in findings(directory)], bit
        path.write_bytes(original)


def swap(out: Path) -> None:
    a, b = out / "model-00001-of-00005.safetensors", out / "model-00002-of-00005.safetensors"
    a.rename(out / "x"), b.rename(a), (out / "x").rename(b)


def from_another_checkpoint(out: Path) -> None:
    other = small_output(out.parent, "other", seed=1, max_shard_bytes=SHARDS)
    shutil.copy(other / "model-00002-of-00005.safetensors", out)


def by_other_code(out: Path) -> None:
    path = out / "model-00002-of-00005.safetensors"
    save_file(load_file(path), path)


def truncated(out: Path) -> None:
    path = out / "model-00002-of-00005.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda out: (out / "model-00002-of-00005.safetensors").unlink(), "model-00002-of-00005.safetensors"),
        (lambda out: (out / "model-00005-of-00005.safetensors").unlink(), "model-00005-of-00005.safetensors"),
        (lambda out: (out / "model.safetensors.index.json").unlink(), "model.safetensors.index.json"),
        (lambda out: (out / "README.md").unlink(), "README.md"),
        (lambda out: (out / "model-00006-of-00006.safetensors").write_bytes(b"x"), "model-00006-of-00006.safetensors"),
        (lambda out: (out / "adapter_model.bin").write_bytes(b"x"), "adapter_model.bin"),
        (lambda out: (out / "config.json").write_bytes(b"{}"), "config.json"),
        (from_another_checkpoint, "model-00002-of-00005.safetensors"),
        (by_other_code, "model-00002-of-00005.safetensors"),
        (truncated, "model-00002-of-00005.safetensors"),
    ],
)
def test_missing_added_and_exchanged_files_are_found(
    directory: Path, change: Callable[[Path], object], name: str
) -> None:
    change(directory)
    found = findings(directory)
    assert str(directory / name) in [finding.path for finding in found], found


def test_two_exchanged_shards_are_found(directory: Path) -> None:
    swap(directory)
    assert {Path(finding.path).name for finding in findings(directory)} == {
        "model-00001-of-00005.safetensors",
        "model-00002-of-00005.safetensors",
    }


def test_files_of_the_user_are_notes_and_can_be_ignored(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")
    (directory / "README.md").write_text("mine")
    found = verify_output(directory)
    assert [Path(finding.path).name for finding in found.findings] == ["README.md"]
    assert found.notes == ("not covered, as the conversion did not write it: tokenizer.json",)
    assert verify_output(directory, ["README.md"]).intact


def test_figures_that_a_check_adds_to_the_card_are_no_damage(directory: Path) -> None:
    from convert.writing.model_card import add_figures

    card = directory / "README.md"
    for figure in ("1 tensor", "2 tensors"):
        card.write_text(add_figures(card.read_text(), [("weights", "passed", figure)]))
        assert verify_output(directory).intact


def test_what_has_no_digests_is_refused(tmp_path: Path) -> None:
    out = small_output(tmp_path, "out.safetensors")
    other = tmp_path / "other.safetensors"
    save_file(load_file(out), other)
    for path, code in ((other, "digests-missing"), (tmp_path / "absent", "converted-not-found")):
        with pytest.raises(CheckpointError) as caught:
            verify_output(path)
        assert caught.value.code == code


def test_the_digests_are_plain_xxh3_of_the_bytes(file: Path) -> None:
    """Other programs can compute them: XXH3-128 of each tensor's bytes in the file."""
    import xxhash
    from safetensors import safe_open

    with safe_open(file, "np") as opened:
        recorded = json.loads(opened.metadata()["tensor_digests"])
        assert recorded == {
            name: xxhash.xxh3_128_hexdigest(opened.get_tensor(name).tobytes())
            for name in opened.keys()  # noqa: SIM118
        }
