"""Compare ``config.json`` next to the tensors with the shapes of the tensors: one of the two may be of another model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from convert.core.findings import Finding
from convert.planning.plan import Plan
from convert.rules.file import parse_reference

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
