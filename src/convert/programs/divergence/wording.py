"""Name a divergence, and say it in a sentence with the place in both programs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.naming.both import Both, line, steps, unshared
from convert.programs.divergence.naming.brief import (
    OTHER_RESULTS,
    brief,
    brief_of_entry,
    layer,
    likest,
    picked,
    without_places,
)
from convert.programs.divergence.naming.by_functions import (
    EXCHANGED,
    EXTRA,
    MISSING,
    MOVED,
    same_function,
)
from convert.programs.divergence.naming.description import describe
from convert.programs.divergence.naming.details import (
    FUNCTION,
    PARAMETER,
    PART,
    other_function,
    padding_counts,
)
from convert.programs.divergence.naming.functions import Function, computed, steps_in_functions
from convert.programs.divergence.naming.loops import other_end, other_start
from convert.programs.divergence.naming.operands import AXES, OPERAND, ORDER
from convert.programs.divergence.naming.operations import CONSTANT, NORM_BEHIND, NORM_IN_FRONT, OTHER
from convert.programs.divergence.naming.same_way import with_same_steps
from convert.programs.divergence.naming.selections import other_selection
from convert.programs.divergence.naming.tables import other_numbers
from convert.programs.divergence.naming.whole_functions import in_whole_functions
from convert.programs.divergence.naming.windows import FLIPPED, PADDING, TRANSPOSED, windows_of_entry
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.search import Divergence
from convert.programs.divergence.shared_values import same_numbers
from convert.programs.divergence.words import Words, arithmetic, names_of, places
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
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


MOST_STEPS = 3  # that the advice repeats
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
        brief: what the two compute, at which layer; without the lines of the code.
        order: whether the two differ in the operands or the order of elements alone, which wrong rules may give, too.
    """

    name: str
    problem: str
    fix: str
    brief: str = ""
    order: bool = False


@np.errstate(all="ignore")
def named(
    divergence: Divergence,
    source: Program,
    target: Program,
    activations: Mapping[str, Function],
    training: Collection[str] = (),
    lacking: Collection[str] = (),
    doubtful: Collection[str] = (),
) -> Named:
    """Name a divergence.

    Args:
        activations: known ones by name.
        training: modules of the target that are in training mode.
        lacking: parameters of the target whose numbers are not those of the source, so that what they give shows nothing.
        doubtful: those whose numbers may be wrong: no further difference that depends on them is named.
    """
    ours, theirs = (Words(p.operations, names_of(p)) for p in (target, source))
    if not divergence.proven:
        begin = other_end(source, target, ours, theirs) or other_start(source, target, lacking)
        if begin:
            return Named("", begin, "", without_places(begin))
        return _unproven(divergence, ours, theirs, activations, training, lacking, doubtful, target.buffers)
    repairs = in_whole_functions(divergence.repairs, ours, theirs, activations)
    repairs = tuple(with_same_steps(one, ours, theirs) for one in repairs)
    described: dict[tuple[str, str], tuple[Repair, str, str]] = {}
    seen: set[Any] = set()
    left_out: list[str] = []
    for repair in repairs:
        what = tuple(tuple((one.name, one.where) for one in ones) for ones in (repair.target, repair.source))
        if what in seen and repair.target and repair.source:
            continue  # the next step of a loop
        if repair is not repairs[0] and same_function(repair, activations):
            continue  # what the first difference, or weights that were guessed, lead to
        if repair is not repairs[0] and _with_operations_of(repair, repairs[0]):
            continue  # the first difference, where its result is used again
        seen.add(what)
        name, problem = _described(Both(repair, ours, theirs, activations, training))
        moved_by = {name, *(which for _, which, _ in described.values())} == {MISSING, EXTRA}
        if described and not moved_by and (unsure := _behind(repair.operands, repair.target, ours, doubtful)):
            left_out = left_out or unsure
            continue
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
    if moved := next((said for which, said in (NORM_BEHIND, NORM_IN_FRONT) if name == which and len(names) > 1), ""):
        problems[0] = f"{moved}: {problems[0]}"
    if counted:
        problems.append("the padding counts in the target's mean, and not in the JAX model's")
    problem = "; ".join(problems[:2] if not counted else problems) + (
        f"; and {len(problems) - 2} more" if len(problems) > 2 and not counted else ""
    )
    problem += _not_compared(left_out)
    by_rules = all(one in BY_RULES for one in names) or not is_clear(name) or any(map(_of_layers, repairs))
    first = Both(repairs[0], ours, theirs, activations, training)
    short = moved or brief(first, *chosen[0][1:], len(problems) - 1)
    return Named(name, problem, _fix(first, chosen[0][2]), short, by_rules)


