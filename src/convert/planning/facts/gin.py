"""Read the ``config.gin`` that T5X writes above its checkpoints: the bindings of gin, without running gin.

A binding is known by its class and parameter, ``T5Config.emb_dim``, in any module and scope. Parameters that are
facts of rules have the fact's name as well, and the value in transformers' words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_BLOCK = re.compile(r"(?P<name>[\w./]+):")
_BINDING = re.compile(r"(?P<name>[\w./]+)\s*=\s*(?P<value>.+)", re.DOTALL)
_MACRO = re.compile(r"%([\w./]+)")
_REFERENCE = re.compile(r"@(?:[\w.]+/)*(?:\w+\.)*(?P<name>\w+)(?:\(\))?")
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_DEEPEST = 16  # macros of macros


@dataclass(frozen=True)
class Bindings:
    """What a gin file binds.

    Attributes:
        values: ``Class.parameter``, or the fact of the rules that the parameter is -> value.
        lines: the same names -> number of the line.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)


def read_gin(text: str) -> Bindings:
    """Return the bindings of a gin file. A value that cannot be read, or that differs from scope to scope, is the text of it."""
    stated = list(_statements(text))
    macros = {name: value for name, value, _ in stated if "." not in name}
    found: dict[str, dict[str, int]] = {}
    for name, value, line in stated:
        if "." in name:
            key = ".".join(name.rpartition("/")[2].split(".")[-2:])
            found.setdefault(key, {}).setdefault(_expanded(value, macros), line)
    values = {key: _value(texts) for key, texts in found.items()}
    lines = {key: next(iter(texts.values())) for key, texts in found.items()}
    for key in found:
        for fact, word in _facts(key, values[key]):
            if fact in values and values[fact] != word:
                word = f"{values[fact]} and {word}"
            values[fact] = word
            lines.setdefault(fact, lines[key])
    return Bindings(values, lines)


def _statements(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield name, text of the value and line of each binding; ``Class:`` stands before the parameters that are indented below it."""
    block = ""
    for line, statement in _logical_lines(text):
        if not statement[0].isspace():
            block = ""
        if found := _BLOCK.fullmatch(statement.strip()):
            block = f"{found['name']}."
        elif found := _BINDING.fullmatch(statement.strip()):
            yield block + found["name"], found["value"].strip(), line


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the statements, without comments: an open bracket or a backslash continues a line."""
    held, first = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = _without_comment(raw).rstrip()
        first = first if held else number
        held = f"{held} {line.strip()}" if held else line
        if held.endswith("\\"):
            held = held[:-1]
            continue
        outside = _STRING.sub("''", held)
        if sum(map(outside.count, "([{")) > sum(map(outside.count, ")]}")) or outside.rstrip().endswith("="):
            continue
        if held.strip():
            yield first, held
        held = ""


def _without_comment(line: str) -> str:
    strings = [found.span() for found in _STRING.finditer(line)]
    hashes = (k for k, letter in enumerate(line) if letter == "#")
    return line[: next((k for k in hashes if not any(a <= k < b for a, b in strings)), len(line))]


def _expanded(value: str, macros: Mapping[str, str]) -> str:
    for _ in range(_DEEPEST):
        expanded = _MACRO.sub(lambda found: macros.get(found[1].rpartition("/")[2], found[0]), value)
        if expanded == value or len(expanded) > len(value) + 10_000:
            break
        value = expanded
    return value


def _value(texts: Mapping[str, int]) -> Any:
    """Return the value of a binding, or the texts of several scopes."""
    read = [_literal(text) for text in texts]
    return read[0] if all(value == read[0] for value in read) else " and ".join(texts)


def _literal(text: str) -> Any:
    """Return the value of an expression; a reference, ``@scope/module.Class()``, is ``@Class``, and what cannot be read its text."""
    if found := _REFERENCE.fullmatch(text):
        return f"@{found['name']}"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return list(value) if isinstance(value, tuple) else value


# ---- parameters that are facts of the rules

# flax's activations by name (T5X's and flaxformer's blocks look them up in flax.linen) -> transformers' name of the same function.
_FUNCTIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "swish", "tanh": "tanh"}
_GATED = {"gelu": "gated-gelu", **{name: f"gated-{name}" for name in ("relu", "silu", "swish", "tanh")}}


def _facts(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the facts that a parameter is; rules have some of them."""
    for pattern, fact, word in _WORDS:
        if pattern.fullmatch(key):
            yield fact, word(value)


def _as_feed_forward(value: Any) -> Any:
    """Return the block in transformers' words: ``('gelu', 'linear')`` is gated-gelu, whose function is tanh's approximation as flax's is."""
    functions = _listed(value)
    if len(functions) == 2 and functions[1] == "linear":
        return _GATED.get(functions[0], _shown(value))
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return transformers' name of the function of a block that is not gated."""
    functions = _listed(value)
    return _FUNCTIONS.get(functions[0], _shown(value)) if len(functions) == 1 else _shown(value)


def _gate(value: Any) -> Any:
    """Return transformers' name of the function of a gated block."""
    functions = _listed(value)
    return _FUNCTIONS.get(functions[0], _shown(value)) if functions[1:] == ["linear"] else _shown(value)


def _listed(value: Any) -> list[str]:
    """Return the names of the functions of a block: a list, or one name."""
    return [str(name) for name in value] if isinstance(value, list) else [str(value)]


def _shown(value: Any) -> str:
    """Return a value for which transformers has no word, as gin writes it; `allowed` of the rules refuses it."""
    return str(tuple(value)) if isinstance(value, list) else str(value)


def _same(value: Any) -> Any:
    return value


_ACTIVATIONS = re.compile(r"T5Config\.mlp_activations|MlpBlock\.activations")
_WORDS: tuple[tuple[re.Pattern[str], str, Callable[[Any], Any]], ...] = (
    (_ACTIVATIONS, "feed_forward_proj", _as_feed_forward),  # of T5
    (_ACTIVATIONS, "dense_act_fn", _plain),  # of Switch Transformers
    (_ACTIVATIONS, "activation", _gate),  # of Pix2Struct
    (re.compile(r"(T5)?LayerNorm\.epsilon"), "layer_norm_epsilon", _same),
    (re.compile(r"RelativePositionBiases(General)?\.max_distance"), "relative_attention_max_distance", _same),
    (re.compile(r"\w+\.local_radius"), "local_radius", _same),
    (re.compile(r"\w+\.tokens_per_block"), "tokens_per_block", _same),
)
