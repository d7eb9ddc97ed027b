"""Check the names and values of ``--set``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from convert.core.errors import OptionError
from convert.core.findings import Finding
from convert.core.similarity import did_you_mean
from convert.rules.allowed import NOTHING
from convert.rules.file import ASK, RuleFile, references
from convert.rules.names_used import facts_of


def check_settings(rules: RuleFile, settings: Mapping[str, Any]) -> None:
    """Check that the rules know each setting and accept its value.

    Raises:
        OptionError: a name is unknown, or a value is of the wrong kind.
    """
    descriptive = _descriptive_facts(rules)
    known = {key: value for key, value in settable(rules).items() if key not in descriptive or key in settings}
    for key, value in settings.items():
        if key not in known:
            near = did_you_mean(key, sorted(known))
            raise OptionError(
                Finding(
                    "setting-unknown",
                    "the rules have no such setting",
                    rule=rules.path,
                    path=f"--set {key}",
                    expected=f"one of {', '.join(known)}" if known else "no --set, as the rules have no settings",
                    got=key,
                    fix=near or "leave it out",
                )
            )
        if key in descriptive:
            raise OptionError(
                Finding(
                    "setting-has-no-effect",
                    f"{key} describes what the source computes ({rules.facts[key]}), and nothing in the output depends on it",
                    rule=rules.path,
                    path=f"--set {key}={value}",
                    fix="write separate rules for a source that computes something else",
                )
            )
        if expected := _expected(rules, key, value):
            raise OptionError(
                Finding(
                    "setting-invalid",
                    rule=rules.path,
                    path=f"--set {key}={value}",
                    expected=expected,
                    got=repr(value),
                    fix=f"correct the value of {key}",
                )
            )


def settable(rules: RuleFile) -> dict[str, Any]:
    """Return the names that ``--set`` may give, with their declarations."""
    by_kinds = {name: None for rule in rules.rules for name in rule.kind.settings}
    return {**rules.facts, **rules.axes, **rules.choices, **by_kinds}


def _descriptive_facts(rules: RuleFile) -> set[str]:
    """Return text and boolean facts that nothing refers to: they describe the source and change no output."""
    used = {
        name for t in rules.targets.values() for name in (*references(t.config), *references(t.generation), *t.requires)
    }
    used |= {name for rule in rules.rules for name in facts_of(rule)}
    return {k for k, v in rules.facts.items() if isinstance(v, str | bool) and v != ASK and k not in used}


def _expected(rules: RuleFile, key: str, value: Any) -> str:
    """Return what the value should have been; empty if it is valid."""
    if key in rules.choices and value not in rules.choices[key]:
        return f"one of {', '.join(rules.choices[key])}"
    if key in rules.axes and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        return "a positive integer, as the size of an axis"
    if key in rules.facts:
        return expected_fact(rules, key, value)
    by_kinds = any(key in rule.kind.settings for rule in rules.rules)
    return "true or false" if by_kinds and not isinstance(value, bool) else ""


def expected_fact(rules: RuleFile, key: str, value: Any) -> str:
    """Return what the value of a fact should have been, judged by `allowed` of the rules, or else by the values that they give it; empty if it is valid."""
    examples = _examples(rules, key)
    if allowed := rules.allowed.get(key):
        expected = allowed.refuses(value, NOTHING)
        return f"{expected}, such as {examples[0]}" if expected and _is_plain(examples) else expected
    if not examples:
        return ""
    example = examples[0]
    if isinstance(example, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(example, (int, float)):
        number = "an integer" if all(isinstance(e, int) for e in examples) else "a number"
        fits = isinstance(value, int if number == "an integer" else (int, float)) and not isinstance(value, bool)
        if not fits or not math.isfinite(value) or (value <= 0 and all(e > 0 for e in examples)):
            return (
                f"{number} above 0, such as {example}"
                if all(e > 0 for e in examples)
                else f"{number}, such as {example}"
            )
        return ""
    if isinstance(example, str):
        return "" if isinstance(value, str) else f"a word, such as {example}"
    same = isinstance(value, list) and all(isinstance(v, (int, float)) for v in value)
    return "" if same else f"{json.dumps(example)} or another list of numbers"


def _is_plain(examples: list[Any]) -> bool:
    """Whether the first value that the rules give is one word or number, which an error can show."""
    return bool(examples) and isinstance(examples[0], str | int | float) and not isinstance(examples[0], bool)


def as_declared(rules: RuleFile, key: str, value: Any) -> Any:
    """Return an integer as a float if the rule file gives floats to the fact: the classes of a ``config.json`` tell them apart."""
    examples = _examples(rules, key)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole and examples and all(isinstance(example, float) for example in examples) else value


def _examples(rules: RuleFile, fact: str) -> list[Any]:
    """Return the values that the rule file gives to a fact; they show its type."""
    values = [rules.facts[fact], *(v.facts[fact] for v in rules.versions if fact in v.facts)]
    return [value for value in values if value != ASK]
