"""`infer` derives deep and two-way recurrent models, as users of each library write them; a fault in one is never derived."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import WrittenRules, write_rules
from convert.planning.planner import make_plan
from convert.rules.parse import parse_rules
from convert.verify.target_model import model_of_module
from support import recurrent_models
from support.memory_source import MemorySource, run
from support.recurrent_models import HIDDEN, INPUTS, Function, Recurrent, draw

SLOW = pytest.mark.slow


def derive(
    function: Function,
    module: torch.nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    inputs: Callable[[int], dict[str, Any]] = draw,
) -> Derivation:
    return infer(
        lambda leaves, given: {"y": function(leaves, given["x"])},
        module,
        lambda module, given: {"y": module(**given)},
        inputs,
        shapes,
    )


CASES = [
    ("nnx", "GRUCell", 2, True), ("haiku", "VanillaRNN", 2, True),
    ("linen", "GRUCell", 2, True), ("linen", "OptimizedLSTMCell", 2, True), ("linen", "LSTMCell", 3, False),
    ("nnx", "OptimizedLSTMCell", 2, True), ("haiku", "LSTM", 3, True), ("equinox", "GRUCell", 2, True),
    ("equinox", "LSTMCell", 2, True), ("keras", "GRU", 2, True), ("keras", "LSTM", 2, True),
    ("linen", "SimpleCell", 3, True), ("nnx", "SimpleCell", 2, True), ("keras", "SimpleRNN", 2, False),
    ("keras", "SimpleRNN", 3, True), ("keras", "GRU", 3, True),  # the second layer of Keras' names has a number, the first has none
]  # fmt: skip
NAMES = {"linen": "flax.linen", "nnx": "flax.nnx", "equinox": "equinox.nn", "keras": "keras.layers"}
SAME_TREE = {"flax.linen.OptimizedLSTMCell": "flax.linen.LSTMCell"}  # the first of the two is named


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "cell", "layers", "two_way"),
    [pytest.param(*case, marks=() if case[0] == "nnx" and "GRU" in case[1] else SLOW) for case in CASES],
)
def test_deep_and_two_way_layers_are_rules_by_the_names_of_their_cells(
    library: str, cell: str, layers: int, two_way: bool
) -> None:
    function, shapes = getattr(recurrent_models, library)(cell, layers, two_way)
    assert_cells_by_name(function, shapes, library, cell, layers, two_way)


@pytest.mark.parametrize(
    ("cell", "layers"),
    [("LSTM", 2), pytest.param("LSTM", 3, marks=SLOW), pytest.param("VanillaRNN", 2, marks=SLOW)],
)
def test_layers_in_one_loop_with_a_matrix_for_input_and_state(cell: str, layers: int) -> None:
    """What a layer gives is the next one's input step by step; torch's layer has it of all steps at once."""
    function, shapes = recurrent_models.haiku_in_one_loop(cell, layers)
    assert_cells_by_name(function, shapes, "haiku", cell, layers, False)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["a step late", "state of the cell"])
def test_a_fault_between_layers_in_one_loop_is_never_derived(fault: str) -> None:
    function, shapes = recurrent_models.haiku_in_one_loop("LSTM", 2, fault)
    found = derive(function, Recurrent("lstm", 2, False).eval(), shapes)
    assert not found.complete and found.proof is None and len(found.differences) == 1


def whole_rules(found: Derivation, module: torch.nn.Module) -> WrittenRules:
    """The rules of a complete derivation: they make every tensor as it was derived."""
    written = write_rules(found, model_of_module(module, type(module).__name__))
    assert found.complete and written.open == {} and compare_rules(written.text, found) == []
    return written


def assert_cells_by_name(
    function: Function, shapes: Mapping[str, tuple[int, ...]], library: str, cell: str, layers: int, two_way: bool
) -> None:
    """The derivation is complete, and its rules name the cells and convert."""
    kind = "gru" if "GRU" in cell else "lstm" if "LSTM" in cell else "rnn"
    relu = {"nonlinearity": "relu"} if cell == "VanillaRNN" else {}
    module = Recurrent(kind, layers, two_way, **relu).eval()
    found = derive(function, module, shapes)
    assert found.complete and {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}
    written = whole_rules(found, module)
    name = f"{NAMES.get(library, library)}.{cell}"
    assert set(re.findall(r"(?m)^- cell: (\S+)", written.text)) == {SAME_TREE.get(name, name)}
    assert len(re.findall("direction: backward", written.text)) > 0 or not two_way

    rng = np.random.default_rng(1)
    tree = {leaf: 0.5 * rng.standard_normal(shape, np.float32) for leaf, shape in shapes.items()}
    made = run(make_plan(parse_rules(written.text), MemorySource(tree)))
    module.load_state_dict({tensor: torch.as_tensor(array) for tensor, array in made.items()}, strict=True)
    x = draw(7)["x"].astype(np.float32)
    want = np.asarray(function({leaf: jnp.asarray(array) for leaf, array in tree.items()}, jnp.asarray(x)))
    assert np.abs(module(torch.as_tensor(x)).detach().numpy() - want).max() < 1e-6


# ---- faults: two layers in both directions, as a function of its own

NAMED = (("first/there", "first/back"), ("second/there", "second/back"))  # by layer and direction
FAULTS = ("not reversed back", "not reversed", "ways exchanged", "one way twice", "layers in turns", "bias outside")


def _cell(own: Mapping[str, Any], x: Any, h: Any, fault: str) -> Any:
    ir, iz, i_n = jnp.split(x @ own["w"] + own["b"], 3, -1)
    hr, hz, hn = jnp.split(h @ own["u"], 3, -1)
    r, z = jax.nn.sigmoid(ir + hr), jax.nn.sigmoid(iz + hz)
    n = jnp.tanh(i_n + own["c"] + r * hn) if fault == "bias outside" else jnp.tanh(i_n + r * (hn + own["c"]))
    return (1 - z) * n + z * h


def faulty(fault: str) -> tuple[Function, dict[str, tuple[int, ...]]]:
    """A model of two layers in both directions with a fault; none: an empty name."""
    gates = 3 * HIDDEN
    shapes: dict[str, tuple[int, ...]] = {}
    for name in (*NAMED[0], *NAMED[1]):
        inner = {"w": (2 * HIDDEN if name in NAMED[1] else INPUTS, gates), "u": (HIDDEN, gates), "b": (gates,)}
        inner["c"] = (HIDDEN,)
        shapes |= {f"{name}/{leaf}": shape for leaf, shape in inner.items()}

    def function(leaves: Mapping[str, Any], x: Any) -> Any:
        for layer in (0, 1):
            found = []
            for way in (0, 1):
                start = NAMED[1 - layer if fault == "layers in turns" and way else layer][way]
                own = {name.rpartition("/")[2]: leaf for name, leaf in leaves.items() if name.startswith(f"{start}/")}
                state = jnp.zeros((len(x), HIDDEN))
                rows = x[:, ::-1] if way and fault != "not reversed" else x
                if rows.shape[-1] != own["w"].shape[0]:  # a layer that reads what the other one should
                    rows = jnp.concatenate([rows] * 4, -1)[..., : own["w"].shape[0]]
                made = []
                for t in range(x.shape[1]):
                    state = _cell(own, rows[:, t], state, fault)
                    made.append(state)
                back = way and fault not in ("not reversed", "not reversed back")
                found.append(jnp.stack(made[::-1] if back else made, 1))
            found = {"ways exchanged": found[::-1], "one way twice": found[:1] * 2}.get(fault, found)
            x = jnp.concatenate(found, -1)
        return x

    return function, shapes


@pytest.mark.slow
def test_a_cell_of_no_library_is_derived_by_its_equations() -> None:
    function, shapes = faulty("")
    module = Recurrent("gru", 2, True).eval()
    found = derive(function, module, shapes)
    written = whole_rules(found, module)
    assert 'w: "W [I, rzn]"' in written.text


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_recurrent_model_is_never_derived(fault: str) -> None:
    function, shapes = faulty(fault)
    found = derive(function, Recurrent("gru", 2, True).eval(), shapes)
    assert not found.complete and found.proof is None and len(found.differences) == 1


# ---- a GRU whose update gate multiplies the new state, where torch's multiplies the old one

MIXED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "product": lambda z, n, h: (1 - z) * h + z * n,
    "difference": lambda z, n, h: h + z * (n - h),
}
NOT_MIXED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "half": lambda z, n, h: (1 - z) * h + 0.5 * z * n,
    "square": lambda z, n, h: (1 - z * z) * h + z * z * n,
    "one share for both": lambda z, n, h: (1 - z) * h + (1 - z) * n,
}


def gru(mix: Callable[[Any, Any, Any], Any], offset: float = 0.0) -> tuple[Function, dict[str, tuple[int, ...]]]:
    """A GRU in plain JAX."""
    gates = 3 * HIDDEN
    shapes = {"cell/w": (INPUTS, gates), "cell/u": (HIDDEN, gates), "cell/b": (gates,), "cell/c": (gates,)}

    def function(leaves: Mapping[str, Any], x: Any) -> Any:
        h, made = jnp.zeros((len(x), HIDDEN)), []
        for row in x.swapaxes(0, 1):
            ir, iz, i_n = jnp.split(row @ leaves["cell/w"] + leaves["cell/b"], 3, -1)
            hr, hz, hn = jnp.split(h @ leaves["cell/u"] + leaves["cell/c"], 3, -1)
            z = jax.nn.sigmoid(iz + hz + offset)
            h = mix(z, jnp.tanh(i_n + jax.nn.sigmoid(ir + hr) * hn), h)
            made.append(h)
        return jnp.stack(made, 1)

    return function, shapes


@pytest.mark.parametrize("name", ["product", pytest.param("difference", marks=SLOW)])
def test_an_update_gate_that_multiplies_the_new_state(name: str) -> None:
    function, shapes = gru(MIXED[name])
    module = Recurrent("gru", 1, False).eval()
    found = derive(function, module, shapes)
    written = whole_rules(found, module)
    assert 'h: "(1 - z) * h + z * n"' in written.text


@pytest.mark.slow
def test_a_number_in_such_an_update_gate_is_in_the_bias() -> None:
    """DreamerV3 takes 1 off. The rules have no words for it."""
    function, shapes = gru(MIXED["product"], -1.0)
    found = derive(function, Recurrent("gru", 1, False).eval(), shapes)
    assert found.complete


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_MIXED)
def test_another_mixture_of_both_states_is_never_derived(name: str) -> None:
    function, shapes = gru(NOT_MIXED[name])
    found = derive(function, Recurrent("gru", 1, False).eval(), shapes)
    assert not found.complete and found.proof is None and len(found.differences) == 1


# ---- one matrix for the input and the state


class Behind(torch.nn.Module):
    """A cell behind a layer whose ReLU gives zeros only in some columns, as the state has at first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.r = torch.nn.Linear(INPUTS, HIDDEN), torch.nn.RNN(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.r(torch.relu(self.a(x)))[0]


def behind(state_first: bool, share: float = 1.0) -> tuple[Function, dict[str, tuple[int, ...]]]:
    shapes = {"a": (INPUTS, HIDDEN), "c": (HIDDEN,), "u": (2 * HIDDEN, HIDDEN), "b": (HIDDEN,)}

    def function(leaves: Mapping[str, Any], x: Any) -> Any:
        h, made = jnp.zeros((len(x), HIDDEN)), []
        for row in jax.nn.relu(x @ leaves["a"] + leaves["c"]).swapaxes(0, 1):
            both = jnp.concatenate([h, row] if state_first else [row, h], -1)
            h = jnp.tanh(both @ leaves["u"] + leaves["b"])
            made.append(h)
            h = share * h
        return jnp.stack(made, 1)

    return function, shapes


def few(seed: int) -> dict[str, Any]:
    """Two rows of positive numbers, so that many units of a ReLU are zero."""
    return {"x": np.random.default_rng(seed).random((2, 6, INPUTS))}


@pytest.mark.parametrize("state_first", [False, pytest.param(True, marks=SLOW)])
def test_inputs_of_a_cell_that_are_zero_in_each_row_are_told_from_its_state(state_first: bool) -> None:
    function, shapes = behind(state_first)
    found = derive(function, Behind().eval(), shapes, few)
    assert found.complete and {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}


@pytest.mark.slow
def test_another_state_of_such_a_cell_is_never_derived() -> None:
    function, shapes = behind(False, 0.9)
    found = derive(function, Behind().eval(), shapes, few)
    assert not found.complete and found.proof is None and len(found.differences) == 1


# ---- torch's `proj_size`

PROJECTED = 3


class Projected(torch.nn.Module):
    """An LSTM that gives a product of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.r = torch.nn.LSTM(INPUTS, HIDDEN, batch_first=True, proj_size=PROJECTED)

    def forward(self, x: Any) -> Any:
        return self.r(x)[0]


def projected(function_of_state: Callable[[Any], Any]) -> tuple[Function, dict[str, tuple[int, ...]]]:
    gates = 4 * HIDDEN
    shapes = {
        "cell/w": (INPUTS, gates),
        "cell/u": (PROJECTED, gates),
        "cell/b": (gates,),
        "cell/p": (HIDDEN, PROJECTED),
    }

    def function(leaves: Mapping[str, Any], x: Any) -> Any:
        h, c, made = jnp.zeros((len(x), PROJECTED)), jnp.zeros((len(x), HIDDEN)), []
        for row in x.swapaxes(0, 1):
            i, f, g, o = jnp.split(row @ leaves["cell/w"] + h @ leaves["cell/u"] + leaves["cell/b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = function_of_state((jax.nn.sigmoid(o) * jnp.tanh(c)) @ leaves["cell/p"])
            made.append(h)
        return jnp.stack(made, 1)

    return function, shapes


@pytest.mark.slow
def test_an_lstm_with_a_projection_has_a_rule_for_each_tensor() -> None:
    function, shapes = projected(lambda h: h)
    module = Projected().eval()
    found = derive(function, module, shapes)
    whole_rules(found, module)


@pytest.mark.slow
def test_a_function_behind_the_projection_is_never_derived() -> None:
    function, shapes = projected(jnp.tanh)
    found = derive(function, Projected().eval(), shapes)
    assert not found.complete and [difference.shown for difference in found.differences] == [True]
