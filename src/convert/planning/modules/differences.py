"""What a tree and its class do not have in common: modules, leaves, numbers of layers and outputs, and settings."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from typing import Any

from convert.checkpoints.source import Source
from convert.core.findings import Finding
from convert.core.path_pattern import Pattern
from convert.planning.modules.names import Found, Patterns
from convert.planning.modules.switches import TIES, Part, conflicts, switched_off
from convert.planning.modules.table import NUMBER, PARAMETER, TIED, Conditions, Module, ModuleList, Name
from convert.rules.file import MODULE, ModulesOfClass, RuleFile

BIAS = "bias"
KERNEL = "kernel"
LINEAR = "Linear"


def file_of(rules: RuleFile) -> str:
    """Return the name of the file that names the class."""
    return rules.sidecar.file if rules.sidecar is not None else "config.json"


def leaf_of(pattern: Pattern, path: Name) -> Name:
    """Return the path of a leaf that a rule names for a module, below the root."""
    text = pattern.text.replace(f"{{{MODULE}}}", "/".join(path))
    return tuple(text.split("/"))


def missing(
    rules: RuleFile, of: ModulesOfClass, listed: ModuleList, patterns: Patterns, claimed: Mapping[Name, Found], taken: set[Name]
) -> Iterator[Finding]:  # fmt: skip
    """Report modules and leaves that the tree lacks, but for those that it never has (tensors that share the leaf of another); and those that only another configuration has."""
    counted = listed.counts.keys()
    needed: list[Part] = []
    lost: list[tuple[Part, str]] = []  # and how it is reported where no switch is
    for module in listed.modules:
        for name in _every(module.name, patterns, counted):
            one = claimed.get(name)
            if name in listed.lacks or (module.optional and one is None):
                continue
            text = ".".join(name)
            has = f"{listed.package} `{listed.loads}` has the module {text} ({module.type})"
            leaves = list(_leaves(rules, one or Found(name, name, module, ()), listed))
            tied = any(tensor in listed.untied for _, tensor in leaves)
            whole = Part(text, module.keys, TIES if tied else module.when)
            needed += [whole] if leaves else []
            if leaves and one is None:
                lost.append((whole, f"{has}, and the tree has no leaf for it"))
                continue
            for leaf, tensor in leaves:
                part = Part("/".join(leaf), module.keys, _conditions(module, tensor, listed))
                needed += [part] if part.when else []
                lost += [] if leaf in taken else [(part, f"{has}, and the tree lacks a leaf of it")]
    off = switched_off([part for part, _ in lost], needed)
    loads = f"{listed.package} `{listed.loads}`"
    more = list(_of_other_settings(listed, claimed, taken))
    yield from conflicts(loads, file_of(rules), [part for part, _ in lost if part.switch in off], more)
    for part, problem in lost:
        if part.switch not in off:
            yield Finding("leaf-missing", problem, rule=rules.path, path=part.text, fix=f"the checkpoint is incomplete, or `{of.key}` of {file_of(rules)} names another class than that of the checkpoint")  # fmt: skip


def _conditions(module: Module, tensor: str, listed: ModuleList) -> Conditions:
    """Return the conditions under which a module has one of its tensors."""
    if tensor in listed.untied:
        return TIES
    return module.bias_when if tensor.endswith(f".{BIAS}") else ()


def _of_other_settings(listed: ModuleList, claimed: Mapping[Name, Found], taken: set[Name]) -> Iterator[Part]:
    """Yield what the tree has of a module, a bias or a head that the class has with other settings."""
    tied = listed.tied.keys() - listed.untied if TIED not in listed.refused else ()
    for name, one in claimed.items():
        module, text = one.module, ".".join(name)
        if module.absent:
            yield Part(text, module.keys, module.when)
        elif module.bias is False and module.bias_when and (*one.path, BIAS) in taken:
            yield Part(f"{text}.{BIAS}", module.keys, module.bias_when)
        elif module.type == LINEAR and f"{text}.weight" in tied and (*one.path, KERNEL) in taken:
            yield Part(f"{text}.weight", module.keys, TIES)


def _leaves(rules: RuleFile, one: Found, listed: ModuleList) -> Iterator[tuple[Name, str]]:
    """Yield each leaf that a module needs, and its tensor: a bias only where the class certainly has one."""
    seen: set[str] = set()
    for rule in rules.rules:
        layer = rule.targets.get(None)
        for role, pattern in rule.sources.items() if layer and one.module.type in rule.each else ():
            assert layer is not None
            written: Any = rule.kind
            name = written.tensor_name(layer.path.text, role, layer).replace(f"{{{MODULE}}}", ".".join(one.name))
            certain = one.module.bias or not name.endswith(f".{BIAS}") or one.module.type == PARAMETER
            if name not in seen and certain and listed.has_leaf(name):
                yield leaf_of(pattern, one.path), name
            seen.add(name)


def _every(name: Name, patterns: Patterns, counted: Container[Name] = (), at: int = 0) -> Iterator[Name]:
    """Yield a name with each number that the tree has there or skips; where it has none, and none are counted, with 0."""
    place = next((k for k, key in enumerate(name) if k >= at and key == NUMBER), None)
    if place is None:
        yield name
        return
    general = tuple(NUMBER if key.isdecimal() else key for key in name[:place])
    known = patterns.numbers.get(name[:place], set())
    first = set() if general in counted or name[:place] in counted else {0}
    for number in sorted({*map(int, known), *range(len(known)), *first}):
        yield from _every((*name[:place], str(number), *name[place + 1 :]), patterns, counted, place + 1)


def other_values(rules: RuleFile, listed: ModuleList) -> Iterator[Finding]:
    """Report settings with which the class computes something else than the flax class, stops, or cannot be built."""
    for key, (value, because) in listed.refused.items():
        yield Finding(
            "target-requirement",
            f"{listed.package} `{listed.loads}` does not compute as the flax class does: {because}",
            rule=rules.path,
            path=f"{key} of {file_of(rules)}",
            got=json.dumps(value),
            fix="use other code to load the model",
        )


def other_counts(rules: RuleFile, listed: ModuleList, patterns: Patterns) -> Iterator[Finding]:
    """Report that the tree has another number of layers than the sidecar states."""
    for places, layers in ((places, layers) for places, each in listed.counts.items() for layers in each):
        needed = any(module.name[: len(places)] == places and not module.optional for module in listed.modules)
        for place in _every(places, patterns, listed.counts.keys()):
            count = max(map(int, patterns.numbers.get(place, ())), default=-1) + 1
            expected = layers.at(place)
            if expected is not None and count != expected and (count or needed):
                has = (
                    f"has {layers.key} = {layers.count}"
                    if layers.stated
                    else f"has no {layers.key}, which then is {layers.count}"
                )
                yield Finding(
                    "config-conflict",
                    f"the {file_of(rules)} of the checkpoint {has}, and the tree has {count} layers in {'.'.join(place)}",
                    fix="one of the two is of another checkpoint",
                )


def other_widths(
    rules: RuleFile, of: ModulesOfClass, listed: ModuleList, claimed: Mapping[Name, Found], source: Source, root: str
) -> Iterator[Finding]:
    """Report that a layer has another number of outputs than the class has in every configuration."""
    for name, one in claimed.items():
        outputs = one.module.axes[0] if one.module.type == LINEAR and one.module.axes else ""
        leaf = "/".join((*([root] if root else []), *one.path, KERNEL))
        shape = source.leaves[leaf].spec.shape if outputs.isdecimal() and leaf in source.leaves else ()
        if shape and shape[-1] != int(outputs):  # a derived leaf has no shape yet
            yield Finding(
                "config-conflict",
                f"{listed.package} `{listed.loads}` has {outputs} outputs in {'.'.join(name)}, and the tree has {shape[-1]}",
                rule=rules.path,
                path=leaf,
                fix=f"`{of.key}` of {file_of(rules)} names another class than that of the checkpoint",
            )
