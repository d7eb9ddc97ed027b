"""Which leaf belongs to which rule: coverage of the source, exact in both directions."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from convert.checkpoints.source import Leaf, Source
from convert.core.path_index import PathIndex, TemplateIndex, path_template
from convert.core.path_pattern import Match, Pattern
from convert.core.similarity import closest_match
from convert.core.yaml_nodes import Position
from convert.layers import Numbering, Rule
from convert.layers.base import Matched, MatchKey
from convert.layers.embedding.embedding import TIES
from convert.rules.file import LayerTypes, RuleFile
from convert.rules.path_variants import each_combination, independent_groups, resolve_path_variants


@dataclass(frozen=True)
class Claim:
    """A leaf left out, and why."""

    leaf: str
    reason: str
    at: Position


@dataclass(frozen=True)
class Coverage:
    """The outcome of matching.

    Attributes:
        root: the prefix under which the rules' paths were taken.
        rules: the rule file, its rules rewritten for the layout that this tree has (see `convert.rules.path_variants`).
        matched: one for each rule that applies.
        dropped: leaves left out with a reason.
        claimed: how many leaves some rule names.
        counts: index name -> number of its values, 0 to n-1.
        layer_types: name of a list -> type of each layer, for the file's `layer_types`.
        explain: gives the `findings`; they name what is nearest to each thing that is missing, which takes a while.
    """

    root: str
    rules: RuleFile
    matched: tuple[Matched, ...]
    dropped: tuple[Claim, ...]
    claimed: int
    counts: Mapping[str, int]
    types: Mapping[str, list[str]]
    explain: Callable[[], tuple[str, ...]] = field(repr=False)

    @property
    def findings(self) -> tuple[str, ...]:
        """What does not fit."""
        return self.explain()


def choose_root(rules: RuleFile, index: PathIndex) -> str:
    """The first of the file's roots under which one of its rules finds a leaf (the first one if none does)."""
    groups = independent_groups(rules.rules, rules.path_variants) or [[]]
    every = (rule for group in groups for layout in each_combination(rules.rules, group) for rule in layout)
    patterns = list(
        {p.text: p for rule in every if rule.kind.drop_reason is None for p in rule.sources.values()}.values()
    )
    fitting = (root for root in rules.root if any(index.below(root).matches(pattern) for pattern in patterns))
    return next(fitting, rules.root[0])


def cover(rules: RuleFile, source: Source, index: PathIndex | None = None) -> Coverage:
    """Assigns every leaf to its rule; `index` is of its leaves, where several rule files are tried on it."""
    index = index or PathIndex(source.leaves)
    root = choose_root(rules, index)
    inside = index.below(root)
    prefix = f"{root}/" if root else ""
    specs = {name: leaf.spec for name, leaf in source.leaves.items()}

    def find(pattern: Pattern) -> list[tuple[str, Match]]:
        return (index.from_top if pattern.text.startswith("/") else inside).matches(pattern)

    rules = replace(rules, rules=resolve_path_variants(rules.rules, rules.path_variants, specs, find))
    claims: dict[str, Rule] = {}
    rivals: dict[str, list[Rule]] = {}
    matched, dropped, twice = [], [], []
    for rule in rules.rules:
        found = Matched(rule)
        for role, pattern in rule.sources.items():
            of_role: dict[MatchKey, str] = {}
            for name, match in find(pattern):
                if name in claims:
                    rivals.setdefault(name, [claims[name]]).append(rule)
                else:
                    claims[name] = rule
                if rule.kind.drop_reason is not None:
                    dropped.append(Claim(name, rule.kind.drop_reason, rule.at))
                    continue
                key = (tuple([value for _, value in match.indices]), match.choices)
                if key in of_role:
                    twice.append(
                        f"{rule.at.line_only}: {of_role[key]} and {name} both match {pattern}; one of them would be lost. "
                        "Make the pattern fit one, or drop the other"
                    )
                of_role[key] = name
            found.leaves[role] = of_role
        if rule.kind.drop_reason is None:
            matched.append(found)
    types = {name: _types(entry, inside) for name, entry in rules.layer_types.items()}
    by_type = {
        word: (entry.index, {k for k, words in types[name].items() if word in words})
        for name, entry in rules.layer_types.items()
        for word in entry.leaves
    }
    domain = _domain(matched)
    numbers, uncounted = _numbers(matched, prefix, source.leaves)
    counts = {**{name: max(present) + 1 for name, present in domain.items() if present}, **numbers}
    words = {
        name: [min(found.get(k, {""})) for k in range(counts.get(rules.layer_types[name].index, 0))]
        for name, found in types.items()
    }

    @cache
    def explain() -> tuple[str, ...]:
        untyped = (
            _untyped(types[name], entry, counts.get(entry.index, 0), prefix)
            for name, entry in rules.layer_types.items()
        )
        return (
            *twice,
            *_contested({name: rivals[name] for name in claims if name in rivals} if rivals else {}, source.leaves),
            *_incomplete(matched, domain, prefix, source.leaves, claims, by_type),
            *uncounted,
            *itertools.chain.from_iterable(untyped),
            *_unclaimed(source, claims, rules, prefix),
        )

    return Coverage(root, rules, tuple(matched), tuple(dropped), len(claims), counts, words, explain)


