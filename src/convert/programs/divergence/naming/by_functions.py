"""Name a difference by the functions that the two sides compute, of one operation or of several."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.programs.divergence.graph import root
from convert.programs.divergence.kinds import ELEMENTWISE, kind_of
from convert.programs.divergence.layouts import same
from convert.programs.divergence.naming.functions import Function, computed, steps_in_functions
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.words import Words, arithmetic, scalar
from convert.programs.program import Operation

Array = np.ndarray[Any, np.dtype[Any]]
MISSING, EXTRA = "operation missing", "operation that the JAX model lacks"
MOVED = "operations in another order"
EXCHANGED = "operands exchanged"
SCALED = ("elu",)  # operations that compute another function with other numbers: selu
NEAR = 0.05  # relative; as far apart are values of one function that the search took for equal by their sums


def chain(
    words: Words,
    operations: Sequence[Operation],
    given: Sequence[Array],
    made: Array,
    activations: Mapping[str, Function],
) -> str:
    """Say what operations do: by the name of the function, where they are the operations of a known one."""
    steps = arithmetic(operations)
    told = len(steps) > 1 or any(words.verb(one).startswith("runs ") or kind_of(one) in SCALED for one in steps)
    name = computed(made, given[0], activations) if told and len(given) == 1 and not same(made, given[0]) else ""
    if name:
        return f"computes {name}"
    functions = steps_in_functions(steps, activations)
    if not any(len(ones) > 1 for _, ones in functions):
        return words.chain(operations)
    verbs: list[str] = []
    for several, group in itertools.groupby(functions, key=lambda step: len(step[1]) > 1):
        each = list(group)
        verbs += [f"computes {name}" for name, _ in each] if several else words.verbs([ones[0] for _, ones in each])
    return words.listed(verbs)


def function_in_front(repair: Repair, ours: Words, activations: Mapping[str, Function]) -> str:
    """Name two functions of one value, where what the target's gives goes into the JAX model's: softplus is relu and more."""
    operation = ours.producer.get(root(repair.operands[0], ours.producer))
    values = () if operation is None else operation.data or tuple(v for v in operation.operands if v.leaves)
    if operation is None or len(values) != 1 or kind_of(operation) not in ELEMENTWISE:
        return ""
    before = values[0].array
    if same(repair.given[0], before):
        return ""
    got, want = (computed(x, before, activations) for x in (repair.given[0], repair.want))
    return f"{got} for {want}" if got and want and got != want else ""


def two_functions(repair: Repair, activations: Mapping[str, Function]) -> str:
    """Name the functions of one value that the two compute, as ``relu for silu``; empty where they are not known."""
    by_size = [x for x in repair.given if x.dtype.kind == "f"]
    for value in by_size:
        for got, want in _pairs(repair, value):
            ours, theirs = (computed(x, value, activations) for x in (got, want))
            if ours and theirs and ours != theirs:
                return f"{ours} for {theirs}"
    if len(by_size) == 2:
        found = []
        for x in (repair.got, repair.want):
            found += [
                (name, gate is by_size[0])
                for gate, other in (by_size, by_size[::-1])
                for name, function in activations.items()
                if gate.shape == other.shape and same(function(gate) * other, x)
            ][:1]
        if len(found) == 2 and found[0] != found[1]:
            (ours, _), (theirs, _) = found
            return EXCHANGED if ours == theirs else f"{ours} for {theirs}"
    return ""


def same_function(repair: Repair, activations: Mapping[str, Function]) -> bool:
    """Whether both compute one known function, each of its own value, and get nearly the same numbers in the same order."""
    if len(repair.given) != 1 or len(repair.source_operands) != 1 or not repair.target or not repair.source:
        return False
    if repair.got.shape != repair.want.shape or repair.got.dtype.kind != "f" or repair.want.dtype.kind != "f":
        return False
    if np.abs(repair.got - repair.want).max(initial=0) > NEAR * np.abs(repair.want).max(initial=0):
        return False
    ours = computed(repair.got, repair.given[0], activations)
    return bool(ours) and ours == computed(
        repair.source[-1].results[0].array, repair.source_operands[0].array, activations
    )


def _pairs(repair: Repair, value: Array) -> Iterator[tuple[Array, Array]]:
    """Yield what the two sides give; then, where that is g(x) in an activation x * g(x), the activation.

    The exact GELU of JAX is x * erfc(-x / sqrt(2)) / 2, and the two sides may differ in g alone.
    """
    yield repair.got, repair.want
    if repair.got.shape == repair.want.shape == value.shape:
        for x in (value, value / 2):
            yield x * repair.got, x * repair.want


def by_functions(repair: Repair, activations: Mapping[str, Function]) -> str:
    """Name a difference of operations of which some make a known function; empty if that does not tell."""
    one, two = (
        [(name or kind_of(ones[-1]), None if name else scalar(ones[-1]), bool(name)) for name, ones in steps]
        for steps in (steps_in_functions(arithmetic(x), activations) for x in (repair.target, repair.source))
    )
    if Counter(one) == Counter(two):
        return MOVED
    more, fewer = list((Counter(one) - Counter(two)).elements()), list((Counter(two) - Counter(one)).elements())
    if len(more) == len(fewer) == 1 and more[0][2] and fewer[0][2]:
        return f"{more[0][0]} for {fewer[0][0]}"
    if len(more) == 1 and more[0][2] and (product := _product_of_two(fewer)):
        return f"{more[0][0]} for {product}"
    if len(fewer) == 1 and fewer[0][2] and (product := _product_of_two(more)):
        return f"{product} for {fewer[0][0]}"
    kinds = [[kind for kind, _, _ in steps] for steps in (one, two)]
    for few, many, name in ((kinds[0], kinds[1], MISSING), (kinds[1], kinds[0], EXTRA)):
        if few and len(few) < len(many) and within(few, many):
            return name
    return ""


def _product_of_two(steps: Sequence[tuple[str, float | None, bool]]) -> str:
    """Name the product of two functions; empty if it is none."""
    names = sorted(name for name, _, function in steps if function)
    rest = [(kind, number) for kind, number, function in steps if not function]
    return f"{names[0]} times {names[1]}" if len(names) == 2 and rest == [("multiply", None)] else ""


def within(few: Sequence[str], many: Sequence[str]) -> bool:
    """Whether words stand among others in their order."""
    rest = iter(many)
    return all(word in rest for word in few)
