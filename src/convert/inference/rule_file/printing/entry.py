"""Print one rule: the keys that describe the source, then the target."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from convert.drafting.axis_letters import Letters
from convert.drafting.like.target import TargetModel
from convert.inference.derivation import Grade
from convert.inference.rule_file.joining.joined import ALTERNATIVES
from convert.inference.rule_file.joining.patterns import PatternRule
from convert.inference.rule_file.layers.cells import KINDS as CELLS
from convert.inference.rule_file.layers.geometry import PADDED
from convert.inference.rule_file.layers.layout import HALF_SPLIT, INTERLEAVED, REVERSED, Layout
from convert.inference.rule_file.layers.rule import (
    ADDED,
    ALTERNATING,
    ATTENTION,
    BESIDE,
    COLUMNS,
    CONVOLUTIONS,
    IN_TURNS,
    LOW_RANK,
    ORDERS,
    PRESCALED,
    TAPS,
    TERM_AXES,
    ZEROS,
    LayerRule,
    NoWordsError,
)
from convert.inference.rule_file.printing.convolutions import convolution_keys
from convert.inference.rule_file.printing.equation import (
    Equation,
    added_equation,
    equation_of,
    in_turns,
    product_equation,
)
from convert.inference.rule_file.printing.letters import CONCATENATED, ZEROS_BEFORE, Named, target_axes, with_keys
from convert.inference.rule_file.printing.stored import flattened_features, stored_axes
from convert.layers.draft import DraftEntry, flow, plain
from convert.layers.leaf_sums import NEXT
from convert.layers.recurrent.equations import NO_LAYER
from convert.layers.shared_keys import shown_part

UNSAID = (IN_TURNS, BESIDE, ALTERNATING, COLUMNS, ORDERS, TAPS, ZEROS)  # no keys of a target
NUMERAL = re.compile(r"[0-9]+(\.[0-9]+)?")
CELL = re.compile(r"(?P<module>.*)\.(?:l(?P<layer>[0-9]+|\{[^{}]*\}))?")
CELLS_OF_ONE = re.compile(r"\.\{(l[0-9]+(?:,l[0-9]+)+)\}$")
Keys = list[tuple[str, str]]


@dataclass
class _Words:
    """What a rule says in the words of its kind.

    Attributes:
        head: the first lines.
        source: further keys of the source.
        target: further keys of the target.
        sizes: letters that a factor can be said with, and their sizes.
        equation: of a linear layer.
        split: letter of the axis whose elements the alternatives of the target's name are; empty: the language knows it.
    """

    head: Keys
    source: Keys
    target: Keys
    sizes: Mapping[str, int]
    equation: str = ""
    split: str = ""


def entry_of(rule: PatternRule, letters: Letters, target: TargetModel) -> DraftEntry:
    """Return a rule as the lines of its YAML.

    Raises:
        NoWordsError: the rule language has no words for it.
        NoLetterError: the file has no more letters.
    """
    if not rule.module:
        raise NoWordsError("it is a parameter of the model itself, and the rule needs the name of a module")
    rule = _with_numbers(rule)
    rule = replace(rule, layer=_in_parts(rule.layer))
    layer, named = rule.layer, Named(letters)
    words = _words(rule, named)
    main = layer.main[0].layout
    if orders := named.concatenated(main):
        for of, side in ((words.source, 0), (words.target, 1)):
            of.append((CONCATENATED, f"{{{', '.join(f'{axis}: {parts[side]}' for axis, parts in orders.items())}}}"))
    if rule.taken:
        words.source.append(("part", shown_part([(one.at + 1, len(one.sizes)) for one in rule.taken])))
    entry = _entry_of_source(rule, words)
    words.target += [(key, value) for key, value in layer.target_keys if key not in UNSAID]
    if turns := dict(layer.target_keys).get(IN_TURNS):
        words.target = [(key, value) for key, value in words.target if key != "axes"]
        words.target.insert(0, ("axes", in_turns(words.equation, turns, main, named)))
    if zeros := dict(layer.target_keys).get(ZEROS):
        words.target = [("axes", target_axes(main, named)), *(item for item in words.target if item[0] != "axes")]
        words.target.append((ZEROS_BEFORE, _zeros_before(zeros, layer, named)))
    if layer.kind_name == "embedding" and (tied := tied_head(rule, target)):
        words.target.append(("tied", tied))
    if layer.kind_name in CELLS:
        entry.say(layer.kind_name, _cell_target(rule.module, words.target))
        return entry
    if layer.kind_name != "conv_transpose":
        _check(main, {one.axis for one in rule.taken} | (set() if rule.parts is None else {rule.parts[0]}))
    key = "name" if layer.kind_name == "parameter" else "module"
    keys = with_keys(words.target)
    module = _with_letter(rule.module, words.split)
    each = [
        keys if layout == main else with_keys([("axes", target_axes(layout, named))])
        for layout in layer.also_as or [main] * len(layer.also)
    ]
    targets = zip((module, *layer.also), (keys, *each), strict=True)
    names = [f"{{{key}: {flow(name)}{keys}}}" if keys else flow(name) for name, keys in targets]
    entry.say(layer.kind_name, f"[{', '.join(names)}]" if layer.also else names[0] if keys else plain(module))
    return entry


def axes_of_tensor(rule: PatternRule, letters: Letters) -> tuple[str, ...]:
    """Return the letters of the axes of a rule's first tensor; an axis without a letter of its own has none, and a tensor of several leaves no axes."""
    layer = rule.layer
    if (
        layer.kind_name in (ATTENTION, *CELLS)
        or len(layer.main) > 1
        or any(key in UNSAID for key, _ in layer.target_keys if key != TAPS)
    ):
        return ()
    named = Named(letters)
    _words(rule, named)
    groups = layer.main[0].layout.groups or ()
    return tuple(named.of.get((of[0].of, of[0].place), "") if len(of) == 1 else "" for of in groups)


