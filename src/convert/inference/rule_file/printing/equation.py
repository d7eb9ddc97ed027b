"""The equation of a linear layer, in the letters of its file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convert.drafting.axis_letters import Letters
from convert.inference.rule_file.joining.patterns import PatternRule
from convert.inference.rule_file.layers.layout import HALF_SPLIT, INTERLEAVED, Axis, Layout
from convert.inference.rule_file.layers.rule import NoWordsError
from convert.inference.rule_file.printing.letters import (
    Named,
    in_stored_order,
    is_flattened,
    leaf_letters,
    one_after_another,
    target_axes,
)
from convert.layers.leaf_sums import NEXT


@dataclass(frozen=True)
class Equation:
    """The equation of a linear layer, and what its letters are used for.

    Attributes:
        text: of the equation.
        axes: of the target's weight; empty where they are those of a ``Linear``.
        rope: letter -> the order of the pairs that RoPE turns.
        flattened: the inputs that are a flattened map, as YAML; empty: they are none.
        head: letter and size of the last of several output axes.
        split: letter of the axis whose elements go to different modules, where it is not the first of the outputs.
    """

    text: str
    axes: str
    rope: Mapping[str, str]
    flattened: str
    head: Mapping[str, int]
    split: str = ""


def equation_of(rule: PatternRule, named: Named) -> Equation:
    """Return the equation of a layer whose weight is a leaf, several below each other, or elements of one.

    Raises:
        NoWordsError: the leaves follow each other along the inputs.
    """
    source = rule.layer.main[0]
    layout, contracted = source.layout, set(source.contracted)
    groups = layout.groups
    assert groups is not None, "only layouts with groups are rules"
    inward = [axis for group in groups for axis in group if axis.of in contracted]
    outward = [axis for group in groups for axis in group if axis.of not in contracted]
    named.divided(layout, rule.taken, [axis for _, axis in rule.stacked])
    inward, outward = (_with_ones(part, rule, inner) for part, inner in ((inward, True), (outward, False)))
    split = named.take("parts", layout.leaf_shape[rule.split]) if rule.split is not None and rule.at < 0 else ""
    in_parts = {one.axis for one in rule.taken}  # a part that is a map has its order in the axes of the target
    is_map = is_flattened(inward) and tuple(inward) in groups and inward[0].of not in in_parts
    flattened = f"{{{named.flattened(inward[0].of, in_stored_order(inward, layout))}}}" if is_map else ""
    if not is_map:
        named.name(inward, _roles_of_inputs(inward, groups))
    named.name(outward)
    inward, outward = in_stored_order(inward, layout), _as_bias(rule, outward)
    y = "".join(named.of[a.of, a.place] for a in outward)
    ones = _ones_of_bias(rule) if split else 0
    in_front = split if ones > 1 else ""  # of a bias that is stored as [2, 1, 1, F]
    at = _place_of_split(rule, outward) if split and not ones else 0
    outputs = y if in_front else f"{y[:at]}{split}{y[at:]}"
    x = named.whole[inward[0].of] if is_map else "".join(named.of[a.of, a.place] for a in inward)
    stacked = [axis for _, axis in rule.stacked]
    weight = leaf_letters(layout, named, stacked, (rule.split, split) if rule.split is not None and split else None)
    x, grouped = _opened(x, weight), _opened(outputs, weight)
    if rule.parts is not None:
        letter = named.of[rule.parts[0], 0]
        parted = named.sum(rule.parts[1], letter)
        x, weight, grouped = (text.replace(letter, parted) for text in (x, weight, grouped))
    x, weight, grouped = map(named.as_stored, (x, weight, grouped))
    if others := [of[0] for key, of in rule.layer.sources if NEXT in key]:
        widths = [one.layout.leaf_shape[one.contracted[0]] for one in others]
        parted = f"({' + '.join((x, *(named.take('width', width) for width in widths)))})"
        x, weight = parted, weight.replace(x, parted)
    rows = "..." + "".join(named.take("positions", 1) for _ in range(ones - 1))
    named.fix(axis for axis in layout.axes if axis.order)  # a head's features, which the code splits
    wanted = [tuple(axis for axis in part if axis.size > 1) for part in (outward, inward)]
    as_linear = is_map or [tuple(group) for group in groups] == wanted
    return Equation(
        f"{rows}{x},{weight}->{in_front}{rows}{grouped}",
        "" if as_linear else _with_letters_of_ones(_axes_of_target(rule, named), y, x),
        {named.of[a.of, a.place]: a.order for a in layout.axes if a.order in (INTERLEAVED, HALF_SPLIT)},
        flattened,
        {named.of[axis.of, axis.place]: axis.size for axis in outward[-1:] if len(outward) > 1},
        split if at else "",
    )


def _roles_of_inputs(inward: Sequence[Axis], groups: Sequence[Sequence[Axis]]) -> Sequence[str] | None:
    """Return what axes over which a product sums are, where the target is a kernel, or where they are too many for heads; None: as of outputs."""
    space = {axis for group in groups[2:] for axis in group}
    if space.intersection(inward):
        return ["kernel" if axis in space else "width" for axis in inward]
    return ["width"] * len(inward) if len(inward) > 2 else None


def _axes_of_target(rule: PatternRule, named: Named) -> str:
    """Return the letters of the target's weight.

    Raises:
        NoWordsError: its leaves follow each other along the inputs.
    """
    source = rule.layer.main[0]
    axes = target_axes(source.layout, named)
    if len(rule.layer.main) > 1:  # leaves below each other
        if any(axis.of in source.contracted for axis in (source.layout.groups or ())[0]):
            raise NoWordsError(
                "its leaves follow each other along the first axis, over which the product sums; "
                "in the rule language they follow each other along an axis of the outputs"
            )
        axes = one_after_another(axes, len(rule.layer.main))
    named.fix(source.layout.axes)
    return axes


def _with_letters_of_ones(axes: str, outward: str, inward: str) -> str:
    """Return the letters of the target's weight, where its first or second axis is the only output or input: of size 1, it is no dot."""
    if len(outward) == 1 and outward not in axes and axes[:1] == ".":
        axes = outward + axes[1:]
    return f"{axes[0]}{inward}{axes[2:]}" if len(inward) == 1 and inward not in axes and axes[1:2] == "." else axes


