"""Rule files: found by name, read, checked, and described as JSON Schema."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from convert.errors import RuleError
from convert.fields import INTEGER, TEXT, Anything, Either, Field, Key, ListOf, MapOf, Record, Scalar, nearest
from convert.kinds import KINDS, Drop, Linear, Numbering, Rule, TargetLayer, Timescales
from convert.kinds.base import PATTERN, SHARED
from convert.pattern import Pattern, parse_pattern
from convert.places import Place, Places
from convert.yamlfile import Node, Position, load_yaml

ASK = "ask"  # the value of a fact that the tree does not hold and the rules do not know


@dataclass(frozen=True)
class Axis:
    """What an axis letter (or an index) means.

    Attributes:
        meaning: in words.
        equals: factors whose product is its size: integers and letters; empty when it is free.
        at: where it is declared.
    """

    meaning: str
    equals: tuple[int | str, ...]
    at: Position


@dataclass(frozen=True)
class LayerTypes:
    """Layers of several types, told apart by the leaves that they have.

    Attributes:
        index: of the layers.
        leaves: type -> leaves that only layers of this type have.
        at: where it is declared.
    """

    index: str
    leaves: Mapping[str, Pattern]
    at: Position


@dataclass(frozen=True)
class Version:
    """A published size: how to recognise it, and the facts that its tree does not hold."""

    name: str
    sizes: Mapping[str, int]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """PyTorch code that loads the result.

    Attributes:
        name: as given to ``--to``.
        loads: which class loads it, for people.
        config: contents of ``config.json``, with ``$name`` for sizes and facts; empty when the target has none.
        generation: contents of ``generation_config.json``, likewise.
    """

    name: str
    loads: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RuleFile:
    """The rules of one model, checked. A file that declares several gives one of these for each.

    Attributes:
        path: the file.
        model: its name; family: a name that it shares with files of which one is chosen by the tree.
        title: for people.
        root: prefixes below which the leaves may lie.
        types: name of a list, one word for each layer -> what tells the types apart.
        records: names of the leaves, in the order of the file, for a checkpoint that holds no names (Equinox).
        places: where the leaves of a layer lie, when the model comes in several layouts.
        text: what the file says.
        node: the same with the line of every word, for this model.
    """

    path: str
    model: str
    family: str | None
    title: str
    root: tuple[str, ...]
    records: tuple[str, ...]
    axes: Mapping[str, Axis]
    facts: Mapping[str, Any]
    types: Mapping[str, LayerTypes]
    versions: tuple[Version, ...]
    targets: Mapping[str, Target]
    rules: tuple[Rule, ...]
    text: str = field(repr=False)
    node: Node = field(repr=False, compare=False)
    places: tuple[Places, ...] = ()

    @property
    def sha256(self) -> str:
        """Checksum of the text, for the provenance."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        """Names that ``--set`` may give a variant for, and the variants."""
        return {rule.choice: rule.kind.variants for rule in self.rules if rule.choice}


def _parse_factors(value: str | int) -> tuple[int | str, ...]:
    factors: list[int | str] = []
    for part in str(value).split("*"):
        text = part.strip()
        if text.isdecimal() and int(text) > 0:
            factors.append(int(text))
        elif text.isidentifier():
            factors.append(text)
        else:
            raise ValueError(f"expected a product of integers and letters such as 2*P, not {value!r}")
    return tuple(factors)


def parse_axis_name(text: str) -> str:
    """A letter, or the name of an index such as ``i`` or ``layer``.

    Raises:
        ValueError: something else.
    """
    if not text.isidentifier():
        raise ValueError(f"an axis is called by a letter (or an index by its name), not {text!r}")
    return text


_AXIS = Record(
    {
        "is": Key(TEXT, "what the axis means", required=True),
        "equals": Key(
            Scalar((str, int), "a product such as 2*P", _parse_factors),
            "its size, as a product of integers and letters",
        ),
    },
    "an axis",
)
_TYPES = Record(
    {
        "of": Key(Scalar(str, "the name of an index", parse_axis_name), "index of the layers", required=True),
        "leaves": Key(
            MapOf(PATTERN, "a mapping of a type to the leaves that only layers of this type have"),
            "type -> leaves that every layer of this type has, and no other",
            required=True,
        ),
    },
    "layer types",
)
_VERSION = Record(
    {
        "sizes": Key(
            MapOf(Scalar(int, "an integer")), "sizes by which the published model is recognised", required=True
        ),
        "facts": Key(MapOf(Anything()), "facts that hold for it"),
    },
    "a version",
)
_TARGET = Record(
    {
        "loads": Key(TEXT, "the class that loads the result", required=True),
        "config": Key(MapOf(Anything()), "contents of config.json; $name is a size or a fact, $name+1 one more"),
        "generation": Key(MapOf(Anything()), "contents of generation_config.json, likewise"),
    },
    "a target",
)


_PLACE = Record(
    {
        "path": Key(TEXT, "what stands in the tree in place of the key", required=True),
        "stacked": Key(MapOf(INTEGER), "index -> axis of the leaf that stacks it"),
        "order": Key(
            ListOf(Scalar(str, "the name of an index")),
            "the indices that the layers are counted by, the slowest first: [s, p] counts p within s",
        ),
    },
    "a place",
)


class _Layout(Field):
    """A place: its path alone, with more, or several that are counted one after the other."""

    def read(self, node: Node) -> tuple[Place, ...]:
        if isinstance(node.value, tuple):
            return tuple(place for child in node.value for place in self.read(child))
        if not node.is_mapping:
            return (Place(TEXT.read(node), {}),)
        values = _PLACE.read(node)
        return (Place(values["path"], values.get("stacked", {}), values.get("order", ())),)

    def schema(self) -> dict[str, Any]:
        one = {"anyOf": [TEXT.schema(), _PLACE.schema()]}
        return {"anyOf": [*one["anyOf"], {"type": "array", "items": one}]}


class _Rules(ListOf):
    """The list of rules; its schema has one alternative per kind."""

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"oneOf": [_rule_schema(word) for word in KINDS]}}


_FILE = Record(
    {
        "model": Key(Scalar(str, "a name"), "the name to call these rules by", required=True),
        "family": Key(Scalar(str, "a name"), "a name shared by files of which the tree chooses one"),
        "title": Key(TEXT, "the model's name, for people", required=True),
        "root": Key(
            ListOf(Scalar((str, type(None)), "a path", lambda v: v or ""), or_one=True),
            "prefixes below which the leaves may lie",
        ),
        "records": Key(
            ListOf(Scalar((str, int), "a path", str)),
            "names of the leaves in the order of the file, where the checkpoint has none (Equinox)",
        ),
        "places": Key(
            MapOf(ListOf(_Layout(), or_one=True)),
            "part of a path, as the rules write it -> what else may stand there in a tree",
        ),
        "axes": Key(MapOf(_AXIS, "a mapping of letters", parse_axis_name), "what each axis letter and index means"),
        "facts": Key(
            MapOf(Anything()), "what the source computes that is no weight; `ask` when only --set or a version knows"
        ),
        "types": Key(
            MapOf(_TYPES), "layers of several types: a name for the list of their types, and how to tell them apart"
        ),
        "versions": Key(MapOf(_VERSION), "published sizes"),
        "targets": Key(MapOf(_TARGET), "PyTorch code that loads the result; the first is the default", required=True),
        "rules": Key(_Rules(Anything()), "one entry per layer, or per group of layers that are alike", required=True),
    },
    "a rule file",
)


def _target_keys(word: str) -> Key:
    kind = KINDS[word]
    if kind.target is None:
        return Key(PATTERN, "paths of the leaves to leave out", required=True)
    layer = Either(PATTERN, kind.target)
    return Key(Either(PATTERN, MapOf(layer)), f"where it goes. {kind.doc}", required=True)


def _rule_record(word: str) -> Record:
    kind = KINDS[word]
    shared = dict(SHARED)
    if kind in (Drop, Timescales):
        shared = {}
    else:
        shared["from"] = Key(SHARED["from"].field, SHARED["from"].doc, required=True)
    return Record({word: _target_keys(word), **kind.keys, **shared}, f"a `{word}` rule")


def _rule_schema(word: str) -> dict[str, Any]:
    schema = _rule_record(word).schema()
    kind = KINDS[word]
    if kind.target is not None:  # either one target for all, in short or long form, or one for each of several
        layer = Either(PATTERN, kind.target).schema()
        several = {
            "type": "object",
            "additionalProperties": layer,
            "propertyNames": {"not": {"enum": [*kind.target.keys]}},
        }
        schema["properties"][word] = {"description": f"where it goes. {kind.doc}", "anyOf": [layer, several]}
    return {"title": word, **schema}


ONLY = ListOf(Scalar(str, "the name of a model"), or_one=True)


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a rule file, for editors."""
    file = _FILE.schema()
    header = {key: value for key, value in file["properties"].items() if key not in ("model", "family", "rules")}
    for rule in file["properties"]["rules"]["items"]["oneOf"]:
        rule["properties"]["only"] = {"description": "models that the rule is for (with `models`)", **ONLY.schema()}
    target = {
        **_TARGET.schema(),
        "required": [],
    }  # a model may add to a target that the file describes, and the reverse
    header["targets"] = {"type": "object", "additionalProperties": target}
    file["properties"]["targets"] = {**file["properties"]["targets"], "additionalProperties": target}
    model = {"type": "object", "additionalProperties": False, "properties": header}
    file["properties"]["models"] = {
        "description": "several models in one file: name -> what its header has besides, or instead of, the file's",
        "type": "object",
        "additionalProperties": model,
    }
    del file["required"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ckpt-convert rule file",
        "description": "Generated by `convert rules schema`; do not edit.",
        **file,
        "oneOf": [
            {
                "required": ["model", "title", "targets", "rules"],
                "properties": {"targets": {"additionalProperties": {"required": ["loads"]}}},
            },
            {"required": ["models", "rules"]},
        ],
    }


