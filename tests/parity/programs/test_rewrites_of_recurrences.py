"""Recurrences with another first state, a state that is not reset, and gates in another place: the target's record is run without the mistake."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.numerics.compare import difference
from convert.programs.program import Program
from convert.programs.rewrites.recurrences.first_states import FIRST, NOT_RESET, first_states
from convert.programs.rewrites.recurrences.gates import (
    COMPLEMENT,
    GATE_SIDE,
    OUTSIDE,
    WRONG_SIDE,
    complement,
    reset_side,
)
from convert.programs.rewrites.rewrite import Goal, Rewrite
from support.marks import slow_but
from support.small_faults import Arrays, records

Cell = Callable[[Arrays, Any, Any, Any], Any]


def sigmoid(x: Any) -> Any:
    return torch.sigmoid(x) if isinstance(x, torch.Tensor) else jax.nn.sigmoid(x)


def of(x: Any) -> Any:
    return torch if isinstance(x, torch.Tensor) else jnp


def in_front(p: Arrays, a: Any, r: Any, h: Any) -> Any:
    return a + (r * h) @ p["w"] + p["g"]


def behind(p: Arrays, a: Any, r: Any, h: Any) -> Any:
    return a + r * (h @ p["w"] + p["g"])


def bias_outside(p: Arrays, a: Any, r: Any, h: Any) -> Any:
    return a + r * (h @ p["w"]) + p["g"]


def mixed(z: Any, new: Any, h: Any) -> Any:
    return (1 - z) * new + z * h


def gru(p: Arrays, x: Any, real: Any, cell: Cell = behind, mix: Any = mixed, first: Any = 0.0) -> Any:
    """A GRU as it is written by hand."""
    h = first(x) if callable(first) else of(x).full(x[:, 0].shape, first, dtype=x.dtype)
    found = []
    for k in range(x.shape[1]):
        a, c = x[:, k] @ p["w"], h @ p["v"]
        r, z = sigmoid(a * p["g"] + c), sigmoid(a + c * p["h"])
        h = mix(z, of(x).tanh(cell(p, a, r, h)), h)
        found.append(h)
    return of(x).stack(found, 1) @ p["v"]


def lstm(p: Arrays, x: Any, real: Any, first: tuple[float, float] = (0.0, 0.0), reset: bool = True) -> Any:
    """Two layers of an LSTM with the same weights."""
    h = c = None
    for _ in range(2):
        if reset or h is None:
            h, c = (of(x).full(x[:, 0].shape, number, dtype=x.dtype) for number in first)
        found = []
        for k in range(x.shape[1]):
            i, o = sigmoid(x[:, k] @ p["w"] + h @ p["v"]), sigmoid(h @ p["w"])
            c = (1 - i) * c + i * of(x).tanh(h @ p["v"] + x[:, k])
            h = o * of(x).tanh(c)
            found.append(h)
        x = of(x).stack(found, 1)
    return x


def in_torch(p: Arrays, x: torch.Tensor, real: Any, first: float = 0.0, one_by_one: bool = False) -> Any:
    """torch's own GRU."""
    given, state = torch.cat([p["w"], p["v"], p["w"] * p["g"]]), torch.cat([p["v"], p["w"], p["v"] * p["h"]])
    weights = (given, state, p["g"].repeat(3), p["h"].repeat(3))
    call = partial(torch._VF.gru, params=weights, has_biases=True, num_layers=1, dropout=0.0, train=False, bidirectional=False, batch_first=True)  # fmt: skip
    if not one_by_one:
        return call(x, torch.full((1, len(x), 8), first, dtype=x.dtype))[0]
    last, found = torch.zeros(1, 1, 8, dtype=x.dtype), []
    for series in x:
        made, last = call(series[None], last)
        found.append(made)
    return torch.cat(found)


def as_torch(p: Arrays, x: Any, real: Any, side: str = "behind") -> Any:
    """torch's GRU in JAX, with the reset gate on one side or the other."""
    given = jnp.concatenate([p["w"], p["v"], p["w"] * p["g"]])
    state = jnp.concatenate([p["v"], p["w"], p["v"] * p["h"]])
    h, found = jnp.zeros(x[:, 0].shape), []
    for k in range(x.shape[1]):
        a, c = x[:, k] @ given.T + jnp.tile(p["g"], 3), h @ state.T + jnp.tile(p["h"], 3)
        r, z = jax.nn.sigmoid(a[:, :8] + c[:, :8]), jax.nn.sigmoid(a[:, 8:16] + c[:, 8:16])
        inner = {
            "behind": r * c[:, 16:],
            "in front": (r * h) @ state[16:].T + p["h"],
            "bias outside": r * (h @ state[16:].T) + p["h"],
        }[side]
        h = (1 - z) * jnp.tanh(a[:, 16:] + inner) + z * h
        found.append(h)
    return jnp.stack(found, 1)


