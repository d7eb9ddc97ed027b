"""What a value in a rule file may be. One declaration reads it, words the error and gives the JSON Schema."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from convert.core.errors import RuleError
from convert.core.similarity import did_you_mean
from convert.core.yaml_nodes import Node


def nearest(word: str, known: Iterable[str]) -> str:
    """Old form of `convert.core.similarity.did_you_mean`, for messages that are not findings yet."""
    said = did_you_mean(word, sorted(known))
    return f"; {said}" if said else ""


class Field(ABC):
    """A kind of value: reads a node, and describes itself as JSON Schema."""

    @abstractmethod
    def read(self, node: Node) -> Any:
        """The value of `node`.

        Raises:
            RuleError: the node is something else; the message has its position and what was expected.
        """

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """JSON Schema (draft 2020-12) of the value."""


@dataclass(frozen=True)
class Scalar(Field):
    """A string, number or bool, optionally passed through `convert` (which raises ValueError with a reason)."""

    type: type | tuple[type, ...]
    called: str
    convert: Callable[[Any], Any] | None = None

    def read(self, node: Node) -> Any:
        types = self.type if isinstance(self.type, tuple) else (self.type,)
        wrong_bool = isinstance(node.value, bool) and bool not in types  # a bool is an int to Python
        if wrong_bool or not isinstance(node.value, types):
            raise RuleError(f"{node.at}: expected {self.called}, found {node}")
        if self.convert is None:
            return node.value
        try:
            return self.convert(node.value)
        except ValueError as error:
            raise RuleError(f"{node.at}: {error}") from None

    def schema(self) -> dict[str, Any]:
        names = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
        types = self.type if isinstance(self.type, tuple) else (self.type,)
        found = [names[t] for t in types]
        return {"type": found[0] if len(found) == 1 else found}


@dataclass(frozen=True)
class Choice(Field):
    """One of a few words, of which YAML reads some as numbers; `hints` adds a remark for words that users will try."""

    words: tuple[str, ...]
    hints: tuple[tuple[str, str], ...] = ()

    def read(self, node: Node) -> str:
        number = isinstance(node.value, int) and not isinstance(node.value, bool)
        word = str(node.value) if number else node.value
        if not isinstance(word, str) or word not in self.words:
            hint = dict(self.hints).get(node.value) if isinstance(node.value, str) else None
            said = f": {hint}" if hint else nearest(str(node.value), self.words)
            raise RuleError(f"{node.at}: expected one of {', '.join(self.words)}, found {node}{said}")
        return word

    def schema(self) -> dict[str, Any]:
        return {"enum": [int(word) if word.isdecimal() else word for word in self.words]}


@dataclass(frozen=True)
class Anything(Field):
    """Any YAML value, kept as it is (the contents of ``config``)."""

    def read(self, node: Node) -> Any:
        return node.plain()

    def schema(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class ListOf(Field):
    """A list, or a single item that stands for a list of one."""

    item: Field
    or_one: bool = False

    def read(self, node: Node) -> tuple[Any, ...]:
        if isinstance(node.value, tuple):
            return tuple(self.item.read(child) for child in node.value)
        if self.or_one:
            return (self.item.read(node),)
        raise RuleError(f"{node.at}: expected a list, found {node}")

    def schema(self) -> dict[str, Any]:
        listed = {"type": "array", "items": self.item.schema()}
        return {"anyOf": [self.item.schema(), listed]} if self.or_one else listed


@dataclass(frozen=True)
class MapOf(Field):
    """A mapping of free keys to values of one kind."""

    item: Field
    called: str = "a mapping"
    key: Callable[[str], Any] | None = None

    def read(self, node: Node) -> dict[str, Any]:
        if not node.is_mapping:
            raise RuleError(f"{node.at}: expected {self.called}, found {node}")
        for key in node.value:
            try:
                _ = self.key(key) if self.key else None
            except ValueError as error:
                assert node.keys_at is not None
                raise RuleError(f"{node.keys_at[key]}: {error}") from None
        return {key: self.item.read(child) for key, child in node.items()}

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.item.schema()}


@dataclass(frozen=True)
class Either(Field):
    """`scalar` for a word or number, `mapping` for a mapping."""

    scalar: Field
    mapping: Field

    def read(self, node: Node) -> Any:
        return (self.mapping if node.is_mapping else self.scalar).read(node)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self.scalar.schema(), self.mapping.schema()]}


@dataclass(frozen=True)
class Key:
    """One key of a record: what it holds, what it means (for editors), whether it must be there."""

    field: Field
    doc: str
    required: bool = False


@dataclass(frozen=True)
class Record(Field):
    """A mapping with known keys. Reads to a dict of those that are there."""

    keys: dict[str, Key]
    called: str
    hints: tuple[tuple[str, str], ...] = ()  # for keys that users will try, as in `Choice`

    def part(self, **fields: Field) -> Record:
        """The same with none of its keys required, and some of them read by other fields."""
        keys = {key: Key(fields.get(key, declared.field), declared.doc) for key, declared in self.keys.items()}
        return Record(keys, self.called)

    def read(self, node: Node) -> dict[str, Any]:
        if not node.is_mapping:
            raise RuleError(f"{node.at}: expected {self.called}, found {node}")
        assert node.keys_at is not None
        for key in node.value:
            if key not in self.keys:
                known = ", ".join(self.keys)
                hint = dict(self.hints).get(key)
                said = f": {hint}" if hint else nearest(key, self.keys)
                raise RuleError(f"{node.keys_at[key]}: unknown key {key!r} in {self.called}{said} (known: {known})")
        for key, declared in self.keys.items():
            if declared.required and key not in node.value:
                raise RuleError(f"{node.at}: {self.called} needs the key {key!r}: {declared.doc}")
        return {key: self.keys[key].field.read(child) for key, child in node.items()}

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "additionalProperties": False,
            "required": [key for key, declared in self.keys.items() if declared.required],
            "properties": {key: {"description": k.doc, **k.field.schema()} for key, k in self.keys.items()},
        }


TEXT = Scalar(str, "text")
INTEGER = Scalar(int, "an integer")
FLAG = Scalar(bool, "true or false")
