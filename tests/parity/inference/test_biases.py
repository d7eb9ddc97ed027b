"""Several biases of one sum are one bias in the other program, and so are a bias and a number; what no bias holds is a difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import derive, floats, rules

ROWS, INPUTS, WIDTH = 4, 3, 6
SHAPES = {"w": (INPUTS, WIDTH), "b": (WIDTH,), "c": (WIDTH,), "m": (WIDTH, WIDTH), "v": (WIDTH, 2)}
Behind = Callable[[Any, Mapping[str, Any]], Any]  # what JAX adds to a sum


class Net(torch.nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.a, self.o = torch.nn.Linear(INPUTS, WIDTH, bias=bias), torch.nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: Any) -> Any:
        return self.o(torch.tanh(self.a(x)))


def derived(behind: Behind, bias: bool = True) -> tuple[Derivation, Mapping[str, str]]:
    def function(leaves: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        return {"y": jnp.tanh(behind(given["x"] @ leaves["w"] + leaves["b"], leaves)) @ leaves["v"]}

    def inputs(seed: int) -> dict[str, Any]:
        return {"x": np.random.default_rng(seed).normal(size=(ROWS, INPUTS))}

    net = Net(bias).eval()
    found = infer(function, net, lambda net, given: {"y": net(given["x"])}, inputs, SHAPES)
    return found, write_rules(found, model_of_module(net, "Net")).open


LEAVES = "the elements of its bias are computed from several leaves"
SAME: dict[str, tuple[Behind, str | None]] = {
    "two": (lambda y, own: y + own["c"], None),  # a rule adds them up
    "one": (lambda y, own: y + 1, None),
    "half": (lambda y, own: y + 0.5, None),
    "twice": (lambda y, own: y + own["b"], None),
    "table": (lambda y, own: y + np.arange(WIDTH) / 3, LEAVES),
}


@pytest.mark.parametrize("name", SAME)
def test_biases_that_are_added_up_are_derived(name: str) -> None:
    behind, words = SAME[name]
    found, unwritten = derived(behind)
    assert found.complete
    assert (words is None) is (unwritten == {}) and (words is None or words in unwritten["a.bias"])


def test_what_a_bias_may_hold_is_no_difference() -> None:
    """The product of two leaves is none that the search makes a bias of; another bias would make the programs equal."""
    found, _ = derived(lambda y, own: y + own["c"] @ own["m"])
    assert not found.complete
    assert [difference.shown for difference in found.differences] == [False]


class InFront(torch.nn.Module):
    """A layer with a bias, or without one; what it is given is squared as well, or not."""

    def __init__(self, *, bias: bool, squared: bool) -> None:
        super().__init__()
        self.k, self.o = torch.nn.Linear(5, WIDTH, bias=bias), torch.nn.Linear(WIDTH, 3)
        self.squared = squared

    def forward(self, x: Any) -> Any:
        y = self.o(torch.tanh(self.k(x)))
        return y + x.pow(2).sum(-1, keepdim=True) if self.squared else y


@pytest.mark.parametrize(("bias", "squared"), [(True, False), (False, False), (True, True)])
def test_a_vector_in_front_of_a_layer_may_be_in_its_bias(bias: bool, squared: bool) -> None:
    """``(x + p) W + b`` is ``x W + (p W + b)``: no difference, unless there is no bias, or something else is given the sum, too."""

    def function(w: Mapping[str, Any], x: Any) -> Any:
        x = x + w["p"]
        y = jnp.tanh(x @ w["k"] + (w["b"] if bias else 0)) @ w["o"] + w["c"]
        return y + (x**2).sum(-1, keepdims=True) if squared else y

    shapes = {"p": (5,), "k": (5, WIDTH), "o": (WIDTH, 3), "c": (3,)} | ({"b": (WIDTH,)} if bias else {})
    found = derive(function, InFront(bias=bias, squared=squared), shapes, floats(3, 4, 5))
    assert not found.complete
    assert [difference.shown for difference in found.differences] == [squared or not bias]


class Positions(torch.nn.Module):
    """A table that is added to what a layer without a bias gives."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.o = torch.nn.Linear(5, WIDTH, bias=False), torch.nn.Linear(WIDTH, 3)
        self.table = torch.nn.Parameter(torch.zeros(4, WIDTH))

    def forward(self, x: Any) -> Any:
        return self.o(torch.tanh(self.k(x.mean(1))[:, None] + self.table))


