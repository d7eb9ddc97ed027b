"""Findings about layers: numbers that no leaf has, positions beyond a unit, and layers of no type."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from convert.core.findings import Finding
from convert.core.yaml_nodes import Position
from convert.layers import Numbering, Rule
from convert.layers.base import Matched
from convert.planning.matching.facts import MatchFacts
from convert.rules.file import LayerTypes

INCOMPLETE = "the stack of layers is truncated, or the checkpoint is incomplete"

LISTED = 8  # missing indices that one finding names


def index_gaps(facts: MatchFacts) -> Iterator[Finding]:
    for name, present in facts.domain.items():
        first = next(found.rule for found in facts.matched if found.indices and name in found.rule.path.indices)
        gaps = list(itertools.islice((k for k in range(max(present) + 1) if k not in present), LISTED + 1))
        if gaps:
            yield Finding(
                "layers-missing",
                f"{{{name}}} runs from 0 to {max(present)} in the tree, without {_list(gaps)}",
                rule=first.at.line_only,
                path=facts.full(first.path),
                fix="the checkpoint is incomplete, or the pattern matches something else",
            )


def _list(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:LISTED]))}{' ...' if len(numbers) > LISTED else ''}"


def beyond_period(facts: MatchFacts) -> Iterator[Finding]:
    """Find leaves whose position in a unit of layers exceeds the declared period."""
    for found in facts.matched:
        for name, numbering in found.rule.index_from.items():
            last = numbering.order[-1]
            if last == name:
                continue  # counted by itself
            if numbering.positions and last in found.rule.stacked:
                yield from _beyond_positions(facts, found, numbering)
            for role, of_role in found.leaves.items():
                indices = found.rule.sources[role].indices
                seen = [dict(zip(indices, values, strict=True)).get(last, 0) for values, _ in of_role]
                if numbering.period is not None and max(seen, default=0) >= numbering.period:
                    yield Finding(
                        "layers-missing",
                        f"a unit has {numbering.period} layers, so {{{last}}} of {{{name}}} runs from 0 to {numbering.period - 1}; "
                        f"the tree has {{{last}}} = {max(seen)}",
                        rule=found.rule.at.line_only,
                        path=facts.full(found.rule.sources[role]),
                        fix="the checkpoint is of another model",
                    )


def _beyond_positions(facts: MatchFacts, found: Matched, numbering: Numbering) -> Iterator[Finding]:
    """Find leaves that stack another number of layers than the path has positions in a unit."""
    last, expected = numbering.order[-1], len(numbering.positions)
    axis = found.rule.stacked[last]
    for of_role in found.leaves.values():
        for leaf in of_role.values():
            spec = facts.leaves[leaf].spec
            if axis < len(spec.shape) and spec.shape[axis] != expected:
                yield Finding(
                    "layers-missing",
                    f"axis {axis} of this leaf stacks {{{last}}}",
                    rule=found.rule.at.line_only,
                    path=leaf,
                    expected=f"{expected} layers of each unit of {numbering.period}",
                    got=f"{spec.shape[axis]}: {spec}",
                    fix="the checkpoint is of another model",
                )


def numbered_gaps(facts: MatchFacts) -> Iterator[Finding]:
    for name, numbers in _every_number(facts).items():
        gaps = [k for k in range(max(numbers) + 1) if k not in numbers][:LISTED]
        if gaps:
            rule = next(given.matched.rule for given in facts.numbers if given.name == name)
            numbering = rule.index_from[name]
            units = ""
            if numbering.period:
                units = f" (units of {numbering.period}: {{{numbering.order[-1]}}} from 0 to {numbering.period - 1})"
            yield Finding(
                "layers-missing",
                f"{{{name}}} runs from 0 to {max(numbers)} in the tree, without {', '.join(map(str, gaps))}{units}",
                rule=rule.at.line_only,
                path=facts.full(rule.path),
                fix=INCOMPLETE,
            )


def _every_number(facts: MatchFacts) -> dict[str, set[int]]:
    """Collect the values of each index that is numbered through `index_from`."""
    every: dict[str, set[int]] = defaultdict(set)
    for given in facts.numbers:
        every[given.name] |= given.numbers
    return every


def missing_numbers(facts: MatchFacts) -> Iterator[Finding]:
    """Find rules whose leaves lack layers that leaves of other rules have; rules that lack the same are one finding."""
    every = _every_number(facts)
    of_rule: dict[tuple[Position, str, str], set[int]] = defaultdict(set)  # over the path variants of one rule
    of_others: dict[tuple[Position, str, str], set[int]] = {}  # layers at positions that the rule does not have
    for given in facts.numbers:
        key, numbering = (given.matched.rule.at, given.name, given.role), given.matched.rule.index_from[given.name]
        of_rule[key] |= given.numbers
        others = {k for k in every[given.name] if not numbering.holds(k)}
        of_others[key] = of_others.get(key, others) & others
    lacking: dict[tuple[str, tuple[int, ...]], list[tuple[Rule, str]]] = defaultdict(list)
    for given in facts.numbers:
        rule, name = given.matched.rule, given.name
        key = (rule.at, name, given.role)
        index, layers = facts.of_type[rule.layer_type] if rule.layer_type else ("", set())
        wanted = every[name] & layers if name == index else every[name]
        missing = tuple(sorted(wanted - of_others[key] - of_rule.pop(key, wanted)))
        if missing and not rule.optional and (rule.absent_if is None or len(missing) < len(every[name])):
            lacking[name, missing].append((rule, facts.full(rule.sources[given.role])))
    for (name, missing), rules in lacking.items():
        rule, path = rules[0]
        more = f" ({len(rules) - 1} more rules lack them, too)" if len(rules) > 1 else ""
        yield Finding(
            "layers-missing",
            f"no leaf for {{{name}}} = {_list(missing)}, which other leaves have{more}",
            rule=rule.at.line_only,
            path=path,
            fix=INCOMPLETE,
        )


def layers_without_type(facts: MatchFacts) -> Iterator[Finding]:
    """Find layers that have the leaves of no type, or of two."""
    for name, entry in facts.rules.layer_types.items():
        yield from _untyped(facts, entry, facts.types[name])


def _untyped(facts: MatchFacts, entry: LayerTypes, types: Mapping[int, set[str]]) -> Iterator[Finding]:
    known = " or ".join(f"{facts.full(pattern)} ({word})" for word, pattern in entry.leaves.items())
    for k in range(facts.counts.get(entry.index, 0)):
        words = sorted(types.get(k, ()))
        if len(words) != 1:
            yield Finding(
                "layer-type-unknown",
                f"layer {{{entry.index}}} = {k}",
                rule=entry.at.line_only,
                expected=known,
                got=f"leaves of {' and of '.join(words)}" if words else "neither",
                fix="the checkpoint is incomplete, or of another model",
            )
