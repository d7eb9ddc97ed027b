"""Finds the arrays in the msgpack that ``flax.serialization`` writes, without copying their bytes.

Flax stores an array as a msgpack extension (flax/serialization.py, ``_MsgpackExtType``), or as a map of chunks where it has
more than 2**30 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from convert.checkpoints.encodings import msgpack_tokens
from convert.checkpoints.encodings.msgpack_tokens import Token, Walker
from convert.checkpoints.errors import MOST_KEYS, corrupt, located, too_deep
from convert.core.errors import CheckpointError
from convert.core.system.regular_file import Content
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec, numpy_dtype

NDARRAY, COMPLEX, NUMPY_SCALAR = 1, 2, 3  # extension types
CHUNKED = "__msgpack_chunked_array__"  # the first key of the map that stands for an array of several chunks
_MAX_RANK = 32  # of NumPy 1; NumPy 2 allows 64


@dataclass(frozen=True)
class PackedArray:
    """Where the bytes of an array lie in a msgpack file.

    Attributes:
        spec: shape and dtype.
        ranges: (offset, bytes) in the file, to be read one after the other; several for a chunked array.
        value: a plain Python scalar, which has no bytes.
    """

    spec: TensorSpec
    ranges: tuple[tuple[int, int], ...] = ()
    value: bool | int | float | complex | None = None


class Text(NamedTuple):
    """A string in a tree, which is not an array; T5X stores the paths of arrays as strings."""

    text: str


TreeNode = (
    PackedArray | Text | str
)  # a string is a word for a node without an array: ``None``, ``empty dict``, ``bytes``


def walk_tree(data: Content | bytes, file: Path) -> list[tuple[tuple[str, ...], TreeNode]]:
    """Return (path, node) of every leaf of the tree that `data` holds. Steps through every object once.

    Raises:
        CheckpointError: damaged; the finding names the file and the leaf.
    """
    walker = Walker(data)
    nodes: list[tuple[tuple[str, ...], TreeNode]] = []
    path: list[str] = []
    try:
        end = _walk(walker, 0, path, nodes)
        if end != walker.size:
            raise corrupt(f"{walker.size - end} bytes after the end of the msgpack, at byte {end}")
    except CheckpointError as error:
        raise located(error, file, "/".join(path) if path else None) from None
    return nodes


def _walk(walker: Walker, at: int, path: list[str], nodes: list[tuple[tuple[str, ...], TreeNode]]) -> int:
    """Add the nodes of the object at byte `at`; return where it ends. On an error, `path` is the place of the error."""
    token = walker.token(at)
    if len(nodes) * max(len(path) / 10, 1) > msgpack_tokens.MAX_NODES:  # paths have three or four keys
        raise msgpack_tokens.too_many_nodes(at)
    if len(path) > MOST_KEYS:
        raise too_deep("", path)
    if token.kind == "str":
        nodes.append((tuple(path), Text(walker.data[token.body : token.stop].decode(errors="replace"))))
        return token.stop
    if token.kind not in ("map", "array"):
        nodes.append((tuple(path), packed_array(walker, at)))
        return token.stop
    if token.kind == "map" and token.children and walker.is_string(walker.token(token.stop), CHUNKED):
        nodes.append((tuple(path), packed_array(walker, at)))
        return walker.skip(at)
    if not token.children:
        nodes.append((tuple(path), "empty dict" if token.kind == "map" else "empty list"))
    at = token.stop
    for index in range(token.children):
        key = str(index)
        if token.kind == "map":
            head = walker.token(at)
            key, at = str(head.value) if head.kind == "int" else walker.text(head), head.stop
        path.append(key)
        at = _walk(walker, at, path, nodes)
        path.pop()
    return at


def packed_array(walker: Walker, at: int) -> PackedArray | str:
    """Return the array or scalar at byte `at`, or a word for another object: ``None``, ``string``, ``bytes``."""
    token = walker.token(at)
    if token.kind == "nil":
        return "None"
    if token.kind in ("str", "bin"):
        return {"str": "string", "bin": "bytes"}[token.kind]
    if token.kind == "map":
        return _chunked(walker, at)
    if token.kind == "ext":
        return _complex(walker, token) if token.code == COMPLEX else _ndarray(walker, token)
    if token.kind == "array" or token.value is None:
        raise corrupt(expected=f"the bytes of an array at byte {at}", got="a list")
    dtype = {"bool": "bool", "float": "float64", "int": "int64" if token.value < 2**63 else "uint64"}[token.kind]
    return PackedArray(TensorSpec((), dtype), value=token.value)


def _ndarray(walker: Walker, ext: Token) -> PackedArray:
    """Read an extension whose payload is a msgpack array: (shape, dtype name, bytes)."""
    if ext.code not in (NDARRAY, NUMPY_SCALAR):
        raise corrupt(expected=f"an extension of type 1, 2 or 3 at byte {ext.body}", got=f"type {ext.code}")
    head = walker.token(ext.body)
    if head.kind != "array" or head.children != 3:
        raise corrupt(expected=f"(shape, dtype, bytes) at byte {ext.body}", got=head.kind)
    shape = _shape(walker, head.stop)
    name = walker.token(walker.skip(head.stop))
    dtype = walker.text(name)
    data = walker.token(name.stop)
    if data.kind != "bin" or data.stop != ext.stop:
        raise corrupt(
            f"the bytes of the array at byte {data.body} do not end where the array ends",
            expected=f"byte {ext.stop}",
            got=f"byte {data.stop}",
        )
    if dtype not in SAFETENSORS_TAGS:
        raise corrupt("unknown dtype", expected=f"one of {', '.join(SAFETENSORS_TAGS)}", got=repr(dtype))
    spec = TensorSpec(shape, dtype)
    _check_size(spec, data.stop - data.body)
    return PackedArray(spec, ((data.body, data.stop - data.body),))


def _chunked(walker: Walker, at: int) -> PackedArray:
    values = {key: start for key, start, _ in walker.items(at)}
    if not {CHUNKED, "shape", "chunks"} <= values.keys():
        raise corrupt(expected=f"an array at byte {at}", got=f"a map with the keys {', '.join(values) or '-'}")
    chunks = []
    for start, _ in walker.sequence(values["chunks"]):
        chunk = walker.token(start)
        if chunk.kind != "ext":
            raise corrupt(expected=f"a chunk of an array at byte {start}", got=chunk.kind)
        chunks.append(_ndarray(walker, chunk))
    dtypes = sorted({chunk.spec.dtype for chunk in chunks})
    if len(dtypes) != 1:
        got = ", ".join(dtypes) or "no chunks"
        raise corrupt(f"the chunks of the array at byte {at} differ in dtype", expected="one dtype", got=got)
    ranges = tuple(span for chunk in chunks for span in chunk.ranges)
    spec = TensorSpec(_shape(walker, values["shape"]), dtypes[0])
    _check_size(spec, sum(nbytes for _, nbytes in ranges))
    return PackedArray(spec, ranges)


def _shape(walker: Walker, at: int) -> tuple[int, ...]:
    sizes = []
    for start, _ in walker.sequence(at):
        token = walker.token(start)
        if token.kind != "int" or not isinstance(token.value, int) or token.value < 0:
            raise corrupt(f"the shape at byte {at} is not valid", expected="sizes", got=repr(token.value))
        sizes.append(token.value)
    return tuple(sizes)


def _complex(walker: Walker, ext: Token) -> PackedArray:
    spans = walker.sequence(ext.body)
    if len(spans) != 2:
        raise corrupt(expected=f"two elements at byte {ext.body}", got=str(len(spans)))
    real, imaginary = (walker.token(start) for start, _ in spans)
    if real.kind != "float" or imaginary.kind != "float" or imaginary.stop != ext.stop:
        raise corrupt(expected=f"the two floats of a complex number at byte {ext.body}")
    assert real.value is not None and imaginary.value is not None
    return PackedArray(TensorSpec((), "complex128"), value=complex(real.value, imaginary.value))


def read_packed(data: Content | bytes, packed: PackedArray) -> np.ndarray:
    """Return a copy of the array."""
    dtype = numpy_dtype(packed.spec.dtype)
    if packed.value is not None:
        return np.array(packed.value, dtype)
    if packed.spec.size == 0:
        return np.empty(packed.spec.shape, dtype)
    flat = np.empty(packed.spec.nbytes, np.uint8)
    at = 0
    for offset, nbytes in packed.ranges:
        flat[at : at + nbytes] = np.frombuffer(data[offset : offset + nbytes], np.uint8)
        at += nbytes
    return flat.view(dtype).reshape(packed.spec.shape)


def _check_size(spec: TensorSpec, nbytes: int) -> None:
    if len(spec.shape) > _MAX_RANK or math.prod(max(n, 1) for n in spec.shape) >= 2**60:
        raise corrupt(f"the shape {list(spec.shape)} is not possible for an array")
    if spec.nbytes != nbytes:
        raise corrupt(
            "the size of the array is wrong", expected=f"{spec.nbytes} bytes for {spec}", got=f"{nbytes} bytes"
        )
