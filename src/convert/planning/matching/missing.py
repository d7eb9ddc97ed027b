"""Findings about leaves that a rule expects and the tree lacks."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from convert.core.findings import Finding
from convert.core.path_pattern import Pattern, parse_pattern
from convert.core.similarity import closest_match
from convert.layers import Rule
from convert.layers.base import Matched
from convert.layers.leaf_sums import role_of_sum, sums_of
from convert.planning.matching.facts import MatchFacts

LAST_KEYS = re.compile(r"/(?:[^/{}]|\{[^{}]*\})*$")  # words in braces may be several keys: a/{b/c,d}


def missing_leaves(facts: MatchFacts) -> Iterator[Finding]:
    """Find leaves that a rule expects for each value of its indices, each alternative and each role."""
    for found in facts.matched:
        rule = found.rule
        if rule.optional:
            yield from _incomplete_optional(facts, found)
            continue
        index, layers = facts.of_type[rule.layer_type] if rule.layer_type else ("", set())
        if rule.layer_type and not layers:
            continue  # no layer of this type
        numbering = rule.index_from.get(index)
        for role, pattern in rule.sources.items():
            values = (sorted(layers if name == index else facts.domain.get(name, ())) for name in pattern.indices)
            keys = [(key, choices) for key in itertools.product(*values) for choices in pattern.all_choices()]
            if rule.index_from:
                keys = [key for key in keys if rule.holds(dict(zip(pattern.indices, key[0], strict=True)))]
            if numbering is not None:
                keys = [
                    key for key in keys if numbering.may_hold(layers, dict(zip(pattern.indices, key[0], strict=True)))
                ]
                if not keys:
                    continue  # this path has no layer of this type
            missing = [key for key in keys if key not in found.leaves[role] and not _replaced(facts, rule, key[0])]
            if found.leaves[role] or role not in rule.kind.may_lack:
                yield from _missing_of_role(facts, found, role, missing, expects_some=bool(keys))


def _missing_of_role(
    facts: MatchFacts,
    found: Matched,
    role: str,
    missing: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    *,
    expects_some: bool,
) -> Iterator[Finding]:
    rule, pattern = found.rule, found.rule.sources[role]
    if not found.leaves[role] and (missing or not expects_some):
        near, of = closest_match(facts.full(pattern), facts.unclaimed, 0.5), role_of_sum(role)
        instead = f" or {facts.full(rule.absent_if)}" if rule.absent_if else ""
        verb, rest = (
            ("write", "`optional: true` only if the leaf may be absent")
            if role == rule.lead
            else ("remove", f"`{of}:` only if the layer has none")
        )
        if of in sums_of([*rule.sources]):
            verb, rest = "take", "the path out of the sum only if the source does not add it"
        yield Finding(
            "leaf-missing",
            f"{facts.full(pattern)}{instead} ({rule.kind_name}, {of})",
            rule=rule.at.line_only,
            expected="a leaf with this path",
            got=f"none{_dropped_there(facts, pattern)}",
            fix=f"did you mean {near!r}? {verb.capitalize()} {rest}" if near else f"{verb} {rest}",
            data={"suggested": near} if near else {},
        )
    elif missing:
        values, choices = missing[0]
        path = pattern.fill(dict(zip(pattern.indices, values, strict=True)), choices)
        more = f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""
        yield Finding(
            "leaf-missing",
            f"this leaf is not in the checkpoint{more}; the target's tensor has no source{_dropped_there(facts, pattern)}",
            rule=rule.at.line_only,
            path=facts.full(path),
            fix="the checkpoint is incomplete, or `optional: true` is missing",
        )


def _dropped_there(facts: MatchFacts, pattern: Pattern) -> str:
    """Say which leaf of the same layer is dropped, and why: its values may be what is left of the missing one."""
    path = pattern.text.removeprefix("/")
    last = LAST_KEYS.search(path)
    if last is None:
        return ""
    below = parse_pattern(f"**{path[: last.start()]}/**")
    for name, rule in facts.claims.items():
        if rule.kind.drop_reason and name.rpartition("/")[2] != last[0][1:] and below.match(name):
            return f"; {name} lies there, and is dropped: {rule.kind.drop_reason}"
    return ""


def _replaced(facts: MatchFacts, rule: Rule, values: tuple[int, ...]) -> bool:
    """Whether the leaf of `absent_if` replaces the missing one."""
    if rule.absent_if is None:
        return False
    indices = dict(zip(rule.path.indices, values, strict=True))
    paths = [facts.full(rule.absent_if.fill(indices, choices)) for choices in rule.absent_if.all_choices()]
    return any(path in facts.leaves or f"{path}/value" in facts.leaves for path in paths)


def _incomplete_optional(facts: MatchFacts, found: Matched) -> Iterator[Finding]:
    """Find optional layers of which some leaves are present and others missing."""
    for indices in found.indices:
        missing = [
            pattern.fill(dict(zip(pattern.indices, indices, strict=True)), choices)
            for role, pattern in found.rule.sources.items()
            for choices in pattern.all_choices()
            if (indices, choices) not in found.leaves[role]
        ]
        if missing:
            yield Finding(
                "leaf-missing",
                "this leaf is not in the checkpoint, but other leaves of the same optional layer are",
                rule=found.rule.at.line_only,
                path=facts.full(missing[0]),
                fix="an optional layer is complete or absent",
            )


def incomplete_modules(facts: MatchFacts) -> Iterator[Finding]:
    """Find optional modules of which the leaves of some rules are present in a layer and those of others are not.

    Such a module is a key of paths below which all rules are optional, such as the compressor that some layers have.
    """
    needed = {
        key
        for found in facts.matched
        if not found.rule.optional
        for pattern in found.rule.sources.values()
        for key in _keys_above(pattern)
    }
    modules: dict[str, list[Matched]] = defaultdict(list)
    for found in facts.matched:
        if found.rule.optional and found.rule.optional_last is None and found.rule.sources:
            module = next((key for key in _keys_above(found.rule.path) if key not in needed), None)
            if module is not None and parse_pattern(module).indices == found.rule.path.indices:
                modules[module].append(found)
    for module, rules in modules.items():
        present = sorted({indices for found in rules for indices in found.indices})
        for found in rules:
            missing = [indices for indices in present if indices not in found.indices]
            if missing:
                rule = found.rule
                named, choices = dict(zip(rule.path.indices, missing[0], strict=True)), next(iter(rule.path.all_choices()))  # fmt: skip
                more = f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""
                yield Finding(
                    "leaf-missing",
                    f"this leaf is not in the checkpoint{more}, but others below {facts.full(module)} are",
                    rule=rule.at.line_only,
                    path=facts.full(rule.path.fill(named, choices)),
                    fix="an optional module is complete or absent: the checkpoint is incomplete",
                )


def _keys_above(pattern: Pattern) -> Iterator[str]:
    """Yield the path of each module that a leaf lies in, the outermost first."""
    parts = pattern.text.split("/")
    above = ("/".join(parts[:k]) for k in range(1, len(parts)) if parts[k - 1])
    yield from (key for key in above if key.count("{") == key.count("}"))  # words in braces may be several keys
