"""Mistakes with the order of axes, and of the parts of a fused tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from convert.core.ops import Deinterleave, Interleave, Pad, Permute, Reorder, Reshape, Slice, Take
from convert.core.value_ops import Cast
from convert.layers.base import Part, Step
from convert.layers.leaf_reader import LeafReader
from convert.layers.mistake import Mistake, symmetric
from convert.layers.step_tensor import expected, maker
from convert.planning.ambiguity import MAX_AXES, layout_text, other_layouts

Array = np.ndarray[Any, np.dtype[Any]]
OTHER_STACK = "stacked along another axis"
HEAD_BY_HEAD = "parts within heads"
MAX_PARTS = 4  # of a fused tensor, all orders of which are tried


def layout_mistakes(step: Step, source: LeafReader) -> Iterator[Mistake]:
    """Yield the tensor with its leaves in other orders of their axes."""
    part = step.parts[0]
    if not part.axes or any((p.axes, p.groups) != (part.axes, part.groups) for p in step.parts):
        return
    if len(part.axes) > MAX_AXES or any(isinstance(op, Slice) for p in step.parts for op in p.ops[p.opening :]):
        return
    right = layout_text(map(tuple, part.groups))
    for layout in other_layouts(part.axes, tuple(map(tuple, part.groups))) or ():
        order = [letter for group in layout for letter in group]
        parts = tuple(_reordered(p, order, step) for p in step.parts)
        name = _name(part, tuple("".join(group) or "1" for group in layout))
        wrong = f"laid out as {layout_text(layout)}"
        yield symmetric(name, wrong, f"laid out as {right}", maker(step, source, parts))


def _name(part: Part, groups: tuple[str, ...]) -> str:
    """Return the name that the kind of layer has for an order of axes; otherwise what was moved."""
    stored = "".join(letter for letter, _ in part.axes)
    if part.rule is not None and (name := part.rule.kind.layout_mistake(part.groups, groups, stored)):
        return name
    mine, other = ([group for group in of if group not in ("", "1")] for of in (part.groups, groups))
    if len(mine) == len(other) == 2 and other == [mine[1], mine[0]]:
        return "transposed"
    if sorted(map(sorted, other)) == sorted(map(sorted, mine)) and any(len(group) > 1 for group in mine):
        return "axes of a head swapped"
    return "axes permuted"


def _reordered(part: Part, order: list[str], step: Step) -> Part:
    """Return the part with its axes permuted to `order`, in place of its own permutation, and flattened to the same shape."""
    letters = [letter for letter, _ in part.axes]
    kept = [op for op in part.ops[part.opening :] if not isinstance(op, (Permute, Reshape))]
    shape = list(step.spec.shape)
    if shape:
        shape[part.axis] = part.length(shape[part.axis])
    for op in kept:
        if isinstance(op, Pad):  # added behind the reshape
            shape[op.axis] -= op.before + op.after
    # Operations on the axes of the leaf stay before the permutation; casts, arithmetic and those on the target's axes after it.
    before = [op for op in kept if isinstance(op, (Take, Deinterleave, Interleave, Reorder))]
    after = [op for op in kept if op not in before]
    unflattened = Reshape(tuple(size for _, size in part.axes))
    moved = (unflattened, Permute(tuple(letters.index(x) for x in order)), Reshape(tuple(shape)))
    return replace(part, ops=(*part.ops[: part.opening], *before, *moved, *after))


def fused_order_mistakes(step: Step, source: LeafReader) -> Iterator[Mistake]:
    """Yield a fused tensor with its parts in other orders."""
    if not 1 < len(step.parts) <= MAX_PARTS or len({p.length(0) for p in step.parts if p.rows}) != 1:
        return
    if step.parts[0].every > 1:
        after = tuple(replace(part, every=1) for part in step.parts)
        yield symmetric("fused parts one after the other", "one leaf's columns after the other's", "columns that alternate", maker(step, source, after))  # fmt: skip
    word = "rows" if step.parts[0].axis == 0 else "columns"
    right = f"{word} in the order {', '.join(part.leaf for part in step.parts)}"
    for order in itertools.permutations(range(len(step.parts))):
        if order == tuple(range(len(step.parts))):
            continue
        parts = tuple(step.parts[k] for k in order)
        wrong = f"{word} in the order {', '.join(part.leaf for part in parts)}"
        yield symmetric("fused parts in another order", wrong, right, maker(step, source, parts), str(order))
    yield from _head_by_head(step, source)


def _head_by_head(step: Step, source: LeafReader) -> Iterator[Mistake]:
    """Yield a fused tensor whose rows alternate: the first head of each part, then the second of each."""
    groups, sizes = step.parts[0].groups, dict(step.parts[0].axes)
    if not groups or step.parts[0].axis != 0 or len({(p.groups, p.axes) for p in step.parts}) != 1:
        return
    heads = sizes.get(groups[0][:1], 1)
    if len(groups[0]) < 2 or heads == 1:
        return

    def make() -> Array:
        made = expected(step, source)
        return made.reshape(len(step.parts), heads, -1, *made.shape[1:]).swapaxes(0, 1).reshape(made.shape)

    right = f"all rows of {step.parts[0].leaf}, then those of {step.parts[1].leaf}"
    wrong = f"of each of the {heads} heads ({groups[0][0]}) the rows of all {len(step.parts)} leaves"
    yield symmetric(HEAD_BY_HEAD, wrong, right, make, HEAD_BY_HEAD)


def stacked_axis_mistakes(step: Step, source: LeafReader) -> Iterator[Mistake]:
    """Yield the tensor with an axis of its stack exchanged with another axis of the leaf that has the same size."""
    shapes = {source.leaves[part.leaf].spec.shape for part in step.parts}
    stacks = {_taken_axes(part) for part in step.parts}
    if len(shapes) != 1 or len(stacks) != 1:
        return
    (shape,), (stack,) = shapes, stacks
    for one, two in itertools.combinations(range(len(shape)), 2):
        if shape[one] != shape[two] or shape[one] == 1 or not {one, two} & set(stack):
            continue
        order = list(range(len(shape)))
        order[one], order[two] = two, one
        moved = tuple(replace(p, ops=(Permute(tuple(order)), *p.ops), opening=p.opening + 1) for p in step.parts)
        gives = f"read from the leaf with its axes {one} and {two} exchanged"
        yield symmetric(
            OTHER_STACK,
            gives,
            "read from the leaf as the rule names its axes",
            maker(step, source, moved),
            f"{one} {two}",
        )


def _taken_axes(part: Part) -> tuple[int, ...]:
    """Return the axes of the leaf from which the first operations take one element: layers and experts."""
    axes: list[int] = []
    left = list(range(len(part.ops) + len(part.axes)))
    for op in part.ops:
        if isinstance(op, Take):
            axes.append(left.pop(op.axis))
        elif not isinstance(op, Cast):
            break
    return tuple(axes)
