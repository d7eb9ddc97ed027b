"""Name a divergence, and say it in a sentence with the place in both programs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.divergence.by_functions import (
    EXCHANGED,
    EXTRA,
    MISSING,
    MOVED,
    by_functions,
    chain,
    function_in_front,
    two_functions,
    within,
)
from convert.programs.divergence.details import (
    FUNCTION,
    PARAMETER,
    PART,
    POWER,
    axes_exchanged,
    bias_of_choice,
    contracted,
    copies,
    mask_difference,
    moved_indices,
    other_beside,
    other_indices,
    other_parameters,
    other_pool_padding,
    other_pooling,
    padding_counts,
    power_of,
    ratios,
)
from convert.programs.divergence.functions import Function, computed, steps_in_functions
from convert.programs.divergence.graph import root
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.layouts import same
from convert.programs.divergence.search import Divergence, Repair
from convert.programs.divergence.selections import MOVES, other_selection, selection
from convert.programs.divergence.shared_values import HIDDEN, same_numbers
from convert.programs.divergence.tables import (
    ROUNDED,
    numbers_of_tables,
    off_by,
    other_waves,
    rounded,
    shifted_tables,
)
from convert.programs.divergence.windows import FLIPPED, PADDING, TRANSPOSED, other_padding, other_windows
from convert.programs.divergence.words import REDUCED as REDUCED_BY
from convert.programs.divergence.words import Words, arithmetic, names_of, places, scalar
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
ORDER = "elements in another order"
CONSTANT = "another constant"
OTHER = "another computation"
REDUCED = "reduction over another axis"
OPERAND, AXES = "another operand", "axes exchanged"
LARGEST = "another number of largest values"
BY_RULES = (
    ORDER,
    OPERAND,
    PART,
    EXCHANGED,
    AXES,
    PARAMETER,
    FUNCTION,
    FLIPPED,
    TRANSPOSED,
)  # what wrong rules give, too


UNCLEAR = (OTHER, PART)  # alone; also a place or an order beside another name: one fault shows at several places


def is_clear(name: str) -> bool:
    """Whether a name says what is wrong, or only that something is."""
    names = name.split(" and ")
    return not (set(names) & set(UNCLEAR) or (len(names) > 1 and set(names) & {OPERAND, ORDER, AXES}))


@dataclass(frozen=True)
class Named:
    """A divergence for a person.

    Attributes:
        name: short and stable; empty where nothing is proven.
        problem: a sentence.
        fix: the next step.
        order: whether the two differ in the operands or the order of elements alone, which wrong rules may give, too.
    """

    name: str
    problem: str
    fix: str
    order: bool = False


@np.errstate(all="ignore")
def named(
    divergence: Divergence,
    source: Program,
    target: Program,
    activations: Mapping[str, Function],
    training: Collection[str] = (),
) -> Named:
    """Name a divergence.

    Args:
        activations: known ones by name.
        training: modules of the target that are in training mode.
    """
    ours, theirs = (Words(p.operations, names_of(p)) for p in (target, source))
    if not divergence.proven:
        return _unproven(divergence, ours, theirs, activations, training)
    described: dict[tuple[str, str], tuple[Repair, str, str]] = {}
    seen: set[Any] = set()
    for repair in divergence.repairs:
        what = tuple(tuple((one.name, one.where) for one in ones) for ones in (repair.target, repair.source))
        if what in seen and repair.target and repair.source:
            continue  # the next step of a loop
        seen.add(what)
        name, problem = _describe(repair, ours, theirs, activations, training)
        if name in UNCLEAR and (which := other_selection(repair, ours, theirs)) and which not in problem:
            name, problem = PART, f"{problem}; {which}"
        lines = {one.where for one in repair.target} or {one.where for one in repair.source}
        described.setdefault((name, min(lines, default="")), (repair, name, problem))
    chosen = list(described.values())
    chosen = chosen[:1] + [one for one in chosen[1:] if one[1] != OTHER]  # what one fault leads to often has no name
    names = list(dict.fromkeys(name for _, name, _ in chosen))
    name = " and ".join(names[:2])
    counted = len(chosen) == 2 and padding_counts(chosen[0][0], chosen[1][0])
    if counted:
        names, name = [PADDING], PADDING
    if set(names) == {OPERAND} and any(_crossed(a[0], b[0]) for a, b in itertools.combinations(chosen, 2)):
        names, name = [EXCHANGED], EXCHANGED
    if set(names) == {MISSING, EXTRA}:
        name = _moved(chosen, activations) or name
    problems = list(dict.fromkeys(problem for _, _, problem in chosen))
    if counted:
        problems.append("the padding counts in the target's mean, and not in the JAX model's")
    problem = "; ".join(problems[:2] if not counted else problems) + (
        f"; and {len(problems) - 2} more" if len(problems) > 2 and not counted else ""
    )
    by_rules = all(one in BY_RULES for one in names) or not is_clear(name) or any(map(_of_layers, divergence.repairs))
    return Named(name, problem, _fix(divergence.repairs[0]), by_rules)


def _crossed(one: Repair, two: Repair) -> bool:
    """Whether each of two operations uses what the other one should."""
    mine, meant = _unshared(one)
    other, other_meant = _unshared(two)
    pairs = ((mine, other_meant), (meant, other))
    return all(any(same_numbers(x.array, y.array) for x in a for y in b) for a, b in pairs)


def _unshared(repair: Repair) -> tuple[list[Value], list[Value]]:
    """Return what the target's operations are given and the source's are not, and the other way round."""
    pairs = list(zip(repair.operands, repair.given, strict=True))
    theirs = repair.source_operands
    mine = [value for value, x in pairs if not any(same_numbers(x, y.array) for y in theirs)]
    return mine, [y for y in theirs if not any(same_numbers(x, y.array) for _, x in pairs)]


def _of_layers(repair: Repair) -> bool:
    """Whether a whole layer is missing or too much: rules that exchange layers give this, too."""
    return any(
        kind_of(one) in ("product", "convolution") and any(v.of_parameters for v in one.operands)
        for one in (*repair.target, *repair.source)
    )


def _moved(chosen: Sequence[tuple[Repair, str, str]], activations: Mapping[str, Function]) -> str:
    """Name what is missing at one place and too much at another."""
    sides = [next(one for one, name, _ in chosen if name == which) for which in (MISSING, EXTRA)]
    functions = [
        computed(one.got if one.target else one.want, one.given[0], activations) for one in sides if len(one.given) == 1
    ]
    if len(functions) == 2 and functions[0] and functions[0] == functions[1]:
        return MOVED
    if all(any(kind in ("sqrt", "rsqrt") for kind, _ in _steps(one.source or one.target)) for one in sides):
        return "norm behind the addition, not in front of it"
    one, two = (_steps(x.source or x.target) for x in sides)
    told = [steps_in_functions(arithmetic(x.source or x.target), activations) for x in sides]
    kinds = [[name or kind_of(ones[-1]) for name, ones in steps] for steps in told]
    if kinds[0] == kinds[1] and any(name for name, _ in told[0]):
        return MOVED
    if [kind for kind, _ in one] != [kind for kind, _ in two]:
        return ""
    return MOVED if one == two else CONSTANT


def _describe(
    repair: Repair, ours: Words, theirs: Words, activations: Mapping[str, Function], training: Collection[str]
) -> tuple[str, str]:
    """Return the name of what a repair undoes, and the sentence."""
    given = " and ".join(dict.fromkeys(map(ours.value, repair.operands)))
    here, there = places(repair.target), places(repair.source)
    does = chain(ours, repair.target, repair.given, repair.got, activations)
    theirs_given = [x.array for x in repair.source_operands] if repair.target else repair.given
    instead = chain(theirs, repair.source, theirs_given, repair.want, activations)
    most, theirs_most = (
        words.largest_behind(x) for words, x in ((ours, repair.operands), (theirs, repair.source_operands))
    )
    if most and theirs_most and most != theirs_most:
        counts = f"the target takes the {most} largest, and the JAX model the {theirs_most} largest"
        return (
            LARGEST,
            f"of {given}, the target {does}{here}; the JAX model {instead}{there}; {counts}",
        )
    if repair.layer is not None and (said := _input_of_layer(repair, ours, theirs)) is not None:
        return said
    if biased := bias_of_choice(repair, ours, theirs):
        return biased
    if power := power_of(repair.got, repair.want):
        made = repair.source or [theirs.producer[x] for x in repair.source_operands if x in theirs.producer]
        got = f"of {given}, the target {does}{here}" if repair.target else f"the target uses {given}"
        return POWER, f"{got}; the JAX model has {power} of that{places(made)}"
    if not repair.target:
        if not repair.source and not same_numbers(repair.got, repair.want):
            used, meant = repair.operands[0], repair.source_operands[0]
            which = selection((used, repair.got), (meant, repair.want), ours, theirs)
            at = places(_made_at(repair, ours))
            return (
                OPERAND,
                f"the target has {given}{at} where the JAX model has {theirs.value(meant)}{which and f'; {which}'}",
            )
        if all(kind_of(one) == LAYOUT for one in repair.source):
            ends = [ours.producer[x] for x in repair.operands if x in ours.producer]
            moved = moved_indices(repair.got, repair.want)
            return (
                ORDER,
                f"the elements of {given} are in another order: the target{places(ends)}, the JAX model{there}{moved}",
            )
        if padding := other_padding(repair, ours, theirs):
            return PADDING, f"of {given}, the JAX model {instead}{there}; {padding}{places(_made_at(repair, ours))}"
        if all(kind_of(one) in MOVES for one in arithmetic(repair.source)) and not same_numbers(
            repair.got, repair.want
        ):
            which = other_selection(repair, ours, theirs)
            of = which or f"the target has {given} as it is"
            return PART, f"of {given}, the JAX model {instead}{there}; {of}{places(_made_at(repair, ours))}"
        if function := function_in_front(repair, ours, activations):
            return function, f"of {given}, the JAX model {instead}{there}; the target uses it as it is: {function}"
        if joined := other_beside(repair, ours, theirs):
            return OPERAND, joined
        return MISSING, f"of {given}, the JAX model {instead}{there}; the target uses it as it is"
    trained = next((one.module for one in repair.target if one.module in training), None)
    if (trained is not None and any(kind_of(one) == "random" for one in repair.target)) or not repair.source:
        sentence = f"of {given}, the target {does}{here}; the JAX model uses it as it is"
        if repair.taken is not None and all(kind_of(one) in (LAYOUT, "pick", "part") for one in repair.target):
            axis, index = repair.taken
            return PART, f"of {given}, the target {does}{here}; the JAX model takes index {index} of axis {axis}"
        if trained is None:
            return EXTRA, sentence
        return "training mode", f"{sentence}: the target's module {trained} is in training mode"
    sentence = f"of {given}, the target {does}{here}; the JAX model {instead}{there}"
    if other_pooling(repair, ours, theirs):
        return "another pooling", sentence
    if padding := other_pool_padding(repair, ours, theirs):
        return PADDING, f"{sentence}; {padding}"
    if windows := other_windows(repair, ours, theirs):
        return windows[0], f"{sentence}; {windows[1]}"
    if padding := other_padding(repair, ours, theirs):
        return PADDING, f"{sentence}; {padding}"
    if axes := axes_exchanged(repair, ours):
        return AXES, f"{sentence}: {axes}"
    hidden = [np.abs(x) >= HIDDEN for x in (repair.got, repair.want)]
    if hidden[0].any() and hidden[1].any() and (hidden[0] != hidden[1]).any():
        return (
            "another mask",
            f"{mask_difference(~hidden[0], ~hidden[1])}{here}; the JAX model's mask is applied at {_line(repair.source)}",
        )
    if function := two_functions(repair, activations):
        return function, f"{sentence}: {function}"
    if other := other_indices(repair) or other_parameters(repair, ours, theirs):
        return other[0], f"{sentence}; {other[1]}"
    one, two = (_steps(x) for x in (repair.target, repair.source))
    if [kind for kind, _ in one] == [kind for kind, _ in two]:
        numbers = [
            (a, b) for (_, a), (_, b) in zip(one, two, strict=True) if a is not None and b is not None and a != b
        ]
        if numbers:
            narrow = rounded(*numbers[0]) if len(numbers) == 1 else ""
            return (ROUNDED, f"{sentence}; {narrow}") if narrow else (CONSTANT, sentence)
        if other := other_waves(repair, ours, theirs):
            return other[0], f"{sentence}; {other[1]}"
        tables = numbers_of_tables(repair, ours, theirs)
        if tables:
            return CONSTANT, f"{sentence}; {tables}"
        if set(map(ours.value, repair.operands)) and len(repair.operands) == len(repair.source_operands):
            return _same_operations(repair, ours, theirs, sentence)
    sums = one != two and any(
        kind in ("add", "subtract") for kind, _ in one
    )  # a factor goes past a product, not past a sum
    if not sums and _without_factors(one) == _without_factors(two) and sorted(map(str, one)) == sorted(map(str, two)):
        return _same_operations(repair, ours, theirs, sentence)
    if _epsilon(one) != _epsilon(two) and _epsilon(one) and _epsilon(two):
        return f"epsilon {_epsilon(one)} the root", sentence
    widths = [contracted(x) for x in (repair.target, repair.source)]
    if all(widths) and widths[0] != widths[1]:
        return (
            "heads of another width",
            f"{sentence}; the target multiplies vectors of {widths[0]} features, and the JAX model of {widths[1]}",
        )
    if Counter(kind for kind, _ in one) == Counter(kind for kind, _ in two):
        same_numbers_too = Counter(number for _, number in one) == Counter(number for _, number in two)
        return (MOVED if same_numbers_too else CONSTANT), sentence
    if factors := ratios(repair.got, repair.want):
        return "another factor", f"{sentence}; {factors}"
    if {kind for kind, _ in one} ^ {kind for kind, _ in two} == {"add", "subtract"} and len(one) == len(two):
        return "the other sign", sentence
    kinds, their_kinds = ours.kinds(repair.target), theirs.kinds(repair.source)
    for few, many, name in ((kinds, their_kinds, MISSING), (their_kinds, kinds, EXTRA)):
        if few and len(few) < len(many) and within(few, many):
            longer = repair.source if many is their_kinds else repair.target
            joins = any(kind_of(one) == "join" and any(v.of_parameters for v in one.operands) for one in longer)
            moves = not joins and not (Counter(many) - Counter(few)).keys() - {"part", "join", "pick"}
            convolves = all("convolution" in x for x in (kinds, their_kinds))  # one side cuts what both compute
            return (PADDING if moves and convolves else PART if moves else name), sentence
    if "resize" in (*kinds, *their_kinds):
        return "another interpolation", sentence
    if functions := by_functions(repair, activations):
        return functions, sentence
    if over := _other_axes(repair):
        return REDUCED, f"{sentence}; {over}"
    first = [arithmetic(x)[:1] for x in (repair.target, repair.source)]
    if all(kind_of(one[0]) == "part" for one in first if one) and _steps(first[0]) == _steps(first[1]):
        taken = [words.chain(one) for words, one in zip((ours, theirs), first, strict=True)]
        if taken[0] != taken[1]:
            return PART, sentence
    return OTHER, sentence


def _other_axes(repair: Repair) -> str:
    """Say over which axis the first reduction of each side goes, where both are given one value in one layout, and it differs."""
    if not any(x.shape == y.array.shape and same(x, y.array) for x in repair.given for y in repair.source_operands):
        return ""
    found = []
    for operations in (repair.target, repair.source):
        one = next((one for one in operations if kind_of(one) in ("sum", "mean", "largest", "softmax", "var")), None)
        given = (
            None
            if one is None
            else next((one.settings[k] for k in REDUCED_BY if one.settings.get(k) is not None), None)
        )
        if one is None or given is None:
            return ""
        rank = one.operands[0].array.ndim
        found.append(sorted(k % rank for k in (given if isinstance(given, list | tuple) else [given])))
    if found[0] == found[1]:
        return ""
    said = [", ".join(map(str, x)) for x in found]
    return f"the target reduces axis {said[0]}, and the JAX model axis {said[1]}"


def _made_at(repair: Repair, ours: Words) -> list[Operation]:
    """Return the operation of the target that gives the replaced value."""
    value = root(repair.operands[0], ours.producer)
    return [ours.producer[value]] if value in ours.producer else []


def _input_of_layer(repair: Repair, ours: Words, theirs: Words) -> tuple[str, str] | None:
    """Name another value that a layer is given, or its elements in another order; None where operations are missing."""
    layer = repair.layer
    assert layer is not None
    moved = same_numbers(repair.got, repair.want)
    if repair.source and not moved:
        return None
    name = layer.module or ours.other(layer)
    here, there = (
        words.producer.get(root(x, words.producer))
        for words, x in ((ours, repair.operands[0]), (theirs, repair.source_operands[0]))
    )
    given, meant = ours.value(repair.operands[0]), theirs.value(repair.source_operands[0])
    if moved:
        places_of = [places([one]) if one is not None else "" for one in (here, there)]
        return (
            ORDER,
            f"{name} is given {given} with its elements in another order: the target{places_of[0]}, the JAX model{places_of[1]}",
        )
    return OPERAND, f"the target gives {name} {given}{places([layer])}; the JAX model gives it {meant}"


def _same_operations(repair: Repair, ours: Words, theirs: Words, sentence: str) -> tuple[str, str]:
    """Name a difference of operations that are the same, with the same constants: other operands, or their elements' order."""
    if _unshared(repair)[0]:
        values = _unshared(repair)
        used = " and ".join(dict.fromkeys(map(ours.value, values[0])))
        meant = " and ".join(dict.fromkeys(map(theirs.value, values[1] or repair.source_operands)))
        which = ""
        if len(values[0]) == len(values[1]) == 1:
            (mine,), (other,) = values
            if numbers := _masked_with(mine, other, ours, theirs):
                return CONSTANT, f"{sentence}; {numbers}"
            which = selection((mine, mine.array), (other, other.array), ours, theirs)
        return OPERAND, f"{sentence}; the target uses {used}, and the JAX model {meant}{which and f'; {which}'}"
    if not same_numbers(repair.got, repair.want) and any(kind_of(one) in ("part", "pick") for one in repair.target):
        return PART, sentence
    by, said = shifted_tables(repair)
    if said:
        return (off_by(by) if by else CONSTANT), f"{sentence}; {said}"
    repeated = [
        places([one])
        for words, x in ((ours, repair.operands), (theirs, repair.source_operands))
        for one in copies(words, x)[:1]
    ]
    if len(repeated) == 2:
        return (
            ORDER,
            f"{sentence}; the elements are repeated in another order: the target{repeated[0]}, the JAX model{repeated[1]}",
        )
    others = [x.array for x in repair.source_operands]
    if len(repair.given) > 1 and all(any(x.shape == y.shape and same(x, y) for y in others) for x in repair.given):
        return EXCHANGED, f"{sentence}; the same values, put together in another way"
    return ORDER, f"{sentence}; the elements are in another order"


