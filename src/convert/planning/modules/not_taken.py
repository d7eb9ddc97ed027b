"""Values of config.json that the class which loads the output does not take: it would not load. Nulls are reported, integers are written as floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from convert.core.findings import Finding
from convert.planning.facts.sidecar import Sidecar
from convert.planning.modules.table import read_table
from convert.rules.file import RuleFile
from convert.rules.library import shipped_rules_dir

TRANSFORMERS = "transformers"
# Target whose classes refuse nulls -> the table of these classes, and the key that names one.
TABLES = {TRANSFORMERS: ("transformers-classes.json", "model_type"), "diffusers": ("diffusers-classes.json", "_class_name")}  # fmt: skip


def refused_nulls(rules: RuleFile, target: str, sidecar: Sidecar) -> Iterator[Finding]:
    """Report each null that the output's ``config.json`` would have, too; not those that the rules replace."""
    if target not in TABLES or rules.sidecar is None:
        return
    table, name = TABLES[target]
    written = {**rules.targets[target].config, **rules.facts}
    copied = {key: value for key, value in sidecar.for_output.items() if key not in written}
    of_type = {name: rules.targets[target].config.get(name, sidecar.config.get(name))}
    for key in _nulls({**copied, **of_type}, read_table(shipped_rules_dir() / table)["nulls"], name):
        yield Finding(
            "config-conflict",
            f"{key} in the {rules.sidecar.file} of the checkpoint is null, which the class of {target} refuses",
            path=key,
            rule=rules.sidecar.at,
            expected="a value, or no such key",
            got="null",
            fix="write the value that the model computes with (a switch that is null is off), or remove the key: the class then has its default",
        )


def _nulls(config: Mapping[str, Any], nulls: Mapping[str, Any], name: str, before: str = "") -> Iterator[str]:
    """Yield the keys that are null and must not be, those of parts too.

    Args:
        nulls: of each class, the keys that it refuses to be null.
        name: the key that names the class.
    """
    refused = nulls.get(str(config.get(name)).removeprefix("Flax"), ())
    for key, value in config.items():
        if isinstance(value, Mapping) and name in value:
            yield from _nulls(value, nulls, name, f"{before}{key}.")
        elif value is None and key in refused:
            yield f"{before}{key}"


def with_floats(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` of transformers in which 0 is 0.0 where the class takes no integer, that of parts too."""
    table, name = TABLES[TRANSFORMERS]
    taken = read_table(shipped_rules_dir() / table)["floats"].get(config.get(name), ())
    return {
        key: with_floats(value) if isinstance(value, Mapping) and name in value
        else float(value) if key in taken and type(value) is int
        else value
        for key, value in config.items()
    }  # fmt: skip
