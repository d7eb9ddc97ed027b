"""Match leaves with rules: every leaf belongs to one rule, and every rule finds its leaves."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache

from convert.checkpoints.source import Leaf, Source
from convert.core.findings import Finding
from convert.core.path_index import PathIndex
from convert.core.path_pattern import Match, Pattern
from convert.core.yaml_nodes import Position
from convert.layers import Drop, Numbering, Rule
from convert.layers.base import Matched, MatchKey
from convert.layers.low_rank import SECOND, is_scale
from convert.planning.adapters.lost import lost_adapters
from convert.planning.adapters.names import NamedPair, find_pairs
from convert.planning.matching.facts import LayerNumbers, MatchFacts, full_path
from convert.planning.matching.findings import match_findings
from convert.planning.quantised import of_unknown_modules
from convert.rules.copies import resolve_copies
from convert.rules.file import LayerTypes, RuleFile
from convert.rules.path_variants import each_combination, independent_groups, resolve_path_variants


@dataclass(frozen=True)
class DroppedLeaf:
    """A leaf that a `drop` rule matches.

    Attributes:
        rest: whether the rule drops all leaves that no other rule matches.
    """

    leaf: str
    reason: str
    at: Position
    rest: bool = False


@dataclass(frozen=True)
class Coverage:
    """The outcome of matching.

    Attributes:
        rules: the rule file, its rules rewritten for the layout of this tree (see `convert.rules.path_variants`).
        root: the prefix under which the paths of the rules were matched.
        factors: leaves that scale the weights of their rules; several rules may have the same one.
        matched: one for each rule that is not a `drop`.
        dropped: leaves that `drop` rules match.
        claimed: number of leaves that some rule matches.
        total: number of leaves.
        counts: index name -> number of its values, 0 to n-1.
        types: name of a list in `layer_types` -> type of each layer.
        pairs: LoRA pairs that no rule names, by the leaf that each is added to.
        explain: returns the `findings`; they name the closest match of each missing thing, which takes a while.
    """

    rules: RuleFile
    root: str
    matched: tuple[Matched, ...]
    dropped: tuple[DroppedLeaf, ...]
    claimed: int
    total: int
    counts: Mapping[str, int]
    types: Mapping[str, list[str]]
    pairs: Mapping[str, NamedPair]
    explain: Callable[[], tuple[Finding, ...]] = field(repr=False)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What does not fit."""
        return self.explain()

    @property
    def fits(self) -> bool:
        """Whether nothing is found. Quick where a leaf has no rule, as in most of the rule files that are tried."""
        return self.claimed == self.total and not self.findings

    @property
    def fraction(self) -> float:
        """Fraction of the leaves that rules convert, from 0 to 1; leaves that a rule drops by name do not count."""
        named = {drop.leaf for drop in self.dropped if not drop.rest}
        others = {drop.leaf for drop in self.dropped if drop.rest}
        rest = self.total - len(named)
        return (self.claimed - len(named | others)) / rest if rest else 0.0

    @property
    def converted(self) -> int:
        """Number of leaves that rules convert."""
        return self.claimed - len(self.dropped)

    @property
    def left_out(self) -> int:
        """Number of leaves that would not be converted."""
        return self.total - self.claimed + len(self.dropped)


def matching_root(rules: RuleFile, index: PathIndex) -> str | None:
    """Return the first root of the rule file under which a rule matches a leaf; None if none does."""
    groups = independent_groups(rules.rules, rules.path_variants) or [[]]
    every = (rule for group in groups for layout in each_combination(rules.rules, group) for rule in layout)
    patterns = list(
        {p.text: p for rule in every if rule.kind.drop_reason is None for p in rule.sources.values()}.values()
    )
    fitting = (root for root in rules.root if any(index.below(root).matches(pattern) for pattern in patterns))
    return next(fitting, None)


