"""Parse YAML 1.2 into nodes that keep their file, line and column, so that every later error can name the place."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.core.errors import RuleError
from convert.core.findings import Finding
from convert.core.system.regular_file import read_regular
from convert.core.yaml_quotes import with_quotes


@dataclass(frozen=True, order=True)
class Position:
    """A position in a rule file, printed as ``file:line:column``. Lines and columns count from 1."""

    file: str
    line: int
    column: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    @property
    def line_only(self) -> str:
        """Return ``file:line``, for findings about a whole rule."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class YamlNode:
    """A YAML value and its position.

    Attributes:
        value: a str, int, float, bool or None; a tuple of nodes; or a mapping of str to nodes.
        at: where the value starts.
        keys_at: for a mapping, where each key starts; otherwise None.
    """

    value: Any
    at: Position
    keys_at: Mapping[str, Position] | None = None

    @property
    def is_mapping(self) -> bool:
        return self.keys_at is not None

    def items(self) -> Iterator[tuple[str, YamlNode]]:
        """Iterate over the keys and nodes of a mapping, in file order."""
        yield from self.value.items()

    def plain(self) -> Any:
        """Return the value without positions: dicts, lists and scalars."""
        if self.is_mapping:
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return [node.plain() for node in self.value]
        return self.value

    def __str__(self) -> str:
        if self.is_mapping:
            return "a mapping"
        return "a list" if isinstance(self.value, tuple) else repr(self.value)


# YAML 1.2 core schema (yaml.org/spec/1.2.2, section 10.3.2): the same values as a JSON Schema validator sees.
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "~": None, "": None}
MAX_BYTES = 16 << 20  # of a rule file; real ones have a few thousand
MAX_DEPTH = 32
MAX_VALUES = 100_000  # a rule file has hundreds; nested aliases can expand exponentially


