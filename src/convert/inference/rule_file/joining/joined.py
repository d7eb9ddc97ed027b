"""Join the rules that a person writes as one: the elements or parts of one axis, and modules whose names differ in a word."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace

from convert.core.path_pattern import parse_pattern
from convert.drafting.like.module_patterns import apart, common_pattern
from convert.inference.derivation import Grade
from convert.inference.rule_file.joining.patterns import (
    INDICES,
    IndexLetters,
    PatternRule,
    indexed_rules,
    leaves_of,
    loose,
    structure,
    summed,
)
from convert.inference.rule_file.layers.layout import Axis
from convert.inference.rule_file.layers.rule import COLUMNS, NORMS, LayerRule, Source
from convert.inference.rule_file.leaf_sums import common_path

ALTERNATIVES = re.compile(r"\{[^{}]*,[^{}]*\}")


def join_layers(layers: Sequence[LayerRule], leaves: Collection[str] = ()) -> tuple[list[PatternRule], list[LayerRule]]:
    """Return the rules for layers, in the order of the first layer of each; and the layers that have none.

    Args:
        leaves: of the source, beside those of the layers. An index does not match those that a rule does not describe.
    """
    every = {*leaves, *(leaf for layer in layers for leaf in leaves_of(layer))}
    letters = IndexLetters()
    groups: dict[Hashable, list[LayerRule]] = defaultdict(list)
    for layer in layers:
        groups[structure(layer)].append(layer)
    made = [rule for members in groups.values() for rule in indexed_rules(members, letters, every)]
    rules = [rule for rule in made if isinstance(rule, PatternRule)]
    rules = _joined(rules, _split_key, lambda group: _join_split(group, letters))
    rules = _joined(rules, lambda rule: _parts_key(_relettered(rule)), _join_parts)
    rules = _joined(rules, _alternatives_key, _join_alternatives)
    rules = _joined(rules, _alternatives_key, _join_alike)
    order = {layer.module: k for k, layer in enumerate(layers)}
    lost = [layer for layer in made if isinstance(layer, LayerRule)]
    return sorted(rules, key=lambda rule: order[rule.layer.module]), lost


def _joined(
    rules: Sequence[PatternRule],
    key_of: Callable[[PatternRule], Hashable],
    join: Callable[[Sequence[PatternRule]], list[PatternRule]],
) -> list[PatternRule]:
    groups: dict[Hashable, list[PatternRule]] = defaultdict(list)
    for rule in rules:
        groups[("also", rule.module) if rule.layer.also else key_of(rule)].append(rule)
    found: list[PatternRule] = []
    for group in groups.values():
        found += join(group) if len(group) > 1 else group
    return found


def _common(rule: PatternRule) -> tuple[Hashable, ...]:
    layer = rule.layer
    structure = tuple((key, tuple((loose(s.layout), summed(layer, s)) for s in of)) for key, of in layer.sources)
    return (
        layer.kind_name,
        structure,
        layer.names,
        layer.keys,
        layer.target_keys,
        layer.geometry,
        rule.stacked,
        rule.index_from,
        rule.split,
        rule.grade is Grade.OPEN,
    )


def _alone(rule: PatternRule) -> Hashable:
    """Return what no other rule has. A module may have several, such as one for each kernel of a cell."""
    return rule.module, rule.layer.names


def _split_key(rule: PatternRule) -> Hashable:
    """Return what the rules of the elements of one axis have in common."""
    shared = replace(rule, layer=replace(rule.layer, keys=_without_activation(rule)))
    if rule.split is None:
        return (*_common(shared), rule.sources, rule.module)
    shared = shared if rule.index_from else _relettered(shared)
    return (*_common(shared), shared.sources)


def _join_split(group: Sequence[PatternRule], letters: IndexLetters) -> list[PatternRule]:
    """Join the rules whose modules have the elements of one axis: by a letter of that axis, else by an index with their names."""
    group = _with_letters_of_first(sorted(group, key=lambda rule: rule.at))
    first, split = group[0], group[0].split
    _, words, end = apart([rule.module for rule in group])
    module = common_pattern([rule.module for rule in group])
    if split is None or module is None or [rule.at for rule in group] != list(range(_size(first.layer, split))):
        return list(group)
    whole = _whole(_as_one_layer(group), module, first.sources)
    if _is_axis_of_rule(first.layer, split) and not ALTERNATIVES.search(end):
        return [whole]
    layouts = [source.layout for _, of in first.layer.sources for source in of]
    if any(split not in dict(layout.fixed) or layout.is_opened(split) for layout in layouts):
        return list(group)
    listed = ",".join(words)
    index = letters.of_names(listed, len(words), module)
    named = module.replace(f"{{{listed}}}", f"{{{index}:{listed}}}")
    return [replace(whole, module=named, stacked=(*first.stacked, (index, split)), split=None)]


def _is_axis_of_rule(layer: LayerRule, split: int) -> bool:
    """Whether a rule has a letter for the axis of which each leaf has one element: an equation with further outputs, or the axes of a parameter. A bias lacks the axes of the inputs."""
    if layer.kind_name not in ("linear", "parameter") or len(layer.main) > 1:
        return False
    main, *others = (source for _, of in layer.sources for source in of)
    of_bias = split - sum(axis < split for axis in main.contracted)
    outward = {axis.of for axis in main.layout.axes} - {*main.contracted}
    in_each = split in dict(main.layout.fixed) and all(of_bias in dict(one.layout.fixed) for one in others)
    return in_each and (layer.kind_name != "linear" or bool(outward))


def _part(source: Source) -> Axis | None:
    """Return the axis of which a block has some elements alone, one after the other, in the leaf's order."""
    found = [axis for axis in source.layout.axes if axis.size < source.layout.leaf_shape[axis.of]]
    alone = [axis for axis in found if len(source.layout.made_of(axis.of)) == 1]
    return alone[0] if len(found) == len(alone) == 1 and not (alone[0].order or alone[0].parts) else None


