"""Leaves whose parts go to several rules: which part of its leaf each rule takes."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from convert.core.path_pattern import parse_pattern
from convert.inference.rule_file.joining.patterns import PatternRule, Taken, leaves_of, part_at
from convert.inference.rule_file.layers.layout import Layout
from convert.inference.rule_file.layers.rule import ADDED, CONVOLUTIONS, NORMS, TAPS, LayerRule, Source, bias_apart
from convert.inference.rule_file.leaf_sums import terms_of

KINDS = ("linear", "parameter")  # whose rules may take a part of a leaf
NAMES = {"from": "weight", "bias": "bias"}  # of the tensors of other kinds
Runs = tuple[tuple[int, int], ...]  # start and stop along each axis of a leaf
Sizes = Mapping[int, tuple[tuple[int, ...], ...]]  # axis of a leaf -> for each part, the sizes of the axes that make it


def parts_of(layers: Sequence[LayerRule]) -> dict[str, Sizes]:
    """Return leaf -> the parts of its axes, of the leaves that layers divide among them without a rest."""
    layouts: dict[str, list[Layout]] = defaultdict(list)
    for layer in layers:
        for source in (source for _, of in layer.sources for source in of if not layer.leaves):
            layouts[source.leaf].append(source.layout)
    found: dict[str, Sizes] = {}
    for leaf, of in layouts.items():
        known = [runs for layout in of if (runs := runs_along_axes(layout)) is not None]
        if len(known) == len(of) > 1 and (divided := _divided(known)):
            found[leaf] = {axis: _made_of(axis, runs, of) for axis, runs in divided.items()}
    return found


def _made_of(axis: int, runs: Sequence[tuple[int, int]], layouts: Sequence[Layout]) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of the axes that each part of an axis is made of in one of the layouts."""
    sizes: dict[tuple[int, int], tuple[int, ...]] = {run: (run[1] - run[0],) for run in runs}
    for layout in layouts:
        of = tuple(one.size for one in layout.made_of(axis))
        run = (runs_along_axes(layout) or ())[axis]
        if len(of) > len(sizes[run]):
            sizes[run] = of
    return tuple(sizes[run] for run in runs)


def runs_along_axes(layout: Layout) -> Runs | None:
    """Return which elements of a leaf a block has; None: they are no run along each axis."""
    fixed = dict(layout.fixed)
    found = []
    for axis, size in enumerate(layout.leaf_shape):
        of = layout.made_of(axis)
        if axis in fixed:
            found.append((fixed[axis], fixed[axis] + 1))
        elif of or size == 1:
            start = of[0].start if of else 0
            found.append((start, start + math.prod(one.size for one in of)))
        else:
            return None
    return tuple(found)


def _divided(blocks: Sequence[Runs]) -> dict[int, Runs]:
    """Return start and stop of the parts of each axis that has several; none where the blocks are not all parts, each once."""
    found: dict[int, Runs] = {}
    for axis, of in enumerate(zip(*blocks, strict=True)):
        runs = sorted(set(of))
        if runs[0][0] != 0 or any(one[1] != other[0] for one, other in itertools.pairwise(runs)):
            return {}
        if len(runs) > 1:
            found[axis] = tuple(runs)
    whole = math.prod(map(len, found.values()))
    return found if len(blocks) == len(set(blocks)) == whole else {}


def with_biases_apart(layers: Sequence[LayerRule], parts: Mapping[str, Sizes]) -> list[LayerRule]:
    """Return the layers, with a rule of its own for a bias that does not have the parts of the weight's rows."""
    found = []
    for layer in layers:
        sources = dict(layer.sources)
        if layer.kind_name == "linear" and "bias" in sources and "from" in sources and not _goes_along(layer, parts):
            name = dict(layer.names).get("bias", "bias")
            rest = tuple(item for item in layer.sources if item[0] != "bias")
            names = tuple(item for item in layer.names if item[0] != "bias")
            kept, numbers = bias_apart(layer)
            found.append(replace(layer, sources=rest, names=names, keys=kept))
            keys = tuple(item for item in layer.target_keys if item[0] == "part")
            bias = LayerRule(
                "parameter", f"{layer.module}.{name}", (("from", sources["bias"]),), keys=numbers, target_keys=keys
            )
            also = tuple(f"{module}.{name}" for module in layer.also)
            found.append(replace(bias, evidence=layer.evidence, grade=layer.grade, also=also))
        else:
            found.append(layer)
    return found


