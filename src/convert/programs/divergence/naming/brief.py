"""Say a difference in a few words: at which layer of the target, what it computes there, and what the JAX model computes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.naming.both import Both, steps
from convert.programs.divergence.naming.by_functions import EXTRA
from convert.programs.divergence.naming.operations import CONSTANT, FACTOR
from convert.programs.divergence.shared_values import same_numbers
from convert.programs.divergence.words import Words, arithmetic, layer_of
from convert.programs.program import Operation, Value, users_of

MOST = 3  # steps that are listed
STEPS = 40  # operations in front of a value among which the nearest layer is looked for
FOR, WITH = " for ", " with "
OTHER_RESULTS = ", with other results"
STEP = re.compile(r", (?![^\[(]*[\])])")  # between two steps, and not within a shape
PLACES = re.compile(r" \([^()]*:[0-9]+[^()]*\)")  # lines of the code, as `places` writes them
TAIL = ": the target, the JAX model"  # what is left where both have nothing but places
CLAUSES = 2
MOVES = (LAYOUT, "part")
NORM = {"sqrt", "rsqrt"}
MEANS = {"sum", "mean"}


def brief(both: Both, name: str, problem: str, more: int) -> str:
    """Say what a repair undoes.

    Args:
        name, problem: of it alone.
        more: how many further differences there are.
    """
    repair = both.repair
    further = f"; and {more} more" if more > 0 else ""
    what = _what(both, name, problem)
    ahead = repair.layer or next(iter(both.user), None)
    before = ahead.module if ahead is not None else ""
    at = "" if repair.layer is not None else layer(repair.target, repair.operands, both.ours)
    own = repair.layer is not None and f" {before}." in what  # named by a weight of it
    if not at and before and before not in what.split() and not own:
        at = f"in front of {before}: "
    return f"{at}{what}{further}"


def brief_of_entry(entry: Operation, instead: Sequence[Operation], ours: Words, theirs: Words) -> str:
    """Say what an operation of the target computes, and what the source computes of the same."""
    at, does = layer([entry], entry.data, ours), ours.verb(entry)
    other = theirs.chain(instead[:1])
    if not instead:
        given = " and ".join(dict.fromkeys(map(ours.value, entry.data)))
        return f"{at}of {given}, the target {does}; no step of the JAX model was found that gives the same"
    if (values := picked(entry, instead[0], ours, theirs)) is not None:
        return f"{at}the target {does} of {values[0]}, and the JAX model of {values[1]}"
    return f"{at}{compared(does, other)}"


def likest(entry: Operation, instead: Sequence[Operation], theirs: Words) -> list[Operation]:
    """Return what the source computes of the values of an entry; what is of the entry's kind is first, also where it takes a part of them before."""
    kind, users, seen = kind_of(entry), users_of(theirs.operations), set[Operation]()
    waiting = list(instead)
    while waiting and len(seen) < STEPS:
        one = waiting.pop(0)
        if one in seen:
            continue
        seen.add(one)
        if kind_of(one) == kind:
            return [one, *(other for other in instead if other is not one)]
        if kind_of(one) in MOVES:
            waiting += [user for value in one.results for user in users.get(value, ())]
    return list(instead)


def picked(one: Operation, two: Operation, ours: Words, theirs: Words) -> tuple[str, str] | None:
    """Name the values of which both sides pick elements, where these are different ones, as where both have the same indices alone."""
    if {kind_of(one), kind_of(two)} != {"pick"}:
        return None
    of = [next((v for v in operation.data if v.array.dtype.kind == "f"), None) for operation in (one, two)]
    if of[0] is None or of[1] is None or same_numbers(of[0].array, of[1].array):
        return None
    return ours.value(of[0]), theirs.value(of[1])


def compared(ours: str, theirs: str) -> str:
    """Say what both do; that the results differ, where both do the same, or by parameters of other names."""
    if ours == theirs:
        return f"the target {ours}, and so does the JAX model{OTHER_RESULTS}"
    if WITH in ours and WITH in theirs and ours.split(WITH)[0] == theirs.split(WITH)[0]:
        return f"the target {ours}, and the JAX model with {theirs.split(WITH, 1)[1]}{OTHER_RESULTS}"
    return f"the target {ours}{_mark(ours)} the JAX model {theirs}"


