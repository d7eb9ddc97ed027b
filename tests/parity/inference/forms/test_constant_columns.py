"""The time of a neural ODE as one more feature of a layer, or times a parameter that is added to what the layer gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from convert.inference.infer import infer
from support.inferred import UNPROVEN, WIDTH, derive, floats, grades, rules

D, STEPS = WIDTH, 4
REST = {"b": (D,), "o": (D, D), "ob": (D,)}
JOINED, ADDED = {"w": (D + 1, D), **REST}, {"w": (D, D), "t": (D,), **REST}


def _column(x: Any, time: Any) -> Any:
    return jnp.concatenate([x, jnp.full((len(x), 1), time)], -1)


def _rate(w: Any, x: Any, time: Any) -> Any:
    y = x @ w["w"] + time * w["t"] if "t" in w else _column(x, time) @ w["w"]
    return jnp.tanh(y + w["b"]) @ w["o"] + w["ob"]


def _steps(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, time: (x + _rate(w, x, time) / STEPS, None), x, jnp.arange(STEPS) / STEPS)[0]


class Rate(nn.Module):
    """`joined`: the time is the last feature, or the first one."""

    def __init__(self, joined: str = "", clock: Callable[[Any], Any] = lambda time: time) -> None:
        super().__init__()
        self.layer, self.output = nn.Linear(D + bool(joined), D), nn.Linear(D, D)
        self.t = None if joined else nn.Parameter(torch.zeros(D))
        self.joined, self.clock = joined, clock

    def forward(self, x: Any, t: Any) -> Any:
        t = self.clock(t)
        if self.t is not None:
            return self.output(torch.tanh(self.layer(x) + t * self.t))
        column = torch.as_tensor(t, dtype=x.dtype).expand(len(x), 1)
        return self.output(
            torch.tanh(self.layer(torch.cat([column, x] if self.joined == "first" else [x, column], -1)))
        )


class Steps(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.rate = Rate(**settings)

    def forward(self, x: Any) -> Any:
        for k in range(STEPS):
            x = x + self.rate(x, k / STEPS) / STEPS
        return x


@pytest.mark.parametrize(("joined", "shapes"), [("", JOINED), ("last", ADDED), ("first", ADDED)])
def test_times_of_a_loop(joined: str, shapes: dict[str, Any]) -> None:
    module = Steps(joined=joined)
    found = derive(_steps, module, shapes, floats(5, D))
    assert grades(found) == {Grade.DERIVED}
    written = "\n".join(rules(found, module))
    parts = {"": "", "last": '"D(C + 1)", part: "2 of 2"', "first": '"D(1 + C)", part: "1 of 2"'}
    assert parts[joined] in written


@pytest.mark.slow
@pytest.mark.parametrize("joined", ["", "last"])
def test_another_time_is_a_difference(joined: str) -> None:
    module = Steps(joined=joined, clock=lambda time: time + 1 / STEPS)
    found = derive(_steps, module, ADDED if joined else JOINED, floats(5, D))
    assert not found.complete and found.proof is None and grades(found) <= UNPROVEN


@pytest.mark.parametrize("size", [(), pytest.param((5,), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("joined", "shapes"), [("", JOINED), ("first", ADDED)])
def test_a_time_that_is_an_input_and_has_the_name_of_the_parameter(
    joined: str, shapes: dict[str, Any], size: tuple[int, ...]
) -> None:
    def function(w: Any, given: Any) -> Any:
        time = jnp.reshape(given["t"], (-1, 1))
        column = jnp.broadcast_to(time, (len(given["x"]), 1))
        y = given["x"] @ w["w"] + time * w["t"] if "t" in w else jnp.concatenate([given["x"], column], -1) @ w["w"]
        return {"y": jnp.tanh(y + w["b"]) @ w["o"] + w["ob"]}

    def inputs(seed: int) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        return {"x": random.normal(size=(5, D)), "t": random.normal(size=size)}

    module = Rate(joined).eval()
    found = infer(function, module, lambda m, given: {"y": m(given["x"], given["t"].reshape(-1, 1))}, inputs, shapes)
    assert grades(found) == {Grade.DERIVED}
    assert rules(found, module)


def test_a_pool_that_is_padded_with_infinity() -> None:
    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return self.b(torch.nn.functional.max_pool1d(self.a(x).mT, 3, 1, 1).mT)

    def function(w: Any, x: Any) -> Any:
        y = x @ w["a"] + w["c"]
        none = jnp.full_like(y[:, :1], -jnp.inf)
        padded = jnp.concatenate([none, y, none], 1)
        return jnp.maximum(jnp.maximum(padded[:, :-2], padded[:, 1:-1]), padded[:, 2:]) @ w["b"] + w["d"]

    shapes = {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH), "c": (WIDTH,), "d": (WIDTH,)}
    assert grades(derive(function, Pooled(), shapes)) == {Grade.DERIVED}
