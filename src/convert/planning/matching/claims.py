"""Findings about leaves without a rule, and leaves that two rules match."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

from convert.core.findings import Finding
from convert.core.similarity import closest_match
from convert.layers import Rule
from convert.layers.embedding.embedding import TIES
from convert.layers.shared_keys import shown_part
from convert.planning.matching.facts import MatchFacts
from convert.planning.quantised import lost_scales, scales_of_float8

TYPO = 0.85  # similarity of a path to that of a leaf above which it is taken for the same path, misspelt


def collisions(facts: MatchFacts) -> Iterator[Finding]:
    for rule, pattern, first, second in facts.collisions:
        yield Finding(
            "pattern-matches-two-leaves",
            f"{first} and {second} both match {pattern}; one of them would be lost",
            rule=rule.at.line_only,
            fix="make the pattern match one of them, or drop the other",
        )


def claimed_twice(facts: MatchFacts) -> Iterator[Finding]:
    for name in facts.claims:
        if name not in facts.rivals:
            continue
        rules = facts.rivals[name]
        if all(rule.part for rule in rules):
            continue
        yield Finding(
            "leaf-claimed-twice",
            f"two rules match this leaf ({facts.leaves[name].spec}), "
            + " and ".join(f"{rule.at.line_only} ({rule.kind_name})" for rule in rules),
            path=name,
            fix=f"remove one or narrow its path{_tied_table(rules)}",
        )


def wrong_parts(facts: MatchFacts) -> Iterator[Finding]:
    """Find leaves of which rules take parts, and not each part once."""
    for name, first in facts.claims.items():
        rules = facts.rivals.get(name, [first])
        if not first.part or not all(rule.part for rule in rules):
            continue
        spec, at = facts.leaves[name].spec, " and ".join(rule.at.line_only for rule in rules)
        made_of = {rule.at.line_only: _sums(rule) for rule in rules}
        if len(set(made_of.values())) > 1:
            yield Finding(
                "leaf-claimed-twice",
                f"rules take parts of this leaf ({spec}), and it is {', '.join(f'{axes} in {line}' for line, axes in made_of.items())}",
                path=name,
                fix="write the axes of the leaf in the same way in each",
            )
            continue
        taken = Counter(rule.part for rule in rules)
        if twice := next((part for part, count in taken.items() if count > 1), None):
            which = " and ".join(rule.at.line_only for rule in rules if rule.part == twice)
            yield Finding(
                "leaf-claimed-twice",
                f"two rules take part {shown_part(twice)} of this leaf ({spec}), {which}",
                path=name,
                fix="give each rule its own part",
            )
        every = itertools.product(*([(k, n) for k in range(1, n + 1)] for _, n in first.part))
        if lost := [part for part in every if part not in taken]:
            yield Finding(
                "leaf-would-be-lost",
                f"no rule takes part {shown_part(lost[0])} of this leaf ({spec}, {_sums(first)}); {at} {'takes' if len(rules) == 1 else 'take'} others",
                path=name,
                fix="write a rule for it",
            )


def _sums(rule: Rule) -> str:
    """Return the sums of the leaf, of which the rule takes a part."""
    groups = rule.kind.axis_groups(next(iter(rule.kind.variants), None)).values()
    return " and ".join(str(group) for group in groups if len(group.parts) > 1)


def _tied_table(rules: Sequence[Rule]) -> str:
    """Say how to write a leaf that is an embedding table and, under another name, a head."""
    table = next((rule for rule in rules if rule.kind_name == "embedding" and rule.targets), None)
    others = [rule for rule in rules if rule is not table and rule.kind_name in TIES and rule.targets]
    if table is None or not others:
        return ""
    here, there = (_in_braces(next(iter(rule.targets.values())).path.text) for rule in (table, others[0]))
    tied = there if others[0].kind_name == "linear" else f"{{{others[0].kind_name}: {there}}}"
    return (
        f". If the model has one table under two names (tied weights, flax's Embed.attend), remove {others[0].at.line_only} "
        f"and write `embedding: {{module: {here}, tied: {tied}}}` in {table.at.line_only}"
    )


def _in_braces(path: str) -> str:
    """Quote a path for a YAML flow mapping."""
    return f'"{path}"' if "{" in path else path


def without_rule(facts: MatchFacts, suggested: Collection[tuple[str, str]]) -> Iterator[Finding]:
    """Find leaves that no rule matches; leaves whose names differ in numbers only are one finding.

    A leaf whose rule only misspells its path has a finding already.

    Args:
        suggested: position of a rule, and the leaf that its finding suggests.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    scales = scales_of_float8([name for name in facts.leaves if name not in facts.claims], facts.leaves)
    yield from lost_scales(scales, facts.rules.path)
    for name in facts.leaves:
        if name not in facts.claims and name not in facts.halves and name not in scales:
            key = "/".join("#" if part.isdigit() else part.rstrip("0123456789") for part in name.split("/"))
            groups[key].append(name)
    patterns = {
        facts.full(p.text): rule
        for rule in facts.rules.rules
        if rule.kind.drop_reason is None
        for p in rule.sources.values()
    }
    for names in groups.values():
        near = closest_match(names[0], patterns)
        misspelt = closest_match(names[0], patterns, TYPO)
        if misspelt and any((patterns[misspelt].at.line_only, name) in suggested for name in names):
            continue
        yield Finding(
            "leaf-without-rule",
            f"no rule matches this leaf ({facts.leaves[names[0]].spec})"
            + (f" and {len(names) - 1} more like it" if len(names) > 1 else "")
            + (f"; the closest is {near} ({patterns[near].at.line_only})" if near else ""),
            rule=facts.rules.path,
            path=names[0],
            fix="add a rule, or `drop:` it with a reason",
        )
