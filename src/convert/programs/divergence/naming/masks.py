"""Which elements each of two programs masks: with a number that a softmax hides, with zeros, or by a product with zeros and ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from convert.programs.divergence.graph import root
from convert.programs.divergence.kinds import kind_of
from convert.programs.divergence.layouts import same
from convert.programs.divergence.naming.both import Both, line, unshared
from convert.programs.divergence.naming.by_functions import EXTRA, MISSING
from convert.programs.divergence.naming.functions import mask_offsets
from convert.programs.divergence.naming.operations import Described
from convert.programs.divergence.shared_values import HIDDEN, same_numbers
from convert.programs.divergence.words import Words, arithmetic, places, user_of
from convert.programs.program import Operation

Array = np.ndarray[Any, np.dtype[Any]]
MASK = "another mask"


def other_mask(both: Both) -> Described | None:
    """Both sides hide elements of what they compute here, and not the same ones."""
    hidden = [np.abs(x) >= HIDDEN for x in (both.repair.got, both.repair.want)]
    if not hidden[0].any() or not hidden[1].any() or not (hidden[0] != hidden[1]).any():
        return None
    return MASK, f"{_difference(*hidden)}{both.here}; {_applied_in_jax(both)}"


def masked_otherwise(both: Both) -> Described | None:
    """Both mask the same value, each in its own way; the target there, in front of the place that is replaced, or behind it."""
    repair = both.repair
    theirs = _floating(repair.source)
    mine = _floating(repair.target) if repair.target else _mask_of_the_target(both)
    if theirs is None or mine is None or _masks(theirs) is None or _masks(mine) is None:
        return None
    meant, hidden = _hidden(theirs, both.theirs), _hidden(mine, both.ours)
    value = next(x for x in mine.data if x.array.dtype.kind == "f")
    if meant.shape != hidden.shape:  # a convolution of torch has the channels in front
        hidden = _turned(hidden, value.array, [x.array for x in theirs.data])
    if meant.shape != hidden.shape or (hidden == meant).all():
        return None
    return (
        MASK,
        f"both mask {both.ours.value(value)}: {_difference(hidden, meant)}{places([mine])}; {_applied_in_jax(both)}",
    )


def masked_alone(both: Both) -> Described | None:
    """Both compute the same, one of them of what it has masked before."""
    repair = both.repair
    (mine, other) = unshared(repair)
    if not both.same_kinds or len(mine) != 1 or len(other) != 1:
        return None
    for value, beside, words, name in (
        (other[0], mine[0], both.theirs, MISSING),
        (mine[0], other[0], both.ours, EXTRA),
    ):
        made = words.producer.get(root(value, words.producer))
        if made is None or _masks(made) is None or not any(same_numbers(v.array, beside.array) for v in made.data):
            continue
        sides = ("JAX model", "target") if name == MISSING else ("target", "JAX model")
        return (
            name,
            f"{both.sentence}; the {sides[0]} masks {both.ours.value(mine[0])} in front of it{places([made])}, the {sides[1]} does not",
        )
    return None


def _turned(hidden: Array, given: Array, like: Sequence[Array]) -> Array:
    """Return what is hidden of a value, with the axes in the order in which it is one of some others; as it is where it is none."""
    orders = itertools.permutations(range(hidden.ndim) if hidden.shape == given.shape else ())
    return next((hidden.transpose(k) for k in orders if k and any(same(given.transpose(k), x) for x in like)), hidden)


def _floating(operations: Sequence[Operation]) -> Operation | None:
    """Return the operation among some that computes numbers; None where several do: the others compute a mask."""
    found = [one for one in arithmetic(operations) if one.results[0].array.dtype.kind == "f"]
    return found[0] if len(found) == 1 else None


def _mask_of_the_target(both: Both) -> Operation | None:
    """Return the operation that masks the value that is replaced; None if the target does not mask it."""
    value = root(both.repair.operands[0], both.ours.producer)
    made = both.ours.producer.get(value)
    filled = value.array.shape == both.repair.given[0].shape and (value.array != both.repair.given[0]).any()
    ways = [made, *both.user] if made is not None and filled else both.user
    return next((one for one in ways if _masks(one) is not None), None)


def _hidden(operation: Operation, words: Words) -> Array:
    """Return which elements an operation hides, and those that mask its result further."""
    hidden = _masks(operation)
    assert hidden is not None
    for further in user_of(operation.results[0], words.operations):
        if _masks(further) is not None and further.results[0].array.shape == hidden.shape:
            return np.asarray(hidden | _hidden(further, words))
    return hidden


def _masks(operation: Operation) -> Array | None:
    """Return which elements an operation hides of a value; None where it hides none, or does something else."""
    made = operation.results[0].array
    kind = kind_of(operation)
    for at, value in enumerate(operation.operands if made.dtype.kind == "f" else ()):
        beside = value.array
        if kind == "mask" and value.data and beside.shape == made.shape and beside.dtype.kind == "f":
            hidden: Array = made != beside
        elif kind == "multiply" and np.isin(beside, (0, 1)).all():
            hidden = beside == 0
        elif kind == "add" and (np.abs(beside) >= HIDDEN).any():
            hidden = np.abs(beside) >= HIDDEN
        else:
            continue
        if hidden.any() and (kind == "mask" or _others_are_data(operation, at)):
            return np.broadcast_to(hidden, made.shape)
    return None


def _others_are_data(operation: Operation, at: int) -> bool:
    return any(value.data for k, value in enumerate(operation.operands) if k != at)


def _difference(hidden: Array, theirs: Array) -> str:
    """Say how two masks differ; true is what is hidden."""
    ours, theirs = ~hidden, ~theirs
    one, two = mask_offsets(ours), mask_offsets(theirs)
    if one is None or two is None:
        more, fewer = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
        each = _of_each(ours, theirs)
        return f"the target shows {_positions(more // each)} that the JAX model hides, and hides {fewer // each} that it shows"
    return f"in the target a position sees {_reach(*one)}; in the JAX model, {_reach(*two)}"


def _of_each(one: Array, two: Array) -> int:
    """Return how many elements a position has: the features, heads and queries for which both masks are the same."""
    equal = (all((x == x.take([0], axis)).all() for x in (one, two)) for axis in range(one.ndim))
    return prod(size for size, of_all in zip(one.shape, equal, strict=True) if of_all)


def _positions(count: int) -> str:
    return "1 position" if count == 1 else f"{count} positions"


def _reach(low: int, high: int) -> str:
    ahead = f", and up to {-low} behind it" if low < 0 else ""
    return f"itself and up to {high} in front of it{ahead}" if low <= 0 else f"those {low} to {high} in front of it"


def _applied_in_jax(both: Both) -> str:
    return f"the JAX model's mask is applied at {line(both.repair.source)}"