def _read_layer(node: Node, word: str) -> TargetLayer:
    if not node.is_mapping:
        return TargetLayer(PATTERN.read(node))
    record = KINDS[word].target
    assert record is not None
    values = record.read(node)
    return TargetLayer(
        path=values.get("module") or values["name"],
        names={role: values[role] for role in ("weight", "bias") if role in values},
        multiplies_by=values.get("multiplies_by", "weight"),
        computes=values.get("einsum") or values.get("dimension_numbers"),
        part=values.get("part"),
    )


def _read_targets(node: Node, word: str, targets: Mapping[str, Target]) -> dict[str | None, TargetLayer]:
    if not node.is_mapping or {"module", "name"} & set(node.value):
        return {None: _read_layer(node, word)}
    assert node.keys_at is not None
    for name in node.value:
        if name not in targets:
            raise RuleError(
                f"{node.keys_at[name]}: {name!r} is no target of this file{nearest(name, targets)} (known: {', '.join(targets)})"
            )
    return {name: _read_layer(child, word) for name, child in node.items()}


def _read_rule(node: Node, targets: Mapping[str, Target]) -> Rule:
    if not node.is_mapping:
        raise RuleError(f"{node.at}: expected a rule, found {node}")
    assert node.keys_at is not None
    words = [key for key in node.value if key in KINDS]
    if len(words) != 1:
        found = f"it has {' and '.join(words)}" if words else "it has none of them"
        known = [*KINDS, *SHARED, *(key for kind in KINDS.values() for key in kind.keys)]
        typo = next((f" {key!r}{said}" for key in node.value if key not in known and (said := nearest(key, KINDS))), "")
        raise RuleError(
            f"{node.at}: a rule names its target with one of {', '.join(KINDS)}; {found}{typo and ';' + typo}"
        )
    word = words[0]
    record = _rule_record(word)
    kind = KINDS[word]
    if kind.target is not None:  # read apart, as its form depends on the targets of the file
        record = Record({**record.keys, word: Key(Anything(), record.keys[word].doc, required=True)}, record.called)
    values = record.read(node)
    try:
        layer = kind.read(values)
    except ValueError as error:
        raise RuleError(f"{node.at}: {error}") from None
    sources: dict[str, Pattern] = {}
    if kind is Drop:
        sources["weight"] = values[word]
    elif "from" in values:
        sources["weight"] = values["from"]
        if "bias" in values:
            sources["bias"] = values["bias"]
    rule = Rule(
        at=node.at,
        word=word,
        kind=layer,
        sources=sources,
        stacked=values.get("stacked", {}),
        targets={} if kind.target is None else _read_targets(node.value[word], word, targets),
        optional=values.get("optional", kind is Drop),
        of_type=values.get("of_type"),
        when=values.get("when"),
        dtype=values.get("dtype"),
        choice=values.get("choice"),
        unless=values.get("unless"),
        numbered={name: Numbering(tuple(order)) for name, order in values.get("numbered", {}).items()},
    )
    _check_rule(rule, node)
    _check_unless(rule, node)
    return rule


