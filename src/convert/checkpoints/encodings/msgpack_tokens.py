"""Walks the msgpack that ``flax.serialization`` writes, to learn where each array lies, without copying any.

The msgpack library would build the whole tree, with a copy of every array's bytes. Here a token tells its kind and its
extent; what is inside an array is never touched. The format: https://github.com/msgpack/msgpack/blob/master/spec.md,
its extension layer_types: flax/serialization.py, ``_MsgpackExtType``.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from convert.core.errors import CheckpointError
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec, numpy_dtype

# A file of more objects than this is no checkpoint, and walking it in Python would take minutes. Real ones hold a few
# thousand; an array counts four.
MAX_OBJECTS = 5_000_000

NDARRAY, COMPLEX, NUMPY_SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"  # flax splits arrays above 2**30 bytes that lie in a map
_MAX_RANK = 32  # of NumPy 1; NumPy 2 allows 64
_MAX_DEPTH = 100  # levels of a tree; real ones have about ten


class ElementError(CheckpointError):
    """An element of a list is damaged.

    Attributes:
        index: which one, counted from 0.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class Token(NamedTuple):
    """One msgpack object's head.

    Attributes:
        kind: nil, bool, int, float, str, bin, array, map or ext.
        body: where its payload or its first child starts.
        stop: where the payload stops; for arrays and maps, where the head stops.
        children: elements of an array, pairs of a map.
        code: the type of an ext.
        value: of nil, bool, int and float.
    """

    kind: str
    body: int
    stop: int
    children: int = 0
    code: int = 0
    value: bool | int | float | None = None


@dataclass(frozen=True)
class Packed:
    """Where an array's bytes lie.

    Attributes:
        spec: shape and dtype.
        pieces: (offset, bytes) in the file, to be read one after the other; several for a chunked array.
        value: a plain Python scalar, which has no bytes of its own.
    """

    spec: TensorSpec
    pieces: tuple[tuple[int, int], ...] = ()
    value: bool | int | float | complex | None = None


class Text(NamedTuple):
    """A string in a tree, which is no array; T5X keeps the paths of arrays in such."""

    text: str


_FIXED = {  # first byte -> kind, struct format of the value
    0xCA: ("float", ">f"),
    0xCB: ("float", ">d"),
    0xCC: ("int", ">B"),
    0xCD: ("int", ">H"),
    0xCE: ("int", ">I"),
    0xCF: ("int", ">Q"),
    0xD0: ("int", ">b"),
    0xD1: ("int", ">h"),
    0xD2: ("int", ">i"),
    0xD3: ("int", ">q"),
}
_SIZED = {  # first byte -> kind, struct format of the length
    0xC4: ("bin", ">B"),
    0xC5: ("bin", ">H"),
    0xC6: ("bin", ">I"),
    0xC7: ("ext", ">B"),
    0xC8: ("ext", ">H"),
    0xC9: ("ext", ">I"),
    0xD9: ("str", ">B"),
    0xDA: ("str", ">H"),
    0xDB: ("str", ">I"),
    0xDC: ("array", ">H"),
    0xDD: ("array", ">I"),
    0xDE: ("map", ">H"),
    0xDF: ("map", ">I"),
}


