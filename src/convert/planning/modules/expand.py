"""Write the rules of one checkpoint: each rule with `each` once for the modules of its types that the tree has."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from convert.checkpoints.source import Source
from convert.core.findings import Finding
from convert.core.path_pattern import Pattern, parse_pattern
from convert.core.similarity import did_you_mean
from convert.layers import Rule, TargetLayer
from convert.layers.leaf_sums import role_of_sum
from convert.planning.facts.sidecar import read_sidecar
from convert.planning.modules.differences import (
    BIAS,
    file_of,
    leaf_of,
    missing,
    other_counts,
    other_values,
    other_widths,
)
from convert.planning.modules.formulas import states, value_of
from convert.planning.modules.names import Finder, Found, Patterns
from convert.planning.modules.table import (
    NUMBER,
    PARAMETER,
    MissingKeyError,
    Module,
    ModuleList,
    Name,
    UnknownClassError,
    module_list,
    read_table,
)
from convert.rules.file import MODULE, ModulesOfClass, RuleFile
from convert.rules.library import shipped_rules_dir

ARCHITECTURES = "architectures"  # transformers' key of the classes
MAX_CLASSES = 5  # with the same leaves, that an error names
DRAFT = "draft rules from its PyTorch class: `convert rules new CKPT my-model.yaml --like DIR`"


def for_class(rules: RuleFile, source: Source) -> tuple[RuleFile, tuple[Finding, ...]]:
    """Return the rules for the class that the sidecar names, and what the tree or the class does not have.

    Rules without `modules` are returned as they are.
    """
    if rules.modules is None:
        return rules, ()
    listed = listed_modules(rules, source)
    if isinstance(listed, Finding):
        return replace(rules, rules=tuple(rule for rule in rules.rules if not rule.each)), (listed,)
    made = _expanded(_without_unread(rules, listed, source), rules.modules, listed, source)
    return made.rules, made.findings


def listed_modules(rules: RuleFile, source: Source) -> ModuleList | Finding:
    """Return the modules of the class that the sidecar names, for rules with `modules`; or why they are not known."""
    of = rules.modules
    assert of is not None
    sidecar = read_sidecar(rules, source)
    config = sidecar.config
    table = read_table(_path(rules, of))
    if refused := _not_supported(rules, config):
        return refused
    name = _class(of, config)
    if name is None:
        problem = (
            f"the rules need the class of the model, which `{of.key}` of {file_of(rules)} next to the checkpoint names"
        )
        got = json.dumps(config[of.key]) if of.key in config else "no such key" if sidecar.exists else f"no {file_of(rules)}"  # fmt: skip
        return Finding("class-unknown", problem, rule=rules.path, path=str(source.display_path), got=got, fix=_classes_to_write(rules, of, source, config))  # fmt: skip
    if other := _of_another_type(rules, of, name, table, config):
        return other
    try:
        return module_list(table, name, config)
    except MissingKeyError as error:
        got = json.dumps(config[str(error)]) if str(error) in config else "no such key"
        return Finding("class-unknown", f"the modules of {name} follow from {error} of {file_of(rules)}", rule=rules.path, path=str(source.display_path), expected="a number", got=got, fix="write the number that the model was trained with")  # fmt: skip
    except UnknownClassError as error:
        missing = str(error)
        known = sorted(table["classes"])
        near = did_you_mean(missing, known)
        return Finding("class-unknown", f"{file_of(rules)} of the checkpoint names a class that {of.table} lacks", rule=rules.path, path=of.key, expected="one of its classes", got=missing, fix=_or_draft(near))  # fmt: skip


def _without_unread(rules: RuleFile, listed: ModuleList, source: Source) -> RuleFile:
    """Ignore the keys that the source's code does not read, and that state something else than it computes."""
    config = read_sidecar(rules, source).config
    other = {
        key: f"the flax class does not read it, and computes as with {json.dumps(value)}"
        for key, value in listed.unread.items()
        if states(config, key) and value_of(config, key) != value
    }
    if rules.sidecar is None or not other:
        return rules
    return replace(rules, sidecar=replace(rules.sidecar, ignored={**rules.sidecar.ignored, **other}))


def class_table(rules: RuleFile) -> Mapping[str, Any]:
    """Return the table of the rules, which have `modules`."""
    assert rules.modules is not None
    return read_table(_path(rules, rules.modules))


def _not_supported(rules: RuleFile, config: Mapping[str, Any]) -> Finding | None:
    """Return the finding for a model type that is not among those of the rules."""
    assert rules.sidecar is not None
    for key, values in rules.sidecar.supported.items():
        if key in config and config[key] not in values:
            near = did_you_mean(str(config[key]), [str(value) for value in values])
            shown = ", ".join(map(str, values))
            return Finding("class-unknown", f"{key} in the {rules.sidecar.file} of the checkpoint", rule=rules.sidecar.at, expected=shown, got=json.dumps(config[key]), fix=_or_draft(near))  # fmt: skip
    return None


