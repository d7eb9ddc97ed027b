"""The values that keys of a rule file take. One declaration reads the value, words the error and gives the JSON Schema."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from convert.core.errors import RuleError
from convert.core.findings import Finding
from convert.core.similarity import did_you_mean
from convert.core.yaml_nodes import Position, YamlNode


def wrong_value(node: YamlNode, expected: str, fix: str = "") -> RuleError:
    """Make the error for a value that is not what its key takes."""
    return RuleError(Finding("rule-wrong-value", rule=str(node.at), expected=expected, got=str(node), fix=fix))


@contextmanager
def located(at: Position, code: str = "rule-wrong-value") -> Iterator[None]:
    """Turn a ValueError into a RuleError at this position; the ValueError's text is the problem."""
    try:
        yield
    except ValueError as error:
        raise RuleError(Finding(code, str(error), rule=str(at))) from None


@contextmanager
def gather(findings: list[Finding]) -> Iterator[None]:
    """Add the findings of a RuleError to a list instead of raising it, so that one error can report several problems."""
    try:
        yield
    except RuleError as error:
        findings += error.findings


class Field(ABC):
    """A kind of value: reads a node, and describes itself as JSON Schema."""

    @abstractmethod
    def read(self, node: YamlNode) -> Any:
        """Return the value of `node`.

        Raises:
            RuleError: the node has another type or form.
        """

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema (draft 2020-12) of the value."""


@dataclass(frozen=True)
class Scalar(Field):
    """A string, number or bool, optionally passed through `convert` (which raises ValueError with a reason)."""

    type: type | tuple[type, ...]
    description: str
    convert: Callable[[Any], Any] | None = None

    def read(self, node: YamlNode) -> Any:
        types = self.type if isinstance(self.type, tuple) else (self.type,)
        wrong_bool = isinstance(node.value, bool) and bool not in types  # a bool is an int to Python
        if wrong_bool or not isinstance(node.value, types):
            raise wrong_value(node, self.description)
        if self.convert is None:
            return node.value
        with located(node.at):
            return self.convert(node.value)

    def schema(self) -> dict[str, Any]:
        names = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
        types = self.type if isinstance(self.type, tuple) else (self.type,)
        listed = [names[t] for t in types]
        return {"type": listed[0] if len(listed) == 1 else listed}


@dataclass(frozen=True)
class Choice(Field):
    """One of a few words, some of which YAML reads as numbers. `hints` explains words that users are likely to try."""

    words: tuple[str, ...]
    hints: tuple[tuple[str, str], ...] = ()

    def read(self, node: YamlNode) -> str:
        number = isinstance(node.value, int) and not isinstance(node.value, bool)
        word = str(node.value) if number else node.value
        if not isinstance(word, str) or word not in self.words:
            hint = dict(self.hints).get(node.value) if isinstance(node.value, str) else None
            raise wrong_value(
                node, f"one of {', '.join(self.words)}", hint or did_you_mean(str(node.value), self.words)
            )
        return word

    def schema(self) -> dict[str, Any]:
        return {"enum": [int(word) if word.isdecimal() else word for word in self.words]}


@dataclass(frozen=True)
class Anything(Field):
    """Any YAML value, kept as it is (the contents of ``config``)."""

    def read(self, node: YamlNode) -> Any:
        return node.plain()

    def schema(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class ListOf(Field):
    """A list; with `or_one`, a single item stands for a list of one."""

    item: Field
    or_one: bool = False

    def read(self, node: YamlNode) -> tuple[Any, ...]:
        if isinstance(node.value, tuple):
            return tuple(_read_each({str(k): (self.item, child) for k, child in enumerate(node.value)}).values())
        if self.or_one:
            return (self.item.read(node),)
        raise wrong_value(node, "a list")

    def schema(self) -> dict[str, Any]:
        listed = {"type": "array", "items": self.item.schema()}
        return {"anyOf": [self.item.schema(), listed]} if self.or_one else listed


@dataclass(frozen=True)
class MapOf(Field):
    """A mapping of free keys to values of one kind; `key` checks a key and raises ValueError with a reason.

    Attributes:
        known: keys with values of another kind.
    """

    item: Field
    description: str = "a mapping"
    key: Callable[[str], Any] | None = None
    known: tuple[tuple[str, Field], ...] = ()

    def read(self, node: YamlNode) -> dict[str, Any]:
        if node.keys_at is None:
            raise wrong_value(node, self.description)
        for key in node.value if self.key else ():
            with located(node.keys_at[key]):
                self.key(key)  # type: ignore[misc]
        known = dict(self.known)
        return _read_each({key: (known.get(key, self.item), child) for key, child in node.items()})

    def schema(self) -> dict[str, Any]:
        known = {"properties": {key: field.schema() for key, field in self.known}} if self.known else {}
        return {"type": "object", **known, "additionalProperties": self.item.schema()}


@dataclass(frozen=True)
class Either(Field):
    """`scalar` for a word or number, `mapping` for a mapping."""

    scalar: Field
    mapping: Field

    def read(self, node: YamlNode) -> Any:
        return (self.mapping if node.is_mapping else self.scalar).read(node)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self.scalar.schema(), self.mapping.schema()]}


@dataclass(frozen=True)
class Key:
    """One key of a record: the values that it takes, a description for people, whether it is required, and an example."""

    field: Field
    doc: str
    required: bool = False
    example: str = ""

    def fix_missing(self, key: str) -> str:
        """Say how to add the key."""
        return f"add `{key}:`" + (f", such as `{key}: {self.example}`" if self.example else "")


@dataclass(frozen=True)
class Record(Field):
    """A mapping with known keys. Reads to a dict of the keys that are present. `hints` is as in `Choice`, for keys."""

    keys: dict[str, Key]
    description: str
    hints: tuple[tuple[str, str], ...] = ()

    def part(self, **fields: Field) -> Record:
        """Return the same record with no key required, and some of its keys read by other fields."""
        keys = {key: Key(fields.get(key, declared.field), declared.doc) for key, declared in self.keys.items()}
        return Record(keys, self.description)

    def read(self, node: YamlNode) -> dict[str, Any]:
        if not node.is_mapping:
            raise wrong_value(node, self.description)
        findings = [self._unknown(key, node) for key in node.value if key not in self.keys]
        missing = [key for key, declared in self.keys.items() if declared.required and key not in node.value]
        misspelt = {did_you_mean(key, missing) for key in node.value if key not in self.keys}
        findings += [
            Finding(
                "rule-missing-key",
                f"{self.description} needs the key {key!r}",
                rule=str(node.at),
                fix=self.keys[key].fix_missing(key),
                data={"key": key},
            )
            for key in missing
            if did_you_mean(key, [key]) not in misspelt
        ]
        with gather(findings):
            values = _read_each({key: (self.keys[key].field, child) for key, child in node.items() if key in self.keys})
        if findings:
            raise RuleError(*findings)
        return values

    def _unknown(self, key: str, node: YamlNode) -> Finding:
        assert node.keys_at is not None
        return Finding(
            "rule-unknown-key",
            f"unknown key {key!r} in {self.description}",
            rule=str(node.keys_at[key]),
            expected=f"one of {', '.join(self.keys)}",
            fix=dict(self.hints).get(key) or did_you_mean(key, self.keys),
            data={"key": key},
        )

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "additionalProperties": False,
            "required": [key for key, declared in self.keys.items() if declared.required],
            "properties": {key: {"description": k.doc, **k.field.schema()} for key, k in self.keys.items()},
        }


def _read_each(children: dict[str, tuple[Field, YamlNode]]) -> dict[str, Any]:
    """Read every child, and raise one error with the findings of all."""
    findings: list[Finding] = []
    values = {}
    for key, (field, child) in children.items():
        try:
            values[key] = field.read(child)
        except RuleError as error:
            findings += error.findings
    if findings:
        raise RuleError(*findings)
    return values


TEXT = Scalar(str, "text")
INTEGER = Scalar(int, "an integer")
FLAG = Scalar(bool, "true or false")