class Walker:
    """Steps through msgpack in `data`, which is not copied.

    Every method raises CheckpointError where the data is truncated (the message says by how much at least) or is not
    msgpack; the message gives the byte, and the caller adds the file and the leaf.
    """

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data = data
        self.size = len(data)
        self._objects = 0

    def token(self, at: int) -> Token:
        """The object that starts at byte `at`. Its payload, if it has one, is there in full."""
        self._objects += 1
        if self._objects > MAX_OBJECTS:
            raise CheckpointError(f"more than {MAX_OBJECTS} objects up to byte {at}: not a checkpoint")
        self._need(at, 1)
        first = self.data[at]
        after = at + 1
        if first <= 0x7F or first >= 0xE0:
            return Token("int", after, after, value=first if first <= 0x7F else first - 0x100)
        if first <= 0x8F:
            return self._container("map", after, first & 0x0F)
        if first <= 0x9F:
            return self._container("array", after, first & 0x0F)
        if first <= 0xBF:
            return self._payload("str", after, first & 0x1F)
        if first == 0xC0:
            return Token("nil", after, after)
        if first in (0xC2, 0xC3):
            return Token("bool", after, after, value=first == 0xC3)
        if first in _FIXED:
            kind, form = _FIXED[first]
            stop = after + struct.calcsize(form)
            return Token(kind, after, stop, value=self._unpack(form, after))
        if 0xD4 <= first <= 0xD8:
            return self._ext(after, 1 << (first - 0xD4))
        if first in _SIZED:
            kind, form = _SIZED[first]
            length = int(self._unpack(form, after))
            after += struct.calcsize(form)
            if kind == "ext":
                return self._ext(after, length)
            return (
                self._payload(kind, after, length) if kind in ("bin", "str") else self._container(kind, after, length)
            )
        raise CheckpointError(f"byte {at} is 0x{first:02x}, which no msgpack object starts with")

    def skip(self, at: int) -> int:
        """The end of the object that starts at byte `at`, with everything in it."""
        missing = 1
        while missing:
            token = self.token(at)
            at = token.stop
            missing += {"array": token.children, "map": 2 * token.children}.get(token.kind, 0) - 1
        return at

    def text(self, token: Token) -> str:
        """The string of a ``str`` token (or of a ``bin`` one: old writers did not tell them apart)."""
        if token.kind not in ("str", "bin"):
            raise CheckpointError(f"expected a string before byte {token.body}, found {token.kind}")
        try:
            return self.data[token.body : token.stop].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"the string at byte {token.body} is not UTF-8: {error}") from None

    def items(self, at: int) -> Iterator[tuple[str, int, int]]:
        """(key, start, end) of the values of the map at byte `at`. Keys are strings."""
        head = self.token(at)
        if head.kind != "map":
            raise CheckpointError(f"expected a map at byte {at}, found {head.kind}")
        at = head.stop
        for _ in range(head.children):
            key = self.token(at)
            end = self.skip(key.stop)
            yield self.text(key), key.stop, end
            at = end

    def sequence(self, at: int) -> list[tuple[int, int]]:
        """(start, end) of the elements of the array at byte `at`, or of the map with keys '0', '1', ... that flax
        writes for a list."""
        head = self.token(at)
        if head.kind == "map":
            found = {key: (start, end) for key, start, end in self.items(at)}
            if len(found) != head.children or not all(str(i) in found for i in range(head.children)):
                raise CheckpointError(f"the map at byte {at} stands for a list, but its keys are not '0', '1', ...")
            return [found[str(i)] for i in range(head.children)]
        if head.kind != "array":
            raise CheckpointError(f"expected a list at byte {at}, found {head.kind}")
        spans = []
        at = head.stop
        for i in range(head.children):
            try:
                end = self.skip(at)
            except CheckpointError as error:
                raise ElementError(f"element {i} of {head.children}, from byte {at}: {error}", i) from None
            spans.append((at, end))
            at = end
        return spans

    def leaf(self, at: int) -> Packed | str:
        """The array or scalar at byte `at`; or a word for what is there instead: ``None``, ``string``, ``bytes``."""
        token = self.token(at)
        if token.kind == "nil":
            return "None"
        if token.kind in ("str", "bin"):
            return {"str": "string", "bin": "bytes"}[token.kind]
        if token.kind == "map":
            return self._chunked(at)
        if token.kind == "ext":
            return self._complex(token) if token.code == COMPLEX else self._ndarray(token)
        if token.kind == "array" or token.value is None:
            raise CheckpointError(f"expected an array's bytes at byte {at}, found a list")
        dtype = {"bool": "bool", "float": "float64", "int": "int64" if token.value < 2**63 else "uint64"}[token.kind]
        return Packed(TensorSpec((), dtype), value=token.value)

    def _ndarray(self, ext: Token) -> Packed:
        """The payload is an msgpack array of its own: (shape, dtype name, bytes)."""
        if ext.code not in (NDARRAY, NUMPY_SCALAR):
            raise CheckpointError(f"extension type {ext.code} at byte {ext.body}; flax writes 1, 2 and 3")
        head = self.token(ext.body)
        if head.kind != "array" or head.children != 3:
            raise CheckpointError(f"expected (shape, dtype, bytes) at byte {ext.body}, found {head.kind}")
        shape = self._shape(head.stop)
        name = self.token(self.skip(head.stop))
        dtype = self.text(name)
        data = self.token(name.stop)
        if data.kind != "bin" or data.stop != ext.stop:
            raise CheckpointError(f"the array's bytes at byte {data.body} do not end where the array does, {ext.stop}")
        if dtype not in SAFETENSORS_TAGS:
            raise CheckpointError(f"unknown dtype {dtype!r}; known are {', '.join(SAFETENSORS_TAGS)}")
        spec = TensorSpec(shape, dtype)
        _check_size(spec, data.stop - data.body)
        return Packed(spec, ((data.body, data.stop - data.body),))

    def _chunked(self, at: int) -> Packed:
        found = {key: start for key, start, _ in self.items(at)}
        if not {_CHUNKED, "shape", "chunks"} <= found.keys():
            raise CheckpointError(
                f"expected an array at byte {at}, found a map with the keys {', '.join(found) or '-'}"
            )
        chunks = []
        for start, _ in self.sequence(found["chunks"]):
            chunk = self.token(start)
            if chunk.kind != "ext":
                raise CheckpointError(f"expected a chunk of an array at byte {start}, found {chunk.kind}")
            chunks.append(self._ndarray(chunk))
        dtypes = {chunk.spec.dtype for chunk in chunks}
        if len(dtypes) != 1:
            raise CheckpointError(f"the chunks of the array at byte {at} have the dtypes {sorted(dtypes)}, not one")
        pieces = tuple(piece for chunk in chunks for piece in chunk.pieces)
        spec = TensorSpec(self._shape(found["shape"]), dtypes.pop())
        _check_size(spec, sum(nbytes for _, nbytes in pieces))
        return Packed(spec, pieces)

    def _shape(self, at: int) -> tuple[int, ...]:
        sizes = []
        for start, _ in self.sequence(at):
            token = self.token(start)
            if token.kind != "int" or not isinstance(token.value, int) or token.value < 0:
                raise CheckpointError(f"the shape at byte {at} holds {token.value!r}, which is no size")
            sizes.append(token.value)
        return tuple(sizes)

    def _complex(self, ext: Token) -> Packed:
        real, imaginary = (self.token(start) for start, _ in self._pair(ext.body))
        if real.kind != "float" or imaginary.kind != "float" or imaginary.stop != ext.stop:
            raise CheckpointError(f"expected a complex number's two floats at byte {ext.body}")
        assert real.value is not None and imaginary.value is not None
        return Packed(TensorSpec((), "complex128"), value=complex(real.value, imaginary.value))

    def _pair(self, at: int) -> list[tuple[int, int]]:
        spans = self.sequence(at)
        if len(spans) != 2:
            raise CheckpointError(f"expected two elements at byte {at}, found {len(spans)}")
        return spans

    def _ext(self, at: int, length: int) -> Token:
        return self._payload("ext", at + 1, length)._replace(code=self.data[at] if at < self.size else 0)

    def _payload(self, kind: str, at: int, length: int) -> Token:
        self._need(at, length)
        return Token(kind, at, at + length)

    def _container(self, kind: str, at: int, count: int) -> Token:
        self._need(at, count * (2 if kind == "map" else 1))  # each child takes at least a byte
        return Token(kind, at, at, count)

    def _unpack(self, form: str, at: int) -> int | float:
        self._need(at, struct.calcsize(form))
        value: int | float = struct.unpack_from(form, self.data, at)[0]
        return value

    def _need(self, at: int, length: int) -> None:
        if at + length > self.size:
            self._truncated(at + length - self.size)

    def _truncated(self, missing: int) -> NoReturn:
        raise CheckpointError(f"truncated: the file has {self.size} bytes and at least {missing} more are missing")


