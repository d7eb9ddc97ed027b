"""Which modules an adapter of PEFT is added to, by its configuration; PEFT leaves out the pairs of all others without a word.

As PEFT 0.21.2 decides it (tuners/tuners_utils.py, `check_target_module_exists`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convert.planning.adapters.peft_config import SettingError, require_expression

ALL = "all-linear"  # every linear layer but the head, which the tensors show
Names = str | tuple[str, ...]  # a regular expression for the whole name, or names and ends of names


@dataclass(frozen=True)
class Selection:
    """The modules.

    Attributes:
        targets: those that have a pair; None: not stated.
        excluded: those that have none.
        layers: numbers of their layers; empty: all.
        lists: regular expressions for the name of the list that the layers are in; empty: any.
    """

    targets: Names | None
    excluded: Names
    layers: tuple[int, ...]
    lists: tuple[str, ...]

    def __str__(self) -> str:
        """The settings, for people."""
        stated = {"target_modules": self.targets, "exclude_modules": self.excluded, "layers_to_transform": self.layers, "layers_pattern": self.lists}  # fmt: skip
        return ", ".join(f"{key}: {value if isinstance(value, str) else ' '.join(map(str, value))}" for key, value in stated.items() if value)  # fmt: skip

    def has(self, module: str) -> bool:
        """Whether PEFT adds a pair to the module."""
        if self.excluded and _is_one(self.excluded, module):
            return False
        if self.targets is None or self.targets == ALL:
            return True
        if not _is_one(self.targets, module):
            return False
        by_layer = self.layers and not isinstance(self.targets, str) and module not in self.targets
        return not by_layer or self._layer(module) in self.layers

    def _layer(self, module: str) -> int | None:
        patterns = [rf"(?:^|.*?\.){name}\.(?P<layer>\d+)\." for name in self.lists] or [r".*?\.[^.]*\.(?P<layer>\d+)\."]
        found = next((found for pattern in patterns if (found := re.match(pattern, module))), None)
        return None if found is None else int(found["layer"])


def read_selection(config: Mapping[str, Any]) -> Selection:
    """Read the settings.

    Raises:
        SettingError: one is of another type, or no regular expression.
    """
    layers = config.get("layers_to_transform")
    numbers = [] if layers is None else layers if isinstance(layers, list) else [layers]
    if any(not isinstance(number, int) or isinstance(number, bool) for number in numbers):
        raise SettingError("layers_to_transform", "numbers of layers", layers)
    lists = _names(config, "layers_pattern")
    for pattern in () if lists is None else (lists,) if isinstance(lists, str) else lists:
        require_expression("layers_pattern", pattern)
    return Selection(
        _names(config, "target_modules"),
        _names(config, "exclude_modules") or (),
        tuple(numbers),
        (lists,) if isinstance(lists, str) and lists else tuple(lists or ()),
    )


def _names(config: Mapping[str, Any], key: str) -> Names | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        if key != "layers_pattern":
            require_expression(key, value)
        return value
    if not isinstance(value, list) or any(not isinstance(name, str) for name in value):
        raise SettingError(key, "names of modules, or one regular expression", value)
    return tuple(value)


def _is_one(names: str | Sequence[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return module in names or any(module.endswith(f".{name}") for name in names)
