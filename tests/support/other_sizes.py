"""Trees in which one letter has another size."""

from __future__ import annotations

from collections.abc import Iterator

import convert

Shapes = dict[str, tuple[int, ...]]


def with_size(plan: convert.Plan, shapes: Shapes, letter: str, size: int) -> Shapes:
    """Give each axis with this letter, in all leaves of the plan, another size. Axes of size 1 may have no letter."""
    stored = {part.leaf: part.stored for step in plan.steps for part in step.parts}

    def resize(leaf: str, shape: tuple[int, ...]) -> Iterator[int]:
        named = list(stored.get(leaf, ()))
        for n in shape:
            name, _ = named.pop(0) if named and named[0][1] == n else ("", n)
            yield size if name == letter else n

    return {leaf: tuple(resize(leaf, shape)) for leaf, shape in shapes.items()}
