"""Axes of which the source's code and the target's concatenate the parts in different orders.

The keys `concatenated` of a rule and of its target are in `convert.layers.shared_keys`; `convert.core.ops` moves the parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.core.axis_groups import AxisGroup
from convert.core.ops import Reorder
from convert.layers.base import Rule
from convert.layers.target import TargetLayer

Array = np.ndarray[Any, np.dtype[Any]]


def check_concatenated(rule: Rule, layer: TargetLayer) -> None:
    """Check that the source and the target concatenate the same parts to axes of the leaf.

    Raises:
        ValueError: they do not, or no target has them in another order.
    """
    for axis, parts in layer.concatenated.items():
        if axis not in rule.concatenated:
            raise ValueError(f"the target's `concatenated` names {axis}, and the rule's does not; write the source's order, such as `concatenated: {{{axis}: {_text(parts)}}}`")  # fmt: skip
        own = rule.concatenated[axis]
        if sorted(map(sorted, own.parts)) != sorted(map(sorted, parts.parts)):
            raise ValueError(
                f"the target's {axis} is {_text(parts)}, and the source's {_text(own)}: not the same parts"
            )
    for axis, parts in rule.concatenated.items():
        if axis not in rule.kind.concatenable:
            axes = " ".join(dict.fromkeys(rule.kind.concatenable))
            named = "`inputs:` with the letter of the input" if rule.kind.packed else "its `axes:`"
            raise ValueError(f"`concatenated` names {axis}, and the leaf has the axes {axes or f'(unnamed; give the rule {named})'}")  # fmt: skip
        if axis in "".join(parts.parts):
            raise ValueError(f"`concatenated` makes {axis} of {_text(parts)}, which has {axis} itself; give its parts other letters")  # fmt: skip
        if not any(axis in one.concatenated for _, one in rule.layers):
            raise ValueError(f"`concatenated` gives {axis} parts, and the target does not say its own order; write such as `{rule.kind_name}: {{module: ..., concatenated: {{{axis}: {_text(_reversed(parts))}}}}}`")  # fmt: skip
        others = [("rope", rule.rope.leaf_axes if rule.rope else ""), ("flattened", rule.flattened.axis if rule.flattened else ""), ("zeros_before", "".join(layer.zeros_before))]  # fmt: skip
        for key, axes in others:
            if axis in axes:
                raise ValueError(f"`concatenated` and `{key}` both name {axis}; name a part of it, in an equation with a sum")  # fmt: skip


def _reversed(parts: AxisGroup) -> AxisGroup:
    return AxisGroup(parts.before, parts.parts[::-1], parts.after)


def _text(parts: AxisGroup) -> str:
    return str(parts)[1:-1]


def _orders(rule: Rule, layer: TargetLayer) -> Iterator[tuple[str, AxisGroup, tuple[int, ...]]]:
    """Yield the axes that have another order in the target: the letter, the source's parts, and which of them is at each place."""
    for axis, wanted in layer.concatenated.items():
        own = rule.concatenated[axis]
        known = [sorted(part) for part in own.parts]
        order = tuple(known.index(sorted(part)) for part in wanted.parts)
        if order != tuple(range(len(order))):
            yield axis, own, order


def shown_orders(rule: Rule, layer: TargetLayer, letters: str) -> list[str]:
    """Return, for people, what `reordered` does: ``D from A + B to B + A``."""
    found = ((axis, own, layer.concatenated[axis]) for axis, own, _ in _orders(rule, layer))
    return [f"{axis} from {_text(own)} to {_text(wanted)}" for axis, own, wanted in found if axis in letters]


def lengths(axis: str, parts: AxisGroup, size: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the number of elements of each part of an axis with `size` elements; what is left belongs to one of unknown size.

    Raises:
        ValueError: two are unknown, or they are not the axis; the message is the reason.
    """
    unknown = [k for k, part in enumerate(parts.parts) if any(letter not in sizes for letter in part)]
    if len(unknown) > 1:
        first = next(letter for letter in parts.parts[unknown[0]] if letter not in sizes)
        raise ValueError(
            f"{axis} is {_text(parts)}, and nothing gives {' and '.join(' '.join(parts.parts[k]) for k in unknown)} a size; declare "
            f"all but one in `axes`, such as {first}: {{is: ..., equals: 8}}, or with --set {first}=8"
        )
    known = [0 if k in unknown else math.prod(sizes[x] for x in part) for k, part in enumerate(parts.parts)]
    if unknown:
        known[unknown[0]] = size - sum(known)
    if sum(known) != size or min(known) < 1:
        given = ", ".join(f"{x}={sizes[x]}" for x in dict.fromkeys("".join(parts.parts)) if x in sizes)
        raise ValueError(f"{axis} has {size} elements, and {_text(parts)} with {given} has {sum(known) - min(known) if unknown else sum(known)}{' and more' if unknown else ''}")  # fmt: skip
    return tuple(known)


def reordered(
    rule: Rule, layer: TargetLayer, letters: str, shape: Sequence[int], sizes: Mapping[str, int]
) -> tuple[Reorder, ...]:
    """Return the operations that give an array with the axes `letters` the order of the target.

    Raises:
        ValueError: as `lengths`.
    """
    return tuple(
        Reorder(at, lengths(axis, own, shape[at], sizes), order)
        for axis, own, order in _orders(rule, layer)
        for at in [letters.find(axis)]
        if at >= 0
    )


# ---- for probes, which use no operation of the plan


def source_places(rule: Rule, layer: TargetLayer, axis: str, size: int, sizes: Mapping[str, int]) -> Array | None:
    """Return which element of the source's axis each element of the target's is; None where the orders are the same."""
    for letter, own, order in _orders(rule, layer):
        if letter == axis:
            runs = np.split(np.arange(size), np.cumsum(lengths(axis, own, size, sizes))[:-1])
            return np.asarray(np.concatenate([runs[k] for k in order]))
    return None


def in_source_order(
    values: Array,
    rule: Rule,
    layer: TargetLayer,
    groups: Sequence[str],
    extents: Mapping[str, int],
    sizes: Mapping[str, int],
) -> Array:
    """Return a tensor of the target with the parts of each axis as the source concatenates them.

    Args:
        groups: letters of each axis of the tensor.
        extents: of these letters.
    """
    for axis in layer.concatenated:
        for at, group in enumerate(groups):
            if axis not in group:
                continue
            places = source_places(rule, layer, axis, extents[axis], sizes)
            if places is not None:
                inner = math.prod(extents[x] for x in group[group.index(axis) + 1 :])
                split = values.reshape(*values.shape[:at], -1, len(places), inner, *values.shape[at + 1 :])
                values = np.take(split, np.argsort(places), at + 1).reshape(values.shape)
    return values
