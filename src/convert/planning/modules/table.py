"""The modules of the classes that may load an output: names, types, and what may be absent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

NUMBER = "#"  # in a name: the number of a layer
PARAMETER = "Parameter"  # type of a tensor that belongs to no module of a known type
TIED = "tie_word_embeddings"

Name = tuple[str, ...]


@dataclass(frozen=True)
class Module:
    """A module of a class, or one for each layer.

    Attributes:
        name: its keys, with ``#`` for numbers.
        type: the word that rules have in `each`.
        epsilon: of a norm.
        groups: of a group norm.
        optional: whether some configurations lack it.
        bias: whether it has a bias: always, never or (None) in some configurations.
    """

    name: Name
    type: str
    epsilon: float | None
    groups: int | None
    optional: bool
    bias: bool | None

    @property
    def form(self) -> tuple[Any, ...]:
        """What modules have in common that one rule is written for: all but the numbers in their names."""
        return (tuple(NUMBER if key.isdecimal() else key for key in self.name), *list(vars(self).values())[1:])


@dataclass(frozen=True)
class ModuleList:
    """What loads an output.

    Attributes:
        loads: name of the class.
        package: that has the class.
        modules: its modules.
        prefixes: keys that a tree may lack before its paths, or have in addition.
        below: part -> the key that flax's tree has before the paths of the part, and the names have not.
        tied: tensor -> the tensor that it is the same as, unless config.json says otherwise.
        untied: those of `tied` that config.json unties.
        counts: name before a number -> key of config.json, and the number of layers that it states.
        refused: key of config.json whose value the class does not compute with -> the value, and why.
        unread: key of config.json that the source's code does not read -> the value that it computes with.
        widths: layer -> the number of its outputs, which no configuration changes.
        notes: what the class computes otherwise than the source's code.
    """

    loads: str
    package: str
    modules: tuple[Module, ...]
    prefixes: tuple[Name, ...]
    below: Mapping[Name, str]
    tied: Mapping[str, str]
    untied: frozenset[str]
    counts: Mapping[Name, tuple[str, int]]
    refused: Mapping[str, tuple[Any, str]]
    unread: Mapping[str, Any]
    widths: Mapping[str, int]
    notes: tuple[str, ...]


class UnknownClassError(LookupError):
    """The table lacks a class, or a class for a part of a model; the argument is its name."""


@dataclass
class _Gathered:
    modules: list[Module] = field(default_factory=list)
    prefixes: list[Name] = field(default_factory=list)
    below: dict[Name, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    untied: set[str] = field(default_factory=set)
    counts: dict[Name, tuple[str, int]] = field(default_factory=dict)
    refused: dict[str, tuple[Any, str]] = field(default_factory=dict)


@lru_cache(maxsize=4)
def read_table(path: Path) -> Mapping[str, Any]:
    """Read a table of classes."""
    table: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


def module_list(table: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> ModuleList:
    """Return the modules of a class and of its parts.

    Raises:
        UnknownClassError: the table lacks the class, or the class of a part.
    """
    found = _Gathered()
    entry = _entry(table["classes"], name)
    _gather(found, table, entry, config, ())
    return ModuleList(
        name,
        table["library"],
        tuple(found.modules),
        tuple(found.prefixes),
        found.below,
        found.tied,
        frozenset(found.untied),
        found.counts,
        found.refused,
        entry.get("unread", {}),
        entry.get("widths", {}),
        tuple(entry.get("notes", ())),
    )


def _entry(entries: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if name not in entries:
        raise UnknownClassError(name)
    found: Mapping[str, Any] = entries[name]
    return found


def _gather(
    found: _Gathered, table: Mapping[str, Any], entry: Mapping[str, Any], config: Mapping[str, Any], below: Name
) -> None:
    found.modules += _modules(entry, config, below)
    if entry["prefix"]:
        found.prefixes.append((*below, entry["prefix"]))
    if "below" in entry:
        found.below[below] = entry["prefix"]
    before = "".join(f"{key}." for key in below)
    tied = {f"{before}{one}": f"{before}{other}" for one, other in entry["tied"].items()}
    found.tied |= tied
    if config.get(TIED) is False:
        found.untied |= set(tied)
    for place, text in entry["counts"].items():
        if (count := _count(config, text)) is not None:
            found.counts[(*below, *place.split("."))] = (text, count)
    for key, (values, because) in entry["refuses"].items():
        if (value := _value(config, key)) in values:
            found.refused[key] = (value, because)
    for part, (key, role) in entry.get("parts", {}).items():
        own = config.get(key)
        own = own if isinstance(own, Mapping) else {}
        of = own.get("model_type")
        if of not in table["parts"][role]:
            raise UnknownClassError(f"{key}: {of}")
        _gather(found, table, _entry(table["classes"], table["parts"][role][of]), own, (*below, part))
    for part, block in entry.get("blocks", {}).items():
        for number, of, own in _blocks(config, **block):
            if of not in table["blocks"]:
                raise UnknownClassError(f"{block['key']}: {of}")
            _gather(found, table, table["blocks"][of], own, (*below, *part.split("."), *number))


def _blocks(
    config: Mapping[str, Any], key: str, default: str | None = None, backwards: bool = False
) -> Iterator[tuple[Name, str, Mapping[str, Any]]]:
    """Yield number, type and configuration of each block that a key names: of a list with a value for each block, its value.

    Two keys are added: `last` (no block follows) and `widens` (the block before it has another width).
    """
    types = config.get(key, default)
    if not isinstance(types, list):
        own = {name: value[-1] if isinstance(value, list) else value for name, value in config.items()}
        yield from [((), types, own)] if types is not None else ()
        return
    count, widths = len(types), list(config.get("block_out_channels") or ())
    order = range(count)[::-1] if backwards else range(count)
    for k, at in enumerate(order):
        own = {
            name: value[at] if isinstance(value, list) and len(value) == count else value
            for name, value in config.items()
        }
        before = order[max(k - 1, 0)]
        own |= {"last": k == count - 1, "widens": len(widths) == count and widths[at] != widths[before]}
        yield (str(k),), types[k], own


def _modules(entry: Mapping[str, Any], config: Mapping[str, Any], below: Name) -> Iterator[Module]:
    for heading, names in entry["modules"].items():
        word, *numbers = heading.split(" ")
        epsilon, groups = (_number(entry, config, text) for text in (*numbers, "", "")[:2])
        for text in names:
            name, _, bias = text.partition(" ")
            bare = name.removeprefix("?")
            if not _has(entry["when"].get(f"{word} {bare}"), config):
                continue
            keys = (*below, *bare.split("."))
            has_bias = {"": True, "-bias": False, "?bias": None}[bias]
            count = None if groups is None else int(groups)
            yield Module(keys, word, epsilon, count, name.startswith("?"), has_bias)


def _number(entry: Mapping[str, Any], config: Mapping[str, Any], text: str) -> float | None:
    """Return a number of a heading, or that of the key of config.json which it names."""
    key = text.removeprefix("$")
    value = _value(config, key) if key != text else None
    return float(value if isinstance(value, float | int) else entry["facts"].get(key, key)) if text else None


def _has(conditions: Sequence[Sequence[Any]] | None, config: Mapping[str, Any]) -> bool:
    """Whether a configuration has a module: one of the keys, with these defaults, is as stated."""
    return conditions is None or any(bool(config.get(key, default)) is stated for key, default, stated in conditions)


def _count(config: Mapping[str, Any], text: str) -> int | None:
    """Return a sum of products of numbers and keys, of a list its length; None if the configuration lacks one of the keys."""
    total = 0
    for term in text.split("+"):
        product = 1
        for factor in term.split("*"):
            value = int(factor) if factor.removeprefix("-").isdecimal() else _value(config, factor)
            if not isinstance(value, int | list):
                return None
            product *= len(value) if isinstance(value, list) else value
        total += product
    return total


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, which may lie in a part of the configuration: ``text_config.layer_norm_eps``."""
    value: Any = config
    for one in key.split("."):
        value = value.get(one) if isinstance(value, Mapping) else None
    return value
