"""YAML 1.2 into plain nodes that remember file, line and column, so that every later error can name them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.core.errors import RuleError


@dataclass(frozen=True, order=True)
class Position:
    """A place in a rule file; prints as ``file:line:column``, both counted from 1."""

    file: str
    line: int
    column: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    @property
    def line_only(self) -> str:
        """``file:line``, for messages about a whole rule."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Node:
    """A YAML value and where it stands.

    Attributes:
        value: a str, int, float, bool or None; a tuple of nodes; or a mapping of str to nodes.
        at: where the value starts.
        keys_at: for a mapping, where each key starts.
    """

    value: Any
    at: Position
    keys_at: Mapping[str, Position] | None = None

    @property
    def is_mapping(self) -> bool:
        return self.keys_at is not None

    def items(self) -> Iterator[tuple[str, Node]]:
        """Keys and nodes of a mapping, in the order of the file."""
        yield from self.value.items()

    def plain(self) -> Any:
        """The value without positions: dicts, lists and scalars."""
        if self.is_mapping:
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return [node.plain() for node in self.value]
        return self.value

    def __str__(self) -> str:
        if self.is_mapping:
            return "a mapping"
        return "a list" if isinstance(self.value, tuple) else repr(self.value)


# YAML 1.2 core schema (yaml.org/spec/1.2.2, section 10.3.2), which is what a JSON Schema validator sees as well.
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "~": None, "": None}
MAX_DEPTH = 32
MAX_VALUES = 100_000  # a rule file has hundreds; aliases of aliases grow without end


