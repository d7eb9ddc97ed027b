"""The first step of a recurrent decoder meets zeros, and shows its parameters in part: Tacotron 2 (Shen et al. 2018) begins so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as linen_layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Arithmetic, Derivation, Grade
from support.inferred import WIDTH, derive, floats, grades, linen, rules, sources

D, STEPS = WIDTH, 3
NARROW = 5
PROVEN = {Grade.DERIVED, Grade.INTERCHANGEABLE}


def stepped(w: Mapping[str, Any], x: Any, state: tuple[Any, Any], number: float) -> tuple[Any, Any]:
    i, g, f, o = jnp.split(jnp.concatenate([x, state[0]], -1) @ w["w"] + w["b"], 4, -1)
    cell = jax.nn.sigmoid(f + number) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


class Started(nn.Module):
    """A cell that begins with a step of zeros; ``swapped``: the gates of the input and of what is forgotten."""

    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        self.rnn, self.out, self.swapped = nn.LSTMCell(D, D), nn.Linear(D, D, bias=False), swapped

    def forward(self, x: Any) -> Any:
        x = torch.cat([torch.zeros_like(x[:, :1]), x], 1)
        h = c = torch.zeros_like(x[:, 0])
        made = []
        for k in range(STEPS):
            h, c = self.rnn(x[:, k], (h, -c if self.swapped else c))
            made.append(self.out(h))
        return torch.stack(made, 1)


def started(number: float) -> Any:
    def function(w: Mapping[str, Any], x: Any) -> Any:
        x = jnp.concatenate([jnp.zeros_like(x[:, :1]), x], 1)
        state = (jnp.zeros_like(x[:, 0]),) * 2
        made = []
        for k in range(STEPS):
            state = stepped(w, x[:, k], state, number)
            made.append(state[0] @ w["out"])
        return jnp.stack(made, 1)

    return function


SHAPES = {"w": (2 * D, 4 * D), "b": (4 * D,), "out": (D, D)}


@pytest.mark.slow
@pytest.mark.parametrize("number", [0.0, 1.0])
def test_a_number_that_is_added_to_a_gate_is_found_where_the_first_step_does_not_show_it(number: float) -> None:
    found = derive(started(number), Started(), SHAPES, floats(3, STEPS, D))
    assert found.complete and grades(found) <= PROVEN
    biases = [found.tensor(f"rnn.bias_{kind}") for kind in ("ih", "hh")]
    arithmetic = {part.arithmetic for tensor in biases for part in tensor.parts}
    assert (Arithmetic.ONE_PLUS in arithmetic) is bool(number)


@pytest.mark.slow
def test_another_sign_of_the_state_is_not_derived() -> None:
    found = derive(started(1.0), Started(swapped=True), SHAPES, floats(3, STEPS, D))
    assert not found.complete and found.differences


def located(w: Mapping[str, Any], memory: Any) -> Any:
    """Attention by where it was: the weights of the last step, and of all steps, are zero at first and equal in the second step."""
    last = every = jnp.zeros_like(memory[..., 0])
    context, made = jnp.zeros_like(memory[:, 0]), []
    state = (context,) * 2
    for _ in range(STEPS):
        state = stepped(w, context, state, 1.0)
        place = jnp.stack([every, last], -1)
        place = jax.lax.conv_general_dilated(place, w["place"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        last = jax.nn.softmax(jnp.tanh((state[0] @ w["query"])[:, None] + place + memory @ w["key"]) @ w["score"], -1)
        every = every + last
        context = jnp.einsum("nt,ntd->nd", last, memory)
        made.append(context @ w["out"])
    return jnp.stack(made, 1)


class Located(nn.Module):
    """``all_steps``: whether the weights of all steps are added up."""

    def __init__(self, all_steps: bool = True) -> None:
        super().__init__()
        self.place, self.all_steps = nn.Conv1d(2, D, 5, padding=2, bias=False), all_steps
        self.rnn = nn.LSTMCell(D, D)
        self.query, self.key, self.out = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.score = nn.Linear(D, 1, bias=False)

    def forward(self, memory: Any) -> Any:
        last = every = torch.zeros_like(memory[..., 0])
        context, made = torch.zeros_like(memory[:, 0]), []
        state = (context, context)
        for _ in range(STEPS):
            state = self.rnn(context, state)
            place = self.place(torch.stack([last, every], 1)).mT
            energy = self.score(torch.tanh(self.query(state[0])[:, None] + place + self.key(memory)))
            last = energy[..., 0].softmax(-1)
            every = every + last if self.all_steps else last
            context = (last[:, None] @ memory)[:, 0]
            made.append(self.out(context))
        return torch.stack(made, 1)


OF_PLACES = {**SHAPES, "place": (5, 2, D), "score": (D,), **dict.fromkeys(("query", "key"), (D, D))}


@pytest.mark.slow
def test_channels_that_are_equal_at_first_are_told_apart_by_later_steps() -> None:
    found = derive(located, Located(), OF_PLACES, floats(3, 7, D))
    assert found.complete and grades(found) <= PROVEN
    (part,) = found.tensor("place.weight").parts
    assert part.positions[0] == D  # the second channel of the leaf comes first


@pytest.mark.slow
def test_weights_of_the_last_step_alone_are_not_derived() -> None:
    found = derive(located, Located(all_steps=False), OF_PLACES, floats(3, 7, D))
    assert not found.complete and found.differences


class TwoCells(linen_layers.Module):
    """Tacotron's decoder without its attention: a frame of zeros, a layer without a bias, and two cells, all of one width."""

    @linen_layers.compact
    def __call__(self, x: Any) -> Any:
        shifted = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        frames = linen_layers.relu(linen_layers.Dense(NARROW, use_bias=False, name="frame")(shifted))
        cells = [linen_layers.OptimizedLSTMCell(NARROW, name=name) for name in ("first", "second")]
        out, made = linen_layers.Dense(NARROW, use_bias=False, name="out"), []
        states = [(jnp.zeros_like(x[:, 0]),) * 2] * 2
        for k in range(STEPS):
            y = frames[:, k]
            for number, cell in enumerate(cells):
                states[number], y = cell(states[number], y)
            made.append(out(y))
        return jnp.stack(made, 1)