def _entry_of_source(rule: PatternRule, words: _Words) -> DraftEntry:
    """Return the lines that describe the source; the first has the evidence as its remark."""
    grades = " or ".join(grade.value for grade in Grade if grade in (rule.grades or {rule.grade}))
    remark = ": ".join(filter(None, (grades, rule.layer.evidence)))
    remark += f"; the same in {rule.layers} modules" if rule.layers > 1 else ""
    entry = DraftEntry()
    (key, value), *more = words.head
    entry.say(key, value, remark)
    for key, value in more:
        entry.say(key, value)
    written = {line.key for line in entry.lines}
    paths = joined_paths(rule)
    for key, path in rule.sources:
        if key == "from" and len(paths) > 1:
            entry.say(key, f"[{', '.join(map(flow, paths))}]")
        elif key not in written and "." not in key and NEXT not in key:
            entry.say(key, plain(path))
    nested: dict[str, list[str]] = {}
    for key, value in (*((key, path) for key, path in rule.sources if NEXT not in key), *words.source):
        whole, dot, inner = key.partition(".")
        if dot:
            nested.setdefault(whole, []).append(f"{inner}: {value if NUMERAL.fullmatch(value) else flow(value)}")
    for key, values in nested.items():
        entry.say(key, f"{{{', '.join(sorted(values, key=lambda text: not text.startswith('einsum')))}}}")
    if rule.stacked:
        stored = rule.layer.main[0].layout.stored
        axes = (f"{index}: {stored.index((axis,))}" for index, axis in rule.stacked)
        entry.say("stacked", f"{{{', '.join(axes)}}}")
    if rule.index_from:
        digits = (f"{name}: [{slow}, {fast}]" for name, (slow, fast) in rule.index_from)
        entry.say("index_from", f"{{{', '.join(digits)}}}")
    for key, value in words.source:
        if "." not in key:
            entry.say(key, _factor(float(value), words.sizes) if key == PRESCALED else value)
    return entry


def joined_paths(rule: PatternRule) -> list[str]:
    """Return the patterns of the leaves that stand one after the other along the inputs of a weight; of another rule its one."""
    return [path for key, path in rule.sources if key.partition(NEXT)[0] == "from"]


