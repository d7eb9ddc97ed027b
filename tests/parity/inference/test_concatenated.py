"""Values that the two programs put side by side, or take apart, in different orders: the rules, and what is made of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Grade
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import WIDTH, derive, floats, grades, linen, rules

W, A, B, C, F, T = 3, 5, 7, 11, 13, 17
Change = Callable[[Mapping[str, Any], Any], Any]


def derived(model: Any, module: torch.nn.Module, *shape: int) -> list[str]:
    """The rules; each tensor that the outputs show is derived, and the plan of the rules makes it."""
    function, shapes = linen(model, np.zeros(shape))
    found = derive(function, module, shapes, floats(*shape))
    assert found.proof is not None, found.differences
    assert {tensor.grade for tensor in found.tensors if not tensor.unseen} == {Grade.DERIVED}
    return rules(found, module)


def one(written: list[str], leaf: str) -> str:
    (rule,) = [rule for rule in written if leaf in rule]
    return rule


class Dense(nn.Module):
    """A Dense layer behind a concatenation."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        values = [jnp.tanh(nn.Dense(width, name=f"in_{width}")(x)) for width in self.widths]
        return nn.Dense(F, name="head")(jnp.concatenate(values, -1))


class Linears(torch.nn.Module):
    def __init__(self, widths: tuple[int, ...], order: tuple[int, ...]) -> None:
        super().__init__()
        self.order = order
        self.m = torch.nn.ModuleList([torch.nn.Linear(W, width) for width in widths])
        self.last = torch.nn.Linear(sum(widths), F)

    def forward(self, x: Any) -> Any:
        values = [torch.tanh(module(x)) for module in self.m]
        return self.last(torch.cat([values[k] for k in self.order], -1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "order", "source", "target"),
    [
        pytest.param((A, B), (1, 0), "C + E", "E + C", marks=pytest.mark.slow),
        pytest.param((A, B, C), (2, 0, 1), "? + F", "F + ?", marks=pytest.mark.slow),  # a and b stay together
        ((A, B, C), (2, 1, 0), "C + E + F", "F + E + C"),
        pytest.param((A, B, C), (1, 2, 0), "C + ?", "? + C", marks=pytest.mark.slow),
        pytest.param((1, A, B), (1, 0, 2), "1 + E + F", "E + 1 + F", marks=pytest.mark.slow),
    ],
)
def test_a_dense_layer_behind_a_concatenation(
    widths: tuple[int, ...], order: tuple[int, ...], source: str, target: str
) -> None:
    written = one(derived(Dense(widths), Linears(widths, order), T, W), "head")
    text = f"  concatenated: {{(.): {source}}}\n  linear: {{module: last, concatenated: {{(.): {target}}}}}"
    for sign, of in (("+", r"\+"), ("{", r"\{"), ("}", r"\}"), ("?", ".")):
        text = text.replace(sign, of)
    found = re.search(text, written)
    assert found is not None and found[1] == found[2], written


class Inputs(torch.nn.Module):
    """Parts of the input, of sizes that no leaf shows."""

    def __init__(self, order: tuple[int, ...], widths: tuple[int, ...]) -> None:
        super().__init__()
        self.order, self.widths = order, widths
        self.m = torch.nn.Linear(sum(widths), F)

    def forward(self, x: Any) -> Any:
        parts = x.split(self.widths, -1)
        return self.m(torch.cat([parts[k] for k in self.order], -1))


@pytest.mark.parametrize(
    ("order", "widths", "declared"),
    [((2, 1, 0), (A, B, C), 2), ((1, 0), (A, B), 1), ((1, 0), (A, A), 1), ((2, 1, 0), (1, 1, 1), 2)],
)
def test_sizes_that_no_leaf_shows_are_declared(order: tuple[int, ...], widths: tuple[int, ...], declared: int) -> None:
    module = Inputs(order, widths)
    found = derive(lambda w, x: x @ w["k"], module, {"k": (sum(widths), F)}, floats(T, sum(widths)))
    # without a bias in the source, zeros are written
    text = write_rules(found, model_of_module(module, "Model")).text
    assert compare_rules(text, found) == [] and text.count("concatenated: {") == 2, text
    assert len(re.findall(r"equals: \d", text)) + len(re.findall("equals: [A-Z]", text)) >= declared, text


class Heads(nn.Module):
    """A result that is split."""

    at: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.Dense(F, name="heads")(jnp.tanh(nn.Dense(A, name="first")(x)))
        u, v = y[..., : self.at], y[..., self.at :]
        return nn.Dense(2, name="u")(jnp.tanh(u)) + nn.Dense(2, use_bias=False, name="v")(jax.nn.sigmoid(v))