def _contested(rivals: Mapping[str, list[Rule]], leaves: Mapping[str, Leaf]) -> Iterator[str]:
    for name, claimants in rivals.items():
        places = " and ".join(f"{rule.at.line_only} ({rule.word})" for rule in claimants)
        yield (
            f"{name} ({leaves[name].spec}) is claimed by two rules, {places}; remove one or narrow its path{_second_name(claimants)}"
        )


def _second_name(claimants: list[Rule]) -> str:
    """What to write where one leaf is a table and, under another name, a head."""
    table = next((rule for rule in claimants if rule.word == "embedding" and rule.targets), None)
    others = [rule for rule in claimants if rule is not table and rule.word in TIES and rule.targets]
    if table is None or not others:
        return ""
    here, there = (_in_braces(next(iter(rule.targets.values())).path.text) for rule in (table, others[0]))
    tied = there if others[0].word == "linear" else f"{{{others[0].word}: {there}}}"
    return (
        f". If the model has one table under two names (a tied head, flax's Embed.attend), remove {others[0].at.line_only} and write "
        f"`embedding: {{module: {here}, tied: {tied}}}` in {table.at.line_only}"
    )


def _in_braces(path: str) -> str:
    """A path as YAML has it within braces."""
    return f'"{path}"' if "{" in path else path


def _types(entry: LayerTypes, index: TemplateIndex) -> dict[int, set[str]]:
    """The types that each layer has leaves of; one, when all is well."""
    found: dict[int, set[str]] = defaultdict(set)
    for word, pattern in entry.leaves.items():
        for _, match in index.matches(pattern):
            found[match.indices[0][1]].add(word)
    return found


def _untyped(found: Mapping[int, set[str]], entry: LayerTypes, count: int, prefix: str) -> Iterator[str]:
    """Layers of no type, or of two."""
    known = " or ".join(f"{prefix}{pattern} ({word})" for word, pattern in entry.leaves.items())
    for k in range(count):
        words = sorted(found.get(k, ()))
        if len(words) != 1:
            has = f"leaves of {' and of '.join(words)}" if words else "neither"
            yield (
                f"{entry.at.line_only}: {{{entry.index}}} = {k} must have {known}, and has {has}; the checkpoint is "
                "incomplete, or of another model"
            )


def _full(prefix: str, path: Pattern | str) -> str:
    """A rule's path from the top of the tree."""
    text = str(path)
    return text.removeprefix("/") if text.startswith("/") else prefix + text


def _domain(matched: list[Matched]) -> dict[str, set[int]]:
    """The values of each index for which there is a leaf."""
    domain: dict[str, set[int]] = defaultdict(set)
    for found in matched:
        names = found.rule.path.indices if found.rule.sources else ()
        for values in found.indices:
            for name, value in zip(names, values, strict=True):
                domain[name].add(value)
    return domain


