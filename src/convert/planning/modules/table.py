"""The modules of the classes that may load an output: names, types, and what may be absent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from operator import eq, lt, ne
from pathlib import Path
from typing import Any

from convert.planning.modules.blocks import blocks
from convert.planning.modules.formulas import Keys, states, value_of

NUMBER = "#"  # in a name: the number of a layer
PARAMETER = "Parameter"  # type of a tensor that belongs to no module of a known type
EMBEDDING = "Embedding"
TIED = "tie_word_embeddings"
# How a key compares with another key.
COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {"differs_from": ne, "same_as": eq, "less_than": lt}

Name = tuple[str, ...]
Conditions = Sequence[Any]  # one holds; of a list of tests in it, all; a test is a key, its default, and what is stated
Heads = tuple[str, str, Keys]  # key of the number of heads, key of the width that they divide, configuration


@dataclass(frozen=True)
class Module:
    """A module of a class, or one for each layer.

    Attributes:
        name: its keys, with ``#`` for numbers.
        type: the word that rules have in `each`.
        epsilon: of a norm.
        groups: of a group norm.
        optional: whether a tree may lack it.
        bias: whether it has a bias; None if the configuration does not say so.
        axes: of its weight, the formula of each size; empty where none is known.
        keys: what the formulas follow.
        when: the conditions under which a configuration has it; none if all have.
        bias_when: the same of its bias.
        absent: whether this configuration lacks it.
    """

    name: Name
    type: str
    epsilon: float | None
    groups: int | None
    optional: bool
    bias: bool | None
    axes: tuple[str, ...]
    keys: Keys
    when: Conditions = ()
    bias_when: Conditions = ()
    absent: bool = False

    @property
    def form(self) -> tuple[Any, ...]:
        """What modules have in common that one rule is written for: all but the numbers in their names, and sizes."""
        name = tuple(NUMBER if key.isdecimal() else key for key in self.name)
        return (name, self.type, self.epsilon, self.groups, self.optional, self.bias)


@dataclass(frozen=True)
class LayerCount:
    """The number of layers in a place.

    Attributes:
        key: of config.json.
        count: the number; a list has one for each number of the place above.
        stated: whether config.json has the key; else it is the class's default.
    """

    key: str
    count: int | Sequence[int]
    stated: bool

    def at(self, place: Name) -> int | None:
        """Return the number of layers in a place with numbers; None if there is none for its number."""
        if isinstance(self.count, int):
            return self.count
        number = int(next(key for key in reversed(place) if key.isdecimal()))
        return self.count[number] if number < len(self.count) else None


@dataclass(frozen=True)
class ModuleList:
    """What loads an output.

    Attributes:
        loads: name of the class.
        package: that has the class.
        modules: its modules, in this configuration.
        lacks: name -> a module that it has in other configurations.
        prefixes: keys that a tree may lack before its paths, or have in addition.
        below: part -> the key that flax's tree has before the paths of the part, and the names have not.
        tied: tensor -> the tensor that it is the same as, unless config.json says otherwise.
        untied: those of `tied` that config.json unties.
        counts: name before a number -> the number of layers there, by each key that states it.
        heads: numbers of heads that no leaf shows.
        refused: key of config.json whose value the class does not compute with -> the value, and why.
        unread: key of config.json, or ``encoder.key`` of a part, that the source's code does not read -> the value that it computes with.
        notes: what the class computes otherwise than the source's code.
    """

    loads: str
    package: str
    modules: tuple[Module, ...]
    lacks: Mapping[Name, Module]
    prefixes: tuple[Name, ...]
    below: Mapping[Name, str]
    tied: Mapping[str, str]
    untied: frozenset[str]
    counts: Mapping[Name, Sequence[LayerCount]]
    heads: tuple[Heads, ...]
    refused: Mapping[str, tuple[Any, str]]
    unread: Mapping[str, Any]
    notes: tuple[str, ...]

    def has_leaf(self, tensor: str) -> bool:
        """Whether the source's tree has a leaf for a tensor: it shares biases and embeddings that the class ties, and an untied head is its own."""
        if tensor not in self.tied:
            return True
        name = tuple(tensor.split(".")[:-1])
        embedding = any(module.name == name and module.type == EMBEDDING for module in self.modules)
        return tensor in self.untied and not tensor.endswith(".bias") and not embedding


