"""`infer` derives the cells of the libraries, and writes them by their names; the written file converts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Derivation
from convert.inference.infer import infer
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.planning.planner import make_plan
from convert.rules.parse import parse_rules
from convert.verify.target_model import model_of_module
from support.cell_steps import step_of
from support.cell_trees import BATCH, HIDDEN, INPUTS, LIVE
from support.memory_source import MemorySource, run

os.environ.setdefault("KERAS_BACKEND", "jax")


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """The libraries' own trees are in float64."""
    with jax.enable_x64(True):
        yield


KINDS = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM, "rnn": torch.nn.RNN}
SLOW = pytest.mark.slow
STEPS = 4
START = "encoder/layer/core"  # says nothing


class Recurrent(torch.nn.Module):
    """A recurrent layer, without its last state."""

    def __init__(self, kind: str, cell: str) -> None:
        super().__init__()
        relu = {"nonlinearity": "relu"} if "relu" in cell or "Vanilla" in cell else {}
        self.r = KINDS[kind](INPUTS, HIDDEN, batch_first=True, **relu)
        self.lstm = kind == "lstm"

    def forward(self, x: Any, h: Any = None, c: Any = None) -> Any:
        first = None if h is None else (h[None], c[None]) if self.lstm else h[None]
        return self.r(x, first)[0]


