"""Name what one repair undoes, and say it in a sentence: the first of the questions below that has an answer gives the name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from convert.programs.divergence.both import Both, line, steps, unshared
from convert.programs.divergence.by_functions import (
    EXCHANGED,
    EXTRA,
    MISSING,
    MOVED,
    by_functions,
    function_in_front,
    two_functions,
    within,
)
from convert.programs.divergence.computed_tables import counts, of_tables
from convert.programs.divergence.details import (
    FUNCTION,
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
    power_of,
    ratios,
)
from convert.programs.divergence.functions import computed
from convert.programs.divergence.graph import root
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.layouts import same
from convert.programs.divergence.norms import two_norms
from convert.programs.divergence.search import Repair
from convert.programs.divergence.selections import MOVES, other_selection, selection, taken_from
from convert.programs.divergence.shared_values import HIDDEN, same_numbers
from convert.programs.divergence.tables import (
    ROUNDED,
    numbers_of_tables,
    off_by,
    other_waves,
    rounded,
    shifted_tables,
)
from convert.programs.divergence.windows import PADDING, other_padding, other_windows
from convert.programs.divergence.words import REDUCED as REDUCED_BY
from convert.programs.divergence.words import Words, arithmetic, places, scalar
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
Described = tuple[str, str]  # the name, and the sentence
ORDER = "elements in another order"
CONSTANT = "another constant"
OTHER = "another computation"
REDUCED = "reduction over another axis"
OPERAND, AXES = "another operand", "axes exchanged"
NORMED = "norm over other axes or groups"
LARGEST, SMALLEST = "another number of largest values", "smallest values for the largest"


def describe(both: Both) -> Described:
    """Return the name of what a repair undoes, and the sentence."""
    repair = both.repair
    drops = both.trained is not None and any(kind_of(one) == "random" for one in repair.target)
    side = OF_THE_SOURCE if not repair.target else OF_THE_TARGET if drops or not repair.source else OF_BOTH
    return next(said for question in (*OF_ANY, *side) if (said := question(both)) is not None)


# ---- whichever side computes something


def _largest(both: Both) -> Described | None:
    repair = both.repair
    most, theirs_most = both.ours.largest_behind(repair.operands), both.theirs.largest_behind(repair.source_operands)
    if not most or not theirs_most or most == theirs_most:
        return None
    counts = f"the target takes the {most} largest, and the JAX model the {theirs_most} largest"
    return LARGEST, f"{both.sentence}; {counts}"


def _smallest(both: Both) -> Described | None:
    """The smallest values in the place of the largest ones."""
    sides = [[one for one in of if kind_of(one) == "sort"] for of in (both.repair.target, both.repair.source)]
    if len(sides[0]) != 1 or len(sides[1]) != 1:
        return None
    one, two = (words.verb(side[0]) for words, side in zip((both.ours, both.theirs), sides, strict=True))
    if {one.split()[-1], two.split()[-1]} != {"smallest", "largest"}:
        return None
    return SMALLEST, f"of {both.given}, the target {one}{both.here}; the JAX model {two}{both.there}"


def _input_of_layer(both: Both) -> Described | None:
    """Name another value that a layer is given, or its elements in another order; None where operations are missing."""
    repair, ours, theirs = both.repair, both.ours, both.theirs
    layer = repair.layer
    if layer is None:
        return None
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


def _bias_of_choice(both: Both) -> Described | None:
    return bias_of_choice(both.repair, both.ours, both.theirs) or None


def _power(both: Both) -> Described | None:
    repair, theirs = both.repair, both.theirs
    power = power_of(repair.got, repair.want)
    if not power:
        return None
    made = repair.source or [theirs.producer[x] for x in repair.source_operands if x in theirs.producer]
    got = f"of {both.given}, the target {both.does}{both.here}" if repair.target else f"the target uses {both.given}"
    return POWER, f"{got}; the JAX model has {power} of that{places(made)}"


# ---- the target computes nothing there


def _other_value(both: Both) -> Described | None:
    repair, ours, theirs = both.repair, both.ours, both.theirs
    if repair.source or same_numbers(repair.got, repair.want):
        return None
    used, meant = repair.operands[0], repair.source_operands[0]
    which = selection((used, repair.got), (meant, repair.want), ours, theirs)
    at = places(_made_at(repair, ours))
    return (
        OPERAND,
        f"the target has {both.given}{at} where the JAX model has {theirs.value(meant)}{which and f'; {which}'}",
    )


def _missing_layout(both: Both) -> Described | None:
    repair, ours = both.repair, both.ours
    if any(kind_of(one) != LAYOUT for one in repair.source):
        return None
    ends = [ours.producer[x] for x in repair.operands if x in ours.producer]
    moved = moved_indices(repair.got, repair.want)
    return (
        ORDER,
        f"the elements of {both.given} are in another order: the target{places(ends)}, the JAX model{both.there}{moved}",
    )


def _missing_padding(both: Both) -> Described | None:
    padding = other_padding(both.repair, both.ours, both.theirs)
    at = places(_made_at(both.repair, both.ours))
    return (PADDING, f"{both.only_theirs}; {padding}{at}") if padding else None


def _missing_part(both: Both) -> Described | None:
    repair, ours, theirs = both.repair, both.ours, both.theirs
    moves = all(kind_of(one) in MOVES for one in arithmetic(repair.source))
    if not moves or same_numbers(repair.got, repair.want):
        return None
    of = other_selection(repair, ours, theirs) or f"the target has {both.given} as it is"
    return PART, f"{both.only_theirs}; {of}{places(_made_at(repair, ours))}"


def _missing_function(both: Both) -> Described | None:
    function = function_in_front(both.repair, both.ours, both.activations) or _part_for_function(both)
    return (function, f"{both.only_theirs}; the target uses it as it is: {function}") if function else None


def _part_for_function(both: Both) -> str:
    """Name a part that the target takes of a value of which the JAX model computes a function, such as the last step for the mean."""
    repair = both.repair
    for whole in taken_from(repair.operands[0], both.ours.producer):
        if any(same_numbers(whole.array, x.array) for x in repair.source[0].operands):
            got, want = (computed(x, whole.array, both.activations) for x in (repair.given[0], repair.want))
            return f"{got} for {want}" if got and want and got != want else ""
    return ""


def _joined(both: Both) -> Described | None:
    joined = other_beside(both.repair, both.ours, both.theirs)
    return (OPERAND, joined) if joined else None


def _missing(both: Both) -> Described:
    return MISSING, f"{both.only_theirs}; the target uses it as it is"


# ---- the JAX model computes nothing there


def _taken(both: Both) -> Described | None:
    repair = both.repair
    if repair.taken is None or any(kind_of(one) not in (LAYOUT, "pick", "part") for one in repair.target):
        return None
    axis, index = repair.taken
    does = f"of {both.given}, the target {both.does}{both.here}"
    return PART, f"{does}; the JAX model takes index {index} of axis {axis}"


def _extra(both: Both) -> Described:
    sentence = f"of {both.given}, the target {both.does}{both.here}; the JAX model uses it as it is"
    if both.trained is None:
        return EXTRA, sentence
    return "training mode", f"{sentence}: the target's module {both.trained} is in training mode"


# ---- both compute something


def _pooling(both: Both) -> Described | None:
    return ("another pooling", both.sentence) if other_pooling(both.repair, both.ours, both.theirs) else None


def _pool_padding(both: Both) -> Described | None:
    padding = other_pool_padding(both.repair, both.ours, both.theirs)
    return (PADDING, f"{both.sentence}; {padding}") if padding else None


def _windows(both: Both) -> Described | None:
    windows = other_windows(both.repair, both.ours, both.theirs)
    return (windows[0], f"{both.sentence}; {windows[1]}") if windows else None


def _padding(both: Both) -> Described | None:
    padding = other_padding(both.repair, both.ours, both.theirs)
    return (PADDING, f"{both.sentence}; {padding}") if padding else None


def _axes(both: Both) -> Described | None:
    axes = axes_exchanged(both.repair, both.ours)
    return (AXES, f"{both.sentence}: {axes}") if axes else None


def _mask(both: Both) -> Described | None:
    hidden = [np.abs(x) >= HIDDEN for x in (both.repair.got, both.repair.want)]
    if not hidden[0].any() or not hidden[1].any() or not (hidden[0] != hidden[1]).any():
        return None
    said = f"{mask_difference(~hidden[0], ~hidden[1])}{both.here}"
    return "another mask", f"{said}; the JAX model's mask is applied at {line(both.repair.source)}"


def _norms(both: Both) -> Described | None:
    norms = two_norms(both.repair)
    return (NORMED, f"{both.sentence}; {norms}") if norms else None


def _functions(both: Both) -> Described | None:
    function = two_functions(both.repair, both.activations)
    return (function, f"{both.sentence}: {function}") if function else None


def _parameters(both: Both) -> Described | None:
    other = other_indices(both.repair) or other_parameters(both.repair, both.ours, both.theirs)
    if other and other[0] == FUNCTION and (made := _of_tables(both)) is not None:
        return made
    return (other[0], f"{both.sentence}; {other[1]}") if other else None


def _constants(both: Both) -> Described | None:
    """The same operations with other numbers."""
    if not both.same_kinds:
        return None
    pairs = [(a, b) for (_, a), (_, b) in zip(*both.steps, strict=True)]
    numbers = [(a, b) for a, b in pairs if a is not None and b is not None and a != b]
    if not numbers:
        return None
    narrow = rounded(*numbers[0]) if len(numbers) == 1 else ""
    return (ROUNDED, f"{both.sentence}; {narrow}") if narrow else (CONSTANT, both.sentence)


def _tables(both: Both) -> Described | None:
    """The same operations with tables of other numbers."""
    if not both.same_kinds:
        return None
    repair, ours, theirs = both.repair, both.ours, both.theirs
    if other := other_waves(repair, ours, theirs):
        return other[0], f"{both.sentence}; {other[1]}"
    if tables := numbers_of_tables(repair, ours, theirs):
        return CONSTANT, f"{both.sentence}; {tables}"
    return None if shifted_tables(repair)[0] else _of_tables(both)


def _operands(both: Both) -> Described | None:
    """The same operations and numbers, but for factors that may stand in front of a product or behind it."""
    repair, (one, two) = both.repair, both.steps
    if both.same_kinds and repair.operands and len(repair.operands) == len(repair.source_operands):
        return _same_operations(repair, both.ours, both.theirs, both.sentence)
    sums = one != two and any(kind in ("add", "subtract") for kind, _ in one)  # a factor does not go past a sum
    if sums or _without_factors(one) != _without_factors(two) or sorted(map(str, one)) != sorted(map(str, two)):
        return None
    return _same_operations(repair, both.ours, both.theirs, both.sentence)


def _side_of_the_root(both: Both) -> Described | None:
    one, two = map(_epsilon, both.steps)
    return (f"epsilon {one} the root", both.sentence) if one and two and one != two else None


def _widths(both: Both) -> Described | None:
    one, two = (contracted(x) for x in (both.repair.target, both.repair.source))
    if not one or not two or one == two:
        return None
    widths = f"the target multiplies vectors of {one} features, and the JAX model of {two}"
    return "heads of another width", f"{both.sentence}; {widths}"


def _places(both: Both) -> Described | None:
    """The same operations in another order."""
    one, two = both.steps
    if Counter(kind for kind, _ in one) != Counter(kind for kind, _ in two):
        return None
    same_numbers_too = Counter(number for _, number in one) == Counter(number for _, number in two)
    return (MOVED if same_numbers_too else CONSTANT), both.sentence


def _factor(both: Both) -> Described | None:
    factors = ratios(both.repair.got, both.repair.want)
    return ("another factor", f"{both.sentence}; {factors}") if factors else None


def _sign(both: Both) -> Described | None:
    one, two = both.steps
    other_sign = {kind for kind, _ in one} ^ {kind for kind, _ in two} == {"add", "subtract"} and len(one) == len(two)
    return ("the other sign", both.sentence) if other_sign else None


def _longer(both: Both) -> Described | None:
    """One side computes what the other one does, and more."""
    repair = both.repair
    kinds, their_kinds = both.ours.kinds(repair.target), both.theirs.kinds(repair.source)
    for few, many, longer, name in (
        (kinds, their_kinds, repair.source, MISSING),
        (their_kinds, kinds, repair.target, EXTRA),
    ):
        if few and len(few) < len(many) and within(few, many):
            joins = any(kind_of(one) == "join" and any(v.of_parameters for v in one.operands) for one in longer)
            moves = not joins and not (Counter(many) - Counter(few)).keys() - {"part", "join", "pick"}
            convolves = all("convolution" in x for x in (kinds, their_kinds))  # one side cuts what both compute
            return (PADDING if moves and convolves else PART if moves else name), both.sentence
    return None


def _interpolation(both: Both) -> Described | None:
    kinds = (*both.ours.kinds(both.repair.target), *both.theirs.kinds(both.repair.source))
    return ("another interpolation", both.sentence) if "resize" in kinds else None


def _by_functions(both: Both) -> Described | None:
    functions = by_functions(both.repair, both.activations)
    return (functions, both.sentence) if functions else None


def _one_for_another(both: Both) -> Described | None:
    """One operation in the place of another one."""
    one, two = (
        Counter(words.kinds(of)) for words, of in ((both.ours, both.repair.target), (both.theirs, both.repair.source))
    )
    more, fewer = list((one - two).elements()), list((two - one).elements())
    return (f"{more[0]} for {fewer[0]}", both.sentence) if len(more) == len(fewer) == 1 else None


def _reduced(both: Both) -> Described | None:
    over = _other_axes(both.repair)
    return (REDUCED, f"{both.sentence}; {over}") if over else None


def _first_part(both: Both) -> Described | None:
    """Both begin with a part of the value, and not with the same."""
    first = [arithmetic(x)[:1] for x in (both.repair.target, both.repair.source)]
    if any(kind_of(one[0]) != "part" for one in first if one) or steps(first[0]) != steps(first[1]):
        return None
    taken = [words.chain(one) for words, one in zip((both.ours, both.theirs), first, strict=True)]
    return (PART, both.sentence) if taken[0] != taken[1] else None


def _other(both: Both) -> Described:
    return OTHER, both.sentence


Question = Callable[[Both], Described | None]
OF_ANY: tuple[Question, ...] = (_largest, _smallest, _input_of_layer, _bias_of_choice, _power)
OF_THE_SOURCE: tuple[Question, ...] = (
    _other_value,
    _missing_layout,
    _missing_padding,
    _missing_part,
    _missing_function,
    _joined,
    _missing,
)
OF_THE_TARGET: tuple[Question, ...] = (_taken, _extra)
OF_BOTH: tuple[Question, ...] = (
    _pooling,
    _pool_padding,
    _windows,
    _padding,
    _axes,
    _mask,
    _norms,
    _functions,
    _parameters,
    _constants,
    _tables,
    _operands,
    _side_of_the_root,
    _widths,
    _places,
    _factor,
    _sign,
    _longer,
    _interpolation,
    _by_functions,
    _reduced,
    _first_part,
    _other,
)
OF_TABLES: tuple[Question, ...] = (
    _power,
    _functions,
    _constants,
    _side_of_the_root,
    _sign,
    _longer,
    _by_functions,
    _one_for_another,
)


# ---- what the answers are made of


def _of_tables(both: Both) -> Described | None:
    """Name what differs in how two tables, or two functions of parameters, are computed; None where that has no clear name."""
    made = of_tables(both)
    if made is None:
        return None
    said = describe_table(made)
    return None if said is None else (said[0], f"{both.sentence}; {said[1]}")


def _counted(both: Both) -> Described | None:
    """Tables that are computed in the same way, of numbers that count from another one."""
    mine, other = (
        [x for v in of if (x := counts(v)) is not None] for of in (both.repair.operands, both.repair.source_operands)
    )
    if len(mine) != 1 or len(other) != 1 or mine == other:
        return None
    (first, step), (their_first, their_step) = mine[0], other[0]
    by = first - their_first
    name = f"counts off by {'one' if abs(by) == 1 else f'{abs(by):g}'}" if step == their_step else CONSTANT
    said = f"the table counts from {first:g} by {step:g} in the target, and from {their_first:g} by {their_step:g} in the JAX model"
    return name, f"{said}{both.here}"


def describe_table(both: Both) -> Described | None:
    """Name what differs in the operations behind two tables; None where that has no clear name."""
    repair = both.repair
    if both.steps[0] == both.steps[1]:  # other numbers to begin from, or their elements are in another order
        return _counted(both) or _functions(both)
    if all(kind_of(one) in MOVES for one in (*repair.target, *repair.source)):
        return None
    if not both.steps[0]:
        return _missing_function(both) or _missing(both)
    side = OF_TABLES if both.steps[1] else (_extra,)
    return next((said for question in side if (said := question(both)) is not None), None)


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


def _same_operations(repair: Repair, ours: Words, theirs: Words, sentence: str) -> Described:
    """Name a difference of operations that are the same, with the same constants: other operands, or their elements' order."""
    if unshared(repair)[0]:
        values = unshared(repair)
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