def _masked_with(one: Value, two: Value, ours: Words, theirs: Words) -> str:
    """Say with which numbers the two sides mask; empty where they do not, or with the same."""
    made = [words.producer.get(root(x, words.producer)) for words, x in ((ours, one), (theirs, two))]
    numbers = [scalar(x) if x is not None and kind_of(x) == "mask" else None for x in made]
    if None in numbers or numbers[0] == numbers[1]:
        return ""
    said = [f"{number:g}{places([x])}" for number, x in zip(numbers, made, strict=True) if x is not None]
    return f"what is hidden is {said[0]} in the target, and {said[1]} in the JAX model"


def _line(operations: Sequence[Operation]) -> str:
    """Return the first line of operations that is known, of one that computes something if there is any."""
    lines = [one.where for one in operations if one.where and kind_of(one) != LAYOUT]
    lines = lines or [one.where for one in operations if one.where]
    return lines[0] if lines else "an unknown line"


def _steps(operations: Sequence[Operation]) -> list[tuple[str, float | None]]:
    return [(kind_of(one), scalar(one)) for one in arithmetic(operations) if kind_of(one) != LAYOUT]


def _without_factors(steps: Sequence[tuple[str, float | None]]) -> list[tuple[str, float | None]]:
    """Return the operations without those that multiply by a number: these may stand in front of a product or behind it."""
    return [(kind, number) for kind, number in steps if kind not in ("multiply", "divide") or number is None]