def test_a_bias_may_be_in_a_table_that_is_added_behind_a_broadcast() -> None:
    found = derive(
        lambda w, x: jnp.tanh((x.mean(1) @ w["k"] + w["b"])[:, None] + w["table"]) @ w["o"] + w["c"],
        Positions(),
        {"k": (5, WIDTH), "b": (WIDTH,), "table": (4, WIDTH), "o": (WIDTH, 3), "c": (3,)},
        floats(3, 4, 5),
    )
    assert not any(difference.shown for difference in found.differences)


@pytest.mark.slow
def test_what_a_matrix_may_hold_is_no_difference() -> None:
    """``h + h U`` is ``h (U + 1)``, as in linen's SimpleCell with ``residual=True``."""

    class Square(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return torch.tanh(self.a(x))

    def shown(added: Callable[[Any], Any]) -> list[bool]:
        def function(leaves: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
            return {"y": jnp.tanh(given["x"] @ leaves["m"] + leaves["b"] + added(given["x"]))}

        found = infer(
            function,
            Square().eval(),
            lambda net, given: {"y": net(given["x"])},
            lambda seed: {"x": np.random.default_rng(seed).normal(size=(ROWS, WIDTH))},
            {name: SHAPES[name] for name in "mb"},
        )
        assert not found.complete
        return [difference.shown for difference in found.differences]

    assert shown(lambda x: 2 * x) == [False]
    assert shown(lambda x: x * x) == [True]  # planted


PLANTED: dict[str, tuple[Behind, bool]] = {
    "rows": (lambda y, own: y + own["c"] * np.arange(1, ROWS + 1)[:, None], True),
    "no bias": (lambda y, own: y + 1, False),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_no_bias_holds_differs(name: str) -> None:
    found, _ = derived(*PLANTED[name])
    assert not found.complete
    assert [difference.shown for difference in found.differences] == [True]


class Condition(torch.nn.Module):
    """Two layers that add what the mean of all places gives to each place."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.mean, self.each, self.back = (
            torch.nn.ModuleList(torch.nn.Linear(*of, bias=own) for _ in range(2))
            for of, own in (((5, WIDTH), False), ((5, WIDTH), bias), ((WIDTH, 5), False))
        )

    def forward(self, x: Any) -> Any:
        for mean, each, back in zip(self.mean, self.each, self.back, strict=True):
            x = x + back(torch.tanh(each(x) + mean(x.mean(1))[:, None]))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_in_front_of_a_broadcast(bias: bool) -> None:
    """Planted: the module has no bias behind it either."""

    def function(w: Mapping[str, Any], x: Any) -> Any:
        for i in range(2):
            c = x.mean(1) @ w[f"c{i}"] + w[f"b{i}"]
            x = x + jnp.tanh(x @ w[f"k{i}"] + c[:, None]) @ w[f"o{i}"]
        return x

    of_each: dict[str, tuple[int, ...]] = {"c": (5, WIDTH), "b": (WIDTH,), "k": (5, WIDTH), "o": (WIDTH, 5)}
    module = Condition(bias)
    found = derive(function, module, {f"{n}{i}": of for i in range(2) for n, of in of_each.items()}, floats(3, 7, 5))
    if bias:
        assert "- einsum: ...D,DC->...C\n  from: k{j}\n  bias: b{j}\n  linear: each.{j}" in rules(found, module)
    else:
        assert not found.complete


class Branches(torch.nn.Module):
    """Two blocks, each with two layers whose results are added up; `bent`: the second one's goes through a function first."""

    def __init__(self, *, bent: bool) -> None:
        super().__init__()
        self.one, self.two = (torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(2)) for _ in "ab")
        self.bent = bent

    def forward(self, x: Any) -> Any:
        for one, two in zip(self.one, self.two, strict=True):
            y = two(x.sin())
            x = torch.tanh(one(x) + (y.tanh() if self.bent else y))
        return x


@pytest.mark.parametrize("bent", [False, True])
def test_which_of_two_biases_of_one_sum_is_which_changes_nothing(bent: bool) -> None:
    """In each block, also where it is found as the one before it."""

    def function(w: Mapping[str, Any], x: Any) -> Any:
        for k in range(2):
            y = jnp.sin(x) @ w[f"n{k}"] + w[f"c{k}"]
            x = jnp.tanh(x @ w[f"m{k}"] + w[f"b{k}"] + (jnp.tanh(y) if bent else y))
        return x

    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(2):
        shapes |= {f"{name}{k}": (5, 5) if name in "mn" else (5,) for name in "mnbc"}
    found = derive(function, Branches(bent=bent), shapes, floats(3, 4, 5))
    assert found.complete
    biases = {t.grade for t in found.tensors if t.name.endswith("bias")}
    assert biases == {Grade.DERIVED if bent else Grade.INTERCHANGEABLE}
    assert {t.grade for t in found.tensors if t.name.endswith("weight")} == {Grade.DERIVED}