def _scalar(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text) and len(text) <= 300:  # which float64 can hold, and Python reads
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def parse_scalar(text: str) -> Any:
    """The value that YAML 1.2 gives to `text`: number, bool, None or string, or a list of them in brackets.

    Used for ``--set key=value``.
    """
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        return [_scalar(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    return _scalar(text)


@dataclass(frozen=True)
class _Whole:
    """A finished value, and what an alias of it needs.

    Attributes:
        text: of a scalar, as it is written; None for a list or mapping.
        values: how many there are in it, itself included.
        height: how many levels there are below it.
    """

    node: Node
    text: str | None
    values: int = 1
    height: int = 0


@dataclass
class _Level:
    """A list or mapping whose end is still to come."""

    at: Position
    is_mapping: bool
    anchor: str | None
    found: list[Node] = field(default_factory=list)
    keys_at: dict[str, Position] = field(default_factory=dict)
    values: int = 1
    height: int = 0

    @property
    def wants_key(self) -> bool:
        return self.is_mapping and len(self.keys_at) == len(self.found)

    def add_key(self, key: _Whole) -> None:
        if key.text is None:
            raise RuleError(f"{key.node.at}: a key must be a plain word, not {key.node}")
        if key.text in self.keys_at:
            raise RuleError(f"{key.node.at}: the key {key.text!r} stands twice in one mapping (first in line "
                            f"{self.keys_at[key.text].line}); remove one")  # fmt: skip
        self.keys_at[key.text] = key.node.at

    def add(self, value: _Whole) -> None:
        self.found.append(value.node)
        self.values += value.values
        self.height = max(self.height, value.height + 1)

    def whole(self) -> _Whole:
        if self.is_mapping:
            node = Node(dict(zip(self.keys_at, self.found, strict=True)), self.at, self.keys_at)
        else:
            node = Node(tuple(self.found), self.at)
        return _Whole(node, None, self.values, self.height)


def _compose(events: Iterator[Any], file: str) -> Node | None:
    """The value of the only document; None where there is none.

    Open levels are a list, so that no nesting is too deep for the interpreter. An alias is the very node that it names, and
    counted as if it were written out. Tags are not looked at: a rule file has no types of its own.
    """
    import yaml

    levels: list[_Level] = []
    anchors: dict[str, _Whole | _Level] = {}
    root: Node | None = None
    values = 0
    for event in events:
        at = Position(file, event.start_mark.line + 1, event.start_mark.column + 1)
        match event:
            case yaml.ScalarEvent():
                quoted = event.style in ("'", '"', "|", ">")
                done = _Whole(Node(event.value if quoted else _scalar(event.value), at), event.value)
                if event.anchor is not None:
                    anchors[event.anchor] = done
            case yaml.AliasEvent():
                named = anchors.get(event.anchor)
                if named is None:
                    raise RuleError(f"{at}: not YAML: found undefined alias {event.anchor!r}")
                if isinstance(named, _Level):
                    raise RuleError(
                        f"{at}: the alias {event.anchor!r} stands within what it names, in line {named.at.line}"
                    )
                done = named
                values += named.values - 1
            case yaml.CollectionStartEvent():
                level = _Level(at, isinstance(event, yaml.MappingStartEvent), event.anchor)
                if levels and levels[-1].wants_key:
                    levels[-1].add_key(level.whole())
                if len(levels) > MAX_DEPTH:
                    raise RuleError(f"{at}: nested deeper than {MAX_DEPTH} levels")
                if level.anchor is not None:
                    anchors[level.anchor] = level
                levels.append(level)
                continue
            case yaml.CollectionEndEvent():
                level = levels.pop()
                done = level.whole()
                if level.anchor is not None and anchors[level.anchor] is level:
                    anchors[level.anchor] = done
            case yaml.DocumentStartEvent():
                if root is not None:
                    raise RuleError(f"{at}: not YAML: found another document")
                if event.version not in (None, (1, 1), (1, 2)):  # libyaml has refused it already
                    raise RuleError(f"{at}: not YAML: found incompatible YAML document, at '%'")
                continue
            case _:
                continue
        if levels and levels[-1].wants_key:
            levels[-1].add_key(done)
            continue
        if len(levels) + done.height > MAX_DEPTH:
            raise RuleError(f"{at}: nested deeper than {MAX_DEPTH} levels")
        values += 1
        if values > MAX_VALUES:
            raise RuleError(f"{file}: more than {MAX_VALUES} values, counting what its aliases repeat; write them out")
        if levels:
            levels[-1].add(done)
        else:
            root = done.node
    return root


_BREAKS = re.compile("[\x85\u2028\u2029]")  # of lines to YAML 1.1, which libyaml reads, and not to YAML 1.2


def _place(text: str, index: int, file: str) -> Position:
    """Where the character with this index stands, or the end of the text."""
    before = text[:index]
    return Position(file, before.count("\n") + 1, len(before) - before.rfind("\n"))


def load_yaml(text: str, file: str) -> Node:
    """Parses one YAML document.

    Args:
        text: the document.
        file: its name for messages.

    Raises:
        RuleError: not YAML, empty, a key twice, nested too deep.
    """
    import yaml

    text = text.removeprefix("\ufeff")
    if strange := _BREAKS.search(text):
        code = f"\\u{ord(strange[0]):04x}"
        raise RuleError(f"{_place(text, strange.start(), file)}: not YAML: the character {code} breaks lines for some readers "
                        f"and not for others; write it as \"{code}\", in double quotes")  # fmt: skip
    try:
        node = _compose(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), file)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        found = repr(text[mark.index]) if mark.index < len(text) else "the end of the file"
        said = error.problem or error.context
        raise RuleError(f"{_place(text, mark.index, file)}: not YAML: {said}, at {found}") from None
    except yaml.reader.ReaderError as error:
        found = chr(error.character)
        raise RuleError(
            f"{_place(text, max(0, text.find(found)), file)}: not YAML: {error.reason}, at {found!r}"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise RuleError(f"{file}: not YAML: {str(error).splitlines()[0]}") from None
    if node is None:
        raise RuleError(f"{file}: the file is empty; see `convert rules show timesfm-2.5` for an example")
    return node


def read_text(path: Path, called: str) -> str:
    """The text of a file, which messages call `called`.

    Raises:
        RuleError: unreadable, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RuleError(f"{called}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RuleError(f"{called}: not a text file in UTF-8") from None
