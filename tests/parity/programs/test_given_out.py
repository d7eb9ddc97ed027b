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


def dilated(p: Arrays, x: Any, of: Any, offset: int) -> Any:
    """Layers as of a WaveNet: each splits what it computes into what the next one is given, and what is given out. Those are joined."""
    front, found = x, []
    for _ in range(4):
        moved = of.concatenate([0 * front[:, :2], front, 0 * front[:, :1]], 1)
        both = of.tanh(moved[:, 1 - offset : 11 - offset] @ p["w"]) @ p["v"]
        more, given_out = of.split(both, 4, -1) if of is torch else of.split(both, 2, -1)
        front = front + of.concatenate([more, more], -1)
        found.append(given_out)
    return of.concatenate(found, -1)


def test_the_second_part_of_a_split_in_each_layer_is_looked_for_among_second_parts() -> None:
    source, target = records(lambda p, x, real: dilated(p, x, jnp, 0), lambda p, x, real: dilated(p, x, torch, -1))
    want = source.outputs["y"].array
    assert given_out(target, Goal("y", lambda got: difference(got, want).relative, 1e-9)) is None


def parts_of_states(p: Arrays, x: Any, of: Any, in_front: bool) -> Any:
    """A loop whose state is the second part of a split."""
    h, found = x[:, 0] @ p["w"], []
    for t in range(x.shape[1]):
        both = of.tanh(of.concatenate([x[:, t] @ p["w"], h @ p["v"]], -1))
        _, new = of.split(both, 8, -1) if of is torch else of.split(both, 2, -1)
        found.append(h if in_front else new)
        h = new
    return of.stack(found, 1) @ p["v"]


def test_states_that_are_the_second_part_of_a_split_are_named() -> None:
    source, target = records(
        lambda p, x, real: parts_of_states(p, x, jnp, False), lambda p, x, real: parts_of_states(p, x, torch, True)
    )
    want = source.outputs["y"].array
    found = given_out(target, Goal("y", lambda got: difference(got, want).relative, 1e-9))
    assert found is not None and found.name == LATE
