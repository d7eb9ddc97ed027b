"""Two biases that the JAX model adds, and the PyTorch model has as one: the rule adds them up, and other programs are no sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Derivation
from convert.inference.infer import infer
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import rules

ROWS, STEPS, X, G, H = 3, 5, 4, 3, 6
Leaves = Mapping[str, Any]
Function = Callable[[Leaves, Any, Any], Any]


def inputs(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(ROWS, STEPS, X)), "g": rng.normal(size=(ROWS, STEPS, G))}


def derived(function: Function, net: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Derivation:
    def forward(leaves: Leaves, given: Leaves) -> Any:
        return {"y": function(leaves, given["x"], given["g"])}

    return infer(forward, net.eval(), lambda net, given: {"y": net(given["x"], given["g"])}, inputs, shapes)


def conv(x: Any, kernel: Any) -> Any:
    numbers = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=numbers)


def kernels(taps: int, *names: str) -> dict[str, tuple[int, ...]]:
    widths = {"x": X, "g": G}
    return {
        f"{name}/{leaf}": shape
        for name in names
        for leaf, shape in (("kernel", (taps, widths[name[-1]], H)), ("bias", (H,)))
    }


class Head(torch.nn.Module):
    """A unit, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.o = torch.nn.Linear(H, 2)


HEAD = {"o/kernel": (H, 2), "o/bias": (2,)}


def written(found: Derivation, net: torch.nn.Module) -> list[str]:
    """The rules but that of the layer behind the unit, which is the first."""
    first, *others = rules(found, net)
    assert first.endswith("linear: o")
    return others


def head(leaves: Leaves, y: Any) -> Any:
    return y @ leaves["o/kernel"] + leaves["o/bias"]


# ---- a gated unit


class Unit(Head):
    def __init__(self, second: bool = False) -> None:
        super().__init__()
        self.cx = torch.nn.Conv1d(X, H, 3, padding=1)
        self.cg = torch.nn.Conv1d(G, H, 3, padding=1, bias=second)

    def forward(self, x: Any, g: Any) -> Any:
        return self.o(torch.tanh(self.cx(x.mT) + self.cg(g.mT)).mT)


class Joined(Head):
    def __init__(self) -> None:
        super().__init__()
        self.c = torch.nn.Conv1d(X + G, H, 3, padding=1)

    def forward(self, x: Any, g: Any) -> Any:
        return self.o(torch.tanh(self.c(torch.cat([x, g], -1).mT)).mT)


