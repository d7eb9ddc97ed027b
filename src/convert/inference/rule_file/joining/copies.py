"""Leaves that several modules are made of: a layer that the source uses again, a head that has the numbers of a table, a matrix and its transpose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace

from convert.inference.derivation import Grade
from convert.inference.rule_file.joining.taken import runs_along_axes
from convert.inference.rule_file.layers.layout import Axis
from convert.inference.rule_file.layers.rule import CONVOLUTIONS, TAPS, LayerRule, Source, bias_apart
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
    found = _in_other_layouts([_with_heads(layer, heads.get(layer, [])) for layer in found])
    taken: dict[str, list[Source]] = defaultdict(list)
    lost: dict[str, str] = {}
    for layer in found:
        each = [one for _, of in layer.sources for one in of if not layer.leaves]
        sources = [(leaf, one) for one in each for leaf in terms_of(one.leaf)]
        if any(_overlap(one, other) for leaf, one in sources for other in taken[leaf]):
            lost |= dict.fromkeys((layer.module, *layer.also), TAKEN)
        for leaf, one in sources:
            taken[leaf].append(one)
    return [layer for layer in found if layer.module not in lost], lost


def _is_head(layer: LayerRule) -> bool:
    return layer.kind_name == "linear" and len(layer.main) == 1 and not layer.names and not layer.target_keys


def _biases(layer: LayerRule) -> Iterator[LayerRule]:
    """Yield the rules of the biases of a layer, such as a head, whose weight another rule makes."""
    for key, of in layer.sources[1:]:
        first, *others = (f"{module}.{key}" for module in (layer.module, *layer.also))
        bias = LayerRule("parameter", first, (("from", of),), keys=bias_apart(layer)[1], evidence=layer.evidence)
        yield replace(bias, grade=layer.grade, also=tuple(others))


def _with_heads(table: LayerRule, heads: Sequence[LayerRule]) -> LayerRule:
    names = [name for head in heads for name in (head.module, *head.also)]
    if not names:
        return table
    tied = names[0] if len(names) == 1 else f"[{', '.join(names)}]"
    return replace(table, target_keys=(*table.target_keys, ("tied", tied)), grade=_weakest([table, *heads]))


def _weakest(layers: Sequence[LayerRule]) -> Grade:
    return max((layer.grade for layer in layers), key=list(Grade).index)


def _in_other_layouts(layers: Sequence[LayerRule]) -> list[LayerRule]:
    """Return the layers, with one rule for the tensors that are one whole leaf, in several layouts, as a matrix and its transpose, or in layers with other leaves, as a bias of two."""
    shared = {leaf for leaf, users in _by_leaf(layers).items() if len(users) > 1}
    found = [one for layer in layers for one in _apart(layer, shared)]
    for leaf, users in _by_leaf(found).items():
        of_weights = all(_is_whole_weight(layer) and layer.main[0].leaf == leaf for layer in users)
        if len(users) > 1 and of_weights and len(set(map(_kept, users))) == 1:
            at = found.index(users[0])
            found = [layer for layer in found if layer not in users]
            found[at:at] = [_weights(users), *(bias for layer in users for bias in _biases(layer))]
    return found


def _by_leaf(layers: Sequence[LayerRule]) -> dict[str, list[LayerRule]]:
    """Return leaf, or sum of leaves -> the layers that are made of it."""
    found: dict[str, list[LayerRule]] = defaultdict(list)
    for layer in layers:
        for source in (source for _, of in layer.sources for source in of):
            found[source.leaf].append(layer)
    return found


def _apart(layer: LayerRule, shared: Collection[str]) -> list[LayerRule]:
    """Return a layer with the bias as a rule of its own, where its leaf is one of those that several layers have."""
    leaves = {source.leaf for _, of in layer.sources[1:] for source in of}
    if not leaves & set(shared) or not _is_whole_weight(layer):
        return [layer]
    return [replace(layer, sources=layer.sources[:1], keys=bias_apart(layer)[0]), *_biases(layer)]


def _is_whole_weight(layer: LayerRule) -> bool:
    """Whether the weight of a layer is one whole leaf, and the rule of a parameter has all the keys of its rule."""
    layout = layer.main[0].layout
    stored = tuple(Axis(k, 0, size) for k, size in enumerate(layout.leaf_shape) if size > 1)
    whole = sorted(layout.axes, key=lambda axis: axis.of) == list(stored) and not layout.fixed and not layout.joined
    plain = layer.kind_name in ("linear", "embedding", "parameter", *CONVOLUTIONS) and layer.computed_from is None
    said = layer.leaves or layer.names or any(key != TAPS for key, _ in layer.target_keys)
    alone = len(layer.main) == 1 and {key for key, _ in layer.sources} <= {"from", "bias"}
    return whole and plain and alone and not said


def _kept(layer: LayerRule) -> tuple[tuple[str, str], ...]:
    """Return the keys of a layer that the rule of its weight has."""
    return tuple(item for item in bias_apart(layer)[0] if item[0] != "activation")


def _weights(layers: Sequence[LayerRule]) -> LayerRule:
    """Return the rule of the weights of several layers, each with its layout."""
    first, *_ = layers
    made = [
        (module if layer.kind_name == "parameter" else f"{module}.weight", layer.main[0].layout)
        for layer in layers
        for module in (layer.module, *layer.also)
    ]
    (name, _), *others = made
    return LayerRule(
        "parameter",
        name,
        (("from", first.main),),
        keys=_kept(first),
        evidence=first.evidence,
        grade=_weakest(layers),
        also=tuple(name for name, _ in others),
        also_as=tuple(layout for _, layout in others),
    )


def _overlap(one: Source, other: Source) -> bool:
    """Whether two sources have elements of one leaf in common, which may be a term of a sum."""
    ours, theirs = (runs_along_axes(source.layout) for source in (one, other))
    if ours is None or theirs is None or one.layout.leaf_shape != other.layout.leaf_shape:
        return one.layout.fixed == other.layout.fixed and set(one.layout.axes) == set(other.layout.axes)
    return all(a[0] < b[1] and b[0] < a[1] for a, b in zip(ours, theirs, strict=True))
