"""Elements of a parameter that meet one number, which the model repeats, are told apart by what follows; if nothing does, they are tied."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import MORE_ROWS, Grade
from convert.inference.grading import proof, ties
from convert.inference.grading.grades import TOLD_BY
from convert.inference.infer import infer
from support.inferred import WIDTH, derive, floats, grades

D, N = WIDTH, 4
SHAPES = {"steps": (D, D), "A_log": (D, N), "read": (D, N), "out": (D, D)}


class Decays(torch.nn.Module):
    """As a state space model has them: one step for each channel, which N decays share; then `read` tells the decays apart."""

    def __init__(self, tells: bool) -> None:
        super().__init__()
        self.steps, self.out = (torch.nn.Linear(D, D, bias=False) for _ in range(2))
        self.A_log = torch.nn.Parameter(torch.randn(D, N))
        self.read, self.tells = torch.nn.Linear(D, N, bias=False), tells

    def forward(self, x: Any) -> Any:
        decays = torch.exp(torch.tanh(self.steps(x))[..., None] * -torch.exp(self.A_log))
        read = self.read(x)[..., None, :]
        return self.out((decays * read).sum(-1) if self.tells else decays.sum(-1) * read.sum(-1))


@pytest.mark.parametrize("tells", [True, False])
def test_decays_that_share_a_step(tells: bool) -> None:
    def function(w: Any, x: Any) -> Any:
        decays = jnp.exp(jnp.tanh(x @ w["steps"])[..., None] * -jnp.exp(w["A_log"]))
        read = (x @ w["read"])[..., None, :]
        return ((decays * read).sum(-1) if tells else decays.sum(-1) * read.sum(-1)) @ w["out"]

    found = derive(function, Decays(tells), SHAPES)
    tensor = found.tensor("A_log")
    assert tensor.grade is (Grade.DERIVED if tells else Grade.TIED)
    assert found.complete is tells
    assert all(tie.told_by == "" for tie in tensor.ties), "no input makes them differ"


def test_units_that_are_zero_in_different_draws() -> None:
    """With few rows, each draw has units behind the ReLU that are zero in all of them, and no draw tells all units apart."""
    units = 128
    shapes = {"up": (D, units), "down": (units, D)}

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(D, units, bias=False), torch.nn.Linear(units, D, bias=False)

        def forward(self, x: Any) -> Any:
            return self.b(torch.relu(self.a(x)))

    found = derive(lambda w, x: jnp.maximum(x @ w["up"], 0) @ w["down"], Net(), shapes, floats(2, D))
    assert {tensor.name: tensor.grade for tensor in found.tensors} == dict.fromkeys(
        ("a.weight", "b.weight"), Grade.DERIVED
    )


def _behind_a_threshold(inputs: Any) -> Any:
    """Most units are zero in all rows, as the inputs are small."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(D, 24, bias=False), torch.nn.Linear(24, D, bias=False)

        def forward(self, x: Any) -> Any:
            return self.b(torch.relu(self.a(x) - 1.5))

    shapes = {"up": (D, 24), "down": (24, D)}
    return derive(lambda w, x: jnp.maximum(x @ w["up"] - 1.5, 0) @ w["down"], Net(), shapes, inputs)


def test_units_that_are_zero_in_all_rows_ask_for_more_rows() -> None:
    """The inputs are random: other numbers in them would not help."""
    found = _behind_a_threshold(floats(1, D))
    (tie,) = found.tensor("b.weight").ties
    assert found.tensor("b.weight").grade is Grade.TIED and tie.told_by == MORE_ROWS
    assert _behind_a_threshold(floats(60, D)).complete


