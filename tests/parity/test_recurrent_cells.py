"""Recurrent cells: the real libraries on one side, torch on the other, in float64; refusals; what a rule may say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from convert import Plan, PlanError, RuleError
from convert.cli.app import app
from convert.core.tensor_spec import TensorSpec
from convert.core.value_ops import AddIdentity
from convert.layers.recurrent.equations import parse_held
from convert.layers.recurrent.library_cells import CELLS, named_cell
from convert.layers.recurrent.probe import jax_states, torch_layer, torch_states
from convert.planning.planner import make_plan
from support.cell_trees import HIDDEN, INPUTS, LIVE, given
from support.memory_source import MemorySource, rule_file, run

CUSTOM = {"custom_cells": True}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


def plan_of(name: str, tree: dict[str, np.ndarray], **settings: Any) -> Plan:
    word = LIVE[name][0] if name in LIVE else "gru"
    rules = rule_file(f"- {word}: net.rnn\n  cell: {name}\n  from: params/cell\n")
    return make_plan(rules, MemorySource({f"params/cell/{k}": v for k, v in tree.items()}), settings=settings)


def settings_of(name: str) -> dict[str, Any]:
    return CUSTOM if named_cell(name, LIVE[name][0]).module else {}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIVE)
def test_the_real_cell_is_torchs_layer_with_the_derived_tensors(name: str) -> None:
    """The library's own code step by step, from a state that is not zero, against torch; and our statement against both."""
    word, make = LIVE[name]
    tree, real = make()
    x, h, c = given()
    want = real(x, h, c)
    cell = named_cell(name, word)
    inputs = {"x": x, "h": h, "c": c}
    ours = jax_states(cell, tree, inputs, "float64")
    assert np.abs(ours - want).max() <= 1e-12, "our statement of the equations is not the library's"
    out = run(plan_of(name, tree, **settings_of(name)))
    tensors = {key.removeprefix("net.rnn.").removesuffix("_l0"): value for key, value in out.items()}
    got = torch_states(cell, tensors, inputs, "float64")
    assert np.abs(got - want).max() <= 1e-12
    assert np.abs(want - want[:, ::-1]).max() > 0.1  # the batch's rows differ: nothing is constant


def test_every_known_cell_is_run() -> None:
    assert {name.partition("(")[0] for name in LIVE} == set(CELLS)


@pytest.mark.slow
def test_nnx_with_hn_bias() -> None:
    """flax #5594: a later nnx keeps the bias inside the reset as ``hn_bias``. By its equation, which is linen's."""
    tree, _ = LIVE["flax.nnx.GRUCell"][1]()
    tree["hn_bias"] = np.random.default_rng(3).standard_normal(HIDDEN)
    x, h, c = given()
    out = run(plan_of("flax.nnx.GRUCell", tree))
    assert np.array_equal(out["net.rnn.bias_hh_l0"], np.concatenate([np.zeros(2 * HIDDEN), tree["hn_bias"]]))
    from flax import linen

    params = {
        f"{side}{g}": {"kernel": np.split(tree[f"dense_{side}/kernel"], 3, 1)[k]}
        for side in "ih"
        for k, g in enumerate("rzn")
    }
    for k, g in enumerate("rzn"):
        params[f"i{g}"]["bias"] = np.split(tree["dense_i/bias"], 3)[k]
    params["hn"]["bias"] = tree["hn_bias"]
    want, state = [], h
    for row in x:
        state, _ = linen.GRUCell(HIDDEN, param_dtype="float64").apply({"params": params}, state, row)
        want.append(state)
    roles = {key.removeprefix("net.rnn.").removesuffix("_l0"): value for key, value in out.items()}
    got = torch_states(named_cell("flax.nnx.GRUCell", "gru"), roles, {"x": x, "h": h, "c": c}, "float64")
    assert np.abs(got - np.stack(want)).max() <= 1e-12