def _goes_along(layer: LayerRule, parts: Mapping[str, Sizes]) -> bool:
    """Whether the bias of a layer is divided as the rows of its weight are; or neither is divided."""
    main, bias = layer.main[0], dict(layer.sources)["bias"][0]
    of_weight = [_taken(main, parts.get(main.leaf, {}), axis) for axis in parts.get(main.leaf, {})]
    of_bias = [_taken(bias, parts.get(bias.leaf, {}), axis) for axis in parts.get(bias.leaf, {})]
    along = [(one.sizes, one.at) for one in of_weight if one.axis not in main.contracted]
    return len(along) == len(of_weight) and along == [(one.sizes, one.at) for one in of_bias]


def _taken(source: Source, sizes: Sizes, axis: int) -> Taken:
    runs = runs_along_axes(source.layout)
    assert runs is not None, "its leaf is divided into runs"
    return Taken(axis, sizes[axis], part_at(runs[axis][0], tuple(map(math.prod, sizes[axis]))))


def with_taken(rule: PatternRule, parts: Mapping[str, Sizes]) -> PatternRule:
    """Return a rule with what it takes of each axis of its leaves of which others have the rest; nothing where that has no words."""
    layer = rule.layer
    said = {*(axis for _, axis in rule.stacked), *([rule.parts[0]] if rule.parts is not None else [])}
    if rule.split is not None and rule.at < 0:
        said.add(rule.split)
    if layer.kind_name not in KINDS or layer.leaves:
        return rule
    found = set()
    for source in layer.main:
        sizes = parts.get(source.leaf, {})
        found.add(tuple(_taken(source, sizes, axis) for axis in sorted(sizes) if axis not in said))
    return replace(rule, taken=found.pop()) if len(found) == 1 else rule


def in_tensors(rule: PatternRule, parts: Mapping[str, Sizes]) -> list[PatternRule]:
    """Return the rule of layers that have one element of an axis, where no pattern names those of the others, as the rules of their tensors: only such rules take a part of a leaf."""
    layer = rule.layer
    has_tensors = layer.kind_name in (*NORMS, *CONVOLUTIONS) or (layer.kind_name == "embedding" and not layer.keys)
    in_all = rule.split is not None and rule.at >= 0 and rule.leaves <= parts.keys()
    if not (has_tensors and in_all) or layer.names or any(key not in NAMES for key, _ in rule.sources):
        return [rule]
    said = (*layer.keys, *layer.target_keys)
    number = (("multiplies_by", "1+scale") in said) - (("multiplies_by", "1+weight") in said)
    found = []
    for (key, of), (_, path) in zip(layer.sources, rule.sources, strict=True):
        is_main = key == "from"
        added = ((f"from{ADDED}", str(number)),) if is_main and number else ()
        taps = ((TAPS, str(len(of[0].layout.shape) - 2)),) if is_main and layer.kind_name in CONVOLUTIONS else ()
        one = replace(layer, kind_name="parameter", sources=(("from", of),), keys=added, target_keys=taps, geometry=())
        patterns = [parse_pattern(term) for term in terms_of(path)]
        leaves = frozenset(leaf for leaf in rule.leaves if any(pattern.match(leaf) for pattern in patterns))
        module = f"{rule.module}.{NAMES[key]}"
        found.append(replace(rule, layer=one, module=module, sources=(("from", path),), leaves=leaves))
    return found


def other_parts(rules: Sequence[PatternRule], lost: Collection[int], unjoined: Sequence[LayerRule] = ()) -> set[int]:
    """Return which rules make a part of a leaf, or of a tensor, whose other parts have no rule, as some rules are `lost` and some layers have none."""
    found: set[int] = set()
    while True:
        gone = [rules[k] for k in (*lost, *found)]
        leaves = {leaf for rule in gone for leaf in rule.leaves}.union(*map(leaves_of, unjoined))
        tensors = {rule.module for rule in gone if _is_part(rule.layer)} | {x.module for x in unjoined if _is_part(x)}
        more = {
            k
            for k, rule in enumerate(rules)
            if k not in lost
            and ((rule.taken and leaves & rule.leaves) or (_is_part(rule.layer) and rule.module in tensors))
        }
        if more == found:
            return found
        found = more


def _is_part(layer: LayerRule) -> bool:
    return any(key == "part" for key, _ in layer.target_keys)
