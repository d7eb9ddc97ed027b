"""Report keys of config.json that are null although the class which loads the output takes no null: it would not load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from convert.core.findings import Finding
from convert.planning.facts.sidecar import NOT_COPIED, Sidecar
from convert.planning.modules.table import read_table
from convert.rules.file import RuleFile
from convert.rules.library import shipped_rules_dir

TRANSFORMERS = "transformers"  # the target whose classes refuse them
TABLE = "transformers-classes.json"
TYPE = "model_type"


def refused_nulls(rules: RuleFile, target: str, sidecar: Sidecar) -> Iterator[Finding]:
    """Report each null that the output's ``config.json`` would have, too; not those that the rules replace."""
    if target != TRANSFORMERS or rules.sidecar is None:
        return
    written = {**rules.targets[target].config, **rules.facts}
    copied = {key: value for key, value in sidecar.for_output.items() if key not in NOT_COPIED and key not in written}
    of_type = {TYPE: rules.targets[target].config.get(TYPE, sidecar.config.get(TYPE))}
    for key in _nulls({**copied, **of_type}):
        yield Finding(
            "config-conflict",
            f"{key} in the {rules.sidecar.file} of the checkpoint is null, which the class of {target} refuses",
            path=key,
            rule=rules.sidecar.at,
            expected="a value, or no such key",
            got="null",
            fix="write the value that the model computes with (a switch that is null is off), or remove the key: the class then has its default",
        )


def _nulls(config: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yield the keys that are null and must not be, those of parts too."""
    if None not in config.values() and not any(isinstance(value, Mapping) for value in config.values()):
        return
    refused = read_table(shipped_rules_dir() / TABLE)["nulls"].get(config.get(TYPE), ())
    for key, value in config.items():
        if isinstance(value, Mapping) and TYPE in value:
            yield from _nulls(value, f"{before}{key}.")
        elif value is None and key in refused:
            yield f"{before}{key}"
