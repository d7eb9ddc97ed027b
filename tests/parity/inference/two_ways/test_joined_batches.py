"""Several inputs that are joined along the batch for a network that they share, or given to it one after the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from convert.inference.forms.batches_apart import Rewriting
from convert.inference.one_form import WRITTEN_IN_TWO_WAYS
from convert.programs.record_torch import record_torch
from support.inferred import UNPROVEN, derive, floats, grades, sources

C, SHAPES = 4, {"k": (3, 3, 2, 4), "c": (4,), "h": (4, 5), "d": (5,), "p": (2, 2)}
PAIRS = floats(2, 3, 6, 6, 2)  # two batches of three images
NUMBERS = ("NHWC", "HWIO", "NHWC")


def _normed(x: Any, axes: tuple[int, ...]) -> Any:
    mean = x.mean(axes, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + 1e-5)


def _source(*, joined: bool, norm: str, layer_first: bool) -> Any:
    def encode(w: Any, x: Any) -> Any:
        x = jax.lax.conv_general_dilated(x, w["k"], (1, 1), "SAME", dimension_numbers=NUMBERS) + w["c"]
        x = jax.nn.relu(_normed(x, {"instance": (1, 2), "batch": (0, 1, 2)}[norm]))
        return jnp.tanh(x.reshape(len(x), -1, C).mean(1) @ w["h"] + w["d"])

    def function(w: Any, x: Any) -> Any:
        a, b = x[0] @ w["p"] if layer_first else x[0], x[1]
        one, other = jnp.split(encode(w, jnp.concatenate([a, b])), 2) if joined else (encode(w, a), encode(w, b))
        return one, one * jnp.exp(other)

    return function


class Siamese(nn.Module):
    """An encoder of two batches; ``fault``: what differs."""

    def __init__(self, *, joined: bool, norm: str, layer_first: bool, fault: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False) if layer_first else nn.Identity()
        self.convolution, self.head = nn.Conv2d(2, C, 3, padding=1), nn.Linear(C, 5)
        self.norm = (
            nn.InstanceNorm2d(C) if norm == "instance" else nn.BatchNorm2d(C, affine=False, track_running_stats=False)
        )
        self.joined, self.fault = joined, fault

    def encode(self, x: Any) -> Any:
        x = self.norm(self.convolution(x.movedim(-1, 1))).relu()
        return self.head(x.flatten(2).mean(2)).tanh()

    def forward(self, x: Any) -> Any:
        a, b = self.first(x[0]), x[1]
        if self.joined:
            made = self.encode(torch.cat([a, b], dim=0))
            one, other = made.split([len(a), len(b)], dim=0)
        else:
            one, other = self.encode(a), self.encode(b)
        if self.fault == "in the other order":
            one, other = other, one
        if self.fault == "one row further":
            one = one.roll(1, 0)
        return one, one * other.exp()


@pytest.mark.slow
@pytest.mark.parametrize("layer_first", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_a_joined_batch_is_each_of_its_parts(joined: bool, layer_first: bool) -> None:
    module = Siamese(joined=not joined, norm="instance", layer_first=layer_first)
    found = derive(_source(joined=joined, norm="instance", layer_first=layer_first), module, SHAPES, PAIRS)
    assert found.complete, (found.differences, found.proof)
    assert sources(found)["head.weight"] == "h"


@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("fault", ["in the other order", "one row further"])
def test_parts_in_another_order_are_seen(joined: bool, fault: str) -> None:
    module = Siamese(joined=not joined, norm="instance", layer_first=False, fault=fault)
    found = derive(_source(joined=joined, norm="instance", layer_first=False), module, SHAPES, PAIRS)
    assert all(one.shown for one in found.differences) and found.differences and Grade.DERIVED not in grades(found)


@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True])
def test_statistics_of_a_joined_batch_are_not_those_of_its_parts(joined: bool) -> None:
    module = Siamese(joined=not joined, norm="batch", layer_first=False)
    found = derive(_source(joined=joined, norm="batch", layer_first=False), module, SHAPES, PAIRS)
    assert found.differences and found.proof is None and grades(found) <= UNPROVEN


def test_the_steps_of_a_loop_are_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a scan gives for each step is joined, and a layer is applied to it: one part after the other, a long model took five times as long."""

    def function(w: Any, x: Any) -> Any:
        def stepped(state: Any, row: Any) -> Any:
            state = state * 0.5 + row
            return state, state

        _, states = jax.lax.scan(stepped, jnp.zeros_like(x[0]), x)
        return jnp.tanh(states @ w["p"])

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Linear(2, 2, bias=False)

        def forward(self, x: Any) -> Any:
            state, states = torch.zeros_like(x[0]), []
            for row in x:
                state = state * 0.5 + row
                states.append(state)
            return torch.tanh(self.p(torch.stack(states)))

    needed = list[bool]()
    joined = WRITTEN_IN_TWO_WAYS["batches"]
    monkeypatch.setitem(WRITTEN_IN_TWO_WAYS, "batches", lambda *both: needed.append(joined(*both)) or needed[-1])
    found = derive(function, Steps(), {"p": (2, 2)}, floats(5, 3, 2))
    assert found.complete and needed and not any(needed)


@pytest.mark.parametrize("first", [False, True])
def test_rows_of_an_earlier_step_are_no_batch_with_those_of_a_later_one(first: bool) -> None:
    """As the last states of packed sequences: those that ended are joined with what was computed of the others."""

    class Steps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = (torch.nn.Linear(5, 5) for _ in "io")

        def forward(self, x: Any) -> Any:
            early = torch.tanh(self.inner(x))
            late = torch.tanh(self.inner(early[:3]))
            return self.outer(torch.cat([early[3:], late] if first else [late, early[3:]]))

    x = np.random.default_rng(0).normal(size=(4, 5))
    program = record_torch(Steps().eval(), lambda net, given: {"y": net(given["x"])}, {"x": x})
    assert not Rewriting(program, keep=True).joins
