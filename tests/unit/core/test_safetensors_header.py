"""The header codec against safetensors' own writer and reader, and against hostile files."""

import json
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from convert.core.errors import CheckpointError, OutputError
from convert.core.safetensors_header import encode, file_order, read_header, tag
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec


def whole(header: dict[str, object] | str | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def f32(shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(3, dtype=np.int8),
        "scalar": np.array(1.5),
        "empty": np.zeros((0, 4), np.uint16),
    }
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(tensors, path, metadata={"format": "np", "é": "ü"})
    metadata, entries = read_header(path)
    assert metadata == {"format": "np", "é": "ü"}
    assert list(entries) == ["scalar", "b", "empty", "a"]
    raw = path.read_bytes()
    for name, (spec, start, stop) in entries.items():
        assert spec == TensorSpec(tensors[name].shape, tensors[name].dtype.name)
        assert raw[start:stop] == tensors[name].tobytes()


def test_file_without_metadata(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(2, np.float32)}, path)
    assert read_header(path)[0] == {}


@given(
    st.permutations(
        [(f"t{i}", TensorSpec((3,), name)) for i, name in enumerate(SAFETENSORS_TAGS) if SAFETENSORS_TAGS[name]]
    )
)
def test_every_tensor_is_aligned_and_the_order_does_not_depend_on_the_input(
    tensors: list[tuple[str, TensorSpec]],
) -> None:
    ordered = file_order(tensors)
    assert ordered == file_order(sorted(tensors))
    at = 0
    for _, spec in ordered:
        assert at % (spec.nbytes // 3) == 0
        at += spec.nbytes


def test_header_is_a_multiple_of_eight_and_its_metadata_sorted() -> None:
    for extra in range(9):
        header = encode([("a" * (1 + extra), TensorSpec((2,), "float32"))], {"z": "1", "format": "pt", "a": "2"})
        assert len(header) % 8 == 0
        assert int.from_bytes(header[:8], "little") == len(header) - 8
        assert header[8:].startswith(b'{"__metadata__":{"a":"2","format":"pt","z":"1"},"a')


def test_dtype_without_a_tag_is_refused_with_the_tensor_s_name() -> None:
    with pytest.raises(OutputError) as error:
        tag("layer/w", TensorSpec((), "complex128"))
    finding = error.value.findings[0]
    assert (finding.code, finding.path, finding.got) == ("dtype-not-storable", "layer/w", "complex128")
    assert finding.expected.startswith("one of bool") and finding.fix


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(OutputError) as error:
        encode([("\ud800", TensorSpec((), "int8"))], {})
    assert error.value.code == "header-not-writable" and "Unicode" in error.value.findings[0].problem


def test_header_too_long_for_readers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.core.safetensors_header.MAX_HEADER", 64)
    with pytest.raises(OutputError) as error:
        encode([("a" * 100, TensorSpec((), "int8"))], {})
    finding = error.value.findings[0]
    assert finding.code == "header-not-writable" and "64 bytes" in finding.expected and "bytes" in finding.got


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"the header would take 0 bytes, the file has 0"),
        (b"\x02\0\0\0\0\0\0", r"the file has 7"),
        (
            b"\xff" * 16,
            r"expected a safetensors file, got another format, or a damaged file; give the .safetensors file",
        ),
        (b"PK\x03\x04" + bytes(40), r"got another format, or a damaged file"),
        (b"# README" * 4, r"got another format, or a damaged file"),
        ((1000).to_bytes(8, "little") + b"text", r"got another format, or a damaged file"),
        (whole("{}")[:-1], r"the header would take 2 bytes, the file has 9"),
        (whole("{"), "its header is not JSON"),
        (whole(b"\xff\xfe"), "its header is not JSON"),
        (whole("[" * 100_000), "its header is not JSON"),
        (whole('{"a": ' + "9" * 5000 + "}"), "its header is not JSON"),
        (whole('{"a": 1, "a": 1}'), "a key occurs twice"),
        (whole("[]"), "its header is not a JSON object"),
        (whole({"__metadata__": {"a": 1}}), "its __metadata__ is not a map of strings"),
        (whole({"__metadata__": ["a"]}), "its __metadata__ is not a map of strings"),
        (whole({"a": 5}), "tensor a is not described by"),
        (whole({"a": {**f32([1], 0, 4), "shape": [True]}}, bytes(4)), "tensor a is not described by"),
        (whole({"a": {**f32([1], 0, 4), "shape": [-1]}}, bytes(4)), "tensor a is not described by"),
        (whole({"a": {**f32([1], 0, 4), "data_offsets": [0, 4, 4]}}, bytes(4)), "tensor a is not described by"),
        (
            whole({"a": {**f32([1], 0, 4), "dtype": "F4"}}, bytes(4)),
            "tensor a has the unknown dtype F4; known are BOOL",
        ),
        (
            whole({"a": f32([2], 0, 4)}, bytes(4)),
            r"tensor a, float32\[2\], takes 8 bytes, but its offsets are \[0, 4\]",
        ),
        (whole({"a": f32([1], 0, 4), "b": f32([1], 0, 4)}, bytes(4)), "tensor b starts at byte .*, but the one before"),
        (whole({"a": f32([1], 4, 8)}, bytes(8)), "tensor a starts at byte"),
        (whole({"a": f32([1], 0, 4)}, bytes(5)), r"its tensors stop at byte \d+, but it has \d+"),
        (whole({"a": f32([1], 0, 4)}, bytes(3)), r"its tensors stop at byte \d+, but it has \d+"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as error:
        read_header(path)
    assert (error.value.code, error.value.findings[0].path) == ("safetensors-damaged", str(path))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file or directory") as error:
        read_header(tmp_path / "x.safetensors")
    assert error.value.code == "file-not-readable"


def test_a_header_longer_than_readers_accept_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # sparse
    with pytest.raises(CheckpointError, match="got another format"):
        read_header(path)


@given(st.data())
def test_damage_is_an_error_or_leaves_a_file_that_safetensors_reads_too(data: st.DataObject) -> None:
    raw = bytearray(
        safetensors.numpy.save(
            {"a": np.arange(4, dtype=np.float32), "b": np.arange(4).astype(ml_dtypes.bfloat16)}, metadata={"k": "v"}
        )
    )
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        path.write_bytes(raw)
        try:
            _, entries = read_header(path)
        except CheckpointError:
            return
        with safetensors.safe_open(path, framework="np") as opened:
            assert set(opened.keys()) == set(entries)
