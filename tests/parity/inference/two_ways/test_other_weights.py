"""Code that differs where other weights make up for it: a rule has the sign or the factor, or the place is undecided, and never a difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional

from support.inferred import derive, floats, rules, tokens

ROWS, D, H, OUT = 12, 6, 7, 3
Leaves = Mapping[str, Any]
Of = Callable[[Any], Any]
TWO = {"a": (D, H), "b": (H,), "c": (H, OUT), "d": (OUT,)}


class Two(nn.Module):
    """A function between two layers."""

    def __init__(self, of: Of, last: Of = lambda y: y) -> None:
        super().__init__()
        self.l1, self.l2, self.of, self.last = nn.Linear(D, H), nn.Linear(H, OUT), of, last

    def forward(self, x: Any) -> Any:
        return self.last(self.l2(self.of(self.l1(x))))


def two(of: Of, last: Of = lambda y: y) -> Callable[[Leaves, Any], Any]:
    return lambda w, x: last(of(x @ w["a"] + w["b"]) @ w["c"] + w["d"])


def quick_gelu(x: Any, sigmoid: Of = jax.nn.sigmoid) -> Any:
    return x * sigmoid(1.702 * x)


def negated(of: Of) -> Callable[[Leaves, Any], Any]:
    return lambda w, x: of(w["b"] - x @ w["a"]) @ w["c"] + w["d"]


DERIVED: dict[str, tuple[Any, Of, Of, str]] = {
    "a layer that is subtracted": (negated(jnp.exp), torch.exp, lambda y: y, "from: a\n  prescaled_by: -1"),
    "an odd function": (two(lambda y: -jnp.tanh(y)), torch.tanh, lambda y: y, "from: a\n  bias: b\n  activation: tanh\n  prescaled_by: -1"),
    "quick_gelu": (two(quick_gelu), functional.silu, lambda y: y, "prescaled_by: 1/1.702"),
    "a sigmoid from one": (two(jnp.sin, jax.nn.sigmoid), torch.sin, lambda y: 1 - y.sigmoid(), "prescaled_by: -1"),
    "the smallest": (two(jnp.sin, lambda y: y.min(1)), torch.sin, lambda y: -y.amax(1), "prescaled_by: -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", DERIVED)
def test_a_rule_has_the_factor(name: str) -> None:
    function, of, last, line = DERIVED[name]
    net = Two(of, last)
    written = rules(derive(function, net, TWO, floats(ROWS, D)), net)
    assert any(line in rule for rule in written)


UNDECIDED: dict[str, tuple[Of, Of, str]] = {
    "tanh for sigmoid": (jax.nn.sigmoid, torch.tanh, "l1.weight times 0.5, l1.bias times 0.5, l2.weight times 0.5, l2.bias plus other numbers"),
    "a factor": (lambda y: 3 * jax.nn.relu(y), torch.relu, "l1.weight times 3, l1.bias times 3"),
    "cos for sin": (jnp.cos, torch.sin, "l1.bias plus 1.570796"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDECIDED)
def test_where_no_rule_says_it_the_place_is_undecided(name: str) -> None:
    theirs, ours, said = UNDECIDED[name]
    (difference,) = derive(two(theirs), Two(ours), TWO, floats(ROWS, D)).differences
    assert not difference.shown
    assert ", ".join(map(str, difference.made_up_by)) == said


FAULTS: dict[str, tuple[Any, Of, Of]] = {
    "a factor behind": (negated(jnp.exp), torch.exp, lambda y: y.tanh()),
    "quick_gelu as the output": (two(jnp.sin, quick_gelu), torch.sin, functional.silu),
    "gelu": (two(lambda y: jax.nn.gelu(y, approximate=False)), functional.silu, lambda y: y),
    "sigmoid as the output": (two(jnp.sin, jax.nn.sigmoid), torch.sin, torch.tanh),
    "from two": (two(jnp.sin, jax.nn.sigmoid), torch.sin, lambda y: 2 - y.sigmoid()),
    "both signs": (two(lambda y: jnp.abs(y) - y), torch.abs, lambda y: y),
    "the largest": (two(jnp.sin, lambda y: y.min(1)), torch.sin, lambda y: y.amax(1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_what_no_weights_make_up_for_is_a_difference(name: str) -> None:
    function, of, last = FAULTS[name]
    found = derive(function, Two(of, last), TWO, floats(ROWS, D))
    assert [(difference.shown, difference.made_up_by) for difference in found.differences] == [(True, ())]


class Both(nn.Module):
    """Gives what a layer gives, and the same again."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(D, H)

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self.l(x))
        return torch.cat([y, y], 1)


