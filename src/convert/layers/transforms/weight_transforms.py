"""What the source folds into a weight and the target's code does itself: a factor, and the order of the pairs that RoPE turns.

A rule declares what the weight carries; the multiplication and the permutation that undo it follow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from convert.core.ops import Deinterleave, Interleave, Multiply, Op
from convert.layers.base import Rule
from convert.layers.target import TargetLayer


def check_flattened(rule: Rule) -> None:
    """Check that the flattened axis is one of the rule's axes.

    Raises:
        ValueError: they do not, or a target speaks of it and the rule does not, or of other axes.
    """
    orders = [layer.flattened for layer in rule.targets.values() if layer.flattened is not None]
    if rule.flattened is None:
        if orders:
            raise ValueError("the target has `flattened:` and the rule has none; write the key for the source, too")
        return
    weights = [weight for weight, _ in rule.kind.weight_axes] or [""]
    if any(rule.flattened.axis not in letters for letters in weights):
        raise ValueError(
            f"`flattened:` names {rule.flattened.axis}, and the leaf has the axes {', '.join(map(' '.join, weights)) or 'nothing'}"
        )
    for order in orders:
        if sorted(order) != sorted(rule.flattened.order):
            raise ValueError(
                f"the target flattens {' '.join(order)}, and the source {' '.join(rule.flattened.order)}: not the same axes"
            )


def target_order(rule: Rule, layer: TargetLayer) -> str:
    """Return the order in which the target's code flattens the map; torch's convolutions have the channels first."""
    assert rule.flattened is not None
    order = rule.flattened.order
    return layer.flattened or order[-1] + order[:-1]


def unflattened(
    rule: Rule,
    layer: TargetLayer,
    letters: str,
    shape: tuple[int, ...],
    groups: tuple[str, ...],
    sizes: Mapping[str, int],
) -> tuple[str, tuple[int, ...], tuple[str, ...]]:
    """Replace the flattened axis by the axes of the map, in a leaf and in the groups of the target.

    Raises:
        ValueError: the sizes of the map's axes are not known, or do not multiply to that of the flattened one.
    """
    if rule.flattened is None or rule.flattened.axis not in letters:
        return letters, shape, groups
    axis, order = rule.flattened.axis, rule.flattened.order
    unknown = [x for x in order if x not in sizes]
    if unknown:
        raise ValueError(
            f"{axis} is {' '.join(order)} flattened, and nothing gives {' and '.join(unknown)} a size; declare it in `axes`, such as "
            f"{unknown[0]}: {{is: ..., equals: 7}}, or with --set {unknown[0]}=7"
        )
    at = letters.index(axis)
    inner = tuple(sizes[x] for x in order)
    if math.prod(inner) != shape[at]:
        product = " x ".join(f"{x}={sizes[x]}" for x in order)
        raise ValueError(f"{axis} has {shape[at]} elements, and the map {product} = {math.prod(inner)}")
    moved = tuple(group.replace(axis, target_order(rule, layer)) for group in groups)
    return letters[:at] + order + letters[at + 1 :], (*shape[:at], *inner, *shape[at + 1 :]), moved


def check_rope(rule: Rule) -> None:
    """Check that the axis that RoPE rotates is one of the rule's output axes.

    Raises:
        ValueError: they do not, or a target says how it turns pairs and the rule does not.
    """
    if rule.rope is None:
        if any(layer.rope is not None for layer in rule.targets.values()):
            raise ValueError("the target has `rope:` and the rule has none; write the key for the source, too")
        return
    axis = rule.rope.axis
    axes = [outputs for _, outputs in rule.kind.weight_axes] or [""]
    if any(axis not in letters for letters in axes):
        raise ValueError(
            f"RoPE rotates {axis}, which is not among the layer's output axes {', '.join(axes) or 'nothing'}"
        )


def undo(rule: Rule, sizes: Mapping[str, int]) -> tuple[Op, ...]:
    """Return the multiplication that removes the factor from the weight."""
    if rule.prescaled_by is None:
        return ()
    return (Multiply(1 / rule.prescaled_by.value(sizes)),)


def repair(rule: Rule, layer: TargetLayer, letters: str) -> tuple[Op, ...]:
    """Return the permutation from the source's RoPE pairs to the target's, for an array with the axes `letters`."""
    if rule.rope is None or rule.rope.axis not in letters or rule.rope.pairs == target_pairs(layer):
        return ()
    axis = letters.index(rule.rope.axis)
    return (Deinterleave(axis) if rule.rope.pairs == "interleaved" else Interleave(axis),)


def target_pairs(layer: TargetLayer) -> str:
    """Return how the target's code pairs features; by default it splits a head in halves."""
    return layer.rope or "half-split"


def facts(rule: Rule, layer: TargetLayer) -> dict[str, Any]:
    """Return the entries of the plan and the header."""
    carried = {"weight_carries": rule.prescaled_by.text} if rule.prescaled_by else {}
    pairs = {"source_rope": rule.rope.pairs, "target_rope": target_pairs(layer)} if rule.rope else {}
    orders = (
        {"source_flattens": rule.flattened.order, "target_flattens": target_order(rule, layer)}
        if rule.flattened
        else {}
    )
    return {**carried, **pairs, **orders}