BEFORE = "n = tanh(W x + b + U (r * h))"
REFUSED = {
    "haiku.GRU": BEFORE,
    "keras.layers.GRU(reset_after=False)": BEFORE,
    "flax.linen.MGUCell(reset_gate=False)": "n = tanh(W x + b + U h)",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_cannot_compute_is_refused_with_both_equations(name: str) -> None:
    tree, _ = LIVE[name][1]()
    with pytest.raises(PlanError) as refused:
        plan_of(name, tree)
    text = str(refused.value)
    assert f"r.yaml:5: {name}: " in text
    assert f"expected n = tanh(W x + b + r * (U h + c)) (torch.nn.GRU), got {REFUSED[name]}; " in text
    assert "--allow-custom-cells" in text and named_cell(name, "gru").module in text
    with pytest.raises(PlanError):
        plan_of(name, tree, custom_cells=False)
    plan = plan_of(name, tree, **CUSTOM)
    assert plan.notes == (
        f"net.rnn must be a {named_cell(name, 'gru').module}, not a torch.nn.GRU: only that computes {name}",
    )


def test_the_refused_cells_cannot_be_had_from_torch() -> None:
    """The refusal is right: torch's GRU with the custom layout's tensors is far off."""
    name = "haiku.GRU"
    tree, real = LIVE[name][1]()
    x, h, c = given()
    out = run(plan_of(name, tree, **CUSTOM))
    layer = torch.nn.GRU(INPUTS, HIDDEN, dtype=torch.float64)
    layer.load_state_dict({key.removeprefix("net.rnn."): torch.tensor(value) for key, value in out.items()})
    got = layer(torch.tensor(x), torch.tensor(h)[None])[0].detach().numpy()
    assert np.abs(got - real(x, h, c)).max() > 0.05


@pytest.mark.slow
def test_the_plan_says_what_is_done() -> None:
    tree, _ = LIVE["haiku.LSTM"][1]()
    plan = plan_of("haiku.LSTM", tree)
    shown = {step.name: (step.arithmetic, *(str(part.layout) for part in step.parts)) for step in plan.steps}
    assert shown == {
        "net.rnn.weight_ih_l0": ("", "W U [I+H, igfo] -> i I", "W U [I+H, igfo] -> f I", "W U [I+H, igfo] -> g I", "W U [I+H, igfo] -> o I"),
        "net.rnn.weight_hh_l0": ("", "W U [I+H, igfo] -> i H", "W U [I+H, igfo] -> f H", "W U [I+H, igfo] -> g H", "W U [I+H, igfo] -> o H"),
        "net.rnn.bias_ih_l0": ("f: + 1", "b [igfo] -> i", "b [igfo] -> f", "b [igfo] -> g", "b [igfo] -> o"),
        "net.rnn.bias_hh_l0": ("zeros: the source has no such bias",),
    }  # fmt: skip
    packed = plan_of("equinox.nn.GRUCell", LIVE["equinox.nn.GRUCell"][1]()[0])
    assert [part.ops for step in packed.steps[:3] for part in step.parts] == [
        (),
        (),
        (),
    ]  # torch's own layout: nothing moves


@pytest.mark.slow
def test_stacked_and_bidirectional() -> None:
    """Two layers, each a linen cell in both directions, and torch's one module of four."""
    from flax import linen

    rng = np.random.default_rng(5)
    tree, cells = {}, {}
    for layer, width in ((0, INPUTS), (1, 2 * HIDDEN)):
        for way in ("forward", "backward"):
            cell = linen.RNN(linen.GRUCell(HIDDEN, param_dtype="float64"), reverse=way == "backward", keep_order=True)
            params = cell.init(jax.random.key(0), np.zeros((1, 1, width)))["params"]
            params = jax.tree.map(lambda x: 0.6 * rng.standard_normal(x.shape), params)
            cells[layer, way] = (cell, params)
            for path, value in jax.tree_util.tree_leaves_with_path(params):
                tree["/".join([f"rnn_{layer}", way, *(key.key for key in path)])] = value
    rules = rule_file(
        "- gru: {module: encoder, layer: '{k}', direction: '{forward,backward}'}\n"
        "  cell: flax.linen.GRUCell\n  from: rnn_{k}/{forward,backward}/cell\n"
    )
    out = run(make_plan(rules, MemorySource(tree)))
    x = rng.standard_normal((2, 6, INPUTS))
    want = x
    for layer in (0, 1):
        runs = [cells[layer, way][0].apply({"params": cells[layer, way][1]}, want) for way in ("forward", "backward")]
        want = np.concatenate(runs, axis=-1)
    torchs = torch.nn.GRU(INPUTS, HIDDEN, 2, batch_first=True, bidirectional=True, dtype=torch.float64)
    torchs.load_state_dict(
        {key.removeprefix("encoder."): torch.tensor(value) for key, value in out.items()}, strict=True
    )
    assert np.abs(torchs(torch.tensor(x))[0].detach().numpy() - want).max() <= 1e-12


def test_layers_stacked_on_an_axis() -> None:
    rng = np.random.default_rng(6)
    shapes = {"w_i": (2, HIDDEN, 3 * HIDDEN), "w_h": (2, HIDDEN, 3 * HIDDEN), "b": (2, 3 * HIDDEN)}
    tree = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    rules = rule_file("- gru: {module: m, layer: '{k}'}\n  cell: haiku.GRU\n  from: core\n  stacked: {k: 0}\n")
    out = run(make_plan(rules, MemorySource({f"core/{k}": v for k, v in tree.items()}), settings=CUSTOM))
    for k in (0, 1):
        z, r, n = np.split(tree["w_i"][k], 3, axis=1)
        assert np.array_equal(out[f"m.weight_ih_l{k}"], np.concatenate([r, -z, n], axis=1).T)


@pytest.mark.slow
def test_our_module_is_its_equation_in_every_arrangement() -> None:
    """Layers, directions, batch first, bias: against the statement of the equations, layer by layer."""
    from convert.layers.torch_modules import GRU

    rng = np.random.default_rng(7)
    for reset, name in (("before", "haiku.GRU"), ("none", "flax.linen.MGUCell(reset_gate=False)")):
        for bias in (True, False):
            module = GRU(INPUTS, HIDDEN, 2, bias=bias, batch_first=True, bidirectional=True, reset=reset).double()
            single = {"before": "rzn", "none": "zn"}[reset]
            x, h0 = rng.standard_normal((2, 4, INPUTS)), rng.standard_normal((4, 2, HIDDEN))
            got, last = module(torch.tensor(x), torch.tensor(h0))
            assert set(torch.nn.GRU(INPUTS, HIDDEN, 2, bias=bias, bidirectional=True).state_dict()) == set(
                module.state_dict()
            )
            equations = named_cell(name, "gru").equations
            leaves = {"weight_ih": f"W [{single}, I]", "weight_hh": f"U [{single}, H]"}
            leaves |= {"bias_ih": f"b [{single}]", "bias_hh": f"c [{single}]"} if bias else {}
            from convert.layers.recurrent.equations import make_cell

            held = {k: parse_held(v) for k, v in leaves.items()}
            cell = make_cell(
                "gru",
                "ours",
                {**equations, "h": "(1-z)*n + z*h"} if reset == "before" else equations | {"h": "(1-z)*n+z*h"},
                held,
            )
            want = x.swapaxes(0, 1)
            for layer in (0, 1):
                outs = []
                for way, end in enumerate(("", "_reverse")):
                    own = {k: getattr(module, f"{k}_l{layer}{end}").detach().numpy() for k in leaves}
                    states = {"x": want[::-1] if way else want, "h": h0[2 * layer + way], "c": h0[0]}
                    made = jax_states(cell, own, states, "float64")
                    assert np.abs(last[2 * layer + way].detach().numpy() - made[-1]).max() <= 1e-12
                    outs.append(made[::-1] if way else made)
                want = np.concatenate(outs, axis=-1)
            assert np.abs(got.detach().numpy().swapaxes(0, 1) - want).max() <= 1e-12
    with pytest.raises(ValueError, match="reset is 'before' or 'none', not 'after'"):
        GRU(1, 1, reset="after")


def test_torch_layers() -> None:
    cell = named_cell("haiku.VanillaRNN", "rnn")
    assert torch_layer(cell, 2, 3, True).nonlinearity == "relu"


# ---- spelled out


BURN = """
- gru: rnn
  cell:
    n: tanh(W x + b + r * (U h + c))
    h: z * h + (1 - z) * n
  leaves:
    reset_gate/input_transform/weight: W [I, r]
    reset_gate/input_transform/bias: b [r]
    reset_gate/hidden_transform/weight: U [H, r]
    reset_gate/hidden_transform/bias: c [r]
    update_gate/input_transform/weight: W [I, z]
    update_gate/input_transform/bias: b [z]
    update_gate/hidden_transform/weight: U [H, z]
    update_gate/hidden_transform/bias: c [z]
    new_gate/input_transform/weight: W [I, n]
    new_gate/input_transform/bias: b [n]
    new_gate/hidden_transform/weight: U [H, n]
    new_gate/hidden_transform/bias: c [n]
  from: gru
"""


def burn(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"input_transform/weight": (INPUTS, HIDDEN), "hidden_transform/weight": (HIDDEN, HIDDEN)}
    shapes |= {"input_transform/bias": (HIDDEN,), "hidden_transform/bias": (HIDDEN,)}
    return {
        f"gru/{gate}_gate/{name}": rng.standard_normal(shape)
        for gate in ("update", "reset", "new")
        for name, shape in shapes.items()
    }


def test_a_cell_by_its_equations() -> None:
    """Burn's GRU, whose leaves are twelve: rows r, z, n."""
    tree = burn()
    out = run(make_plan(rule_file(BURN), MemorySource(tree)))
    rows = [tree[f"gru/{gate}_gate/hidden_transform/weight"].T for gate in ("reset", "update", "new")]
    assert np.array_equal(out["rnn.weight_hh_l0"], np.concatenate(rows))
    rows = [tree[f"gru/{gate}_gate/hidden_transform/bias"] for gate in ("reset", "update", "new")]
    assert np.array_equal(out["rnn.bias_hh_l0"], np.concatenate(rows))
    before = BURN.replace("r * (U h + c)", "U (r * h) + c")
    with pytest.raises(PlanError, match="got n = tanh\\(W x \\+ b \\+ U \\(r \\* h\\) \\+ c\\)"):
        make_plan(rule_file(before), MemorySource(tree))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("- gru: m\n  cell: flax.linen.GRUCel\n  from: a", "r.yaml:5:3: 'flax.linen.GRUCel' is not a known cell (known: flax.linen.GRUCell,"),
        ("- lstm: m\n  cell: flax.linen.GRUCell\n  from: a", "r.yaml:5:3: flax.linen.GRUCell is not a `lstm`, but a `gru`: torch.nn.GRU has its equations"),
        ("- gru: m\n  cell: keras.layers.GRU(reset_before=True)\n  from: a", "r.yaml:5:3: keras.layers.GRU has no argument 'reset_before' that changes the computation (known: reset_after=True, use_bias=True)"),
        ("- gru: m\n  cell: keras.layers.GRU(reset_after=no)\n  from: a", "r.yaml:5:3: keras.layers.GRU(reset_after=no): expected True or False"),
        ("- gru: m\n  cell: {n: tanh(W x + U h), h: (1-z)*n + z*h}\n  from: a", "r.yaml:5:3: a cell given by its equations needs `leaves:`, what each leaf holds"),
        ("- gru: m\n  cell: {n: relu(W x + r * U h), h: (1-z)*n + z*h}\n  leaves:\n    k: W [I, rzn]\n  from: a", "r.yaml:5:3: n = relu(W x + r * U h) is not a known candidate of a GRU: tanh(W x + b + r * (U h + c)) (reset after the matrix); tanh(W x + b + U (r * h)) (reset before the matrix); tanh(W x + b + U h)"),
        ("- gru: m\n  cell: {n: tanh(W x + r * U h), h: z*n + z*h}\n  leaves:\n    k: W [I, rzn]\n  from: a", "r.yaml:5:3: h = z*n + z*h is not the update of a GRU: (1 - z) * n + z * h, or (1 - z) * h + z * n"),
        ("- gru: m\n  cell: {n: tanh(W x + r * U h), h: (1-z)*n + z*h}\n  leaves:\n    k: W [I, rzn]\n  from: a", "r.yaml:5:3: no leaf of the cell of this rule holds U of the gate r; `leaves` says what each holds"),
        ("- gru: m\n  cell: {n: tanh(W x + r * U h), h: (1-z)*n + z*h}\n  leaves:\n    k: W [I, rzn]\n    u: U [H, rzn]\n    v: U [H, n]\n  from: a", "r.yaml:5:3: u and v both hold U of the gate n"),
        ("- gru: m\n  cell: {n: tanh(W x + r * U h), h: (1-z)*n + z*h}\n  leaves:\n    k: W [I, rzq]\n    u: U [H, rzn]\n  from: a", "r.yaml:5:3: no leaf of the cell of this rule holds W of the gate n"),
        ("- lstm: m\n  cell: {c: f * c + i * g + p}\n  leaves:\n    k: W [I, ifgo]\n  from: a", "r.yaml:5:3: c = f * c + i * g + p is not an equation of an LSTM: c = f * c + i * g; torch has no other"),
        ("- gru: m\n  cell: haiku.GRU\n  leaves:\n    k: W [I]\n  from: a", "r.yaml:8:8: 'W [I]' lacks the axes of W: a leaf holds W [I, zrn], U [H, zrn]"),
        ("- gru: m\n  cell: haiku.GRU\n  leaves:\n    k: matrix\n  from: a", "r.yaml:8:8: 'matrix' does not describe a leaf of a cell"),
        ("- gru: {module: m, layer: one}\n  cell: haiku.GRU\n  from: a", "r.yaml:5:27: a layer is a number, an index such as '{k}', numbers such as '{1,2}', or none, not 'one'"),
        ("- gru: m\n  cell: haiku.GRU\n  from: a_{i}", "expected a target with the source's indices: {i}, got none"),
    ],
)  # fmt: skip
def test_errors_of_a_rule(rule: str, message: str) -> None:
    with pytest.raises(RuleError) as refused:
        rule_file(rule)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"dense_i/kernel": (INPUTS, 14)}, "dense_i/kernel: float64[3,14] does not fit: it holds W [I, rzn], and 14 is not a multiple of its 3 gates"),
        ({"dense_i/kernel": (INPUTS, 18)}, "expected state width 6, as params/cell/dense_i/kernel: float64[3,18] has (W [I, rzn]), got float64[15] with state width 5"),
        ({"dense_i/kernel": (15,)}, "dense_i/kernel: float64[15] does not fit: it holds W [I, rzn] and has the axes I, rzn"),
        ({"dense_h/kernel": (15, 5)}, "does not fit: it holds U [H, rzn], and 5 is not a multiple of its 3 gates"),
    ],
)  # fmt: skip
def test_leaves_that_do_not_fit(edit: dict[str, tuple[int, ...]], message: str) -> None:
    tree, _ = LIVE["flax.nnx.GRUCell"][1]()
    with pytest.raises(PlanError) as refused:
        plan_of("flax.nnx.GRUCell", tree | {name: np.zeros(shape) for name, shape in edit.items()})
    assert message in str(refused.value)


