"""Choose among copies of a tree: ``params`` and ``ema_params``, or ``actor/params`` and ``actor/target_params``.

The rules name the first copy. `resolve_copies` rewrites them for the one that is kept, and drops the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from convert.core.path_pattern import Pattern, escape_path, parse_pattern
from convert.core.yaml_nodes import Position
from convert.layers import Drop, Rule

_KEY = re.compile(r"(?:\{[^{}]*\}|\\.|[^/])+")  # a slash inside braces does not separate keys


@dataclass(frozen=True)
class Copies:
    """Trees of which a model needs one.

    Attributes:
        of: their paths below each of `within`; the rules name the first.
        keep: the one that is converted; None while the question is open.
        within: the paths where they lie, from the top of the tree.
        at: position of the entry.
        keep_at: position of the answer.
    """

    of: tuple[str, ...]
    keep: str | None
    within: tuple[str, ...]
    at: Position
    keep_at: Position

    @property
    def kept(self) -> str:
        return self.of[0] if self.keep is None else self.keep

    def move(self, path: str) -> str:
        """Return a path from the top of the tree with the kept copy in place of the first."""
        keys = _KEY.findall(path)
        for place in self.within:
            above = place.split("/") if place else []
            start = [*above, *self.of[0].split("/")]
            if len(keys) >= len(start) and all(map(_matches, keys, start)):
                return "/".join([*keys[: len(above)], escape_path(self.kept), *keys[len(start) :]])
        return path

    @property
    def drops(self) -> tuple[Rule, ...]:
        """The rules that drop the other copies."""
        because = Drop(f"a copy: {self.kept} is kept")
        others = ["/".join(filter(None, (place, one))) for place in self.within for one in self.of if one != self.kept]
        return tuple(
            Rule(self.at, "drop", because, {"weight": parse_pattern(f"/{escape_path(tree)}/**")}, {}, {}, optional=True)
            for tree in others
        )


def resolve_copies(rules: Sequence[Rule], copies: Sequence[Copies], root: str) -> tuple[tuple[Rule, ...], str]:
    """Return the rules and their root with the kept copies in place of those that the rules name."""
    kept = root
    for one in copies:
        kept = one.move(kept)

    def moved(pattern: Pattern) -> Pattern:
        absolute = pattern.text.startswith("/")
        path = pattern.text[1:] if absolute else "/".join(filter(None, (root, pattern.text)))
        for one in copies:
            path = one.move(path)
        if absolute or not f"{path}/".startswith(f"{kept}/" if kept else ""):
            return parse_pattern(f"/{path}")
        return parse_pattern(path.removeprefix(f"{kept}/") if kept else path)

    if not copies:
        return tuple(rules), root
    rewritten = [
        replace(
            rule,
            sources={role: moved(pattern) for role, pattern in rule.sources.items()},
            absent_if=moved(rule.absent_if) if rule.absent_if is not None else None,
        )
        for rule in rules
    ]
    return (*rewritten, *(drop for one in copies for drop in one.drops)), kept


def _matches(pattern: str, key: str) -> bool:
    try:
        parsed = parse_pattern(pattern)
    except ValueError:  # a part of a pattern across keys
        return False
    return not parsed.wild and parsed.match(key) is not None
