"""The letters of a leaf that no equation describes: a table, a norm's scale, a parameter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from convert.inference.rule_file.joining.patterns import PatternRule, part_at
from convert.inference.rule_file.layers.layout import Axis
from convert.inference.rule_file.layers.rule import (
    ALTERNATING,
    BESIDE,
    COLUMNS,
    NORMS,
    ORDERS,
    TAPS,
    TERM_AXES,
    ZEROS,
    NoWordsError,
)
from convert.inference.rule_file.printing.letters import (
    Named,
    axes_in_groups,
    in_stored_order,
    is_flattened,
    leaf_letters,
    one_after_another,
    target_axes,
)
from convert.layers import KINDS


def flattened_features(rule: PatternRule, named: Named) -> str:
    """Name the axes of a norm over a flattened map, and return the map as YAML; nothing where it is none."""
    layout = rule.layer.main[0].layout
    groups = layout.groups or ()
    if "flattened" not in KINDS[rule.layer.kind_name].keys or len(groups) != 1 or not is_flattened(groups[0]):
        return ""
    return f"{{{named.flattened(groups[0][0].of, in_stored_order(groups[0], layout))}}}"


def stored_axes(rule: PatternRule, named: Named) -> tuple[str, str]:
    """Return the letters of a leaf without an equation, as stored and, where they differ, in the target.

    Both are empty for a parameter that is kept as stored. An axis that is a flattened map has its letter already.
    """
    layer = rule.layer
    layout = layer.main[0].layout
    stacked = [axis for _, axis in rule.stacked]
    if named.whole:
        return leaf_letters(layout, named, stacked), ""
    kept = tuple(size for axis, size in enumerate(layout.leaf_shape) if axis not in stacked)
    ordered = [(axis.of, axis.place) for axis in layout.axes] == sorted((axis.of, axis.place) for axis in layout.axes)
    said = dict(layer.target_keys)
    alternating = int(said.get(ALTERNATING, "1"))
    beside, across = map(int, said.get(BESIDE, "1 -1").split())
    moved = any(axis.parts for axis in layout.axes)
    if (rule.split is not None and rule.at < 0) or rule.parts is not None:
        return _in_pieces(rule, named, stacked)
    columns = said.get(COLUMNS, "")
    single = len(layer.main) == 1 and not columns
    terms = dict(layer.keys).get(TERM_AXES, "")
    as_stored = ordered and kept == layout.shape and single and not (moved or terms or layer.also_as or ZEROS in said)
    if layer.kind_name == "parameter" and as_stored:
        return "", ""
    taps = _taps(rule)
    named.divided(layout, rule.taken, stacked, taps)
    in_columns = (layout.groups or ((), ()))[1] if columns else ()
    for axis in sorted(
        layout.axes, key=in_columns.__contains__
    ):  # these last: the others are the same in all rules of the tensor
        table = layer.kind_name == "embedding" and axis == layout.axes[0]
        role = "entries" if table else "kernel" if axis in taps else "width"
        if len(layout.made_of(axis.of)) > 1:
            known = named.given.get((axis.of, axis.place))
            named.of[axis.of, axis.place] = known or named.another(role, axis.size)
        else:
            named.name_one(axis, role)
    for made_of in map(layout.made_of, range(len(layout.leaf_shape))):
        if len(made_of) > 1:  # no leaf has an axis for each: the file gives all sizes but one
            named.letters.sums.append(tuple(named.of[axis.of, axis.place] for axis in made_of))
    own = leaf_letters(layout, named, stacked)
    stored = named.as_stored(own)
    of_one = layer.kind_name == "embedding" and len(stored) == 2 and "." in stored
    if of_one or (layer.kind_name in NORMS and stored == "."):  # a width of 1 has a letter, too
        stored = stored.replace(".", named.take("width", 1))
    if beside > 1 or alternating > 1:
        axes = axes_in_groups(layout, named)
        each = axes[across].strip("()").replace(".", "1")
        ones = f"{each} ({' + '.join('1' * alternating)})" if alternating > 1 else ""
        axes[across] = f"({ones or ' + '.join([each] * beside)})"
        return stored, "".join(axes)
    if orders := said.get(ORDERS):
        return stored, f"{axes_in_groups(layout, named)[0]}({_in_orders(orders, rule, named)})"
    if columns:
        return stored, _side_by_side(
            axes_in_groups(layout, named), layout.shape[1], list(map(int, columns.split())), named
        )
    if layer.kind_name == "parameter" and len(layer.main) > 1:
        return stored, one_after_another(target_axes(layout, named), len(layer.main))
    if terms:
        return _of_terms(stored, terms), "" if ordered and len(stored) == len(layout.shape) else target_axes(
            layout, named
        )
    alone = all(len(group) == 1 for group in layout.groups or ())  # each axis of the tensor is one of the leaf
    if ordered and alone and "." not in stored and len(stored) == len(layout.shape):
        return stored, ""
    if layer.kind_name in (*NORMS, "embedding"):
        if not ordered:
            raise NoWordsError("its axes are permuted, and no equation describes it")
        return stored, ""
    of_target = target_axes(layout, named)
    return stored, of_target if of_target != own or not rule.taken else ""


def _of_terms(letters: str, terms: str) -> str:
    """Return the letters of each leaf of a sum, ``TD + D``.

    Raises:
        NoWordsError: an axis of the sum is made of several, or a leaf is one number.
    """
    if not letters.isalpha():
        raise NoWordsError("its elements are sums of leaves with different axes, one of which the target splits")
    places = [[int(place) for place in term.split()] for term in terms.split(",")]
    if any(max(of, default=-1) < 0 for of in places):
        raise NoWordsError("its elements are sums of leaves, one of which is one number")
    return " + ".join("".join(letters[place] if place >= 0 else "." for place in of) for of in places)


def _taps(rule: PatternRule) -> tuple[Axis, ...]:
    """Return the axes that are sizes of a kernel."""
    count = int(dict(rule.layer.target_keys).get(TAPS, "0"))
    groups = rule.layer.main[0].layout.groups or ()
    return tuple(axis for group in groups[len(groups) - count :] for axis in group)


def _side_by_side(axes: Sequence[str], own: int, widths: Sequence[int], named: Named) -> str:
    """Return the letters of a tensor of which a leaf, of this width, is some columns: ``C(E + F)``, or one: ``C(E + 1)``."""
    rows, columns, *taps = axes
    of, others = {own: columns.strip("()"), 1: "1"}, "".join((rows, *taps))
    for width in widths:
        again = (named.letters.named("width", width, k) for k in itertools.count())
        if width not in of:
            of[width] = next(letter for letter in again if letter not in others)
            named.letters.of_others.add(of[width])
    return f"{rows}({' + '.join(of[width] for width in widths)}){''.join(taps)}"


def _in_orders(orders: str, rule: PatternRule, named: Named) -> str:
    """Return the letters of the columns of a tensor that are all parts of one leaf's axis: ``K A B + L``.

    Raises:
        NoWordsError: the leaf is divided otherwise.
    """
    if len(rule.taken) != 1 or rule.taken[0].axis not in named.parts:
        raise NoWordsError("its columns are parts of a leaf of which another tensor has some")
    (one,) = rule.taken
    found = []
    for start, places in (text.split(":") for text in orders.split()):
        letters = named.parts[one.axis][part_at(int(start), one.sizes)]
        found.append(" ".join(letters[int(place)] for place in places.split(",")))
    return " + ".join(found)


def _in_pieces(rule: PatternRule, named: Named, stacked: Sequence[int]) -> tuple[str, str]:
    """Return the letters of a leaf whose parts, or the elements of one axis, are tensors, ``(1 + 1 + 1 + 1)NH``; and those of a tensor, if they are others."""
    layout = rule.layer.main[0].layout
    for axis in layout.axes:
        named.of[axis.of, axis.place] = named.take("kernel" if axis in _taps(rule) else "width", axis.size)
    if rule.split is not None:
        ones = f"({' + '.join('1' * layout.leaf_shape[rule.split])})"
        whole = leaf_letters(layout, named, stacked, (rule.split, ""))
        stored = leaf_letters(layout, named, stacked, (rule.split, ones))
    else:
        assert rule.parts is not None, "it has elements of an axis, or parts of one"
        letter = named.of[rule.parts[0], 0]
        whole = leaf_letters(layout, named, stacked)
        stored = whole.replace(letter, named.sum(rule.parts[1], letter))
    of_target = target_axes(layout, named)
    return stored, of_target if of_target != whole.replace(".", "") else ""  # a dot of the leaf is removed