def _parts_key(rule: PatternRule) -> Hashable:
    """Return what the rules of the parts of one axis have in common."""
    part = _part(rule.layer.main[0])
    in_columns = any(key == COLUMNS for key, _ in rule.layer.target_keys)
    if part is None or in_columns or rule.layer.kind_name not in ("linear", "parameter"):
        return _alone(rule)
    keys, layer = _without_activation(rule), rule.layer
    fixed = len(layer.main[0].layout.fixed)
    of_layer = layer.kind_name, layer.names, keys, layer.target_keys, rule.grade is Grade.OPEN
    return rule.sources, rule.stacked, rule.index_from, *of_layer, part.of, rule.at, fixed


def _without_activation(rule: PatternRule) -> tuple[tuple[str, str], ...]:
    return tuple(item for item in rule.layer.keys if item[0] != "activation")


def _as_one_layer(group: Sequence[PatternRule]) -> Sequence[PatternRule]:
    """Return the rules of the parts of one leaf; without their activations, as those of gates, where one key cannot say them."""
    first, *others = (dict(rule.layer.keys).get("activation") for rule in group)
    if set(others) in ({first}, {None}):  # one of all, or of the first alone
        return group
    return [replace(rule, layer=replace(rule.layer, keys=_without_activation(rule))) for rule in group]


def _relettered(rule: PatternRule, letters: str = INDICES) -> PatternRule:
    """Return a rule whose indices have these letters, in the order in which its modules have them."""
    known = list(dict.fromkeys(re.findall(r"\{([a-z])[}:]", rule.module)))
    of = dict(zip(known, letters, strict=False))

    def named(text: str) -> str:
        return re.sub(r"\{([a-z])(\+\d+|:[^{}]*)?\}", lambda m: f"{{{of.get(m[1], m[1])}{m[2] or ''}}}", text)

    return replace(
        rule,
        module=named(rule.module),
        sources=tuple((key, named(path)) for key, path in rule.sources),
        stacked=tuple((of.get(name, name), axis) for name, axis in rule.stacked),
    )


def _with_letters_of_first(group: Sequence[PatternRule]) -> list[PatternRule]:
    """Return rules with the letters of the first one, where all describe as many layers."""
    if all(rule.index_from for rule in group) or len({rule.layers for rule in group}) > 1:
        return list(group)
    letters = "".join(dict.fromkeys(re.findall(r"\{([a-z])[}:]", group[0].module)))
    return [_relettered(rule, letters) for rule in group]


def _join_parts(group: Sequence[PatternRule]) -> list[PatternRule]:
    """Join the rules whose modules have the parts of one axis; the parts of the bias are the same."""
    group = sorted(group, key=_start)
    group = _with_letters_of_first(group)
    found = [[_part(source) for _, (source,) in rule.layer.sources] for rule in group]
    module = common_pattern([rule.module for rule in group])
    sizes = tuple(part.size for part, *_ in found if part is not None)
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    if module is None or any(
        [(p.start, p.size) if p else None for p in row] != [(at, size)] * len(row)
        for row, at, size in zip(found, starts, sizes, strict=True)
    ):
        return list(group)
    axis = _part(group[0].layer.main[0])
    if axis is None or sum(sizes) != group[0].layer.main[0].layout.leaf_shape[axis.of]:
        return list(group)
    if len({*sizes}) > 1 and group[0].layer.kind_name == "parameter" and not _is_as_stored(group[0]):
        return list(group)  # the `axes` of a target name one part
    return [replace(_whole(_as_one_layer(group), module, group[0].sources), parts=(axis.of, sizes))]