def _as_bias(rule: PatternRule, outward: list[Axis]) -> list[Axis]:
    """Return the output axes of a linear layer as a bias stores them, which is added to its result; as the leaf does, where the bias does not tell.

    Args:
        outward: in the order of the rows.
    """
    bias = dict(rule.layer.sources).get("bias")
    axes = bias[0].layout.axes if bias is not None else ()
    if [axis.size for axis in axes] != [axis.size for axis in outward]:
        return in_stored_order(outward, rule.layer.main[0].layout)
    return [outward[k] for k in sorted(range(len(axes)), key=lambda k: (axes[k].of, axes[k].place))]


def _place_of_split(rule: PatternRule, outward: Sequence[Axis]) -> int:
    """Return how many outputs stand in front of the axis whose elements go to different modules, as a bias stores them; as the leaf does, where there is none."""
    assert rule.split is not None, "the modules have the elements of an axis"
    bias = dict(rule.layer.sources).get("bias")
    if bias is None:
        return sum(axis.of < rule.split for axis in outward)
    of_bias = rule.split - sum(axis < rule.split for axis in rule.layer.main[0].contracted)
    return sum(axis.of < of_bias for axis in bias[0].layout.axes)


def _with_ones(axes: Sequence[Axis], rule: PatternRule, inward: bool) -> list[Axis]:
    """Return the input or output axes of a linear layer with those of size 1, which no element tells, as stored."""
    source = rule.layer.main[0]
    hidden = {rule.split if rule.at < 0 else None, *(axis for _, axis in rule.stacked)}
    found = list(axes)
    alone = {one.axis for one in rule.taken if one.sizes[one.at] == 1}
    for axis, size in enumerate(source.layout.leaf_shape):
        if (size == 1 or axis in alone) and axis not in hidden and (axis in source.contracted) == inward:
            at = next((k for k, other in enumerate(found) if other.of > axis), len(found))
            found.insert(at, Axis(axis, 0, 1))
    return found


def _ones_of_bias(rule: PatternRule) -> int:
    """Return how many axes of size 1 the bias has."""
    bias = dict(rule.layer.sources).get("bias")
    return bias[0].layout.leaf_shape.count(1) if bias else 0


def _opened(text: str, weight: str) -> str:
    """Return the letters of an operand with the groups of the weight where they stand in its order."""
    for group in re.findall(r"\([^()]*\)", weight):
        text = text.replace(re.sub(r"[() ]", "", group), group)
    return text


