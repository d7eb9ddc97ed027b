"""Findings about matching: leaves without a rule, leaves with two, and leaves that a rule expects and the tree lacks."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from convert.checkpoints.source import Leaf
from convert.core.findings import Finding
from convert.core.path_index import path_template
from convert.core.path_pattern import Pattern, parse_pattern
from convert.core.similarity import closest_match
from convert.core.yaml_nodes import Position
from convert.layers import Numbering, Rule
from convert.layers.base import Matched
from convert.layers.embedding.embedding import TIES
from convert.layers.leaf_sums import role_of_sum, sums_of
from convert.layers.shared_keys import shown_part
from convert.planning.adapters.names import HalfPair, half_pairs
from convert.planning.quantised import lost_scales, scales_of_float8
from convert.rules.file import LayerTypes, RuleFile

INCOMPLETE = "the stack of layers is truncated, or the checkpoint is incomplete"
TYPO = 0.85  # similarity of a path to that of a leaf above which it is taken for the same path, misspelt
LAST_KEYS = re.compile(r"/(?:[^/{}]|\{[^{}]*\})*$")  # words in braces may be several keys: a/{b/c,d}
LISTED = 8  # missing indices that one finding names


@dataclass(frozen=True)
class LayerNumbers:
    """Layers that one leaf pattern of a rule with `index_from` provides.

    Attributes:
        matched: the rule and its leaves.
        name: the index of the target.
        role: of the leaves.
        numbers: values of the index for which there is a leaf.
    """

    matched: Matched
    name: str
    role: str
    numbers: frozenset[int]


@dataclass(frozen=True)
class MatchFacts:
    """The outcome of matching, as far as findings follow from it.

    Attributes:
        rules: the rule file, with the path variants of this tree.
        root: the prefix under which the paths of the rules were matched.
        leaves: all leaves of the checkpoint.
        matched: one for each rule that is not a `drop`.
        claims: leaf -> the first rule that matches it.
        rivals: leaf -> all rules that match it, where there are several.
        collisions: two leaves that match one rule with the same indices.
        domain: index name -> its values in the tree.
        types: list name -> layer -> types whose leaves the layer has.
        numbers: layers numbered through `index_from`.
        counts: index name -> number of its values.
    """

    rules: RuleFile
    root: str
    leaves: Mapping[str, Leaf]
    matched: Sequence[Matched]
    claims: Mapping[str, Rule]
    rivals: Mapping[str, Sequence[Rule]]
    collisions: Sequence[tuple[Rule, Pattern, str, str]]
    domain: Mapping[str, set[int]]
    types: Mapping[str, Mapping[int, set[str]]]
    numbers: Sequence[LayerNumbers]
    counts: Mapping[str, int]

    def full(self, path: Pattern | str) -> str:
        """Return a rule's path from the top of the tree."""
        return full_path(self.root, path)

    @cached_property
    def of_type(self) -> dict[str, tuple[str, set[int]]]:
        """Type of layers -> the index that numbers them, and the layers of this type."""
        return {
            word: (entry.index, {k for k, words in self.types[name].items() if word in words})
            for name, entry in self.rules.layer_types.items()
            for word in entry.leaves
        }

    @cached_property
    def halves(self) -> dict[str, HalfPair]:
        """Leaves of LoRA pairs whose other leaf is missing, while their weight is converted."""
        found = half_pairs(self.leaves).items()
        return {
            leaf: half for leaf, half in found if (rule := self.claims.get(half.base)) and not rule.kind.drop_reason
        }

    @cached_property
    def unclaimed(self) -> list[str]:
        """One leaf of each path template among those that no rule matches."""
        return sorted({path_template(name): name for name in self.leaves if name not in self.claims}.values())


def full_path(root: str, path: Pattern | str) -> str:
    """Return a rule's path from the top of the tree."""
    text = str(path)
    return text.removeprefix("/") if text.startswith("/") or not root else f"{root}/{text}"


def match_findings(facts: MatchFacts) -> tuple[Finding, ...]:
    """Compare the rules with the leaves in both directions. Takes a while: names the closest match of what is missing."""
    missing = list(_missing(facts))
    return (
        *_collisions(facts),
        *_claimed_twice(facts),
        *_parts(facts),
        *_gaps(facts),
        *missing,
        *_beyond_period(facts),
        *_gaps_of_numbered(facts),
        *_missing_numbers(facts),
        *_layers_without_type(facts),
        *_without_rule(
            facts, {(found.rule, found.data["suggested"]) for found in missing if "suggested" in found.data}
        ),
    )


def _collisions(facts: MatchFacts) -> Iterator[Finding]:
    for rule, pattern, first, second in facts.collisions:
        yield Finding(
            "pattern-matches-two-leaves",
            f"{first} and {second} both match {pattern}; one of them would be lost",
            rule=rule.at.line_only,
            fix="make the pattern match one of them, or drop the other",
        )


def _claimed_twice(facts: MatchFacts) -> Iterator[Finding]:
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


def _parts(facts: MatchFacts) -> Iterator[Finding]:
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


def _gaps(facts: MatchFacts) -> Iterator[Finding]:
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


def _missing(facts: MatchFacts) -> Iterator[Finding]:
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


def _beyond_period(facts: MatchFacts) -> Iterator[Finding]:
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


def _gaps_of_numbered(facts: MatchFacts) -> Iterator[Finding]:
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


def _missing_numbers(facts: MatchFacts) -> Iterator[Finding]:
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


def _layers_without_type(facts: MatchFacts) -> Iterator[Finding]:
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


def _without_rule(facts: MatchFacts, suggested: Collection[tuple[str, str]]) -> Iterator[Finding]:
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
