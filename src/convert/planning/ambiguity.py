"""Which tensors a shape check could not protect: another order of the same axes, of the parts of a fused tensor, or of
tensors of one layer that differ in a name only, fits as well."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from convert.layers.base import Step

MAX_AXES = 6  # 720 orders; no projection known to us has more axes


@dataclass(frozen=True)
class Unprotected:
    """A group of tensors that a wrong layout would fit, too.

    Attributes:
        rule: ``file:line``.
        names: the tensors.
        layout: the derived one.
        others: other orders of the axes that give the same shape, in einops notation; at most three.
        parts: leaves whose order within a fused tensor no shape shows.
        siblings: how many tensors of one layer have this shape and differ in a name such as q, k, v; 1 when none do.
    """

    rule: str
    names: tuple[str, ...]
    layout: str
    others: tuple[str, ...]
    parts: tuple[str, ...]
    siblings: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "tensors": list(self.names),
            "layout": self.layout,
            "others": list(self.others),
            "interchangeable_parts": list(self.parts),
            "interchangeable_siblings": self.siblings,
        }


@lru_cache(maxsize=4096)
def other_layouts(axes: tuple[tuple[str, int], ...], groups: tuple[str, ...]) -> tuple[str, ...]:
    """Orders of the axes that flatten to the same shape as `groups` and place elements differently.

    >>> other_layouts((("N", 4), ("H", 8), ("D", 32)), ("D", "NH"))
    ('(N H) D', '(H N) D', 'D (H N)')

    The order as stored comes first when it fits (a forgotten transpose), then the others. More axes than can be tried are
    no protection: the answer is words then.
    """
    sizes = dict(axes)
    target = tuple(math.prod(sizes[x] for x in group) for group in groups)
    letters = "".join(letter for letter, _ in axes)
    if 0 in sizes.values():
        return ()
    if len(letters) > MAX_AXES:
        return (f"some other order of the {len(letters)} axes, perhaps",)
    seen = [[x for x in "".join(groups) if sizes[x] > 1]]  # the right order; axes of size 1 may stand anywhere
    found = []
    for order in itertools.permutations(letters):
        moving = [x for x in order if sizes[x] > 1]
        cut = _cut(order, sizes, target)
        if cut is not None and moving not in seen:
            seen.append(moving)
            found.append(" ".join(x if len(x) == 1 else f"({' '.join(x)})" if x else "1" for x in cut))
    return tuple(found)


def _cut(order: tuple[str, ...], sizes: dict[str, int], target: tuple[int, ...]) -> list[str] | None:
    """Cuts axes in this order into groups with the sizes of `target`; None when no cut does."""
    groups, at = [], 0
    for k, size in enumerate(target):
        group, product = "", 1
        last = k == len(target) - 1
        while at < len(order) and (last or product < size):
            product *= sizes[order[at]]
            group += order[at]
            at += 1
        if product != size:
            return None
        groups.append(group)
    return groups if at == len(order) else None


@lru_cache(maxsize=4096)
def _others(stored: tuple[tuple[str, int], ...], apart: tuple[str, ...], groups: tuple[str, ...]) -> tuple[str, ...]:
    """`other_layouts` of a part with the axes that were taken apart: a stack on another axis of the same size fits, too."""
    # Indices may have long names; the search wants one character each.
    short = {name: name if len(name) == 1 else chr(0xE000 + k) for k, (name, _) in enumerate(stored)}
    axes = tuple((short[name], size) for name, size in stored)
    found = other_layouts(axes, (*(short[name] for name in apart), *groups))
    long = {code: name for name, code in short.items()}
    return tuple("".join(long.get(character, character) for character in layout) for layout in found)


def unprotected(steps: tuple[Step, ...]) -> tuple[Unprotected, ...]:
    """Tensors whose shape fits another layout or another order of parts, grouped by rule and layout."""
    groups: dict[tuple[str, str, tuple[str, ...], int, int], list[Step]] = {}
    for step in steps:
        if not step.parts:
            continue
        part = step.parts[0]
        others = _others(part.stored, part.apart, part.groups) if part.stored else ()
        alike = len(step.parts) > 1 and len({(p.axes, p.groups) for p in step.parts}) == 1
        if others or alike or step.siblings > 1:
            key = (step.rule.line_only, part.layout, others, len(step.parts) if alike else 0, step.siblings)
            groups.setdefault(key, []).append(step)
    return tuple(
        Unprotected(
            rule=rule,
            names=tuple(step.name for step in members),
            layout=layout,
            others=others[:3],
            parts=tuple(part.leaf for part in members[0].parts) if fused else (),
            siblings=siblings,
        )
        for (rule, layout, others, fused, siblings), members in groups.items()
    )