def _epsilon(steps: Sequence[tuple[str, float | None]]) -> str:
    """Say on which side of a root a small number is added."""
    roots = [k for k, (kind, _) in enumerate(steps) if kind in ("sqrt", "rsqrt")]
    small = [k for k, (kind, number) in enumerate(steps) if kind == "add" and number is not None and 0 < number < 0.1]
    if len(roots) != 1 or not small:
        return ""
    return "inside" if small[0] < roots[0] else "outside"


def _fix(repair: Repair) -> str:
    if repair.layer is not None:
        return (
            f"give {repair.layer.module or _line([repair.layer])} what the JAX model gives it, or correct the reference"
        )
    if not repair.target and not repair.source:
        return "give the target's code there what the JAX model has, or correct the reference"
    if not repair.target:
        return f"compute in the target what the JAX model computes at {_line(repair.source)}, or correct the reference"
    if not repair.source:
        return f"remove this from {_line(repair.target)}, or add it to the reference"
    return (
        f"make {_line(repair.target)} compute what the JAX model computes at {_line(repair.source)}, "
        "or correct the reference"
    )


def _unproven(
    divergence: Divergence, ours: Words, theirs: Words, activations: Mapping[str, Function], training: Collection[str]
) -> Named:
    """Say at which operation the target departs, where no value of the source's restores the output."""
    entry = divergence.entry
    if entry is None:
        return Named("", "", "")
    said = ""
    if divergence.repairs:
        said = _describe(divergence.repairs[0], ours, theirs, activations, training)[1] + "; more differs behind it: "
    given = " and ".join(dict.fromkeys(ours.value(v) for v in entry.data))
    said += (
        "the first operation of the target that is given values of the JAX model and gives none of its values: "
        f"of {given}, the target {ours.verb(entry)}{places([entry])}"
    )
    if divergence.instead:
        said += f"; of the same, the JAX model {theirs.chain(divergence.instead[:1])}{places(divergence.instead[:1])}"
    return Named("", said, "")
