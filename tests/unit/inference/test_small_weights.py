"""A mask that leaves small weights has a note; scores that differ much leave them in both programs, and have none."""

from __future__ import annotations

from typing import Any

import numpy as np

from convert.inference.grading.notes.small_weights import notes
from convert.programs.program import Operation, Program, Value


def program(*softmaxes: Any) -> Program:
    operations = []
    for weights in map(np.asarray, softmaxes):
        scores, result = Value(np.zeros_like(weights), data=True), Value(weights, data=True)
        operations.append(Operation("_softmax", (scores,), (result,), {}, lambda arrays: list(arrays), where="m.py:1"))
    return Program({}, {}, tuple(operations), {})


MASKED = program([[0.5, 0.5, 1e-40, 1e-40]])
HIDDEN = program([[0.5, 0.5, 0.0, 0.0]])


def test_a_mask_that_leaves_weights_is_noted_on_its_side() -> None:
    (of_source,), (of_target,) = notes(MASKED, HIDDEN), notes(HIDDEN, MASKED)
    assert "of the JAX function at m.py:1" in of_source and "weights of 1e-40" in of_source
    assert "of the PyTorch module at m.py:1" in of_target


def test_weights_that_both_programs_have_are_not_noted() -> None:
    """The second layer hides as many positions as the first one has small weights."""
    both = program([[0.5, 0.5, 1e-40, 0.0], [1.0, 1e-35, 0.0, 0.0]], [[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert notes(both, both) == ()
