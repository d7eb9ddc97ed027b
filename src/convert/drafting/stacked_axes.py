"""Find layers that a tree stacks on an axis (scanned, vmapped)."""

from __future__ import annotations

from collections.abc import Sequence

from convert.layers.draft import Group, PathKey

STACK_INDICES = "stuv"


def stacks(groups: Sequence[Group]) -> dict[tuple[PathKey, ...], tuple[str, int]]:
    """Return the paths below which every leaf has an axis that numbers layers -> index and axis.

    They are found by a norm's scale with two axes: all leaves below the path have an axis of that size at the same place.
    """
    found: dict[tuple[PathKey, ...], tuple[str, int]] = {}
    scales = [g for g in groups if len(g.shape) == 2 and _scale(g)]
    prefixes = sorted({g.steps[:k] for g in scales for k in range(1, len(g.steps) - 1)}, key=len)
    for prefix in prefixes:
        if any(prefix[: len(known)] == known for known in found) or len(found) == len(STACK_INDICES):
            continue
        shapes = [g.shape for g in groups if g.steps[: len(prefix)] == prefix]
        for axis in (0, 1):
            same_size = all(len(shape) > axis for shape in shapes) and len({shape[axis] for shape in shapes}) == 1
            if same_size and len(shapes) > 2 and shapes[0][axis] > 1:
                found[prefix] = (STACK_INDICES[len(found)], axis)
                break
    return found


def _scale(g: Group) -> bool:
    """Whether the name is that of a norm's scale; Equinox calls it `weight`, and its bias has the same shape."""
    key = g.steps[-1].words[0]
    norm = len(g.steps) > 1 and "norm" in (g.steps[-2].stem or g.steps[-2].words[0]).lower()
    return key in ("scale", "gamma") or (key == "weight" and (norm or ("bias", g.shape, g.dtype) in g.siblings))
