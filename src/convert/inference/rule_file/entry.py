"""Print one rule: the keys that describe the source, then the target."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from convert.drafting.axis_letters import Letters
from convert.drafting.like.target import TargetModel
from convert.inference.rule_file.cells import KINDS as CELLS
from convert.inference.rule_file.cells import cell_target
from convert.inference.rule_file.convolutions import convolution_keys
from convert.inference.rule_file.layer import (
    ATTENTION,
    BESIDE,
    CONVOLUTIONS,
    IN_TURNS,
    LOW_RANK,
    NORMS,
    PADDED,
    PRESCALED,
    LayerRule,
)
from convert.inference.rule_file.layout import HALF_SPLIT, INTERLEAVED, REVERSED, Axis, Layout
from convert.inference.rule_file.letters import CONCATENATED, Named, NoWordsError, leaf_letters, target_axes, with_keys
from convert.inference.rule_file.patterns import PatternRule
from convert.layers.draft import DraftEntry, flow, plain

NUMERAL = re.compile(r"[0-9]+(\.[0-9]+)?")


def entry_of(rule: PatternRule, letters: Letters, target: TargetModel) -> DraftEntry:
    layer = rule.layer
    if not rule.module:
        raise NoWordsError("it is a parameter of the model itself, and the rule needs the name of a module")
    entry = DraftEntry()
    extra = [(role, name) for role, name in layer.names if role != name]
    said = list(layer.keys)
    sizes: dict[str, int] = {}
    equation = ""
    if layer.kind_name not in CONVOLUTIONS:
        rule = replace(rule, layer=(layer := _in_parts(layer)))
    main, named = layer.main[0].layout, Named(letters)
    remark = ": ".join(filter(None, (layer.grade.value, layer.evidence)))
    remark += f"; the same in {rule.layers} layers" if rule.layers > 1 else ""
    if layer.kind_name == "linear":
        if (stored := dict(said).get(LOW_RANK)) is not None:
            equation, axes, flattened = _low_rank(rule, letters, stored), "", ""
            rope: dict[str, str] = {}
        else:
            equation, axes, rope, flattened, sizes = _equation(rule, named)
        said = [
            (key, value if key != "plus.einsum" else _added(rule, letters, value, equation))
            for key, value in said
            if key != LOW_RANK
        ]
        entry.say("einsum", json.dumps(equation) if re.search(r"[(){}]", equation) else equation, remark)
        extra += [("axes", axes)] if axes else []
        said += [("flattened", flattened)] if flattened else []
        said += [("rope", f"{{{', '.join(f'{letter}: {order}' for letter, order in rope.items())}}}")] if rope else []
    elif layer.kind_name == ATTENTION:
        (key, library), *more = layer.keys
        entry.say(key, library, remark)
        said = [("axes", _attention_axes(layer, letters)), *more]
    elif layer.kind_name in CELLS:
        (key, cell), *more = layer.keys
        entry.say(key, cell, remark)
        said = [*more]
        if main.axes:
            named.of[0, 0] = named.take("width", main.axes[0].size)
            said.append(("inputs", named.of[0, 0]))
    elif layer.kind_name in ("conv", "conv_transpose"):
        (numbers, axes), *more = convolution_keys(layer, named, [axis for _, axis in rule.stacked])
        entry.say("dimension_numbers", numbers, remark)
        entry.say("axes", axes)
        said = [*more, *said]
        if padded := dict(layer.geometry).get(PADDED):
            extra.append(("padding", padded))
    else:
        entry.say("from", plain(dict(rule.sources).get("from", "")), remark)
        axes, of_target = _stored(rule, named)
        said += [("axes", axes)] if axes else []
        extra += [("axes", of_target)] if of_target else []
        sizes = {axes[-1]: main.shape[-1]} if axes.isalpha() else {}
    if orders := named.concatenated(main):
        for of, side in ((said, 0), (extra, 1)):
            of.append((CONCATENATED, f"{{{', '.join(f'{axis}: {parts[side]}' for axis, parts in orders.items())}}}"))
    written = {line.key for line in entry.lines}
    for key, path in rule.sources:
        if key not in written and "." not in key:
            entry.say(key, plain(path))
    nested: dict[str, list[str]] = {}
    for key, value in (*rule.sources, *said):
        whole, dot, inner = key.partition(".")
        if dot:
            nested.setdefault(whole, []).append(f"{inner}: {value if NUMERAL.fullmatch(value) else flow(value)}")
    for key, values in nested.items():
        entry.say(key, f"{{{', '.join(sorted(values, key=lambda text: not text.startswith('einsum')))}}}")
    if rule.stacked:
        entry.say("stacked", f"{{{', '.join(f'{index}: {axis}' for index, axis in rule.stacked)}}}")
    if rule.index_from:
        entry.say(
            "index_from", f"{{{', '.join(f'{name}: [{slow}, {fast}]' for name, (slow, fast) in rule.index_from)}}}"
        )
    for key, value in said:
        if "." not in key:
            entry.say(key, _factor(float(value), sizes) if key == PRESCALED else value)
    extra += [(key, value) for key, value in layer.target_keys if key not in (IN_TURNS, BESIDE)]
    if turns := dict(layer.target_keys).get(IN_TURNS):
        extra.append(("axes", _head_by_head(equation, turns, main)))
    if layer.kind_name == "embedding" and (tied := tied_head(rule, target)):
        extra.append(("tied", tied))
    if layer.kind_name in CELLS:
        entry.say(layer.kind_name, cell_target(rule.module, extra))
        return entry
    if layer.kind_name != "conv_transpose":
        _check(main, None if rule.parts is None else rule.parts[0])
    key = "name" if layer.kind_name == "parameter" else "module"
    keys = with_keys(extra)
    entry.say(layer.kind_name, f"{{{key}: {flow(rule.module)}{keys}}}" if keys else plain(rule.module))
    return entry


def _in_parts(layer: LayerRule) -> LayerRule:
    """Return the layer with the elements of a short axis that is reversed as parts of it."""
    (key, of), *others = layer.sources
    moved = tuple(replace(s, layout=replace(s.layout, axes=tuple(a.in_parts for a in s.layout.axes))) for s in of)
    return replace(layer, sources=((key, moved), *others))


def _factor(number: float, sizes: Mapping[str, int]) -> str:
    """Return a factor as a rule says it: ``1/sqrt(H)`` or ``sqrt(D)`` where the axis has this size."""
    for letter, size in sizes.items():
        for text, power in ((f"1/sqrt({letter})", -0.5), (f"sqrt({letter})", 0.5)):
            if size > 1 and math.isclose(number, size**power, rel_tol=1e-12):
                return text
    inverse = 1 / number
    return f"1/{inverse:g}" if number < 1 and float(f"{inverse:g}") == inverse else repr(number)


def _attention_axes(layer: LayerRule, letters: Letters) -> str:
    """Return the letters of the width and of the axes of the heads."""
    width, *heads = (int(size) for size in dict(layer.geometry)["sizes"].split())
    named = Named(letters)
    roles = ("heads", "head") if len(heads) == 2 else ("width",)
    return named.take("width", width) + "".join(named.take(role, n) for role, n in zip(roles, heads, strict=True))


def _check(layout: Layout, parted: int | None) -> None:
    """Refuse what no rule can say; the modules of a rule have the parts of the axis `parted`.

    Raises:
        NoWordsError: the layout has an axis that is reversed, or in part.
    """
    for axis in layout.axes:
        if axis.order == REVERSED:
            raise NoWordsError(f"axis {axis.of} of the leaf is reversed")
        whole = layout.leaf_shape[axis.of]
        if len(layout.made_of(axis.of)) == 1 and axis.size != whole and axis.of != parted:
            raise NoWordsError(
                f"elements {axis.start} to {axis.start + axis.size - 1} of axis {axis.of} of the leaf, of {whole}"
            )


def _equation(rule: PatternRule, named: Named) -> tuple[str, str, dict[str, str], str, dict[str, int]]:
    """Return the equation of a linear layer, the target's axes where they are not those of a Linear, the orders of RoPE, a flattened map, and the size of a head."""
    source = rule.layer.main[0]
    layout, contracted = source.layout, set(source.contracted)
    groups = layout.groups
    assert groups is not None, "only layouts with groups are rules"
    inward = [axis for group in groups for axis in group if axis.of in contracted]
    outward = [axis for group in groups for axis in group if axis.of not in contracted]
    inward, outward = (_with_ones(part, rule, inner) for part, inner in ((inward, True), (outward, False)))
    split = named.take("parts", layout.leaf_shape[rule.split]) if rule.split is not None else ""
    is_map = _is_map(inward) and tuple(inward) in groups
    if is_map:
        flattened = f"{{{named.flattened(inward[0].of, _in_stored_order(inward))}}}"
    else:
        flattened = ""
        named.name(inward)
    named.name(outward)
    inward, outward = _in_stored_order(inward), _as_bias(rule, _in_stored_order(outward))
    y = "".join(named.of[a.of, a.place] for a in outward)
    x = named.whole[inward[0].of] if is_map else "".join(named.of[a.of, a.place] for a in inward)
    weight = leaf_letters(
        layout, named, [axis for _, axis in rule.stacked], (rule.split, split) if rule.split is not None else None
    )
    grouped = _opened(y, weight)
    if rule.parts is not None:
        letter = named.of[rule.parts[0], 0]
        parted = _sum(rule.parts[1], letter, named)
        weight, grouped = weight.replace(letter, parted), grouped.replace(letter, parted)
    rows = "..."
    if (ones := _ones_of_bias(rule)) and split:  # a bias that is stored as [2, 1, 1, F]
        rows += "".join(named.take("positions", 1) for _ in range(ones - 1))
    made = f"{split}{rows}" if rows != "..." else f"{rows}{split}"
    equation = f"{rows}{_opened(x, weight)},{weight}->{made}{grouped}"
    wanted = [tuple(axis for axis in part if axis.size > 1) for part in (outward, inward)]
    axes = ""
    if not is_map and [tuple(group) for group in groups] != wanted:
        axes = target_axes(layout, named)
        if len(rule.layer.main) > 1:  # leaves below each other
            if any(axis.of in contracted for axis in groups[0]):
                raise NoWordsError(
                    "its leaves follow each other along the first axis, over which the product sums; "
                    "in the rule language they follow each other along an axis of the outputs"
                )
            end = axes.index(")") + 1 if axes.startswith("(") else 1
            axes = f"({' + '.join([axes[:end].strip('()')] * len(rule.layer.main))}){axes[end:]}"
        for axis in (axis for axis in layout.axes if axis.place):  # no other leaf need have it
            named.letters.fixed.add(named.of[axis.of, axis.place])
    rope = {named.of[a.of, a.place]: a.order for a in layout.axes if a.order in (INTERLEAVED, HALF_SPLIT)}
    sizes = {named.of[axis.of, axis.place]: axis.size for axis in outward[-1:] if len(outward) > 1}  # of a head
    return equation, axes, rope, flattened, sizes