def _check_rule(rule: Rule, node: Node) -> None:
    """Everything about one rule that needs no checkpoint."""
    if not rule.sources:
        for layer in rule.targets.values():
            if layer.path.wild or layer.path.indices or layer.path.groups:
                raise RuleError(f"{node.at}: {layer.path} is not the name of one tensor; a `{rule.word}` fills one")
    if rule.word == "drop" or not rule.sources:
        return
    weight = rule.sources["weight"]
    for role, pattern in rule.sources.items():
        key = node.value["from" if role == "weight" else "bias"]
        if pattern.wild:
            raise RuleError(
                f"{key.at}: {pattern} has a wildcard; name the leaves with {{i}} and {{a,b}} (only `drop` takes wildcards)"
            )
        if pattern.indices != weight.indices or [len(g.words) for g in pattern.groups] != [
            len(g.words) for g in weight.groups
        ]:
            raise RuleError(
                f"{key.at}: `bias` must have the same indices and as many alternatives as `from`, in the same order"
            )
    if len(set(rule.stacked.values())) < len(rule.stacked):
        raise RuleError(f"{node.value['stacked'].at}: two indices are stacked on one axis; each has an axis of its own")
    clash = sorted(set(weight.indices) & set(rule.stacked))
    if clash:
        raise RuleError(f"{node.at}: {clash[0]} is both in the path and stacked on an axis")
    sizes = [len(g.words) for g in weight.groups]
    for name, layer in rule.targets.items():
        of = f" (target {name})" if name else ""
        counted = {name for numbering in rule.numbered.values() for name in numbering.order}
        known = {*weight.indices, *rule.stacked}
        if strange := sorted(counted - known):
            raise RuleError(f"{node.at}: {strange[0]} of `numbered` is neither in the path nor stacked on an axis")
        known = (known - counted) | set(rule.numbered)
        if layer.path.wild:
            raise RuleError(f"{node.at}: the target {layer.path} has a wildcard{of}")
        if set(layer.path.indices) != known:
            raise RuleError(
                f"{node.at}: the source has the indices {_braces(known)} and the target {_braces(layer.path.indices)}{of}; "
                "each index of the source must be in the target, or two leaves would become one tensor"
            )
        try:
            rule.kind.check_target(layer, weight)
        except ValueError as error:
            raise RuleError(f"{node.at}: {error}{of}") from None
        to = [len(g.words) for g in layer.path.groups]
        fused = bool(sizes) and to == sizes[:-1]
        split = bool(to) and to[:-1] == sizes
        if fused and not rule.kind.fuses:
            raise RuleError(
                f"{node.at}: {weight} lists more leaves than {layer.path} has tensors, and a `{rule.word}` cannot be fused{of}"
            )
        if not (to == sizes or fused or split):
            raise RuleError(
                f"{node.at}: the alternatives of {weight} and {layer.path} do not pair up{of}: as many on both sides, "
                "or one group less on the target to fuse its members, or one more to split"
            )


