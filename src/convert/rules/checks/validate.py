"""Check that a parsed rule file makes sense, before any checkpoint is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from convert.core.findings import Finding
from convert.core.yaml_nodes import YamlNode
from convert.layers import Rule
from convert.rules.checks.header import HEADER_CHECKS
from convert.rules.checks.rule import RULE_CHECKS
from convert.rules.file import RuleFile


@dataclass(frozen=True)
class WrittenRule:
    """A rule, and the node that it was read from, which has the positions of its keys."""

    rule: Rule
    node: YamlNode


def validate(rules: RuleFile, written: Iterable[WrittenRule]) -> Iterator[Finding]:
    """Yield every problem of a rule file. Of one rule, later checks run only if the earlier ones pass."""
    for one in written:
        yield from next(filter(None, (list(check(one.rule, one.node)) for check in RULE_CHECKS)), ())
    for check in HEADER_CHECKS:
        yield from check(rules)
