"""Find the module of a path, and write the paths of many modules as few patterns."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from convert.core.path_pattern import Pattern, escape_path, parse_pattern
from convert.planning.modules.table import NUMBER, Module, ModuleList, Name

Renaming = Sequence[tuple[Pattern, Pattern, int]]  # keys, the others, number of the first
_Placed = tuple[tuple[str, int | None], ...]  # keys, and the place of each in a path
_LAST_NUMBER = re.compile(r"[0-9]+$")


class Found(NamedTuple):
    """A module of the tree.

    Attributes:
        path: the keys of its path.
        name: its name in the target.
        module: what it is.
        places: of each key of the name, the place of the key of the path that it comes from; None if the path has none.
    """

    path: Name
    name: Name
    module: Module
    places: tuple[int | None, ...]


class Finder:
    """Finds the modules of a class by the paths of a tree.

    Args:
        listed: the modules of the class.
        renamed: key of a path -> key of the name, where they differ.
    """

    def __init__(self, listed: ModuleList, renamed: Mapping[str, str]) -> None:
        self._prefixes = listed.prefixes
        self._lacks = listed.lacks
        self._renamed = renaming(renamed)
        self._known, self._absent = _by_template(listed.modules), _by_template(listed.lacks.values())

    def find(self, path: Name) -> Found | None:
        """Return the module of a path, or a parameter of that name; one that this configuration lacks, if no other has the name; None if the class has none."""
        placed = tuple((key, at) for at, key in enumerate(path))
        absent: Found | None = None
        for keys in dict.fromkeys((placed, _replaced(placed, self._renamed))):
            for named in self._with_prefix(keys):
                name, places = tuple(key for key, _ in named), tuple(place for _, place in named)
                here = None if name in self._lacks else _of_name(self._known, name)
                if here is not None:
                    return Found(path, name, here, places)
                lacking = _of_name(self._absent, name)
                if lacking is not None:
                    absent = absent or Found(path, name, lacking, places)
        return absent

    def _with_prefix(self, keys: _Placed) -> Iterator[_Placed]:
        yield keys
        for prefix in self._prefixes:
            *below, last = prefix
            depth = len(below)
            if tuple(key for key, _ in keys[:depth]) == tuple(below):
                yield (*keys[:depth], (last, None), *keys[depth:])
                if keys[depth : depth + 1] and keys[depth][0] == last:
                    yield (*keys[:depth], *keys[depth + 1 :])


def with_other_keys(path: Name, renamed: Renaming) -> Name:
    """Replace keys of a path as `renamed` says, wherever the path has them in sequence."""
    return tuple(key for key, _ in _replaced(tuple((key, at) for at, key in enumerate(path)), renamed))


def _replaced(path: _Placed, renamed: Renaming) -> _Placed:
    """Replace keys, and keep the place that each comes from: of several keys, the first."""
    for keys, others, count in renamed:
        at = 0
        while at + count <= len(path):
            match = keys.match("/".join(key for key, _ in path[at : at + count]))
            if match is None:
                at += 1
                continue
            filled = others.fill(dict(match.indices), match.choices).split("/")
            origins = [path[at + min(k, count - 1)][1] for k in range(len(filled))]
            path = (*path[:at], *zip(filled, origins, strict=True), *path[at + count :])
            at += len(filled)
    return path


def renaming(renamed: Mapping[str, str]) -> Renaming:
    """Prepare a mapping of keys to others."""
    return [(parse_pattern(keys), parse_pattern(others), keys.count("/") + 1) for keys, others in renamed.items()]


def _by_template(modules: Iterable[Module]) -> Mapping[Name, Sequence[Module]]:
    found: dict[Name, list[Module]] = defaultdict(list)
    for module in modules:
        found[_template(module.name)].append(module)
    return found


def _of_name(modules: Mapping[Name, Sequence[Module]], name: Name) -> Module | None:
    fitting = (module for module in modules.get(_template(name), ()) if all(one in (NUMBER, other) for one, other in zip(module.name, name, strict=True)))  # fmt: skip
    return next(fitting, None)


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
        yield from self._write([(one.path, one.name, one) for one in members], _number(members[0], 0))

    def _write(self, members: Sequence[tuple[Name, Name, Found]], at: int | None) -> Iterator[tuple[str, Pattern]]:
        """Yield the patterns, from the number at this place of the names on.

        Args:
            members: path and name as far as they are written, and the module.
        """
        path, name, own = members[0]
        if at is None:
            yield "/".join(path), parse_pattern(".".join(name))
            return
        below: dict[str, list[tuple[Name, Name, Found]]] = defaultdict(list)
        for member in members:
            below[member[2].name[at]].append(member)
        after = _number(own, at + 1)
        rest = [{(x[2].name[:at], x[2].name[at + 1 :]) for x in found} for found in below.values()]
        whole = all(self.numbers[x[2].name[:at]] == set(below) for x in members)
        if whole and set(map(int, below)) == set(range(len(below))) and all(one == rest[0] for one in rest):
            index = self._indices.setdefault(name[:at], _index(len(self._indices)))
            yield from self._write([_at(x, at, f"{{{index}}}") for x in next(iter(below.values()))], after)
            return
        for number, found in below.items():
            yield from self._write([_at(x, at, number) for x in found], after)


def _number(own: Found, start: int) -> int | None:
    """Return the place of the next number of a name that the path has as well."""
    return next((k for k in range(start, len(own.name)) if own.name[k].isdecimal() and _ends(own, k)), None)


def _ends(own: Found, at: int) -> bool:
    place = own.places[at]
    return place is not None and own.path[place].endswith(own.name[at])


def _index(k: int) -> str:
    return "ijklmnpq"[k] if k < 8 else f"i{k}"


def _at(member: tuple[Name, Name, Found], at: int, text: str) -> tuple[Name, Name, Found]:
    """Write a number of a name, and that of the path."""
    path, name, own = member
    place = own.places[at]
    assert place is not None
    stem = _LAST_NUMBER.sub("", path[place])
    path = (*path[:place], f"{escape_path(stem)}{text}", *path[place + 1 :])
    return path, (*name[:at], text, *name[at + 1 :]), own
