"""Rows that one program takes in front of a layer, and the other behind it, or behind a sum of such layers (WaveNet's skips)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from convert.inference.forms.rows_early import rows_early, takes_rows_late
from convert.programs.record_torch import record_torch
from convert.programs.rerun import rerun
from support.inferred import UNPROVEN, WIDTH, derive, floats, grades

C, STEPS, DILATIONS = 8, 12, (1, 2, 1)
LAST = STEPS - sum(DILATIONS)
SHAPES = {
    f"{name}{k}": {"f": (2, C, C), "s": (C, C), "b": (C,), "c": (C,)}[name] for k in range(3) for name in ("f", "s", "b", "c")
}  # fmt: skip


def _source(*, late: bool) -> Any:
    """Return a function that takes the last steps behind each skip if `late`, and otherwise in front of it."""

    def function(w: Any, x: Any) -> Any:
        total: Any = 0.0
        for k, dilation in enumerate(DILATIONS):
            y = x[:, :-dilation] @ w[f"f{k}"][0] + x[:, dilation:] @ w[f"f{k}"][1] + w[f"b{k}"]
            x = jnp.tanh(y) + x[:, dilation:]
            skipped = (x @ w[f"s{k}"])[:, -LAST:] if late else x[:, -LAST:] @ w[f"s{k}"]
            total = total + skipped + w[f"c{k}"]
        return jax.nn.relu(total)

    return function


class Skips(nn.Module):
    """Takes the last steps of the sum so far if `late`; ``first``: the first ones, which is a fault."""

    def __init__(self, *, late: bool, first: bool = False) -> None:
        super().__init__()
        self.layer = nn.ModuleList(nn.Conv1d(C, C, 2, dilation=d) for d in DILATIONS)
        self.skip = nn.ModuleList(nn.Conv1d(C, C, 1) for _ in DILATIONS)
        self.late, self.first = late, first

    def rows(self, x: Any, count: int) -> Any:
        return x[..., :count] if self.first else x[..., -count:]

    def forward(self, x: Any) -> Any:
        x, total = x.mT, None
        for layer, skip in zip(self.layer, self.skip, strict=True):
            y = layer(x)
            x = y.tanh() + x[..., -y.shape[-1] :]
            s = skip(x) if self.late else skip(self.rows(x, LAST))
            total = s if total is None else s + self.rows(total, s.shape[-1])
        return total.relu().mT


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [(False, True), (True, False), (True, True)])
def test_the_last_steps_in_front_of_a_layer_or_behind_it(source: bool, target: bool) -> None:
    made = derive(_source(late=source), Skips(late=target), SHAPES, floats(3, STEPS, C))
    assert made.complete and grades(made) <= {Grade.DERIVED, Grade.INTERCHANGEABLE}
    assert {tensor.name for tensor in made.tensors if tensor.grade is Grade.INTERCHANGEABLE} <= {
        f"skip.{k}.bias" for k in range(3)
    }


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_the_first_steps_are_a_difference(late: bool) -> None:
    made = derive(_source(late=not late), Skips(late=late, first=True), SHAPES, floats(3, STEPS, C))
    assert not made.complete and made.differences and UNPROVEN & grades(made)


DECODER = {
    "a": (WIDTH, WIDTH),
    "ab": (WIDTH,),
    "b": (WIDTH, WIDTH),
    "bb": (WIDTH,),
    "r": (WIDTH, WIDTH),
    "o": (WIDTH, WIDTH),
}


def _decoder(w: Any, x: Any) -> Any:
    """Two layers of the steps before, of zeros for the first one, and a loop over what they give."""
    x = jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], 1)
    y = jax.nn.relu(jax.nn.relu(x @ w["a"] + w["ab"]) @ w["b"] + w["bb"])
    state, states = jnp.zeros_like(y[:, 0]), []
    for t in range(y.shape[1]):
        states.append(state := jnp.tanh(state @ w["r"] + y[:, t]))
    return jnp.stack(states, 1) @ w["o"]


class Decoder(nn.Module):
    """Applies the two layers to the last step, too; its loop takes one step less, of a part of them if ``cut``."""

    def __init__(self, *, cut: bool, activation: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.state, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.cut, self.activation = cut, activation

    def forward(self, x: Any) -> Any:
        x = torch.cat([torch.zeros_like(x[:, :1]), x], 1)
        y = self.activation(self.second(self.first(x).relu()))
        y = y[:, :-1] if self.cut else y
        state, states = torch.zeros_like(y[:, 0]), []
        for t in range(x.shape[1] - 1):
            states.append(state := torch.tanh(self.state(state) + y[:, t]))
        return self.out(torch.stack(states, 1))


@pytest.mark.parametrize("cut", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_step_more_than_a_loop_takes(cut: bool) -> None:
    made = derive(_decoder, Decoder(cut=cut, activation=torch.relu), DECODER)
    assert made.complete and grades(made) == {Grade.DERIVED}


@pytest.mark.parametrize("cut", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_difference_in_front_of_the_loop_is_named_there(cut: bool) -> None:
    made = derive(_decoder, Decoder(cut=cut, activation=torch.nn.functional.leaky_relu), DECODER)
    (difference,) = made.differences
    assert difference.brief == "behind second: the target computes leaky_relu, the JAX model relu"
    layers = {made.tensor(f"{name}.{kind}").grade for name in ("first", "second") for kind in ("weight", "bias")}
    assert layers == {Grade.IN_FRONT}


class _Steps(nn.Module):
    """A loop that takes three of five rows, the last one first, and two of them at once at its end."""

    def forward(self, x: Any) -> Any:
        y = x.mT.reshape(-1, x.shape[1]).tanh().view(x.shape[0], x.shape[2], -1).mT
        return y[:, 4] - 2 * y[:, 1] * y[:, 3] + y[:, 3:].sum(1)


@pytest.mark.parametrize("module", [Skips(late=True), _Steps()])
def test_the_form_computes_the_same(module: nn.Module) -> None:
    given = {"x": np.random.default_rng(0).normal(size=(3, STEPS if isinstance(module, Skips) else 5, C))}
    record = record_torch(module.double(), lambda net, x: {"y": net(x["x"])}, given)
    assert takes_rows_late(record)
    for keep in (False, True):
        made = rows_early(record, keep=keep)
        state = {name: value.array for name, value in record.parameters.items()}
        again = rerun(made, state, given)
        np.testing.assert_allclose(again.outputs["y"].array, record.outputs["y"].array, atol=1e-12)
        assert len(made.operations) > len(record.operations) or not keep
