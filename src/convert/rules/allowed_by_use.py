"""What facts may be, as the header says it and as it follows from the values that the file gives and from the rules that use them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from convert.layers import Rule
from convert.layers.activations import NUMPY_ACTIVATIONS
from convert.layers.shared_keys import ACTIVATION_NAMES, referenced_fact
from convert.rules.allowed import INTEGER, NUMBER, TRUTH, WORD, Allowed, parse_bound
from convert.rules.placeholders import ASK

SMALL = Allowed(NUMBER, (("above", parse_bound(0)), ("at_most", parse_bound(0.1))))  # what a norm adds to a variance
FUNCTION = Allowed(WORD, one_of=tuple(dict.fromkeys([*ACTIVATION_NAMES, *NUMPY_ACTIVATIONS])))


def allowed_facts(header: Mapping[str, Any], rules: Iterable[Rule]) -> dict[str, Allowed]:
    """Return what each fact may be: what `allowed` states, or what the rules that use the fact require.

    Args:
        header: the keys of the file.
    """
    found = {}
    for name, own in {**_by_use(rules), **_repeated(header), **header.get("allowed", {})}.items():
        found[name] = own if own.kind or own.one_of else replace(own, kind=_kind(_given(header, name)))
    return found


def _by_use(rules: Iterable[Rule]) -> dict[str, Allowed]:
    found: dict[str, Allowed] = {}
    rules = tuple(rules)
    by_leaves = {fact for rule in rules for fact in rule.fact_values}
    for rule in rules:
        if isinstance(epsilon := getattr(rule.kind, "epsilon", None), str):
            found[epsilon] = SMALL
        fact = referenced_fact(getattr(rule.kind, "activation", None))
        if fact and fact not in by_leaves:
            found[fact] = FUNCTION
        if isinstance(rows := getattr(rule.kind, "rows", None), str):
            found[rows] = Allowed(
                INTEGER, (("at_least", parse_bound(1)),)
            )  # the table, which is padded, has as many or more
        if rule.optional_last is not None and len(rule.path.indices) == 1:
            (index,) = rule.path.indices
            bounds = (("at_least", parse_bound(0)), ("at_most", parse_bound(index)))
            found[rule.optional_last] = Allowed(INTEGER, bounds)
    return found


def _repeated(header: Mapping[str, Any]) -> dict[str, Allowed]:
    """Return the facts to which the file gives a list of repeated words: other lists have these words and this length, too."""
    found = {}
    for name in header.get("facts", {}):
        lists = [
            value for value in _given(header, name) if isinstance(value, dict) and {*value} == {"repeat", "length"}
        ]
        if lists and isinstance(lists[0]["length"], str):
            words = dict.fromkeys(word for one in lists for word in one["repeat"])
            length = parse_bound(lists[0]["length"].removeprefix("$"))
            found[name] = Allowed(WORD, one_of=tuple(words), listed=True, length=length)
    return found


def _given(header: Mapping[str, Any], name: str) -> list[Any]:
    """Return the values that the file gives to a fact."""
    values = [header.get("facts", {}).get(name, ASK)]
    values += [one.get("facts", {}).get(name, ASK) for one in header.get("versions", {}).values()]
    return [value for value in values if value != ASK]


def _kind(values: Iterable[Any]) -> str:
    """Return the kind of values such as these; empty where it cannot be told."""
    items = [item for value in values for item in (value if isinstance(value, list) else [value]) if item is not None]
    for kind, types in ((TRUTH, bool), (WORD, str), (INTEGER, int), (NUMBER, int | float)):
        if items and all(isinstance(item, types) for item in items):
            return kind
    return ""
