"""Carry out a loop of a lifted run by the primitives of its first iterations, without running its Python code for each further one.

`jax.lax.scan` traces its body once, so that all iterations are the same primitives. Two iterations run as Python. Where both bound the
same primitives to the same operands, those after them repeat these primitives. What is no argument of the body and no result
within it is a constant of the loop: it must be equal in both. A body in which a value chose a branch is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Protocol
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from convert.numerics.jax_observer import Step
from convert.numerics.same_trace import same


@dataclass(eq=False)
class Tape:
    """What one iteration bound.

    Attributes:
        steps: in order, each with what the observer said of it.
        chose: whether a value chose a branch, or how often a loop within it runs.
    """

    steps: list[tuple[Step, Any]] = field(default_factory=list)
    chose: bool = False


class Lifter(Protocol):
    """What evaluates and observes primitives; `tapes` receive them."""

    tapes: list[Tape]

    def repeat(self, step: Step, place: Any, operands: Sequence[Any]) -> list[Any]:
        """Evaluate the primitive of a step on other operands; return its results."""


@dataclass(frozen=True)
class _Number:
    """Stands for an argument of the body, or a result within it."""

    number: int


@dataclass(frozen=True, eq=False)
class _Iteration:
    """An iteration that ran as Python.

    Attributes:
        arguments: its arguments, flat; one that stands twice has the number of its first place.
        tape: what it bound.
        operands: of each step: numbers, and constants.
        outputs: of the body, flat, likewise; `tree` is their structure.
    """

    arguments: tuple[int, ...]
    tape: Tape
    operands: Sequence[Sequence[Any]]
    outputs: Sequence[Any]
    tree: Any

    def like(self, other: _Iteration) -> bool:
        """Whether another one bound the same."""
        return (
            (self.arguments, self.tree, len(self.operands)) == (other.arguments, other.tree, len(other.operands))
            and all(
                one.primitive is two.primitive and same(dict(one.params), dict(two.params))
                for (one, _), (two, _) in zip(self.tape.steps, other.tape.steps, strict=True)
            )
            and all(map(_all_equal, self.operands, other.operands))
            and _all_equal(self.outputs, other.outputs)
        )


@contextmanager
def choices_observed(observe: Callable[[Any], Any]) -> Iterator[None]:
    """Tell which arrays become a Python truth value or index: in the eager mode, loops and branches are Python."""
    kind: Any = type(jnp.zeros(()))

    def observed(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def convert(self: Any) -> Any:
            made = method(self)  # a float is no index: JAX tries, and nothing is chosen
            observe(self)
            return made

        return convert

    with (
        mock.patch.object(kind, "__bool__", observed(kind.__bool__)),
        mock.patch.object(kind, "__int__", observed(kind.__int__)),
        mock.patch.object(kind, "__index__", observed(kind.__index__)),
    ):
        yield


def repeating(scan: Callable[..., Any], lifter: Lifter) -> Callable[..., Any]:
    """Return `jax.lax.scan`, which runs the body as Python, with a body that is repeated by its primitives."""

    @wraps(scan)
    def repeated(f: Any, *args: Any, **kwargs: Any) -> Any:
        return scan(_body(f, lifter) if callable(f) else f, *args, **kwargs)

    return repeated


def _body(function: Callable[..., Any], lifter: Lifter) -> Callable[..., Any]:
    last: list[_Iteration] = []
    found: list[_Iteration] = []

    @wraps(function)
    def body(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        if found and _places(leaves) == found[0].arguments:
            return _repeat(found[0], leaves, lifter)
        tape = Tape()
        lifter.tapes.append(tape)
        try:
            out = function(*args)
        finally:
            lifter.tapes.remove(tape)
        if tape.chose or not all(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in leaves):
            last.clear()
            return out
        made = _iteration(leaves, tape, out)
        if last and not found and made.like(last[0]):
            found.append(made)
        last[:] = [made]
        return out

    return body


def _places(leaves: Sequence[Any]) -> tuple[int, ...]:
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(x), k) for k, x in enumerate(leaves))


def _iteration(leaves: Sequence[Any], tape: Tape, out: Any) -> _Iteration:
    arguments = _places(leaves)
    known = {id(x): _Number(k) for x, k in zip(leaves, arguments, strict=True)}
    total, operands = len(leaves), []
    for step, _ in tape.steps:
        operands.append([known.get(id(x), x) for x in step.operands])
        for result in step.results:
            known[id(result)] = _Number(total)
            total += 1
    outputs, tree = jax.tree.flatten(out)
    return _Iteration(arguments, tape, operands, [known.get(id(x), x) for x in outputs], tree)


def _repeat(iteration: _Iteration, leaves: Sequence[Any], lifter: Lifter) -> Any:
    values = list(leaves)

    def read(x: Any) -> Any:
        return values[x.number] if isinstance(x, _Number) else x

    for (step, place), operands in zip(iteration.tape.steps, iteration.operands, strict=True):
        values += lifter.repeat(step, place, [read(x) for x in operands])
    return iteration.tree.unflatten([read(x) for x in iteration.outputs])


def _all_equal(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(map(_equal, ones, others))


def _equal(one: Any, other: Any) -> bool:
    """Whether two operands are the same: one number, or equal constants."""
    if one is other:
        return True
    if isinstance(one, _Number) or isinstance(other, _Number):
        return bool(one == other)
    if getattr(one, "weak_type", None) != getattr(other, "weak_type", None) or np.shape(one) != np.shape(other):
        return False
    dtypes = [getattr(x, "dtype", None) for x in (one, other)]
    if type(one) is type(other) and dtypes[0] == dtypes[1] and isinstance(dtypes[0], np.dtype):
        return np.asarray(one).tobytes() == np.asarray(other).tobytes()  # NaN included
    return same(one, other)
