"""Computes checksums of leaves, which connect a converted file with its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xxhash

from convert.checkpoints.chunks import Grid, single_chunk
from convert.core.tensor_spec import TensorSpec

PREFIX = "xxh3_128:"
LENGTH = len(PREFIX) + 32


class ChunkDigest:
    """The XXH3-128 of a chunk's elements in C order (little endian), computed piece by piece."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, values: np.ndarray[Any, Any]) -> None:
        """Add the next elements."""
        self._state.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

    def digest(self) -> bytes:
        """Return the digest, 16 bytes."""
        return self._state.digest()


def join(name: str, spec: TensorSpec, chunks: Iterable[bytes]) -> str:
    """Return the checksum of a leaf: XXH3-128 of its name, dtype, shape and the digests of its chunks in C order."""
    state = xxhash.xxh3_128(f"{name}\0{spec.dtype}\0{spec.shape}\0".encode())
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def digest_leaf(name: str, array: np.ndarray[Any, Any], chunks: Grid | None = None) -> str:
    """Return the checksum of a leaf whose array is in memory.

    Args:
        chunks: the chunks in which it is stored (`Source.chunks`); None is one chunk.
    """
    digests = []
    for chunk in chunks or single_chunk(array.shape):
        digest = ChunkDigest()
        digest.update(array[chunk.within((0,) * array.ndim)])
        digests.append(digest.digest())
    return join(name, TensorSpec(array.shape, array.dtype.name), digests)


def combine(digests: Mapping[str, str]) -> str:
    """Return the checksum of a set of leaves, independent of their order: ``xxh3_128:`` and 32 hex digits."""
    state = xxhash.xxh3_128()
    for name in sorted(digests):
        state.update(f"{name}\0{digests[name]}\n".encode())
    return f"{PREFIX}{state.hexdigest()}"