def _is_as_stored(rule: PatternRule) -> bool:
    """Whether the tensors of a rule have the axes of their leaf, in its order."""
    layout = rule.layer.main[0].layout
    return [axis.of for axis in layout.axes] == sorted({axis.of for axis in layout.axes}) and 1 not in layout.shape


def _start(rule: PatternRule) -> int:
    part = _part(rule.layer.main[0])
    return part.start if part is not None else 0


def _size(layer: LayerRule, axis: int) -> int:
    return layer.main[0].layout.leaf_shape[axis]


def _alternatives_key(rule: PatternRule) -> Hashable:
    if rule.split is not None or len(rule.layer.main) > 1:
        return _alone(rule)
    return (*_common(rule), re.findall(r"\{\w+(?:\+\d+)?\}", rule.module).__repr__())


def _join_alternatives(group: Sequence[PatternRule]) -> list[PatternRule]:
    """Join rules whose sources and modules differ in one word each; neighbours in the tree of the target only."""
    found: list[PatternRule] = []
    for family in _families(group):
        module = common_pattern([rule.module for rule in family])
        sources = [(key, common_path([dict(rule.sources)[key] for rule in family])) for key, _ in family[0].sources]
        written = tuple((key, text) for key, text in sources if text is not None)
        if len(family) == 1 or module is None or len(written) < len(sources) or _hides_parts(module, family[0]):
            found += family
        else:
            found.append(_whole(family, module, written))
    return found


def _hides_parts(module: str, rule: PatternRule) -> bool:
    """Whether the parts of an axis are not the last alternatives of the modules any more: a plan reads these as the parts."""
    return rule.parts is not None and ALTERNATIVES.findall(module)[-1] != ALTERNATIVES.findall(rule.module)[-1]


def _families(group: Sequence[PatternRule]) -> Iterable[list[PatternRule]]:
    """Group rules whose modules have the same parent, and whose leaves have the same path but for one word."""
    families: dict[Hashable, list[PatternRule]] = defaultdict(list)
    for rule in group:
        first = rule.sources[0][1].split("/")
        families[rule.module.rpartition(".")[0], len(first), tuple(first[:-2])].append(rule)
    return families.values()


def _join_alike(group: Sequence[PatternRule]) -> list[PatternRule]:
    """Join rules whose sources and modules differ in one place each: ``{self,encoder}_attn/{q,v}_proj``."""
    left, found = list(group), []
    while left:
        together = [left.pop(0)]
        whole = together[0]
        for other in list(left):
            joined = _as_one([*together, other])
            if joined is not None:
                whole = joined
                together.append(other)
                left.remove(other)
        found.append(whole)
    return found


def _as_one(group: Sequence[PatternRule]) -> PatternRule | None:
    """Return one rule for several that are parts of one layer, or norms in places that differ in one word; None if there is none."""
    modules = [rule.module for rule in group]
    sources = [[text for _, text in of] for of in zip(*(rule.sources for rule in group), strict=True)]
    start, words, _ = apart(modules)
    inside = "{" in start or (group[0].layer.kind_name in NORMS and not any("." in word for word in words))
    found = [common_pattern(modules, nested=True), *(common_path(texts, nested=True) for texts in sources)]
    patterns = [text for text in found if text is not None]
    if not inside or len(patterns) < len(found):
        return None
    members = [tuple(made) for rule in group for made in _spelled([rule.module, *(text for _, text in rule.sources)])]
    if not members or sorted(members) != sorted(_spelled(patterns)):
        return None
    module, *written = patterns
    return _whole(group, module, tuple(zip((key for key, _ in group[0].sources), written, strict=True)))


def _spelled(patterns: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the paths of patterns, for each choice of alternatives, where all have the same number of these; indices are 0."""
    parsed = [parse_pattern(text) for text in patterns]
    if len({len(pattern.groups) for pattern in parsed}) > 1:
        return []
    indices = dict.fromkeys((name for pattern in parsed for name in pattern.indices), 0)
    return [tuple(pattern.fill(indices, choices) for pattern in parsed) for choices in parsed[0].all_choices()]


def _whole(group: Sequence[PatternRule], module: str, sources: tuple[tuple[str, str], ...]) -> PatternRule:
    weakest = max((rule.layer.grade for rule in group), key=list(Grade).index)
    return replace(
        group[0],
        layer=replace(group[0].layer, grade=weakest),
        module=module,
        sources=sources,
        at=-1,
        layers=sum(rule.layers for rule in group),
        leaves=frozenset().union(*(rule.leaves for rule in group)),
        grades=frozenset().union(*(rule.grades or {rule.grade} for rule in group)),
    )