class Split(torch.nn.Module):
    """The same with the other part first."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.one, self.two = torch.nn.Linear(W, A), torch.nn.Linear(A, F)
        self.three, self.four = torch.nn.Linear(at, 2), torch.nn.Linear(F - at, 2, bias=False)

    def forward(self, x: Any) -> Any:
        y = self.two(torch.tanh(self.one(x)))
        v, u = y[..., : -self.at], y[..., -self.at :]
        return self.three(torch.tanh(u)) + self.four(torch.sigmoid(v))


@pytest.mark.slow
@pytest.mark.parametrize("at", [A, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_that_are_split_in_another_order(at: int) -> None:
    written = one(derived(Heads(at), Split(at), T, W), "heads/kernel")
    (source, target) = (line.split("concatenated: {")[1].split("}")[0] for line in written.splitlines() if "concatenated" in line)  # fmt: skip
    assert source.split(": ")[0] == target.split(": ")[0]
    assert source.split(": ")[1].split(" + ") == target.split(": ")[1].split(" + ")[::-1]
    assert "heads/bias" in written  # which follows


class Convolved(nn.Module):
    """A convolution of channels that are put side by side."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        a = jnp.tanh(nn.Conv(A, (3, 3), name="a")(x))
        b = jnp.tanh(nn.Conv(B, (1, 1), name="b")(x))
        y = nn.GroupNorm(1, name="norm")(jnp.concatenate([x, a, b], -1))
        return nn.Conv(F, (3, 2), padding="VALID", name="mix")(y)


class Convs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = torch.nn.Conv2d(W, A, 3, padding=1), torch.nn.Conv2d(W, B, 1)
        self.n, self.r = torch.nn.GroupNorm(1, W + A + B, eps=1e-6), torch.nn.Conv2d(W + A + B, F, (3, 2))

    def forward(self, x: Any) -> Any:
        x = x.permute(0, 3, 1, 2)
        y = torch.cat([torch.tanh(self.q(x)), x, torch.tanh(self.p(x))], 1)
        return self.r(self.n(y)).permute(0, 2, 3, 1)


@pytest.mark.slow
def test_channels_of_a_convolution_and_of_the_norm_in_front_of_it() -> None:
    written = derived(Convolved(), Convs(), 2, 5, 4, W)
    mix, norm = one(written, "mix/kernel"), one(written, "norm/scale")
    for rule, target in ((mix, "conv: {module: r, "), (norm, "group_norm: {module: n, ")):
        assert "concatenated: {" in rule.split(target)[0] and "concatenated: {" in rule.split(target)[1], rule