def test_columns_of_an_input_that_are_zero_ask_for_other_inputs() -> None:
    def inputs(seed: int) -> dict[str, Any]:
        x = floats(5, D)(seed)["x"]
        x[:, D // 2 :] = 0.0
        return {"x": x}

    found = derive(lambda w, x: jnp.tanh(x @ w["a"]), Plain(), {"a": (D, D)}, inputs)
    (tie,) = found.tensor("0.weight").ties
    assert tie.told_by == TOLD_BY


class Plain(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(D, D, bias=False), torch.nn.Tanh())


def test_units_that_large_weights_saturate() -> None:
    """All are 1 in float64 for the first weights, as in an LSTM behind many layers."""
    shapes = {"a": (D, D), "b": (D, D)}

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(D, D, bias=False), torch.nn.Linear(D, D, bias=False)

        def forward(self, x: Any) -> Any:
            return self.b(torch.tanh(3 * self.a(x).square().sum(1)))

    found = derive(lambda w, x: jnp.tanh(3 * jnp.square(x @ w["a"]).sum(1)) @ w["b"], Net(), shapes, floats(3, 9, D))
    assert {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}


@pytest.mark.parametrize("again", [False, True])
def test_columns_that_no_draw_moves_are_tied_without_a_run(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the leaf is used once more, where its elements meet other numbers: the module runs, and tells them apart."""
    runs: list[bool] = []
    outputs = proof.outputs
    monkeypatch.setattr(proof, "outputs", lambda *args: runs.append(True) or outputs(*args))  # type: ignore[func-returns-value]

    def inputs(seed: int) -> dict[str, Any]:
        x = floats(5, D)(seed)["x"]
        x[:, D // 2 :] = 1.0
        return {"x": x}

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(D, D, bias=False)

        def forward(self, x: Any) -> Any:
            y = torch.tanh(self.a(x))
            return self.a(y) if again else y

    def function(w: Any, x: Any) -> Any:
        y = jnp.tanh(x @ w["a"])
        return y @ w["a"] if again else y

    found = derive(function, Net(), {"a": (D, D)}, inputs)
    assert found.tensor("a.weight").grade is (Grade.DERIVED if again else Grade.TIED)
    assert not runs or again


@pytest.mark.slow
def test_units_of_a_normed_kernel_that_are_zero_in_different_draws() -> None:
    """No column of such a kernel can be moved alone; the draws have other units that are zero."""
    units = 64

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(D, units, bias=False)
            self.b = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(units, D, 1, bias=False))

        def forward(self, x: Any) -> Any:
            return self.b(torch.relu(self.a(x)).transpose(1, 2))

    def function(w: Any, x: Any) -> Any:
        y = jnp.maximum(x @ w["up"], 0) @ (w["down"] / jnp.linalg.norm(w["down"], axis=0) * w["scale"])
        return y.swapaxes(1, 2)

    found = derive(function, Net(), {"up": (D, units), "down": (units, D), "scale": (D,)}, floats(2, 2, D))
    assert found.complete and {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}


@pytest.mark.parametrize("repeated", [True, False])
def test_an_input_is_named_only_where_one_would_help(repeated: bool) -> None:
    """Two features are equal, because the inputs are or because the model makes them so."""

    def inputs(seed: int) -> dict[str, Any]:
        x = floats(3, D)(seed)["x"]
        return {"x": np.concatenate([x[:, 1:], x[:, 1:2]], 1) if repeated else x}

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(D, D, bias=False)

        def forward(self, x: Any) -> Any:
            return self.a(x if repeated else torch.cat([x[:, 1:], x[:, 1:2]], 1))

    def function(w: Any, x: Any) -> Any:
        return (x if repeated else jnp.concatenate([x[:, 1:], x[:, 1:2]], 1)) @ w["out"]

    (tensor,) = derive(function, Net(), {"out": (D, D)}, inputs).tensors
    assert tensor.grade is Grade.TIED and all(bool(tie.told_by) is repeated for tie in tensor.ties)


MANY = 300  # more than are moved one by one


class Repeated(torch.nn.Module):
    """A number that many elements of a parameter multiply, and what follows."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.a, self.d = way, torch.nn.Parameter(torch.zeros(MANY)), torch.nn.Linear(WIDTH, 1)

    def forward(self, x: Any) -> Any:
        y = self.d(x) * self.a
        if self.way == "places":
            return (torch.tanh(y) * torch.arange(1.0, MANY + 1)).sum(-1)
        return torch.tanh(y).sum(-1) if self.way == "sum" else (y.sort(-1)[0] * torch.arange(1.0, MANY + 1)).sum(-1)


@pytest.mark.parametrize("way", ["places", "sum", "sorted"])
def test_many_columns_are_told_apart_by_their_derivatives(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of sorted equal numbers differ, although their order is free: runs show that they are no derivatives."""

    def function(w: Any, x: Any) -> Any:
        y = (x @ w["w"] + w["b"]) * w["a"]
        if way == "places":
            return (jnp.tanh(y) * jnp.arange(1.0, MANY + 1)).sum(-1)
        return jnp.tanh(y).sum(-1) if way == "sum" else (jnp.sort(y, -1) * jnp.arange(1.0, MANY + 1)).sum(-1)

    def grade() -> Grade:
        found = derive(function, Repeated(way), {"a": (MANY,), "w": (WIDTH, 1), "b": (1,)}, floats(6, WIDTH))
        return found.tensor("a").grade

    assert grade() is (Grade.DERIVED if way == "places" else Grade.TIED)
    if way == "sorted":
        monkeypatch.setattr(ties, "SAMPLE", 0)
        assert grade() is Grade.DERIVED


# ---- products of two elements of one value, in either order


class Quadratic(torch.nn.Module):
    """A layer of all products of two elements; `power` of the second one."""

    def __init__(self, *, conv: bool, power: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Conv1d(9, 4, 1, bias=False) if conv else torch.nn.Linear(9, 4, bias=False)
        self.out, self.conv, self.power = torch.nn.Linear(4, 2, bias=False), conv, power

    def forward(self, x: Any) -> Any:
        other = x if self.power == 1 else x**self.power
        pairs = (x[:, :, None] * other[:, None]).flatten(1)
        y = self.layer(pairs[..., None]).squeeze(-1) if self.conv else self.layer(pairs)
        return self.out(torch.tanh(y))


def _quadratic(module: Quadratic) -> Any:
    def function(p: Any, given: Any) -> Any:
        other = given["x"] ** module.power
        return {"y": jnp.tanh(jnp.einsum("bi,bj,oij->bo", given["x"], other, p["w"])) @ p["o"]}

    def inputs(seed: int) -> dict[str, Any]:
        return {"x": np.random.default_rng(seed).normal(size=(5, 3))}

    shapes = {"w": (4, 3, 3), "o": (4, 2)}
    return infer(function, module.eval(), lambda net, given: {"y": net(**given)}, inputs, shapes)


@pytest.mark.parametrize("conv", [False, True])
def test_products_in_either_order_are_interchangeable(conv: bool) -> None:
    """x_i x_j and x_j x_i are equal for all inputs: no larger ones would tell them apart."""
    found = _quadratic(Quadratic(conv=conv))
    layer = found.tensor("layer.weight")
    assert found.complete and layer.grade is Grade.INTERCHANGEABLE and not layer.ties
    (other,) = layer.alternatives.values()
    assert len(other[0].elements) == 6 * 4 and sorted(other[0].positions) != list(other[0].positions)


def test_products_of_two_values_are_derived() -> None:
    assert grades(_quadratic(Quadratic(conv=False, power=2))) == {Grade.DERIVED}
