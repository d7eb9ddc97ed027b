"""Questions about what the operations of the two sides compute: what is missing or too much, another function, number, sign or order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from convert.programs.divergence.kinds import kind_of
from convert.programs.divergence.layouts import same
from convert.programs.divergence.naming.both import Both, unshared
from convert.programs.divergence.naming.by_functions import (
    EXTRA,
    MISSING,
    MOVED,
    by_functions,
    function_in_front,
    two_functions,
    within,
)
from convert.programs.divergence.naming.details import (
    PART,
    POWER,
    power_of,
    ratios,
)
from convert.programs.divergence.naming.functions import computed
from convert.programs.divergence.naming.interpolations import method_of
from convert.programs.divergence.naming.norms import two_norms
from convert.programs.divergence.naming.selections import taken_from
from convert.programs.divergence.naming.tables import (
    ROUNDED,
    rounded,
)
from convert.programs.divergence.naming.windows import PADDING
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.samplings import said
from convert.programs.divergence.shared_values import same_numbers
from convert.programs.divergence.words import REDUCED as REDUCED_BY
from convert.programs.divergence.words import arithmetic, places
from convert.programs.program import Operation, Value

NORM_BEHIND = (
    "norm behind the addition, not in front of it",
    "the target computes the norm behind the addition, and the JAX model in front of it",
)
NORM_IN_FRONT = (
    "norm in front of the addition, not behind it",
    "the target computes the norm in front of the addition, and the JAX model behind it",
)
Described = tuple[str, str]  # the name, and the sentence
Array = np.ndarray[Any, np.dtype[Any]]
CONSTANT, FACTOR = "another constant", "another factor"
OTHER = "another computation"
REDUCED = "reduction over another axis"
INTERPOLATION = "another interpolation"
NORMED = "norm over other axes or groups"


def other_power(both: Both) -> Described | None:
    repair, theirs = both.repair, both.theirs
    power = power_of(repair.got, repair.want)
    if not power:
        return None
    made = repair.source or [theirs.producer[x] for x in repair.source_operands if x in theirs.producer]
    got = f"of {both.given}, the target {both.does}{both.here}" if repair.target else f"the target uses {both.given}"
    return POWER, f"{got}; the JAX model has {power} of that{places(made)}"


def missing_function(both: Both) -> Described | None:
    function = function_in_front(both.repair, both.ours, both.activations) or _part_for_function(both)
    return (function, f"{both.only_theirs}; {both.as_it_is}: {function}") if function else None


def _part_for_function(both: Both) -> str:
    """Name a part that the target takes of a value of which the JAX model computes a function, such as the last step for the mean."""
    repair = both.repair
    for whole in taken_from(repair.operands[0], both.ours.producer):
        if any(same_numbers(whole.array, x.array) for x in repair.source[0].operands):
            got, want = (computed(x, whole.array, both.activations) for x in (repair.given[0], repair.want))
            return f"{got} for {want}" if got and want and got != want else ""
    return ""


def missing(both: Both) -> Described:
    return MISSING, f"{both.only_theirs}; {both.as_it_is}"


def extra(both: Both) -> Described:
    repair, pair = both.repair, both.ours.of_two_in(both.repair.target)
    used = zip(repair.operands, repair.given, strict=True) if pair else ()
    kept = next((both.ours.value(one) for one, x in used if same_numbers(x, repair.want)), "it")
    said = f"the target {pair}" if kept != "it" else f"of {both.given}, the target {both.does}"
    sentence = f"{said}{both.here}; the JAX model uses {kept} as it is"
    if both.trained is None:
        return EXTRA, sentence
    return "training mode", f"{sentence}: the target's module {both.trained} is in training mode"


def other_norms(both: Both) -> Described | None:
    norms = two_norms(both.repair)
    return (NORMED, f"{both.sentence}; {norms}") if norms else None


def other_functions(both: Both) -> Described | None:
    function = two_functions(both.repair, both.activations) or two_functions(_whole_softmax(both), both.activations)
    if not function:
        return None
    if both.does != both.instead:
        return function, f"{both.sentence}: {function}"
    theirs = function.rpartition(" for ")[2]  # its own axes have other numbers
    said = f"of {both.given}, the target {both.does}{both.here}; the JAX model computes {theirs}{both.there}"
    return function, f"{said}, as the target counts the axes: {function}"


def _whole_softmax(both: Both) -> Repair:
    """Return the repair with the softmax of which it has the exponentials: where what follows divides by its sum, these restore the output, too."""
    repair = both.repair
    last = repair.source[-1] if repair.source else None
    if last is None or kind_of(last) != "exp":
        return repair
    for one in both.theirs.operations:
        quotient = one.results[0].array
        if kind_of(one) == "divide" and one.operands[0] is last.results[0] and quotient.shape == repair.want.shape:
            return replace(repair, source=(*repair.source, one), want=quotient)
    return repair


def constants(both: Both) -> Described | None:
    """The same operations with other numbers."""
    if not both.same_kinds:
        return None
    pairs = [(a, b) for (_, a), (_, b) in zip(*both.steps, strict=True)]
    numbers = [(a, b) for a, b in pairs if a is not None and b is not None and a != b]
    if not numbers:
        return None
    narrow = rounded(*numbers[0]) if len(numbers) == 1 else ""
    if narrow:
        return ROUNDED, f"{both.sentence}; {narrow}"
    mine, other = numbers[0]
    if both.does == both.instead:  # to the digits that are printed
        return CONSTANT, f"{both.sentence}; the target computes with {mine!r}, and the JAX model with {other!r}"
    return CONSTANT, both.sentence


def other_limits(both: Both) -> Described | None:
    """Both limit the values and do no more, each in one operation or in two."""
    if both.limits is None:
        return None
    ours, theirs = both.limits
    return CONSTANT, f"of {both.given}, the target {ours}{both.here}; the JAX model {theirs}{both.there}"


def side_of_the_root(both: Both) -> Described | None:
    one, two = map(_epsilon, both.steps)
    return (f"epsilon {one} the root", both.sentence) if one and two and one != two else None


def norm_of_sum(both: Both) -> Described | None:
    """A norm on one side of an addition, and on the other side of it in the JAX model."""
    sums = [_sum_and_root(arithmetic(x)) for x in (both.repair.target, both.repair.source)]
    if None in sums or sums[0] == sums[1]:
        return None
    name, said = NORM_BEHIND if sums[0] == "sum first" else NORM_IN_FRONT
    return name, f"{both.sentence}; {said}"


def _sum_and_root(steps: Sequence[Operation]) -> str | None:
    """Return whether two values are added before a root is taken, or behind it; None where there are not one such sum and one root."""
    sums = [k for k, one in enumerate(steps) if kind_of(one) == "add" and len(set(one.data)) == 2]
    roots = [k for k, one in enumerate(steps) if kind_of(one) in ("sqrt", "rsqrt")]
    if len(sums) != 1 or len(roots) != 1:
        return None
    return "sum first" if sums[0] < roots[0] else "norm first"


def another_order(both: Both) -> Described | None:
    """The same operations in another order."""
    one, two = both.steps
    if Counter(kind for kind, _ in one) != Counter(kind for kind, _ in two):
        return None
    same_numbers_too = Counter(number for _, number in one) == Counter(number for _, number in two)
    return (MOVED if same_numbers_too else CONSTANT), both.sentence


def factor(both: Both) -> Described | None:
    factors = ratios(both.repair.got, both.repair.want)
    return (FACTOR, f"{both.sentence}; {factors}") if factors else None


def sign(both: Both) -> Described | None:
    one, two = both.steps
    other_sign = {kind for kind, _ in one} ^ {kind for kind, _ in two} == {"add", "subtract"} and len(one) == len(two)
    return ("the other sign", both.sentence) if other_sign else None


def longer(both: Both) -> Described | None:
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


def interpolation(both: Both) -> Described | None:
    """Another method of interpolation, of which one side may be products with a matrix for each axis."""
    repair = both.repair
    if len(repair.given) == 1:
        ours, theirs = (method_of(x, repair.given[0]) for x in (repair.got, repair.want))
        if ours and theirs and ours != theirs:
            return INTERPOLATION, f"{both.sentence}; the target takes {ours}, and the JAX model {theirs}"
    kinds = (*both.ours.kinds(both.repair.target), *both.theirs.kinds(both.repair.source))
    return (INTERPOLATION, both.sentence) if "resize" in kinds else None


def sampling(both: Both) -> Described | None:
    """The target takes elements between others with another setting."""
    repair = both.repair
    if repair.settings is None:
        return None
    last = repair.target[-1]
    mine, theirs = said(last.settings, repair.settings), said(repair.settings, last.settings)
    whose = f"the JAX model's numbers are those of {theirs}{places(repair.source[-1:])}"
    return (
        INTERPOLATION,
        f"of {both.ours.value(last.operands[0])}, the target samples with {mine}{places([last])}; {whose}",
    )


def known_functions(both: Both) -> Described | None:
    functions = by_functions(both.repair, both.activations)
    return (functions, both.sentence) if functions else None


def one_for_another(both: Both) -> Described | None:
    """One operation in the place of another one."""
    one, two = (
        Counter(words.kinds(of)) for words, of in ((both.ours, both.repair.target), (both.theirs, both.repair.source))
    )
    more, fewer = list((one - two).elements()), list((two - one).elements())
    return (f"{more[0]} for {fewer[0]}", both.sentence) if len(more) == len(fewer) == 1 else None


def reduced(both: Both) -> Described | None:
    over = _other_axes(both)
    return (REDUCED, f"{both.sentence}; {over}") if over else None


def anything(both: Both) -> Described:
    mine, meant = ([x for x in of if x.data] for of in unshared(both.repair))
    mine, meant = ([x for x in a if not any(_is_index(x, y) for y in b)] for a, b in ((mine, meant), (meant, mine)))
    if not mine or not meant or len(both.repair.operands) == 1:
        return OTHER, both.sentence
    used, other = (
        " and ".join(dict.fromkeys(map(words.value, values)))
        for words, values in ((both.ours, mine), (both.theirs, meant))
    )
    return OTHER, f"{both.sentence}; the target uses {used}, and the JAX model {other}"


def _is_index(one: Value, two: Value) -> bool:
    """Whether one of two values is what stands at an index of an axis of the other."""
    small, large = sorted((one.array, two.array), key=lambda x: x.size)
    sizes = [(axis, n) for axis, n in enumerate(large.shape) if n * small.size == large.size]
    return any(same_numbers(small, np.take(large, k, axis)) for axis, n in sizes for k in range(n))


def _other_axes(both: Both) -> str:
    """Say over which axis the first reduction of each side goes, where both are given one value, and it differs.

    Where the two have it in other layouts and do nothing else, the axes have no numbers in common, but they may differ in length.
    """
    repair = both.repair
    one_layout = any(
        x.shape == y.array.shape and same(x, y.array) for x in repair.given for y in repair.source_operands
    )
    if not one_layout and not any(same_numbers(x, y.array) for x in repair.given for y in repair.source_operands):
        return ""
    found, lengths, kinds = [], [], set()
    for operations in (repair.target, repair.source):
        one = next((one for one in operations if kind_of(one) in ("sum", "mean", "largest", "softmax", "var")), None)
        given = (
            None
            if one is None
            else next((one.settings[k] for k in REDUCED_BY if one.settings.get(k) is not None), None)
        )
        if one is None or given is None:
            return ""
        kinds.add(kind_of(one))
        rank = one.operands[0].array.ndim
        found.append(sorted(k % rank for k in (given if isinstance(given, list | tuple) else [given])))
        lengths.append(prod(one.operands[0].array.shape[k] for k in found[-1]))
    if not one_layout and lengths[0] != lengths[1] and both.same_kinds:
        return f"the target reduces {lengths[0]} elements to each number, and the JAX model {lengths[1]}"
    if not one_layout or found[0] == found[1] or kinds == {"sum", "mean"}:
        return ""
    said = [", ".join(map(str, x)) for x in found]
    return f"the target reduces axis {said[0]}, and the JAX model axis {said[1]}"


def _epsilon(steps: Sequence[tuple[str, float | None]]) -> str:
    """Say on which side of a root a small number is added."""
    roots = [k for k, (kind, _) in enumerate(steps) if kind in ("sqrt", "rsqrt")]
    small = [k for k, (kind, number) in enumerate(steps) if kind == "add" and number is not None and 0 < number < 0.1]
    if len(roots) != 1 or not small:
        return ""
    return "inside" if small[0] < roots[0] else "outside"
