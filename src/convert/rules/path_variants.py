"""Resolve path variants: one model comes in trees of several forms, and its rules are written for one of them.

A rule file says ``path_variants: {"layer_{i}": [...]}``: where a path in its rules has the part ``layer_{i}``, a tree may
have another path, with layers stacked on an axis. `resolve_path_variants` finds the form of a tree and rewrites the rules
for it, so that matching, sizes, steps and checks handle only one form.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
        positions: which values of the last index the path has; a path with one of them need not have the index. Empty: all.
    """

    path: str
    stacked: Mapping[str, int]
    order: tuple[str, ...] = ()
    period: int | str | None = None
    positions: tuple[int, ...] = ()

    @property
    def indices(self) -> set[str]:
        """Indices of the path and of stacked axes."""
        return set(parse_pattern(self.path).indices) | set(self.stacked)

    @property
    def left_out(self) -> set[str]:
        """Index that the path need not have, as it has one value."""
        return set(self.order[-1:]) - self.indices if len(self.positions) == 1 and len(self.order) > 1 else set()


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


def each_combination(rules: Sequence[Rule], path_variants: Sequence[PathVariants]) -> Iterator[tuple[Rule, ...]]:
    """Yield the rules for every combination of variants, first the one that they are written in."""
    yield from _combinations(rules, path_variants, [variants.variants for variants in path_variants])


def of_layout(
    rules: Sequence[Rule], path_variants: Sequence[PathVariants], paths: Collection[str]
) -> Iterator[tuple[Rule, ...]]:
    """Yield the rules for the variants whose first path is one of `paths`; the other parts of paths stay as written.

    A tree of several paths comes before that of its first one alone: where no layer is left for the others, both are the same.
    """
    named = [[one for one in variants.variants if one[0].path in paths] for variants in path_variants]
    listed = [
        sorted(found or variants.variants[:1], key=lambda one: -len(one))
        for found, variants in zip(named, path_variants, strict=True)
    ]
    yield from _combinations(rules, path_variants, listed)


def _combinations(
    rules: Sequence[Rule], path_variants: Sequence[PathVariants], listed: Sequence[Sequence[tuple[VariantPath, ...]]]
) -> Iterator[tuple[Rule, ...]]:
    affected = [any(_is_affected(rule, variants) for variants in path_variants) for rule in rules]
    made: dict[tuple[int, int, int], tuple[Rule, ...]] = {}  # by the rule's identity: combinations share most of them

    def rewrite_part(rule: Rule, part: int, choice: int) -> tuple[Rule, ...]:
        key = (id(rule), part, choice)
        if key not in made:
            made[key] = tuple(_rewrite_part(rule, path_variants[part], listed[part][choice]))
        return made[key]

    for combination in itertools.product(*(range(len(variants)) for variants in listed)):
        found: list[Rule] = []
        for rule, changes in zip(rules, affected, strict=True):
            forms: Sequence[Rule] = (rule,)
            for part, choice in enumerate(combination if changes else ()):
                forms = [form for one in forms for form in rewrite_part(one, part, choice)]
            found += forms
        yield tuple(found)


def independent_groups(rules: Sequence[Rule], path_variants: Sequence[PathVariants]) -> list[list[PathVariants]]:
    """Group the variants so that no rule has parts of two groups: each group can then be resolved separately."""
    groups: list[list[PathVariants]] = []
    for one in path_variants:
        near = [group for group in groups if any(_occur_together(rules, one, other) for other in group)]
        groups = [group for group in groups if group not in near] + [[*itertools.chain(*near), one]]
    return groups


def _occur_together(rules: Sequence[Rule], a: PathVariants, b: PathVariants) -> bool:
    return any(all(any(has_part(p, x.written) for p in _patterns(rule).values()) for x in (a, b)) for rule in rules)


def _patterns(rule: Rule) -> dict[str, Pattern]:
    return {**rule.sources, **({"absent_if": rule.absent_if} if rule.absent_if else {})}


def _is_affected(rule: Rule, variants: PathVariants) -> bool:
    return rule.kind.drop_reason is None and any(
        has_part(pattern, variants.written) for pattern in _patterns(rule).values()
    )


