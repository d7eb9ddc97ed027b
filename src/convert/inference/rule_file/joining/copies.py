"""Leaves that several modules are made of: a layer that the source uses again, and a head that has the numbers of a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from convert.inference.rule_file.layers.rule import LayerRule, Source, bias_apart
from convert.inference.rule_file.leaf_sums import terms_of

TAKEN = "another rule has its leaf, and makes another layout of it"


def with_copies(layers: Sequence[LayerRule]) -> tuple[list[LayerRule], dict[str, str]]:
    """Return the layers, of those that are made of the same leaves in the same way one for all; and the modules for which there is none."""
    same: dict[Hashable, list[LayerRule]] = defaultdict(list)
    for layer in layers:
        keys = tuple(item for item in layer.keys if item[0] != "activation")
        same[layer.kind_name, layer.sources, layer.names, keys, layer.target_keys, layer.geometry].append(layer)
    ones = [replace(first, also=tuple(x.module for x in others)) for first, *others in same.values()]
    tables = {layer.main[0]: layer for layer in ones if layer.kind_name == "embedding" and len(layer.main) == 1}
    heads: dict[LayerRule, list[LayerRule]] = defaultdict(list)
    found: list[LayerRule] = []
    for layer in ones:
        table = tables.get(replace(layer.main[0], contracted=())) if _is_head(layer) else None
        if table is None:
            found.append(layer)
            continue
        heads[table].append(layer)
        found += _biases(layer)
    found = [_with_heads(layer, heads.get(layer, [])) for layer in found]
    taken: set[Hashable] = set()
    lost: dict[str, str] = {}
    for layer in found:
        sources = (source for _, of in layer.sources for source in of)
        leaves = set[Hashable]() if layer.leaves else {one for source in sources for one in _elements(source)}
        if leaves & taken:
            lost |= dict.fromkeys((layer.module, *layer.also), TAKEN)
        taken |= leaves
    return [layer for layer in found if layer.module not in lost], lost


def _is_head(layer: LayerRule) -> bool:
    return layer.kind_name == "linear" and len(layer.main) == 1 and not layer.names and not layer.target_keys


def _biases(head: LayerRule) -> Iterator[LayerRule]:
    """Yield the rules of the biases of a head, whose weight the rule of the table makes."""
    for key, of in head.sources[1:]:
        modules = (head.module, *head.also)
        first, *others = (f"{module}.{key}" for module in modules)
        _, keys = bias_apart(head)
        yield LayerRule(
            "parameter", first, (("from", of),), keys=keys, evidence=head.evidence, grade=head.grade, also=tuple(others)
        )


def _with_heads(table: LayerRule, heads: Sequence[LayerRule]) -> LayerRule:
    names = [name for head in heads for name in (head.module, *head.also)]
    if not names:
        return table
    tied = names[0] if len(names) == 1 else f"[{', '.join(names)}]"
    grade = max((table.grade, *(head.grade for head in heads)), key=list(type(table.grade)).index)
    return replace(table, target_keys=(*table.target_keys, ("tied", tied)), grade=grade)


def _elements(source: Source) -> Iterator[Hashable]:
    """Yield which elements of a leaf these are, or of each leaf of a sum."""
    axes = sorted((axis.of, axis.start, axis.size) for axis in source.layout.axes)
    for leaf in terms_of(source.leaf):
        yield leaf, source.layout.fixed, tuple(axes)
