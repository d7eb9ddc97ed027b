"""A number that one program adds to a part of what a layer gives: the bias has it, in the other program or in both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import haiku
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from support.inferred import WIDTH, derive, floats, rules

SIZE, OUT = 7, 5
GATES: Mapping[str, tuple[int, ...]] = {"w": (WIDTH, 3 * SIZE), "b": (3 * SIZE,), "v": (SIZE, OUT)}
PARTS = "(E + E + E)"


def _gates(forget: float = 0.0, given: float = 0.0) -> Callable[[Any, Any], Any]:
    """A function with numbers that are added to its gates."""

    def function(w: Any, x: Any) -> Any:
        i, f, c = jnp.split(x @ w["w"] + w["b"], 3, -1)
        return (jax.nn.sigmoid(f + forget if forget else f) * jnp.tanh(i + given if given else i) + c) @ w["v"]

    return function


class Gates(torch.nn.Module):
    """The same layer, with its gates in an order, and numbers that are added to them."""

    def __init__(self, order: str = "ifc", forget: float = 0.0, given: float = 0.0, uses: bool = False) -> None:
        super().__init__()
        self.l, self.o = torch.nn.Linear(WIDTH, 3 * SIZE), torch.nn.Linear(SIZE, OUT, bias=False)
        self.order, self.forget, self.given, self.uses = order, forget, given, uses

    def forward(self, x: Any) -> Any:
        gates = dict(zip(self.order, self.l(x).chunk(3, -1), strict=True))
        i, f = gates["i"], gates["f"]
        made = torch.sigmoid(f + self.forget if self.forget else f) * torch.tanh(i + self.given if self.given else i)
        return self.o(made + gates["c"] + (f if self.uses else 0))


def _biases(found: list[str]) -> list[str]:
    """What the rules say of the bias of a layer."""
    return [rule.replace("\n", ",").replace("- from: ", "") for rule in found if ".bias" in rule]


@pytest.mark.parametrize(
    ("function", "module", "parts"),
    [
        (_gates(1), Gates(), ["b 1 1", "b + 1 2 2", "b 3 3"]),
        (_gates(1), Gates("fic"), ["b + 1 2 1", "b 1 2", "b 3 3"]),
        (_gates(0.5, -2), Gates(), ['"b - 2" 1 1', "b + 0.5 2 2", "b 3 3"]),
        (_gates(), Gates("ifc", 1), ["b 1 1", '"b - 1" 2 2', "b 3 3"]),
        (_gates(1), Gates("ifc", 0, 1), ['"b - 1" 1 1', "b + 1 2 2", "b 3 3"]),
    ],
    ids=["the JAX model", "in another order", "several numbers", "the target", "to another part each"],
)
def test_a_part_of_a_bias_has_a_number(function: Any, module: torch.nn.Module, parts: list[str]) -> None:
    found = derive(function, module, GATES)
    wanted = []
    for part in parts:
        leaf, ours, theirs = part.rsplit(" ", 2)
        wanted.append(
            f'{leaf},  axes: {PARTS},  part: {ours} of 3,  parameter: {{name: l.bias, part: "{theirs} of 3"}}'
        )
    assert _biases(rules(found, module)) == wanted


def test_a_number_that_both_add_is_none_of_the_bias() -> None:
    module = Gates("ifc", 1)
    assert _biases(rules(derive(_gates(1), module, GATES), module)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "module"),
    [
        (_gates(), Gates("ifc", 0.5)),
        (_gates(), Gates("ifc", 1, uses=True)),
    ],
    ids=["another number than 1, of the target", "a part that is used without the number, too"],
)
def test_what_no_bias_makes_up_for_is_a_difference(function: Any, module: torch.nn.Module) -> None:
    found = derive(function, module, GATES)
    assert not found.complete and "adds" in found.differences[0].problem


class Written(torch.nn.Module):
    """Two parts of a layer, and what is made of them."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.l, self.o, self.function = (
            torch.nn.Linear(WIDTH, 2 * SIZE),
            torch.nn.Linear(SIZE, OUT, bias=False),
            function,
        )

    def forward(self, x: Any) -> Any:
        return self.o(self.function(*self.l(x).chunk(2, -1)))