def _sum(sizes: Sequence[int], first: str, named: Named) -> str:
    """Return the letters of an axis that is made of parts of these sizes. All but one of them must be known: they are declared."""
    of = {sizes[0]: first}
    for size in sizes:
        if size not in of:
            of[size] = named.take("width", size)
            named.letters.fixed.add(of[size])
    return f"({' + '.join(of[size] for size in sizes)})"


def _low_rank(rule: PatternRule, letters: Letters, stored: str) -> str:
    """Return the equation of a weight that is the product of two leaves, whose axes are stored as ``DR,RE`` says."""
    named = Named(letters)
    left, right = (dict(rule.layer.sources)[key][0].layout.leaf_shape for key in ("from", "times"))
    sizes = dict(zip(stored.replace(",", ""), (*left, *right), strict=True))
    return _product(stored, *(named.take("rank" if axis == "R" else "width", sizes[axis]) for axis in "DRE"))


def _added(rule: PatternRule, letters: Letters, stored: str, equation: str) -> str:
    """Return the equation of the product that is added to a weight with an equation.

    Raises:
        NoWordsError: the weight is no matrix.
    """
    found = re.fullmatch(r"\.\.\.(\w),\w\w->\.\.\.(\w)", equation)
    if found is None:
        raise NoWordsError("a product of two leaves is added to a weight with more than two axes")
    left = dict(rule.layer.sources)["plus.from"][0].layout.leaf_shape
    rank = letters.named("rank", left[stored.index("R")])
    return _product(stored, found[1], rank, found[2])