def _described(both: Both) -> tuple[str, str]:
    """Name a repair and say what it undoes; where that is not clear, also which elements each side takes."""
    name, problem = describe(both)
    which = other_selection(both.repair, both.ours, both.theirs) if name in UNCLEAR else ""
    return (PART, f"{problem}; {which}") if which and which not in problem else (name, problem)


def _behind(
    operands: Sequence[Value], operations: Sequence[Operation], words: Words, doubtful: Collection[str]
) -> list[str]:
    """Return the doubtful parameters that values, or what operations are given, are computed from."""
    waiting = [*operands, *(v for one in operations for v in one.operands)]
    seen: set[Value] = set()
    while doubtful and waiting:
        value = waiting.pop()
        if value not in seen:
            seen.add(value)
            before = words.producer.get(value)
            waiting += before.operands if before is not None else ()
    return sorted({words.names[v] for v in seen if v.of_parameters and v in words.names}.intersection(doubtful))


def _not_compared(unsure: Sequence[str]) -> str:
    """Say that nothing is compared that depends on parameters for which several leaves are possible."""
    if not unsure:
        return ""
    return f"; what follows is not compared, as {_many(unsure)} open"


def _with_operations_of(repair: Repair, first: Repair) -> bool:
    """Whether a repair stands for operations that another one stands for, too."""
    sides = ((repair.target, first.target), (repair.source, first.source))
    return any(one in others and kind_of(one) != LAYOUT for ones, others in sides for one in ones)


def _crossed(one: Repair, two: Repair) -> bool:
    """Whether each of two operations uses what the other one should."""
    mine, meant = unshared(one)
    other, other_meant = unshared(two)
    pairs = ((mine, other_meant), (meant, other))
    return all(any(same_numbers(x.array, y.array) for x in a for y in b) for a, b in pairs)


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
    if all(any(kind in ("sqrt", "rsqrt") for kind, _ in steps(one.source or one.target)) for one in sides):
        return (NORM_BEHIND if sides[0].index < sides[1].index else NORM_IN_FRONT)[0]
    one, two = (steps(x.source or x.target) for x in sides)
    begins = [one.operands[0].array for one in sides]
    if one == two and same_numbers(*begins):  # of one value, both do the same with other parts of it
        return PART
    told = [steps_in_functions(arithmetic(x.source or x.target), activations) for x in sides]
    kinds = [[name or kind_of(ones[-1]) for name, ones in steps] for steps in told]
    if kinds[0] == kinds[1] and any(name for name, _ in told[0]):
        return MOVED
    if [kind for kind, _ in one] != [kind for kind, _ in two]:
        return ""
    return MOVED if one == two else CONSTANT


def _fix(both: Both, said: str) -> str:
    """Say what to change: where in the target, and what the JAX model computes there.

    Args:
        said: what is wrong. Where it is not in what the operations compute of the data, but in the numbers that they are given,
            the advice does not repeat the operations.
    """
    repair = both.repair
    if repair.layer is not None and not repair.source:
        name = repair.layer.module or line([repair.layer])
        return f"give {name} {both.theirs.value(repair.source_operands[0])}, as the JAX model does, or correct the reference"
    if not repair.target and not repair.source:
        return "give the target's code there what the JAX model has, or correct the reference"
    if not repair.target:
        user = repair.layer or next(iter(both.user), None)
        at = f" in front of {user.module or line([user])}" if user is not None else ""
        return f"compute in the target{at} what the JAX model computes at {line(repair.source)}{_what(both.instead, said)}, or correct the reference"
    if not repair.source:
        return f"remove this from {line(repair.target)}{_what(both.does, said)}, or add it to the reference"
    instead = _what(both.instead, said) if both.instead != both.does else ""
    return f"make {line(repair.target)} compute what the JAX model computes at {line(repair.source)}{instead}, or correct the reference"