@pytest.mark.parametrize("count", [2, 3])
def test_channels_of_one_value_each_in_the_reversed_order(count: int) -> None:
    """This is no kernel that is flipped."""

    def function(w: Mapping[str, Any], x: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w["k"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

    class Reversed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv1d(count, F, 5, padding=2, bias=False)

        def forward(self, x: Any) -> Any:
            return self.conv(x.flip(-1).mT).mT

    found = derive(function, Reversed(), {"k": (5, count, F)}, floats(3, 7, count))
    assert found.complete
    letters = "EFG"[:count]
    (rule,) = rules(found, Reversed())
    assert f"concatenated: {{D: {' + '.join(letters)}}}" in rule
    assert f"concatenated: {{D: {' + '.join(reversed(letters))}}}" in rule


class ConvolvedHeads(nn.Module):
    """A convolution whose result is split."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        u, v = jnp.split(jnp.tanh(nn.Conv(F, (3,), name="heads")(x)), [A], -1)
        return nn.Conv(2, (1,), name="u")(u) + nn.Conv(2, (3,), use_bias=False, name="v")(v)


class ConvHeads(torch.nn.Module):
    """The same with the other part first."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = torch.nn.Conv1d(W, F, 3, padding=1), torch.nn.Conv1d(A, 2, 1)
        self.r = torch.nn.Conv1d(F - A, 2, 3, padding=1, bias=False)

    def forward(self, x: Any) -> Any:
        v, u = torch.tanh(self.p(x.transpose(1, 2))).split([F - A, A], 1)
        return (self.q(u) + self.r(v)).transpose(1, 2)


@pytest.mark.slow
def test_channels_that_are_split_in_another_order() -> None:
    rule = one(derived(ConvolvedHeads(), ConvHeads(), 2, 7, W), "heads/kernel")
    assert "conv: {module: p, concatenated: {" in rule and "heads/bias" in rule, rule


CELLS: dict[str, tuple[Any, Any]] = {
    "flax.linen.LSTMCell": (nn.OptimizedLSTMCell, torch.nn.LSTM),  # which has the same tree
    "flax.linen.GRUCell": (nn.GRUCell, torch.nn.GRU),
}


class Recurrent(nn.Module):
    cell: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        values = [jnp.tanh(nn.Dense(width, name=f"in_{width}")(x)) for width in (A, B)]
        return nn.RNN(self.cell(2), name="rnn")(jnp.concatenate(values, -1))


class Rnn(torch.nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(W, A), torch.nn.Linear(W, B)
        self.rnn = kind(A + B, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.rnn(torch.cat([torch.tanh(self.two(x)), torch.tanh(self.one(x))], -1))[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_the_inputs_of_a_cell(name: str) -> None:
    cell, kind = CELLS[name]
    function, shapes = linen(Recurrent(cell), np.zeros((3, 5, W)))
    found = derive(function, Rnn(kind), shapes, floats(3, 5, W))
    written = [rule for rule in rules(found, Rnn(kind)) if f"cell: {name}" in rule]
    assert len(written) == 1 and "inputs: " in written[0] and written[0].count("concatenated: {") == 2, written


@pytest.mark.slow
@pytest.mark.parametrize("order", ["fiog", "ofig", "igfo"])
def test_the_gates_of_a_cell_that_lie_in_another_order(order: str) -> None:
    """Two of the gates of ``fiog`` lie in turns with the other two in torch's order."""

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.o = torch.nn.LSTMCell(C, C), torch.nn.Linear(C, C, bias=False)

        def forward(self, x: Any) -> Any:
            return self.o(self.cell(x[0], (x[1], x[2]))[0])

    def step(w: Mapping[str, Any], x: Any) -> Any:
        gates = dict(zip(order, jnp.split(jnp.concatenate([x[0], x[1]], -1) @ w["m"] + w["b"], 4, -1), strict=True))
        c = jax.nn.sigmoid(gates["f"]) * x[2] + jax.nn.sigmoid(gates["i"]) * jnp.tanh(gates["g"])
        return (jax.nn.sigmoid(gates["o"]) * jnp.tanh(c)) @ w["o"]

    found = derive(step, Step(), {"m": (2 * C, 4 * C), "b": (4 * C,), "o": (C, C)}, floats(3, 5, C))
    assert [rule for rule in rules(found, Step()) if rule.startswith("- from: b\n") and "cell.bias_hh" in rule]


class Glu(torch.nn.Module):
    """Value and gate in one matrix, the value first."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.o = torch.nn.Linear(W, 2 * F), torch.nn.Linear(F, 2)

    def forward(self, x: Any) -> Any:
        value, gate = self.m(x).chunk(2, -1)
        return self.o(value * torch.sigmoid(gate))


def glu(w: Mapping[str, Any], x: Any) -> Any:
    gate, value = jnp.split(x @ w["m"].T + w["m_bias"], 2, -1)
    return (value * jax.nn.sigmoid(gate)) @ w["o"].T + w["o_bias"]


class Stack(torch.nn.Module):
    """Each layer has the state and the input side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.m = torch.nn.Linear(W, A), torch.nn.ModuleList([torch.nn.Linear(W + A, A) for _ in range(3)])

    def forward(self, x: Any) -> Any:
        h = self.first(x)
        for layer in self.m:
            h = torch.tanh(layer(torch.cat([h, x], -1)))
        return h


def stack(w: Mapping[str, Any], x: Any) -> Any:
    def layer(h: Any, own: Any) -> tuple[Any, None]:
        return jnp.tanh(jnp.concatenate([x, h], -1) @ own[0] + own[1]), None

    return jax.lax.scan(layer, x @ w["first"] + w["first_bias"], (w["m"], w["m_bias"]))[0]


class Fused(torch.nn.Module):
    """One matrix for two leaves, behind a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(W, A, bias=False), torch.nn.Linear(W, B, bias=False)
        self.m = torch.nn.Linear(A + B, 2 * F, bias=False)

    def forward(self, x: Any) -> Any:
        q, k = self.m(torch.cat([torch.tanh(self.b(x)), torch.tanh(self.a(x))], -1)).chunk(2, -1)
        return torch.tanh(q) * torch.sigmoid(k)


def fused(w: Mapping[str, Any], x: Any) -> Any:
    y = jnp.concatenate([jnp.tanh(x @ w["a"]), jnp.tanh(x @ w["b"])], -1)
    return jnp.tanh(y @ w["q"]) * jax.nn.sigmoid(y @ w["k"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "module", "shapes", "leaf"),
    [
        (glu, Glu, {"m": (2 * F, W), "m_bias": (2 * F,), "o": (2, F), "o_bias": (2,)}, "from: m"),
        (stack, Stack, {"first": (W, A), "first_bias": (A,), "m": (3, W + A, A), "m_bias": (3, A)}, "stacked: {i: 0}"),
        (fused, Fused, {"a": (W, A), "b": (W, B), "q": (A + B, F), "k": (A + B, F)}, "{q,k}"),
    ],
)
def test_halves_layers_of_a_stack_and_fused_leaves(
    function: Change, module: Callable[[], torch.nn.Module], shapes: dict[str, tuple[int, ...]], leaf: str
) -> None:
    found = derive(function, module(), shapes, floats(T, W))
    assert found.proof is not None and {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}
    assert one(rules(found, module()), leaf).count("concatenated: {") == 2


def _other_columns(w: Mapping[str, Any], x: Any) -> Any:
    """One column of the second part is among those of the first, where the target has none."""
    a, b = (jnp.tanh(x @ w[name]) for name in "ab")
    return jnp.concatenate([a[..., :2], b, a[..., 1:]], -1) @ w["c"]


def _scaled(w: Mapping[str, Any], x: Any) -> Any:
    a, b = (jnp.tanh(x @ w[name]) for name in "ab")
    return jnp.concatenate([a, 2 * b], -1) @ w["c"]


@pytest.mark.slow
@pytest.mark.parametrize("change", [_other_columns, _scaled])
def test_another_value_is_no_order(change: Change) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Linear(*of, bias=False) for of in ((W, A), (W, B), (A + B, F)))

        def forward(self, x: Any) -> Any:
            return self.c(torch.cat([torch.tanh(self.b(x)), torch.tanh(self.a(x))], -1))

    rows = A + B + (1 if change is _other_columns else 0)
    found = derive(change, Model(), {"a": (W, A), "b": (W, B), "c": (rows, F)}, floats(T, W))
    assert not found.complete or any(part.factor != 1 for tensor in found.tensors for part in tensor.parts)


class Score(torch.nn.Module):
    """A product with a parameter that is stored as inputs x outputs, as in graph attention."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(2 * WIDTH, 1))

    def forward(self, x: Any, y: Any) -> Any:
        return torch.cat([x, y], -1) @ self.a


class Scored(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.score = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH), Score()

    def forward(self, x: Any) -> Any:
        return self.score(self.first(x), self.second(x).tanh())


def test_leaves_that_follow_each_other_along_the_inputs_of_a_parameter():
    def function(w, x):
        return ((x @ w["v"] + w["b"]) @ w["l"] + jnp.tanh(x @ w["u"] + w["c"]) @ w["r"])[..., None]

    matrices = dict.fromkeys("vu", (WIDTH, WIDTH))
    shapes = {**matrices, "b": (WIDTH,), "c": (WIDTH,), "l": (WIDTH,), "r": (WIDTH,)}
    module = Scored()
    assert rules(derive(function, module, shapes), module)[-1] == (
        '- from: "{l,r}"\n  axes: D\n  parameter: {name: score.a, axes: "(D + D)."}'
    )


class FlattenedMaps(nn.Module):
    """A Dense layer that takes maps, flattened with the channels last, and numbers."""

    order: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        conv, pooled = nn.Conv(4, (3, 3), name="conv"), nn.Conv(4, (2, 2), padding="VALID", name="pooled")
        z, flat = nn.tanh(nn.Dense(4, name="z")(x.mean((1, 2)))), (len(x), -1)
        values = {"m": nn.relu(conv(x)).reshape(flat), "n": nn.tanh(pooled(x)).reshape(flat), "z": z}
        return nn.Dense(4, name="head")(jnp.concatenate([values[key] for key in self.order], -1))


class ChannelsFirst(torch.nn.Module):
    """`fault`: the first map is flattened with its rows and columns exchanged, or the channels of the numbers are reversed."""

    def __init__(self, order: str, fault: str = "") -> None:
        super().__init__()
        self.order, self.fault = order, fault
        self.features, self.small = torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.Conv2d(2, 4, 2)
        self.vector = torch.nn.Linear(2, 4)
        self.last = torch.nn.Linear(4 * 16 * ("m" in order) + 4 * 9 * ("n" in order) + 4, 4)

    def forward(self, x: Any) -> Any:
        x = x.permute(0, 3, 1, 2)
        m = torch.relu(self.features(x))
        if self.fault == "twice":
            m = torch.cat([m[:, :1], m[:, :1], m[:, 2:]], 1)
        z = torch.tanh(self.vector(x.mean((2, 3))))
        if self.fault == "sigmoid":
            z = torch.sigmoid(self.vector(x.mean((2, 3))))
        values = {"m": m.flatten(1), "n": torch.tanh(self.small(x)).flatten(1), "z": z}
        return self.last(torch.cat([values[key] for key in self.order], 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "other", "stored", "of_target"),
    [
        ("mz", "mz", "(A B + C)D", "D(B A + C)"),
        ("zm", "zm", "(A + B C)D", "D(A + C B)"),
        ("zm", "mz", "(A + B C)D", "D(C B + A)"),
        ("mnz", "nzm", "(A B + C D + E)F", "F(D C + E + B A)"),
    ],
)
def test_a_flattened_map_joined_with_numbers_has_a_rule_for_each(
    order: str, other: str, stored: str, of_target: str
) -> None:
    """The weight's columns of the map lie in another order, and those of the numbers as they are; all widths are equal."""
    written = derived(FlattenedMaps(order), ChannelsFirst(other), 5, 4, 4, 2)
    of_head = [rule for rule in written if "head/kernel" in rule]
    assert len(of_head) == len(order)
    said = {" -> ".join(re.findall(r"axes: \"?([^\"\n]*)", rule)) for rule in of_head}
    letters = dict.fromkeys(re.findall("[A-Z]", min(said)))
    named = {letter: "ABCDEF"[k] for k, letter in enumerate(letters)}
    assert {re.sub("[A-Z]", lambda found: named[found[0]], text) for text in said} == {f"{stored} -> {of_target}"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["twice", "sigmoid"])
def test_a_fault_in_what_is_joined_with_a_map_is_not_derived(fault: str) -> None:
    function, shapes = linen(FlattenedMaps("mz"), np.zeros((5, 4, 4, 2)))
    found = derive(function, ChannelsFirst("mz", fault), shapes, floats(5, 4, 4, 2))
    assert not found.complete and found.differences


class JoinedWithMaps(torch.nn.Module):
    """A layer of a series and two maps, channels first; `fault`: the second map once more in place of the first."""

    def __init__(self, steps: int, channels: int, fault: bool = False) -> None:
        super().__init__()
        self.l, self.fault = torch.nn.Linear(steps * (1 + channels), steps), fault
        self.o = torch.nn.Linear(steps, 5, bias=False)

    def forward(self, x: Any) -> Any:
        series, past, future = x[..., 0], *x[..., 1:].mT.split(x.shape[1] // 2, 2)
        joined = torch.cat([series, (future if self.fault else past).flatten(1), future.flatten(1)], 1)
        return self.o(torch.relu(self.l(joined)))


def series_and_maps(w: Any, x: Any) -> Any:
    series, past, future = x[..., 0], *jnp.split(x[..., 1:], 2, 1)
    h = series @ w["s"] + jnp.einsum("btc,tcd->bd", past, w["p"]) + jnp.einsum("btc,tcd->bd", future, w["f"])
    return jax.nn.relu(h + w["b"]) @ w["o"]


def shapes_of_maps(steps: int, channels: int) -> dict[str, tuple[int, ...]]:
    maps = dict.fromkeys("pf", (steps // 2, channels, steps))
    return {"s": (steps, steps), **maps, "b": (steps,), "o": (steps, 5)}


@pytest.mark.parametrize(("steps", "channels"), [(8, 3), (8, 4), (6, 5)])
def test_columns_that_are_maps_of_other_leaves_have_a_size(steps: int, channels: int) -> None:
    """As the first layer of N-BEATSx: no leaf has an axis of as many elements as a map."""
    module = JoinedWithMaps(steps, channels)
    found = derive(series_and_maps, module, shapes_of_maps(steps, channels), floats(7, steps, 1 + channels))
    assert found.complete and grades(found) == {Grade.DERIVED}
    parts = [rule for rule in rules(found, module) if "l.weight" in rule]
    assert len(parts) == 3 and all(f'part: "{k} of 3"' in " ".join(parts) for k in (1, 2, 3)), parts


def test_a_map_that_is_joined_twice_is_not_derived() -> None:
    found = derive(series_and_maps, JoinedWithMaps(8, 3, fault=True), shapes_of_maps(8, 3), floats(7, 8, 4))
    assert not found.complete and found.differences