def _or_draft(near: str) -> str:
    """Return what to do where rules do not know a class: a question, which may be empty, and what else."""
    return f"{near} Otherwise {DRAFT}" if near else DRAFT


def _path(rules: RuleFile, of: ModulesOfClass) -> Path:
    """Return the table: it lies beside the rule file."""
    beside = Path(rules.path).parent / of.table
    return beside if beside.is_file() else shipped_rules_dir() / of.table


def _class(of: ModulesOfClass, config: Mapping[str, Any]) -> str | None:
    named = config.get(of.key)
    name = named[0] if isinstance(named, list) and named else named
    if not isinstance(name, str) or not name:
        return None
    name = name.removeprefix("Flax")
    return of.classes.get(name, name)


def _classes_to_write(rules: RuleFile, of: ModulesOfClass, source: Source, config: Mapping[str, Any]) -> str:
    """Say what to write into the sidecar that names no class: the class whose modules the tree has, or one of several."""
    if not config:
        return f"copy the {file_of(rules)} that was saved with the checkpoint: it has the class, and what the leaves do not say"
    table = read_table(_path(rules, of))
    fitting = [name for name in _of_type(table, config) if _is_of(name, rules, of, source, config)]
    if not fitting:
        return f'write "{of.key}" with the name of the class that was trained; no class of {of.table} has the modules of this tree'
    first, *others = (json.dumps(_stated(of, name))[1:-1] for name in fitting[:MAX_CLASSES])
    more = f", or {' or '.join(others)}, which have the same leaves: write the class that was trained" if others else ""
    return f"write {first}, as the tree has its modules{more}"


