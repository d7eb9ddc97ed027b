"""One feature times a vector is a layer of one input, and columns of a matrix that takes several features side by side."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import UNPROVEN, derive, floats, grades, layer_norm, rules

WIDTH = 6
REST = {"b": (WIDTH,), "o": (WIDTH, 3), "ob": (3,)}


class Layer(torch.nn.Module):
    """`Linear(1, WIDTH)` for each number, or a vector that it is multiplied by."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.layer = None if plain else torch.nn.Linear(1, WIDTH)
        self.scale, self.shift = (torch.nn.Parameter(torch.zeros(WIDTH)) if plain else None for _ in range(2))
        self.output = torch.nn.Linear(WIDTH, 3)

    def forward(self, x: Any) -> Any:
        x = x[..., None]
        return self.output(torch.tanh(x * self.scale + self.shift if self.layer is None else self.layer(x)))


@pytest.mark.parametrize(
    ("plain", "shape", "expected"),
    [
        (False, (WIDTH,), "linear: layer"),
        pytest.param(False, (1, WIDTH), "- einsum: ...D,DC->...C", marks=pytest.mark.slow),
        (True, (1, WIDTH), "parameter: {name: scale, axes: D}"),
    ],
)
def test_a_number_times_a_vector(plain: bool, shape: tuple[int, ...], expected: str) -> None:
    def function(w: Any, x: Any) -> Any:
        x = x[..., None]
        return jnp.tanh((x @ w["w"] if plain else x * w["w"]) + w["b"]) @ w["o"] + w["ob"]

    module = Layer(plain)
    found = derive(function, module, {"w": shape, **REST}, floats(5, 4))
    assert grades(found) == {Grade.DERIVED}
    assert expected in "\n".join(rules(found, module))


class Joined(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.output = torch.nn.Linear(2, WIDTH), torch.nn.Linear(WIDTH, 3)

    def forward(self, x: Any) -> Any:
        return self.output(torch.tanh(self.layer(torch.cat([x[..., :1], x[..., 1:]], -1))))


@pytest.mark.parametrize("exchanged", [False, True])
def test_two_numbers_times_a_vector_each(exchanged: bool) -> None:
    def function(w: Any, x: Any) -> Any:
        one, two = x[..., :1], x[..., 1:]
        return jnp.tanh(one * w["w"] + (one if exchanged else two) * w["v"] + w["b"]) @ w["o"] + w["ob"]

    found = derive(function, Joined(), {"w": (WIDTH,), "v": (WIDTH,), **REST}, floats(5, 2))
    assert grades(found) <= UNPROVEN if exchanged else grades(found) == {Grade.DERIVED}


V, D = 4, 16


class Selection(torch.nn.Module):
    """A `Linear(1, D)` for each variable, and weights for what each gives, as in a temporal fusion transformer."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.scalers = torch.nn.ModuleList(torch.nn.Linear(1, D) for _ in range(V))
        self.values = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(V))
        self.hidden, self.skip = torch.nn.Linear(V * D, D), torch.nn.Linear(V * D, V)
        self.gate, self.norm = torch.nn.Linear(D, 2 * V), torch.nn.LayerNorm(V)
        self.wrong = wrong

    def forward(self, x: Any) -> Any:
        every = [layer(x[..., k : k + 1]) for k, layer in enumerate(self.scalers)]
        if self.wrong:
            every[2] = every[2].abs()
        e = torch.cat(every, -1)
        h = torch.nn.functional.elu(self.hidden(e))
        weights = self.norm(torch.nn.functional.glu(self.gate(h)) + self.skip(e)).softmax(-1)
        values = torch.stack([layer(y) for layer, y in zip(self.values, every, strict=True)], -1)
        return (values * weights[..., None, :]).sum(-1)


def _selected(w: Any, x: Any) -> Any:
    every = x[..., None] * w["w"] + w["b"]
    e = every.reshape(*x.shape[:-1], -1)
    h = jax.nn.elu(e @ w["hidden"] + w["hidden_bias"])
    y = (h @ w["value"] + w["value_bias"]) * jax.nn.sigmoid(h @ w["gate"] + w["gate_bias"])
    weights = jax.nn.softmax(layer_norm(e @ w["skip"] + w["skip_bias"] + y, w["scale"], w["shift"], 1e-5), -1)
    values = jnp.stack([every[..., k, :] @ w[f"values{k}"] + w[f"values_bias{k}"] for k in range(V)], -2)
    return jnp.einsum("...v,...vd->...d", weights, values)


SELECTION = {
    "w": (V, D), "b": (V, D), "hidden": (V * D, D), "skip": (V * D, V), "hidden_bias": (D,),
    **dict.fromkeys(("value", "gate"), (D, V)),
    **dict.fromkeys(("skip_bias", "value_bias", "gate_bias", "scale", "shift"), (V,)),
    **{f"values{k}": (D, D) for k in range(V)}, **{f"values_bias{k}": (D,) for k in range(V)},
}  # fmt: skip


def test_several_features_with_a_vector_each_are_a_layer_for_each() -> None:
    module = Selection()
    found = derive(_selected, module, SELECTION, floats(5, V))
    assert grades(found) == {Grade.DERIVED}
    assert "scalers.{i}" in "\n".join(rules(found, module))
    assert (
        found.tried
    )  # layer by layer, and not by the outputs alone, which takes too long for a model of several such layers


@pytest.mark.slow
def test_another_function_behind_one_of_the_features_is_no_derivation() -> None:
    found = derive(_selected, Selection(wrong=True), SELECTION, floats(5, V))
    assert not found.complete and found.proof is None
