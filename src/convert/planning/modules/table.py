"""The modules of the classes that may load an output: names, types, and what may be absent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
        optional: whether some configurations lack it.
        bias: whether it has a bias: always, never or (None) in some configurations.
    """

    name: Name
    type: str
    epsilon: float | None
    optional: bool
    bias: bool | None


@dataclass(frozen=True)
class ModuleList:
    """What loads an output.

    Attributes:
        loads: name of the class.
        modules: its modules.
        prefixes: keys that a tree may lack before its paths, or have in addition.
        below: part -> the key that flax's tree has before the paths of the part, and the names have not.
        tied: tensor -> the tensor that it is the same as, unless config.json says otherwise.
        untied: those of `tied` that config.json unties.
        counts: name before a number -> key of config.json, and the number of layers that it states.
        refused: key of config.json whose value the class does not compute with -> the value, and why.
    """

    loads: str
    modules: tuple[Module, ...]
    prefixes: tuple[Name, ...]
    below: Mapping[Name, str]
    tied: Mapping[str, str]
    untied: frozenset[str]
    counts: Mapping[Name, tuple[str, int]]
    refused: Mapping[str, tuple[Any, str]]


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
    _gather(found, table, name, config, ())
    return ModuleList(
        name,
        tuple(found.modules),
        tuple(found.prefixes),
        found.below,
        found.tied,
        frozenset(found.untied),
        found.counts,
        found.refused,
    )


def _gather(found: _Gathered, table: Mapping[str, Any], name: str, config: Mapping[str, Any], below: Name) -> None:
    if name not in table["classes"]:
        raise UnknownClassError(name)
    entry = table["classes"][name]
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
    for place, key in entry["counts"].items():
        if isinstance(count := _value(config, key), int):
            found.counts[(*below, *place.split("."))] = (key, count)
    for key, (values, because) in entry["refuses"].items():
        if (value := _value(config, key)) in values:
            found.refused[key] = (value, because)
    for part, (key, role) in entry.get("parts", {}).items():
        own = config.get(key)
        own = own if isinstance(own, Mapping) else {}
        of = own.get("model_type")
        if of not in table["parts"][role]:
            raise UnknownClassError(f"{key}: {of}")
        _gather(found, table, table["parts"][role][of], own, (*below, part))


def _modules(entry: Mapping[str, Any], config: Mapping[str, Any], below: Name) -> Iterator[Module]:
    for heading, names in entry["modules"].items():
        word, _, epsilon = heading.partition(" ")
        key = epsilon.removeprefix("$")
        value = _value(config, key) if epsilon.startswith("$") else None
        number = float(value if isinstance(value, float | int) else entry["facts"].get(key, key)) if epsilon else None
        for text in names:
            name, _, bias = text.partition(" ")
            gate = entry["when"].get(name.rpartition(".")[2].removeprefix("?"), {})
            if gate and not any(config.get(key, default) for key, default in gate.items()):
                continue  # such a configuration has no such parameter
            keys = (*below, *name.removeprefix("?").split("."))
            has_bias = {"": True, "-bias": False, "?bias": None}[bias]
            yield Module(keys, word, number, name.startswith("?"), has_bias)


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, which may lie in a part of the configuration: ``text_config.layer_norm_eps``."""
    value: Any = config
    for one in key.split("."):
        value = value.get(one) if isinstance(value, Mapping) else None
    return value
