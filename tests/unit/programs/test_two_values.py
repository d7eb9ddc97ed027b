"""What two models do with two values is one sentence: it says which two, and names none by the line that the sentence ends with."""

from __future__ import annotations

import numpy as np
import pytest

from convert.programs.divergence.naming.both import Both
from convert.programs.divergence.naming.operations import extra
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.rerun import Change
from convert.programs.divergence.words import Words
from convert.programs.program import Operation, Value

RNG = np.random.default_rng(0)


def value() -> Value:
    return Value(RNG.normal(size=(3, 5)), data=True)


def operation(name: str, *given: Value, where: str) -> Operation:
    return Operation(name, given, (value(),), {}, lambda arrays: arrays, where)


def both(made_at: str, theirs: str) -> Both:
    """The target adds an input and a product, in net.py:6; the JAX model does something else with two values of its own, in jax.py:3."""
    x, y, u, v = (value() for _ in range(4))
    made = operation("mul", x, y, where=made_at)
    ours = operation("add", x, made.results[0], where="net.py:6")
    other = operation(theirs, u, v, where="jax.py:3")
    want = other.results[0].array
    repair = Repair(
        (ours,),
        (other,),
        ours.operands,
        tuple(v.array for v in ours.operands),
        (u, v),
        ours.results[0].array,
        want,
        1,
        Change({}),
    )
    names = {x: "the input x", y: "the input y", u: "the input u", v: "the input v"}
    return Both(repair, Words((made, ours), names), Words((other,), names), {}, ())


@pytest.mark.parametrize(
    ("made_at", "named"),
    [
        ("net.py:4", "the product at net.py:4"),
        ("net.py:6", "the product in the same line"),
        ("net.py:65", "the product at net.py:65"),
    ],
)
def test_both_values_are_named_in_the_order_of_the_sentence(made_at: str, named: str) -> None:
    said = f"the target adds the input x and {named} (net.py:6); "
    assert both(made_at, "mul").sentence == f"{said}the JAX model multiplies the input u by the input v (jax.py:3)"
    assert both(made_at, "atan2").sentence == f"{said}of the same, the JAX model runs atan2 (jax.py:3)"


def test_where_one_model_adds_a_value_the_other_is_said_to_use_which() -> None:
    x, more = value(), value()
    added = operation("add", x, more, where="net.py:6")
    given = (x.array, more.array)
    repair = Repair((added,), (), (x, more), given, (more,), added.results[0].array, more.array, 0, Change())
    names = {x: "the input x", more: "the input more"}
    _, said = extra(Both(repair, Words((added,), names), Words((), names), {}, ()))
    assert (
        said == "the target adds the input x and the input more (net.py:6); the JAX model uses the input more as it is"
    )