def _braces(names: object) -> str:
    return ", ".join(f"{{{name}}}" for name in sorted(names)) or "none"  # type: ignore[call-overload]


def _check_unless(rule: Rule, node: Node) -> None:
    if rule.unless is None:
        return
    if rule.unless.wild or set(rule.unless.indices) != set(rule.sources["weight"].indices):
        raise RuleError(
            f"{node.value['unless'].at}: `unless` must have the indices of `from`, {_braces(rule.sources['weight'].indices)}, "
            f"and no wildcard; {rule.unless} has {_braces(rule.unless.indices)}"
        )


def _read_places(values: Mapping[str, Any], node: Node) -> tuple[Places, ...]:
    found = []
    for written, listed in values.items():
        at = node.value[written].at
        try:
            indices = parse_pattern(written).indices
            for place in (place for layout in listed for place in layout):
                own = set(parse_pattern(place.path).indices) | set(place.stacked)
                wanted = set(place.order) if place.order else set(indices)
                if own != wanted or len(set(place.order)) < len(place.order):
                    raise ValueError(
                        f"{place.path} has the indices {_braces(own)}, and {written} is counted by {_braces(wanted)}; "
                        "`order` lists those of the path and of `stacked`, each once"
                    )
            if len(indices) > 1 or (not indices and any(p.order for layout in listed for p in layout)):
                raise ValueError(f"{written} has {len(indices)} indices; layers are counted by one")
        except ValueError as error:
            raise RuleError(f"{at}: {error}") from None
        found.append(Places(written, indices[0] if indices else None, ((Place(written, {}),), *listed)))
    return tuple(found)


