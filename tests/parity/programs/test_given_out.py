"""States of a loop that are given out in front of the steps, for those behind them: the target's record is run with the others."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.numerics.compare import difference
from convert.programs.rewrites.recurrences.given_out import EARLY, LATE, given_out
from convert.programs.rewrites.rewrite import Goal, Rewrite
from support.small_faults import Arrays, records


def loop(p: Arrays, x: Any, of: Any, in_front: bool, decay: float = 0.5) -> Any:
    """Two layers, so that the states of the second depend on what the first gives out."""
    for _ in range(2):
        h, found = of.zeros_like(x[:, 0] @ p["w"]), []
        for t in range(x.shape[1]):
            new = of.tanh(x[:, t] @ p["w"]) + decay * h
            found.append(h if in_front else new)
            h = new
        x = of.stack(found, 1)
    return x @ p["v"]


def rewritten(right: bool, wrong: bool, decay: float = 0.5) -> Rewrite | None:
    source, target = records(
        lambda p, x, real: loop(p, x, jnp, right), lambda p, x, real: loop(p, x, torch, wrong, decay)
    )
    want = source.outputs["y"].array
    goal = Goal("y", lambda got: difference(got, want).relative if got.shape == want.shape else np.inf, 1e-9)
    return given_out(target, goal)


@pytest.mark.parametrize(
    ("right", "name", "says"), [(False, LATE, "with those behind"), (True, EARLY, "with those in front of")]
)
def test_the_other_side_of_the_steps_is_named(right: bool, name: str, says: str) -> None:
    found = rewritten(right, not right)
    assert found is not None and found.name == name
    assert says in found.problem and "test_given_out.py:" in found.problem and found.fix


def test_another_loop_is_not_accused() -> None:
    assert rewritten(right=False, wrong=True, decay=0.4) is None
    assert rewritten(right=False, wrong=False) is None
