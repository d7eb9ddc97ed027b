"""The operations at which a target departs from the JAX model: named, located on both sides, proven; and never where there are none."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from convert.layers.activations import NUMPY_ACTIVATIONS
from convert.numerics.compare import difference
from convert.numerics.lift_torch import lifted
from convert.programs.divergence.search import Divergence, diverge
from convert.programs.divergence.wording import Named, named
from convert.programs.program import Program
from convert.programs.record_jax import record_jax
from convert.programs.record_torch import record_torch
from support import decoder

Edit = Callable[[Any], None]
TOLERANCE = 1e-9
LINES = {  # fault -> what the sentence has of both sides
    "attention scale of the model's width": ("multiplies by 0.2886751 = 1/sqrt(12)", "multiplies by 0.5"),
    "soft cap of another size": ("divides by 25", "divides by 20"),
    "RoPE of another base": ("500000 in the target", "10000 in the JAX model"),
    "window off by one": ("in the target a position sees itself and up to 3", "in the JAX model, itself and up to 2"),
    "key heads repeated in turns": ("repeated in another order",),
    "scores of keys with queries": ("takes the softmax over the last axis (decoder.py", "the axes 2 and 3 of"),
    "embedding scale missing": ("multiplies by 3.464102 = sqrt(12)", "the target uses it as it is"),
    "start value missing": ("adds start",),
    "epsilon outside of the root": ("takes the square root, adds 1e-06", "adds 1e-06, takes the reciprocal"),
    "norm behind the addition": ("takes the reciprocal of the square root", "more may differ behind it"),
}


@cache
def source() -> Program:
    return record_jax(decoder.apply, decoder.source().arrays, decoder.reference(None).inputs(0))


def target(edit: Edit | None) -> Program:
    with lifted():
        module = decoder.load(decoder.state())
    if edit is not None:
        edit(module)
    reference = decoder.reference(None)
    return record_torch(module, reference.run, reference.inputs(0))


def compared(edit: Edit | None) -> tuple[float, Divergence | None, Named | None]:
    theirs, ours = source(), target(edit)
    want = theirs.outputs["y"].array
    error = lambda got: difference(got, want).relative  # noqa: E731
    before = error(ours.outputs["y"].array)
    found = diverge(theirs, ours, "y", error, 1e-9, TOLERANCE)
    return before, found, named(found, theirs, ours, NUMPY_ACTIVATIONS) if found is not None else None


@pytest.mark.slow
@pytest.mark.parametrize("fault", decoder.FAULTS)
def test_the_operations_that_differ_are_named_on_both_sides(fault: str) -> None:
    edit, name = decoder.FAULTS[fault]
    before, found, said = compared(edit)
    assert found is not None and said is not None
    assert before > 1e-7 and (found.proven, said.name) == (bool(name), name)
    assert found.error <= 1e-9 or not found.proven
    assert "decoder.py:" in said.problem
    for words in LINES.get(fault, ()):
        assert words in said.problem


@pytest.mark.slow
def test_a_model_that_is_taken_apart_differently_is_not_accused() -> None:
    """Its queries are scaled and not its scores, and so on: unknown values, all of which lead to known ones."""
    before, found, _ = compared(None)
    assert before < 1e-12 and found is None


def test_values_that_are_equal_in_another_order_are_no_evidence() -> None:
    """The rows of one operand are exchanged: all values are known up to the sum over positions, which does not see the order."""
    before, found, _ = compared(decoder.model(pooled=lambda module, x: x.flip(1).mean(1)))
    assert before < 1e-12 and found is None


@pytest.mark.slow
def test_a_fault_in_one_layer_is_repaired_there_alone() -> None:
    def edit(module: Any) -> None:
        module.layers[1].cap = 25.0

    _, found, said = compared(edit)
    assert found is not None and said is not None and found.proven
    assert {one.module for repair in found.repairs for one in repair.target} == {"layers.1"}
    assert "in layers.1" in said.problem


@pytest.mark.slow
def test_weights_that_differ_are_not_the_code() -> None:
    """No value is put in behind a layer with other weights: that would restore the output, too."""

    def edit(module: Any) -> None:
        module.layers[0].gate.weight.mul_(1.1)

    _, found, said = compared(edit)
    assert found is not None and said is not None and not found.proven and not said.name
    assert "layers.0.gate" in said.problem
