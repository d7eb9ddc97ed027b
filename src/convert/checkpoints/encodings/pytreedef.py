"""Reads the text of a JAX ``PyTreeDef``, the only place where paxml's msgpack checkpoints store the names of leaves.

``PyTreeDef::ToString`` prints this grammar (jaxlib's ``pytree.cc``; checked with jax 0.4.26 and 0.10.2)::

    text   = "PyTreeDef(" node ")"
    node   = "*" | "None" | list | tuple | dict | "frozendict(" dict ")" | custom
    list   = "[" nodes "]"      tuple = "(" nodes ")", with a comma after a lone node
    dict   = "{" key ": " node ", " ... "}"                    keys as Python's repr prints them, sorted
    custom = "CustomNode(" name "[" aux "]" ", [" nodes "])"   aux: str() of any object, may be missing
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

from convert.checkpoints.errors import corrupt
from convert.core.errors import CheckpointError

# Deeper text is damaged or hostile. The parser takes two stack frames a level, and Python allows about 1000 of them.
MAX_DEPTH = 200

# Custom nodes that are mappings: their aux data holds the keys, so children have real names.
# praxis NestedMap: praxis/pytypes.py; FrozenDict: flax/core/frozen_dict.py; State: flax/nnx; the others: jax itself.
MAPPINGS = frozenset({"NestedMap", "FrozenDict", "OrderedDict", "defaultdict", "State"})

_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_ESCAPE = re.compile(r"""\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))""", re.DOTALL)
_SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_PLAIN = re.compile(r"""[^()\[\]{}'":,]+""")  # characters that skip_to passes at once
_NAME = re.compile(r"[^()\[\]{},]{1,1000}")
_CLOSES = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class TreedefNode:
    """A node of the tree.

    Attributes:
        kind: the kind of container; ``custom`` covers named tuples, dataclasses and every registered class.
        name: the class of a custom node, such as ``TrainState``; else empty.
        keys: one per child: the keys of a mapping, else positions.
        children: in the order of the leaves.
        named: whether the keys are those of the saved tree. False for custom nodes whose text does not hold the field names.
    """

    kind: Literal["leaf", "None", "dict", "list", "tuple", "custom"]
    name: str = ""
    keys: tuple[str, ...] = ()
    children: tuple[TreedefNode, ...] = ()
    named: bool = True


@dataclass(frozen=True)
class Slot:
    """A position at the bottom of the tree: a leaf, or an empty node.

    Attributes:
        keys: the path to it.
        why: None for a leaf; else the reason why there is none: ``None``, ``empty dict``, ...
        named: whether every key on the path is one of the saved tree (see `TreedefNode.named`).
    """

    keys: tuple[str, ...]
    why: str | None = None
    named: bool = True


def parse(text: str) -> TreedefNode:
    """Parse a printed ``PyTreeDef(...)``.

    Raises:
        CheckpointError: the text does not follow the grammar; the finding names the column, counted from 1.
    """
    return _Parser(text).document()


def slots(node: TreedefNode, fields: Mapping[str, tuple[str, ...]] | None = None) -> list[Slot]:
    """Return every leaf and every empty node of the tree, in order.

    Args:
        node: the root, from `parse`.
        fields: class name -> names of its children, for custom nodes whose text does not hold them. They apply where
            the node has at most as many children.
    """
    collected: list[Slot] = []
    _collect(node, (), True, fields or {}, collected)
    return collected


def _collect(
    node: TreedefNode, path: tuple[str, ...], named: bool, fields: Mapping[str, tuple[str, ...]], collected: list[Slot]
) -> None:
    if node.kind == "leaf":
        collected.append(Slot(path, None, named))
    elif node.kind == "None":
        collected.append(Slot(path, "None", named))
    elif not node.children:
        collected.append(Slot(path, f"empty {node.name or node.kind}", named))
    else:
        keys = node.keys
        if not node.named and len(node.children) <= len(fields.get(node.name, ())):
            keys = fields[node.name]
        else:
            named = named and node.named
        for key, child in zip(keys, node.children, strict=False):
            _collect(child, (*path, key), named, fields, collected)


class _Parser:
    """Recursive descent over `text`; `at` is the next character. Every character is read a bounded number of
    times, so the cost is linear in the length of the text, even of a hostile one."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def fail(self, expected: str, at: int | None = None) -> NoReturn:
        at = self.at if at is None else at
        got = repr(self.text[at : at + 24]) if at < len(self.text) else "the end"
        raise corrupt(f"column {at + 1} of the PyTreeDef", expected=expected, got=got)

    def accept(self, token: str) -> bool:
        if self.text.startswith(token, self.at):
            self.at += len(token)
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.accept(token):
            self.fail(repr(token))

    def document(self) -> TreedefNode:
        self.expect("PyTreeDef(")
        node = self.node()
        self.expect(")")
        if self.at != len(self.text):
            self.fail("the end")
        return node

    def node(self) -> TreedefNode:
        if self.depth == MAX_DEPTH:
            self.fail(f"at most {MAX_DEPTH} levels")
        self.depth += 1
        if self.accept("*"):
            node = TreedefNode("leaf")
        elif self.accept("None"):
            node = TreedefNode("None")
        elif self.accept("["):
            node = _sequence("list", self.nodes("]"))
        elif self.accept("("):
            node = self.tuple_node()
        elif self.accept("{"):
            node = self.dict_node()
        elif self.accept("frozendict({"):
            node = self.dict_node()
            self.expect(")")
        elif self.accept("CustomNode("):
            node = self.custom()
        else:
            self.fail("a node ('*', 'None', '[', '(', '{' or 'CustomNode(')")
        self.depth -= 1
        return node

    def nodes(self, close: str) -> tuple[TreedefNode, ...]:
        """Read the nodes up to and including `close`."""
        if self.accept(close):
            return ()
        children = [self.node()]
        while not self.accept(close):
            self.expect(", ")
            children.append(self.node())
        return tuple(children)

    def tuple_node(self) -> TreedefNode:
        if self.accept(")"):
            return TreedefNode("tuple")
        first = self.node()
        if self.accept(",)"):
            return _sequence("tuple", (first,))
        self.expect(", ")
        return _sequence("tuple", (first, *self.nodes(")")))

    def dict_node(self) -> TreedefNode:
        keys: list[str] = []
        children: list[TreedefNode] = []
        while not self.accept("}"):
            if children:
                self.expect(", ")
            keys.append(self.key())
            self.expect(": ")
            children.append(self.node())
        return TreedefNode("dict", keys=tuple(keys), children=tuple(children))

    def key(self, stops: str = ":") -> str:
        """Read a key of a mapping: a string without its quotes, anything else (numbers, tuples, bytes) as printed."""
        string = _STRING.match(self.text, self.at)
        if string is not None:
            key = self.unquote(string.group())
            self.at = string.end()
            return key
        start = self.at
        self.skip_to(stops)
        if self.at == start:
            self.fail("a key")
        return self.text[start : self.at]

    def unquote(self, literal: str) -> str:
        """Return the string that repr printed as `literal`. Text from a file is never evaluated."""

        def character(match: re.Match[str]) -> str:
            hexadecimal = match[1] or match[2] or match[3]
            try:
                return chr(int(hexadecimal, 16)) if hexadecimal else _SIMPLE[match[4]]
            except (KeyError, ValueError, OverflowError):
                self.fail(f"an escape of Python's repr instead of {match.group()}")

        return _ESCAPE.sub(character, literal[1:-1])

    def custom(self) -> TreedefNode:
        match = _NAME.match(self.text, self.at)
        if match is None:
            self.fail("the name of a class")
        name = match.group()
        self.at = match.end()
        aux = ""
        if self.accept("["):
            start = self.at
            self.skip_to("]")
            aux = self.text[start : self.at]
            self.expect("]")
        self.expect(", [")
        children = self.nodes("]")
        self.expect(")")
        if name == "namedtuple":
            return _sequence("custom", children, aux)
        if name in MAPPINGS:
            keys = _Parser(aux).aux_keys(name)
            if keys is not None and len(keys) == len(children):
                return TreedefNode("custom", name, keys, children)
            # FrozenDict before flax 0.7 flattened to one child, the dict inside, which adds no level to a path.
            if name == "FrozenDict" and len(children) == 1 and children[0].kind == "dict":
                return children[0]
        return _sequence("custom", children, name)

    def aux_keys(self, name: str) -> tuple[str, ...] | None:
        """Read the keys in a mapping's aux data, ``('a', 'b')``, or ``(factory, ('a', 'b'))`` of a defaultdict.

        Returns None where the text has another form.
        """
        keys: list[str] = []
        try:
            if name == "defaultdict":
                self.expect("(")
                self.skip_to(",")
                self.expect(", ")
            self.expect("(")
            while not self.accept(")"):
                keys.append(self.key(",)"))
                if not self.accept(", "):
                    self.accept(",")
        except CheckpointError:
            return None
        return tuple(keys)

    def skip_to(self, stops: str) -> None:
        """Move to the first of the characters `stops` outside of brackets and strings.

        The text may be the repr of any object. An apostrophe inside a word (``it's``) does not open a string.
        """
        start = self.at
        closers: list[str] = []
        while self.at < len(self.text):
            plain = _PLAIN.match(self.text, self.at)
            if plain is not None:
                self.at = plain.end()
                continue
            character = self.text[self.at]
            if not closers and character in stops:
                return
            if character in "'\"" and not self.inside_word():
                string = _STRING.match(self.text, self.at)
                if string is None:
                    self.fail("a closing quote")
                self.at = string.end()
                continue
            if character in _CLOSES:
                closers.append(_CLOSES[character])
            elif character in ")]}" and (not closers or closers.pop() != character):
                self.fail(f"one of {stops!r}, or a bracket that matches")
            self.at += 1
        self.fail(f"one of {stops!r} after column {start + 1}")

    def inside_word(self) -> bool:
        before = self.text[max(self.at - 2, 0) : self.at]
        return before[-1:].isalnum() and not (before[-1:] == "b" and not before[:-1].isalnum())


def _sequence(
    kind: Literal["list", "tuple", "custom"], children: tuple[TreedefNode, ...], name: str = ""
) -> TreedefNode:
    """Return a node whose keys are the positions of its children."""
    return TreedefNode(kind, name, tuple(map(str, range(len(children)))), children, named=kind != "custom")
