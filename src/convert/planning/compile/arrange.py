"""What one leaf contributes to a tensor: its elements are chosen, reordered, and moved to the axes of the tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convert.core.findings import Finding
from convert.core.ops import Flip, Op, Pad, Reshape, Take
from convert.layers import Rule, TargetLayer
from convert.layers.base import Part, PartLayout
from convert.layers.leaves import MisfitError
from convert.layers.transforms.concatenated import reordered, shown_orders
from convert.layers.transforms.rope import rope_permutation, rotated_heads, target_rope_pairs
from convert.layers.transforms.weight_transforms import unflattened
from convert.planning.compile.axes import group_shown, movement, taken_out, target_axes
from convert.planning.compile.named_leaf import NamedLeaf

_UNNAMED = "abcdefghijklmnopqrstuvwxyz"  # letters for axes that a rule does not name


@dataclass(frozen=True)
class _Axes:
    """Axes and their sizes.

    Attributes:
        letters: of the axes.
        shape: their sizes.
    """

    letters: str
    shape: tuple[int, ...]

    def without(self, gone: Mapping[str, int]) -> _Axes:
        """Return the axes but those of which one element is chosen."""
        kept = [k for k, letter in enumerate(self.letters) if letter not in gone]
        return _Axes("".join(self.letters[k] for k in kept), tuple(self.shape[k] for k in kept))


@dataclass(frozen=True)
class _Moves:
    """How the axes of a leaf become those of a tensor.

    Attributes:
        chosen: axis -> the element of it that the tensor has.
        left: the axes that are left of the leaf.
        rope: changes the order of the pairs that RoPE turns.
        reorders: puts parts into another order.
        axes: those of the tensor, before they are flattened.
        groups: letters that are flattened into each axis of the tensor.
        stored: the axes of the leaf, as `axes`, but with the chosen ones.
    """

    chosen: Mapping[str, int]
    left: _Axes
    rope: tuple[Op, ...]
    reorders: tuple[Op, ...]
    axes: _Axes
    groups: tuple[str, ...]
    stored: _Axes


def arranged(
    rule: Rule,
    role: str,
    layer: TargetLayer,
    variant: str | None,
    leaf: NamedLeaf,
    stack: Mapping[str, int],
    member: tuple[int, int] | None,
    sizes: Mapping[str, int],
    elements: Mapping[str, int] | None = None,
) -> Part:
    """Return what one leaf contributes to a tensor, without arithmetic and cast.

    Args:
        stack: which element of each stacked axis.
        member: (k, n): only the k-th of n targets, of which the first output axis holds one each.
        sizes: of the letters.
        elements: which element of each axis that the target's path names; a leaf without the axis belongs to all.

    Raises:
        MisfitError: its shape contradicts the rule.
    """
    start = (*taken_out(leaf.stacked, stack), *leaf.opening)
    taken = [f"{index}={stack[index]}" for index, _, _ in leaf.stacked]
    if leaf.letters is None:
        return _as_stored(rule, role, layer, leaf, member, start, ", ".join(taken))
    try:
        chosen = _chosen(rule, role, layer, variant, leaf, member, elements or {})
        moves = _moves(rule, role, layer, variant, leaf, chosen, sizes)
    except ValueError as error:
        code = "size-unknown" if "nothing gives" in str(error) else "shape-mismatch"
        problem = f"{leaf.spec} as {leaf.axes}: {error}"
        raise MisfitError(Finding(code, problem, rule=rule.at.line_only, path=leaf.name)) from None
    axes, groups = moves.axes, moves.groups
    turned = rule.kind.turned(role, layer)
    opening = (*start, *_takes(leaf.letters, chosen))
    inner = (Reshape(axes.shape),) if axes.shape != moves.left.shape else ()
    ops = (*opening, *moves.rope, *moves.reorders, *inner, *movement(axes.letters, axes.shape, groups), *turned)
    apart = (
        *(index for index, _, _ in leaf.stacked),
        *sorted({letter for letter in moves.stored.letters if letter not in axes.letters}),
    )
    kept = zip(axes.letters, axes.shape, strict=True)
    written = (str(leaf.groups[group]) if group in leaf.groups else group_shown(group) for group in groups)
    remarks = ", ".join(_remarks(rule, layer, variant, moves, turned))
    return Part(
        leaf.name,
        ops,
        None,
        PartLayout(_axes_before(rule, leaf, moves.left), " ".join([*apart, *written]), remarks),
        ", ".join([*taken, *(f"{axis}={k}" for axis, k in chosen.items())]),
        tuple((letter, size) for letter, size in kept if any(letter in group for group in groups)),
        groups,
        leaf.stored(moves.stored.letters, moves.stored.shape),
        apart,
        opening=len(opening),
        taken=tuple(chosen),
    )


def _chosen(
    rule: Rule,
    role: str,
    layer: TargetLayer,
    variant: str | None,
    leaf: NamedLeaf,
    member: tuple[int, int] | None,
    elements: Mapping[str, int],
) -> dict[str, int]:
    """Return which element of its axes the tensor has: those that the target's path names, and that of the k-th of several targets.

    Raises:
        ValueError: the axis has another number of elements than the rule has targets, or its elements are ordered.
    """
    letters, shape = leaf.letters or "", leaf.own_shape
    chosen = {axis: k for axis, k in elements.items() if axis in letters}
    if member:
        axis = rule.kind.split_axis(role, letters, variant)
        if (size := shape[letters.index(axis)]) != member[1]:
            others = [x for x, n in zip(letters, shape, strict=True) if n == member[1]]
            raise ValueError(
                f"{axis} has {size} elements, but the rule lists {member[1]} targets; "
                + (
                    f"if they are elements of another axis, name it in the target, such as {{{others[-1]}:{','.join(layer.path.groups[-1].words)}}}"
                    if others
                    else "list one for each element"
                )
            )
        chosen[axis] = member[0]
    if ordered := sorted(set(chosen) & set(layer.concatenated)):
        raise ValueError(f"`concatenated` names {ordered[0]}, whose elements are different tensors")
    return chosen


def _takes(letters: str, chosen: Mapping[str, int]) -> list[Op]:
    """Take one element of each axis that is chosen."""
    ops: list[Op] = []
    for axis, k in chosen.items():
        ops.append(Take(letters.index(axis), k))
        letters = letters.replace(axis, "")
    return ops


def _moves(
    rule: Rule,
    role: str,
    layer: TargetLayer,
    variant: str | None,
    leaf: NamedLeaf,
    chosen: Mapping[str, int],
    sizes: Mapping[str, int],
) -> _Moves:
    """Return how the axes of a leaf become those of a tensor.

    Raises:
        ValueError: they cannot, or nothing gives a size that is needed.
    """
    whole = _Axes(leaf.letters or "", leaf.own_shape)
    left = whole.without(chosen)
    rope = rope_permutation(rule, layer, left.letters, sizes, variant)
    reorders = reordered(rule, layer, left.letters, left.shape, sizes)
    letters, shape = rule.kind.inner_axes(role, left.letters, left.shape, sizes)
    groups = target_axes(layer, role, letters, shape, rule.kind.groups(role, letters, variant, layer))
    letters, shape, groups = unflattened(rule, layer, letters, shape, groups, sizes)
    inner = rule.kind.inner_axes(role, whole.letters, whole.shape, sizes)
    stored = _Axes(*unflattened(rule, layer, *inner, (), sizes)[:2])
    return _Moves(chosen, left, tuple(rope), tuple(reorders), _Axes(letters, shape), groups, stored)


def _axes_before(rule: Rule, leaf: NamedLeaf, left: _Axes) -> str:
    """Return the axes of a leaf as a plan shows them: a flattened map by its own axes."""
    flattened = rule.flattened
    if flattened is None or flattened.axis not in left.letters:
        return leaf.axes
    return " ".join(group_shown(flattened.order) if x == flattened.axis else x for x in leaf.axes.split())


def _remarks(rule: Rule, layer: TargetLayer, variant: str | None, moves: _Moves, turned: Sequence[Op]) -> list[str]:
    """Say what letters do not show: the order of pairs and parts, flipped axes, zeros in front."""
    remarks = []
    if moves.rope and rule.rope is not None:
        heads = " and ".join(one.shown(rule) for one in rotated_heads(rule, moves.left.letters, variant))
        remarks.append(f"{heads} from {rule.rope.pairs} to {target_rope_pairs(layer)} pairs")
    remarks += shown_orders(rule, layer, moves.left.letters)
    flipped = [group_shown(moves.groups[axis]) for op in turned if isinstance(op, Flip) for axis in op.axes]
    remarks += [f"{' and '.join(flipped)} flipped"] if flipped else []
    padded = [op for op in turned if isinstance(op, Pad)]
    return [*remarks, *(f"{op.before} of zeros in front of {group_shown(moves.groups[op.axis])}" for op in padded)]


def _as_stored(
    rule: Rule,
    role: str,
    layer: TargetLayer,
    leaf: NamedLeaf,
    member: tuple[int, int] | None,
    taken_out: Sequence[Op],
    taken: str,
) -> Part:
    """Return what a leaf without letters contributes: `taken_out` takes it out of its stack, and its axes stay.

    Raises:
        MisfitError: the rule moves its axes, or splits it.
    """

    def misfit(problem: str, fix: str) -> MisfitError:
        at = rule.at.line_only
        return MisfitError(Finding("layer-not-representable", problem, rule=at, path=leaf.name, fix=fix))

    outputs = "".join(of for _, of in rule.kind.weight_axes)
    if moved := [x for x in layer.concatenated if rule.normalized is None or x in outputs]:
        raise misfit(
            f"`concatenated` orders {moved[0]}, and the axes of this leaf have no letters",
            "write the leaf as a `parameter` with `axes`, in a rule of its own",
        )
    if member:
        raise misfit(
            f"the rule has fewer sources than targets, and a `{rule.kind_name}` cannot be split",
            "name one target for each leaf",
        )
    ops = tuple(taken_out)
    layout = "as stored" if not leaf.stacked else f"stacked on axis {', '.join(str(a) for _, a, _ in leaf.stacked)}"
    if rule.normalized is not None and role == rule.normalized.role:  # kept: the scale next to the direction
        size = math.prod(leaf.own_shape)
        ops = (*ops, Reshape((size, *[1] * (rule.kind.weight_rank - 1))))
    unnamed = tuple(zip(_UNNAMED, leaf.own_shape, strict=False))
    groups = tuple(x for x, _ in unnamed)
    stored = leaf.stored("".join(groups), leaf.own_shape)
    if layer.axes is not None and not any(layer.axes):  # one number, with axes of size 1
        if math.prod(leaf.own_shape) != 1:
            raise misfit(
                f"the target's axes have one element, and the leaf has the shape {list(leaf.own_shape)}",
                "name its axes",
            )
        groups, ops = layer.axes, (*ops, Reshape((1,) * len(layer.axes)))
    apart = tuple(index for index, _, _ in leaf.stacked)
    opening = len(taken_out)
    return Part(leaf.name, ops, None, PartLayout(layout), taken, unnamed, groups, stored, apart, opening=opening)