def cover(rules: RuleFile, source: Source, index: PathIndex | None = None) -> Coverage:
    """Match every leaf with its rule.

    Args:
        index: of the source's leaves; pass one where several rule files are matched with one source.
    """
    index = index or PathIndex(source.leaves)
    root = matching_root(rules, index)
    named, root = resolve_copies(rules.rules, rules.copies, rules.root[0] if root is None else root)
    inside = index.below(root)
    specs = {name: leaf.spec for name, leaf in source.leaves.items()}

    def find(pattern: Pattern) -> list[tuple[str, Match]]:
        return (index.from_top if pattern.text.startswith("/") else inside).matches(pattern)

    rules = replace(rules, rules=resolve_path_variants(named, rules.path_variants, specs, find))
    pairs = find_pairs(source.leaves)
    claims = _claim(rules.rules, find, {leaf for pair in pairs.values() for leaf in (pair.first, pair.second)})
    paths = {full_path(root, p): rule for rule in rules.rules for p in rule.sources.values()}
    claims.give_up(of_unknown_modules(claims.rules, paths))
    pairs = _claim_pairs(claims, pairs)
    types = {
        name: _types(entry, named, claims.matched, find, source.leaves) for name, entry in rules.layer_types.items()
    }
    domain = _domain(claims.matched)
    numbers = _numbers(claims.matched, source.leaves)
    counts = _counts(domain, numbers)
    facts = MatchFacts(
        rules,
        root,
        source.leaves,
        claims.matched,
        claims.rules,
        claims.rivals,
        claims.collisions,
        domain,
        types,
        numbers,
        counts,
    )
    return Coverage(
        rules=rules,
        root=root,
        matched=tuple(claims.matched),
        dropped=tuple(claims.dropped),
        claimed=len(claims.rules),
        total=len(source.leaves),
        counts=counts,
        types={
            name: [min(found.get(k, {""})) for k in range(counts.get(rules.layer_types[name].index, 0))]
            for name, found in types.items()
        },
        pairs=pairs,
        explain=cache(lambda: (*match_findings(facts), *lost_adapters(claims.rules, facts.halves, root))),
    )


@dataclass
class _Claims:
    """The leaves that rules have claimed so far.

    Attributes:
        rules: the rule of each leaf; the first one that matches it.
        rivals: all rules of each leaf that more than one matches.
        matched: one for each rule that is not a `drop`.
        dropped: leaves that `drop` rules match.
        collisions: rule, pattern and two leaves which the pattern matches with the same numbers and names.
    """

    rules: dict[str, Rule] = field(default_factory=dict)
    rivals: dict[str, list[Rule]] = field(default_factory=dict)
    factors: set[str] = field(default_factory=set)
    matched: list[Matched] = field(default_factory=list)
    dropped: list[DroppedLeaf] = field(default_factory=list)
    collisions: list[tuple[Rule, Pattern, str, str]] = field(default_factory=list)

    def claim(self, leaf: str, rule: Rule, factor: bool = False) -> None:
        if leaf not in self.rules:
            self.rules[leaf] = rule
            self.factors |= {leaf} if factor else set()
        elif not factor or leaf not in self.factors:
            self.rivals.setdefault(leaf, [self.rules[leaf]]).append(rule)

    def give_up(self, leaves: Collection[str]) -> None:
        for leaf in leaves:
            del self.rules[leaf]
        self.dropped = [drop for drop in self.dropped if drop.leaf in self.rules]


def _claim(rules: Sequence[Rule], find: Callable[[Pattern], list[tuple[str, Match]]], of_pairs: Set[str]) -> _Claims:
    """Match each rule with the leaves that `find` finds. The leaves of LoRA pairs have the rule of their weight."""
    claims = _Claims()
    for rule in sorted(rules, key=lambda rule: isinstance(rule.kind, Drop) and rule.kind.rest):  # those last
        rest = isinstance(rule.kind, Drop) and rule.kind.rest
        reason = rule.kind.drop_reason
        found = Matched(rule)
        for role, pattern in rule.sources.items():
            of_role: dict[MatchKey, str] = {}
            for name, match in find(pattern):
                if (name in claims.rules and rest) or (name in of_pairs and reason is not None):
                    continue  # a pair is merged, or dropped, with its weight
                if rule.index_from and not rule.holds(dict(match.indices)):
                    continue
                claims.claim(name, rule, role == SECOND and is_scale(rule.kind.pair))
                if reason is not None:
                    claims.dropped.append(DroppedLeaf(name, reason, rule.at, rest))
                    continue
                key = (tuple([value for _, value in match.indices]), match.choices)
                if key in of_role:
                    claims.collisions.append((rule, pattern, of_role[key], name))
                of_role[key] = name
            found.leaves[role] = of_role
        if reason is None:
            claims.matched.append(found)
    return claims


def _claim_pairs(claims: _Claims, pairs: Mapping[str, NamedPair]) -> dict[str, NamedPair]:
    """Claim the leaves of the LoRA pairs that no rule names; return the pairs whose weight is converted."""
    free = {base: pair for base, pair in pairs.items() if not claims.rules.keys() & {pair.first, pair.second}}
    drops = {drop.leaf: drop for drop in claims.dropped}
    for base, pair in free.items():
        if base in claims.rules:
            claims.rules |= dict.fromkeys((pair.first, pair.second), claims.rules[base])
        if base in drops:
            claims.dropped += [replace(drops[base], leaf=leaf) for leaf in (pair.first, pair.second)]
    return {base: pair for base, pair in free.items() if base in claims.rules and base not in drops}