class Chunked(Head):
    """Filter and gate in one convolution each of the data and of the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.cond = torch.nn.Conv1d(X, 2 * H, 3, padding=1), torch.nn.Conv1d(G, 2 * H, 3, padding=1, bias=False)  # fmt: skip

    def forward(self, x: Any, g: Any) -> Any:
        f, q = (self.conv(x.mT) + self.cond(g.mT)).chunk(2, 1)
        return self.o((torch.tanh(f) * torch.sigmoid(q)).mT)


def unit(leaves: Leaves, x: Any, g: Any, of: str = "") -> Any:
    one = conv(x, leaves[f"{of}x/kernel"]) + leaves[f"{of}x/bias"]
    return one + (conv(g, leaves[f"{of}g/kernel"]) + leaves[f"{of}g/bias"])


def gated(leaves: Leaves, x: Any, g: Any) -> Any:
    return head(leaves, jnp.tanh(unit(leaves, x, g)))


UNIT = {**kernels(3, "x", "g"), **HEAD}


def test_a_gated_unit_with_one_bias() -> None:
    net = Unit()
    assert written(derived(gated, net, UNIT), net) == [
        "- dimension_numbers: NWC,WIO->NWC\n  axes: PED\n  from: x/kernel\n  bias: x/bias + g/bias\n  padding: [[1, 1]]\n  conv: cx",
        "- dimension_numbers: NWC,WIO->NWC\n  axes: PFD\n  from: g/kernel\n  padding: [[1, 1]]\n  conv: cg",
    ]


def test_a_gated_unit_as_one_convolution() -> None:
    net = Joined()
    assert written(derived(gated, net, UNIT), net)[2] == "- from: x/bias + g/bias\n  parameter: c.bias"


def test_filter_and_gate_in_one_convolution() -> None:
    def both(leaves: Leaves, x: Any, g: Any) -> Any:
        f, q = (unit(leaves, x, g, of) for of in ("filter_", "gate_"))
        return head(leaves, jnp.tanh(f) * jax.nn.sigmoid(q))

    net, shapes = Chunked(), {**kernels(3, "filter_x", "filter_g", "gate_x", "gate_g"), **HEAD}
    (first, *_) = written(derived(both, net, shapes), net)
    assert '  bias: "{filter,gate}_x/bias + {filter,gate}_g/bias"' in first.splitlines()  # fmt: skip
    assert first.endswith("conv: conv")


def test_the_second_bias_of_the_target_is_zeros() -> None:
    def one(leaves: Leaves, x: Any, g: Any) -> Any:
        y = conv(x, leaves["x/kernel"]) + leaves["x/bias"] + conv(g, leaves["g/kernel"])
        return head(leaves, jnp.tanh(y))

    net = Unit(second=True)
    found = derived(one, net, {name: shape for name, shape in UNIT.items() if name != "g/bias"})
    assert any("zeros" in rule or "constant" in rule for rule in written(found, net))


# ---- layers of matrices


class Dense(Head):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = torch.nn.Linear(X, H), torch.nn.Linear(G, H, bias=False)

    def forward(self, x: Any, g: Any) -> Any:
        return self.o(torch.tanh(self.x(x) + self.h(g)))


DENSE = {"x/kernel": (X, H), "x/bias": (H,), "g/kernel": (G, H), "g/bias": (H,), "c": (H,), **HEAD}


def dense(leaves: Leaves, x: Any, g: Any, c: Any = 0) -> Any:
    y = (x @ leaves["x/kernel"] + leaves["x/bias"]) + (g @ leaves["g/kernel"] + leaves["g/bias"])
    return head(leaves, jnp.tanh(y + c))


@pytest.mark.parametrize("third", [False, True])
def test_scores_of_two_layers_with_one_bias(third: bool) -> None:
    net = Dense()
    shapes = DENSE if third else {name: shape for name, shape in DENSE.items() if name != "c"}
    found = derived(lambda leaves, x, g: dense(leaves, x, g, leaves["c"] if third else 0), net, shapes)
    bias = "x/bias + g/bias + c" if third else "x/bias + g/bias"
    assert written(found, net)[0] == f"- einsum: ...E,ED->...D\n  from: x/kernel\n  bias: {bias}\n  linear: x"


class Layers(Head):
    """A sum of layers, of which the first has the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.l = torch.nn.ModuleList(torch.nn.Linear(X, H, bias=k == 0) for k in range(3))

    def forward(self, x: Any, g: Any) -> Any:
        return self.o(torch.tanh(sum(layer(x ** (k + 1)) for k, layer in enumerate(self.l)))) + g.sum()


def test_a_sum_of_three_layers_with_one_bias() -> None:
    def three(leaves: Leaves, x: Any, g: Any) -> Any:
        y = sum(x ** (k + 1) @ leaves[f"l{k}/kernel"] + leaves[f"l{k}/bias"] for k in range(3))
        return head(leaves, jnp.tanh(y)) + g.sum()

    shapes = {f"l{k}/{leaf}": shape for k in range(3) for leaf, shape in (("kernel", (X, H)), ("bias", (H,)))}
    net = Layers()
    assert "  bias: l0/bias + l1/bias + l2/bias" in written(derived(three, net, {**shapes, **HEAD}), net)[0]


