"""What the tensors' files say besides shapes: ``config.json`` of their model, and the header that `convert` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from convert.planning.facts.settings import settable
from convert.reversing.config_json import config_values
from convert.reversing.derived.leaves import TensorNames, pattern_of
from convert.reversing.derived.shapes import CONFIG, Known
from convert.rules.allowed import TOKEN
from convert.rules.file import RuleFile
from convert.writing.written import Written

HEADER = "the header of the file"


def _is_of(rules: RuleFile, written: Written) -> bool:
    """Whether `convert` wrote the tensors with rules of this model."""
    return written.metadata.get("model") == rules.model


def known_sizes(rules: RuleFile, target: str, written: Written, settings: Mapping[str, Any]) -> Known:
    """Return the sizes that the user and the files state."""
    stated: dict[str, dict[str, int]] = {}
    if _is_of(rules, written):
        stated[HEADER] = {x: n for x, n in written.stated("sizes").items() if isinstance(n, int)}
    config = list(config_values(rules.targets[target].config, written.config or {}))
    stated[CONFIG] = {name: value for name, _, value in config if isinstance(value, int) and name in rules.axes}
    stated |= {version.name: dict(version.sizes) for version in rules.versions}
    said = {
        product.letter: settings.get(str(product.factors[0])) for product in rules.products if len(product.factors) == 1
    }
    said |= {x: n for x, n in settings.items() if x in rules.axes}
    return Known({x: n for x, n in said.items() if isinstance(n, int)}, stated)


def stated_settings(rules: RuleFile, target: str, written: Written) -> dict[str, Any]:
    """Return the facts that ``config.json`` has for this target, and the settings of the conversion that wrote the tensors.

    Facts that the rules read from a sidecar are read from it, or else from the header of the file.
    """
    found: dict[str, Any] = {}
    known = settable(rules)
    if rules.sidecar is not None and written.config is None and _is_of(rules, written):
        stated = written.stated("facts")
        found = {name: value for name, value in stated.items() if name in known and rules.facts.get(name) != value}
    if rules.sidecar is None or rules.sidecar.is_gin:
        sizes = {name for product in rules.products for name in product.names}
        for name, _, value in config_values(rules.targets[target].config, written.config or {}):
            own = rules.facts.get(name)
            number = isinstance(own, int | float) or name in sizes  # a fact that is asked for, and is a size
            token = name in rules.allowed and rules.allowed[name].kind == TOKEN  # in no leaf
            if name in known and number and isinstance(value, int | float) and own != value and not token:
                found[name] = value
    said = written.stated("settings") if _is_of(rules, written) else {}
    return found | {name: value for name, value in said.items() if name in known}


def adapted_notes(rules: RuleFile, config: Mapping[str, Any] | None) -> Iterator[str]:
    """Say what the JAX model's configuration may state differently from that of the tensors."""
    for key, reason in rules.sidecar.adapted.items() if rules.sidecar is not None else ():
        if config is not None and key in config:
            yield f"the leaves are those of {key} {config[key]}, as config.json of the tensors has it; that of the JAX model may have another: {reason}"


def stated_choices(rules: RuleFile, written: Written) -> dict[str, str]:
    """Return the variants that the header of the tensors states."""
    said = written.stated("choices") if _is_of(rules, written) else {}
    return {name: said[name] for name, variants in rules.choices.items() if said.get(name) in variants}


def rows_of_tables(
    rules: RuleFile, target: str, written: Written, names: TensorNames, settings: Mapping[str, Any]
) -> dict[str, int]:
    """Return the facts that are the number of rows of a table, which a tree of these tensors has without padding."""
    found: dict[str, int] = {}
    for rule in rules.rules:
        fact, layer = getattr(rule.kind, "rows", None), rule.layer(target)
        if not isinstance(fact, str) or layer is None or fact in settings:
            continue
        for name, _ in names.matches(pattern_of(rule, rule.lead, layer)):
            if rows := written.specs[name].shape[:1]:
                found[fact] = rows[0]
    return {fact: rows for fact, rows in found.items() if rules.facts.get(fact) != rows}
