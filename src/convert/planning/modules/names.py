"""Find the module of a path, and write the paths of many modules as few patterns."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from convert.core.path_pattern import Pattern, escape_path, parse_pattern
from convert.planning.modules.table import NUMBER, Module, ModuleList, Name

Renaming = Sequence[tuple[Pattern, Pattern, int]]  # keys, the others, their number
_LAST_NUMBER = re.compile(r"[0-9]+$")


class Found(NamedTuple):
    """A module of the tree: the keys of its path, its name in the target, and what it is."""

    path: Name
    name: Name
    module: Module


class Finder:
    """Finds the modules of a class by the paths of a tree.

    Args:
        listed: the modules of the class.
        renamed: key of a path -> key of the name, where they differ.
    """

    def __init__(self, listed: ModuleList, renamed: Mapping[str, str]) -> None:
        self._prefixes = listed.prefixes
        self._renamed = renaming(renamed)
        self._known: dict[Name, list[Module]] = defaultdict(list)
        for module in listed.modules:
            self._known[_template(module.name)].append(module)

    def find(self, path: Name) -> Found | None:
        """Return the module of a path, or a parameter of that name; None if the class has none."""
        for keys in dict.fromkeys((path, with_other_keys(path, self._renamed))):
            for name in self._with_prefix(keys):
                for module in self._known.get(_template(name), ()):
                    if all(one in (NUMBER, other) for one, other in zip(module.name, name, strict=True)):
                        return Found(path, name, module)
        return None

    def _with_prefix(self, keys: Name) -> Iterator[Name]:
        yield keys
        for prefix in self._prefixes:
            *below, last = prefix
            depth = len(below)
            if keys[:depth] == tuple(below):
                yield (*below, last, *keys[depth:])
                if keys[depth : depth + 1] == (last,):
                    yield (*below, *keys[depth + 1 :])


def with_other_keys(path: Name, renamed: Renaming) -> Name:
    """Replace keys of a path as `renamed` says, wherever the path has them in sequence."""
    for keys, others, count in renamed:
        for at in range(len(path) - count + 1):
            if (match := keys.match("/".join(path[at : at + count]))) is not None:
                filled = others.fill(dict(match.indices), match.choices)
                path = (*path[:at], *filled.split("/"), *path[at + count :])
    return path


def renaming(renamed: Mapping[str, str]) -> Renaming:
    """Prepare a mapping of keys to others, each with as many."""
    return [(parse_pattern(keys), parse_pattern(others), keys.count("/") + 1) for keys, others in renamed.items()]


def _template(name: Name) -> Name:
    return tuple(NUMBER if key.isdecimal() else key for key in name)


class Patterns:
    """Write paths and names of modules as patterns: numbers that run over all layers of a place are an index.

    Args:
        names: of all modules of the tree, by which layers are counted.
    """

    def __init__(self, names: Iterable[Name]) -> None:
        self.numbers: dict[Name, set[str]] = defaultdict(set)
        for name in names:
            for at, key in enumerate(name):
                if key.isdecimal():
                    self.numbers[name[:at]].add(key)
        self._indices: dict[Name, str] = {}

    def write(self, members: Sequence[Found]) -> Iterator[tuple[str, Pattern]]:
        """Yield pattern of the path and pattern of the name, for members whose names differ in numbers alone."""
        at = next((k for k, key in enumerate(members[0].name) if key.isdecimal()), None)
        yield from self._write([(one.path, one.name, one.name) for one in members], at)

    def _write(self, members: Sequence[tuple[Name, Name, Name]], at: int | None) -> Iterator[tuple[str, Pattern]]:
        """Yield the patterns, from the number at this place of the names on.

        Args:
            members: path and name as far as they are written, and the name.
        """
        path, name, own = members[0]
        if at is None:
            yield "/".join(path), parse_pattern(".".join(name))
            return
        below: dict[str, list[tuple[Name, Name, Name]]] = defaultdict(list)
        for member in members:
            below[member[2][at]].append(member)
        after = next((k for k, key in enumerate(own) if k > at and key.isdecimal()), None)
        rest = [{(x[2][:at], x[2][at + 1 :]) for x in found} for found in below.values()]
        whole = all(self.numbers[x[2][:at]] == set(below) for x in members)
        if whole and set(map(int, below)) == set(range(len(below))) and all(one == rest[0] for one in rest):
            index = self._indices.setdefault(name[:at], _index(len(self._indices)))
            yield from self._write([_at(x, at, f"{{{index}}}") for x in next(iter(below.values()))], after)
            return
        for number, found in below.items():
            yield from self._write([_at(x, at, number) for x in found], after)


def _index(k: int) -> str:
    return "ijklmnpq"[k] if k < 8 else f"i{k}"


def _at(member: tuple[Name, Name, Name], at: int, text: str) -> tuple[Name, Name, Name]:
    """Write a number of a name, and that of the path, which has as many keys after it."""
    path, name, own = member
    back = at - len(own)
    stem = _LAST_NUMBER.sub("", path[back])
    return (
        (*path[:back], f"{escape_path(stem)}{text}", *path[len(path) + back + 1 :]),
        (*name[:at], text, *name[at + 1 :]),
        own,
    )