def test_a_value_that_is_used_as_it_is_as_well_is_a_difference() -> None:
    def function(w: Leaves, x: Any) -> Any:
        y = jnp.tanh(x @ w["a"] + w["b"])
        return jnp.concatenate([y, -y], 1)

    found = derive(function, Both(), {"a": (D, H), "b": (H,)}, floats(ROWS, D))
    assert [difference.shown for difference in found.differences] == [True]


class Tied(nn.Module):
    """A table that is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.l = nn.Embedding(11, D), nn.Linear(D, D)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.l(self.e(x))) @ self.e.weight.T


TIED = {"e": (11, D), "l": (D, D), "b": (D,)}


def test_a_table_that_is_used_twice_keeps_its_sign() -> None:
    net = Tied()
    found = derive(lambda w, x: jnp.tanh(-w["e"][x] @ w["l"] + w["b"]) @ w["e"].T, net, TIED, tokens(11, 3, 9))
    assert any("from: l\n" in rule and "prescaled_by: -1" in rule for rule in rules(found, net))


class Bags(nn.Module):
    """Tables, each the mean of its rows, joined with a layer's result; their products are used, too, as by DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.e = nn.Linear(D, D), nn.ModuleList(nn.EmbeddingBag(11, D, mode="mean") for _ in range(2))
        self.h = nn.Linear(3 * D + 9, OUT)

    def forward(self, x: Any) -> Any:
        ids = (x[:, D:].unflatten(1, (2, 3)).abs() * 4).long().clamp(max=10)
        bags = [e(ids[:, k]) for k, e in enumerate(self.e)]
        y = torch.cat([torch.relu(self.l(x[:, :D])), *bags], 1).view(len(x), 3, D)
        return self.h(torch.cat([y.flatten(1), (y @ y.mT).flatten(1)], 1))


BAGS = {"l": (D, D), "b": (D,), "e": (2, 11, D), "h": (3 * D + 9, OUT), "c": (OUT,)}


def bags(w: Leaves, x: Any) -> Any:
    ids = jnp.clip((jnp.abs(x[:, D:].reshape(-1, 2, 3)) * 4).astype(int), 0, 10)
    picked = jnp.stack([w["e"][k][ids[:, k]].sum(1) for k in range(2)], 1)
    y = jnp.concatenate([jax.nn.relu(x[:, :D] @ w["l"] + w["b"])[:, None], picked], 1)
    return jnp.concatenate([y.reshape(len(x), -1), (y @ y.mT).reshape(len(x), -1)], 1) @ w["h"] + w["c"]


@pytest.mark.slow
def test_weights_of_each_value_that_is_joined() -> None:
    (difference,) = derive(bags, Bags(), BAGS, floats(ROWS, D + 6)).differences
    assert not difference.shown and "takes the mean" in difference.problem and "sums" in difference.problem
    assert ", ".join(map(str, difference.made_up_by)) == "e.0.weight times 3, e.1.weight times 3"


@pytest.mark.slow
def test_several_layers_and_a_padded_convolution() -> None:
    deep = nn.Sequential(*(one for _ in range(3) for one in (nn.Linear(D, D), nn.Tanh())))
    shapes = {f"{of}{k}": size for k in range(3) for of, size in (("w", (D, D)), ("b", (D,)))}

    def negative(w: Leaves, x: Any) -> Any:
        for k in range(3):
            x = jnp.tanh(w[f"b{k}"] - x @ w[f"w{k}"])
        return x

    written = rules(derive(negative, deep, shapes, floats(ROWS, D)), deep)
    assert any("prescaled_by: -1" in rule for rule in written)
    for padding, shown in ((0, False), (1, True)):  # beside the border no bias holds the number that is added
        net = nn.Sequential(nn.Conv1d(4, 5, 3, padding=padding), nn.Tanh(), nn.Conv1d(5, 3, 3, padding=padding))
        (difference,) = derive(_convolved(padding), net, KERNELS, floats(3, 4, 9)).differences
        assert difference.shown is shown


KERNELS = {"c": (3, 4, 5), "cb": (5,), "e": (3, 5, 3), "eb": (3,)}


def _convolved(padding: int) -> Callable[[Leaves, Any], Any]:
    names = ("NCH", "HIO", "NCH")

    def layer(x: Any, kernel: Any, bias: Any) -> Any:
        return jax.lax.conv_general_dilated(x, kernel, (1,), [(padding,) * 2], dimension_numbers=names) + bias[:, None]

    return lambda w, x: layer(jax.nn.sigmoid(layer(x, w["c"], w["cb"])), w["e"], w["eb"])
