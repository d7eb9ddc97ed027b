"""Behind a difference the search goes on with values of the source's: the parameters there may have met data before, in another layout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, sources

SQUARE = (WIDTH, WIDTH)
FOUND = (Grade.IN_FRONT, Grade.BEHIND)


class Shared(torch.nn.Module):
    """A layer that is applied in front of the difference and right behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.a(x))
        x = torch.tanh(self.a(torch.sigmoid(self.b(x))))
        return self.c(x)


def test_a_matrix_that_is_used_in_front_of_the_difference_and_behind_it() -> None:
    def function(w: Any, x: Any) -> Any:
        x = jnp.tanh(x @ w["a"])
        x = jnp.tanh(jnp.tanh(x @ w["b"]) @ w["a"])
        return x @ w["c"]

    found = derive(function, Shared(), dict.fromkeys("abc", SQUARE))
    assert {t.name: t.grade for t in found.tensors} == {
        "a.weight": Grade.IN_FRONT,
        "b.weight": Grade.IN_FRONT,
        "c.weight": Grade.BEHIND,
    }
    assert sources(found) == {"a.weight": "a", "b.weight": "b", "c.weight": "c"}
    assert "more may differ" not in found.differences[0].problem


class Recurrent(torch.nn.Module):
    """A difference in front of a recurrent layer."""

    def __init__(self, kind: str, directions: int = 1) -> None:
        super().__init__()
        self.a = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.r = getattr(torch.nn, kind)(WIDTH, WIDTH, batch_first=True, bidirectional=directions == 2)
        self.d = torch.nn.Linear(directions * WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return self.d(torch.tanh(self.r(torch.sigmoid(self.a(x)))[0]))


def _lstm(w: Any, state: Any, x: Any) -> Any:
    h, c = state
    i, f, g, o = jnp.split(x @ w["wi"] + h @ w["wh"] + w["b"], 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def _gru(w: Any, h: Any, x: Any) -> Any:
    ours, theirs = (jnp.split(y, 3, -1) for y in (x @ w["wi"] + w["b"], h @ w["wh"] + w["hb"]))
    r, z = (jax.nn.sigmoid(one + two) for one, two in list(zip(ours, theirs, strict=True))[:2])
    h = (1 - z) * jnp.tanh(ours[2] + r * theirs[2]) + z * h
    return h, h


def _over_time(step: Any, w: Any, x: Any) -> Any:
    zeros = jnp.zeros((x.shape[0], WIDTH))
    begin = (zeros, zeros) if step is _lstm else zeros
    return jax.lax.scan(lambda state, x: step(w, state, x), begin, x.swapaxes(0, 1))[1].swapaxes(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "directions"),
    [
        ("LSTM", 1),
        pytest.param("LSTM", 2, marks=pytest.mark.slow),
        pytest.param("GRU", 1, marks=pytest.mark.slow),
    ],
)
def test_a_recurrent_layer_and_what_follows_it(kind: str, directions: int) -> None:
    step, gates = (_lstm, 4) if kind == "LSTM" else (_gru, 3)

    def function(w: Any, x: Any) -> Any:
        x = jnp.tanh(x @ w["a"])
        made = [_over_time(step, {name: w[name] for name in ("wi", "wh", "b", "hb")}, x)]
        if directions == 2:
            back = {name: w[f"back_{name}"] for name in ("wi", "wh", "b", "hb")}
            made.append(_over_time(step, back, x[:, ::-1])[:, ::-1])
        return jnp.tanh(jnp.concatenate(made, -1)) @ w["d"]

    kernel, bias = (WIDTH, gates * WIDTH), (gates * WIDTH,)
    cell = {"wi": kernel, "wh": kernel, "b": bias, "hb": bias}
    shapes = {"a": SQUARE, **cell, "d": (directions * WIDTH, WIDTH)}
    shapes |= {f"back_{name}": shape for name, shape in cell.items()} if directions == 2 else {}
    found = derive(function, Recurrent(kind, directions), shapes)
    assert {t.grade for t in found.tensors if t.name != "a.weight"} == {Grade.BEHIND}
    leaves = {tensor.name: {part.leaf for part in tensor.parts} for tensor in found.tensors}
    assert leaves["r.weight_ih_l0"] == {"wi"} and leaves["d.weight"] == {"d"}
    if directions == 2:
        assert leaves["r.weight_hh_l0_reverse"] == {"back_wh"}
    assert "more may differ" not in found.differences[0].problem


SIZE = 6


class Flattened(torch.nn.Module):
    """A difference between a convolution and a layer of all its pixels; every size is equal."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Conv2d(SIZE, SIZE, 3, padding=1, bias=False)
        self.b, self.c = torch.nn.Linear(SIZE**3, SIZE, bias=False), torch.nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: Any) -> Any:
        return self.c(torch.tanh(self.b(torch.sigmoid(self.a(x.movedim(-1, 1))).flatten(1))))


@pytest.mark.slow
def test_what_follows_has_the_layout_of_the_values_in_front_of_the_difference() -> None:
    """The JAX model flattens its pixels with the channels last, and each order of them fits what follows."""

    def function(w: Any, x: Any) -> Any:
        x = jax.lax.conv_general_dilated(x, w["a"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.tanh(jnp.tanh(x).reshape(SIZE, -1) @ w["b"]) @ w["c"]

    found = derive(
        function,
        Flattened(),
        {"a": (3, 3, SIZE, SIZE), "b": (SIZE**3, SIZE), "c": (SIZE, SIZE)},
        lambda seed: {"x": np.random.default_rng(seed).normal(size=(SIZE,) * 4)},
    )
    assert {t.grade for t in found.tensors} <= set(FOUND)
    (part,) = found.tensor("b.weight").parts
    made = np.empty(SIZE**4, int)
    made[part.elements] = part.positions
    leaf = np.arange(SIZE**4).reshape((SIZE,) * 4)  # [height, width, channel, feature]
    assert np.array_equal(made.reshape(leaf.shape), leaf.transpose(3, 2, 0, 1))