def _merge(under: Node, over: Node) -> Node:
    """`over` on top of `under`: mappings merge key by key, anything else of `over` stands in place of what is below."""
    if not (under.is_mapping and over.is_mapping):
        return over
    assert under.keys_at is not None and over.keys_at is not None
    merged = {key: _merge(node, over.value[key]) if key in over.value else node for key, node in under.items()}
    return Node(
        {**merged, **{k: n for k, n in over.items() if k not in merged}}, under.at, {**under.keys_at, **over.keys_at}
    )


def _without(node: Node, *keys: str) -> Node:
    assert node.keys_at is not None
    kept = {key: child for key, child in node.items() if key not in keys}
    return Node(kept, node.at, {key: at for key, at in node.keys_at.items() if key in kept})


def _models(node: Node) -> Iterator[Node]:
    """A file that declares several models, as a file for each: its header over the shared one, its rules alone."""
    if not node.is_mapping or "models" not in node.value:
        yield node
        return
    declared = node.value["models"]
    if not declared.is_mapping or not declared.value:
        raise RuleError(f"{declared.at}: expected a mapping of model names to what is their own, found {declared}")
    if "model" in node.value:
        raise RuleError(f"{node.keys_at['model']}: a file has `model` or `models`, not both")  # type: ignore[index]
    rules = node.value.get("rules")
    for rule in rules.value if rules is not None and isinstance(rules.value, tuple) else ():
        for name in ONLY.read(rule.value["only"]) if rule.is_mapping and "only" in rule.value else ():
            if name not in declared.value:
                raise RuleError(
                    f"{rule.value['only'].at}: {name!r} is no model of this file{nearest(name, declared.value)} "
                    f"(known: {', '.join(declared.value)})"
                )
    for name, own in declared.items():
        if not own.is_mapping:
            raise RuleError(f"{own.at}: expected what is {name}'s own (title, facts, versions, ...), found {own}")
        for key in ("model", "models", "rules", "family"):
            if key in own.value:
                raise RuleError(f"{own.keys_at[key]}: `{key}` stands at the top of the file, not in `models`")
        whole = _merge(_without(node, "models"), own)
        assert whole.keys_at is not None and declared.keys_at is not None
        kept = {"model": Node(name, declared.keys_at[name]), **whole.value}
        if rules is not None and isinstance(rules.value, tuple):
            mine = [
                r for r in rules.value if not (r.is_mapping and "only" in r.value) or name in ONLY.read(r.value["only"])
            ]
            kept["rules"] = Node(tuple(_without(r, "only") if r.is_mapping else r for r in mine), rules.at)
        yield Node(kept, node.at, {**whole.keys_at, "model": declared.keys_at[name]})


def _read_file(node: Node, path: str, text: str) -> RuleFile:
    values = _FILE.read(node)
    facts = values.get("facts", {})
    targets = {
        name: Target(name, t["loads"], t.get("config", {}), t.get("generation", {}))
        for name, t in values["targets"].items()
    }
    if not targets:
        raise RuleError(f"{node.value['targets'].at}: a rule file needs at least one target")
    listed = node.value["rules"]
    if not listed.value:
        raise RuleError(f"{listed.at}: a rule file needs at least one rule")
    rules = tuple(_read_rule(child, targets) for child in listed.value)
    axes = {
        name: Axis(axis["is"], axis.get("equals", ()), node.value["axes"].value[name].at)
        for name, axis in values.get("axes", {}).items()
    }
    for name, axis in axes.items():
        for factor in axis.equals:
            if isinstance(factor, str) and factor not in axes:
                raise RuleError(f"{axis.at}: {name} equals a product with {factor}, which `axes` does not declare")
    for rule in rules:
        for said in _facts_of(rule):
            if said not in facts:
                raise RuleError(f"{rule.at}: there is no fact {said!r} in `facts`{nearest(said, facts)}")
        epsilon = getattr(rule.kind, "epsilon", None)
        value = facts.get(epsilon, ASK) if isinstance(epsilon, str) else ASK
        if value != ASK and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1):
            raise RuleError(
                f"{rule.at}: the fact {epsilon!r} is {value!r}, and an epsilon is a small number such as 1e-6"
            )
    types = {
        name: LayerTypes(t["of"], t["leaves"], node.value["types"].value[name].at)
        for name, t in values.get("types", {}).items()
    }
    _check_types(types, rules, facts)
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
    places = _read_places(values["places"], node.value["places"]) if "places" in values else ()
    for name, fact in facts.items():
        if isinstance(fact, dict) and set(fact) == {"repeat", "length"} and str(fact["length"])[1:] not in axes:
            raise RuleError(
                f"{node.value['facts'].value[name].at}: the length {fact['length']} is no size that `axes` declares"
            )
    indices = {name: rule for rule in reversed(rules) for name in _indices_of(rule) if rule.word != "drop"}
    for rule in rules:
        for letter in _letters_of(rule):
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
        for said in (*_references(target.config), *_references(target.generation)):
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
        root=tuple(prefix.strip("/") for prefix in values.get("root") or ("",)),
        records=tuple(values.get("records", ())),
        axes=axes,
        facts=facts,
        types=types,
        versions=versions,
        targets=targets,
        rules=rules,
        text=text,
        node=node,
        places=places,
    )