def _incomplete(
    matched: list[Matched],
    domain: Mapping[str, set[int]],
    prefix: str,
    leaves: Mapping[str, Leaf],
    claimed: Mapping[str, Rule],
    by_type: Mapping[str, tuple[str, set[int]]],
) -> list[str]:
    """That a rule does not find a leaf for every index that any rule has, every alternative and every role."""
    findings = []

    @cache
    def free() -> list[str]:
        """Leaves that no rule names, or else all: one of each spelling."""
        found = {path_template(name): name for name in leaves if name not in claimed}
        return sorted((found or {path_template(name): name for name in leaves}).values())

    for name, present in domain.items():
        first = next(found.rule for found in matched if found.indices and name in found.rule.path.indices)
        gaps = list(itertools.islice((k for k in range(max(present) + 1) if k not in present), 9))
        if gaps:
            findings.append(
                f"{first.at.line_only}: {_full(prefix, first.path)}: {{{name}}} runs from 0 to {max(present)} in the tree, "
                f"without {', '.join(map(str, gaps[:8]))}{' ...' if len(gaps) > 8 else ''}; the checkpoint is incomplete, or the pattern matches something else"
            )
    for found in matched:
        rule = found.rule
        if rule.optional:
            findings += _halves(found, prefix)
            continue
        for role, pattern in rule.sources.items():
            of_role = found.leaves[role]
            index, allowed = by_type[rule.layer_type] if rule.layer_type else ("", set())
            if rule.layer_type and not allowed:
                continue  # no layer of this type
            expected = itertools.product(
                *(sorted(allowed if name == index else domain.get(name, ())) for name in pattern.indices)
            )
            keys = [(values, choices) for values in expected for choices in pattern.all_choices()]
            lost = [key for key in keys if key not in of_role and not _excused(rule, prefix, key[0], leaves)]
            if not of_role and role in rule.kind.may_lack:
                continue
            if (not of_role and lost) or (not of_role and not keys):
                near = closest_match(_full(prefix, pattern), free(), 0.5)
                findings.append(
                    f"{rule.at.line_only}: no leaf matches {_full(prefix, pattern)} ({rule.word}, {role})"
                    + (f"; the nearest leaf is {near}" if near else "")
                    + (f", nor {_full(prefix, rule.absent_if)} in its place" if rule.absent_if else "")
                    + (
                        "; write `optional: true` if it may be absent"
                        if role == rule.lead
                        else f"; remove `{role}:` if there is none"
                    )
                )
            elif lost:
                values, choices = lost[0]
                path = pattern.fill(dict(zip(pattern.indices, values, strict=True)), choices)
                more = f", and {len(lost) - 1} more like it" if len(lost) > 1 else ""
                findings.append(
                    f"{rule.at.line_only}: {_full(prefix, path)} is not in the checkpoint{more}; the target's tensor has no source. "
                    "The checkpoint is incomplete, or `optional: true` is missing"
                )
    return findings


def _excused(rule: Rule, prefix: str, values: tuple[int, ...], leaves: Mapping[str, Leaf]) -> bool:
    """Whether a leaf that is not there has another in its place."""
    if rule.absent_if is None:
        return False
    indices = dict(zip(rule.path.indices, values, strict=True))
    paths = [_full(prefix, rule.absent_if.fill(indices, choices)) for choices in rule.absent_if.all_choices()]
    return any(path in leaves or f"{path}/value" in leaves for path in paths)


def _numbers(matched: list[Matched], prefix: str, leaves: Mapping[str, Leaf]) -> tuple[dict[str, int], list[str]]:
    """Indices that are counted through several path_variants: every rule's leaves must give all of them, 0 to n-1."""
    given: list[tuple[Matched, str, str, set[int]]] = []
    every: dict[str, set[int]] = defaultdict(set)
    for found in matched:
        for name, numbering in found.rule.index_from.items():
            for role, of_role in found.leaves.items():
                for choices in dict.fromkeys(choices for _, choices in of_role):
                    numbers = set()
                    for (values, chosen), leaf in of_role.items():
                        if chosen == choices:
                            numbers |= set(_layers(found.rule, numbering, role, values, leaves[leaf].spec.shape))
                    every[name] |= numbers
                    given.append((found, name, role, numbers))
    findings = [*_beyond(matched, prefix)]
    for name, numbers in every.items():
        gaps = [k for k in range(max(numbers) + 1) if k not in numbers][:8]
        if gaps:
            first = next(found.rule for found, of, _, _ in given if of == name)
            period = first.index_from[name].period
            units = (
                f" (units of {period}: {{{first.index_from[name].order[-1]}}} from 0 to {period - 1})" if period else ""
            )
            findings.append(
                f"{first.at.line_only}: {_full(prefix, first.path)}: {{{name}}} runs from 0 to {max(numbers)} in the tree, "
                f"without {', '.join(map(str, gaps))}{units}; the stack of layers is truncated, or the checkpoint incomplete"
            )
    together: dict[tuple[Position, str, str], set[int]] = defaultdict(set)  # over the places of one rule
    for found, name, role, numbers in given:
        together[found.rule.at, name, role] |= numbers
    short: dict[str, list[str]] = defaultdict(list)  # the numbers that are missing -> the leaves that lack them
    for found, name, role, _ in given:
        lost = sorted(every[name] - together.pop((found.rule.at, name, role), every[name]))
        if lost and not found.rule.optional and (found.rule.absent_if is None or len(lost) < len(every[name])):
            said = f"{{{name}}} = {', '.join(map(str, lost[:8]))}{' ...' if len(lost) > 8 else ''}"
            short[said].append(f"{found.rule.at.line_only}: {_full(prefix, found.rule.sources[role])}")
    for said, paths in short.items():
        more = f", nor have {len(paths) - 1} rules more" if len(paths) > 1 else ""
        findings.append(
            f"{paths[0]} has no {said}{more}, which other leaves have; the stack of layers is truncated, or the "
            "checkpoint incomplete"
        )
    return {name: max(numbers) + 1 for name, numbers in every.items()}, findings