def _rewrite_part(rule: Rule, variants: PathVariants, paths: tuple[VariantPath, ...]) -> Iterator[Rule]:
    """Yield the rule once for each path of the chosen variant."""
    if not _is_affected(rule, variants):
        yield rule
        return
    patterns = _patterns(rule)
    for path in paths:
        if path.path == variants.written:
            yield rule
            continue
        sources = {role: _replace_part(pattern, variants.written, path.path) for role, pattern in patterns.items()}
        absent_if = sources.pop("absent_if", None)
        index_from = dict(rule.index_from)
        if variants.index and (path.order or path.positions):
            assert not isinstance(path.period, str), "periods of a valid rule file are numbers"
            order = path.order or (variants.index,)
            index_from[variants.index] = Numbering(order, period=path.period, positions=path.positions)
        stacked = {**rule.stacked, **path.stacked}
        yield replace(rule, sources=sources, absent_if=absent_if, stacked=stacked, index_from=index_from)


def has_part(pattern: Pattern, part: str) -> bool:
    """Whether a path has this part of one: whole keys."""
    return f"/{part}/" in f"/{pattern.text}/"


def _replace_part(pattern: Pattern, part: str, text: str) -> Pattern:
    if not has_part(pattern, part):
        return pattern
    return parse_pattern(f"/{pattern.text}/".replace(f"/{part}/", f"/{text}/", 1)[1:-1])


Find = Callable[[Pattern], list[tuple[str, Match]]]


def resolve_path_variants(
    rules: Sequence[Rule], path_variants: Sequence[PathVariants], specs: Mapping[str, TensorSpec], find: Find
) -> tuple[Rule, ...]:
    """Rewrite the rules for the variants in which they match most leaves, and fill in their numberings.

    Args:
        rules: as written.
        path_variants: of the rule file.
        specs: shape and dtype of the leaves.
        find: returns the leaves that a pattern matches, and what it binds in each.
    """
    resolved: Sequence[Rule] = rules
    for group in independent_groups(rules, path_variants):
        counted = [(len(_matched(candidate, find)), candidate) for candidate in each_combination(resolved, group)]
        resolved = max(counted, key=lambda pair: pair[0])[1]  # the first of equally good ones
    return _number_layers(resolved, specs, find)


def _matched(rules: Sequence[Rule], find: Find) -> set[str]:
    return {
        name
        for rule in rules
        if rule.kind.drop_reason is None
        for p in rule.sources.values()
        for name, match in find(p)
        if not rule.index_from or rule.holds(dict(match.indices))
    }


def _number_layers(rules: Sequence[Rule], specs: Mapping[str, TensorSpec], find: Find) -> tuple[Rule, ...]:
    """Fill in how many values the indices of each numbering have in the tree, and how many layers come before."""
    counts = _index_counts(rules, specs, find)
    before: dict[tuple[int, int, str, str], dict[tuple[str, ...], int]] = {}
    return tuple(
        replace(rule, index_from={i: _filled(i, n, rule, counts, before) for i, n in rule.index_from.items()})
        if rule.index_from
        else rule
        for rule in rules
    )


def _index_counts(rules: Sequence[Rule], specs: Mapping[str, TensorSpec], find: Find) -> dict[str, int]:
    """Return how many values each index has that a numbering counts by."""
    counts: dict[str, int] = {}
    for rule in rules:
        for pattern in rule.sources.values() if rule.index_from else ():
            for name, match in find(pattern):
                shape = specs[name].shape
                stacked = {index: shape[a] - 1 for index, a in rule.stacked.items() if 0 <= a < len(shape)}
                for index, value in {**dict(match.indices), **stacked}.items():
                    counts[index] = max(counts.get(index, 0), value + 1)
    pieces = (piece for rule in rules for p in rule.sources.values() for piece in p.pieces)
    counts |= {piece.name: len(piece.words) for piece in pieces if isinstance(piece, Index) and piece.words}
    # The last of the alternating layers may be missing from a tree; its other layers keep their numbers.
    return counts | {
        n.order[-1]: n.period
        for rule in rules
        for n in rule.index_from.values()
        if n.period is not None and len(n.order) > 1
    }


def _filled(
    index: str,
    numbering: Numbering,
    rule: Rule,
    counts: Mapping[str, int],
    before: dict[tuple[int, int, str, str], dict[tuple[str, ...], int]],
) -> Numbering:
    """Fill in a numbering. A rule that was rewritten for several paths occurs several times; each continues the count.

    Paths with other positions of the same units count from the same layer on.
    """
    earlier = before.setdefault((rule.at.line, rule.at.column, rule.at.file, index), {})
    offset = sum(size for order, size in earlier.items() if not numbering.positions or order != numbering.order)
    size = 1
    for name in numbering.order:
        size *= counts.get(name, 0)
    earlier[numbering.order] = size
    return replace(numbering, counts=tuple(counts.get(name, 1) for name in numbering.order[1:]), offset=offset)