def pair(cell: str, from_zeros: bool) -> tuple[Any, torch.nn.Module, Any, dict[str, Any]]:
    """The JAX function, the module, the inputs, and a tree of leaves."""
    kind, make = LIVE[cell]
    tree = {f"{START}/{name}": array for name, array in make()[0].items()}
    step = step_of(cell)
    states = ("h", "c") if kind == "lstm" else ("h",)

    def function(leaves: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        own = {name.removeprefix(f"{START}/"): leaf for name, leaf in leaves.items()}
        state = tuple(given.get(name, jnp.zeros((BATCH, HIDDEN))) for name in states)
        out = []
        for t in range(STEPS):
            state = step(own, state, given["x"][:, t])
            out.append(state[0])
        return {"y": jnp.stack(out, 1)}

    def inputs(seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        given = {"x": rng.normal(size=(BATCH, STEPS, INPUTS))}
        return given if from_zeros else given | {name: rng.normal(size=(BATCH, HIDDEN)) for name in states}

    return function, Recurrent(kind, cell).eval(), inputs, tree


def derived(cell: str, from_zeros: bool, module: torch.nn.Module | None = None) -> tuple[Derivation, str]:
    """The derivation, and the rule file; converted with it, the module gives the numbers of the JAX function."""
    function, layer, inputs, tree = pair(cell, from_zeros)
    module = layer if module is None else module.eval()
    shapes = {name: array.shape for name, array in tree.items()}
    found = infer(function, module, lambda module, given: {"y": module(**given)}, inputs, shapes)
    written = write_rules(found, model_of_module(module, "Recurrent"))
    assert found.complete and written.open == {}
    assert compare_rules(written.text, found) == []
    made = run(make_plan(parse_rules(written.text), MemorySource(tree)))
    module.double().load_state_dict({name: torch.as_tensor(array) for name, array in made.items()}, strict=True)
    given = inputs(7)
    want = np.asarray(function(tree, given)["y"])
    got = module(**{name: torch.as_tensor(array) for name, array in given.items()}).detach().numpy()
    assert np.abs(got - want).max() < 1e-5  # Keras computes in float32 at most
    return found, written.text


QUICK = ("flax.nnx.SimpleCell",)
CELLS = [
    "flax.linen.GRUCell", "flax.linen.MGUCell", "flax.linen.LSTMCell", "flax.linen.SimpleCell", "flax.linen.SimpleCell(activation_fn=relu)",
    "flax.linen.SimpleCell(residual=True)", "flax.nnx.SimpleCell(residual=True)",
    "flax.nnx.GRUCell", "flax.nnx.OptimizedLSTMCell", "flax.nnx.SimpleCell",
    "equinox.nn.GRUCell", "equinox.nn.GRUCell(use_bias=False)", "equinox.nn.LSTMCell(use_bias=False)",
    "haiku.VanillaRNN", "haiku.VanillaRNN(double_bias=False)",
    "keras.layers.GRU", "keras.layers.GRU(use_bias=False)", "keras.layers.LSTM", "keras.layers.SimpleRNN", "keras.layers.SimpleRNN(activation=relu)",
]  # fmt: skip
CASES = [pytest.param(cell, marks=() if cell in QUICK else SLOW) for cell in CELLS]


@pytest.mark.parametrize("cell", CASES)
def test_the_cells_of_the_libraries_from_zeros(cell: str) -> None:
    _, text = derived(cell, from_zeros=True)
    (rule,) = re.findall(r"(?m)^- cell: ([^#]*\S) +#.*\n  from: (.*)\n  (\w+): (.*)\n", text)
    assert rule == (cell, START, LIVE[cell][0], "r")


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["flax.linen.GRUCell", "flax.nnx.GRUCell", "keras.layers.GRU", "equinox.nn.GRUCell"])
def test_the_cells_of_the_libraries_from_a_state(cell: str) -> None:
    assert f"cell: {cell} " in derived(cell, from_zeros=False)[1]


class Stepped(torch.nn.Module):
    """A loop over the steps in the module's own code."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.s = {"gru": torch.nn.GRUCell, "lstm": torch.nn.LSTMCell, "rnn": torch.nn.RNNCell}[kind](INPUTS, HIDDEN)
        self.lstm = kind == "lstm"

    def forward(self, x: Any, h: Any = None, c: Any = None) -> Any:
        out = []
        h, c = (x.new_zeros(len(x), HIDDEN) if state is None else state for state in (h, c))
        for now in x.unbind(1):
            if self.lstm:
                h, c = self.s(now, (h, c))
            else:
                h = self.s(now, h)
            out.append(h)
        return torch.stack(out, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell", ["flax.linen.GRUCell", "flax.linen.LSTMCell", "flax.nnx.OptimizedLSTMCell", "flax.linen.SimpleCell"]
)
def test_a_module_for_one_step(cell: str) -> None:
    """Its tensors have no layer in their names; several leaves make each of them."""
    _, text = derived(cell, from_zeros=False, module=Stepped(LIVE[cell][0]))
    (rule,) = re.findall(r"(?m)^- cell: ([^#]*\S) +#.*\n  from: (.*)\n  (\w+): (.*)\n", text)
    assert rule == (cell, START, LIVE[cell][0], "{module: s, layer: none}")


@pytest.mark.slow
def test_a_module_for_one_step_with_a_bias_where_the_source_has_none() -> None:
    """Haiku joins input and state, and has one bias, to whose forget gate it adds 1. In the first step, the module's second bias meets zeros."""
    _, text = derived("haiku.LSTM", from_zeros=True, module=Stepped("lstm"))
    (rule,) = re.findall(r"(?m)^- cell: ([^#]*\S) +#.*\n  from: (.*)\n  (\w+): (.*)\n", text)
    assert rule == ("haiku.LSTM", START, "lstm", "{module: s, layer: none}")


class Weaker(Stepped):
    """Planted: each output is a share of the state."""

    def forward(self, x: Any, h: Any = None, c: Any = None) -> Any:
        return super().forward(x, h, c) * 0.9


@pytest.mark.slow
def test_another_output_of_such_a_module_ends_as_a_difference() -> None:
    function, _, inputs, tree = pair("haiku.LSTM", True)
    shapes = {name: array.shape for name, array in tree.items()}
    found = infer(function, Weaker("lstm").eval(), lambda module, given: {"y": module(**given)}, inputs, shapes)
    assert not found.complete and found.differences


class Gates(torch.nn.Module):
    """A layer of its own for each gate of an LSTM, for input and state together."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = torch.nn.ModuleDict({gate: torch.nn.Linear(INPUTS + HIDDEN, HIDDEN) for gate in "ifgo"})

    def forward(self, x: Any) -> Any:
        h = c = x.new_zeros(len(x), HIDDEN)
        out = []
        for now in x.unbind(1):
            i, f, g, o = (layer(torch.cat([now, h], -1)) for layer in self.gates.values())
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            out.append(h)
        return torch.stack(out, 1)


@pytest.mark.slow
def test_kernels_that_linen_joins_become_a_layer_for_each_gate() -> None:
    """It multiplies input and state by the joined kernels of all gates, cuts both, and adds."""
    text = derived("flax.linen.OptimizedLSTMCell", from_zeros=True, module=Gates())[1]
    assert 'part: "2 of 2"' in text


@pytest.mark.slow
def test_the_number_in_a_forget_gate_is_in_the_bias_of_its_own_layer() -> None:
    """Haiku adds 1 behind the cut into gates."""
    function, _, inputs, tree = pair("haiku.LSTM", True)
    module, shapes = Gates().eval(), {name: array.shape for name, array in tree.items()}
    found = infer(function, module, lambda module, given: {"y": module(**given)}, inputs, shapes)
    assert found.complete
    written = write_rules(found, model_of_module(module, "Gates"))
    assert written.open == {} and compare_rules(written.text, found) == []
    assert "bias: encoder/layer/core/linear/b + 1\n" in written.text


class Bidirectional(torch.nn.Module):
    """A recurrent layer in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.r = torch.nn.RNN(INPUTS, HIDDEN, batch_first=True, bidirectional=True)

    def forward(self, x: Any) -> Any:
        return self.r(x)[0]


@pytest.mark.slow
def test_both_directions_are_a_rule_each() -> None:
    make, step = LIVE["flax.linen.SimpleCell"][1], step_of("flax.linen.SimpleCell")
    tree = {f"{way}/{name}": array for way in ("there", "back") for name, array in make()[0].items()}

    def function(leaves: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for way, steps in (("there", range(STEPS)), ("back", range(STEPS - 1, -1, -1))):
            own = {name.removeprefix(f"{way}/"): leaf for name, leaf in leaves.items() if name.startswith(f"{way}/")}
            state: tuple[Any, ...] = (jnp.zeros((BATCH, HIDDEN)),)
            for t in steps:
                state = step(own, state, given["x"][:, t])
                found[way, t] = state[0]
        return {"y": jnp.stack([jnp.concatenate([found["there", t], found["back", t]], -1) for t in range(STEPS)], 1)}

    def inputs(seed: int) -> dict[str, Any]:
        return {"x": np.random.default_rng(seed).normal(size=(BATCH, STEPS, INPUTS))}

    module = Bidirectional().eval()
    shapes = {name: array.shape for name, array in tree.items()}
    found = infer(function, module, lambda module, given: {"y": module(**given)}, inputs, shapes)
    written = write_rules(found, model_of_module(module, "Bidirectional"))
    assert found.complete and written.open == {} and compare_rules(written.text, found) == []
    rules = re.findall(r"(?m)^  from: (.*)\n  rnn: (.*)\n", written.text)
    assert rules == [("there", "r"), ("back", "{module: r, direction: backward}")]
