"""Leaves that are no tensors as they are: the source adds a number to them, or the target needs them with the other sign."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from support.inferred import derive, floats, rules

B, T, D, H = 3, 5, 4, 6
Leaves = Mapping[str, Any]


class Lstm(nn.Module):
    """An LSTM in the code of the module: a layer for each gate and side, or one for all."""

    def __init__(self, fused: bool, forget: Callable[[Any], Any] = torch.sigmoid) -> None:
        super().__init__()
        sides = {"both": (D + H, 4 * H)} if fused else {f"{s}{g}": (n, H) for g in "ifgo" for s, n in (("x", D), ("h", H))}  # fmt: skip
        self.layers = nn.ModuleDict({k: nn.Linear(*sizes, bias=not k.startswith("h")) for k, sizes in sides.items()})
        self.forget = forget

    def gates(self, x: Any, h: Any) -> Any:
        if "both" in self.layers:
            return self.layers["both"](torch.cat([x, h], -1)).chunk(4, -1)
        return [self.layers[f"x{g}"](x) + self.layers[f"h{g}"](h) for g in "ifgo"]

    def forward(self, given: Any) -> Any:
        h = c = torch.zeros(len(given), H).to(given)
        found = []
        for x in given.unbind(1):
            i, f, g, o = self.gates(x, h)
            c = self.forget(f) * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            found.append(h)
        return torch.stack(found, 1)


def scanned(step: Callable[[Any, Any], Any], states: Any, given: Any) -> Any:
    return jax.lax.scan(step, states, given.swapaxes(0, 1))[1].swapaxes(0, 1)


def haiku_lstm(leaves: Leaves, given: Any) -> Any:
    """Haiku's: gates i, g, f, o, and 1 added to f."""

    def step(states: Any, x: Any) -> Any:
        h, c = states
        y = jnp.concatenate([x, h], -1) @ leaves["lstm/linear/w"] + leaves["lstm/linear/b"]
        i, g, f, o = jnp.split(y, 4, -1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return scanned(step, (jnp.zeros((B, H)),) * 2, given)


LSTM = {"lstm/linear/w": (D + H, 4 * H), "lstm/linear/b": (4 * H,)}


@pytest.mark.parametrize("fused", [False, True])
def test_the_one_of_a_forget_gate_is_in_a_part_of_the_bias(fused: bool) -> None:
    net = Lstm(fused)
    written = rules(derive(haiku_lstm, net, LSTM, floats(B, T, D)), net)
    (plus,) = [rule for rule in written if rule.startswith("- from: lstm/linear/b + 1\n")]
    assert "part: 3 of 4\n" in plus
    assert plus.endswith('{name: layers.both.bias, part: "2 of 4"}' if fused else "parameter: layers.xf.bias")


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_a_one_behind_the_gate_is_no_bias(fused: bool) -> None:
    net = Lstm(fused, lambda f: f.sigmoid() + 1)
    assert not derive(haiku_lstm, net, LSTM, floats(B, T, D)).complete


# ---- StyleGAN's styles


class Styled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine, self.out = nn.Linear(D, H), nn.Linear(H, 2)

    def forward(self, x: Any) -> Any:
        style = self.affine(x)
        return self.out(style * torch.cos(style.roll(1, -1)))


STYLES: dict[str, tuple[Callable[[Any, Leaves], Any], str]] = {
    "one": (lambda x, w: x @ w["a/w"] + w["a/b"] + 1, "bias: a/b + 1\n"),
    "in brackets": (lambda x, w: x @ w["a/w"] + (w["a/b"] - 0.5), 'bias: "a/b - 0.5"\n'),
    "of another learning rate": (lambda x, w: x @ (w["a/w"] / 2) + (w["a/b"] * 0.1 + 1), "from: a/b + 10\n  prescaled_by: 10\n"),
    "subtracted": (lambda x, w: x @ w["a/w"] - w["a/b"], "from: a/b\n  prescaled_by: -1\n"),
    "added twice": (lambda x, w: x @ w["a/w"] + w["a/b"] + w["a/b"], "from: a/b\n  prescaled_by: 1/2\n"),
}  # fmt: skip


def styled(style: Callable[[Any, Leaves], Any]) -> Callable[[Leaves, Any], Any]:
    def function(w: Leaves, x: Any) -> Any:
        k = style(x, w)
        return (k * jnp.cos(jnp.roll(k, 1, -1))) @ w["o/w"] + w["o/b"]

    return function


STYLED = {"a/w": (D, H), "a/b": (H,), "o/w": (H, 2), "o/b": (2,)}


@pytest.mark.parametrize("name", STYLES)
def test_a_bias_with_a_number_a_factor_or_another_sign(name: str) -> None:
    style, line = STYLES[name]
    net = Styled()
    found = derive(styled(style), net, STYLED, floats(7, D))
    assert any(line in f"{rule}\n" for rule in rules(found, net))


def test_a_number_times_the_data_is_none_of_the_bias() -> None:
    found = derive(styled(lambda x, w: x @ w["a/w"] + w["a/b"] + jnp.sin(x[..., :1])), Styled(), STYLED, floats(7, D))
    assert not found.complete


# ---- gates that are 1 minus the source's


class Gru(nn.Module):
    """A GRU in the code of the module: of a layer for each gate, or of one for the input and one for the state; `wrong`: the gate twice."""

    def __init__(self, fused: bool, wrong: bool = False) -> None:
        super().__init__()
        sizes = {"x": (D, 3 * H), "h": (H, 3 * H)} if fused else dict.fromkeys("rzn", (D + H, H))
        self.layers = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
        self.wrong = wrong

    def forward(self, given: Any) -> Any:
        h = torch.zeros(len(given), H).to(given)
        found = []
        for x in given.unbind(1):
            if "x" in self.layers:
                (a, b, c), (d, e, f) = (self.layers[k](y).chunk(3, -1) for k, y in (("x", x), ("h", h)))
                r, z = (a + d).sigmoid(), (b + e).sigmoid()
                n = (c + r * f).tanh()
            else:
                r, z = (self.layers[k](torch.cat([x, h], -1)).sigmoid() for k in "rz")
                n = self.layers["n"](torch.cat([x, r * h], -1)).tanh()
            h = (1 - z) * n + (1 - z if self.wrong else z) * h
            found.append(h)
        return torch.stack(found, 1)


def fused_gru(w: Leaves, given: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        a, b, c = jnp.split(x @ w["wx"] + w["bx"], 3, -1)
        d, e, f = jnp.split(h @ w["wh"] + w["bh"], 3, -1)
        r, z = jax.nn.sigmoid(a + d), jax.nn.sigmoid(b + e)
        h = z * jnp.tanh(c + r * f) + (1 - z) * h
        return h, h

    return scanned(step, jnp.zeros((B, H)), given)


def joined_gru(w: Leaves, given: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        r, z = (jax.nn.sigmoid(jnp.concatenate([x, h], -1) @ w[f"{k}/kernel"] + w[f"{k}/bias"]) for k in "rz")
        n = jnp.tanh(jnp.concatenate([x, r * h], -1) @ w["n/kernel"] + w["n/bias"])
        h = z * n + (1 - z) * h
        return h, h

    return scanned(step, jnp.zeros((B, H)), given)


GRU: dict[bool, tuple[Callable[[Leaves, Any], Any], dict[str, tuple[int, ...]]]] = {
    True: (fused_gru, {"wx": (D, 3 * H), "wh": (H, 3 * H), "bx": (3 * H,), "bh": (3 * H,)}),
    False: (joined_gru, {f"{k}/{leaf}": of for k in "rzn" for leaf, of in (("kernel", (D + H, H)), ("bias", (H,)))}),
}


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_gate_of_the_other_state_is_negated(fused: bool) -> None:
    net = Gru(fused)
    function, shapes = GRU[fused]
    written = rules(derive(function, net, shapes, floats(B, T, D)), net)
    negated = [rule for rule in written if "\n  prescaled_by: -1\n" in rule]
    if fused:
        assert len(negated) == 2 and all("part: 2 of 3\n" in rule and 'part: "2 of 3"}' in rule for rule in negated)
    else:
        assert [rule.rpartition("\n")[2] for rule in negated] == ["  linear: layers.z"]


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_a_gate_that_is_used_twice_is_no_negated_one(fused: bool) -> None:
    function, shapes = GRU[fused]
    assert not derive(function, Gru(fused, wrong=True), shapes, floats(B, T, D)).complete


class Highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Any) -> Any:
        gate = self.gate(x).sigmoid()
        return gate * x + (1 - gate) * self.value(x).relu()


def test_the_gate_of_a_highway_that_carries() -> None:
    def function(w: Leaves, x: Any) -> Any:
        gate = jax.nn.sigmoid(x @ w["gate/kernel"] + w["gate/bias"])
        return gate * jax.nn.relu(x @ w["value/kernel"] + w["value/bias"]) + (1 - gate) * x

    shapes = {f"{name}/{leaf}": of for name in ("gate", "value") for leaf, of in (("kernel", (D, D)), ("bias", (D,)))}
    net = Highway()
    gate, value = rules(derive(function, net, shapes, floats(7, D)), net)
    assert "\n  prescaled_by: -1\n" in gate and "prescaled_by" not in value