def walk_tree(data: mmap.mmap | bytes, file: Path) -> Iterator[tuple[tuple[str, ...], Packed | Text | str]]:
    """(path, place) of every leaf of the tree that is the whole of `data`; a word (``None``, ``empty dict``) for a node that
    holds no array. Steps through every object once.

    Raises:
        CheckpointError: damaged; the message names the file, the leaf and the next step.
    """
    walker = Walker(data)
    found: list[tuple[tuple[str, ...], Packed | Text | str]] = []
    path: list[str] = []
    try:
        end = _walk(walker, 0, path, found)
        if end != walker.size:
            raise CheckpointError(f"{walker.size - end} bytes after the end of the msgpack, at byte {end}")
    except CheckpointError as error:
        where = f"{file}: leaf {'/'.join(path)}" if path else str(file)
        raise CheckpointError(f"{where}: {error}; copy the checkpoint again from where it was written") from None
    yield from found


def _walk(walker: Walker, at: int, path: list[str], found: list[tuple[tuple[str, ...], Packed | Text | str]]) -> int:
    """Adds what lies at byte `at`, and gives where it ends. `path` is where the walk stands, the error's place included."""
    token = walker.token(at)
    if len(path) > _MAX_DEPTH:
        raise CheckpointError(f"more than {_MAX_DEPTH} levels: not a checkpoint")
    if token.kind == "str":
        found.append((tuple(path), Text(walker.data[token.body : token.stop].decode(errors="replace"))))
        return token.stop
    if token.kind not in ("map", "array"):
        found.append((tuple(path), walker.leaf(at)))
        return token.stop
    if token.kind == "map" and token.children and _is_chunked(walker, token):
        found.append((tuple(path), walker.leaf(at)))
        return walker.skip(at)
    if not token.children:
        found.append((tuple(path), "empty dict" if token.kind == "map" else "empty list"))
    at = token.stop
    for index in range(token.children):
        key = str(index)
        if token.kind == "map":
            head = walker.token(at)
            key, at = str(head.value) if head.kind == "int" else walker.text(head), head.stop
        path.append(key)
        at = _walk(walker, at, path, found)
        path.pop()
    return at


