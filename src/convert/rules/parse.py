"""Parse rule files into `RuleFile`s. This module reads values; `convert.rules.checks.validate` checks what they mean together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from convert.core.errors import RuleError
from convert.core.fields import Anything, Key, Record, gather, located, wrong_value
from convert.core.findings import Finding
from convert.core.path_pattern import Pattern, parse_pattern
from convert.core.similarity import did_you_mean
from convert.core.yaml_nodes import YamlNode, load_yaml
from convert.layers import KINDS, Drop, Numbering, Rule, TargetLayer
from convert.layers.base import LayerKind
from convert.layers.leaf_sums import IMAGINARY, NEXT, PLUS, LeafSum, by_role
from convert.layers.low_rank import PLUS_FIRST, PLUS_SECOND, SECOND
from convert.layers.shared_keys import PATTERN, SHARED
from convert.layers.transforms.rope import locate_heads
from convert.layers.weight_keys import read_factor, read_flattened, read_normalized, read_rope
from convert.rules import attention_macro
from convert.rules.allowed_by_use import allowed_facts
from convert.rules.checks.validate import WrittenRule, validate
from convert.rules.copies import Copies
from convert.rules.file import (
    STEMS,
    TORCH,
    Axis,
    DistinguishedBy,
    LayerTypes,
    Layout,
    ModulesOfClass,
    Multiple,
    Requirement,
    RuleFile,
    SidecarConfig,
    SizeProduct,
    Target,
    Version,
)
from convert.rules.formula import SizeFormula, parse_formula
from convert.rules.multi_model import each_model
from convert.rules.path_variants import PathVariants, VariantPath
from convert.rules.placeholders import ASK, replace_placeholders
from convert.rules.schema import RULE_FILE, parse_factors, rule_record


def parse_models(text: str, name: str = "rules.yaml") -> tuple[RuleFile, ...]:
    """Parse and check the rules of every model that a file declares.

    Raises:
        RuleError: the file is not valid. The error has a finding for every problem that could be determined.
    """
    findings: list[Finding] = []
    models = []
    for node in list(each_model(load_yaml(text, name))):
        with gather(findings):
            models.append(_parse_model(node, name, text))
    if findings:  # aliases, and headers that models share, repeat the same finding
        raise RuleError(*{str(finding): finding for finding in findings}.values())
    return tuple(models)


def parse_rules(text: str, name: str = "rules.yaml") -> RuleFile:
    """Parse and check the rules of one model.

    Raises:
        RuleError: the file is not valid, or declares several models.
    """
    return single_model(parse_models(text, name), name)


def single_model(models: tuple[RuleFile, ...], path: str) -> RuleFile:
    """Return the only model of a file.

    Raises:
        RuleError: there are several.
    """
    if len(models) > 1:
        names = ", ".join(rules.model for rules in models)
        finding = Finding("rule-several-models", rule=path, expected="one model", got=names, fix="use `load_models`")
        raise RuleError(finding)
    return models[0]


def _parse_model(node: YamlNode, path: str, text: str) -> RuleFile:
    findings: list[Finding] = []
    with gather(findings):
        values = RULE_FILE.read(node)
    if findings:
        _add_findings_of_rules(node, findings)
        raise RuleError(*findings)
    header = node.value
    targets = {name: _target(name, target, header["targets"].value[name]) for name, target in values["targets"].items()}
    written, attention_axes = _parse_rules(header["rules"], targets, findings)
    facts = values.get("facts", {})
    axes = {
        **attention_axes,
        **{
            name: Axis(
                axis["is"],
                axis.get("equals", ()),
                header["axes"].value[name].at,
                any(varies := axis.get("varies", ())),
                tuple(index for index in varies if isinstance(index, str)),
                tuple(axis.get("behind", ())),
                axis.get("divides", ""),
            )
            for name, axis in values.get("axes", {}).items()
        },
    }
    products = {letter: axis.equals for letter, axis in axes.items()}
    written = [WrittenRule(locate_heads(one.rule, products), one.node) for one in written]
    rules = RuleFile(
        path=path,
        model=values["model"],
        families=tuple(values.get("family", ())),
        title=values["title"],
        reference=values.get("reference", ""),
        root=tuple(prefix.strip("/") for prefix in values.get("root") or ("",)),
        leaf_names=tuple(values.get("leaf_names", ())),
        axes=axes,
        facts=facts,
        layer_types={
            name: LayerTypes(types["of"], types["leaves"], header["layer_types"].value[name].at)
            for name, types in values.get("layer_types", {}).items()
        },
        versions=tuple(
            Version(
                name,
                version["sizes"],
                version.get("facts", {}),
                version.get("choices", {}),
                version.get("needs_confirmation", {}),
            )
            for name, version in values.get("versions", {}).items()
        ),
        targets=targets,
        rules=tuple(one.rule for one in written),
        text=text,
        node=node,
        copies=tuple(
            _copies(one, node) for one, node in zip(values.get("copies", ()), _listed(header, "copies"), strict=True)
        ),
        path_variants=tuple(
            _path_variants(part, listed, header["path_variants"].value[part], facts)
            for part, listed in values.get("path_variants", {}).items()
        ),
        sidecar=_sidecar(values["sidecar"], header["sidecar"]) if "sidecar" in values else None,
        distinguished_by=_distinguished_by(values["distinguished_by"], header["distinguished_by"])
        if "distinguished_by" in values
        else None,
        products=tuple(
            SizeProduct(parse_factors(text), letter, header["products"].keys_at[text])
            for text, letter in values.get("products", {}).items()
        ),
        formulas=tuple(
            SizeFormula(text, parse_formula(text), letter, header["formulas"].keys_at[text])
            for text, letter in values.get("formulas", {}).items()
        ),
        modules=_modules(values["modules"], header["modules"]) if "modules" in values else None,
        layouts=tuple(
            _layout(one, node, values.get("root") or ("",))
            for one, node in zip(values.get("layouts", ()), _listed(header, "layouts"), strict=True)
        ),
        usual_variants=values.get("choices", {}),
        allowed=allowed_facts(values, [one.rule for one in written]),
        needs_confirmation={name: text for name, text in values.get("needs_confirmation", {}).items() if text},
    )
    findings += validate(rules, written)
    if findings:
        raise RuleError(*findings)
    return rules


def _add_findings_of_rules(node: YamlNode, findings: list[Finding]) -> None:
    """Add the findings of the rules to those of a header that is not valid, if it declares the targets that rules name."""
    header = node.value if node.is_mapping else {}
    if "rules" in header and "targets" in header and header["targets"].is_mapping:
        _parse_rules(header["rules"], {name: Target(name, "", {}) for name in header["targets"].value}, findings)


def _target(name: str, values: Mapping[str, Any], node: YamlNode) -> Target:
    return Target(
        name,
        values["loads"],
        values.get("config", {}),
        values.get("generation", {}),
        values.get("rename_prefixes", {}),
        {
            fact: Requirement(required["is"], required["because"], node.value["requires"].value[fact].at)
            for fact, required in values.get("requires", {}).items()
        },
        values.get("format", TORCH),
        tuple(values.get("same_tree", ())),
        values.get("files", STEMS[0]),
        differs=tuple(values.get("differs", ())),
        multiples={
            letter: Multiple(stated["of"], stated["because"], node.value["multiples"].value[letter].at)
            for letter, stated in values.get("multiples", {}).items()
        },
        shared={name: tuple(others) for name, others in values.get("shared", {}).items()},
    )


def _sidecar(values: Mapping[str, Any], node: YamlNode) -> SidecarConfig:
    supported, ignored, adapted = (values.get(key, {}) for key in ("supported", "ignored", "adapted"))
    supported = {key: known for key, known in supported.items() if known}
    sizes = tuple(SizeFormula(text, parse_formula(text), key, node.value["sizes"].value[key].at) for key, text in values.get("sizes", {}).items())  # fmt: skip
    return SidecarConfig(
        values["file"],
        supported,
        ignored,
        adapted,
        tuple(values.get("below", ())),
        node.at.line_only,
        sizes,
        values.get("allowed", {}),
        values.get("defaults", {}),
    )


def _distinguished_by(values: Mapping[str, Any], node: YamlNode) -> DistinguishedBy:
    if ("with" in values) == ("without" in values):
        expected = "one of `with` and `without`"
        raise RuleError(Finding("rule-wrong-value", rule=str(node.at), path="distinguished_by", expected=expected, got="both" if "with" in values else "neither"))  # fmt: skip
    return DistinguishedBy(values["file"], values.get("with") or values["without"], "with" in values, node.at.line_only)


def _modules(values: Mapping[str, Any], node: YamlNode) -> ModulesOfClass:
    classes, renamed, only = (values.get(key, {}) for key in ("classes", "renamed", "renamed_with"))
    return ModulesOfClass(values["table"], values["key"], classes, renamed, only, node.at)


def _listed(header: Mapping[str, YamlNode], key: str) -> tuple[YamlNode, ...]:
    return header[key].value if key in header else ()


def _copies(values: Mapping[str, Any], node: YamlNode) -> Copies:
    keep, trees = values["keep"], values["of"]
    keep_at = node.value["keep"].at
    if len(set(trees)) < max(2, len(trees)):
        raise wrong_value(node.value["of"], "at least two different trees")
    if keep != ASK and keep not in trees:
        raise RuleError(
            Finding(
                "rule-wrong-value",
                rule=str(keep_at),
                expected=f"one of {', '.join(trees)}",
                got=repr(keep),
                fix=did_you_mean(keep, trees),
            )
        )
    return Copies(trees, None if keep == ASK else keep, values.get("in", ("",)), node.at, keep_at)


def _layout(values: Mapping[str, Any], node: YamlNode, roots: Sequence[str]) -> Layout:
    return Layout(
        values["name"],
        values.get("root", roots[0]).strip("/"),
        tuple(path.text for path in values.get("variants", ())),
        values.get("flat", False),
        values.get("leaf", ""),
        node.at,
    )


def _path_variants(
    part: str, listed: Iterable[Iterable[VariantPath]], node: YamlNode, facts: Mapping[str, Any]
) -> PathVariants:
    variants = tuple(tuple(_with_period(path, facts) for path in variant) for variant in listed)
    return PathVariants(part, ((VariantPath(part, {}),), *variants), node.at)


def _with_period(path: VariantPath, facts: Mapping[str, Any]) -> VariantPath:
    """Replace a period that names a fact by the length of the list that the fact repeats."""
    fact = facts.get(path.period) if isinstance(path.period, str) else None
    repeated = fact.get("repeat") if isinstance(fact, dict) else None
    return replace(path, period=len(repeated)) if isinstance(repeated, list) and repeated else path


# --- rules ----------------------------------------------------------------------------------------------------------


def _parse_rules(
    listed: YamlNode, targets: Mapping[str, Target], findings: list[Finding]
) -> tuple[list[WrittenRule], dict[str, Axis]]:
    """Parse the list of rules. Attention rules expand to `linear` rules, and tie sizes of axes."""
    written: list[WrittenRule] = []
    axes: dict[str, Axis] = {}
    for node in listed.value if isinstance(listed.value, tuple) else ():
        with gather(findings):
            if not node.is_mapping:
                raise wrong_value(node, "a rule")
            if attention_macro.WORD in node.value:
                expanded, width = attention_macro.expand(node)
                written += [_expanded_rule(one, targets) for one in expanded]
                axes |= {width.letter: Axis(ATTENTION_WIDTH, tuple(width.factors), node.at)} if width else {}
            else:
                written.append(_parse_rule(node, targets))
    return written, axes


ATTENTION_WIDTH = (
    "width of torch.nn.MultiheadAttention, which is that of all heads together (otherwise use `projections:`)"
)


def _expanded_rule(one: attention_macro.Expanded, targets: Mapping[str, Target]) -> WrittenRule:
    rule, node = (written := _parse_rule(one.node, targets)).rule, written.node
    sources = rule.sources if one.roles is None else {role: rule.sources[role] for role in one.roles}
    layers = {name: _packed(layer, one.inner) for name, layer in rule.targets.items()}
    return WrittenRule(replace(rule, sources=sources, targets=layers, macro=attention_macro.WORD), node)


def _packed(layer: TargetLayer, inner: tuple[str, ...] | None) -> TargetLayer:
    """Add the torch.nn.MultiheadAttention that a projection belongs to."""
    if inner is None:
        return layer
    text = layer.path.text
    module = next((text.removesuffix(f".{name}") for name in inner if text.endswith(f".{name}")), text)
    return replace(layer, packed_in=layer.path if module == text else parse_pattern(module))


def _parse_rule(node: YamlNode, targets: Mapping[str, Target]) -> WrittenRule:
    word = _kind_name(node)
    kind = KINDS[word]
    node, asked = replace_placeholders(node, word)
    values = _record(word).read(node)
    with located(node.at, "rule-layer-conflict"):
        layer, rope = kind.read(values), read_rope(values.get("rope"))
        factor = read_factor(values.get("prescaled_by"))
        flattened, normalized = read_flattened(values.get("flattened")), read_normalized(values)
    layers = {} if kind.target is None else _targets(node.value[word], kind, targets)
    rule = Rule(
        at=node.at,
        kind_name=word,
        kind=layer,
        sources={**_sources(kind, layer, values, word), **(normalized.paths if normalized else {})},
        stacked=values.get("stacked", {}),
        targets={name: first for name, (first, *_) in layers.items()},
        also={name: tuple(others) for name, (_, *others) in layers.items() if others},
        optional=values.get("optional", kind is Drop or "optional_last" in values),
        optional_last=values.get("optional_last"),
        fact_values=values.get("fact_values", {}),
        layer_type=values.get("layer_type"),
        when=values.get("when"),
        dtype=values.get("dtype"),
        choice=values.get("choice"),
        absent_if=values.get("absent_if"),
        same_size=values.get("same_size", {}),
        index_from={name: Numbering(tuple(order)) for name, order in values.get("index_from", {}).items()},
        prescaled_by=factor,
        rope=rope,
        flattened=flattened,
        concatenated=values.get("concatenated", {}),
        normalized=normalized,
        asked=asked,
        each=tuple(values.get("each", ())),
        part=values.get("part", ()),
        numbers=_numbers(kind, values),
    )
    return WrittenRule(rule, node)


def _kind_name(node: YamlNode) -> str:
    """Return the key of a rule that names its kind.

    Raises:
        RuleError: it has none, or several.
    """
    words: list[str] = [key for key in node.value if key in KINDS]
    if len(words) == 1:
        return words[0]
    kinds = [*KINDS, attention_macro.WORD]
    known = {*kinds, *SHARED, *(key for kind in KINDS.values() for key in kind.keys)}
    unknown = [key for key in node.value if key not in known]
    misspelt = {key: hint for key in unknown if (hint := did_you_mean(key, kinds))}
    given = words or list(misspelt)[:1] or unknown or list(node.value)
    raise RuleError(
        Finding(
            "rule-kind",
            "a rule has one key that names its kind",
            rule=str(node.at),
            expected=f"one of {', '.join(kinds)}",
            got=" and ".join(map(repr, given)) or "an empty rule",
            fix="write one rule for each" if words else next(iter(misspelt.values()), "add one of them"),
        )
    )


def _record(word: str) -> Record:
    """Return the keys of a rule. Its target is read separately, as its form depends on the targets of the file."""
    record = rule_record(word)
    if KINDS[word].target is None:
        return record
    keys = {**record.keys, word: Key(Anything(), record.keys[word].doc, required=True)}
    return Record(keys, record.description, record.hints)


def _sources(kind: type[LayerKind], layer: LayerKind, values: Mapping[str, Any], word: str) -> dict[str, Pattern]:
    """Return the patterns of a rule's leaves by role."""
    if kind is Drop:
        return {"weight": values[word]}
    paths = _paths(values.get("from"))
    sources = dict(layer.patterns(paths[0])) if paths else {}
    sources |= by_role("weight", paths, NEXT if kind.joins else _sign(values["from"])) if len(paths) > 1 else {}
    if "times" in values:
        sources[SECOND] = values["times"]
    if "plus" in values:
        sources |= {PLUS_FIRST: values["plus"]["from"], PLUS_SECOND: values["plus"]["times"]}
    for key, role in kind.leaf_keys.items():
        sources |= by_role(role, _paths(values.get(key)), _sign(values.get(key)))
    return sources


