"""Steps through msgpack without copying: a token tells the kind and the extent of an object.

The msgpack library would build the whole tree, with a copy of the bytes of every array. Here the inside of an array is
never read. Format: https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from convert.checkpoints.errors import corrupt, located, truncated
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.system.regular_file import Content

# A file of more objects is not a checkpoint, and stepping through it in Python would take minutes. Real checkpoints have
# a few thousand; an array counts four.
MAX_OBJECTS = 5_000_000
MAX_NODES = 500_000  # nodes of a tree that are in memory at a time, each with its path; 50,000 is a large checkpoint


class ElementError(CheckpointError):
    """An element of a list is damaged.

    Attributes:
        index: its position in the list, from 0.
    """

    def __init__(self, *findings: Finding, index: int) -> None:
        super().__init__(*findings)
        self.index = index


class Token(NamedTuple):
    """The head of one msgpack object.

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


def too_many_nodes(at: int) -> CheckpointError:
    """Return the error for a tree with more nodes than a checkpoint has: a byte each, they would fill the memory."""
    return corrupt(f"too many objects in one tree or list up to byte {at}", expected=f"at most {MAX_NODES}")


class Walker:
    """Steps through msgpack in `data`, which is not copied.

    Every method raises CheckpointError where the data is truncated or is not msgpack. The findings name the byte; the
    caller adds the file and the leaf.
    """

    def __init__(self, data: Content | bytes) -> None:
        self.data = data
        self.size = len(data)
        self._objects = 0

    def token(self, at: int) -> Token:
        """Return the object that starts at byte `at`. Its payload, if it has one, is not truncated."""
        self._objects += 1
        if self._objects > MAX_OBJECTS:
            raise corrupt(f"too many msgpack objects up to byte {at}", expected=f"at most {MAX_OBJECTS}")
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
        raise corrupt(expected=f"a msgpack object at byte {at}", got=f"the byte 0x{first:02x}")

    def skip(self, at: int) -> int:
        """Return the end of the object that starts at byte `at`, with everything in it."""
        missing = 1
        while missing:
            token = self.token(at)
            at = token.stop
            missing += {"array": token.children, "map": 2 * token.children}.get(token.kind, 0) - 1
        return at

    def text(self, token: Token) -> str:
        """Return the string of a ``str`` token, or of a ``bin`` one, which old writers used for strings, too."""
        if token.kind not in ("str", "bin"):
            raise corrupt(expected=f"a string before byte {token.body}", got=token.kind)
        try:
            return self.data[token.body : token.stop].decode()
        except UnicodeDecodeError as error:
            raise corrupt(f"the string at byte {token.body} is not UTF-8: {error}") from None

    def items(self, at: int) -> Iterator[tuple[str, int, int]]:
        """Yield (key, start, end) of the values of the map at byte `at`. Keys are strings."""
        head = self.token(at)
        if head.kind != "map":
            raise corrupt(expected=f"a map at byte {at}", got=head.kind)
        at = head.stop
        for _ in range(head.children):
            key = self.token(at)
            end = self.skip(key.stop)
            yield self.text(key), key.stop, end
            at = end

    def sequence(self, at: int) -> list[tuple[int, int]]:
        """Return (start, end) of each element of a list: an array, or the map with keys '0', '1', ... that flax writes."""
        head = self.token(at)
        if head.kind == "map":
            spans_by_key = {key: (start, end) for key, start, end in self.items(at)}
            if len(spans_by_key) != head.children or not all(str(i) in spans_by_key for i in range(head.children)):
                raise corrupt(f"the map at byte {at} stands for a list", expected="the keys '0', '1', ...")
            return [spans_by_key[str(i)] for i in range(head.children)]
        if head.kind != "array":
            raise corrupt(expected=f"a list at byte {at}", got=head.kind)
        spans = []
        at = head.stop
        for i in range(head.children):
            try:
                end = self.skip(at)
            except CheckpointError as error:
                place = located(error, f"element {i} of {head.children}, from byte {at}")
                raise ElementError(*place.findings, index=i) from None
            spans.append((at, end))
            at = end
        return spans

    def is_string(self, token: Token, text: str) -> bool:
        """Whether the token is this string."""
        return token.kind in ("str", "bin") and self.data[token.body : token.stop] == text.encode()

    def _ext(self, at: int, length: int) -> Token:
        return self._payload("ext", at + 1, length)._replace(code=self.data[at] if at < self.size else 0)

    def _payload(self, kind: str, at: int, length: int) -> Token:
        self._need(at, length)
        return Token(kind, at, at + length)

    def _container(self, kind: str, at: int, count: int) -> Token:
        self._need(at, count * (2 if kind == "map" else 1))  # each child takes at least a byte
        if count > MAX_NODES:
            raise too_many_nodes(at)
        return Token(kind, at, at, count)

    def _unpack(self, form: str, at: int) -> int | float:
        size = struct.calcsize(form)
        self._need(at, size)
        value: int | float = struct.unpack(form, self.data[at : at + size])[0]
        return value

    def _need(self, at: int, length: int) -> None:
        if at + length > self.size:
            raise truncated(
                "the file ends inside a msgpack object",
                expected=f"at least {at + length} bytes",
                got=f"{self.size} bytes",
            )
