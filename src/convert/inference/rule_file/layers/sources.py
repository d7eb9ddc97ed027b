"""Read the sources of a tensor off its parts: the leaves in the order of its rows, each with its layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convert.inference.derivation import Part, Tensor
from convert.inference.rule_file.layers.fused import cut, origin
from convert.inference.rule_file.layers.layout import Axis, Layout, cut_where_named, read_layout
from convert.inference.rule_file.layers.rule import NoWordsError, Source

Array = np.ndarray[Any, np.dtype[Any]]
Shapes = Mapping[str, tuple[int, ...]]
NO_ORDER = "its elements lie in an order that has no name"


def sources_of(tensor: Tensor, leaves: Shapes, *, rotary: bool = False) -> tuple[Source, ...]:
    """Return the sources of a tensor, in the order of its rows.

    Args:
        tensor: the tensor.
        leaves: their shapes.
        rotary: whether RoPE turns its rows, so that they may lie in another order.

    Raises:
        NoWordsError: its elements lie in an order that has no name.
    """
    found = []
    for part in sorted(_joined(tensor.parts), key=lambda part: int(part.elements[0]) if len(part.elements) else 0):
        order = np.argsort(part.elements, kind="stable")
        shape = _shape_of_rows(tensor, part.elements[order]) if part.leaf else None
        layout = read_layout(leaves[part.leaf], part.positions[order], shape, rotary) if shape is not None else None
        if layout is None or layout.groups is None:
            raise NoWordsError(NO_ORDER)
        found.append(Source(part.leaf, layout, part.contracted))
    return tuple(found)


def _shape_of_rows(tensor: Tensor, elements: Array) -> tuple[int, ...] | None:
    """Return the shape of the rows that some elements of a tensor are; None if they are no whole rows, one behind the other."""
    count, row = len(elements), int(np.prod(tensor.shape[1:]))
    if not np.array_equal(elements, np.arange(elements[0], elements[0] + count)):
        return None
    if count == int(np.prod(tensor.shape)):
        return tensor.shape
    return None if elements[0] % row or count % row else (count // row, *tensor.shape[1:])


def is_part_of_leaf(tensor: Tensor, leaves: Shapes, *, inputs: bool = False) -> bool:
    """Whether a tensor has some elements of an axis of its one leaf; with `inputs`: of one that a product sums over."""
    found = _named(tensor, leaves)
    return len(found) == 1 and any(
        len(of) == 1 and of[0].size < size and (not inputs or axis in found[0].contracted)
        for axis, size in enumerate(found[0].layout.leaf_shape)
        for of in [found[0].layout.made_of(axis)]
    )


def has_one_channel_of_leaf(kernel: Tensor, leaves: Shapes) -> bool:
    """Whether a kernel, O I spatial, has one element of its leaf's axis of channels: the leaf has no further axis for this one.

    A kernel with a filter for each channel has no axis of inputs in some code.
    """
    found = _named(kernel, leaves)
    if (
        len(found) != 1
        or not found[0].layout.fixed
        or int(kernel.parts[0].evidence.target.settings.get("groups", 1)) > 1
    ):
        return False
    layout = found[0].layout
    return 1 in kernel.shape[:2] and len(layout.leaf_shape) - len(layout.fixed) < len(kernel.shape)


def has_one_number_for_each_row(table: Tensor, leaves: Shapes) -> bool:
    """Whether a leaf that rows of a table come from has no axis for their width, which is 1; one of several tables does not count."""
    return any(
        len(source.layout.leaf_shape) - len(source.layout.fixed) < len(table.shape) for source in _named(table, leaves)
    )


def columns_with_layout(tensors: Mapping[str, Tensor], leaves: Shapes) -> list[Tensor]:
    """Return the columns of a weight that have a layout each, where the whole has none; none where they are no columns of one leaf.

    A layer takes a map that both programs flatten in their own order, and a vector that is joined to it.
    """
    tensor = tensors.get("weight")
    if tensor is None or len(tensor.shape) != 2 or len(set(map(origin, tensor.parts))) != 1:
        return []
    leaf, elements = tensor.parts[0].leaf, np.concatenate([part.elements for part in tensor.parts])
    if leaf not in leaves or len(elements) != tensor.shape[0] * tensor.shape[1] or _named(tensor, leaves):
        return []
    positions = np.concatenate([part.positions for part in tensor.parts])[np.argsort(elements)]
    along = [x for x in np.unravel_index(positions[: tensor.shape[1]], leaves[leaf]) if np.ptp(x)]
    lengths = cut_where_named(along[0]) if len(along) == 1 else ()
    starts = np.cumsum([0, *lengths[:-1]])
    return [cut(tensor, 1, int(start), length) for start, length in zip(starts, lengths, strict=False)]


def is_divided(tensor: Tensor, leaves: Shapes) -> bool:
    """Whether a tensor has some elements of an axis of its one leaf, or one."""
    return is_part_of_leaf(tensor, leaves) or any(source.layout.fixed for source in _named(tensor, leaves))


def is_joined(tensor: Tensor, leaves: Shapes) -> bool:
    """Whether several axes of its one leaf are one axis of a tensor."""
    return any(len(group) > 1 for source in _named(tensor, leaves) for group in source.layout.groups or ())


def joins_axes(tensor: Tensor, leaves: Shapes) -> bool:
    """Whether one axis of a tensor is made of several axes of a leaf, and not only of the parts of one."""
    groups = (group for source in _named(tensor, leaves) for group in source.layout.groups or ())
    return any(len({axis.of for axis in group}) > 1 for group in groups)


def is_permuted(tensor: Tensor, leaves: Shapes) -> bool:
    """Whether the axes of a tensor's leaf lie in another order."""
    places = [[(axis.of, axis.place) for axis in source.layout.axes] for source in _named(tensor, leaves)]
    return any(of != sorted(of) for of in places)


def has_divided_axis(tensor: Tensor, leaves: Shapes) -> bool:
    """Whether an axis of a tensor's one leaf is made of several, which the tensor has in another order."""
    found = _named(tensor, leaves)
    return len(found) == 1 and any(axis.place for axis in found[0].layout.axes)


def _named(tensor: Tensor, leaves: Shapes) -> tuple[Source, ...]:
    """Return the sources of a tensor; none where their order has no name."""
    try:
        return sources_of(tensor, leaves)
    except NoWordsError:
        return ()


def matrix(leaf: str, leaves: Shapes) -> Source:
    """Return a leaf as it is stored."""
    axes = tuple(Axis(k, 0, size) for k, size in enumerate(leaves[leaf]) if size > 1)
    return Source(leaf, Layout(leaves[leaf], (), axes, leaves[leaf]))


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Join parts of one leaf with the same arithmetic."""
    found: dict[Any, Part] = {}
    for part in parts:
        key = (part.leaf, part.arithmetic, part.factor, part.number, part.contracted)
        if key in found:
            first = found[key]
            elements = np.concatenate([first.elements, part.elements])
            positions = np.concatenate([first.positions, part.positions])
            found[key] = Part(
                elements, part.leaf, positions, part.arithmetic, first.evidence, part.factor, part.contracted
            )
        else:
            found[key] = part
    return list(found.values())