def _words(rule: PatternRule, named: Named) -> _Words:
    """Return what a rule says in the words of its kind."""
    layer = rule.layer
    names = [(role, name) for role, name in layer.names if role != name]
    if layer.kind_name == "linear":
        return _linear(rule, named, names)
    if layer.kind_name == ATTENTION:
        library, *more = layer.keys
        return _Words([library], [("axes", _attention_axes(layer, named)), *more], names, {})
    if layer.kind_name in CELLS:
        cell, *more = layer.keys
        if inputs := layer.main[0].layout.axes:
            named.of[0, 0] = named.take("width", inputs[0].size)
            more.append(("inputs", named.of[0, 0]))
        return _Words([cell], more, names, {})
    if layer.kind_name in CONVOLUTIONS:
        (numbers, axes), *more = convolution_keys(layer, named, [axis for _, axis in rule.stacked])
        padded = dict(layer.geometry).get(PADDED)
        padding = [("padding", padded)] if padded else []
        head = [("dimension_numbers", numbers), ("axes", axes)]
        return _Words(head, [*more, *layer.keys], [*names, *padding], {})
    flattened = flattened_features(rule, named)
    stored, of_target = stored_axes(rule, named)
    key, path = rule.sources[0]  # `from`, or the first leaf of a norm without a scale
    of_leaf = [item for item in layer.keys if item[0] != TERM_AXES]
    return _Words(
        [(key, plain(path))],
        [*of_leaf, *([("axes", stored)] if stored else []), *([("flattened", flattened)] if flattened else [])],
        [*names, *([("axes", of_target)] if of_target else [])],
        {stored[-1]: layer.main[0].layout.shape[-1]} if stored.isalpha() else {},
    )


def _linear(rule: PatternRule, named: Named, names: Keys) -> _Words:
    """Return what the rule of a linear layer says: an equation, or that of a product of two leaves."""
    said = list(rule.layer.keys)
    stored = dict(said).get(LOW_RANK)
    if stored is not None:
        equation = product_equation(rule, named.letters, stored)
        said = [(key, value) for key, value in said if key != LOW_RANK]
        return _Words([("einsum", equation)], said, names, {}, equation)
    found = equation_of(rule, named)
    said = [
        (key, added_equation(rule, named.letters, value, found.text) if key == "plus.einsum" else value)
        for key, value in said
    ]
    said += [("flattened", found.flattened)] if found.flattened else []
    said += [("rope", _rope(found, [len(one.sizes) for one in rule.taken]))] if found.rope else []
    text = json.dumps(found.text) if re.search(r"[(){}]", found.text) else found.text
    target = [("axes", found.axes)] if found.axes else []
    target += [("rope", INTERLEAVED)] if HALF_SPLIT in found.rope.values() else []  # half-split is the target's default
    return _Words([("einsum", text)], said, [*names, *target], found.head, found.text, found.split)


def _rope(found: Equation, counts: Sequence[int]) -> str:
    """Return the pairs that RoPE turns; of a rule that makes one of equal parts, all are named: the rules of the others say what they turn.

    Args:
        counts: of the parts of each axis of which the rule makes one.
    """
    words = [f"{letter}: {order}" for letter, order in found.rope.items()]
    terms = [group.split(" + ") for group in re.findall(r"\(([^()]+ \+ [^()]+)\)", found.text)]
    if counts and any(len(set(each)) == 1 for each in terms):
        words.append(f"parts: [{', '.join(str(k) for k in range(1, 1 + counts[0]))}]")
    return f"{{{', '.join(words)}}}"


def _with_letter(module: str, letter: str) -> str:
    """Return the name of modules with the letter of the axis whose elements its last alternatives are.

    >>> _with_letter("layers.{i}.{q,k,v}_proj", "C")
    'layers.{i}.{C:q,k,v}_proj'
    """
    *_, last = ALTERNATIVES.finditer(module) if letter else (None,)
    return module if last is None else f"{module[: last.start() + 1]}{letter}:{module[last.start() + 1 :]}"


def _in_parts(layer: LayerRule) -> LayerRule:
    """Return the layer with the elements of a short axis that is reversed as parts of it; a kernel is flipped in space."""
    (key, of), *others = layer.sources
    space = slice(2, None) if layer.kind_name in CONVOLUTIONS else slice(0, 0)

    def moved(layout: Layout) -> Layout:
        flipped = {axis.of for group in (layout.groups or ())[space] for axis in group}
        return replace(layout, axes=tuple(a if a.of in flipped else a.in_parts for a in layout.axes))

    return replace(layer, sources=((key, tuple(replace(s, layout=moved(s.layout)) for s in of)), *others))


