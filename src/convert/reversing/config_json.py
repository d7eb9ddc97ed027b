"""Compare ``config.json`` next to the tensors with the shapes of the tensors: one of the two may be of another model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from convert.core.findings import Finding
from convert.planning.facts.agreement import contradicted_formulas
from convert.planning.facts.limits import known_values
from convert.planning.plan import Plan
from convert.rules.allowed import TOKEN
from convert.rules.file import RuleFile, parse_reference

MODEL_TYPE = "model_type"  # key of transformers' config.json


def config_values(template: Any, config: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield what ``config.json`` states for the names that its template has: name of a size or fact, key, value."""
    if isinstance(template, dict) and isinstance(config, dict):
        for key, child in template.items():
            if key in config:
                yield from config_values(child, config[key], f"{path}.{key}" if path else key)
    elif (reference := parse_reference(template)) is not None:
        name, more = reference
        if isinstance(config, int | float) and not isinstance(config, bool):
            yield name, path, config - more
        elif not more:
            yield name, path, config


def config_conflicts(plan: Plan, config: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Find what ``config.json`` states and the tree of these tensors has not: the kind of model, and sizes.

    Args:
        config: its contents; None without one.
    """
    template, stated_config = plan.rules.targets[plan.target].config, config or {}
    own, stated_type = (template or {}).get(MODEL_TYPE), stated_config.get(MODEL_TYPE)
    if isinstance(own, str) and isinstance(stated_type, str) and own != stated_type:
        yield Finding(
            "config-conflict",
            "the config.json of the tensors names another kind of model",
            rule=plan.rules.path,
            path=MODEL_TYPE,
            expected=f"{own}, for {plan.rules.title}",
            got=stated_type,
            fix="give the rules of this model; `convert rules list` lists the known ones",
        )
        return
    rows = {fact for rule in plan.rules.rules if isinstance(fact := getattr(rule.kind, "rows", None), str)}
    known = {**plan.sizes, **{name: plan.facts[name] for name in rows if name in plan.facts}}
    for name, key, stated in config_values(template, stated_config):
        if name not in known or not isinstance(stated, int | float) or stated == known[name]:
            continue
        meaning = f" ({plan.rules.axes[name].meaning})" if name in plan.rules.axes else ""
        yield Finding(
            "config-conflict",
            f"{key} in the config.json of the tensors contradicts their shapes",
            rule=plan.rules.path,
            path=key,
            expected=f"{known[name]}: {name}{meaning}",
            got=str(stated),
            fix="one of the two is of another model: correct config.json, or give all tensors of its model",
        )
    yield from refused_values(plan.rules, plan.target, stated_config, plan.sizes, plan.settings)


def refused_values(
    rules: RuleFile, target: str, config: Mapping[str, Any], sizes: Mapping[str, int], settings: Mapping[str, Any]
) -> Iterator[Finding]:
    """Find what ``config.json`` states and `formulas` or `allowed` of the rules refuse; ids of tokens are in no leaf, and no matter here.

    Args:
        sizes: of the tree, as far as they are known.
        settings: of the user, which take precedence.
    """
    stated = {
        name: (key, value)
        for name, key, value in config_values(rules.targets[target].config, config)
        if name in rules.facts and value is not None and settings.get(name, value) == value
    }
    values = {name: value for name, (_, value) in stated.items()}
    places = {name: f"{key} in the config.json of the tensors" for name, (key, _) in stated.items()}
    yield from contradicted_formulas(rules, sizes, values, places)
    known = known_values(rules, sizes, values)
    for name, (key, value) in stated.items():
        if name not in rules.allowed or rules.allowed[name].kind == TOKEN:
            continue
        if expected := rules.allowed[name].refuses(value, known):
            yield Finding(
                "config-conflict",
                f"{key} in the config.json of the tensors",
                rule=rules.path,
                path=key,
                expected=expected,
                got=json.dumps(value),
                fix=f"correct config.json, or give the value that the model computes with: --set {name}=...",
            )
