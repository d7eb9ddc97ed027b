"""What --set may name, and what it must be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from convert.core.errors import PlanError
from convert.core.fields import nearest
from convert.rules.file import ASK, RuleFile, references
from convert.rules.validate import facts_of


def check_settings(rules: RuleFile, settings: Mapping[str, Any]) -> None:
    """Whether these rules have what is set, and take such values.

    Raises:
        PlanError: they do not.
    """
    declared = _declared(rules)
    known = {k: v for k, v in settable(rules).items() if k not in declared or k in settings}
    for key, value in settings.items():
        if key == "custom_cells" and key in known:
            if not isinstance(value, bool):
                raise PlanError(f"{rules.path}: --set {key}={value}: it is true or false")
            continue
        if key not in known:
            raise PlanError(f"{rules.path}: --set {key}: there is nothing called {key!r} to set{nearest(key, known)} (known: {', '.join(known)})")  # fmt: skip
        if key in rules.choices and value not in rules.choices[key]:
            raise PlanError(f"{rules.path}: --set {key}={value}: it is one of {', '.join(rules.choices[key])}")
        if key in rules.axes and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise PlanError(f"{rules.path}: --set {key}={value}: a size is a positive integer")
        if key in rules.facts and key in declared:
            raise PlanError(
                f"{rules.path}: --set {key}={value}: {key} says what the source computes ({rules.facts[key]}), "
                "and nothing that is written follows it; a source that computes otherwise needs rules of its own"
            )
        if key in rules.facts and (wanted := _misfit(key, value, _examples(rules, key))):
            raise PlanError(f"{rules.path}: --set {key}={value}: expected {wanted}")


def settable(rules: RuleFile) -> dict[str, Any]:
    """What --set may name."""
    by_kinds = {name: None for rule in rules.rules for name in rule.kind.settings}
    return {**rules.facts, **rules.axes, **rules.choices, **by_kinds}


def _declared(rules: RuleFile) -> set[str]:
    """Facts in words, or true or false, that nothing refers to: they describe the source, and nothing can follow them."""
    used = {
        said for t in rules.targets.values() for said in (*references(t.config), *references(t.generation), *t.requires)
    }
    used |= {said for rule in rules.rules for said in facts_of(rule)}
    return {k for k, v in rules.facts.items() if isinstance(v, str | bool) and v != ASK and k not in used}


SEVERAL = ("eos_token_id",)  # integers of which transformers' configuration takes a list, too: generation stops at any


def _misfit(key: str, value: Any, examples: list[Any]) -> str:
    """What a setting should have been, going by the values that are known; empty when it will do."""
    if not examples:
        return ""
    if key in SEVERAL:
        listed = value if isinstance(value, list) and value else [value]
        if all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in listed):
            return ""
        return f"an integer, or a list of integers such as [{examples[0]}, 106]"
    example = examples[0]
    if isinstance(example, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(example, (int, float)):
        number = "an integer" if all(isinstance(e, int) for e in examples) else "a number"
        fits = isinstance(value, int if number == "an integer" else (int, float)) and not isinstance(value, bool)
        if not fits or (value <= 0 and all(e > 0 for e in examples)):
            return (
                f"{number} above 0, such as {example}"
                if all(e > 0 for e in examples)
                else f"{number}, such as {example}"
            )
        return ""
    if isinstance(example, str):
        return "" if isinstance(value, str) else f"a word, such as {example}"
    same = isinstance(value, type(example)) and all(isinstance(v, (int, float)) for v in value)
    return "" if same else f"{json.dumps(example)} or another list of numbers"


def _examples(rules: RuleFile, fact: str) -> list[Any]:
    """Values that the rule file itself gives to a fact: they tell what kind of value it takes."""
    values = [rules.facts[fact], *(v.facts[fact] for v in rules.versions if fact in v.facts)]
    return [value for value in values if value != ASK]
