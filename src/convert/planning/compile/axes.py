"""Moves the axes of a leaf to those of a target tensor: selects in stacks, permutes, flattens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from convert.core.findings import Finding
from convert.core.ops import Flip, Op, Pad, Permute, Reshape, Take
from convert.layers import Rule, TargetLayer
from convert.layers.base import Part, PartLayout
from convert.layers.leaves import MisfitError
from convert.layers.transforms.concatenated import reordered, shown_orders
from convert.layers.transforms.rope import rope_permutation, rotated_heads, target_rope_pairs
from convert.layers.transforms.weight_transforms import unflattened
from convert.planning.compile.named_leaf import NamedLeaf

_UNNAMED = "abcdefghijklmnopqrstuvwxyz"  # letters for axes that a rule does not name


def group_shown(letters: str) -> str:
    """Format the letters that are flattened into one axis, in einops notation."""
    return letters if len(letters) == 1 else f"({' '.join(letters)})" if letters else "1"


@lru_cache(maxsize=4096)
def movement(letters: str, shape: tuple[int, ...], groups: tuple[str, ...]) -> tuple[Op, ...]:
    """Permute axes called `letters` into `groups`, each flattened into one axis; axes of no group have size 1 and are removed."""
    ops: list[Op] = []
    kept = "".join(groups)
    for axis in reversed(range(len(letters))):
        if letters[axis] not in kept:
            ops.append(Take(axis, 0))
    left = [(letter, size) for letter, size in zip(letters, shape, strict=True) if letter in kept]
    order = tuple("".join(letter for letter, _ in left).index(letter) for letter in kept)
    if order != tuple(range(len(order))):
        ops.append(Permute(order))
    sizes = dict(left)
    moved = tuple(sizes[letter] for letter in kept)
    flat = tuple(math.prod(sizes[letter] for letter in group) for group in groups)
    if flat != moved:
        ops.append(Reshape(flat))
    return tuple(ops)


def target_axes(
    layer: TargetLayer, role: str, letters: str, shape: tuple[int, ...], groups: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the letters of each axis of the target tensor, by the `axes` of the target where it has them.

    Args:
        letters, shape: of the leaf.
        groups: the axes that the kind of layer gives the tensor.

    Raises:
        ValueError: the target leaves out an axis that has more than one element.
    """
    if layer.axes is None:
        return groups
    named = "".join(layer.axes)
    if role != "weight":  # a bias has the axes of the result, in the weight's order
        return tuple(filter(None, ("".join(x for x in axis if x in "".join(groups)) for axis in layer.axes)))
    lost = [(x, size) for x, size in zip(letters, shape, strict=True) if x not in named and size != 1]
    if lost:
        raise ValueError(f"{lost[0][0]} has {lost[0][1]} elements, and the target's axes {axes_shown(layer.axes)} leave it out")  # fmt: skip
    return layer.axes


def axes_shown(axes: Iterable[str]) -> str:
    """Write the axes of a target as einops does."""
    return " ".join(map(group_shown, axes))


def taken_out(stacked: Iterable[tuple[str, int, int]], stack: Mapping[str, int]) -> list[Op]:
    """Select one element of each stacked axis."""
    return [Take(axis, stack[index]) for index, axis, _ in last_first(stacked)]


