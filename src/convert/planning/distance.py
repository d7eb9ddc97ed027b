"""How far a tree is from that of a rule file: where none fits, the error is that of the nearest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from convert.checkpoints.source import Source
from convert.core.findings import Finding
from convert.core.path_index import path_template
from convert.core.path_pattern import Pattern
from convert.layers.base import Matched
from convert.planning.matching.facts import full_path
from convert.planning.matching.match import Coverage
from convert.planning.rule_match import RuleMatch
from convert.rules.file import RuleFile

_WORD = re.compile(r"[A-Za-z]+")


def distance(match: RuleMatch) -> int:
    """Count the kinds of leaves that the rules leave out, those that the tree lacks, and the sizes that contradict the rules.

    Leaves whose names differ in numbers alone are one kind: a layer more is no other model.
    """
    return len(_left_out(match)) + len(lacking(match.coverage)) + len(contradictions(match))


def contradictions(match: RuleMatch) -> list[Finding]:
    """Return what sizes, sidecar and settings contradict; nothing for a target that the rules do not have."""
    return match.sized[1] if match.target in match.rules.targets else []


def with_words_of(source: Source, candidates: Iterable[RuleFile]) -> Iterator[RuleFile]:
    """Yield the rules whose file has the words of most of the leaves' names: to match all of the shipped ones takes a second."""
    words = [frozenset(_WORD.findall(name)) for name in {path_template(leaf) for leaf in source.leaves}]
    for rules in candidates:
        known = _words(rules.text)
        if rules.modules is None and 2 * sum(of_name <= known for of_name in words) > len(words):
            yield rules


@lru_cache(maxsize=128)
def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text))


def lacking(coverage: Coverage) -> list[str]:
    """List the kinds of leaves that the rules need and the tree lacks, as the rules write them: once for each of several names."""
    types = {word for words in coverage.types.values() for word in words}
    needed = (m for m in coverage.matched if not m.rule.optional and (m.rule.layer_type is None or m.rule.layer_type in types))  # fmt: skip
    return [full_path(coverage.root, pattern) for matched in needed for pattern in _lacking(matched)]


def _left_out(match: RuleMatch) -> set[str]:
    every = (of_role for matched in match.coverage.matched for of_role in matched.leaves.values())
    converted = {leaf for of_role in every for leaf in of_role.values()}
    return {path_template(name) for name in match.source.leaves if name not in converted}


def _lacking(matched: Matched) -> Iterator[Pattern]:
    rule = matched.rule
    if rule.absent_if is not None and not any(matched.leaves.values()):
        return  # the leaf that stands for it is counted by its own rule
    for role, pattern in rule.sources.items():
        found = {choices for _, choices in matched.leaves.get(role, {})}
        if found or role not in rule.kind.may_lack:
            yield from [pattern] * len({*pattern.all_choices()} - found)