def _with_numbers(rule: PatternRule) -> PatternRule:
    """Return a rule with the numbers that the source adds to leaves behind their paths: ``forget/bias + 1``."""
    numbers = {key.removesuffix(ADDED): float(value) for key, value in rule.layer.keys if key.endswith(ADDED)}
    sources = tuple((key, f"{path}{_signed(numbers.get(key, 0.0))}") for key, path in rule.sources)
    keys = tuple(item for item in rule.layer.keys if not item[0].endswith(ADDED))
    return replace(rule, sources=sources, layer=replace(rule.layer, keys=keys)) if numbers else rule


def _signed(number: float) -> str:
    return f" {'+' if number > 0 else '-'} {abs(number):.12g}" if number else ""


def _zeros_before(zeros: str, layer: LayerRule, named: Named) -> str:
    """Return the letter of the axis along which a tensor begins with zeros, with their number.

    Raises:
        NoWordsError: the axis is made of several, or of several leaves.
    """
    axis, count = map(int, zeros.split())
    group = (layer.main[0].layout.groups or ())[axis]
    if len(group) != 1 or len(layer.main) > 1:
        raise NoWordsError("it begins with zeros along an axis that several leaves, or axes of one, make")
    return f"{{{named.of[group[0].of, group[0].place]}: {count}}}"


def _factor(number: float, sizes: Mapping[str, int]) -> str:
    """Return a factor as a rule says it: ``1/sqrt(H)`` or ``sqrt(D)`` where the axis has this size."""
    if number < 0:
        return f"-{_factor(-number, sizes)}"
    for letter, size in sizes.items():
        for text, power in ((f"1/sqrt({letter})", -0.5), (f"sqrt({letter})", 0.5)):
            if size > 1 and math.isclose(number, size**power, rel_tol=1e-12):
                return text
    above = max(number, 1 / number)
    if not math.isclose(float(f"{above:g}"), above, rel_tol=1e-12):
        return repr(number)
    return f"{above:g}" if number >= 1 else f"1/{above:g}"


def _attention_axes(layer: LayerRule, named: Named) -> str:
    """Return the letters of the width and of the axes of the heads."""
    width, *heads = (int(size) for size in dict(layer.geometry)["sizes"].split())
    roles = ("heads", "head") if len(heads) == 2 else ("width",)
    return named.take("width", width) + "".join(named.take(role, n) for role, n in zip(roles, heads, strict=True))


def _cell_target(module: str, keys: Sequence[tuple[str, str]]) -> str:
    """Return the target of a rule as YAML, from the name of a module with its layer: ``rnn.l0``."""
    match = CELL.fullmatch(CELLS_OF_ONE.sub(lambda found: f".l{{{found[1].replace('l', '')}}}", module))
    assert match is not None, "layers are named by `layers_of`"
    layer = match["layer"] or NO_LAYER
    said = [("layer", layer)] if layer != "0" else []
    said += list(keys)
    named = with_keys(said)
    return f"{{module: {flow(match['module'])}{named}}}" if named else flow(match["module"])


def _check(layout: Layout, parted: Collection[int]) -> None:
    """Refuse what no rule can say; the rule names the parts of the axes `parted`.

    Raises:
        NoWordsError: the layout has an axis that is reversed, or in part.
    """
    for k, whole in enumerate(layout.leaf_shape):
        several = layout.made_of(k)
        if len(several) > 1 and (size := math.prod(axis.size for axis in several)) != whole and k not in parted:
            raise NoWordsError(f"{size} elements of axis {k} of the leaf, of {whole}")
    for axis in layout.axes:
        if axis.order == REVERSED:
            raise NoWordsError(f"axis {axis.of} of the leaf is reversed")
        whole = layout.leaf_shape[axis.of]
        if len(layout.made_of(axis.of)) == 1 and axis.size != whole and axis.of not in parted:
            raise NoWordsError(
                f"elements {axis.start} to {axis.start + axis.size - 1} of axis {axis.of} of the leaf, of {whole}"
            )


def tied_head(rule: PatternRule, target: TargetModel) -> str:
    """Return the other name of an embedding's table, as the key `tied` has it; empty if it has none, or others."""
    others = target.tied.get(f"{rule.module}.weight", ())
    heads = [name.removesuffix(".weight") for name, kind in others if kind == "linear"]
    return heads[0] if len(others) == 1 and heads else ""
