"""Writes an OCDBT database, TensorStore's key-value store in few files, whose reader is `convert.checkpoints.encodings.ocdbt`.

TensorStore gives its files random names and records the time; here the same values give the same bytes. The format is that of
https://google.github.io/tensorstore/kvstore/ocdbt/: a manifest, one node of the tree with the keys, and files with values.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import zstandard

INLINE = 1024  # bytes; shorter values are in the node, as Orbax's context says
_MOST_NODE_BYTES = 100_000_000  # `max_decoded_node_bytes` of Orbax
_MANIFEST, _NODE = 0x0CDB3A2A, 0x0CDB20DE
_ZSTD = 1
_POLYNOMIAL = 0x82F63B78  # CRC-32C


class Stored(NamedTuple):
    """The place of a value: a file, relative to the database, and its bytes."""

    file: str
    start: int
    length: int


def encode_node(values: Mapping[str, bytes | Stored]) -> bytes:
    """Encode the only node of the tree, a leaf with all keys."""
    keys = sorted(key.encode() for key in values)
    ordered = [values[key.decode()] for key in keys]
    places = [value for value in ordered if isinstance(value, Stored)]
    files = sorted({place.file for place in places})
    number = {file: k for k, file in enumerate(files)}
    return _block(
        _NODE,
        bytes([0])  # height
        + _files(files)
        + _strings(keys)
        + _numbers(value.length if isinstance(value, Stored) else len(value) for value in ordered)
        + bytes(isinstance(value, Stored) for value in ordered)
        + _numbers(number[place.file] for place in places)
        + _numbers(place.start for place in places)
        + b"".join(value for value in ordered if not isinstance(value, Stored)),
    )


def encode_manifest(node: Stored, values: Mapping[str, bytes | Stored]) -> bytes:
    """Encode the manifest of a database with one version, whose tree is `node`."""
    outside = sum(value.length for value in values.values() if isinstance(value, Stored))
    settings = (
        bytes(16) + _numbers((0, INLINE, _MOST_NODE_BYTES)) + bytes([4]) + _numbers([_ZSTD]) + struct.pack("<i", 0)
    )
    version = _numbers((1, 1)) + bytes([0]) + _numbers((0, node.start, node.length, len(values), node.length, outside))
    return _block(_MANIFEST, settings + _files([node.file]) + version + struct.pack("<Q", 1) + _numbers([0]))


def _block(magic: int, body: bytes) -> bytes:
    """Add the header and the checksum."""
    packed = _numbers((0, _ZSTD)) + zstandard.ZstdCompressor(level=3).compress(body)
    data = struct.pack(">I", magic) + struct.pack("<Q", 12 + len(packed) + 4) + packed
    return data + struct.pack("<I", _crc32c(data))


def _files(names: Sequence[str]) -> bytes:
    """Encode the table of files; their base path is empty."""
    paths = [name.encode() for name in names]
    prefixes, suffixes = _shared(paths)
    lengths = (*prefixes, *map(len, suffixes), *(0 for _ in paths))
    return _numbers([len(paths)]) + _numbers(lengths) + b"".join(suffixes)


def _strings(keys: Sequence[bytes]) -> bytes:
    prefixes, suffixes = _shared(keys)
    return _numbers([len(keys)]) + _numbers((*prefixes, *map(len, suffixes))) + b"".join(suffixes)


def _shared(keys: Sequence[bytes]) -> tuple[list[int], list[bytes]]:
    """Return how many bytes each key but the first shares with the one before, and the rest of each key."""
    prefixes = [len(os.path.commonprefix([a, b])) for a, b in pairwise(keys)]  # noqa: RUF071 - bytes are meant
    return prefixes, [key[n:] for n, key in zip((0, *prefixes), keys, strict=False)]


def _numbers(values: Iterable[int]) -> bytes:
    """Encode numbers of variable length, seven bits in a byte."""
    out = bytearray()
    for value in values:
        while value >= 128:
            out.append(value & 127 | 128)
            value >>= 7
        out.append(value)
    return bytes(out)


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def _crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 255] ^ (value >> 8)
    return value ^ 0xFFFFFFFF