def _alone(who: str, does: str, other: str) -> str:
    """Say what one of the two does and the other does not."""
    return f"{who} {does}{_mark(does)} {other} does not"


def _mark(steps: str) -> str:
    """Return what stands between steps of one model and what follows: several have commas between them."""
    return ";" if STEP.search(steps) else ","


def without_places(problem: str) -> str:
    """Return a sentence without the lines of the code."""
    return PLACES.sub("", problem)


def layer(operations: Sequence[Operation], given: Sequence[Value], words: Words) -> str:
    """Return the layer of the target in which operations are, or the nearest in front of what they are given, with a colon; or nothing."""
    inside = next((one.module for one in operations if one.module), "")
    if inside:
        return f"in {inside}: "
    todo = list(given)
    for _ in range(STEPS):
        if not todo:
            break
        before = words.producer.get(todo.pop(0))
        own = (
            "" if before is None or kind_of(before) == LAYOUT else before.module
        )  # a view of what comes from elsewhere
        if before is not None and (name := layer_of(before, words.producer) or own):
            return f"behind {name}: "
        todo += before.data if before is not None else ()
    return ""


def _what(both: Both, name: str, problem: str) -> str:
    repair = both.repair
    if FOR in name:
        ours, theirs = name.split(FOR, 1)
        return f"the target computes {ours}, the JAX model {theirs}"
    if problem == f"{both.only_theirs}; {both.as_it_is}":
        return _alone("the JAX model", _short(repair.source, both.instead), "the target")
    if not repair.source and name == EXTRA:
        pair = both.ours.of_two(repair.target, ())
        return _alone("the target", pair or _short(repair.target, both.does), "the JAX model")
    if both.limits is not None and name == CONSTANT:
        return "the target {}, the JAX model {}".format(*both.limits)
    detail = problem.removeprefix(both.sentence).lstrip(";: ")
    by_several = name == FACTOR and "," in detail and both.does != both.instead  # what the two divide by tells more
    if detail and not by_several:
        return "; ".join(PLACES.sub("", detail).removesuffix(TAIL).split("; ")[:CLAUSES])
    return _apart(both) or compared(_begin(both.does), _begin(both.instead))


def _begin(does: str) -> str:
    """Return the first of many steps."""
    steps = STEP.split(does)
    return does if len(steps) <= MOST else f"{', '.join(steps[:MOST])} and more"


def _apart(both: Both) -> str:
    """Say the steps in which the sides differ, without those that they begin and end with in common; empty where they are many."""
    sides = [arithmetic(x) for x in (both.repair.target, both.repair.source)]
    kinds = [
        [(step, words.verb(one) if kind_of(one) == "pooling" else "") for step, one in zip(steps(x), x, strict=True)]
        for words, x in zip((both.ours, both.theirs), sides, strict=True)
    ]
    common = [_common(*kinds), _common(*(x[::-1] for x in kinds))]
    common[1] = min(common[1], min(map(len, sides)) - common[0])
    left = [x[common[0] : len(x) - common[1]] for x in sides]
    if not any(left) or (max(map(len, left)) > MOST and all(left)):
        return ""
    ours, theirs = (words.chain(x) if x else "" for words, x in zip((both.ours, both.theirs), left, strict=True))
    if not ours or not theirs:
        who, does, other = (
            ("the JAX model", _short(left[1], theirs), "the target")
            if theirs
            else ("the target", _short(left[0], ours), "the JAX model")
        )
        return _alone(who, does, other)
    return compared(ours, theirs)


def _common(one: Sequence[object], two: Sequence[object]) -> int:
    """Return how many items two lists begin with in common."""
    return next((k for k, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _short(operations: Sequence[Operation], does: str) -> str:
    """Say what operations do, those of a norm in one word."""
    kinds = {kind_of(one) for one in arithmetic(operations)}
    return "computes a norm" if does.count(", ") >= MOST and kinds & NORM and kinds & MEANS else _begin(does)
