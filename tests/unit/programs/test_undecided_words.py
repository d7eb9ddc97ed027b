"""Where both programs run the same operation, and what reaches it is not sure, that place is not said to be the difference."""

from __future__ import annotations

import numpy as np
import pytest

from convert.programs.divergence.search import Divergence
from convert.programs.divergence.wording import Named, named
from convert.programs.program import Operation, Program, Value

RNG = np.random.default_rng(0)
X = Value(RNG.normal(size=(3, 5)), data=True)
GIVEN = Value(RNG.normal(size=(3, 2, 5)), data=True)


def parameter(name: str) -> Value:
    return Value(RNG.normal(size=5), leaves=frozenset({name}))


def operation(name: str, *given: Value, where: str, **settings: object) -> Operation:
    return Operation(name, given, (Value(RNG.normal(size=(3, 5)), data=True),), settings, lambda arrays: arrays, where)


def program(*operations: Operation, **parameters: Value) -> Program:
    return Program(parameters, {"x": X}, operations, {"y": operations[-1].results[0]})


def said(
    ours: Operation, *theirs: Operation, lacking: str = "", doubtful: str = "", before: tuple[Operation, ...] = ()
) -> Named:
    """What is said of an operation of the target, of whose data the source computes these.

    Args:
        lacking: parameter for which nothing was found.
        doubtful: one that is open.
        before: operations of the target in front of it.
    """
    used = {leaf: v for one in (*before, ours) for v in one.operands for leaf in v.leaves}
    own = {leaf: v for one in theirs for v in one.operands for leaf in v.leaves}
    target, source = program(*before, ours, **used), program(*theirs, operation("sin", X, where="jax.py:9"), **own)
    found = Divergence((), 1.0, False, ours, theirs[:1])
    return named(found, source, target, {}, lacking={lacking} - {""}, doubtful={doubtful} - {""})


def test_a_product_with_a_parameter_for_which_nothing_was_found_may_be_the_same() -> None:
    ours = operation("mul", X, parameter("att.mix_v"), where="net.py:4")
    theirs = operation("mul", X, parameter("layers/mix"), where="jax.py:4")
    part = operation("slice", X, where="jax.py:3", start_indices=(0, 0), limit_indices=(1, 5))
    for order in ((theirs, part), (theirs,)):
        text = said(ours, *order, lacking="att.mix_v").brief
        assert text == (
            "the target multiplies by att.mix_v, the JAX model multiplies by layers/mix; they may be the same, as nothing was found for att.mix_v"
        )
    assert "may be the same" not in said(ours, theirs).brief, "both parameters are known"
    assert "may be the same" not in said(ours, part, lacking="att.mix_v").brief, "the source only takes a part"


@pytest.mark.parametrize("through", [False, True])
def test_a_function_behind_an_open_layer_may_be_the_same(through: bool) -> None:
    """The source applies it to one part of what it has, and the layer in front was taken for another part."""
    layer = operation("mul", X, parameter("att.key"), where="net.py:3")
    ours = operation("sigmoid", layer.results[0], where="net.py:4")
    part = operation("slice", GIVEN, where="jax.py:3", start_indices=(0, 0, 0), limit_indices=(3, 1, 5))
    theirs = operation("logistic", part.results[0] if through else X, where="jax.py:4")
    both = (part, theirs) if through else (theirs,)
    found = said(ours, *both, doubtful="att.key", before=(layer,))
    assert found.brief.endswith(
        "the target applies sigmoid, and so does the JAX model; what reaches it is not sure, as att.key is open"
    )
    also = "; the JAX model takes index 0 of axis 1 of it, too (jax.py:3)" if through else ""
    assert f"JAX model applies sigmoid (jax.py:4){also}; what reaches it is not sure" in found.problem
    sure = said(ours, *both, before=(layer,)).brief
    assert sure.endswith("the target applies sigmoid, and so does the JAX model, with other results")


def test_another_function_is_named_and_that_what_reaches_it_is_not_sure() -> None:
    layer = operation("mul", X, parameter("att.key"), where="net.py:3")
    ours = operation("cos", layer.results[0], where="net.py:4")
    theirs = operation("sin", X, where="jax.py:4")
    both = "the target applies cos, the JAX model applies sin"
    assert said(ours, theirs, before=(layer,)).brief.endswith(both)
    doubt = "what reaches it is not sure, as att.key is open"
    assert said(ours, theirs, doubtful="att.key", before=(layer,)).brief.endswith(f"{both}; {doubt}")


def test_where_the_source_has_no_such_step_the_sentence_says_which_value_and_what_is_missing() -> None:
    offsets = operation("add", X, where="net.py:16")
    ours = operation("index", offsets.results[0], where="net.py:17")
    assert said(ours, before=(offsets,)).brief == (
        "of the sum at net.py:16, the target picks elements; no step of the JAX model was found that gives the same"
    )
