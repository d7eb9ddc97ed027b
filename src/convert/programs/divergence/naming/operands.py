"""Questions about what the operations of the two sides are given: other values, parts, orders, parameters or tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from convert.numerics.roots import factor_text
from convert.programs.divergence.graph import root
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.layouts import same
from convert.programs.divergence.naming.both import Both, steps, unshared
from convert.programs.divergence.naming.by_functions import (
    EXCHANGED,
)
from convert.programs.divergence.naming.computed_tables import of_other_tables
from convert.programs.divergence.naming.details import (
    EPSILON,
    FUNCTION,
    PART,
    axes_exchanged,
    bias_of_choice,
    contracted,
    copies,
    moved_indices,
    other_beside,
    other_indices,
    other_parameters,
)
from convert.programs.divergence.naming.operations import CONSTANT, OTHER, Described
from convert.programs.divergence.naming.selections import MOVES, other_selection, selection
from convert.programs.divergence.naming.tables import (
    numbers_of_tables,
    off_by,
    other_waves,
    shifted_tables,
)
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.shared_values import near, same_numbers
from convert.programs.divergence.words import JOINS, Words, arithmetic, places, product_of, scalar
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
ORDER = "elements in another order"
OPERAND, AXES = "another operand", "axes exchanged"
LARGEST, SMALLEST = "another number of largest values", "smallest values for the largest"


def largest(both: Both) -> Described | None:
    (most, _), (theirs_most, _) = _chosen(both)
    if not most or not theirs_most or most == theirs_most:
        return None
    counts = f"the target takes the {most} largest, and the JAX model the {theirs_most} largest"
    return LARGEST, f"{both.sentence}; {counts}"


def _chosen(both: Both) -> tuple[tuple[int, str], tuple[int, str]]:
    """Return how many of the largest or smallest values each side takes, in the operations of a repair or in front of them."""
    repair = both.repair
    sides = ((both.ours, repair.target, repair.operands), (both.theirs, repair.source, repair.source_operands))
    ours, theirs = (
        words.chosen_behind([*(x for one in ops[-1:] for x in one.results), *given]) for words, ops, given in sides
    )
    return ours, theirs


def smallest(both: Both) -> Described | None:
    """The smallest values in the place of the largest ones."""
    (most, which), (_, theirs_which) = _chosen(both)
    if most and {which, theirs_which} == {"largest", "smallest"}:
        said = f"the target takes the {most} {which}{both.here}; the JAX model takes the {most} {theirs_which}"
        return SMALLEST, f"of {both.given}, {said}{both.there}"
    sides = [[one for one in of if kind_of(one) == "sort"] for of in (both.repair.target, both.repair.source)]
    if len(sides[0]) != 1 or len(sides[1]) != 1:
        return None
    one, two = (words.verb(side[0]) for words, side in zip((both.ours, both.theirs), sides, strict=True))
    if {one.split()[-1], two.split()[-1]} != {"smallest", "largest"}:
        return None
    return SMALLEST, f"of {both.given}, the target {one}{both.here}; the JAX model {two}{both.there}"


def input_of_layer(both: Both) -> Described | None:
    """Name another value that a layer is given, or its elements in another order; None where operations are missing."""
    repair, ours, theirs = both.repair, both.ours, both.theirs
    layer = repair.layer
    if layer is None:
        return None
    moved = same_numbers(repair.got, repair.want) and not near(repair.got, repair.want)
    if repair.source and not moved:
        return None
    name = layer.module or ours.other(layer)
    here, there = (
        words.producer.get(root(x, words.producer))
        for words, x in ((ours, repair.operands[0]), (theirs, repair.source_operands[0]))
    )
    given, meant = ours.value(repair.operands[0]), theirs.value(repair.source_operands[0])
    before = product_of(here, ours.producer) if here is not None else None
    if before is not None and layer.module and before.module == layer.module:
        name, given = _within(layer, before, ours)
    if moved:
        places_of = [places([one]) if one is not None else "" for one in (here, there)]
        return (
            ORDER,
            f"{name} is given {given} with its elements in another order: the target{places_of[0]}, the JAX model{places_of[1]}",
        )
    return (
        OPERAND,
        f"the target gives {name} {given}{places([layer])}; the JAX model gives it {meant}{_made(repair, theirs)}",
    )


def _within(layer: Operation, before: Operation, words: Words) -> tuple[str, str]:
    """Name a layer and what it is given, where one module has both, such as the projections of an attention: by their weights."""
    name, weights = words.other(layer), words.other(before)
    return (layer.module, "what it gives itself") if name == weights else (name, f"what {weights} gives")


def _made(repair: Repair, theirs: Words) -> str:
    """Say how the JAX model computes what it gives a layer, of values that the target has."""
    results = {x for one in repair.made for x in one.results}
    given = dict.fromkeys(theirs.value(x) for one in repair.made for x in one.data if x not in results)
    return f": of {' and '.join(given)}, it {theirs.chain(repair.made)}{places(repair.made)}" if given else ""


def choice(both: Both) -> Described | None:
    return bias_of_choice(both.repair, both.ours, both.theirs) or None


def other_value(both: Both) -> Described | None:
    repair, ours, theirs = both.repair, both.ours, both.theirs
    if repair.source or (same_numbers(repair.got, repair.want) and not near(repair.got, repair.want)):
        return None
    used, meant = repair.operands[0], repair.source_operands[0]
    which = selection((used, repair.got), (meant, repair.want), ours, theirs)
    at = places(made_at(repair, ours))
    return (
        OPERAND,
        f"the target has {both.given}{at} where the JAX model has {theirs.value(meant)}{which and f'; {which}'}",
    )


def other_limit(both: Both) -> Described | None:
    """Both limit the values, the target so far away that nothing reaches its limits."""
    made = made_at(both.repair, both.ours)
    limits = {kind_of(one) for one in (*made, *arithmetic(both.repair.source))} == {"limit"}
    if not made or not both.repair.source or not limits:
        return None
    return CONSTANT, f"the target {both.ours.verb(made[0])}{places(made)}; the JAX model {both.instead}{both.there}"


def missing_layout(both: Both) -> Described | None:
    repair, ours = both.repair, both.ours
    if any(kind_of(one) != LAYOUT for one in repair.source):
        return None
    if near(repair.got, repair.want):
        return None  # they differ by rounding, or by less than a part in a million
    ends = [ours.producer[x] for x in repair.operands if x in ours.producer]
    moved = moved_indices(repair.got, repair.want)
    return (
        ORDER,
        f"the elements of {both.given} are in another order: the target{places(ends)}, the JAX model{both.there}{moved}",
    )


def missing_part(both: Both) -> Described | None:
    repair, ours, theirs = both.repair, both.ours, both.theirs
    moves = all(kind_of(one) in MOVES for one in arithmetic(repair.source))
    if not moves or same_numbers(repair.got, repair.want):
        return None
    of = other_selection(repair, ours, theirs) or f"the target has {both.given} as it is"
    return PART, f"{both.only_theirs}; {of}{places(made_at(repair, ours))}"


def joined_number(both: Both) -> Described | None:
    """Both join a number to a value, and not the same: zeros that the target joins are no other value."""
    repair, ours = both.repair, both.ours
    made = ours.producer.get(root(repair.operands[0], ours.producer)) if len(repair.operands) == 1 else None
    first = next(iter(arithmetic(repair.source)), None)
    if made is None or first is None or made.name not in JOINS or first.name not in JOINS:
        return None
    numbers = scalar(made), scalar(first)
    if None in numbers or numbers[0] == numbers[1]:
        return None
    return (
        CONSTANT,
        f"the target {ours.verb(made)}{places([made])}; the JAX model {both.theirs.verb(first)}{both.there}",
    )


def joined(both: Both) -> Described | None:
    joined = other_beside(both.repair, both.ours, both.theirs)
    return (OPERAND, joined) if joined else None


def other_index(both: Both) -> Described | None:
    repair = both.repair
    if repair.taken is None or any(kind_of(one) not in (LAYOUT, "pick", "part") for one in repair.target):
        return None
    axis, index = repair.taken
    does = f"of {both.given}, the target {both.does}{both.here}"
    return PART, f"{does}; the JAX model takes index {index} of axis {axis}"


def exchanged_axes(both: Both) -> Described | None:
    axes = axes_exchanged(both.repair, both.ours)
    return (AXES, f"{both.sentence}: {axes}") if axes else None


def of_parameters(both: Both) -> Described | None:
    other = other_indices(both.repair) or other_parameters(
        both.repair.target, both.repair.source, both.ours, both.theirs
    )
    if other and other[0] == FUNCTION and (made := of_other_tables(both)) is not None:
        return made
    one, two = ([kind for kind, _ in of] for of in both.steps)
    if other and one != two and sorted(one) == sorted(two):
        return None  # the same operations in another order meet other elements of them
    if other and other[0] == EPSILON:  # what the two do with it is the same
        return CONSTANT, other[1]
    if other and other[0] == FUNCTION and both.does == both.instead:
        return other  # what both do with it is the same
    return (other[0], f"{both.sentence}; {other[1]}") if other else None


def other_tables(both: Both) -> Described | None:
    """The same operations with tables of other numbers."""
    if not both.same_kinds:
        return None
    repair, ours, theirs = both.repair, both.ours, both.theirs
    if other := other_waves(repair, ours, theirs):
        return other[0], f"{both.sentence}; {other[1]}"
    if tables := numbers_of_tables(repair, ours, theirs):
        return CONSTANT, f"{both.sentence}; {tables}"
    return None if shifted_tables(repair)[0] else of_other_tables(both)


def operands(both: Both) -> Described | None:
    """The same operations and numbers, but for factors that may stand in front of a product or behind it."""
    repair, (one, two) = both.repair, both.steps
    if both.same_kinds and repair.operands and len(repair.operands) == len(repair.source_operands):
        return _same_operations(repair, both.ours, both.theirs, both.sentence)
    sums = one != two and any(kind in ("add", "subtract") for kind, _ in one)  # a factor does not go past a sum
    if sums or _without_factors(one) != _without_factors(two) or sorted(map(str, one)) != sorted(map(str, two)):
        return None
    return _same_operations(repair, both.ours, both.theirs, both.sentence)


def widths(both: Both) -> Described | None:
    one, two = (contracted(x) for x in (both.repair.target, both.repair.source))
    if not one or not two or one == two:
        return None
    widths = f"the target multiplies vectors of {one} features, and the JAX model of {two}"
    return "heads of another width", f"{both.sentence}; {widths}"


def first_part(both: Both) -> Described | None:
    """Both begin with a part of the value, and not with the same."""
    first = [arithmetic(x)[:1] for x in (both.repair.target, both.repair.source)]
    if any(kind_of(one[0]) != "part" for one in first if one) or steps(first[0]) != steps(first[1]):
        return None
    taken = [words.chain(one) for words, one in zip((both.ours, both.theirs), first, strict=True)]
    return (PART, both.sentence) if taken[0] != taken[1] else None


def _same_operations(repair: Repair, ours: Words, theirs: Words, sentence: str) -> Described:
    """Name a difference of operations that are the same, with the same constants: other operands, or their elements' order."""
    values = unshared(repair)
    if values[0] or any(x.data for x in values[1]):
        used = " and ".join(dict.fromkeys(map(ours.value, values[0] or repair.operands)))
        meant = " and ".join(dict.fromkeys(map(theirs.value, values[1] or repair.source_operands)))
        which = ""
        if len(values[0]) == len(values[1]) == 1:
            (mine,), (other,) = values
            if numbers := _masked_with(mine, other, ours, theirs):
                return CONSTANT, f"{sentence}; {numbers}"
            which = selection((mine, mine.array), (other, other.array), ours, theirs)
            if number := _times(mine, other):
                return CONSTANT, f"{sentence}; the target uses {used}, and the JAX model {number} times that"
        uses = f"the target uses {used}, and the JAX model {meant}"
        told = [uses] if used != meant or not which else []  # of one name, the elements tell
        told += [which] if which else []
        return OPERAND, "; ".join([sentence, *told])
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
    if sorted(map(str, steps(repair.target))) != sorted(map(str, steps(repair.source))):
        return OTHER, sentence  # as a parameter in the place of a number
    return ORDER, f"{sentence}; the elements are in another order"


def _times(one: Value, two: Value) -> str:
    """Return the number that makes one value of another; empty if none does."""
    if one.array.shape != two.array.shape or not one.array.any():
        return ""
    at = np.abs(one.array).argmax()
    number = float(two.array.flat[at] / one.array.flat[at])
    return factor_text(number) if same(number * one.array, two.array) else ""


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


def made_at(repair: Repair, ours: Words) -> list[Operation]:
    """Return the operation of the target that gives the replaced value."""
    value = root(repair.operands[0], ours.producer)
    return [ours.producer[value]] if value in ours.producer else []