def test_missing_and_strange_leaves() -> None:
    tree, _ = LIVE["flax.linen.GRUCell"][1]()
    lost = {name: value for name, value in tree.items() if name != "hn/bias"}
    with pytest.raises(PlanError, match="params/cell/hn/bias \\(gru, hn/bias\\): expected a leaf with this path"):
        plan_of("flax.linen.GRUCell", lost)
    with pytest.raises(PlanError, match="params/cell/hz/bias: no rule matches this leaf"):
        plan_of("flax.linen.GRUCell", tree | {"hz/bias": np.zeros(HIDDEN)})


def test_biases_for_a_target_without() -> None:
    text = "- gru: {module: m, bias: false}\n  cell: keras.layers.GRU%s\n  from: c\n"
    tree = {f"c/{k}": v for k, v in LIVE["keras.layers.GRU"][1]()[0].items()}
    with pytest.raises(PlanError, match="c/vars/2: the target has `bias: false`, and this leaf is a bias; "):
        make_plan(rule_file(text % ""), MemorySource(tree))
    del tree["c/vars/2"]
    names = [step.name for step in make_plan(rule_file(text % "(use_bias=False)"), MemorySource(tree)).steps]
    assert names == ["m.weight_ih_l0", "m.weight_hh_l0"]


def test_letters_of_the_file() -> None:
    rules = "- gru: m\n  cell: haiku.GRU\n  from: c\n  inputs: D\n  hidden: K\n- einsum: ...K,KV->...V\n  from: w\n  linear: out\n"
    tree = {f"c/{k}": v for k, v in LIVE["haiku.GRU"][1]()[0].items()}
    plan = make_plan(rule_file(rules), MemorySource(tree | {"w": np.zeros((HIDDEN, 2))}), settings=CUSTOM)
    assert plan.sizes == {"D": INPUTS, "K": HIDDEN, "V": 2}
    with pytest.raises(PlanError, match="K"):
        make_plan(rule_file(rules), MemorySource(tree | {"w": np.zeros((HIDDEN + 1, 2))}), settings=CUSTOM)


