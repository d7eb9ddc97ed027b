"""Rule files: read and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from convert.core.errors import RuleError
from convert.core.fields import Anything, Key, Record, nearest
from convert.core.path_pattern import Pattern, parse_pattern
from convert.core.yaml_nodes import Node, load_yaml
from convert.layers import KINDS, Drop, Numbering, Rule, TargetLayer
from convert.layers.annotations import read_flattened, read_normalized, read_rope
from convert.layers.low_rank import PLUS_FIRST, PLUS_SECOND, SECOND
from convert.layers.shared_keys import PATTERN, SHARED
from convert.rules import attention_macro
from convert.rules.file import (
    ASK,
    TORCH,
    Axis,
    LayerTypes,
    Requirement,
    RuleFile,
    SidecarConfig,
    Target,
    Version,
    references,
)
from convert.rules.multi_model import each_model
from convert.rules.path_variants import PathVariants, VariantPath
from convert.rules.placeholders import set_aside
from convert.rules.schema import RULE_FILE, rule_record
from convert.rules.validate import braces, check_rule, check_types, facts_of, indices_of, letters_of


def _read_layer(node: Node, word: str) -> TargetLayer:
    kind = KINDS[word]
    assert kind.target is not None
    try:
        return kind.layer(kind.target.read(node) if node.is_mapping else {"module": PATTERN.read(node)})
    except ValueError as error:
        raise RuleError(f"{node.at}: {error}") from None


def _read_targets(node: Node, word: str, targets: Mapping[str, Target]) -> dict[str | None, TargetLayer]:
    if not node.is_mapping or {"module", "name", "coeffs"} & set(node.value):
        layer = _read_layer(node, word)
        return {
            None: layer,
            **{name: _renamed(layer, target) for name, target in targets.items() if target.rename_prefixes},
        }
    assert node.keys_at is not None
    for name in node.value:
        if name not in targets:
            raise RuleError(
                f"{node.keys_at[name]}: {name!r} is no target of this file{nearest(name, targets)} (known: {', '.join(targets)})"
            )
    return {name: _renamed(_read_layer(child, word), targets[name]) for name, child in node.items()}


def _renamed(layer: TargetLayer, target: Target) -> TargetLayer:
    tied = tuple(replace(one, path=target.rename(one.path)) for one in layer.tied)
    return replace(layer, path=target.rename(layer.path), tied=tied)


def _read_rules(node: Node, targets: Mapping[str, Target]) -> Iterator[Rule]:
    """The rule that a node is, or the rules that it is short for."""
    if not node.is_mapping or attention_macro.WORD not in node.value:
        yield _read_rule(node, targets)
        return
    for one in attention_macro.expand(node)[0]:
        rule = _read_rule(one.node, targets)
        kept = rule.sources if one.roles is None else {role: rule.sources[role] for role in one.roles}
        layers = {name: _packed(layer, one.inner) for name, layer in rule.targets.items()}
        yield replace(rule, sources=kept, targets=layers, short=attention_macro.WORD)


def _packed(layer: TargetLayer, inner: tuple[str, ...] | None) -> TargetLayer:
    """A projection, with the torch.nn.MultiheadAttention that it is in."""
    if inner is None:
        return layer
    text = layer.path.text
    module = next((text.removesuffix(f".{name}") for name in inner if text.endswith(f".{name}")), text)
    return replace(layer, packed_in=layer.path if module == text else parse_pattern(module))


def _fixed(nodes: tuple[Node, ...], axes: Mapping[str, Axis]) -> dict[str, Axis]:
    """Sizes that torch.nn.MultiheadAttention ties together, where the file does not say so itself."""
    found: dict[str, Axis] = {}
    for node in nodes:
        tied = attention_macro.expand(node)[1] if node.is_mapping and attention_macro.WORD in node.value else None
        if tied is not None and tied.letter not in axes:
            said = "width of torch.nn.MultiheadAttention, which has no other for all heads together: else give `projections:`"
            found[tied.letter] = Axis(said, tuple(tied.factors), node.at)
    return found


def _read_rule(node: Node, targets: Mapping[str, Target]) -> Rule:
    if not node.is_mapping:
        raise RuleError(f"{node.at}: expected a rule, found {node}")
    assert node.keys_at is not None
    words = [key for key in node.value if key in KINDS]
    if len(words) != 1:
        found = f"it has {' and '.join(words)}" if words else "it has none of them"
        known = [*KINDS, attention_macro.WORD, *SHARED, *(key for kind in KINDS.values() for key in kind.keys)]
        typo = next(
            (
                f" {key!r}{said}"
                for key in node.value
                if key not in known and (said := nearest(key, [*KINDS, attention_macro.WORD]))
            ),
            "",
        )
        raise RuleError(
            f"{node.at}: a rule names its target with one of {', '.join((*KINDS, attention_macro.WORD))}; {found}{typo and ';' + typo}"
        )
    word = words[0]
    node, asked = set_aside(node, word)
    record = rule_record(word)
    kind = KINDS[word]
    if kind.target is not None:  # read apart, as its form depends on the targets of the file
        record = Record(
            {**record.keys, word: Key(Anything(), record.keys[word].doc, required=True)}, record.called, record.hints
        )
    values = record.read(node)
    try:
        layer, rope = kind.read(values), read_rope(values.get("rope"))
        flattened, normalized = read_flattened(values.get("flattened")), read_normalized(values)
    except ValueError as error:
        raise RuleError(f"{node.at}: {error}") from None
    sources: dict[str, Pattern] = {}
    if kind is Drop:
        sources["weight"] = values[word]
    else:
        sources |= layer.patterns(values["from"]) if "from" in values else {}
        if "times" in values:
            sources[SECOND] = values["times"]
        if "plus" in values:
            sources |= {PLUS_FIRST: values["plus"]["from"], PLUS_SECOND: values["plus"]["times"]}
        sources |= {role: values[key] for key, role in kind.leaf_keys.items() if key in values}
        sources |= normalized.paths if normalized else {}
    rule = Rule(
        at=node.at,
        word=word,
        kind=layer,
        sources=sources,
        stacked=values.get("stacked", {}),
        targets={} if kind.target is None else _read_targets(node.value[word], word, targets),
        optional=values.get("optional", kind is Drop),
        layer_type=values.get("layer_type"),
        when=values.get("when"),
        dtype=values.get("dtype"),
        choice=values.get("choice"),
        absent_if=values.get("absent_if"),
        index_from={name: Numbering(tuple(order)) for name, order in values.get("index_from", {}).items()},
        prescaled_by=values.get("prescaled_by"),
        rope=rope,
        flattened=flattened,
        normalized=normalized,
        asked=asked,
    )
    check_rule(rule, node)
    return rule


def _period(place: VariantPath, facts: Mapping[str, Any]) -> VariantPath:
    """The place with the number that its period stands for.

    Raises:
        ValueError: the fact does not repeat a list, or nothing is counted.
    """
    if place.period is not None and not place.order:
        raise ValueError(f"{place.path} has a `period:` and no `order:`, whose last index it is of")
    if not isinstance(place.period, str):
        return place
    fact = facts.get(place.period)
    repeated = fact.get("repeat") if isinstance(fact, dict) else None
    if not repeated or not isinstance(repeated, list):
        raise ValueError(f"the period ${place.period} is no fact that repeats a list")
    return replace(place, period=len(repeated))


def _read_path_variants(values: Mapping[str, Any], node: Node, facts: Mapping[str, Any]) -> tuple[PathVariants, ...]:
    found = []
    for written, listed in values.items():
        at = node.value[written].at
        try:
            listed = tuple(tuple(_period(place, facts) for place in layout) for layout in listed)
            indices = parse_pattern(written).indices
            for place in (place for layout in listed for place in layout):
                own = set(parse_pattern(place.path).indices) | set(place.stacked)
                wanted = set(place.order) if place.order else set(indices)
                if own != wanted or len(set(place.order)) < len(place.order):
                    raise ValueError(
                        f"{place.path} has the indices {braces(own)}, and {written} is counted by {braces(wanted)}; "
                        "`order` lists those of the path and of `stacked`, each once"
                    )
            if len(indices) > 1 or (not indices and any(p.order for layout in listed for p in layout)):
                raise ValueError(f"{written} has {len(indices)} indices; layers are counted by one")
        except ValueError as error:
            raise RuleError(f"{at}: {error}") from None
        found.append(PathVariants(written, indices[0] if indices else None, ((VariantPath(written, {}),), *listed)))
    return tuple(found)


def _read_file(node: Node, path: str, text: str) -> RuleFile:
    values = RULE_FILE.read(node)
    facts = values.get("facts", {})
    targets = {
        name: Target(
            name,
            t["loads"],
            t.get("config", {}),
            t.get("generation", {}),
            t.get("rename_prefixes", {}),
            {
                fact: Requirement(
                    need["is"], need["because"], node.value["targets"].value[name].value["requires"].value[fact].at
                )
                for fact, need in t.get("requires", {}).items()
            },
            t.get("conventions", TORCH),
        )
        for name, t in values["targets"].items()
    }
    if not targets:
        raise RuleError(f"{node.value['targets'].at}: a rule file needs at least one target")
    listed = node.value["rules"]
    if not listed.value:
        raise RuleError(f"{listed.at}: a rule file needs at least one rule")
    rules = tuple(rule for child in listed.value for rule in _read_rules(child, targets))
    axes = {
        name: Axis(axis["is"], axis.get("equals", ()), node.value["axes"].value[name].at)
        for name, axis in values.get("axes", {}).items()
    }
    for name, axis in axes.items():
        for factor in axis.equals:
            if isinstance(factor, str) and factor not in axes:
                raise RuleError(f"{axis.at}: {name} equals a product with {factor}, which `axes` does not declare")
    axes = {**_fixed(listed.value, axes), **axes}
    for rule in rules:
        for said in facts_of(rule):
            if said not in facts:
                raise RuleError(f"{rule.at}: there is no fact {said!r} in `facts`{nearest(said, facts)}")
        try:
            rule.kind.check_facts({name: value for name, value in facts.items() if value != ASK})
        except ValueError as error:
            raise RuleError(f"{rule.at}: {error}") from None
    types = {
        name: LayerTypes(t["of"], t["leaves"], node.value["layer_types"].value[name].at)
        for name, t in values.get("layer_types", {}).items()
    }
    check_types(types, rules, facts)
    versions = tuple(Version(name, v["sizes"], v.get("facts", {})) for name, v in values.get("versions", {}).items())
    for version in versions:
        for key in version.facts:
            if key not in facts:
                raise RuleError(
                    f"{node.value['versions'].at}: version {version.name} sets {key!r}, which `facts` does not declare"
                )
        for key in version.sizes:
            if key not in axes:
                raise RuleError(
                    f"{node.value['versions'].at}: version {version.name} has a size of {key!r}, which `axes` does not declare"
                )
    for letter in values.get("must_divide", {}).values():
        if letter not in axes:
            raise RuleError(
                f"{node.value['must_divide'].at}: `must_divide` speaks of {letter}, which `axes` does not declare"
            )
    for called, named in (
        ("needs_confirmation", values.get("needs_confirmation", {})),
        ("must_divide", values.get("must_divide", {})),
        *(("requires", t.requires) for t in targets.values()),
    ):
        for name in named:
            if name not in facts:
                raise RuleError(
                    f"{node.at}: `{called}` speaks of {name!r}, which is no fact of `facts`{nearest(name, facts)}"
                )
    path_variants = (
        _read_path_variants(values["path_variants"], node.value["path_variants"], facts)
        if "path_variants" in values
        else ()
    )
    for name, fact in facts.items():
        if isinstance(fact, dict) and set(fact) == {"repeat", "length"} and str(fact["length"])[1:] not in axes:
            raise RuleError(
                f"{node.value['facts'].value[name].at}: the length {fact['length']} is no size that `axes` declares"
            )
    indices = {name: rule for rule in reversed(rules) for name in indices_of(rule) if rule.word != "drop"}
    for rule in rules:
        for letter in () if rule.asked else letters_of(rule):
            if letter in indices:
                raise RuleError(
                    f"{rule.at}: {letter} is an axis here and the index {{{letter}}} in line {indices[letter].at.line}; "
                    "call the index otherwise, such as {layer}"
                )
    variants: dict[str, Rule] = {}
    for rule in rules:
        first = variants.setdefault(rule.choice, rule) if rule.choice else rule
        if first.kind.variants != rule.kind.variants:
            raise RuleError(
                f"{rule.at}: {rule.choice!r} chooses among {', '.join(rule.kind.variants)} here and among "
                f"{', '.join(first.kind.variants)} in line {first.at.line}; name them alike, or give one of the two another name"
            )
    for target in targets.values():
        for said in (*references(target.config), *references(target.generation)):
            if said not in facts and said not in axes and said not in types:
                raise RuleError(
                    f"{node.value['targets'].value[target.name].at}: config refers to ${said}, which is in neither `facts` "
                    f"nor `axes`{nearest(said, [*facts, *axes, *types])}"
                )
    return RuleFile(
        path=path,
        model=values["model"],
        family=values.get("family"),
        title=values["title"],
        reference=values.get("reference", ""),
        root=tuple(prefix.strip("/") for prefix in values.get("root") or ("",)),
        leaf_names=tuple(values.get("leaf_names", ())),
        axes=axes,
        facts=facts,
        layer_types=types,
        versions=versions,
        targets=targets,
        rules=rules,
        text=text,
        node=node,
        path_variants=path_variants,
        sidecar=_read_sidecar(values["sidecar"], node.value["sidecar"]) if "sidecar" in values else None,
        must_divide=values.get("must_divide", {}),
        needs_confirmation={name: text for name, text in values.get("needs_confirmation", {}).items() if text},
    )


def _read_sidecar(values: Mapping[str, Any], node: Node) -> SidecarConfig:
    name = values["file"]
    if "/" in name or "\\" in name or name in ("", ".", ".."):
        raise RuleError(f"{node.value['file'].at}: {name!r} is no name of a file beside the checkpoint")
    return SidecarConfig(name, values.get("supported", {}), node.at.line_only)


def parse_models(text: str, name: str = "rules.yaml") -> tuple[RuleFile, ...]:
    """Reads the rules of every model that a file declares.

    Raises:
        RuleError: not a valid rule file; the message has line and column.
    """
    return tuple(_read_file(node, name, text) for node in each_model(load_yaml(text, name)))


def parse_rules(text: str, name: str = "rules.yaml") -> RuleFile:
    """Reads the rules of one model from a string.

    Raises:
        RuleError: not a valid rule file (the message has line and column), or one that declares several models.
    """
    return single_model(parse_models(text, name), name)


def single_model(models: tuple[RuleFile, ...], path: str) -> RuleFile:
    """The only model of a file.

    Raises:
        RuleError: there are several.
    """
    if len(models) > 1:
        raise RuleError(
            f"{path} declares several models, {', '.join(m.model for m in models)}; read it with `load_models`"
        )
    return models[0]