def _is_chunked(walker: Walker, head: Token) -> bool:
    first = walker.token(head.stop)
    return first.kind in ("str", "bin") and walker.data[first.body : first.stop] == _CHUNKED.encode()


def array(data: mmap.mmap | bytes, packed: Packed) -> np.ndarray:
    """The array, in memory of its own."""
    dtype = numpy_dtype(packed.spec.dtype)
    if packed.value is not None:
        result = np.array(packed.value, dtype)
    elif packed.spec.size == 0:
        result = np.empty(packed.spec.shape, dtype)
    else:
        flat = np.empty(packed.spec.nbytes, np.uint8)
        at = 0
        for offset, nbytes in packed.pieces:
            flat[at : at + nbytes] = np.frombuffer(data, np.uint8, nbytes, offset)
            at += nbytes
        result = flat.view(dtype).reshape(packed.spec.shape)
    return result


def _check_size(spec: TensorSpec, nbytes: int) -> None:
    if len(spec.shape) > _MAX_RANK or math.prod(max(n, 1) for n in spec.shape) >= 2**60:
        raise CheckpointError(f"the shape {list(spec.shape)} is not one that an array can have")
    if spec.nbytes != nbytes:
        raise CheckpointError(f"{spec} takes {spec.nbytes} bytes, but {nbytes} are there")
