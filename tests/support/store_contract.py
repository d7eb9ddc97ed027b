"""What must hold of every store, and the requests that its faults meet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from convert.checkpoints import open_source
from convert.core.errors import ConvertError
from support.object_store import ObjectStore
from support.source_contract import same


def assert_same(url: str, path: Path) -> None:
    """The checkpoint at a URL is the local one: its leaves, their values, and the pieces in which they are read."""
    here, there = open_source(path), open_source(url)
    assert there.format == here.format and there.leaves == here.leaves and there.absent == here.absent
    for name, leaf in here.leaves.items():
        assert same(there.read(name), here.read(name)), name
        for chunk in here.chunks(name):
            parts = [(origin, piece.copy()) for origin, piece in there.pieces(name, chunk)]
            local = [(origin, piece.copy()) for origin, piece in here.pieces(name, chunk)]
            assert all(a == b and np.array_equal(x, y, equal_nan=x.dtype.kind in "fc") for (a, x), (b, y) in zip(parts, local, strict=True)), leaf  # fmt: skip
    assert there.changed() is None


def refused(url: str, *secrets: str) -> str:
    """Return the error with which a checkpoint cannot be read; it holds no secret."""
    with pytest.raises(ConvertError) as caught:
        source = open_source(url)
        for name in source.leaves:
            source.read(name)
    assert not any(secret in str(caught.value) for secret in secrets)
    return str(caught.value)


def local_files(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in out.iterdir()} if out.is_dir() else {"": out.read_bytes()}


def stored(store: ObjectStore, bucket: str, key: str) -> dict[str, bytes]:
    return {each.removeprefix(key).lstrip("/"): store.get(bucket, each) for each in store.keys(bucket) if each.startswith(key)}  # fmt: skip


def any_write(method: str, path: str, query: str) -> bool:
    return method in ("PUT", "POST")


def a_part(method: str, path: str, query: str) -> bool:
    return "partNumber" in query


def completing(method: str, path: str, query: str) -> bool:
    return method == "POST" and "uploadId" in query


def the_last(method: str, path: str, query: str) -> bool:
    return method == "PUT" and path.endswith("index.json")
