"""Gates that one norm takes together before they are split, in another order on the two sides; one side may join input and state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import UNPROVEN, grades, layer_norm
from support.inferred import derive as derive_of_x

D = 8
EPSILON = 1e-5


class Cell(torch.nn.Module):
    """One step of an LSTM or a GRU whose gates are i, f, g, o or r, z, n."""

    def __init__(self, gates: int, joined: bool = False) -> None:
        super().__init__()
        self.joined, self.gates = joined, gates
        self.a = torch.nn.Linear(2 * D if joined else D, gates * D, bias=False)
        if not joined:
            self.b = torch.nn.Linear(D, gates * D, bias=False)
        self.c, self.d = torch.nn.LayerNorm(gates * D), torch.nn.Linear(D, D, bias=False)

    def forward(self, x: Any, h: Any, c: Any) -> Any:
        gates = self.a(torch.cat([x, h], -1)) if self.joined else self.a(x) + self.b(h)
        parts = self.c(gates).chunk(self.gates, -1)
        if self.gates == 3:
            r, z, n = parts
            new = torch.tanh(n) * torch.sigmoid(r)
            return self.d(torch.sigmoid(z) * h + (1 - torch.sigmoid(z)) * new)
        i, f, g, o, *more = parts
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        for part in more:
            c = c * torch.sigmoid(part)
        return self.d(torch.sigmoid(o) * torch.tanh(c))


def cell(order: str, fault: str = "") -> Any:
    """The same in JAX: the gates stand in this order, and input and state are joined if there is one leaf for them."""

    def function(w: Mapping[str, Any], x: Any, h: Any, c: Any) -> Any:
        gates = jnp.concatenate([x, h], -1) @ w["w"] if "w" in w else x @ w["wx"] + h @ w["wh"]
        gates = layer_norm(gates, w["s"], w["b"], 1e-3 if fault == "epsilon" else EPSILON)
        q = dict(zip(order, jnp.split(gates, len(order), -1), strict=True))
        if len(order) == 3:
            new = jnp.tanh(q["n"]) * jax.nn.sigmoid(q["r"])
            z = jax.nn.sigmoid(q["z"])
            return (z * h + (1 - z) * new) @ w["o"]
        if fault == "exchanged":  # the forget gate is what is added, and the other way round
            q["f"], q["g"] = q["g"], q["f"]
            f, g = jnp.tanh(q["f"]), jax.nn.sigmoid(q["g"])
        else:
            f, g = jax.nn.sigmoid(q["f"]), jnp.tanh(q["g"])
        i = jax.nn.relu(q["i"]) if fault == "function" else jax.nn.sigmoid(q["i"])
        c = f * c + i * g
        for name in order:
            c = c * jax.nn.sigmoid(q[name]) if name not in "ifgo" else c
        return (jax.nn.sigmoid(q["o"]) * jnp.tanh(c)) @ w["o"]

    return function


def shapes(gates: int, *, joined: bool) -> dict[str, tuple[int, ...]]:
    one = {"w": (2 * D, gates * D)} if joined else {"wx": (D, gates * D), "wh": (D, gates * D)}
    return {**one, "s": (gates * D,), "b": (gates * D,), "o": (D, D)}


def random_inputs(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(5, D)) for name in "xhc"}


def derive(order: str, *, joined: tuple[bool, bool], fault: str = "") -> Derivation:
    """Derive a cell; `joined`: whether JAX, and whether the module, joins input and state."""
    function = cell(order, fault)
    return infer(
        lambda w, given: {"y": function(w, **given)},
        Cell(len(order), joined[1]).eval(),
        lambda module, given: {"y": module(**given)},
        random_inputs,
        shapes(len(order), joined=joined[0]),
    )


WAYS = [(True, False), (False, False), (False, True), (True, True)]


@pytest.mark.parametrize("joined", WAYS)
@pytest.mark.parametrize("order", ["fiog", "nzr"])
def test_gates_in_another_order_behind_a_norm_of_all_are_derived(order: str, joined: tuple[bool, bool]) -> None:
    found = derive(order, joined=joined)
    assert found.complete and grades(found) == {Grade.DERIVED}, found.differences


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["exchanged", "function", "epsilon"])
@pytest.mark.parametrize("joined", WAYS[:2])
def test_a_fault_behind_the_norm_is_not_derived(fault: str, joined: tuple[bool, bool]) -> None:
    found = derive("fiog", joined=joined, fault=fault)
    assert not found.complete and grades(found) <= UNPROVEN


class Loop(torch.nn.Module):
    """The LSTM over a sequence, with a norm of the cell; the inputs of all steps meet their matrix at once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Linear(D, 4 * D, bias=False) for _ in range(2))
        self.c, self.d, self.e = torch.nn.LayerNorm(4 * D), torch.nn.LayerNorm(D), torch.nn.Linear(D, D)

    def forward(self, x: Any) -> Any:
        h = c = torch.zeros(x.shape[1], D).to(x)
        found = []
        for gates in self.a(x).unbind(0):
            i, f, g, o = self.c(gates + self.b(h)).chunk(4, -1)
            c = self.d(f.sigmoid() * c + i.sigmoid() * g.tanh())
            h = o.sigmoid() * c.tanh()
            found.append(h)
        return self.e(torch.stack(found))


