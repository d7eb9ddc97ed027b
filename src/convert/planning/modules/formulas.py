"""Numbers of a model, as formulas of the keys of its config.json: ``2*n_embd|hidden_size``, ``image_size//patch_size``, ``depths.#``.

``a//(b//c)`` has one quotient in another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LABELS = "num_labels"  # transformers counts the classes by their names
NAMES_OF_LABELS = "id2label"


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, which may lie in a part of the configuration or in a list: ``text_config.layer_norm_eps``, ``hidden_sizes.0``.

    Of several names of a key (``num_hidden_layers|n_layer``), the first that is stated counts: in transformers, an alias.
    """
    *parts, names = key.split(".")
    value = _part(config, parts)
    if isinstance(value, list | tuple) and names.removeprefix("-").isdecimal():
        return value[int(names)] if -len(value) <= int(names) < len(value) else None
    if not isinstance(value, Mapping):
        return None
    if names == LABELS and isinstance(value.get(NAMES_OF_LABELS), Mapping):
        return len(value[NAMES_OF_LABELS])
    return next((value[name] for name in names.split("|") if value.get(name) is not None), None)


def states(config: Mapping[str, Any], key: str) -> bool:
    """Whether a configuration has a key, which may be null."""
    *parts, names = key.split(".")
    part = _part(config, parts)
    return isinstance(part, Mapping) and any(name in part for name in names.split("|"))


def _part(config: Mapping[str, Any], parts: Sequence[str]) -> Any:
    value: Any = config
    for one in parts:
        value = next((value[name] for name in one.split("|") if value.get(name) is not None), None) if isinstance(value, Mapping) else None  # fmt: skip
    return value


@dataclass(frozen=True)
class Keys:
    """What a configuration states, and a class's defaults.

    Attributes:
        config: a config.json, or a part of it.
        defaults: key -> the default of the class.
        before: name of the part, as text before a key.
        depth: number of keys of the part's name.
        names: key that is not in the file -> the key there that has its value.
        chosen_by: key -> what in the file decides which value it has, as text.
    """

    config: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    before: str = ""
    depth: int = 0
    names: Mapping[str, str] = field(default_factory=dict)
    chosen_by: Mapping[str, str] = field(default_factory=dict)

    def value(self, key: str) -> Any:
        """Return what is stated for a key, or the default."""
        stated = value_of(self.config, key)
        return stated if stated is not None else self.default(key)

    def default(self, key: str) -> Any:
        """Return the default of the class for a key, or for an element of a list."""
        found = (self.defaults.get(one) for one in (key, key.rpartition("|")[2]))
        return next((one for one in found if one is not None), value_of(self.defaults, key))

    def count(self, formula: str, number: str = "") -> int | None:
        """Return the value of a formula; of alternatives, the first whose keys have values. None if none has.

        Args:
            number: what stands for ``#``.
        """
        for text in formula.split(";"):
            total = 0
            for term in text.replace("#", number).split("+"):
                product = 1
                for factor in term.split("*"):
                    key, _, by = factor.partition("//")
                    value, divisor = self._number(key), self._number(by) if by else 1
                    if value is None or not divisor:
                        break
                    product *= value // divisor
                else:
                    total += product
                    continue
                break
            else:
                return total
        return None

    def said(self, formula: str, number: str = "") -> str:
        """Say which values of keys make a number: ``has hidden_size = 12``, ``has no vocab_size, which then is 30522``."""
        text = next((text for text in formula.split(";") if self.count(text, number) is not None), formula)
        keys = keys_of(text.replace("#", number))
        found = {key: value_of(self.config, key) for key in keys}
        stated = " and ".join(dict.fromkeys(f"{self.shown(key)} = {value}{self.chosen_by.get(key, '')}" for key, value in found.items() if value is not None))  # fmt: skip
        absent = " and ".join(dict.fromkeys(f"no {self.shown(key)}, which then is {self.default(key)}" for key, value in found.items() if value is None))  # fmt: skip
        return f"has {' and '.join(part for part in (stated, absent) if part)}"

    def shown(self, key: str) -> str:
        """Return the name of a key that its file states; of one that is missing, the last name."""
        if key in self.names:
            return self.before + self.names[key]
        *parts, names = key.split(".")
        stated = (one for one in names.split("|") if value_of(self.config, ".".join([*parts, one])) is not None)
        return self.before + ".".join(
            [*(one.partition("|")[0] for one in parts), next(stated, names.rpartition("|")[2])]
        )

    def _number(self, key: str) -> int | None:
        if key.removeprefix("-").isdecimal():
            return int(key)
        if key.startswith("("):
            return self.count(key[1:-1])
        value = self.value(key)
        value = _layers(value) if isinstance(value, list) else value
        return value if isinstance(value, int) else None


def _layers(listed: Sequence[Any]) -> int:
    """Return the length of a list; of patterns of layers with how often each is repeated (GPT-Neo's `attention_types`), the layers."""
    if listed and all(isinstance(one, list) and [type(part) for part in one] == [list, int] for one in listed):
        return sum(len(layers) * times for layers, times in listed)
    return len(listed)


def keys_of(formula: str) -> tuple[str, ...]:
    """Return the keys of a formula."""
    factors = (part.strip("()") for part in re.split(r"[;+*]|//", formula))
    return tuple(dict.fromkeys(part for part in factors if not part.removeprefix("-").isdecimal()))