def test_identity_is_added_to_square_matrices_alone() -> None:
    with pytest.raises(ValueError, match="which is not a square matrix"):
        AddIdentity().out_spec(TensorSpec((2, 3), "float32"))
    with pytest.raises(ValueError, match="would lose bits"):
        AddIdentity().out_spec(TensorSpec((3, 3), "bfloat16"))
    x = np.arange(9, dtype=np.float64).reshape(3, 3)
    op = AddIdentity(2.0)
    assert np.array_equal(op.inverse(TensorSpec((3, 3), "float64")).apply(op.apply(x)), x)


def test_dtypes() -> None:
    """bfloat16 leaves keep their dtype; the negated gate and the added 1 are computed in float32."""
    import ml_dtypes

    tree = {k: v.astype(ml_dtypes.bfloat16) for k, v in LIVE["haiku.LSTM"][1]()[0].items()}
    out = run(plan_of("haiku.LSTM", tree))
    assert {x.dtype.name for x in out.values()} == {"bfloat16"}
    f = np.split(tree["linear/b"], 4)[2].astype(np.float32)
    assert np.array_equal(np.split(out["net.rnn.bias_ih_l0"], 4)[1], (f + 1).astype(ml_dtypes.bfloat16))


@pytest.mark.slow
def test_the_flag_of_the_command_line(tmp_path: Path) -> None:
    """Refused without it, with it written; the check reads from the file that it was given."""
    rng = np.random.default_rng(0)
    shapes = {"w_i": (INPUTS, 3 * HIDDEN), "w_h": (HIDDEN, 3 * HIDDEN), "b": (3 * HIDDEN,)}
    np.savez(tmp_path / "gru.npz", **{f"gru/{k}": rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()})
    rules = "model: m\ntitle: M\ntargets: {torch: {loads: T}}\nrules:\n- gru: rnn\n  cell: haiku.GRU\n  from: gru\n"
    (tmp_path / "r.yaml").write_text(rules)
    paths = [str(tmp_path / "r.yaml"), str(tmp_path / "gru.npz")]
    out = str(tmp_path / "out.safetensors")
    refused = CliRunner().invoke(app, ["run", *paths, out])
    assert refused.exit_code != 0 and not Path(out).exists()
    assert CliRunner().invoke(app, ["run", *paths, out, "--allow-custom-cells", "-q"]).exit_code == 0
    checked = CliRunner().invoke(app, ["check", out, "--from", paths[1], "--model", paths[0]])
    assert checked.exit_code == 0, checked.output
    assert "rnn (l0), random weights" in checked.output