class TwoCellsOfTorch(nn.Module):
    """``swapped``: the second cell subtracts its state."""

    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        self.frame, self.out = (nn.Linear(NARROW, NARROW, bias=False) for _ in range(2))
        self.cells, self.swapped = nn.ModuleList(nn.LSTMCell(NARROW, NARROW) for _ in range(2)), swapped

    def forward(self, x: Any) -> Any:
        frames = torch.relu(self.frame(torch.cat([torch.zeros_like(x[:, :1]), x], 1)))
        states, made = [(torch.zeros_like(x[:, 0]),) * 2] * 2, []
        for k in range(STEPS):
            y = frames[:, k]
            for number, cell in enumerate(self.cells):
                h, c = states[number]
                states[number] = cell(y, (h, -c if number and self.swapped else c))
                y = states[number][0]
            made.append(self.out(y))
        return torch.stack(made, 1)


@pytest.mark.slow
def test_the_biases_of_the_second_cell_are_not_tried_for_the_first_whose_step_is_all_zeros() -> None:
    """Both are added to zeros there, and there are 24 orders of the four of each."""
    function, shapes = linen(TwoCells(), jnp.zeros((2, STEPS, NARROW)))
    module = TwoCellsOfTorch()
    found = derive(function, module, shapes, floats(2, STEPS, NARROW))
    assert grades(found) <= PROVEN
    assert rules(found, module)
    assert found.tried < 300


@pytest.mark.slow
def test_another_sign_of_the_state_of_the_second_cell_is_not_derived() -> None:
    function, shapes = linen(TwoCells(), jnp.zeros((2, STEPS, NARROW)))
    found = derive(function, TwoCellsOfTorch(swapped=True), shapes, floats(2, STEPS, NARROW))
    assert not found.complete and found.differences


