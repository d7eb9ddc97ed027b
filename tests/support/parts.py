"""Parts of the slow tests: CI runs another one with each commit, as all of them together take longer than it may."""

from __future__ import annotations

import zlib


def parse_part(text: str) -> tuple[int, int]:
    """Return K and N of `K/N`.

    Raises:
        ValueError: it is not `K/N` with 1 <= K <= N.
    """
    number, slash, count = text.partition("/")
    if not (slash and number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ValueError(f"--part: expected K/N with 1 <= K <= N, got {text!r}")
    return int(number), int(count)


def part_of(test: str, parts: int) -> int:
    """Return the part, from 1, of a test by its id: neighbouring cases of one test go to different parts."""
    return zlib.crc32(test.encode()) % parts + 1
