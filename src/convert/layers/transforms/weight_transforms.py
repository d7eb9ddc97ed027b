"""Prescaled weights and flattened feature maps: the multiplication and the order of axes that convert the source's weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from convert.core.ops import Op
from convert.core.value_ops import Add, Multiply
from convert.layers.base import Rule
from convert.layers.target import TargetLayer
from convert.layers.transforms.rope import target_rope_pairs


def check_flattened(rule: Rule) -> None:
    """Check that the flattened axis is one of the rule's axes.

    Raises:
        ValueError: the axis is not one of the rule's; a target has `flattened:` and the rule has none; or the target names other axes.
    """
    orders = [layer.flattened for _, layer in rule.layers if layer.flattened is not None]
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


def add_number(rule: Rule, role: str) -> tuple[Op, ...]:
    """Return the addition of the number that the source adds to a leaf."""
    return (Add(rule.numbers[role]),) if role in rule.numbers else ()


def divide_by_prescale(rule: Rule, sizes: Mapping[str, int], facts: Mapping[str, Any]) -> tuple[Op, ...]:
    """Return the multiplication that removes the factor from the weight."""
    if rule.prescaled_by is None:
        return ()
    return (Multiply(1 / rule.prescaled_by.value(sizes, facts)),)


def facts(rule: Rule, layer: TargetLayer) -> dict[str, Any]:
    """Return the entries of the plan and the header."""
    factor = rule.prescaled_by
    parts = f" in part {', '.join(str(k + 1) for k in factor.parts)}" if factor and factor.parts is not None else ""
    carried = {"weight_carries": f"{factor.text}{parts}"} if factor else {}
    pairs = {"source_rope": rule.rope.pairs, "target_rope": target_rope_pairs(layer)} if rule.rope else {}
    orders = (
        {"source_flattens": rule.flattened.order, "target_flattens": target_order(rule, layer)}
        if rule.flattened
        else {}
    )
    return {**carried, **pairs, **orders}
