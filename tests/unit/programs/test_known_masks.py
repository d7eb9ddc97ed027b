"""A mask that hides by a large number is known where what it is made of is, as one of zeros and ones is: the other program may choose by it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from convert.programs.divergence.knowledge import Knowledge
from convert.programs.divergence.shared_values import SharedValues
from convert.programs.fingerprint import EXACT
from convert.programs.program import Operation, Program, Value

SEEN = np.array([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
LEAST = float(np.finfo(np.float64).min)


def chained(*arrays: Any) -> Program:
    """A program whose operations each make the next array of the one before."""
    values = [Value(np.asarray(array), data=True) for array in arrays]
    operations = tuple(
        Operation("mul", (one,), (two,), {}, lambda given: list(given)) for one, two in itertools.pairwise(values)
    )
    return Program({}, {"seen": values[0]}, operations, {"y": values[-1]})


@pytest.mark.parametrize(("made", "known"), [((1 - SEEN) * LEAST, True), ((1 - SEEN) * 3, False)])
def test_a_mask_is_known_with_what_it_is_made_of(made: Any, known: bool) -> None:
    source, target = chained(SEEN, SEEN + 0.25), chained(SEEN, 1 - SEEN, made, made + 0.5)
    knowledge = Knowledge(source, target, "y", SharedValues(source, EXACT))
    assert knowledge.is_known(target.operations[1].results[0]) is known
