"""Layers that a tree stacks on an axis (scanned, vmapped)."""

from __future__ import annotations

from collections.abc import Sequence

from convert.grouping import Group, Step

STACK_INDICES = "stuv"


def stacks(groups: Sequence[Group]) -> dict[tuple[Step, ...], tuple[str, int]]:
    """Paths below which every leaf has an axis that enumerates layers (scanned, vmapped) -> index and axis.

    They are told by a norm's scale with two axes: all leaves below the path have an axis of that size at the same place.
    """
    found: dict[tuple[Step, ...], tuple[str, int]] = {}
    scales = [g for g in groups if len(g.shape) == 2 and g.steps[-1].words[0] in ("scale", "gamma")]
    prefixes = sorted({g.steps[:k] for g in scales for k in range(1, len(g.steps) - 1)}, key=len)
    for prefix in prefixes:
        if any(prefix[: len(known)] == known for known in found) or len(found) == len(STACK_INDICES):
            continue
        shapes = [g.shape for g in groups if g.steps[: len(prefix)] == prefix]
        for axis in (0, 1):
            alike = all(len(shape) > axis for shape in shapes) and len({shape[axis] for shape in shapes}) == 1
            if alike and len(shapes) > 2 and shapes[0][axis] > 1:
                found[prefix] = (STACK_INDICES[len(found)], axis)
                break
    return found