def _of_type(table: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return the classes of the type of model that the sidecar states; without one, all."""
    stated, classes = config.get("model_type"), table["classes"]
    start = re.sub("[-_]", "", str(stated))  # a class of several models has no type of its own
    named = [name for name, entry in classes.items() if entry.get("model_type") == stated]
    return sorted(named or [name for name in classes if name.lower().startswith(start)] or classes)


def _of_another_type(
    rules: RuleFile, of: ModulesOfClass, name: str, table: Mapping[str, Any], config: Mapping[str, Any]
) -> Finding | None:
    """Report that the sidecar names a class of another type of model than it states: BERT and RoBERTa have the same leaves, and count positions otherwise."""
    assert rules.sidecar is not None
    stated, of_class = config.get("model_type"), table["classes"].get(name, {}).get("model_type")
    if stated is None or of_class is None or name in _of_type(table, config):
        return None
    (near,) = get_close_matches(name, _of_type(table, config), 1, 0)
    fix = f"write {json.dumps(_stated(of, near))[1:-1]} if the type is right, and the model_type{f' {of_class}' if of_class else ''} if the class is"
    return Finding("config-conflict", f"{of.key} and model_type in the {rules.sidecar.file} of the checkpoint contradict each other", rule=rules.sidecar.at, path=of.key, expected=f"a class of {stated}", got=name, fix=fix)  # fmt: skip


def _is_of(name: str, rules: RuleFile, of: ModulesOfClass, source: Source, config: Mapping[str, Any]) -> bool:
    """Whether the tree has the leaves of a class and no others; numbers that the sidecar contradicts are reported once the class is known."""
    try:
        return _expanded(rules, of, module_list(read_table(_path(rules, of)), name, config), source).suits
    except (UnknownClassError, MissingKeyError):
        return False


def _stated(of: ModulesOfClass, name: str) -> dict[str, Any]:
    """Return what a config.json states of a class: transformers' a list, diffusers' the name."""
    return {of.key: [name] if of.key == ARCHITECTURES else name}


@dataclass(frozen=True)
class _Expanded:
    """The rules of a class.

    Attributes:
        findings: what the tree or the class does not have.
        suits: whether the tree has the leaves of the class and no others, with as many outputs where all of the class have as many.
    """

    rules: RuleFile
    findings: tuple[Finding, ...]
    suits: bool


def _expanded(rules: RuleFile, of: ModulesOfClass, listed: ModuleList, source: Source) -> _Expanded:
    finder = Finder(listed, of.renamed)
    root = next((r for r in reversed(rules.root) if r and any(x.startswith(f"{r}/") for x in source.leaves)), "")
    inside = [tuple(name.split("/")) for name in source.leaves if name.startswith(f"{root}/" if root else "")]
    paths = {keys[root.count("/") + 1 if root else 0 :] for keys in inside}
    others = [pattern for rule in rules.rules if not rule.each for pattern in rule.sources.values()]
    spoken_for = {path for path in paths if any(other.match("/".join(path)) for other in others)}
    found = [one for path in paths | {path[:-1] for path in paths} if path and (one := finder.find(path)) is not None]
    found = [one for one in found if not (one.module.absent and one.path in spoken_for)]
    found.sort(key=lambda one: [(not key.isdecimal(), int(key) if key.isdecimal() else 0, key) for key in one.name])
    patterns = Patterns(one.name for one in found)
    made: list[Rule] = []
    claimed: dict[Name, Found] = {}
    taken: set[Name] = set()  # leaves
    tensors: set[str] = set()
    for rule in rules.rules:
        if not rule.each:
            made.append(rule)
            continue
        of_form: dict[tuple[Any, ...], list[Found]] = defaultdict(list)
        for one in found:
            lead = leaf_of(rule.path, one.path)
            unknown_bias = lead[-1] == BIAS and one.module.bias is False and not one.module.bias_when
            if one.module.type in rule.each and lead in paths - taken and not unknown_bias:
                of_form[one.module.form].append(one)
        for members in of_form.values():
            claimed |= {one.name: one for one in members}
            present = {one.path: _roles(rule, one, paths, listed) for one in members}
            roles = set().union(*present.values())
            taken |= {leaf_of(rule.sources[role], one.path) for one in members for role in roles}
            tensors |= {_tensor(rule, one, role) for one in members for role in roles}
            for group in _by_depth(members):
                made += [_rule(rule, members[0].module, roles, path, name) for path, name in patterns.write(group)]
    copied = _copies(listed, made, tensors)
    loads, config = f"{listed.package} `{listed.loads}`", _stated(of, listed.loads)
    target = {
        key: replace(one, loads=loads, config={**one.config, **config}, differs=listed.notes)
        for key, one in rules.targets.items()
    }
    of_another_class = (
        *missing(rules, of, listed, patterns, claimed, taken),
        *other_widths(rules, of, listed, claimed, source, root),
    )
    findings = (*of_another_class, *other_counts(rules, listed, patterns), *other_values(rules, listed))
    asked = {getattr(rule.kind, "epsilon", None) for rule in rules.rules if rule.each}  # each module has its own
    facts = {name: value for name, value in rules.facts.items() if name not in asked}
    whole = paths - taken <= spoken_for
    rules = replace(rules, rules=tuple(copied), root=(root,), targets=target, facts=facts)
    return _Expanded(rules, findings, whole and not of_another_class)


def _roles(rule: Rule, one: Found, paths: set[Name], listed: ModuleList) -> set[str]:
    """Return the leaves that a module has: all that the rule names, but a bias only where class and tree have one."""
    roles = set(rule.sources)
    has_bias = one.module.bias
    tied = f"{'.'.join(one.name)}.{BIAS}" in listed.tied
    if BIAS in roles and (has_bias is False or ((has_bias is None or tied) and leaf_of(rule.sources[BIAS], one.path) not in paths)):  # fmt: skip
        roles -= {role for role in roles if role_of_sum(role) == BIAS}
    return roles


def _tensor(rule: Rule, one: Found, role: str) -> str:
    name = ".".join(one.name)
    return name if one.module.type == PARAMETER else f"{name}.{role}"


def _by_depth(members: Sequence[Found]) -> Iterator[list[Found]]:
    """Group modules whose paths have the same form: the same keys but for numbers."""
    groups: dict[tuple[int, Name], list[Found]] = defaultdict(list)
    for one in members:
        groups[len(one.path), tuple(NUMBER if key.isdecimal() else key for key in one.name)].append(one)
    yield from groups.values()


def _rule(rule: Rule, module: Module, roles: set[str], path: str, name: Pattern) -> Rule:
    """Write a rule for the modules of a pattern."""
    sources = {
        role: parse_pattern(pattern.text.replace(f"{{{MODULE}}}", path))
        for role, pattern in rule.sources.items()
        if role in roles
    }
    layers = {
        to: replace(layer, path=parse_pattern(layer.path.text.replace(f"{{{MODULE}}}", name.text)))
        for to, layer in rule.targets.items()
    }
    kind: Any = rule.kind
    if module.epsilon is not None and hasattr(kind, "epsilon"):
        kind = replace(kind, epsilon=module.epsilon)
    if module.groups is not None:
        kind = replace(kind, num_groups=module.groups)
    if hasattr(kind, "roles"):
        kind = replace(kind, roles=tuple(sources))
    return replace(rule, kind=kind, sources=sources, targets=layers, each=())


def _copies(listed: ModuleList, rules: Sequence[Rule], tensors: set[str]) -> list[Rule]:
    """Write the leaf of each tensor that config.json unties, and that shares it in the source's code, a second time."""
    copies: dict[str, list[str]] = defaultdict(list)
    for name in sorted(name for name in listed.untied - tensors if not listed.has_leaf(name)):
        of = listed.tied[name]
        while of in listed.tied and of not in tensors:
            of = listed.tied[of]
        copies[of].append(name)
    made = []
    for rule in rules:
        layer = rule.targets.get(None)
        names = [] if layer is None else copies.pop(_lead(rule, layer), [])
        also = tuple(replace(layer, path=parse_pattern(_module(rule, name))) for name in names) if layer else ()
        made.append(replace(rule, also={None: also}) if also else rule)
    return made


def _lead(rule: Rule, layer: TargetLayer) -> str:
    return layer.path.text if rule.kind_name == "parameter" else f"{layer.path.text}.weight"


def _module(rule: Rule, tensor: str) -> str:
    return tensor if rule.kind_name == "parameter" else tensor.rpartition(".")[0]