def _sign(value: Pattern | LeafSum | tuple[Pattern, ...] | None) -> str:
    """Return what stands between the leaves that are added up."""
    return IMAGINARY if isinstance(value, LeafSum) and value.imaginary else PLUS


def _paths(value: Pattern | LeafSum | tuple[Pattern, ...] | None) -> tuple[Pattern, ...]:
    """Return the path of a leaf, or those of the leaves that are added up or joined."""
    if value is None or isinstance(value, tuple):
        return value or ()
    return value.paths if isinstance(value, LeafSum) else (value,)


def _numbers(kind: type[LayerKind], values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that the source adds to leaves, by their role."""
    sums = {role: values.get(key) for key, role in {"from": "weight", **kind.leaf_keys}.items()}
    return {role: value.number for role, value in sums.items() if isinstance(value, LeafSum) and value.number}


_Layers = Mapping[str | None, tuple[TargetLayer, ...]]


def _targets(node: YamlNode, kind: type[LayerKind], targets: Mapping[str, Target]) -> _Layers:
    """Read where a rule's tensors go: the same places for all targets (key None), or some for each."""
    if node.keys_at is None or {"module", "name", "coeffs"} & set(node.value):
        layers = _target_layers(node, kind)
        renamed: dict[str | None, tuple[TargetLayer, ...]] = {
            name: tuple(_renamed(layer, target) for layer in layers)
            for name, target in targets.items()
            if target.rename_prefixes
        }
        return {None: layers} | renamed
    found: dict[str | None, tuple[TargetLayer, ...]] = {}
    findings: list[Finding] = []
    for name, child in node.items():
        with gather(findings):
            if name not in targets:
                raise RuleError(_unknown_target(name, node, targets))
            found[name] = tuple(_renamed(layer, targets[name]) for layer in _target_layers(child, kind))
    if findings:
        raise RuleError(*findings)
    return found


def _target_layers(node: YamlNode, kind: type[LayerKind]) -> tuple[TargetLayer, ...]:
    """Read a target, or a list of targets that all get the leaves."""
    if not isinstance(node.value, tuple):
        return (_target_layer(node, kind),)
    if not node.value:
        raise wrong_value(node, "a target, or a list of targets that all get the leaves")
    return tuple(_target_layer(child, kind) for child in node.value)


def _unknown_target(name: str, node: YamlNode, targets: Iterable[str]) -> Finding:
    assert node.keys_at is not None
    return Finding(
        "rule-unknown-name",
        f"{name!r} is not a target of this file",
        rule=str(node.keys_at[name]),
        expected=f"one of {', '.join(targets)}",
        fix=did_you_mean(name, targets),
    )


def _target_layer(node: YamlNode, kind: type[LayerKind]) -> TargetLayer:
    assert kind.target is not None
    with located(node.at, "rule-layer-conflict"):
        return kind.layer(kind.target.read(node) if node.is_mapping else {"module": PATTERN.read(node)})


def _renamed(layer: TargetLayer, target: Target) -> TargetLayer:
    tied = tuple(replace(one, path=target.rename(one.path)) for one in layer.tied)
    return replace(layer, path=target.rename(layer.path), tied=tied)
