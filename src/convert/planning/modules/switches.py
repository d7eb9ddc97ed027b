"""Keys of config.json that switch modules on or off: what the tree has instead, told once for each key."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from convert.core.findings import Finding
from convert.planning.modules.formulas import Keys, value_of
from convert.planning.modules.table import TIED, Conditions

TIES: Conditions = [[TIED, True, False]]  # of a head: it is a module with a weight of its own
Switch = tuple[str, ...]  # the keys, as the file names them


@dataclass(frozen=True)
class Part:
    """A module or a leaf that some configurations have.

    Attributes:
        text: its name.
        keys: what the conditions follow.
        when: the conditions; none if all configurations have it.
    """

    text: str
    keys: Keys
    when: Conditions

    @property
    def switch(self) -> Switch:
        return tuple(dict.fromkeys(self.keys.shown(key) for key in self._told))

    @property
    def said(self) -> str:
        """Say what the file states of each key: ``use_bias = false``, ``no use_bias, which then is true``."""
        return " and ".join(_said(self.keys, key, default) for key, default in self._told.items())

    @property
    def _told(self) -> Mapping[str, object]:
        """The keys of the conditions with their defaults, but for those that the file lacks and that have no default."""
        found = dict(_keys(self.when, self.keys))
        return {
            key: value for key, value in found.items() if value is not None or self.keys.value(key) is not None
        } or found


def _keys(conditions: Conditions, keys: Keys) -> Iterator[tuple[str, object]]:
    for one in conditions:
        for key, default, stated in one if isinstance(one[0], list) else [one]:
            yield key, default
            if isinstance(stated, Mapping) and "differs_from" in stated:
                yield stated["differs_from"], keys.default(stated["differs_from"])


def _said(keys: Keys, key: str, default: object) -> str:
    value, shown = value_of(keys.config, key), keys.shown(key)
    return f"no {shown}, which then is {_text(default)}" if value is None else f"{shown} = {_text(value)}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def switched_off(lost: Sequence[Part], needed: Iterable[Part]) -> frozenset[Switch]:
    """Return the switches of which the tree lacks all that the class has with them: those that may be stated wrongly.

    Args:
        lost: what the tree lacks.
        needed: what the class has, in this configuration.
    """
    wanted, lacks = (Counter(part.switch for part in parts if part.when) for parts in (needed, lost))
    return frozenset(switch for switch, count in lacks.items() if count == wanted[switch])


def conflicts(loads: str, file: str, lost: Sequence[Part], more: Sequence[Part]) -> Iterator[Finding]:
    """Report each switch with which the class lacks what the tree has, or has what the tree lacks.

    Args:
        loads: the class.
        lost: what the tree lacks, of switches that may be stated wrongly.
        more: what the tree has and the class lacks.
    """
    of_switch: dict[Switch, tuple[list[Part], list[Part]]] = defaultdict(lambda: ([], []))
    for at, parts in enumerate((more, lost)):
        for part in parts:
            of_switch[part.switch][at].append(part)
    for switch, (extra, missing) in of_switch.items():
        first = (missing or extra)[0]
        has = f"has {_listed(missing)}, which the tree lacks" if missing else ""
        lacks = f"has no {_listed(extra)}, which the tree has" if extra else ""
        fix = f"write the {' and '.join(switch)} that the model was trained with"
        yield Finding(
            "config-conflict" if extra else "leaf-missing",
            f"the {file} of the checkpoint has {first.said}: {loads} then {', and '.join(text for text in (has, lacks) if text)}",
            path=first.text,
            fix=fix if extra else f"the checkpoint is incomplete, or {fix}",
        )


def _listed(parts: Sequence[Part]) -> str:
    first, *others = dict.fromkeys(part.text for part in parts)
    return f"{first} and {len(others)} more" if others else first
