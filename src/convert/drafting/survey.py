"""Report what a rule file, finished or not, covers of a checkpoint, and which rule is closest to each leaf without one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from convert.checkpoints.source import Source
from convert.core.path_pattern import parse_pattern
from convert.core.similarity import closest_match
from convert.core.yaml_nodes import Position
from convert.drafting.path_groups import Names, group
from convert.layers import Rule
from convert.layers.base import Matched
from convert.layers.draft import Group
from convert.planning.matching.match import Coverage, cover
from convert.rules.file import RuleFile
from convert.rules.placeholders import Question

LISTED = 8  # alternatives that a path lists before it is abbreviated


@dataclass(frozen=True)
class Covered:
    """The leaves that a rule matches.

    Attributes:
        path: pattern of the rule, from the top of the tree.
        kind_name: kind of the rule.
        leaves: number of leaves, including biases.
        rule: position of the rule.
        asked: keys with a placeholder.
    """

    path: str
    kind_name: str
    leaves: int
    rule: Position
    asked: tuple[str, ...]


@dataclass(frozen=True)
class Near:
    """The rule whose path is closest to that of leaves without a rule.

    Attributes:
        path: path of the rule, from the top of the tree.
        kind_name: kind of the rule.
        rule: position of the rule.
        why: reasons why it does not match, in words.
    """

    path: str
    kind_name: str
    rule: Position
    why: tuple[str, ...]


@dataclass(frozen=True)
class Uncovered:
    """Leaves of one shape and dtype that no rule matches."""

    path: str
    spec: str
    leaves: tuple[str, ...]
    near: Near | None


@dataclass(frozen=True)
class Survey:
    """The result of `survey_rules`.

    Attributes:
        total: number of leaves.
        covered: rules whose main leaf is in the checkpoint.
        incomplete: rules that match other leaves, such as a bias, but not the main one.
        dropped: rules that drop leaves.
        uncovered: leaves that no rule matches.
        questions: placeholders in the rules.
    """

    total: int
    covered: tuple[Covered, ...]
    incomplete: tuple[Covered, ...]
    dropped: tuple[Covered, ...]
    uncovered: tuple[Uncovered, ...]
    questions: tuple[Question, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""

        def taken(c: Covered) -> dict[str, Any]:
            return {
                "path": c.path,
                "kind": c.kind_name,
                "leaves": c.leaves,
                "rule": c.rule.line_only,
                "open": list(c.asked),
            }

        return {
            "complete": False,
            "leaves": self.total,
            "covered": [taken(c) for c in self.covered],
            "incomplete": [taken(c) for c in self.incomplete],
            "dropped": [taken(c) for c in self.dropped],
            "uncovered": [
                {
                    "path": u.path,
                    "spec": u.spec,
                    "leaves": list(u.leaves),
                    "nearest": u.near
                    and {
                        "path": u.near.path,
                        "kind": u.near.kind_name,
                        "rule": u.near.rule.line_only,
                        "why": list(u.near.why),
                    },
                }
                for u in self.uncovered
            ],
            "questions": [{"at": str(q.at), "key": q.key, "path": q.path, "others": q.others} for q in self.questions],
        }


def survey_rules(rules: RuleFile, source: Source) -> Survey:
    """Return what the rules, finished or not, cover of a checkpoint. Reads no array."""
    return survey_coverage(cover(rules, source), source)


def survey_coverage(coverage: Coverage, source: Source) -> Survey:
    """Return what `survey_rules` returns, of rules that are matched with the checkpoint already."""
    prefix = f"{coverage.root}/" if coverage.root else ""
    taken = [
        (
            Covered(
                _full(prefix, m.rule),
                m.rule.kind_name,
                sum(len(of_role) for of_role in m.leaves.values()),
                m.rule.at,
                tuple(m.rule.open_keys),
            ),
            m,
        )
        for m in coverage.matched
        if m.rule.sources
    ]
    counts: dict[Position, int] = {}
    for claim in coverage.dropped:
        counts[claim.at] = counts.get(claim.at, 0) + 1
    drops = [rule for rule in coverage.rules.rules if rule.kind.drop_reason is not None]
    claimed = {leaf for m in coverage.matched for of_role in m.leaves.values() for leaf in of_role.values()}
    claimed |= {claim.leaf for claim in coverage.dropped}
    left = {name: leaf for name, leaf in source.leaves.items() if name not in claimed}
    names = Names(LISTED)
    paths = [
        _Path(rule, role, _from_top(prefix, pattern.text))
        for rule in coverage.rules.rules
        if rule.kind.drop_reason is None
        for role, pattern in rule.sources.items()
    ]
    return Survey(
        total=len(source.leaves),
        covered=tuple(c for c, m in taken if c.leaves and not _lacks_main_leaf(m)),
        incomplete=tuple(c for c, m in taken if c.leaves and _lacks_main_leaf(m)),
        dropped=tuple(Covered(_full(prefix, r), r.kind_name, counts[r.at], r.at, ()) for r in drops if r.at in counts),
        uncovered=tuple(Uncovered(names.text(g.steps), g.shown, g.leaves, _nearest(g, paths)) for g in group(left)),
        questions=coverage.rules.questions,
    )


def _lacks_main_leaf(matched: Matched) -> bool:
    """Whether a rule matches leaves, such as the bias, but not the main one."""
    lead = matched.rule.lead
    return not matched.leaves[lead] and lead not in matched.rule.kind.may_lack


def _full(prefix: str, rule: Rule) -> str:
    return _from_top(prefix, rule.path.text)


def _from_top(prefix: str, text: str) -> str:
    return text[1:] if text.startswith("/") else prefix + text


@dataclass(frozen=True)
class _Path:
    """The path of a leaf of a rule, from the top of the tree."""

    rule: Rule
    role: str
    text: str

    @cached_property
    def keys(self) -> list[str]:
        return _keys(self.text)

    @cached_property
    def _open(self) -> list[int]:
        """Positions of the keys that match other texts than their own."""
        return [k for k, key in enumerate(self.keys) if re.search(r"[{}*\\]", key)]

    def filled(self, keys: list[str]) -> str:
        """Return the path with its keys replaced by the keys of a leaf that they match."""
        if not self._open:
            return self.text
        there = list(self.keys)
        for k in self._open:
            if k < len(keys) and _matches(there[k], keys[k]):
                there[k] = keys[k]
        return "/".join(there)


def _nearest(g: Group, paths: list[_Path]) -> Near | None:
    """Return the rule of the closest path; None if no path is similar."""
    keys = g.leaves[0].removesuffix("/value").split("/")
    by_text: dict[str, _Path] = {}
    for path in paths:
        by_text.setdefault(path.filled(keys), path)
    found = closest_match("/".join(keys), by_text, 0.3)
    if found is None:
        return None
    path = by_text[found]
    return Near(path.text, path.rule.kind_name, path.rule.at, tuple(_why(keys, g, path)))


def _keys(pattern: str) -> list[str]:
    """Return the keys of a pattern; a slash inside braces does not separate keys."""
    return re.findall(r"(?:\{[^{}]*\}|\\.|[^/])+", pattern)


@lru_cache(maxsize=4096)
def _matches(pattern: str, key: str) -> bool:
    try:
        return parse_pattern(pattern).match(key) is not None
    except ValueError:
        return pattern == key


def _why(keys: list[str], g: Group, path: _Path) -> Iterator[str]:
    """Yield what prevents the pattern from matching: names, indices, the number of keys; and whether the shape would fit."""
    there = path.keys
    if len(there) != len(keys):
        yield f"its path has {len(there)} keys, this one has {len(keys)}"
    for p, key in zip(there, keys, strict=False):
        if _matches(p, key):
            continue
        number = re.fullmatch(r"(.*?)([0-9]+)", key)
        if number and re.fullmatch(rf"{re.escape(number[1])}([0-9]+|\{{[0-9,]+\}})", p):
            yield f"the index is missing: it has {p}; {number[1]}{{i}} would also match {key}"
        elif "{" in p and not number and re.sub(r"\{[^{},]*\}$", "", p) == key:
            yield f"it has the index {p}, but this key is {key}"
        else:
            yield f"other name: the rule has {p}, the leaf has {key}"
    if path.rule.asked:
        return
    try:
        path.rule.kind.letters(path.role, g.shape, next(iter(path.rule.kind.variants), None))
    except ValueError as error:
        yield f"other shape, {g.shown}: {error}"
