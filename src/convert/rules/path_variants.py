"""Where the leaves of a layer lie: one model comes in several layouts, and a rule is written for one of them.

A rule file says ``path_variants: {"layer_{i}": [...]}``: where a path of its rules begins or goes on with ``layer_{i}``, the tree may
have another text in its place, with layers stacked on an axis. `resolve_path_variants` looks which layout a tree has and rewrites the
rules for it, so that matching, sizes, steps and checks know of one layout only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from convert.core.path_pattern import Index, Match, Pattern, parse_pattern
from convert.core.tensor_spec import TensorSpec
from convert.core.yaml_nodes import Position
from convert.layers.base import Rule
from convert.layers.target import Numbering


@dataclass(frozen=True)
class VariantPath:
    """A path that may stand in the tree instead of the one in the rules.

    Attributes:
        path: the path in the tree.
        stacked: index -> axis of the leaf that stacks it.
        order: the indices that number the layers, the slowest first; empty if the path has the index itself.
        period: number of values of the last index in `order`, or the name of a fact that could not be resolved to one;
            None: as many as the tree has.
    """

    path: str
    stacked: Mapping[str, int]
    order: tuple[str, ...] = ()
    period: int | str | None = None

    @property
    def indices(self) -> set[str]:
        """Indices of the path and of stacked axes."""
        return set(parse_pattern(self.path).indices) | set(self.stacked)


@dataclass(frozen=True)
class PathVariants:
    """The ways in which a tree may write a part of a path.

    Attributes:
        written: the part as the rules write it.
        variants: each a sequence of paths whose layers are numbered one after the other; the first is the part as written.
        at: where it is declared.
    """

    written: str
    variants: tuple[tuple[VariantPath, ...], ...]
    at: Position

    @property
    def indices(self) -> tuple[str, ...]:
        """Indices of the part as written: none, or the one that numbers the layers."""
        return parse_pattern(self.written).indices

    @property
    def index(self) -> str | None:
        """The index that numbers the layers; None if the part has none."""
        return next(iter(self.indices), None)


def each_combination(rules: Sequence[Rule], places: Sequence[PathVariants]) -> Iterator[tuple[Rule, ...]]:
    """The rules in every layout that a tree may have, the one that they are written in first."""
    moves = [any(_moves(rule, p) for p in places) for rule in rules]  # most are as they are in all of them
    for layout in itertools.product(*(p.variants for p in places)):
        chosen = list(zip(places, layout, strict=True))
        yield tuple(itertools.chain(*(_rewrite(r, chosen) if m else (r,) for r, m in zip(rules, moves, strict=True))))


def independent_groups(rules: Sequence[Rule], places: Sequence[PathVariants]) -> list[list[PathVariants]]:
    """The places in groups: no path of a rule holds places of two groups, so each group is settled on its own."""
    groups: list[list[PathVariants]] = []
    for one in places:
        near = [group for group in groups if any(_together(rules, one, other) for other in group)]
        groups = [group for group in groups if group not in near] + [[*itertools.chain(*near), one]]
    return groups


def _together(rules: Sequence[Rule], a: PathVariants, b: PathVariants) -> bool:
    return any(all(any(_holds(p, x.written) for p in _patterns(rule).values()) for x in (a, b)) for rule in rules)


def _patterns(rule: Rule) -> dict[str, Pattern]:
    return {**rule.sources, **({"absent_if": rule.absent_if} if rule.absent_if else {})}


def _rewrite(rule: Rule, chosen: list[tuple[PathVariants, tuple[VariantPath, ...]]]) -> list[Rule]:
    variants = [rule]
    for places, layout in chosen:
        variants = [moved for variant in variants for moved in _moved(variant, places, layout)]
    return variants


def _moves(rule: Rule, places: PathVariants) -> bool:
    return rule.word != "drop" and any(_holds(pattern, places.written) for pattern in _patterns(rule).values())


def _moved(rule: Rule, places: PathVariants, layout: tuple[VariantPath, ...]) -> Iterator[Rule]:
    if not _moves(rule, places):
        yield rule
        return
    patterns = _patterns(rule)
    for place in layout:
        if place.path == places.written:
            yield rule
            continue
        moved = {role: _put(pattern, places.written, place.path) for role, pattern in patterns.items()}
        absent_if = moved.pop("absent_if", None)
        counted = (
            {places.index: Numbering(place.order, period=_number(place.period))} if places.index and place.order else {}
        )
        index_from = {**rule.index_from, **counted}
        stacked = {**rule.stacked, **place.stacked}
        yield replace(rule, sources=moved, absent_if=absent_if, stacked=stacked, index_from=index_from)


def _number(period: int | str | None) -> int | None:
    assert not isinstance(period, str), "a rule file's periods are numbers once it is read"
    return period


def _holds(pattern: Pattern, written: str) -> bool:
    return f"/{written}/" in f"/{pattern.text}/"


def _put(pattern: Pattern, written: str, text: str) -> Pattern:
    if not _holds(pattern, written):
        return pattern
    return parse_pattern(f"/{pattern.text}/".replace(f"/{written}/", f"/{text}/", 1)[1:-1])


Find = Callable[[Pattern], list[tuple[str, Match]]]


def resolve_path_variants(
    rules: Sequence[Rule], places: Sequence[PathVariants], specs: Mapping[str, TensorSpec], find: Find
) -> tuple[Rule, ...]:
    """The rules as the tree lies: in the layout in which they find most leaves, their numberings filled in.

    Args:
        specs: the leaves.
        find: the leaves that a pattern matches, and what it binds in each.
    """
    found: Sequence[Rule] = rules
    for group in independent_groups(rules, places):
        counted = [(len(_taken(candidate, find)), candidate) for candidate in each_combination(found, group)]
        found = max(counted, key=lambda pair: pair[0])[1]  # the first of those that find as many
    return _count(found, specs, find)


def _taken(rules: Sequence[Rule], find: Find) -> set[str]:
    return {name for rule in rules if rule.word != "drop" for p in rule.sources.values() for name, _ in find(p)}


def _count(rules: Sequence[Rule], specs: Mapping[str, TensorSpec], find: Find) -> tuple[Rule, ...]:
    """Fills in how many values the indices of a numbering have in the tree, and what comes before."""
    spelt = {
        i.name: len(i.words) for rule in rules for p in rule.sources.values() for i in p.pieces if isinstance(i, Index)
    }
    most: dict[str, int] = {}  # name of an index -> how many values it has
    for rule in rules:
        if not rule.index_from:
            continue
        for pattern in rule.sources.values():
            for name, match in find(pattern):
                shape = specs[name].shape
                stacked = {index: shape[a] - 1 for index, a in rule.stacked.items() if 0 <= a < len(shape)}
                for index, value in {**dict(match.indices), **stacked}.items():
                    most[index] = max(most.get(index, 0), value + 1)
    most |= {name: words for name, words in spelt.items() if words}
    # A tree from which the last of the alternating layers is missing shows fewer: its layers must not be counted anew.
    most |= {n.order[-1]: n.period for rule in rules for n in rule.index_from.values() if n.period is not None}
    before: dict[tuple[int, int, str, str], dict[tuple[str, ...], int]] = {}
    return tuple(
        replace(rule, index_from={i: _filled(i, n, rule, most, before) for i, n in rule.index_from.items()})
        if rule.index_from
        else rule
        for rule in rules
    )


def _filled(
    index: str,
    numbering: Numbering,
    rule: Rule,
    most: Mapping[str, int],
    before: dict[tuple[int, int, str, str], dict[tuple[str, ...], int]],
) -> Numbering:
    """A rule that was rewritten for several places comes several times: the later count on where the earlier end."""
    earlier = before.setdefault((rule.at.line, rule.at.column, rule.at.file, index), {})
    offset = sum(earlier.values())
    size = 1
    for name in numbering.order:
        size *= most.get(name, 0)
    earlier[numbering.order] = size
    return replace(numbering, counts=tuple(most.get(name, 1) for name in numbering.order[1:]), offset=offset)