def _counts(domain: Mapping[str, set[int]], numbers: Sequence[LayerNumbers]) -> dict[str, int]:
    """Return the number of values of each index; `numbers` wins over the numbers that rules match."""
    counts = {name: max(present) + 1 for name, present in domain.items() if present}
    counts |= {given.name: 0 for given in numbers}
    for given in numbers:
        counts[given.name] = max(counts[given.name], *(k + 1 for k in given.numbers), 0)
    return counts


def _types(
    entry: LayerTypes,
    written: Sequence[Rule],
    matched: Sequence[Matched],
    find: Callable[[Pattern], list[tuple[str, Match]]],
    leaves: Mapping[str, Leaf],
) -> dict[int, set[str]]:
    """Map each layer to the types of which it has leaves; a correct tree gives one type for each layer.

    Args:
        written: the rules before they were rewritten for this tree. Where one of the type has the type's path, its leaves tell.
    """
    types: dict[int, set[str]] = defaultdict(set)
    for word, pattern in entry.leaves.items():
        same = {rule.at for rule in written if rule.layer_type == word and rule.path.text == pattern.text}
        found = (
            layer for one in matched if one.rule.at in same for layer in _layers_with_leaf(one, entry.index, leaves)
        )
        for layer in found if same else (match.indices[0][1] for _, match in find(pattern)):
            types[layer].add(word)
    return types


def _layers_with_leaf(found: Matched, index: str, leaves: Mapping[str, Leaf]) -> Iterator[int]:
    """List the layers for which a rule has found its first leaf."""
    rule = found.rule
    for (values, _), leaf in found.leaves[rule.lead].items():
        indices, shape = dict(zip(rule.path.indices, values, strict=True)), leaves[leaf].spec.shape
        if index in rule.index_from:
            yield from _layers(rule, rule.index_from[index], rule.lead, values, shape)
        elif index in indices:
            yield indices[index]
        elif rule.stacked[index] < len(shape):
            yield from range(shape[rule.stacked[index]])


def layers_with(rules: RuleFile, matched: Sequence[Matched], leaves: Mapping[str, Leaf]) -> dict[str, set[int]]:
    """Return the layers that have the leaves which `allowed` names.

    Args:
        rules: as written; those that matched have the paths of the tree.
    """
    found: dict[str, set[int]] = {}
    for path in dict.fromkeys(path for one in rules.allowed.values() for path in one.leaves.values()):
        places = {rule.at: rule.path.indices[0] for rule in rules.rules if rule.sources and rule.path.text == path}
        of_rule = [one for one in matched if one.rule.at in places]
        found[path] = {layer for one in of_rule for layer in _layers_with_leaf(one, places[one.rule.at], leaves)}
    return found


def _domain(matched: Sequence[Matched]) -> dict[str, set[int]]:
    """Map each index to the values for which there is a leaf."""
    domain: dict[str, set[int]] = defaultdict(set)
    for found in matched:
        names = found.rule.path.indices if found.rule.sources else ()
        for values in found.indices:
            for name, value in zip(names, values, strict=True):
                domain[name].add(value)
    return domain


def _numbers(matched: Sequence[Matched], leaves: Mapping[str, Leaf]) -> list[LayerNumbers]:
    """List the layers of each leaf pattern whose index is numbered through `index_from`."""
    given = []
    for found in matched:
        for name, numbering in found.rule.index_from.items():
            for role, of_role in found.leaves.items():
                for choices in dict.fromkeys(choices for _, choices in of_role):
                    numbers: set[int] = set()
                    for (values, chosen), leaf in of_role.items():
                        if chosen == choices:
                            numbers |= set(_layers(found.rule, numbering, role, values, leaves[leaf].spec.shape))
                    given.append(LayerNumbers(found, name, role, frozenset(numbers)))
    return given


def _layers(
    rule: Rule, numbering: Numbering, role: str, values: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[int]:
    """List the layers that one leaf holds."""
    indices = dict(zip(rule.sources[role].indices, values, strict=True))
    stacks = {name: axis for name, axis in rule.stacked.items() if name in numbering.order and 0 <= axis < len(shape)}
    if not numbering.is_known({*indices, *stacks}):
        return  # a leaf without the stacked axis is reported when the rule is compiled
    for elements in itertools.product(*(range(shape[axis]) for axis in stacks.values())):
        yield numbering.value({**indices, **dict(zip(stacks, elements, strict=True))})
