"""Mistakes with leaves that become one: with a sum, a leaf or a number of it left out, added twice, or subtracted; with joined leaves, another order; with the parts of complex numbers, the other part or sign."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.core.ops import Op, apply
from convert.core.value_ops import Add
from convert.layers.base import Step
from convert.layers.mistake import Mistake, symmetric
from convert.layers.step_tensor import assemble, maker
from convert.planning.merged_leaf import Complex, Joined, Sum
from convert.planning.plan import Plan

Array = np.ndarray[Any, np.dtype[Any]]
MOST_JOINED = 3  # leaves whose orders are tried
FACTORS = {  # mistake -> what the leaf is multiplied by, and what that gives
    "leaf of a sum left out": (0.0, "the sum without {}"),
    "leaf of a sum added twice": (2.0, "the sum with {} added twice"),
    "leaf of a sum subtracted": (-1.0, "the sum with {} subtracted"),
}
NUMBERS = {  # the same of the number that a rule adds to a leaf
    "number of a sum left out": (0.0, "the leaf without the {} that the source adds"),
    "number of a sum added twice": (2.0, "the leaf with {} added twice"),
    "number of a sum subtracted": (-1.0, "the leaf with {} subtracted"),
}


PARTS = {  # mistake with complex numbers -> what it makes of their parts, and what that gives
    "real and imaginary parts exchanged": (lambda real, imag: imag + 1j * real, "{1} + 1j * {0}"),
    "imaginary parts subtracted": (lambda real, imag: real - 1j * imag, "{0} - 1j * {1}, the complex conjugate"),
    "imaginary parts left out": (lambda real, imag: real + 0j * imag, "{0} alone"),
}


def sum_mistakes(step: Step, plan: Plan) -> Iterator[Mistake]:
    """Yield mistakes with the leaves that the plan adds up for a tensor."""
    first = next((merge for part in step.parts if isinstance(merge := plan.merges.get(part.leaf), Sum)), None)
    for k, leaf in enumerate(first.terms if first is not None else ()):
        for name, (factor, gives) in FACTORS.items():
            yield symmetric(name, gives.format(leaf), "the sum", _made(step, plan, k, factor))


def joined_mistakes(step: Step, plan: Plan) -> Iterator[Mistake]:
    """Yield mistakes with leaves that the plan puts one after the other: another order."""
    first = next((merge for part in step.parts if isinstance(merge := plan.merges.get(part.leaf), Joined)), None)
    if first is None or len(first.terms) > MOST_JOINED:
        return
    for order in itertools.islice(
        itertools.permutations(range(len(first.terms))), 1, None
    ):  # the first is that of the rule
        gives = f"the leaves in the order {', '.join(first.terms[k] for k in order)}"
        yield symmetric("leaves joined in another order", gives, "in that of the rule", _in_order(step, plan, order))


def complex_mistakes(step: Step, plan: Plan) -> Iterator[Mistake]:
    """Yield mistakes with the two leaves that have the parts of complex numbers."""
    first = next((merge for part in step.parts if isinstance(merge := plan.merges.get(part.leaf), Complex)), None)
    if first is None:
        return
    for name, (put, gives) in PARTS.items():
        yield symmetric(name, gives.format(first.real, first.imaginary), first.name, _of_parts(step, plan, put))


def _of_parts(step: Step, plan: Plan, put: Callable[[Array, Array], Array]) -> Callable[[], Array]:
    """Return what computes the tensor with complex numbers that are put together in another way."""

    def leaf_of(name: str) -> Array:
        merge = plan.merges.get(name)
        if not isinstance(merge, Complex):
            return plan.source.read(name)
        real, imaginary = (plan.checkpoint.read(leaf).astype(np.float64) for leaf in (merge.real, merge.imaginary))
        return put(real, imaginary).astype(merge.spec.dtype)

    return lambda: assemble(step.parts, [apply(part.ops, leaf_of(part.leaf)) for part in step.parts])


def _in_order(step: Step, plan: Plan, order: Sequence[int]) -> Callable[[], Array]:
    """Return what computes the tensor with the leaves in another order."""

    def leaf_of(name: str) -> Array:
        merge = plan.merges.get(name)
        if not isinstance(merge, Joined):
            return plan.source.read(name)
        read = [plan.checkpoint.read(merge.terms[k]) for k in order]
        return np.asarray(np.concatenate(read, merge.axis), merge.spec.dtype)

    return lambda: assemble(step.parts, [apply(part.ops, leaf_of(part.leaf)) for part in step.parts])


def number_mistakes(step: Step, plan: Plan) -> Iterator[Mistake]:
    """Yield mistakes with the number that a rule adds to the leaf of a tensor."""
    numbers = {part.rule.numbers.get(step.role, 0.0) for part in step.parts if part.rule is not None}
    if len(numbers) != 1 or not (number := numbers.pop()):
        return
    for name, (factor, gives) in NUMBERS.items():
        parts = tuple(replace(part, ops=_scaled(part.ops, number, factor)) for part in step.parts)
        yield symmetric(name, gives.format(f"{number:g}"), "the sum", maker(step, plan.source, parts))


def _scaled(ops: tuple[Op, ...], number: float, factor: float) -> tuple[Op, ...]:
    """Return the operations with a multiple of the number that they add first."""
    at = ops.index(Add(number))
    return (*ops[:at], Add(factor * number), *ops[at + 1 :])


def _made(step: Step, plan: Plan, k: int, factor: float) -> Callable[[], Array]:
    """Return what computes the tensor with the k-th leaf of each sum multiplied by a factor."""

    def leaf_of(name: str) -> Array:
        merge = plan.merges.get(name)
        if not isinstance(merge, Sum):
            return plan.source.read(name)
        scaled = merge.terms[k]
        return merge.make(lambda leaf: plan.checkpoint.read(leaf) * np.float64(factor if leaf == scaled else 1))

    return lambda: assemble(step.parts, [apply(part.ops, leaf_of(part.leaf)) for part in step.parts])
