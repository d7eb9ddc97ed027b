"""Checks of `allowed`: what it names is declared, and the values that the file gives are allowed themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from convert.core.findings import Finding
from convert.core.similarity import did_you_mean
from convert.core.yaml_nodes import Position, YamlNode
from convert.rules.allowed import Known
from convert.rules.file import RuleFile
from convert.rules.formula import END
from convert.rules.placeholders import ASK


def allowed_names_are_declared(rules: RuleFile) -> Iterator[Finding]:
    """Find names that neither `facts` nor `axes` declares."""
    for fact, allowed in rules.allowed.items():
        if allowed.at is None:
            continue
        if fact not in rules.facts and fact not in rules.layer_types:
            yield _undeclared(allowed.at, fact, {**rules.facts, **rules.layer_types})
        for name in allowed.names:
            letter = found["letter"] if (found := END.fullmatch(name)) else name
            if letter not in rules.facts and letter not in rules.axes:
                yield _undeclared(allowed.at, letter, {**rules.facts, **rules.axes})
        varies = [letter for letter, axis in rules.axes.items() if axis.varies]
        for letter in allowed.varying:
            if letter not in varies:
                yield _undeclared(allowed.at, letter, dict.fromkeys(varies))
        paths = [rule.path.text for rule in rules.rules if rule.sources]
        for path in allowed.leaves.values():
            if path not in paths:
                yield Finding(
                    "rule-unknown-name",
                    f"`leaves` of {fact} has {path!r}, which is the path of no rule",
                    rule=str(allowed.at),
                    fix=did_you_mean(path, paths) or "write the path as a rule does",
                )


def facts_have_allowed_values(rules: RuleFile) -> Iterator[Finding]:
    """Find values that the file gives and does not allow."""
    header = rules.node.value
    if "facts" in header:
        yield from _refused(rules, rules.facts, {}, header["facts"])
    for version in rules.versions:
        node = header["versions"].value[version.name]
        if "facts" in node.value:
            yield from _refused(rules, version.facts, version.sizes, node.value["facts"])


def _refused(rules: RuleFile, facts: Mapping[str, Any], sizes: Mapping[str, int], node: YamlNode) -> Iterator[Finding]:
    known = Known({**{name: value for name, value in facts.items() if value != ASK}, **sizes})
    for name, value in facts.items():
        allowed = rules.allowed.get(name)
        if allowed is None or value == ASK or isinstance(value, dict):
            continue
        if expected := allowed.refuses(value, known):
            yield Finding(
                "rule-wrong-value",
                f"the fact {name!r}",
                rule=str(node.value[name].at),
                expected=expected,
                got=repr(value),
                fix="correct the value" + (", or `allowed`" if allowed.at is not None else ""),
            )


def _undeclared(at: Position, name: str, known: Mapping[str, Any]) -> Finding:
    return Finding(
        "rule-unknown-name",
        f"`allowed` refers to {name!r}",
        rule=str(at),
        expected=f"one of {', '.join(known)}" if known else "a declared name",
        fix=did_you_mean(name, list(known)) or "declare it in `facts` or `axes`",
    )
