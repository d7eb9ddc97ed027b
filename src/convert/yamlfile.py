"""YAML 1.2 into plain nodes that remember file, line and column, so that every later error can name them."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.errors import RuleError

if TYPE_CHECKING:
    from ruamel.yaml.nodes import Node as YamlNode


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
    if _INT.fullmatch(text) and len(text) <= 4000:  # Python refuses to read longer ones
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


def _wrap(node: YamlNode, file: str, count: Iterator[int], depth: int = 0) -> Node:
    from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

    def at(n: YamlNode) -> Position:
        return Position(file, n.start_mark.line + 1, n.start_mark.column + 1)

    if depth > MAX_DEPTH:  # also what an alias that contains itself comes to
        raise RuleError(f"{at(node)}: nested deeper than {MAX_DEPTH} levels")
    if next(count) >= MAX_VALUES:
        raise RuleError(f"{file}: more than {MAX_VALUES} values, counting what its aliases repeat; write them out")
    if isinstance(node, ScalarNode):
        quoted = node.style in ("'", '"', "|", ">")
        return Node(node.value if quoted else _scalar(node.value), at(node))
    if isinstance(node, SequenceNode):
        return Node(tuple(_wrap(item, file, count, depth + 1) for item in node.value), at(node))
    assert isinstance(node, MappingNode)
    value: dict[str, Node] = {}
    keys_at: dict[str, Position] = {}
    for key, item in node.value:
        if not isinstance(key, ScalarNode):
            raise RuleError(f"{at(key)}: a key must be a plain word, not {_wrap(key, file, count, depth + 1)}")
        if key.value in value:
            raise RuleError(f"{at(key)}: the key {key.value!r} stands twice in one mapping (first in line "
                            f"{keys_at[key.value].line}); remove one")  # fmt: skip
        value[key.value] = _wrap(item, file, count, depth + 1)
        keys_at[key.value] = at(key)
    return Node(value, at(node), keys_at)


def load_yaml(text: str, file: str) -> Node:
    """Parses one YAML document.

    Args:
        text: the document.
        file: its name for messages.

    Raises:
        RuleError: not YAML, empty, a key twice, nested too deep.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError

    yaml = YAML(typ="safe", pure=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)  # YAML 1.2 allows it
            node = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Position(file, mark.line + 1, mark.column + 1) if mark else file
        raise RuleError(f"{where}: not YAML: {error.problem or error.context}") from None
    except RecursionError:
        raise RuleError(f"{file}: nested deeper than {MAX_DEPTH} levels") from None
    except (YAMLError, ValueError, AssertionError) as error:
        raise RuleError(f"{file}: not YAML: {str(error).splitlines()[0]}") from None
    if node is None:
        raise RuleError(f"{file}: the file is empty; see `convert rules show timesfm-2.5` for an example")
    return _wrap(node, file, itertools.count())


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
