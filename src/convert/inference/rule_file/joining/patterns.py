"""Join the layers of one structure that differ in numbers: these become indices, or are listed."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from convert.core.path_pattern import escape_path, parse_pattern
from convert.inference.derivation import Grade
from convert.inference.rule_file.layers.layout import Layout
from convert.inference.rule_file.layers.rule import LayerRule, Source
from convert.inference.rule_file.leaf_sums import common_path, escaped, terms_of

NUMBER = re.compile(r"[0-9]+")
INDICES = "ijklmnpqstuv"
Numbers = tuple[int, ...]


def part_at(start: int, sizes: Sequence[int]) -> int:
    """Return which of the parts of an axis begins there.

    >>> part_at(36, (36, 5))
    1
    """
    return list(itertools.accumulate(sizes, initial=0)).index(start)


@dataclass(frozen=True)
class Taken:
    """The part of an axis that a rule takes.

    Attributes:
        axis: of the leaf.
        made_of: of each of its parts, the sizes of the axes that it is made of.
        at: which of them.
    """

    axis: int
    made_of: tuple[tuple[int, ...], ...]
    at: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each part."""
        return tuple(map(prod, self.made_of))


@dataclass(frozen=True)
class PatternRule:
    """One rule for layers of the same structure.

    Attributes:
        layer: the first of them, for all that they have in common.
        module: pattern of the target's modules.
        sources: key of the rule -> pattern of the leaves.
        stacked: index -> axis of the leaves that stacks it.
        index_from: index of the target -> the two indices of the source that are its digits, the slower first.
        split: axis of the leaves whose elements go to different modules; None: there is none.
        at: the element of `split` that this rule's modules have, until all are joined; then -1.
        layers: how many layers the rule describes.
        leaves: names of all its leaves.
        parts: (axis of the leaves, sizes): the modules have parts of this axis, one after the other.
        taken: the parts of axes that the rule takes, where other rules have the rest.
        grades: of the layers; empty where all have that of `layer`.
    """

    layer: LayerRule
    module: str
    sources: tuple[tuple[str, str], ...]
    stacked: tuple[tuple[str, int], ...] = ()
    index_from: tuple[tuple[str, tuple[str, str]], ...] = ()
    split: int | None = None
    at: int = -1
    layers: int = 1
    leaves: frozenset[str] = frozenset()
    parts: tuple[int, tuple[int, ...]] | None = None
    taken: tuple[Taken, ...] = ()
    grades: frozenset[Grade] = frozenset()

    @property
    def grade(self) -> Grade:
        """The weakest grade of its layers."""
        return self.layer.grade


def indexed(path: str) -> str:
    """Return the pattern of the paths that differ from this one in numbers."""
    letters = iter(INDICES)
    return NUMBER.sub(lambda found: f"{{{next(letters, 'x' + found[0])}}}", escape_path(path))