class Cell(Head):
    """A GRU with one bias for each gate, which resets the state before its matrix; or behind it, with a bias in between."""

    def __init__(self, before: bool = True) -> None:
        super().__init__()
        self.w, self.u = torch.nn.Linear(X, 3 * H), torch.nn.Linear(H, 2 * H, bias=False)
        self.n, self.before = torch.nn.Linear(H, H, bias=not before), before

    def forward(self, x: Any, g: Any) -> Any:
        h = x.new_zeros(ROWS, H)
        for t in range(STEPS):
            (z, r, n), (zh, rh) = self.w(x[:, t]).chunk(3, -1), self.u(h).chunk(2, -1)
            z, r = torch.sigmoid(z + zh), torch.sigmoid(r + rh)
            h = (1 - z) * h + z * torch.tanh(n + (self.n(r * h) if self.before else r * self.n(h)))
        return self.o(h) + g.sum()


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_a_cell_with_one_bias_for_each_gate(before: bool) -> None:
    def cell(leaves: Leaves, x: Any, g: Any) -> Any:
        def layer(name: str, data: Any) -> Any:
            return data @ leaves[f"{name}/kernel"] + leaves[f"{name}/bias"]

        h = jnp.zeros((ROWS, H))
        for t in range(STEPS):
            z, r = (jax.nn.sigmoid(layer(f"w{k}", x[:, t]) + layer(f"u{k}", h)) for k in "zr")
            h = (1 - z) * h + z * jnp.tanh(
                layer("wn", x[:, t]) + (layer("un", r * h) if before else r * layer("un", h))
            )
        return head(leaves, h) + g.sum()

    of = {f"{m}{k}": (X if m == "w" else H, H) for k in "zrn" for m in "wu"}
    shapes = {
        f"{name}/{leaf}": s if leaf == "kernel" else (H,) for name, s in of.items() for leaf in ("kernel", "bias")
    }
    net = Cell(before)
    made = written(derived(cell, net, {**shapes, **HEAD}), net)
    if before:
        assert '  bias: "{wz,wr,wn}/bias + {uz,ur,un}/bias"' in made[0]
    else:  # n has one bias
        parts = [f'{{name: w.bias, part: "{k} of 3"}}' for k in (1, 2, 3)]
        sums = ["wz/bias + uz/bias", "wr/bias + ur/bias", "wn/bias"]
        assert made[1:4] == [f"- from: {one}\n  parameter: {part}" for one, part in zip(sums, parts, strict=True)]


# ---- what is no sum

