"""Rewrite rules for a tree that lies below one more key than they name: ``state/params/...`` for rules of ``params/...``."""

from __future__ import annotations

from dataclasses import replace

from convert.core.path_pattern import Pattern, escape_path, parse_pattern
from convert.layers import Rule
from convert.rules.file import RuleFile


def below(rules: RuleFile, key: str) -> RuleFile:
    """Return the rules for the tree below `key`. What they drop at the top of a tree is dropped there and at the top of this one."""
    start = f"/{escape_path(key)}"

    def text(path: str) -> str:
        return f"{start}{path}" if path.startswith("/") else path

    def pattern(path: Pattern) -> Pattern:
        return parse_pattern(text(path.text))

    def moved(rule: Rule) -> Rule:
        absent_if = None if rule.absent_if is None else pattern(rule.absent_if)
        return replace(rule, sources={role: pattern(path) for role, path in rule.sources.items()}, absent_if=absent_if)

    at_the_top = [
        rule
        for rule in rules.rules
        if rule.kind.drop_reason is not None and all(path.text.startswith("/") for path in rule.sources.values())
    ]
    types = {
        name: replace(one, leaves={word: pattern(path) for word, path in one.leaves.items()})
        for name, one in rules.layer_types.items()
    }
    variants = [
        replace(
            one,
            written=text(one.written),
            variants=tuple(tuple(replace(path, path=text(path.path)) for path in paths) for paths in one.variants),
        )
        for one in rules.path_variants
    ]
    return replace(
        rules,
        root=tuple(f"{key}/{root}" if root else key for root in rules.root),
        rules=(*map(moved, rules.rules), *at_the_top),
        layer_types=types,
        path_variants=tuple(variants),
        copies=tuple(
            replace(one, within=tuple(f"{key}/{place}" if place else key for place in one.within))
            for one in rules.copies
        ),
    )