class UnknownClassError(LookupError):
    """The table lacks a class, or a class for a part of a model; the argument is its name."""


class MissingKeyError(LookupError):
    """The configuration lacks a number that the class has no default for; the argument is its key."""


@dataclass
class _Gathered:
    modules: list[Module] = field(default_factory=list)
    lacks: dict[Name, Module] = field(default_factory=dict)
    prefixes: list[Name] = field(default_factory=list)
    below: dict[Name, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    untied: set[str] = field(default_factory=set)
    counts: dict[Name, list[LayerCount]] = field(default_factory=dict)
    heads: list[Heads] = field(default_factory=list)
    refused: dict[str, tuple[Any, str]] = field(default_factory=dict)
    unread: dict[str, Any] = field(default_factory=dict)


@lru_cache(maxsize=4)
def read_table(path: Path) -> Mapping[str, Any]:
    """Read a table of classes."""
    table: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


def module_list(table: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> ModuleList:
    """Return the modules of a class and of its parts.

    Raises:
        UnknownClassError: the table lacks the class, or the class of a part.
        MissingKeyError: the configuration lacks a number.
    """
    found, config = _Gathered(), _with_parts(config)
    entry = _entry(table["classes"], name)
    _gather(found, table, entry, Keys(config, entry["facts"]), ())
    return ModuleList(
        name,
        table["library"],
        tuple(found.modules),
        {name: found.lacks[name] for name in found.lacks.keys() - {module.name for module in found.modules}},
        tuple(found.prefixes),
        found.below,
        found.tied,
        frozenset(found.untied),
        found.counts,
        tuple(found.heads),
        found.refused,
        found.unread,
        tuple(entry.get("notes", ())),
    )


def _with_parts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration whose parts are those that count: transformers reads CLIP's `text_config_dict` instead of `text_config`, where it has both."""
    instead = {
        key: value for key, value in config.items() if key.endswith("_config_dict") and isinstance(value, Mapping)
    }
    return {**config, **{key.removesuffix("_dict"): value for key, value in instead.items()}}


def _entry(entries: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if name not in entries:
        raise UnknownClassError(name)
    found: Mapping[str, Any] = entries[name]
    return found


def _gather(found: _Gathered, table: Mapping[str, Any], entry: Mapping[str, Any], keys: Keys, below: Name) -> None:
    config = keys.config
    found.heads += [(heads, width, keys) for heads, width in entry.get("heads", {}).items()]
    for module, has in _modules(entry, keys, below):
        if has:
            found.modules.append(module)
        else:
            found.lacks[module.name] = module
    if entry["prefix"]:
        found.prefixes.append((*below, entry["prefix"]))
    if "below" in entry:
        found.below[below] = entry["prefix"]
    found.unread |= {f"{keys.before}{key}": value for key, value in entry.get("unread", {}).items()}
    before = "".join(f"{key}." for key in below)
    tied = {f"{before}{one}": f"{before}{other}" for one, other in entry["tied"].items()}
    found.tied |= tied
    if keys.value(TIED) is False:
        found.untied |= set(tied)
    for place, texts in entry["counts"].items():
        counts = [_layers(keys, text) for text in ([texts] if isinstance(texts, str) else texts)]
        if known := [count for count in counts if count is not None]:
            found.counts[(*below, *place.split("."))] = known
    for key, (values, because) in entry["refuses"].items():
        value = value_of(config, key)
        if _refuses(values, value, keys):
            found.refused[key] = (value, because)
    for part, (key, role) in entry.get("parts", {}).items():
        own = config.get(key)
        own = own if isinstance(own, Mapping) else {}
        of = own.get("model_type")
        if not isinstance(of, str) or of not in table["parts"][role]:
            raise UnknownClassError(f"{key}: {of}")
        inner = _entry(table["classes"], table["parts"][role][of])
        _gather(found, table, inner, Keys(own, inner["facts"], f"{key}.", 1), (*below, part))
    for part, block in entry.get("blocks", {}).items():
        for name, of, inner_keys in blocks(keys, (*below, *part.split(".")), **block):
            if not isinstance(of, str) or of not in table["blocks"]:
                raise UnknownClassError(f"{block['key']}: {of}")
            _gather(found, table, table["blocks"][of], inner_keys, name)


def _modules(entry: Mapping[str, Any], keys: Keys, below: Name) -> Iterator[tuple[Module, bool]]:
    """Yield each module of a class, and whether this configuration has it."""
    for heading, names in entry["modules"].items():
        before, _, sizes = heading.partition(" [")
        word, *numbers = before.split(" ")
        axes = tuple(sizes.removesuffix("]").split(",")) if sizes else ()
        epsilon, groups = (_number(keys, text) for text in (*numbers, "", "")[:2])
        for text in names:
            name, _, bias = text.partition(" ")
            bare = name.removeprefix("?")
            conditions = entry["when"].get(f"{word} {bare}")
            of_bias = entry["when"].get(f"{word} {bare}.bias") if bias == "?bias" else None
            has = holds(conditions, keys)
            spared = name.startswith("?") and (conditions is None or not has)  # the class has it, and a tree need not
            has_bias = holds(of_bias, keys) if of_bias else {"": True, "-bias": False}.get(bias)
            count = None if groups is None else int(groups)
            present = spared or has is not False
            made = Module(
                (*below, *bare.split(".")), word, epsilon, count, spared or has is None, has_bias, axes, keys,
                conditions or (), of_bias or (), not present,
            )  # fmt: skip
            yield made, present


def _refuses(values: Any, value: Any, keys: Keys) -> bool:
    """Whether a class does not compute with the value of a key: one of these values, none of these, or any where conditions hold."""
    if isinstance(values, Mapping) and "where" in values:
        return holds(values["where"], keys) is True
    return value is not None and value not in values["other_than"] if isinstance(values, Mapping) else value in values


def _number(keys: Keys, text: str) -> float | None:
    """Return a number of a heading, or that of the key of config.json which it names.

    Raises:
        MissingKeyError: the configuration lacks it.
    """
    key = text.removeprefix("$")
    if not text or key == text:
        return float(text) if text else None
    value = value_of(keys.config, key) if states(keys.config, key) else keys.defaults.get(key)
    if not isinstance(value, float | int):
        raise MissingKeyError(key)
    return float(value)


def holds(conditions: Sequence[Any] | None, keys: Keys) -> bool | None:
    """Whether one of the conditions holds; of a list of conditions, all. None if the configuration does not say."""
    if conditions is None:
        return True
    found = [_all(one, keys) if isinstance(one[0], list) else _test(one, keys) for one in conditions]
    return True if True in found else None if None in found else False


def _all(tests: Sequence[Sequence[Any]], keys: Keys) -> bool | None:
    found = [_test(one, keys) for one in tests]
    return False if False in found else None if None in found else True


def _test(test: Sequence[Any], keys: Keys) -> bool | None:
    """Whether a key, with this default, is on or off, is like a pattern, or how it compares with another key."""
    key, default, stated = test
    value = value_of(keys.config, key)
    value = default if value is None else value
    if isinstance(stated, bool):
        return bool(value) is stated
    ((operator, text),) = stated.items()
    if operator in COMPARED:
        other = value_of(keys.config, text)
        other = keys.defaults.get(text) if other is None else other
        return None if value is None or other is None else bool(COMPARED[operator](value, other))
    return fnmatchcase(str(value), text) is (operator == "is")


def _layers(keys: Keys, text: str) -> LayerCount | None:
    """Return the number of layers that a key, or the class's default for it, states; of ``depths.#``, one for each number above."""
    key = text.removesuffix(".#")
    if key != text:
        counts = keys.value(key)
        return None if counts is None else LayerCount(keys.shown(key), counts, value_of(keys.config, key) is not None)
    count = keys.count(key)
    return None if count is None else LayerCount(keys.shown(key), count, Keys(keys.config).count(key) is not None)
