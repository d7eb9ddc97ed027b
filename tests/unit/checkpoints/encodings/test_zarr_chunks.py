"""A small value is decoded at once, and comes out as it does from front to back, or not at all."""

from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from convert.checkpoints.encodings import zarr_chunks
from convert.checkpoints.encodings.zarr_chunks import SMALL, FileRange, decoded, decoding

CONTENT = bytes(range(251)) * 3


def frame(content: bytes, *, sized: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=sized, write_checksum=True).compress(content)


def front_to_back(stored: FileRange | bytes, compressed: bool, nbytes: int) -> bytes | None:
    """None where it is refused."""
    buffer = bytearray(nbytes)
    try:
        with decoding(stored, compressed) as fill:
            fill(memoryview(buffer))
    except ValueError:
        return None
    return bytes(buffer)


@pytest.mark.parametrize("compressed", [True, False])
def test_of_a_part_of_a_file(compressed: bool, tmp_path: Path) -> None:
    value = frame(CONTENT) if compressed else CONTENT
    file = tmp_path / "d"
    file.write_bytes(b"before" + value + b"after")
    stored = FileRange(file, 6, 6 + len(value))
    assert decoded(stored, compressed, len(CONTENT)) == CONTENT
    assert decoded(value, compressed, len(CONTENT)) == CONTENT


@pytest.mark.parametrize(
    "value",
    [
        frame(CONTENT)[:-9],
        frame(CONTENT) + b"\0",
        frame(CONTENT) + frame(b"x"),
        frame(CONTENT + b"x"),
        frame(CONTENT[:-1]),
        b"",
    ],
    ids=["cut off", "goes on", "goes on with a frame", "longer", "shorter", "empty"],
)
def test_what_is_wrong_is_left_to_who_can_say_it(value: bytes) -> None:
    assert decoded(value, True, len(CONTENT)) is None
    assert front_to_back(value, True, len(CONTENT)) is None


@pytest.mark.parametrize("value", [frame(CONTENT, sized=False), frame(CONTENT[:9]) + frame(CONTENT[9:])])
def test_other_frames_are_left_to_who_reads_them(value: bytes) -> None:
    assert decoded(value, True, len(CONTENT)) is None
    assert front_to_back(value, True, len(CONTENT)) == CONTENT


def test_no_more_is_read_than_a_small_value_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "d"
    file.touch()
    monkeypatch.setattr(zarr_chunks, "open_unbuffered", lambda *_: pytest.fail("it was opened"))
    assert decoded(FileRange(file, 0, 8), False, SMALL + 1) is None
    assert decoded(FileRange(file, 0, 1 << 60), True, 8) is None


@given(st.binary(max_size=40), st.integers(0, 80), st.integers(0, 255))
def test_a_flipped_byte_gives_no_other_values(content: bytes, at: int, flip: int) -> None:
    value = bytearray(frame(content))
    value[at % len(value)] ^= flip
    got = decoded(bytes(value), True, len(content))
    assert got is None or got == front_to_back(bytes(value), True, len(content))
