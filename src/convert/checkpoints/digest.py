"""Checksums of leaves: what ties a written file to the checkpoint that it was made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xxhash

from convert.checkpoints.chunks import Grid, undivided
from convert.core.tensor_spec import TensorSpec

PREFIX = "xxh3_128:"
LENGTH = len(PREFIX) + 32


class ChunkDigest:
    """XXH3-128 of a chunk's elements in C order (little endian), fed piece by piece."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, values: np.ndarray[Any, Any]) -> None:
        """The next elements."""
        self._state.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

    def digest(self) -> bytes:
        """Sixteen bytes."""
        return self._state.digest()


def join(name: str, spec: TensorSpec, chunks: Iterable[bytes]) -> str:
    """Checksum of a leaf: XXH3-128 of its name, dtype, shape and the digests of its chunks, in C order of the chunks."""
    state = xxhash.xxh3_128(f"{name}\0{spec.dtype}\0{spec.shape}\0".encode())
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def digest_leaf(name: str, array: np.ndarray[Any, Any], chunks: Grid | None = None) -> str:
    """`join` of an array in memory.

    Args:
        chunks: as it is stored (`Source.chunks`); None: in one.
    """
    made = []
    for chunk in chunks or undivided(array.shape):
        digest = ChunkDigest()
        digest.update(array[chunk.within((0,) * array.ndim)])
        made.append(digest.digest())
    return join(name, TensorSpec(array.shape, array.dtype.name), made)


def combine(digests: Mapping[str, str]) -> str:
    """Checksum of a set of leaves, whatever the order in which they were read: ``xxh3_128:`` and 32 hex digits."""
    state = xxhash.xxh3_128()
    for name in sorted(digests):
        state.update(f"{name}\0{digests[name]}\n".encode())
    return f"{PREFIX}{state.hexdigest()}"