def last_first(stacked: Iterable[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Return stacked axes in the order in which their elements are taken: the numbers of the others stay valid."""
    return sorted(stacked, key=lambda s: -s[1])


def _as_stored(
    rule: Rule,
    role: str,
    layer: TargetLayer,
    leaf: NamedLeaf,
    member: tuple[int, int] | None,
    ops: list[Op],
    taken: str,
) -> Part:
    """Return what a leaf without letters contributes: `ops` take it out of its stack, and its axes stay.

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
    opening = len(ops)
    layout = "as stored" if not leaf.stacked else f"stacked on axis {', '.join(str(a) for _, a, _ in leaf.stacked)}"
    if rule.normalized is not None and role == rule.normalized.role:  # kept: the scale next to the direction
        size = math.prod(leaf.own_shape)
        ops = [*ops, Reshape((size, *[1] * (rule.kind.weight_rank - 1)))]
    unnamed = tuple(zip(_UNNAMED, leaf.own_shape, strict=False))
    groups = tuple(x for x, _ in unnamed)
    stored = leaf.stored("".join(groups), leaf.own_shape)
    if layer.axes is not None and not any(layer.axes):  # one number, with axes of size 1
        if math.prod(leaf.own_shape) != 1:
            raise misfit(
                f"the target's axes have one element, and the leaf has the shape {list(leaf.own_shape)}",
                "name its axes",
            )
        groups, ops = layer.axes, [*ops, Reshape((1,) * len(layer.axes))]
    apart = tuple(index for index, _, _ in leaf.stacked)
    return Part(leaf.name, tuple(ops), None, PartLayout(layout), taken, unnamed, groups, stored, apart, opening=opening)


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
    ops: list[Op] = [*taken_out(leaf.stacked, stack), *leaf.opening]
    taken = [f"{index}={stack[index]}" for index, _, _ in leaf.stacked]
    if leaf.letters is None:
        return _as_stored(rule, role, layer, leaf, member, ops, ", ".join(taken))
    letters, shape = leaf.letters, leaf.own_shape
    before = leaf.axes
    try:
        chosen = {axis: k for axis, k in (elements or {}).items() if axis in letters}
        if member:
            axis = rule.kind.split_axis(role, letters, variant)
            if (size := shape[letters.index(axis)]) != member[1]:
                raise ValueError(
                    f"{axis} has {size} elements, but the rule lists {member[1]} targets; if they are elements of another axis, "
                    f"name it in the target, such as {{{letters[-1]}:{','.join(layer.path.groups[-1].words)}}}"
                )
            chosen[axis] = member[0]
        if gone := sorted(set(chosen) & set(layer.concatenated)):
            raise ValueError(f"`concatenated` names {gone[0]}, whose elements are different tensors")
        for axis, k in chosen.items():
            at = letters.index(axis)
            ops.append(Take(at, k))
            taken.append(f"{axis}={k}")
            letters, shape = letters[:at] + letters[at + 1 :], shape[:at] + shape[at + 1 :]
        opening = len(ops)
        paired = rope_permutation(rule, layer, letters, sizes, variant)
        in_order = reordered(rule, layer, letters, shape, sizes)
        heads = " and ".join(one.shown(rule) for one in rotated_heads(rule, letters, variant))
        whole, outer = shape, letters
        letters, shape = rule.kind.inner_axes(role, letters, shape, sizes)
        groups = target_axes(layer, role, letters, shape, rule.kind.groups(role, letters, variant, layer))
        letters, shape, groups = unflattened(rule, layer, letters, shape, groups, sizes)
        inner = rule.kind.inner_axes(role, leaf.letters, leaf.own_shape, sizes)
        full = unflattened(rule, layer, *inner, (), sizes)[:2]
    except ValueError as error:
        code = "size-unknown" if "nothing gives" in str(error) else "shape-mismatch"
        raise MisfitError(
            Finding(code, f"{leaf.spec} as {before}: {error}", rule=rule.at.line_only, path=leaf.name)
        ) from None
    turned = rule.kind.turned(role, layer)
    apart_ = (Reshape(shape),) if shape != whole else ()
    ops += (*paired, *in_order, *apart_, *movement(letters, shape, groups), *turned)
    if rule.flattened is not None and rule.flattened.axis in outer:
        before = " ".join(group_shown(rule.flattened.order) if x == rule.flattened.axis else x for x in before.split())
    split = sorted({letter for letter in full[0] if letter not in letters})
    apart = (*(index for index, _, _ in leaf.stacked), *split)
    kept = tuple((x, size) for x, size in zip(letters, shape, strict=True) if any(x in group for group in groups))
    remarks = []
    if paired and rule.rope is not None:
        remarks.append(f"{heads} from {rule.rope.pairs} to {target_rope_pairs(layer)} pairs")
    remarks += shown_orders(rule, layer, outer)
    if turned:
        axes = [group_shown(groups[axis]) for op in turned if isinstance(op, Flip) for axis in op.axes]
        remarks += [f"{' and '.join(axes)} flipped"] if axes else []
        remarks += [
            f"{op.before} of zeros in front of {group_shown(groups[op.axis])}" for op in turned if isinstance(op, Pad)
        ]
    written = (str(leaf.groups[group]) if group in leaf.groups else group_shown(group) for group in groups)
    shown = PartLayout(before, " ".join([*apart, *written]), ", ".join(remarks))
    stored = leaf.stored(*full)
    at_ = ", ".join(taken)
    return Part(
        leaf.name,
        tuple(ops),
        None,
        shown,
        at_,
        kept,
        groups,
        stored,
        apart,
        opening=opening,
        taken=tuple(chosen),
    )