class Speller(nn.Module):
    """A decoder whose cell is given the context in front of the letter; of the JAX model's matrix, the letter's rows are the first.

    Args:
        width: of the context.
        doubled: whether the state that the cell keeps is doubled after each step.
    """

    def __init__(self, width: int, *, doubled: bool = False) -> None:
        super().__init__()
        self.memory, self.cell = nn.Linear(D, width, bias=False), nn.LSTMCell(width + D, D)
        self.query, self.out = nn.Linear(D, width, bias=False), nn.Linear(D + width, D, bias=False)
        self.doubled = doubled

    def forward(self, x: Any) -> Any:
        memory, made = self.memory(x), []
        context, state = torch.zeros_like(memory[:, 0]), (torch.zeros_like(x[:, 0]),) * 2
        for k in range(STEPS):
            h, c = self.cell(torch.cat([context, x[:, k]], 1), state)
            state = (2 * h if self.doubled else h), c
            context = ((memory @ self.query(h)[..., None]).softmax(1) * memory).sum(1)
            made.append(self.out(torch.cat([h, context], 1)))
        return torch.stack(made, 1)


def _spells(w: Any, x: Any) -> Any:
    memory, made = x @ w["memory"], []
    context, h, c = jnp.zeros_like(memory[:, 0]), *(jnp.zeros_like(x[:, 0]),) * 2
    for k in range(STEPS):
        given = jnp.concatenate([jnp.concatenate([x[:, k], context], 1), h], 1)
        i, f, g, o = jnp.split(given @ w["cell"] + w["bias"], 4, 1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        context = (jax.nn.softmax(memory @ (h @ w["query"])[..., None], 1) * memory).sum(1)
        made.append(jnp.concatenate([h, context], 1) @ w["out"])
    return jnp.stack(made, 1)


def _spelled(width: int, **how: Any) -> Derivation:
    shapes = {
        "memory": (D, width),
        "query": (D, width),
        "out": (D + width, D),
        "cell": (2 * D + width, 4 * D),
        "bias": (4 * D,),
    }
    return derive(_spells, Speller(width, **how), shapes, floats(3, 7, D))


@pytest.mark.slow
@pytest.mark.parametrize("width", [2 * D, D])
def test_values_of_zeros_that_a_cell_is_given_side_by_side(width: int) -> None:
    """The context and the state are zeros in the first step; of one width, only the next step tells them apart."""
    found = _spelled(width)
    assert found.complete and grades(found) <= PROVEN, found.differences
    positions = np.concatenate([part.positions for part in found.tensor("cell.weight_hh").parts]) // (4 * D)
    assert set(positions.tolist()) == {*range(D + width, 2 * D + width)}


@pytest.mark.slow
def test_another_state_of_such_a_cell_is_not_derived() -> None:
    found = _spelled(D, doubled=True)
    assert not found.complete and found.differences


class Shifted(nn.Module):
    """A GRU over inputs that are shifted by one step, as teacher forcing does: its first input is zeros, and so is its first state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRU(6, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        return self.out(self.cell(torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1))[0])


def test_a_gru_whose_first_input_is_zeros() -> None:
    def function(w: Any, x: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            a, b = jnp.split(x @ w["i"] + w["b"], 3, -1), jnp.split(h @ w["h"], 3, -1)
            r, z = (jax.nn.sigmoid(a[k] + b[k]) for k in range(2))
            n = jnp.tanh(a[2] + r * (b[2] + w["n"]))
            h = (1 - z) * n + z * h
            return h, h

        shifted = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        states = jax.lax.scan(step, jnp.zeros((len(x), 6)), jnp.swapaxes(shifted, 0, 1))[1]
        return jnp.swapaxes(states, 0, 1) @ w["o"] + w["c"]

    shapes = {"i": (6, 18), "h": (6, 18), "b": (18,), "n": (6,), "o": (6, 4), "c": (4,)}
    found = derive(function, Shifted(), shapes, floats(3, 5, 6))
    assert found.complete, found.differences
    assert {*sources(found)["cell.weight_ih_l0"]} == {"i"} and {*sources(found)["cell.weight_hh_l0"]} == {"h"}
