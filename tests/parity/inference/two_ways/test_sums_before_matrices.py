"""Equal programs of which one adds or multiplies a parameter in front of a matrix, and the other behind it, are never said to differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.cli.infer_text import UNDECIDED, hint, summary
from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, floats, grades, rules, sources

D, T = WIDTH, 6


class Net(torch.nn.Module):
    """Layers with names, and a function of them and of x."""

    def __init__(self, forward: Callable[[Any, Any], Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.apply_to = forward

    def forward(self, x: Any) -> Any:
        return self.apply_to(self, x)


def _linear(*, bias: bool = False) -> torch.nn.Linear:
    return torch.nn.Linear(D, D, bias=bias)


def _parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape))


def _bias_in_front(w: Any, x: Any) -> Any:
    return jnp.tanh((x + w["b"]) @ w["a"]) @ w["o"]


def _bias_behind(m: Any, x: Any) -> Any:
    return m.o((m.a(x) + m.a(m.b)).tanh())


def _centred(w: Any, x: Any) -> Any:
    return jnp.tanh(((x - w["m"]) * w["s"]) @ w["a"]) @ w["o"]


def _centred_behind(m: Any, x: Any) -> Any:
    return m.o((m.a(x * m.s) - m.a(m.m * m.s)).tanh())


def _modulated(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w["a"] + w["ab"])
    return ((1 + (x.mean(1) @ w["f"])[:, None]) * h) @ w["o"]


def _modulated_behind(m: Any, x: Any) -> Any:
    h = m.a(x).tanh()
    return m.o(h) + m.o(m.g(x.mean(1))[:, None] * h)


SQUARE = {"a": (D, D), "o": (D, D)}
PAIRS: dict[str, Any] = {
    "a bias": (_bias_in_front, _bias_behind, {"b": (D,)} | SQUARE, {"b": lambda: _parameter(D)}),
    "a mean and a scale": (
        _centred,
        _centred_behind,
        {"m": (D,), "s": (D,)} | SQUARE,
        {"m": lambda: _parameter(D), "s": lambda: _parameter(D)},
    ),
    "FiLM": (
        _modulated,
        _modulated_behind,
        {"ab": (D,), "f": (D, D)} | SQUARE,
        {"a": lambda: _linear(bias=True), "g": _linear},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_weights_that_were_guessed_where_the_programs_seem_to_differ_are_proven(name: str) -> None:
    source, target, shapes, parts = PAIRS[name]
    module = Net(target, **{k: make() for k, make in ({"a": _linear, "o": _linear} | parts).items()})
    found = derive(source, module, shapes, floats(2, T, D))
    assert found.complete and found.differences == ()
    assert grades(found) == {Grade.DERIVED}
    assert rules(found, module)


def test_another_sign_behind_the_matrix_is_no_guess_that_holds() -> None:
    module = Net(
        lambda m, x: m.o((m.a(x * m.s) + m.a(m.m * m.s)).tanh()),
        a=_linear(),
        o=_linear(),
        m=_parameter(D),
        s=_parameter(D),
    )
    found = derive(_centred, module, PAIRS["a mean and a scale"][2], floats(2, T, D))
    assert not found.complete and found.proof is None and found.differences
    assert grades(found).isdisjoint({Grade.DERIVED, Grade.INTERCHANGEABLE})
    assert next(iter(summary(found, {}))).startswith("differs: ")


def test_two_leaves_that_may_change_places_are_interchangeable_where_they_were_guessed() -> None:
    """The bias stands in front of the matrix on one side, so that both are found behind what seems to be a difference."""

    def source(w: Any, x: Any) -> Any:
        return jnp.tanh((x + w["b"] + w["c"]) @ w["a"]) @ w["o"]

    module = Net(
        lambda m, x: m.o((m.a(x) + m.a(m.b) + m.a(m.c)).tanh()),
        a=_linear(),
        o=_linear(),
        b=_parameter(D),
        c=_parameter(D),
    )
    found = derive(source, module, {"b": (D,), "c": (D,)} | SQUARE, floats(2, T, D))
    assert found.complete
    assert {found.tensor(name).grade for name in "bc"} == {Grade.INTERCHANGEABLE}
    assert {sources(found.tensor(name)) for name in "bc"} == {"b", "c"}


def test_what_neither_a_repair_nor_a_guess_explains_is_undecided() -> None:
    """Scores with a matrix between queries and keys: one program multiplies the keys by it, the other one the queries, each feature times a number."""

    def source(w: Any, x: Any) -> Any:
        return (x @ w["q"]) @ jnp.swapaxes((x @ w["c"]) @ w["k"], 1, 2)

    def target(m: Any, x: Any) -> Any:
        return ((m.q(x) * torch.arange(1, D + 1)) @ m.k.weight) @ m.c(x).mT

    narrow, wide = torch.nn.Linear(D, 6, bias=False), torch.nn.Linear(6, D, bias=False)
    module = Net(target, q=_linear(), c=narrow, k=wide)
    found = derive(source, module, {"q": (D, D), "c": (D, 6), "k": (6, D)}, floats(2, T, D))
    (difference,) = found.differences
    assert not difference.shown and difference.to_dict()["shown"] is False
    said, *_, last = summary(found, {})
    assert said.startswith("undecided: ") and said.endswith(UNDECIDED) and last == hint(found)


@pytest.mark.parametrize("margin", [0.35, pytest.param(0.3, marks=pytest.mark.slow)])
def test_a_kernel_that_is_normalised_before_the_product_or_behind_it(margin: float) -> None:
    """The classes of CosFace: h (W / |W|) is (h W) / |W|."""

    def source(w: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w["a"])
        cosines = h @ w["o"] / jnp.linalg.norm(w["o"], axis=0)
        return 16.0 * (cosines - 0.35 * (jnp.arange(7) == 2))

    def target(m: Any, x: Any) -> Any:
        cosines = torch.nn.functional.linear(m.a(x).tanh(), torch.nn.functional.normalize(m.classes))
        return 16.0 * torch.where(torch.arange(7) == 2, cosines - margin, cosines)

    module = Net(target, a=_linear(), classes=_parameter(7, D))
    found = derive(source, module, {"a": (D, D), "o": (D, 7)}, floats(2, T, D))
    assert found.complete is (margin == 0.35)
    if found.complete:
        assert sources(found) == {"classes": "o", "a.weight": "a"} and rules(found, module)
    else:
        assert found.differences[0].shown and "0.3" in found.differences[0].problem


POSITIONS = np.random.default_rng(0).integers(-8, 9, (T, D)) / 8


def _with_positions(behind: bool) -> Callable[[Any, Any], Any]:
    def function(w: Any, x: Any) -> Any:
        k = x @ w["a"] + POSITIONS @ w["a"] + w["ab"] if behind else (x + POSITIONS) @ w["a"] + w["ab"]
        return jax.nn.softmax(x @ jnp.swapaxes(k, 1, 2), -1) @ x @ w["o"]

    return function


def _torch_positions(behind: bool, factor: float = 1.0) -> Callable[[Any, Any], Any]:
    def function(m: Any, x: Any) -> Any:
        p = factor * torch.as_tensor(POSITIONS)
        k = m.a(x) + p @ m.a.weight.T if behind else m.a(x + p)
        return m.o((x @ k.mT).softmax(-1) @ x)

    return function


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_positions_that_are_added_to_what_enters_a_layer_or_to_what_it_gives(behind: bool, factor: float) -> None:
    module = Net(_torch_positions(not behind, factor), a=_linear(bias=True), o=_linear())
    found = derive(_with_positions(behind), module, {"ab": (D,)} | SQUARE, floats(2, T, D))
    assert found.complete is (factor == 1)
    if found.complete:
        assert grades(found) == {Grade.DERIVED} and rules(found, module)
