"""Rules that hold for every module of a type, written for the modules that have these tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec
from convert.planning.modules.expand import for_class, listed_modules
from convert.planning.modules.names import Renaming, renaming, with_other_keys
from convert.planning.modules.table import ModuleList, Name
from convert.reversing.derived.layouts import DerivedSource, named
from convert.rules.file import MODULE, ModulesOfClass, RuleFile
from convert.writing.written import Written

_MODULE = f"{{{MODULE}}}"


def for_tensors(rules: RuleFile, written: Written) -> RuleFile:
    """Return the rules for the class that ``config.json`` names; rules without `modules` are returned as they are.

    Raises:
        PlanError: the class is not known, or a module of it has no tensors.
    """
    of = rules.modules
    if of is None:
        return rules
    listed = listed_modules(rules, DerivedSource(written, [], {}))
    if isinstance(listed, Finding):
        raise PlanError(listed)
    keys = set(_keys(rules, listed, _names_to_keys(of, written.config or {}), written))
    if any(path[0] == "" for path in keys):  # statistics stand beside the parameters
        keys = {path[1:] if path[0] == "" else ("params", *path) for path in keys}
    source = DerivedSource(written, *named({path: TensorSpec((), "float32") for path in keys}))
    made, refused = for_class(rules, source)
    if refused:
        raise PlanError(*refused, headline=f"{rules.path} does not fit {written.path}")
    return replace(made, modules=None)


def _names_to_keys(of: ModulesOfClass, config: Mapping[str, Any]) -> Renaming:
    """Return the keys that the tree of this configuration has for those of names."""
    conditions = {keys: of.renamed_with.get(keys, {}).items() for keys in of.renamed}
    return renaming(
        {
            name: keys
            for keys, name in of.renamed.items()
            if all(key in config and str(config[key]) == value for key, value in conditions[keys])
        }
    )


def _keys(rules: RuleFile, listed: ModuleList, renamed: Renaming, written: Written) -> Iterator[Name]:
    """Yield the keys that the leaves of each tensor have by any of the rules; the class tells which rule a module has."""
    for rule in (rule for rule in rules.rules if rule.each):
        layer = rule.targets[None]
        for role, pattern in rule.sources.items():
            suffix = rule.kind.tensor_name(layer.path.text, role, layer).removeprefix(_MODULE)
            for name in written.specs:
                module = tuple(name.removesuffix(suffix).split("."))
                if name.endswith(suffix) and listed.has_leaf(name):
                    path = _below(with_other_keys(module, renamed), listed.below)
                    yield tuple(pattern.text.replace(_MODULE, "/".join(path)).split("/"))


def _below(path: Name, below: Mapping[Name, str]) -> Name:
    """Return the path with the keys that the tree of a part has before it."""
    for part in sorted(below, key=len, reverse=True):
        if path[: len(part)] == part:
            return (*part, below[part], *path[len(part) :])
    return path