def gated(p: Arrays, x: Any, real: Any, early: bool = False) -> Any:
    """No recurrence: a gated layer."""
    gate = sigmoid(x @ p["v"])
    return ((gate * x) @ p["w"] if early else gate * (x @ p["w"])) @ p["v"]


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], str, str]] = {
    "first state of 0.1": (gru, partial(gru, first=0.1), FIRST, "begins with 0.1 throughout; the outputs are equal when it begins with zeros"),
    "first state of 0.1 in the JAX model": (partial(gru, first=0.1), gru, FIRST, "begins with zeros; the outputs are equal when it begins with 0.1 throughout"),
    "first state of the first series": (gru, partial(gru, first=lambda x: x[:1, 0].expand(3, 8)), FIRST, "when it begins with zeros"),
    "first state of torch's GRU": (as_torch, partial(in_torch, first=0.1), FIRST, "begins with 0.1 throughout"),
    "first cells of ones": (lstm, partial(lstm, first=(0.0, 1.0)), FIRST, "begins with 1 throughout"),
    "first states and cells": (lstm, partial(lstm, first=(0.5, 1.0)), FIRST, "when it begins with zeros"),
    "state that goes on to the next series": (as_torch, partial(in_torch, one_by_one=True), NOT_RESET, "zeros again after every 10 steps"),
    "state that goes on to the next layer": (lstm, partial(lstm, reset=False), NOT_RESET, "zeros again after every 10 steps"),
    "reset behind the matrix": (partial(gru, cell=in_front), gru, WRONG_SIDE, "behind the product with w"),
    "reset behind the matrix, bias outside": (partial(gru, cell=in_front), partial(gru, cell=bias_outside), WRONG_SIDE, "when it multiplies the state in front"),
    "reset in front of the matrix": (gru, partial(gru, cell=in_front), WRONG_SIDE, "when it multiplies what this product gives with its bias g"),
    "reset in front of the matrix, bias outside": (partial(gru, cell=bias_outside), partial(gru, cell=in_front), WRONG_SIDE, "in front of the product with w"),
    "bias outside": (gru, partial(gru, cell=bias_outside), OUTSIDE, "with its bias g"),
    "bias inside": (partial(gru, cell=bias_outside), gru, OUTSIDE, "when it does not multiply the bias"),
    "torch's reset, behind the matrix": (partial(as_torch, side="in front"), in_torch, WRONG_SIDE, "when it multiplies the state in front"),
    "torch's bias inside": (partial(as_torch, side="bias outside"), in_torch, OUTSIDE, "when it does not multiply the bias"),
    "z for 1 - z": (gru, partial(gru, mix=lambda z, new, h: z * new + (1 - z) * h), COMPLEMENT, "one minus the gate"),
    "z for 1 - z of a difference": (gru, partial(gru, mix=lambda z, new, h: h + z * (new - h)), COMPLEMENT, "one minus the gate"),
    "gate of a layer in front of its matrix": (gated, partial(gated, early=True), GATE_SIDE, "in front of the product with w"),
}  # fmt: skip


def rewritten(source: Program, target: Program) -> Rewrite | None:
    want = source.outputs["y"].array
    goal = Goal("y", lambda got: difference(got, want).relative if got.shape == want.shape else np.inf, 1e-9)
    return first_states(source, target, goal) or reset_side(target, goal) or complement(target, goal, lambda one: True)


@pytest.mark.parametrize("name", slow_but(list(CASES)[::4], CASES))
def test_the_mistake_is_named_with_its_line(name: str) -> None:
    right, wrong, called, says = CASES[name]
    found = rewritten(*records(right, wrong))
    assert found is not None and found.name == called
    assert says in found.problem and "test_rewrites_of_recurrences.py:" in found.problem and found.fix


def test_another_function_is_no_other_state() -> None:
    wrong = partial(gru, cell=lambda p, a, r, h: 2 * behind(p, a, r, h))
    assert rewritten(*records(gru, wrong)) is None
    assert rewritten(*records(gru, lambda p, x, real: gru(p, x.flip(1), real))) is None


def test_gates_of_a_layer_of_torch_are_right() -> None:
    _, target = records(as_torch, lambda p, x, real: in_torch({**p, "v": -p["v"]}, x, real))
    goal = Goal("y", lambda got: 0.0, 1e-9)
    assert complement(target, goal, lambda one: True) is not None
    assert complement(target, goal, lambda one: False) is None