class IndexLetters:
    """Letters of indices. One letter is one index of the target's names, with one number of values."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], str] = {}

    def named(self, module: str, position: int, count: int) -> str:
        """Return the letter of the number at a position in the name of a module that has so many values."""
        before = NUMBER.split(module)[: position + 1]
        free = [letter for letter in INDICES if letter not in self._known.values()]
        shared = next((letter for (_, n), letter in self._known.items() if n == count), INDICES[0])
        return self._known.setdefault(("#".join(before), count), free[0] if free else shared)

    def of_names(self, names: str, count: int, module: str) -> str:
        """Return the letter of an index with names, which is none of the pattern of a module."""
        found = self.named(f"names {names}", 0, count)
        own = re.findall(r"\{([a-z])[+:}]", module)
        return found if found not in own else next(letter for letter in INDICES if letter not in own)


def summed(layer: LayerRule, source: Source) -> tuple[int, ...]:
    """Return the axes of a leaf that a product sums over; the rule of a parameter says nothing of them."""
    return () if layer.kind_name == "parameter" else source.contracted


def structure(layer: LayerRule) -> Hashable:
    """Return what the layers of one rule have in common: all but numbers. One that is open leaves the others their rule."""
    sources = tuple(
        (key, tuple((NUMBER.sub("#", s.leaf), loose(s.layout), summed(layer, s)) for s in of))
        for key, of in layer.sources
    )
    return (
        layer.kind_name,
        NUMBER.sub("#", layer.module),
        sources,
        layer.names,
        layer.keys,
        layer.target_keys,
        layer.geometry,
        layer.computed_from is None,
        layer.also,
        layer.grade is Grade.OPEN,
    )


def loose(layout: Layout) -> Layout:
    return replace(layout, fixed=tuple((axis, -1) for axis, _ in layout.fixed))


def _numbers(text: str) -> Numbers:
    return tuple(int(number) for number in NUMBER.findall(text))


def leaves_of(layer: LayerRule) -> Sequence[str]:
    """Return the leaves that a layer is made of."""
    return layer.leaves or [leaf for source in _each_source(layer) for leaf in terms_of(source.leaf)]


def _each_source(layer: LayerRule) -> list[Source]:
    return [source for _, of in layer.sources for source in of]


def indexed_rules(
    members: list[LayerRule], letters: IndexLetters, leaves: Collection[str]
) -> Iterator[PatternRule | LayerRule]:
    """Yield rules with indices for layers that differ in numbers only, as few as explain all numbers; and the layers that no rule explains."""
    rule = _narrow(members, letters, leaves)
    if rule is not None:
        yield rule
        return
    for slot in _slots(members[0]):
        by_value: dict[int, list[LayerRule]] = defaultdict(list)
        for member in members:
            by_value[_value(member, slot)].append(member)
        found = [_narrow(group, letters, leaves) for group in by_value.values()]
        if 1 < len(by_value) < len(members) and all(rule is not None for rule in found):
            yield from (rule for rule in found if rule is not None)
            return
    for member in members:
        yield _with_indices([member], letters) or member


def _narrow(members: Sequence[LayerRule], letters: IndexLetters, leaves: Collection[str]) -> PatternRule | None:
    """Return the rule of layers whose numbers are those of indices; numbers are listed where an index would match other leaves.

    None: the numbers are those of no indices, or cannot be listed (those of fused leaves: the list would be parts of the tensor).
    """
    rule = _with_indices(members, letters)
    if rule is None or not _matches_others(rule, leaves):
        return rule
    positions = range(len(_numbers(members[0].module)))
    for listed in (*((k,) for k in positions), tuple(positions)):
        narrow = _with_indices(members, letters, listed)
        if narrow is not None and not _matches_others(narrow, leaves):
            return narrow
    return rule if len(members) == 1 else None


def _matches_others(rule: PatternRule, leaves: Collection[str]) -> bool:
    """Whether a pattern of a rule matches leaves that the rule does not describe."""
    below = "/**" if rule.layer.leaves else ""  # a rule for the leaves below a path
    patterns = [parse_pattern(one + below) for _, text in rule.sources for one in terms_of(text) if "{" in one]
    return any(pattern.match(leaf) for pattern in patterns for leaf in leaves if leaf not in rule.leaves)


Slot = tuple[str, int, int]  # "leaf" or "axis" or "module", source, position


def _slots(layer: LayerRule) -> Iterator[Slot]:
    """Yield the places of numbers: those of fixed axes first, then those of names."""
    sources = _each_source(layer)
    for k, source in enumerate(sources):
        yield from (("axis", k, position) for position in range(len(source.layout.fixed)))
    for k, source in enumerate(sources):
        yield from (("leaf", k, position) for position in range(len(_numbers(source.leaf))))
    yield from (("module", 0, position) for position in range(len(_numbers(layer.module))))


def _value(layer: LayerRule, slot: Slot) -> int:
    what, k, position = slot
    if what == "module":
        return _numbers(layer.module)[position]
    source = _each_source(layer)[k]
    return source.layout.fixed[position][1] if what == "axis" else _numbers(source.leaf)[position]


def _with_indices(
    members: Sequence[LayerRule], letters: IndexLetters, listed: Collection[int] = ()
) -> PatternRule | None:
    """Return the rule of layers whose numbers are those of indices; None if they are not.

    Args:
        listed: positions of numbers in the module's name that are listed, and no index.
    """
    first = members[0]
    columns = [
        tuple(_value(member, ("module", 0, k)) for member in members) for k in range(len(_numbers(first.module)))
    ]
    varying: dict[Numbers, int] = {}
    for k, column in enumerate(columns):
        if len(set(column)) > 1:
            varying.setdefault(column, k)
    if len(members) != prod(len(set(column)) for column in varying):
        return None
    along = {tuple(_value(member, slot) for member in members) for slot in _slots(first) if slot[0] == "axis"}
    counted = {k for k, column in enumerate(columns) if tuple(n - min(column) for n in column) in along}
    whole = (_whole_keys(first.module) | counted) - set(listed)  # `q1` and `q2` that are the elements of an axis
    ranges = {column: k for column, k in varying.items() if k in whole and _is_range(column, min(column))}
    indices = {letters.named(first.module, k, len(set(column))): column for column, k in ranges.items()}
    indices |= {",".join(map(str, sorted(set(column)))): column for column in varying if column not in ranges}
    digits, index_from = _digits(members, indices, letters)
    stacked: dict[str, int] = {}
    split: tuple[int, int] | None = None
    for slot in _slots(first):
        if slot[0] != "axis":
            continue
        layout = _each_source(first)[slot[1]].layout
        axis, at = layout.fixed[slot[2]]
        text = _written(tuple(_value(member, slot) for member in members), indices | digits)
        if text is None or "+" in text or "," in text or (text.startswith("{") and layout.is_opened(axis)):
            return None
        if not text.startswith("{"):
            of_bias = slot[1] >= len(first.main)  # it lacks the axes of the inputs, so that its axis has another number
            other = split is not None and (split[1] != at or (split[0] != axis and not of_bias))
            if other and len(members) > 1:
                return None
            split = split or (axis, at)
        elif stacked.setdefault(text[1:-1], axis) != axis:
            return None
    sources = []
    at = 0
    for key, of in first.sources:
        texts = []
        for source in of:
            slots = [("leaf", at, position) for position in range(len(_numbers(source.leaf)))]
            values = [_written(tuple(_value(member, slot) for member in members), indices | digits) for slot in slots]
            if not _can_be_written(values, indices):
                return None
            texts.append(_filled(escaped(source.leaf), values))
            at += 1
        written = [text for text in texts if text is not None]
        joined = common_path(written) or common_path(written, nested=True) if None not in texts else None
        last = "" if joined is None else joined[joined.rfind("{") :].partition("}")[0]
        if joined is None or (len(of) > 1 and "," in last and last in str(texts[0])):
            return None  # the last alternatives of a fused target are its parts, and not a list of numbers
        sources.append((key, joined))
    numbers = [_written(column, indices) for column in columns]
    if any(text is not None and "," in text and numbers.count(text) > 1 for text in numbers):
        return None  # two lists would be combined
    module = _filled(first.module, numbers)
    assert module is not None, "each number of the module is constant or an index"
    weakest = max((member.grade for member in members), key=list(Grade).index)
    return PatternRule(
        replace(first, grade=weakest),
        module,
        tuple(sources),
        tuple(stacked.items()),
        tuple(index_from.items()),
        None if split is None else split[0],
        -1 if split is None else split[1],
        len(members),
        frozenset(leaf for member in members for leaf in leaves_of(member)),
        grades=frozenset(member.grade for member in members),
    )


def _whole_keys(module: str) -> set[int]:
    """Return which numbers of a name are keys of their own, as those of layers are: ``layers.0``, not ``norm1``."""
    found, at = set(), 0
    for key in module.split("."):
        if key.isdecimal():
            found.add(at)
        at += len(_numbers(key))
    return found


def _can_be_written(texts: Sequence[str | None], indices: Mapping[str, Numbers]) -> bool:
    """Whether each index in the path of a leaf has one offset, and is listed once: two lists would be combined."""
    found = {text for text in texts if text is not None and text.startswith("{")}
    offsets = [text.strip("{}").partition("+")[0] for text in found if "," not in text]
    lists = sum(text is not None and "," in text for text in texts)
    return len(set(offsets)) == len(offsets) and lists <= sum("," in name for name in indices)


def _is_range(values: Sequence[int], start: int = 0) -> bool:
    found = sorted(set(values))
    return found == list(range(start, start + len(found)))


def _digits(
    members: Sequence[LayerRule], indices: Mapping[str, Numbers], letters: IndexLetters
) -> tuple[dict[str, Numbers], dict[str, tuple[str, str]]]:
    """Return the digits of an index that the source writes as two numbers, the slower first, and which index has which digits."""
    slots = dict.fromkeys(
        tuple(_value(member, slot) for member in members) for slot in _slots(members[0]) if slot[0] != "module"
    )
    unknown = [column for column in slots if _written(column, indices) is None and _is_range(column)]
    for name, column in indices.items():
        if "," in name:
            continue
        for slow, fast in itertools.permutations(unknown, 2):
            count = max(fast) + 1
            if all(n == a * count + b for n, a, b in zip(column, slow, fast, strict=True)):
                one, other = (letters.named(f"digit {k} of {name}", 0, len(set(c))) for k, c in enumerate((slow, fast)))
                return {one: slow, other: fast}, {name: (one, other)}
    return {}, {}


def _written(values: Numbers, indices: Mapping[str, Numbers]) -> str | None:
    """Return numbers as an index with its offset, or as the number that all layers have; None if they are neither."""
    if len(set(values)) == 1:
        return str(values[0])
    for name, index in indices.items():
        first = min(index)
        offsets = {value - (n - first) for value, n in zip(values, index, strict=True)}
        if "," in name:  # numbers within a word, or with gaps, are listed
            of = dict(zip(index, values, strict=True))
            if all(of[n] == value for n, value in zip(index, values, strict=True)) and len(set(of.values())) == len(of):
                return f"{{{','.join(str(of[n]) for n in sorted(of))}}}"
        elif len(offsets) == 1 and (offset := offsets.pop()) >= 0:
            return f"{{{name}+{offset}}}" if offset else f"{{{name}}}"
    return None


def _filled(text: str, numbers: Sequence[str | None]) -> str | None:
    if None in numbers:
        return None
    found = iter(numbers)
    return NUMBER.sub(lambda number: _as_wide(str(next(found)), number[0]), text)


def _as_wide(written: str, number: str) -> str:
    """Return numbers with as many digits as one that has leading zeros; an index reads any."""
    if not number.startswith("0") or re.search("[a-z]", written):
        return written
    return NUMBER.sub(lambda found: found[0].zfill(len(number)), written)