def _indices_of(rule: Rule) -> Iterator[str]:
    for pattern in rule.sources.values():
        yield from pattern.indices
    yield from rule.stacked


def _letters_of(rule: Rule) -> Iterator[str]:
    if isinstance(rule.kind, Linear):
        for equation in rule.kind.equations.values():
            yield from equation.weight
    yield from getattr(rule.kind, "axes", None) or ""
    count = getattr(rule.kind, "feature_group_count", 1)
    yield from count if isinstance(count, str) else ""


def _facts_of(rule: Rule) -> Iterator[str]:
    if rule.when:
        yield rule.when
    for said in (getattr(rule.kind, "epsilon", None), getattr(rule.kind, "rows", None)):
        if isinstance(said, str):
            yield said
    if isinstance(rule.kind, Timescales):
        yield from ("min_timescale", "max_timescale")


def _check_types(types: Mapping[str, LayerTypes], rules: tuple[Rule, ...], facts: Mapping[str, Any]) -> None:
    """Everything about the types of layers that needs no checkpoint."""
    known: dict[str, LayerTypes] = {}
    for name, entry in types.items():
        if name in facts:
            raise RuleError(f"{entry.at}: {name!r} is in `facts` too; the types of the layers are read off the tree")
        if len(entry.leaves) < 2:
            raise RuleError(f"{entry.at}: layers of one type need no `types`")
        for word, pattern in entry.leaves.items():
            if word in known:
                raise RuleError(f"{entry.at}: {word!r} is a type in line {known[word].at.line} already")
            known[word] = entry
            if pattern.indices != (entry.index,):
                raise RuleError(f"{entry.at}: {pattern} must have the index {{{entry.index}}}, and no other")
    for rule in rules:
        if rule.of_type is None:
            continue
        if rule.of_type not in known:
            raise RuleError(f"{rule.at}: no type of layers is called {rule.of_type!r}{nearest(rule.of_type, known)} (known: {', '.join(known) or 'none'})")  # fmt: skip
        if known[rule.of_type].index not in rule.sources["weight"].indices:
            raise RuleError(
                f"{rule.at}: {rule.of_type!r} is a type of the layers {{{known[rule.of_type].index}}}, which "
                f"{rule.sources['weight']} does not have"
            )


_REFERENCE = re.compile(r"\$(?P<name>\w+)(?P<more>[+-]\d+)?")


def parse_reference(value: Any) -> tuple[str, int] | None:
    """The name in a value of `config`, and the number added to what it stands for; None when it is no reference.

    >>> parse_reference("$window+1")
    ('window', 1)
    """
    found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return (found["name"], int(found["more"] or 0)) if found else None


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.startswith("$"):
        found = parse_reference(value)
        yield found[0] if found else value[1:]
    elif isinstance(value, dict):
        for child in value.values():
            yield from _references(child)
    elif isinstance(value, list):
        for child in value:
            yield from _references(child)


def parse_models(text: str, name: str = "rules.yaml") -> tuple[RuleFile, ...]:
    """Reads the rules of every model that a file declares.

    Raises:
        RuleError: not a valid rule file; the message has line and column.
    """
    return tuple(_read_file(node, name, text) for node in _models(load_yaml(text, name)))


def parse_rules(text: str, name: str = "rules.yaml") -> RuleFile:
    """Reads the rules of one model from a string.

    Raises:
        RuleError: not a valid rule file (the message has line and column), or one that declares several models.
    """
    return the_only(parse_models(text, name), name)


def the_only(models: tuple[RuleFile, ...], path: str) -> RuleFile:
    """The only model of a file.

    Raises:
        RuleError: there are several.
    """
    if len(models) > 1:
        raise RuleError(
            f"{path} declares several models, {', '.join(m.model for m in models)}; read it with `load_models`"
        )
    return models[0]