def _product(stored: str, x: str, rank: str, y: str) -> str:
    weights = "".join({"D": x, "R": rank, "E": y}.get(letter, letter) for letter in stored)
    return f"...{x},{weights}->...{y}"


def _head_by_head(equation: str, turns: str, layout: Layout) -> str:
    """Return the axes of a target whose leaves lie head by head: ``(N (1 + 1 + 1) H)D``.

    Raises:
        NoWordsError: the leaves have other axes.
    """
    count, head = map(int, turns.split())
    found = re.fullmatch(r"\.\.\.(\w+),\w+->\.\.\.(\w+)(\w)", equation)
    groups = layout.groups or ()
    if found is None or not groups or not groups[0] or groups[0][-1].size != head:
        raise NoWordsError("its leaves lie in the rows in turns, and not head by head")
    x, heads, last = found.groups()
    inward = x if len(x) == 1 else f"({' '.join(x)})"
    return f"({' '.join(heads)} ({' + '.join('1' * count)}) {last}){inward}"


def _in_stored_order(axes: Sequence[Axis]) -> list[Axis]:
    """Return axes with those of one leaf's axis next to each other, as the leaf has them."""
    first = list(dict.fromkeys(axis.of for axis in axes))
    return sorted(axes, key=lambda axis: (first.index(axis.of), axis.place))