def loop(w: Mapping[str, Any], x: Any) -> Any:
    h = c = jnp.zeros((x.shape[1], D))
    found = []
    for step in x:
        gates = layer_norm(jnp.concatenate([step, h], -1) @ w["w"], w["s"], w["b"], EPSILON)
        f, i, o, g = jnp.split(gates, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        c = layer_norm(c, w["cs"], w["cb"], EPSILON)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        found.append(h)
    return jnp.stack(found) @ w["k"] + w["kb"]


def test_a_sequence_that_begins_with_the_same_in_all_rows() -> None:
    """As the blank of a transducer, which each sequence of labels begins with."""

    def inputs(seed: int) -> dict[str, Any]:
        x = np.random.default_rng(seed).normal(size=(3, 5, D))
        x[0] = x[0, :1]
        return {"x": x}

    vectors = {"s": (4 * D,), "b": (4 * D,), "cs": (D,), "cb": (D,), "kb": (D,)}
    found = derive_of_x(loop, Loop(), {"w": (2 * D, 4 * D), "k": (D, D), **vectors}, inputs)
    assert found.complete and grades(found) == {Grade.DERIVED}, found.differences


@pytest.mark.slow
def test_more_gates_than_the_search_reorders() -> None:
    found = derive("kfiog", joined=(True, False))
    assert found.complete and grades(found) == {Grade.DERIVED}, found.differences


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Cell(5), Cell(5)

    def forward(self, x: Any, h: Any, c: Any) -> Any:
        return self.two(self.one(x, h, c), h, c)


@pytest.mark.slow
@pytest.mark.parametrize("orders", [("kfiog", "ifgok"), ("kfiog", "gkfio")])
def test_layers_with_orders_of_their_own_are_no_difference(orders: tuple[str, str]) -> None:
    """What the search does not reorder is reordered layer by layer, or in all at once; where that is not enough, nothing is said to differ."""

    def function(w: Mapping[str, Any], x: Any, h: Any, c: Any) -> Any:
        one, two = ({name[1:]: of for name, of in w.items() if name[0] == layer} for layer in "12")
        return cell(orders[1])(two, cell(orders[0])(one, x, h, c), h, c)

    sizes = {f"{layer}{name}": size for layer in "12" for name, size in shapes(5, joined=True).items()}
    found = infer(
        lambda w, given: {"y": function(w, **given)},
        Two().eval(),
        lambda module, given: {"y": module(**given)},
        random_inputs,
        sizes,
    )
    assert found.complete or (orders[1] != "ifgok" and not any(one.shown for one in found.differences))