OTHERS: dict[str, Callable[[Any, Any], Any]] = {  # of both biases
    "subtracted": lambda x, g: x + -g,
    "taken twice": lambda x, g: 2 * x + g,
    "added twice": lambda x, g: x + g + g,
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_combination_has_no_rule(name: str) -> None:
    """Planted: one bias holds it, and a rule that adds the leaves up would be wrong."""

    def other(leaves: Leaves, x: Any, g: Any) -> Any:
        bias = OTHERS[name](leaves["x/bias"], leaves["g/bias"])
        return head(leaves, jnp.tanh(conv(x, leaves["x/kernel"]) + conv(g, leaves["g/kernel"]) + bias))

    net = Unit()
    found = derived(other, net, UNIT)
    (part,) = found.tensor("cx.bias").parts
    assert found.complete and part.leaves == ("g/bias", "x/bias")
    text = write_rules(found, model_of_module(net, "Net"))
    assert "cx.bias" in text.open and "x/bias + g/bias" not in text.text


class Twice(Head):
    """The value with the first bias is an output of its own."""

    def __init__(self, second: bool) -> None:
        super().__init__()
        self.cx, self.cg = torch.nn.Conv1d(X, H, 3, padding=1), torch.nn.Conv1d(G, H, 3, padding=1, bias=second)
        self.q = torch.nn.Linear(H, 2)

    def forward(self, x: Any, g: Any) -> Any:
        a = self.cx(x.mT)
        return torch.cat([self.o(torch.tanh(a + self.cg(g.mT)).mT), self.q(torch.tanh(a.mT))], -1)


@pytest.mark.slow
@pytest.mark.parametrize("second", [False, True])
def test_a_bias_that_is_left_out_differs(second: bool) -> None:
    """Planted: the target lacks the second bias, and no bias of its own holds the sum."""

    def two(leaves: Leaves, x: Any, g: Any) -> Any:
        a = conv(x, leaves["x/kernel"]) + leaves["x/bias"]
        both = jnp.tanh(a + (conv(g, leaves["g/kernel"]) + leaves["g/bias"]))
        return jnp.concatenate([head(leaves, both), jnp.tanh(a) @ leaves["q/kernel"] + leaves["q/bias"]], -1)

    net = Twice(second)
    found = derived(two, net, {**UNIT, "q/kernel": (H, 2), "q/bias": (2,)})
    assert found.complete is second
    assert [difference.shown for difference in found.differences] == ([] if second else [True])


class Condition(Head):
    """A condition that all steps have, with the bias of both terms."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = torch.nn.Conv1d(X, H, 3, padding=1, bias=False), torch.nn.Linear(G, H)

    def forward(self, x: Any, g: Any) -> Any:
        return self.o(torch.tanh(self.c(x.mT) + self.d(g[:, 0])[..., None]).mT)


@pytest.mark.slow
def test_a_bias_that_another_term_may_hold_is_no_difference() -> None:
    """The bias in front of a broadcast is not found; it makes the programs equal."""

    def condition(leaves: Leaves, x: Any, g: Any) -> Any:
        of_all = g[:, 0] @ leaves["g/kernel"] + leaves["g/bias"]
        return head(leaves, jnp.tanh(conv(x, leaves["x/kernel"]) + leaves["x/bias"] + of_all[:, None]))

    found = derived(condition, Condition(), {**UNIT, "g/kernel": (G, H)})
    assert [difference.shown for difference in found.differences] == [False]


# ---- leaves with different axes


class Positions(torch.nn.Module):
    def __init__(self, places: int, wrong: bool = False) -> None:
        super().__init__()
        self.position, self.o, self.wrong = torch.nn.Parameter(torch.zeros(1, places, X)), torch.nn.Linear(X, 2), wrong

    def forward(self, x: Any, g: Any) -> Any:
        return self.o(torch.tanh(x + (self.position * g[..., :1] if self.wrong else self.position)))


def with_type(leaves: Leaves, x: Any, g: Any) -> Any:
    return head(leaves, jnp.tanh(x + (leaves["position"] + leaves["type"])))


def test_positions_and_a_vector_in_one_table() -> None:
    net = Positions(STEPS)
    shapes = {"position": (STEPS, X), "type": (X,), "o/kernel": (X, 2), "o/bias": (2,)}
    found = derived(with_type, net, shapes)
    (rule,) = [one for one in rules(found, net) if "position" in one]
    assert rule.startswith("- from: position + type\n  axes: DC + C\n") and rule.endswith("{name: position, axes: .DC}")
    assert not derived(with_type, Positions(STEPS, wrong=True), shapes).complete  # planted


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_sum_with_one_number_has_no_rule(shape: tuple[int, ...]) -> None:
    net = Positions(STEPS)
    shapes = {"position": (STEPS, X), "type": shape, "o/kernel": (X, 2), "o/bias": (2,)}
    text = write_rules(found := derived(with_type, net, shapes), model_of_module(net, "Net"))
    assert found.complete and text.open["position"] == "its elements are sums of leaves, one of which is one number"


def test_a_row_of_a_table_is_not_added_up() -> None:
    """A target that lacks the table of types is told so; its other row has no place in the sum."""
    shapes = {"position": (STEPS, X), "type": (2, X), "o/kernel": (X, 2), "o/bias": (2,)}
    found = derived(lambda w, x, g: with_type({**w, "type": w["type"][0]}, x, g), Positions(STEPS), shapes)
    assert not found.complete and "adds type" in found.differences[0].problem


def test_positions_of_rows_and_columns_in_one_table() -> None:
    def function(leaves: Leaves, given: Leaves) -> Any:
        table = (leaves["row"][:, None] + leaves["column"]).reshape(-1, X)
        return {"y": head(leaves, jnp.tanh(given["x"] + table))}

    net = Positions(6).eval()
    run = lambda net, given: {"y": net(given["x"], given["x"])}  # noqa: E731
    shapes = {"row": (2, X), "column": (3, X), "o/kernel": (X, 2), "o/bias": (2,)}
    found = infer(function, net, run, lambda seed: {"x": np.random.default_rng(seed).normal(size=(ROWS, 6, X))}, shapes)
    (rule,) = [one for one in rules(found, net) if "position" in one]
    assert rule.startswith("- from: row + column\n") and "  axes: DE + CE\n" in rule
    assert rule.endswith('{name: position, axes: ".(D C)E"}')