def _as_bias(rule: PatternRule, outward: list[Axis]) -> list[Axis]:
    """Return the output axes of a linear layer as a bias stores them, which is added to its result; `outward` is in the order of the rows."""
    bias = dict(rule.layer.sources).get("bias")
    axes = bias[0].layout.axes if bias is not None else ()
    if [axis.size for axis in axes] != [axis.size for axis in outward]:
        return outward
    return [outward[k] for k in sorted(range(len(axes)), key=lambda k: (axes[k].of, axes[k].place))]


def _is_map(axes: Sequence[Axis]) -> bool:
    """Whether the inputs are a map that the source flattens with the channels last, and the target with the channels first."""
    places = [axis.place for axis in axes]
    return len(axes) > 1 and len({axis.of for axis in axes}) == 1 and places == [len(axes) - 1, *range(len(axes) - 1)]


def _with_ones(axes: Sequence[Axis], rule: PatternRule, inward: bool) -> list[Axis]:
    """Return the input or output axes of a linear layer with those of size 1, which no element tells, as stored."""
    source = rule.layer.main[0]
    hidden = {rule.split, *(axis for _, axis in rule.stacked)}
    found = list(axes)
    for axis, size in enumerate(source.layout.leaf_shape):
        if size == 1 and axis not in hidden and (axis in source.contracted) == inward:
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


def _stored(rule: PatternRule, named: Named) -> tuple[str, str]:
    """Return the letters of a leaf without an equation, as stored and, where they differ, in the target.

    Both are empty for a parameter that is kept as stored.
    """
    layer = rule.layer
    layout = layer.main[0].layout
    stacked = [axis for _, axis in rule.stacked]
    kept = tuple(size for axis, size in enumerate(layout.leaf_shape) if axis not in stacked)
    ordered = [(axis.of, axis.place) for axis in layout.axes] == sorted((axis.of, axis.place) for axis in layout.axes)
    beside = int(dict(layer.target_keys).get(BESIDE, "1"))
    moved = any(axis.parts for axis in layout.axes)
    if rule.split is not None or rule.parts is not None:
        if layer.kind_name != "parameter" or rule.at >= 0 or not ordered:
            raise NoWordsError("its modules have elements of one axis of a leaf that no equation describes")
        return _in_pieces(rule, named, stacked), ""
    if layer.kind_name == "parameter" and ordered and kept == layout.shape and beside == 1 and not moved:
        return "", ""
    for k, axis in enumerate(layout.axes):
        role = "entries" if layer.kind_name == "embedding" and k == 0 else "width"
        named.of[axis.of, axis.place] = named.take(role, axis.size)
    stored = leaf_letters(layout, named, stacked)
    if layer.kind_name == "embedding" and len(stored) == 2 and "." in stored:  # a width of 1 has a letter, too
        stored = stored.replace(".", named.take("width", 1))
    if beside > 1:
        axes = target_axes(layout, named)
        if not axes[-1].isalpha():
            raise NoWordsError("leaves that stand side by side have no axis of their own there")
        return stored, f"{axes[:-1]}({' + '.join(axes[-1] * beside)})"
    if ordered and stored.replace(".", "") == stored and len(stored) == len(layout.shape):
        return stored, ""
    if layer.kind_name in (*NORMS, "embedding"):
        if not ordered:
            raise NoWordsError("its axes are permuted, and no equation describes it")
        return stored, ""
    if len(layer.main) > 1:
        raise NoWordsError("several leaves lie along a further axis of it")
    return stored, target_axes(layout, named)


def _in_pieces(rule: PatternRule, named: Named, stacked: Sequence[int]) -> str:
    """Return the letters of a leaf whose parts, or the elements of one axis, are tensors: ``(1 + 1 + 1 + 1)NH``."""
    layout = rule.layer.main[0].layout
    for axis in layout.axes:
        named.of[axis.of, axis.place] = named.take("width", axis.size)
    if rule.split is not None:
        ones = f"({' + '.join('1' * layout.leaf_shape[rule.split])})"
        return leaf_letters(layout, named, stacked, (rule.split, ones))
    assert rule.parts is not None, "it has elements of an axis, or parts of one"
    letter = named.of[rule.parts[0], 0]
    return leaf_letters(layout, named, stacked).replace(letter, _sum(rule.parts[1], letter, named))


def tied_head(rule: PatternRule, target: TargetModel) -> str:
    """Return the other name of an embedding's table, as the key `tied` has it; empty if it has none, or others."""
    others = target.tied.get(f"{rule.module}.weight", ())
    heads = [name.removesuffix(".weight") for name, kind in others if kind == "linear"]
    return heads[0] if len(others) == 1 and heads else ""