def _scalar(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text) and len(text) <= 300:  # longer ones overflow float64 and exceed Python's limit for int()
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def parse_scalar(text: str) -> Any:
    """Parse a scalar as YAML 1.2 does: a number, bool, None or string, or a list of them in brackets.

    Used for ``--set key=value``.
    """
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        return [_scalar(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    return _scalar(text)


def _not_yaml(at: Position | str, problem: str, fix: str = "") -> RuleError:
    return RuleError(Finding("rule-not-yaml", f"not YAML: {problem}", rule=str(at), fix=fix))


def _too_large(at: Position | str, expected: str, fix: str = "") -> RuleError:
    return RuleError(Finding("rule-too-large", rule=str(at), expected=expected, got="more", fix=fix))


@dataclass(frozen=True)
class _Complete:
    """A complete value, and what an alias of it needs.

    Attributes:
        text: source text of a scalar; None for a list or mapping.
        values: number of values in it, itself included.
        height: number of levels below it.
    """

    node: YamlNode
    text: str | None
    values: int = 1
    height: int = 0


@dataclass
class _Open:
    """A list or mapping whose end has not been read yet; `blank` counts the keys in braces that no colon follows."""

    at: Position
    is_mapping: bool
    in_braces: bool
    anchor: str | None
    children: list[YamlNode] = field(default_factory=list)
    keys_at: dict[str, Position] = field(default_factory=dict)
    blank: int = 0
    values: int = 1
    height: int = 0

    @property
    def expects_key(self) -> bool:
        return self.is_mapping and len(self.keys_at) == len(self.children)

    def add_key(self, key: _Complete) -> None:
        if key.text is None:
            finding = Finding(
                "rule-wrong-value", rule=str(key.node.at), expected="a plain word as key", got=str(key.node)
            )
            raise RuleError(finding)
        if key.text in self.keys_at:
            first = self.keys_at[key.text].line
            problem = f"the key {key.text!r} occurs twice in one mapping (first in line {first})"
            raise RuleError(Finding("rule-duplicate-key", problem, rule=str(key.node.at), fix="remove one of the two"))
        self.keys_at[key.text] = key.node.at

    def add(self, value: _Complete) -> None:
        self.children.append(value.node)
        self.blank += value.text == "" and self.in_braces
        self.values += value.values
        self.height = max(self.height, value.height + 1)

    def complete(self) -> _Complete:
        if self.is_mapping:
            node = YamlNode(dict(zip(self.keys_at, self.children, strict=True)), self.at, self.keys_at)
        else:
            node = YamlNode(tuple(self.children), self.at)
        return _Complete(node, None, self.values, self.height)


def _quotes(text: str, at: Position) -> str:
    """Return how to quote the value at this position; empty when quotes are not what it lacks."""
    lines = text.split("\n")
    quoted = with_quotes(lines[at.line - 1], at.column - 1) if at.line <= len(lines) else ""
    return f"quote it: {quoted}" if quoted else ""


def _compose(events: Iterator[Any], text: str, file: str) -> YamlNode | None:
    """Build the value of the only document; None if there is none.

    Open collections are kept in a list, so that deep nesting cannot exhaust the interpreter's stack. An alias is the same
    node object as its anchor, and counts as if it were written out. Tags are ignored: rule files have no custom types.
    """
    import yaml

    stack: list[_Open] = []
    anchors: dict[str, _Complete | _Open] = {}
    root: YamlNode | None = None
    values = 0
    for event in events:
        at = Position(file, event.start_mark.line + 1, event.start_mark.column + 1)
        match event:
            case yaml.ScalarEvent():
                quoted = event.style in ("'", '"', "|", ">")
                value = _Complete(YamlNode(event.value if quoted else _scalar(event.value), at), event.value)
                if event.anchor is not None:
                    anchors[event.anchor] = value
            case yaml.AliasEvent():
                anchor = anchors.get(event.anchor)
                if anchor is None:
                    raise _not_yaml(at, f"undefined alias {event.anchor!r}", _quotes(text, at))
                if isinstance(anchor, _Open):
                    raise _not_yaml(
                        at, f"the alias {event.anchor!r} is inside its own anchor, in line {anchor.at.line}"
                    )
                value = anchor
                values += anchor.values - 1
            case yaml.CollectionStartEvent():
                mapping = isinstance(event, yaml.MappingStartEvent)
                collection = _Open(at, mapping, mapping and bool(event.flow_style), event.anchor)
                if stack and stack[-1].expects_key:
                    stack[-1].add_key(collection.complete())
                if len(stack) > MAX_DEPTH:
                    raise _too_large(at, f"at most {MAX_DEPTH} levels of nesting")
                if collection.anchor is not None:
                    anchors[collection.anchor] = collection
                stack.append(collection)
                continue
            case yaml.CollectionEndEvent():
                collection = stack.pop()
                value = collection.complete()
                fix = _quotes(text, collection.at) if 0 < collection.blank == len(collection.children) else ""
                if fix:
                    raise _not_yaml(collection.at, "braces without quotes are a mapping", fix)
                if collection.anchor is not None and anchors[collection.anchor] is collection:
                    anchors[collection.anchor] = value
            case yaml.DocumentStartEvent():
                if root is not None:
                    raise _not_yaml(at, "a second document", "write one document per file")
                if event.version not in (None, (1, 1), (1, 2)):  # libyaml has rejected it already
                    raise _not_yaml(at, "incompatible YAML version, at '%'")
                continue
            case _:
                continue
        if stack and stack[-1].expects_key:
            stack[-1].add_key(value)
            continue
        if len(stack) + value.height > MAX_DEPTH:
            raise _too_large(at, f"at most {MAX_DEPTH} levels of nesting")
        values += 1
        if values > MAX_VALUES:
            raise _too_large(file, f"at most {MAX_VALUES} values, with aliases expanded", "remove nested aliases")
        if stack:
            stack[-1].add(value)
        else:
            root = value.node
    return root


_BREAKS = re.compile("[\x85\u2028\u2029]")  # line breaks in YAML 1.1, which libyaml reads, but not in YAML 1.2


def _position(text: str, index: int, file: str) -> Position:
    """Return the position of the character with this index."""
    before = text[:index]
    return Position(file, before.count("\n") + 1, len(before) - before.rfind("\n"))


def load_yaml(text: str, file: str) -> YamlNode:
    """Parse one YAML document.

    Args:
        text: the document.
        file: its name in error messages.

    Raises:
        RuleError: the text is not YAML, is empty, repeats a key, or is nested too deeply.
    """
    import yaml

    text = text.removeprefix("\ufeff")
    if character := _BREAKS.search(text):
        code = f"\\u{ord(character[0]):04x}"
        problem = f"YAML 1.1 and 1.2 disagree on whether the character {code} breaks a line"
        raise _not_yaml(_position(text, character.start(), file), problem, f'write it as "{code}", in double quotes')
    try:
        try:
            node = _compose(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), text, file)
        except yaml.MarkedYAMLError as error:
            if "nesting depth" not in (error.problem or ""):
                raise
            # libyaml 0.2.6 reads ahead and stops at level 1,001 before it gives the first event; PyYAML's own reader gives them
            node = _compose(yaml.parse(text, Loader=yaml.SafeLoader), text, file)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        character_read = repr(text[mark.index]) if mark.index < len(text) else "the end of the file"
        at = _position(text, mark.index, file)
        raise _not_yaml(at, f"{error.problem or error.context}, at {character_read}", _quotes(text, at)) from None
    except yaml.reader.ReaderError as error:
        bad = chr(error.character)
        raise _not_yaml(_position(text, max(0, text.find(bad)), file), f"{error.reason}, at {bad!r}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise _not_yaml(file, str(error).splitlines()[0]) from None
    if node is None:
        raise RuleError(
            Finding(
                "rule-file-empty",
                "the file is empty",
                rule=file,
                fix="see `convert rules show timesfm-2.5` for an example",
            )
        )
    return node


def read_text(path: Path, name: str) -> str:
    """Return the text of a file, which error messages call `name`.

    Raises:
        RuleError: the file cannot be read, or is not UTF-8.
    """
    try:
        text = read_regular(path, MAX_BYTES).decode("utf-8")
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise RuleError(
            Finding(
                "file-not-found",
                "there is no such rule file",
                rule=name,
                fix="correct the path, or draft one with `convert rules new`",
            )
        ) from None
    except OSError as error:
        raise RuleError(Finding("rule-file-unreadable", f"cannot be read: {error.strerror}", rule=name)) from None
    except UnicodeDecodeError:
        raise RuleError(
            Finding(
                "rule-file-unreadable",
                rule=name,
                expected="a text file in UTF-8",
                got="other bytes",
                fix="save it as UTF-8",
            )
        ) from None
