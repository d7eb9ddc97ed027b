"""The formats of outputs, and the targets that every rule file has."""

from __future__ import annotations

from collections.abc import Mapping

from convert.planning.target_formats.base import TORCH, TargetFormat
from convert.planning.target_formats.burn.format import BURN
from convert.rules.file import RuleFile, Target

FORMATS: Mapping[str, TargetFormat] = {known.name: known for known in (TORCH, BURN)}


def format_of(target: Target) -> TargetFormat:
    """Return the format of a target's output."""
    return FORMATS[target.format]


def target_names(rules: RuleFile) -> list[str]:
    """List what ``--to`` accepts: the targets of the rule file, and formats to which every rule file can be converted."""
    generic = (name for name, known in FORMATS.items() if known.target(rules) is not None)
    return list(dict.fromkeys((*rules.targets, *generic)))


def with_target(rules: RuleFile, to: str | None) -> RuleFile:
    """Return the rules with the layers of the target `to` (None: the first) as the target's format has them.

    Unchanged for a name that is no target; `convert.planning.planner` reports it.
    """
    name = to or next(iter(rules.targets))
    target = rules.targets.get(name) or (FORMATS[name].target(rules) if name in FORMATS else None)
    return rules if target is None else format_of(target).with_layers(rules, target)