TWICE = {
    "the JAX model": (lambda y, s: jnp.tanh(y) * (1 + s) + (1 + s), lambda y, s: torch.tanh(y) * s + s, "b + 1"),
    "the target": (lambda y, s: jnp.tanh(y) * s + s, lambda y, s: torch.tanh(y) * (1 + s) + (1 + s), '"b - 1"'),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_number_that_is_added_in_two_places_is_one_of_the_bias(name: str) -> None:
    of_source, of_target, leaf = TWICE[name]
    shapes = {"w": (WIDTH, 2 * SIZE), "b": (2 * SIZE,), "v": (SIZE, OUT)}

    def function(w: Any, x: Any) -> Any:
        return of_source(*jnp.split(x @ w["w"] + w["b"], 2, -1)) @ w["v"]

    module = Written(of_target)
    said = _biases(rules(derive(function, module, shapes), module))
    assert [one.split(",  ")[0] for one in said] == ["b", leaf]


SAME = {
    "a gated unit": (lambda g, u: (z := jax.nn.silu(g)) * u + z, lambda g, u: torch.nn.functional.silu(g) * (u + 1)),
    "a scale of one more": (lambda y, s: jnp.tanh(y) + jnp.tanh(y) * s, lambda y, s: torch.tanh(y) * (1 + s)),
    "a factor of an exponential": (lambda y, s: y * jnp.exp(s) * np.e, lambda y, s: y * torch.exp(s + 1)),
    "a square": (lambda y, s: y * (s * s + 2 * s + 1), lambda y, s: y * (s + 1) ** 2),
    "another place in a sum": (lambda y, s: jnp.tanh(s - y + 1), lambda y, s: torch.tanh((s + 1) - y)),
    "no effect": (lambda y, s: y * jax.nn.softmax(s, -1), lambda y, s: y * torch.softmax(s + 1, -1)),
    "no use": (lambda y, s: jnp.tanh(y) + jnp.cos(s), lambda y, s: (s + 1, torch.tanh(y) + torch.cos(s))[1]),
}


@pytest.mark.parametrize("name", SAME)
def test_a_number_that_is_written_in_another_way_is_none_of_the_bias(name: str) -> None:
    of_source, of_target = SAME[name]
    shapes = {"w": (WIDTH, 2 * SIZE), "b": (2 * SIZE,), "v": (SIZE, OUT)}

    def function(w: Any, x: Any) -> Any:
        return of_source(*jnp.split(x @ w["w"] + w["b"], 2, -1)) @ w["v"]

    module = Written(of_target)
    assert _biases(rules(derive(function, module, shapes), module)) == []


@pytest.mark.slow
def test_a_mask_is_no_number_of_a_bias() -> None:
    """A module that lacks it computes something else, which no bias of an ordinary size makes up for."""

    def function(w: Any, x: Any) -> Any:
        y, s = jnp.split(x @ w["w"] + w["b"], 2, -1)
        return (y * jax.nn.softmax(s + jnp.where(jnp.arange(SIZE) < 4, 0, -1e9), -1)) @ w["v"]

    module = Written(lambda y, s: y * torch.softmax(s, -1))
    found = derive(function, module, {"w": (WIDTH, 2 * SIZE), "b": (2 * SIZE,), "v": (SIZE, OUT)})
    assert not found.complete


def test_the_number_of_a_bias_has_a_note() -> None:
    (note,) = derive(_gates(1), Gates(), GATES).notes
    assert note == (
        "l.bias is its leaf plus 1, or a part is: the code of one program adds or subtracts this number there, "
        "and that of the other does not; if it lacks it by mistake, correct that"
    )


LAYERS = 6


def _film(w: Any, x: Any) -> Any:
    for k in range(LAYERS):
        i, f, c = jnp.split(x @ w[f"w{k}"] + w[f"b{k}"], 3, -1)
        x = x + jnp.tanh(x @ w[f"u{k}"]) * (1 + i) + c + jax.nn.sigmoid(f + 1 if k == 3 else f)
    return x


class Film(torch.nn.Module):
    """Scales and shifts, with a number that other layers add than those of the function."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.u = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Any) -> Any:
        for k, (a, u) in enumerate(zip(self.a, self.u, strict=True)):
            i, f, c = a(x).chunk(3, -1)
            x = x + torch.tanh(u(x)) * (1 + i) + c + torch.sigmoid(f + 1 if k in (1, 4) else f)
        return x


@pytest.mark.slow
def test_each_layer_has_its_own_number() -> None:
    shapes = {f"w{k}": (WIDTH, 3 * WIDTH) for k in range(LAYERS)} | {f"b{k}": (3 * WIDTH,) for k in range(LAYERS)}
    module = Film()
    found = derive(_film, module, shapes | {f"u{k}": (WIDTH, WIDTH) for k in range(LAYERS)})
    numbers = [one for one in _biases(rules(found, module)) if "- 1" in one or "+ 1" in one]
    assert [one.split(",  ")[0] for one in numbers] == ['"b{1,4} - 1"', "b3 + 1"]


class Cell(torch.nn.Module):
    """A recurrent cell with convolutions, of data that are joined or of each."""

    def __init__(self, *, joined: bool) -> None:
        super().__init__()
        self.x = torch.nn.Conv2d(3 + SIZE if joined else 3, 4 * SIZE, 3, padding=1)
        self.h = None if joined else torch.nn.Conv2d(SIZE, 4 * SIZE, 3, padding=1, bias=False)
        self.o = torch.nn.Linear(SIZE, OUT, bias=False)

    def forward(self, x: Any) -> Any:
        x = x.permute(0, 1, 4, 2, 3)
        h = c = x.new_zeros(len(x), SIZE, *x.shape[-2:])
        made = []
        for t in range(x.shape[1]):
            gates = self.x(torch.cat([x[:, t], h], 1)) if self.h is None else self.x(x[:, t]) + self.h(h)
            i, f, o, g = gates.chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            made.append(h)
        return self.o(torch.stack(made, 1).permute(0, 1, 3, 4, 2))


@pytest.mark.slow
@pytest.mark.parametrize("joined", [True, False])
def test_the_forget_gate_of_a_cell_with_convolutions(joined: bool) -> None:
    """haiku's Conv2DLSTM adds 1 to its forget gate, and has two biases; PyTorch's cells are written with one and no number."""

    def forward(x: Any) -> Any:
        cell = haiku.Conv2DLSTM(x.shape[2:4], SIZE, 3)
        made, _ = haiku.static_unroll(cell, x.swapaxes(0, 1), cell.initial_state(len(x)))
        return haiku.Linear(OUT, with_bias=False, name="o")(made.swapaxes(0, 1))

    model = haiku.without_apply_rng(haiku.transform(forward))
    x = floats(2, 3, 5, 4, 3)
    tree = jax.eval_shape(model.init, jax.random.key(0), jnp.asarray(x(0)["x"]))
    names = [(module, name) for module, of in tree.items() for name in of]

    def function(leaves: Mapping[str, Any], x: Any) -> Any:
        given: dict[str, dict[str, Any]] = {module: {} for module, _ in names}
        for module, name in names:
            given[module][name] = leaves[f"{module}/{name}"]
        return model.apply(given, x)

    module = Cell(joined=joined)
    shapes = {f"{module}/{name}": tuple(np.shape(tree[module][name])) for module, name in names}
    said = _biases(rules(derive(function, module, shapes, x), module))
    assert len(said) == 4
    assert [" + 1," in one for one in said] == [False, True, False, False]
    assert all(one.count("/b") == 2 for one in said)