def _what(does: str, said: str) -> str:
    """Return what is computed, in brackets, where that is short, and the sentence says it, too."""
    return f" (it {does})" if does.count(", ") < MOST_STEPS and does in said else ""


def _unproven(
    divergence: Divergence,
    ours: Words,
    theirs: Words,
    activations: Mapping[str, Function],
    training: Collection[str],
    lacking: Collection[str],
    doubtful: Collection[str],
    buffers: Collection[str],
) -> Named:
    """Say at which operation the target departs, where no value of the source's restores the output."""
    entry = divergence.entry
    if entry is None:
        return Named("", "", "")
    instead = likest(entry, divergence.instead, theirs)
    said, short = "", brief_of_entry(entry, instead, ours, theirs)
    if divergence.repairs and divergence.repairs[0].index <= ours.operations.index(entry):
        first = Both(divergence.repairs[0], ours, theirs, activations, training)
        name, said = _described(first)
        short = brief(first, name, said, 0)
    own = {leaf for v in entry.operands if v.of_parameters for leaf in v.leaves}
    unknown = " and ".join(sorted(own.intersection(lacking)))
    unsure = _behind(entry.data, [entry], ours, doubtful)
    given = " and ".join(dict.fromkeys(ours.value(v) for v in entry.data))
    pair = ours.of_two_in([entry])
    at = (
        f"the target {pair}{places([entry])}" if pair else f"of {given}, the target {ours.verb(entry)}{places([entry])}"
    )
    if unknown and said:
        return Named("", f"{said}; what follows is not compared, as nothing was found for {unknown}", "", short)
    if said and unsure:
        return Named("", said + _not_compared(unsure), "", short)
    windows = windows_of_entry(entry, instead, ours, theirs)
    if windows and not said:
        return Named("", f"of {given}, {windows}{places([entry])}", "", f"{layer([entry], entry.data, ours)}{windows}")
    if unknown:
        said = f"nothing was found for {unknown}: {at}"
    else:
        said += "; more may differ behind it: " if said else ""
        said += f"the first operation of the target that is given values of the JAX model and gives none of its values: {at}"
    if instead:
        does = theirs.chain(instead[:1])
        values = picked(entry, instead[0], ours, theirs)
        theirs_of = f"of the same, the JAX model {does}" if values is None else f"the JAX model {does} of {values[1]}"
        said += f"; {theirs_of}{places(instead[:1])}"
        if divergence.instead and divergence.instead[0] not in instead[:1]:  # which may be the difference
            others = divergence.instead[:1]
            said += f"; the JAX model {theirs.chain(others)} of it, too{places(others)}"
    said += f"; {windows}" if windows else ""
    other = instead and (
        other_function(entry, instead[0], ours, theirs) or other_numbers(entry, instead[0], ours, buffers)
    )
    if other and not unknown:
        said, short = f"{said}; {other}", f"{layer([entry], entry.data, ours)}{other}"
    elif unsure or (unknown and instead and kind_of(instead[0]) == kind_of(entry)):
        doubt = _may_be_equal(unknown, unsure)
        said, short = said + doubt, short.removesuffix(OTHER_RESULTS) + doubt
    return Named("", said, "", short)


def _may_be_equal(unknown: str, unsure: Sequence[str]) -> str:
    """Say why a place may give other results although the code of both is the same there.

    Args:
        unknown: parameters of the operation for which nothing was found.
        unsure: those in front of it that are open.
    """
    if not unsure:
        return f"; they may be the same, as nothing was found for {unknown}"
    return f"; what reaches it is not sure, as {_many(unsure)} open"


def _many(unsure: Sequence[str]) -> str:
    return f"{unsure[0]} and {len(unsure) - 1} more are" if len(unsure) > 1 else f"{unsure[0]} is"