def product_equation(rule: PatternRule, letters: Letters, stored: str) -> str:
    """Return the equation of a weight that is the product of two leaves, whose axes are stored as ``DR,RE`` says.

    Raises:
        NoWordsError: one of them is no matrix.
    """
    named = Named(letters)
    left, right = (dict(rule.layer.sources)[key][0].layout.leaf_shape for key in ("from", "times"))
    sizes = dict(zip(stored.replace(",", ""), (*left, *right), strict=True))
    return _product(stored, *(named.take("rank" if axis == "R" else "width", sizes[axis]) for axis in "DRE"))


def added_equation(rule: PatternRule, letters: Letters, stored: str, equation: str) -> str:
    """Return the equation of the product that is added to a weight with an equation.

    Raises:
        NoWordsError: the product has other axes than the weight.
    """
    found = re.fullmatch(r"\.\.\.(\w+),\w+->\.\.\.(\w+)", equation)
    if found is None:
        raise NoWordsError("a product of two leaves is added to a weight with an axis that is made of several")
    left = dict(rule.layer.sources)["plus.from"][0].layout.leaf_shape
    rank = letters.named("rank", left[stored.index("R")])
    return _product(stored, found[1], rank, found[2])


def _product(stored: str, x: str, rank: str, y: str) -> str:
    """Return the equation of two leaves.

    Raises:
        NoWordsError: they have other axes than the letters.
    """
    own = {"D": x, "R": rank, "E": y}
    axes = re.findall(r"D+|R+|E+|,", stored)
    if any(len(of) != len(own.get(of[0], ",")) for of in axes):
        raise NoWordsError("a product of two leaves has other axes than the weight that it is, or is added to")
    weights = "".join(own.get(of[0], of) for of in axes)
    return f"...{x},{weights}->...{y}"


def in_turns(equation: str, turns: str, layout: Layout, named: Named) -> str:
    """Return the axes of a target whose leaves lie head by head, ``(N (1 + 1 + 1) H)D``, or group by group, ``(K (G + 1 + 1) H)D``, or
    alternate: ``(F (1 + 1))D``.

    Raises:
        NoWordsError: the leaves have other axes.
    """
    widths = [int(width) for width in turns.split()]
    ones = "." * (len(layout.groups or ()) - 2)  # of a convolution with one tap
    if len(set(widths)) > 1:
        return _group_by_group(widths, layout, named) + ones
    count, head = len(widths), widths[0]
    if head == 1 and (alone := re.fullmatch(r"\.\.\.(\w),\w+->\.\.\.(\w)", equation)):
        return f"({alone[2]} ({' + '.join('1' * count)})){alone[1]}{ones}"
    found = re.fullmatch(r"\.\.\.(\w+),\w+->\.\.\.(\w+)(\w)", re.sub(r"[() ]", "", equation))
    groups = layout.groups or ()
    if found is None or not groups or not groups[0] or groups[0][-1].size != head:
        raise NoWordsError("its leaves lie in the rows in turns, and not head by head")
    named.fix(groups[0])
    x, heads, last = found.groups()
    inward = x if len(x) == 1 else f"({' '.join(x)})"
    return f"({' '.join(heads)} ({' + '.join('1' * count)}) {last}){inward}{ones}"


def _group_by_group(widths: Sequence[int], layout: Layout, named: Named) -> str:
    """Return the axes of a target of which each group has parts of these numbers of rows.

    Raises:
        NoWordsError: it is no matrix, as the kernel and the bias of a convolution.
    """
    if len(layout.groups or ()) != 2:
        raise NoWordsError("parts of its leaves lie in the rows in turns, and it is no matrix")
    rows, inward = layout.groups or ((), ())
    before, *within = (named.of[axis.of, axis.place] for axis in rows)
    sizes = [axis.size for axis in rows[1:]]
    head = sizes[-1] if sizes and all(width % sizes[-1] == 0 for width in widths) else 1
    own = {math.prod(sizes) // head: " ".join(within[:-1] if head > 1 else within)}
    parts = []
    for count in (width // head for width in widths):
        letters = own[count] = own.get(count) or named.another("width", count)
        named.letters.fixed.update(letters.split())
        parts.append("1" if count == 1 else letters)
    named.letters.fixed.update((before, *within))
    ends = (before, f"({' + '.join(parts)})", *within[-1:][: head > 1])
    x = [named.of[axis.of, axis.place] for axis in inward]
    return f"({' '.join(ends)}){x[0] if len(x) == 1 else '(' + ' '.join(x) + ')'}"