def _beyond(matched: list[Matched], prefix: str) -> Iterator[str]:
    """Leaves whose place lies outside of the declared period, by which layers are counted."""
    for found in matched:
        for name, numbering in found.rule.index_from.items():
            last = numbering.order[-1]
            for role, of_role in found.leaves.items():
                indices = found.rule.sources[role].indices
                seen = [dict(zip(indices, values, strict=True)).get(last, 0) for values, _ in of_role]
                if numbering.period is not None and max(seen, default=0) >= numbering.period:
                    yield (
                        f"{found.rule.at.line_only}: {_full(prefix, found.rule.sources[role])}: {{{last}}} runs from 0 to "
                        f"{max(seen)} in the tree, and {{{name}}} is counted in units of {numbering.period}; the checkpoint "
                        "is of another model"
                    )


def _layers(
    rule: Rule, numbering: Numbering, role: str, values: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[int]:
    """The numbers that one leaf holds."""
    indices = dict(zip(rule.sources[role].indices, values, strict=True))
    stacks = {name: axis for name, axis in rule.stacked.items() if name in numbering.order and 0 <= axis < len(shape)}
    if any(name not in indices and name not in stacks for name in numbering.order):
        return  # a leaf without the stacked axis: the steps say so
    for elements in itertools.product(*(range(shape[axis]) for axis in stacks.values())):
        yield numbering.value({**indices, **dict(zip(stacks, elements, strict=True))})


def _halves(found: Matched, prefix: str) -> list[str]:
    """An optional group of leaves is there as a whole or not at all."""
    findings = []
    for indices in found.indices:
        missing = [
            pattern.fill(dict(zip(pattern.indices, indices, strict=True)), choices)
            for role, pattern in found.rule.sources.items()
            for choices in pattern.all_choices()
            if (indices, choices) not in found.leaves[role]
        ]
        if missing:
            findings.append(
                f"{found.rule.at.line_only}: {_full(prefix, missing[0])} is not in the checkpoint, but other leaves of this optional "
                "layer are; it is there as a whole or not at all"
            )
    return findings


def _unclaimed(source: Source, claims: Mapping[str, Rule], rules: RuleFile, prefix: str) -> list[str]:
    """Findings for leaves without a rule; leaves that differ only in numbers are reported together."""
    shapes: dict[str, list[str]] = defaultdict(list)
    for name in source.leaves:
        if name not in claims:
            shapes["/".join("#" if part.isdigit() else part.rstrip("0123456789") for part in name.split("/"))].append(
                name
            )
    patterns = {prefix + p.text: rule for rule in rules.rules if rule.word != "drop" for p in rule.sources.values()}
    findings = []
    for names in shapes.values():
        name = names[0]
        near = closest_match(name, patterns)
        findings.append(
            f"{rules.path}: {name} ({source.leaves[name].spec}) has no rule"
            + (f", nor have {len(names) - 1} more like it" if len(names) > 1 else "")
            + (f"; the nearest is {near} ({patterns[near].at.line_only})" if near else "")
            + "; add a rule, or `drop:` it with a reason"
        )
    return findings
