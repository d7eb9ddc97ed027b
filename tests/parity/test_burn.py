"""Burn as a target: real layers of JAX libraries against Burn's published equations, fed from the file, in float64.

Burn itself is not run: `burn_modules` states its source anew, and these tests hold the files against that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert import Plan, PlanError, RuleError
from convert.core.ops import Permute, Slice
from convert.planning.planner import make_plan
from convert.planning.target_formats.burn.tensors import transposed_ops
from convert.writing.scatter import destination_view
from support import burn_modules as burn
from support.cell_trees import HIDDEN, INPUTS, LIVE, flat, given, noise
from support.marks import slow_but
from support.memory_source import HEAD, MemorySource, rule_file, run

RNG = np.random.default_rng(7)
REFUSED = "flax.linen.MGUCell(reset_gate=False)"
Tree = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


def planned(rules: str, tree: Tree, to: str = "burn", head: str = HEAD, **settings: Any) -> Plan:
    return make_plan(rule_file(rules, head), MemorySource(tree), to=to, settings=settings)


def call_of(plan: Plan, layer: str) -> str:
    return str(next(entry["burn"] for entry in plan.layers if entry["layer"] == layer))


def close(got: np.ndarray, want: np.ndarray, bound: float = 1e-12) -> None:
    assert np.abs(got - want).max() <= bound
    assert np.abs(want - want.mean()).max() > 0.1  # nothing is constant


# ---- recurrent cells


def cell_rules(name: str) -> str:
    return f"- {LIVE[name][0]}: net.rnn\n  cell: {name}\n  from: params/cell\n"


def burn_states(name: str, file: Tree, x: np.ndarray, h: np.ndarray, c: np.ndarray, call: str) -> np.ndarray:
    """What Burn's module computes, made as the file says."""
    own = burn.below(file, "net.rnn")
    if call.startswith("Lstm"):
        return burn.lstm(own, x, h, c)
    if call.startswith("Rnn"):
        return burn.rnn(own, x, h, relu="ActivationConfig::Relu" in call)
    return burn.gru(own, x, h, reset_after=".with_reset_after(true)" in call)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(list(LIVE)[::3], [name for name in LIVE if name != REFUSED]))
def test_a_cell_is_burns_module_made_as_the_file_says(name: str) -> None:
    tree, real = LIVE[name][1]()
    x, h, c = given()
    want = real(x, h, c)
    plan = planned(cell_rules(name), {f"params/cell/{k}": v for k, v in tree.items()})
    file, call = run(plan), call_of(plan, "net.rnn.l0")
    close(burn_states(name, file, x, h, c, call), want)
    # planted: two gates exchanged, or the reset on the other side of the matrix
    if call.startswith("Gru"):
        other = call.replace("true)", "false)") if ".with_reset_after(true)" in call else call.replace("reset_after(false", "reset_after(true")  # fmt: skip
        assert np.abs(burn_states(name, file, x, h, c, other) - want).max() > 1e-3
        swapped = {
            k.replace("update", "?").replace("reset", "update").replace("?", "reset"): v for k, v in file.items()
        }
        if "MGU" not in name:  # which has one gate for both
            assert np.abs(burn_states(name, swapped, x, h, c, call) - want).max() > 1e-3


@pytest.mark.slow
def test_where_the_reset_stands_decides_how_the_module_is_made() -> None:
    """A reset before the matrix is refused for torch, and Burn has it: with_reset_after(false), Burn 0.17 and later."""
    tree = {f"params/cell/{k}": v for k, v in LIVE["haiku.GRU"][1]()[0].items()}
    with pytest.raises(PlanError, match="--allow-custom-cells to write the weights"):
        planned(cell_rules("haiku.GRU"), tree, to="torch")
    plan = planned(cell_rules("haiku.GRU"), tree)
    assert call_of(plan, "net.rnn.l0") == "GruConfig::new(.., true).with_reset_after(false)"
    assert "in Burn net.rnn is GruConfig::new(.., true).with_reset_after(false): the defaults compute something else" in plan.notes  # fmt: skip
    assert not any("torch_modules" in note for note in plan.notes)
    plan = planned(cell_rules("flax.linen.GRUCell"), {f"params/cell/{k}": v for k, v in LIVE["flax.linen.GRUCell"][1]()[0].items()})  # fmt: skip
    assert call_of(plan, "net.rnn.l0") == "GruConfig::new(.., true).with_reset_after(true)"
    assert not plan.notes


def test_the_gates_of_torchs_rows_and_what_is_computed_on_them() -> None:
    tree = {f"params/cell/{k}": v for k, v in LIVE["haiku.LSTM"][1]()[0].items()}
    plan = planned(cell_rules("haiku.LSTM"), tree)
    steps = {step.name: step for step in plan.steps}
    forget = steps["net.rnn.forget_gate.input_transform.bias"]
    assert (forget.arithmetic, str(forget.parts[0].layout)) == ("+ 1", "b [igfo] -> f")
    assert steps["net.rnn.input_gate.input_transform.bias"].arithmetic == ""
    weight = steps["net.rnn.cell_gate.input_transform.weight"]
    assert (weight.spec.shape, str(weight.parts[0].layout)) == ((INPUTS, HIDDEN), "W U [I+H, igfo] -> I g")
    assert not any(isinstance(op, Permute) for op in weight.parts[0].ops)  # (in, out) on both sides
    ordinary = run(planned(cell_rules("haiku.LSTM"), tree, to="torch"))
    for k, gate in enumerate(("input", "forget", "cell", "output")):
        for side, inner in (("ih", "input_transform"), ("hh", "hidden_transform")):
            rows = slice(k * HIDDEN, (k + 1) * HIDDEN)
            file = run(plan)
            assert np.array_equal(file[f"net.rnn.{gate}_gate.{inner}.weight"], ordinary[f"net.rnn.weight_{side}_l0"][rows].T)  # fmt: skip
            assert np.array_equal(file[f"net.rnn.{gate}_gate.{inner}.bias"], ordinary[f"net.rnn.bias_{side}_l0"][rows])


@pytest.mark.slow
def test_stacked_and_bidirectional_layers() -> None:
    """A Vec of BiGru, against torch.nn.GRU with the ordinary conversion."""
    rules = """
- gru: {module: enc, layer: "{k}", direction: "{forward,backward}"}
  cell: flax.linen.GRUCell
  from: params/rnn_{k}/{forward,backward}/cell
"""
    tree: Tree = {}
    for k in range(2):
        for d, direction in enumerate(("forward", "backward")):
            from flax import linen

            width = INPUTS if k == 0 else 2 * HIDDEN
            made = linen.GRUCell(HIDDEN, param_dtype=jnp.float64).init(jax.random.key(0), jnp.zeros((1, HIDDEN)), jnp.zeros((1, width)))  # fmt: skip
            params = noise(made["params"], seed=10 * k + d)
            tree |= {f"params/rnn_{k}/{direction}/cell/{path}": v for path, v in flat(params).items()}
    plan = planned(rules, tree)
    file = run(plan)
    assert {name.split(".update_gate")[0] for name in file if "update_gate" in name} == {f"enc.{k}.{d}" for k in (0, 1) for d in ("forward", "reverse")}  # fmt: skip
    assert call_of(plan, "enc.l{k}{,_reverse}") == "BiGruConfig::new(.., true).with_reset_after(true)"
    ordinary = run(planned(rules, tree, to="torch"))
    layer = torch.nn.GRU(INPUTS, HIDDEN, 2, bidirectional=True, dtype=torch.float64)
    layer.load_state_dict({k.removeprefix("enc."): torch.tensor(v) for k, v in ordinary.items()})
    x = given()[0]
    h = RNG.standard_normal((4, x.shape[1], HIDDEN))
    with torch.no_grad():
        want = layer(torch.tensor(x), torch.tensor(h))[0].numpy()
    y = x
    for k in range(2):
        y = burn.bi_gru(burn.below(file, f"enc.{k}"), y, h[2 * k], h[2 * k + 1])
    close(y, want)


def test_one_direction_alone_is_refused() -> None:
    rules = "- gru: {module: enc, direction: backward}\n  cell: flax.linen.GRUCell\n  from: params/cell\n"
    tree = {f"params/cell/{k}": v for k, v in LIVE["flax.linen.GRUCell"][1]()[0].items()}
    with pytest.raises(PlanError) as error:
        planned(rules, tree)
    (finding,) = error.value.findings
    assert (finding.code, finding.rule, finding.path) == ("burn-has-no-layer", "r.yaml:5", "enc")
    assert "direction backward and not forward" in finding.problem


# ---- attention


MHA = "- attention: at\n  layer: flax.linen.MultiHeadDotProductAttention\n  from: at\n  axes: ENH\n"


def flax_attention(**arguments: Any) -> tuple[Tree, np.ndarray, np.ndarray]:
    from flax import linen

    layer = linen.MultiHeadDotProductAttention(3, param_dtype=jnp.float64, dtype=jnp.float64, **arguments)
    x = RNG.standard_normal((2, 7, 12))
    params = noise(layer.init(jax.random.key(0), x)["params"])
    mask = np.tril(np.ones((7, 7), bool))
    want = np.asarray(layer.apply({"params": params}, jnp.asarray(x), mask=jnp.asarray(mask[None, None])))
    return {f"at/{k}": v for k, v in flat(params).items()}, x, want


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
def test_attention_is_burns_multi_head_attention(bias: bool) -> None:
    tree, x, want = flax_attention(use_bias=bias)
    plan = planned(MHA + ("" if bias else "  bias: false\n"), tree)
    file = run(plan)
    assert call_of(plan, "at") == "MultiHeadAttentionConfig::new(.., 3)" and not plan.notes
    shapes = {f"at.{name}.weight": (12, 12) for name in ("query", "key", "value", "output")}
    shapes |= {f"at.{name}.bias": (12,) for name in ("query", "key", "value", "output")}  # which Burn 0.21 always has
    assert burn.load(file, shapes).keys() == file.keys()
    allowed = np.tril(np.ones((7, 7), bool))
    close(burn.attention(file, "at", x, 3, allowed), want)
    wrong = {**file, "at.query.weight": file["at.query.weight"].T}  # square: it would load
    assert np.abs(burn.attention(wrong, "at", x, 3, allowed) - want).max() > 1e-3


def test_packed_attention_that_burn_has_not_is_refused() -> None:
    tree = {"at/query/kernel": np.zeros((12, 3, 4)), "at/key/kernel": np.zeros((5, 3, 4)), "at/value/kernel": np.zeros((7, 3, 4)), "at/out/kernel": np.zeros((3, 4, 12))}  # fmt: skip
    rules = MHA.replace("ENH", "ENHKV") + "  bias: false\n"
    with pytest.raises(PlanError) as error:
        planned(rules, tree)
    finding = error.value.findings[0]
    assert (finding.code, finding.rule, finding.path) == ("burn-has-no-layer", "r.yaml:5", "at")
    assert "different widths" in finding.problem and "`projections:`" in finding.fix
    by_hand = (
        "- einsum: ...D,DNH->...NH\n  from: at/{query,key}/kernel\n  linear: {module: at, weight: in_proj_weight}\n"
    )
    with pytest.raises(PlanError) as error:
        planned(by_hand, {f"at/{k}/kernel": np.zeros((12, 3, 4)) for k in ("query", "key")})
    (finding,) = error.value.findings
    assert (finding.code, finding.path) == ("burn-has-no-layer", "at") and "in_proj_weight" in finding.problem
    assert "`attention:`" in finding.fix and "`format: burn`" in finding.fix


def test_rope_pairs_are_those_of_burns_rotary_encoding() -> None:
    """Burn turns features 2k and 2k+1; a source that turns k and k + H/2 has its rows permuted, and one that does not, none."""
    q, k = RNG.standard_normal((2, 8, 3, 6))
    x = RNG.standard_normal((5, 8))

    def split_in_halves(y: np.ndarray) -> np.ndarray:
        """The half-split RoPE of Gemma's code, on (time, heads, H)."""
        angles = np.arange(5)[:, None, None] / 10000.0 ** (np.arange(0, 6, 2) / 6)
        first, second = np.split(y, 2, -1)
        return np.concatenate([first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], -1)  # fmt: skip

    want = np.einsum("tnh,snh->nts", *(split_in_halves(np.einsum("td,dnh->tnh", x, w)) for w in (q, k)))
    rules = "- einsum: ...D,DNH->...NH\n  from: {q,k}\n  rope: {H: half-split}\n  linear: at.{query,key}\n"
    rules = rules.replace("from: {q,k}", 'from: "{q,k}"')
    plan = planned(rules, {"q": q, "k": k})
    file = run(plan)

    def turned(name: str) -> np.ndarray:
        return burn.rotary(burn.linear(file, name, x).reshape(5, 3, 6).swapaxes(0, 1))

    close(turned("at.query") @ turned("at.key").swapaxes(1, 2), want)
    assert plan.layers[0]["target_rope"] == "interleaved"
    kept = run(planned(rules.replace("half-split", "interleaved"), {"q": q, "k": k}))
    assert np.array_equal(kept["at.query.weight"], q.reshape(8, 18))


# ---- norms


def norm_tree(layer: Any, x: np.ndarray) -> tuple[Tree, np.ndarray]:
    state = layer.init(jax.random.key(0), jnp.asarray(x))
    state = {k: noise(v, seed=len(k)) for k, v in state.items()}
    if "batch_stats" in state:
        state["batch_stats"]["var"] = np.abs(state["batch_stats"]["var"]) + 0.1
    return flat(state), np.asarray(layer.apply(state, jnp.asarray(x)))


def epsilon_of(call: str) -> float:
    return float(re.search(r"with_epsilon\(([^)]*)\)", call)[1])  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1e-6, 1e-5, 0.03])
def test_norms_are_burns_with_the_epsilon_that_the_file_states(epsilon: float) -> None:
    from flax import linen

    same = {"param_dtype": jnp.float64, "epsilon": epsilon}
    x = 0.05 * RNG.standard_normal((3, 5, 7, 12)) + 0.01
    first = x.swapaxes(1, 3).swapaxes(2, 3)  # channels first, as Burn has them
    rule = f"- from: params/scale\n  multiplies_by: scale\n  epsilon: {epsilon}\n"
    biased = rule + "  bias: params/bias\n"

    tree, want = norm_tree(linen.LayerNorm(**same), x)
    plan = planned(biased + "  layer_norm: n\n", tree)
    close(burn.layer_norm(run(plan), "n", x, epsilon_of(call_of(plan, "n"))), want)
    wrong = np.abs(burn.layer_norm(run(plan), "n", x) - want).max()  # Burn's default
    assert (wrong <= 1e-12) == (epsilon == 1e-5) and call_of(
        plan, "n"
    ) == f"LayerNormConfig::new(..).with_epsilon({epsilon})"
    assert bool(plan.notes) == (epsilon != 1e-5)

    tree, want = norm_tree(linen.LayerNorm(use_bias=False, **same), x)
    plan = planned(rule + "  layer_norm: n\n", tree)
    close(burn.layer_norm(run(plan), "n", x, epsilon), want)
    assert call_of(plan, "n").endswith(".with_bias(false)") and plan.notes

    tree, want = norm_tree(linen.RMSNorm(**same), x)
    plan = planned(rule + "  rms_norm: n\n", tree)
    assert call_of(plan, "n") == f"RmsNormConfig::new(..).with_epsilon({epsilon})"
    close(burn.rms_norm(run(plan), "n", x, epsilon), want)

    tree, want = norm_tree(linen.GroupNorm(num_groups=3, **same), x)
    plan = planned(biased + "  num_groups: 3\n  group_norm: n\n", tree)
    assert call_of(plan, "n") == f"GroupNormConfig::new(3, ..).with_epsilon({epsilon})"
    got = burn.group_norm(run(plan), "n", first, 3, epsilon)
    close(got.swapaxes(2, 3).swapaxes(1, 3), want)

    layer = linen.BatchNorm(use_running_average=True, momentum=0.99, **same)
    tree, want = norm_tree(layer, x)
    stats = "  mean: batch_stats/mean\n  var: batch_stats/var\n  momentum: 0.99\n  batch_norm: n\n"
    plan = planned(biased + stats, tree)
    file = run(plan)
    assert set(file) == {"n.gamma", "n.beta", "n.running_mean", "n.running_var"}  # no counter: Burn has none
    assert call_of(plan, "n") == f"BatchNormConfig::new(..).with_epsilon({epsilon}).with_momentum(0.01)"
    close(burn.batch_norm(file, "n", first, epsilon).swapaxes(2, 3).swapaxes(1, 3), want)


def test_a_bias_that_burns_module_has_and_the_source_not_is_zeros() -> None:
    """BatchNorm and GroupNorm of Burn have gamma and beta or neither: a missing tensor would stop the loading."""
    tree = {"s": RNG.standard_normal(6), "m": RNG.standard_normal(6), "v": np.ones(6), "g": RNG.standard_normal(6)}
    rules = """
- {from: s, multiplies_by: scale, epsilon: 1e-5, mean: m, var: v, batch_norm: b}
- {from: g, multiplies_by: scale, epsilon: 1e-5, num_groups: 2, group_norm: g}
"""
    file = run(planned(rules, tree))
    shapes = {f"b.{name}": (6,) for name in ("gamma", "beta", "running_mean", "running_var")}
    assert not burn.load(file, {**shapes, "g.gamma": (6,), "g.beta": (6,)})["g.beta"].any() and not file["b.beta"].any()


def test_one_plus_scale_is_folded_since_burn_multiplies_by_gamma() -> None:
    rules = "- {from: s, multiplies_by: 1+scale, epsilon: 1e-6, rms_norm: {module: n, weight: scale, multiplies_by: 1+weight}}\n"
    scale = RNG.standard_normal(9)
    assert np.array_equal(run(planned(rules, {"s": scale}, to="torch"))["n.scale"], scale)
    assert np.array_equal(run(planned(rules, {"s": scale}))["n.gamma"], scale + 1)


# ---- the adapters


MODEL = """
- {einsum: "...D,DF->...F", from: d/kernel, bias: d/bias, linear: d}
- {einsum: "...F,FNH->...NH", from: "{q,k,v}/kernel", linear: qkv}
- {einsum: "...NH,NHF->...F", from: o/kernel, linear: o}
- {from: s, bias: b, multiplies_by: 1+scale, epsilon: 1e-6, layer_norm: n}
- {from: r, multiplies_by: scale, epsilon: 1e-6, rms_norm: r}
- {from: e, embedding: e}
- {dimension_numbers: "NHWC,HWIO->NHWC", axes: PQCO, from: c/kernel, bias: c/bias, conv: c}
- {dimension_numbers: "NWC,WIO->NWC", axes: WCO, from: t/kernel, conv_transpose: t}
- {einsum: "...hi,hij->...hj", from: g, linear: {module: g, weight: w, einsum: "...hi,hij->...hj"}}
- {from: x, parameter: x}
"""
TYPES = {"d": "Linear", "qkv": "Linear", "o": "Linear", "n": "LayerNorm", "r": "RmsNorm", "e": "Embedding", "c": "Conv2d", "t": "ConvTranspose1d"}  # fmt: skip


def model_tree() -> Tree:
    shapes = {"d/kernel": (6, 6), "d/bias": (6,), "o/kernel": (3, 2, 6), "s": (6,), "b": (6,), "r": (6,), "e": (11, 6), "g": (3, 2, 2), "x": (2, 6)}  # fmt: skip
    shapes |= {f"{k}/kernel": (6, 3, 2) for k in "qkv"}
    shapes |= {"c/kernel": (3, 5, 4, 7), "c/bias": (7,), "t/kernel": (3, 4, 7)}
    return {k: RNG.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()}


def equal(a: Tree, b: Tree) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a)


def test_the_published_adapters_lead_from_one_file_to_the_other_bit_for_bit() -> None:
    """Native file <-> PyTorchToBurnAdapter / BurnToPyTorchAdapter <-> the ordinary PyTorch conversion."""
    tree = model_tree()
    native, ordinary = (run(planned(MODEL, tree, to=to)) for to in ("burn", "torch"))
    assert equal(burn.adapted(native, TYPES, burn.TO_PYTORCH), ordinary)
    assert equal(burn.adapted(ordinary, TYPES, burn.TO_BURN), native)
    assert not equal(native, ordinary)
    shapes = {"d.weight": (6, 6), "d.bias": (6,), "qkv.weight": (6, 18), "o.weight": (6, 6), "n.gamma": (6,), "n.beta": (6,), "r.gamma": (6,), "e.weight": (11, 6), "c.weight": (7, 4, 3, 5), "c.bias": (7,), "t.weight": (4, 7, 3), "g.w": (3, 2, 2), "x": (2, 6)}  # fmt: skip
    assert burn.load(native, shapes).keys() == native.keys()
    plan = planned(MODEL, tree)
    for step in plan.steps:  # each piece of a leaf has its place in the file: no leaf is held whole for Burn's sake
        region = np.empty(step.spec.shape, step.spec.dtype)
        assert all(
            destination_view(part.ops, plan.source.leaves[part.leaf].spec, part.share(region)) for part in step.parts
        )
    qkv = next(step for step in plan.steps if step.name == "qkv.weight")
    assert [(part.axis, part.rows, str(part.layout)) for part in qkv.parts] == [(-1, (6 * k, 6 * k + 6), "F N H -> F (N H)") for k in range(3)]  # fmt: skip


def test_packed_gates_of_pytorch_do_not_load() -> None:
    """PyTorch's packed tensors do not load with the adapter, which renames and transposes and cannot split."""
    name = "flax.linen.GRUCell"
    tree = {f"params/cell/{k}": v for k, v in LIVE[name][1]()[0].items()}
    native = run(planned(cell_rules(name), tree))
    types = {
        f"net.rnn.{g}_gate.{t}_transform": "Linear" for g in ("reset", "update", "new") for t in ("input", "hidden")
    }
    ordinary = burn.adapted(run(planned(cell_rules(name), tree, to="torch")), types, burn.TO_BURN)
    with pytest.raises(KeyError):
        burn.load(ordinary, {k: v.shape for k, v in native.items()})


def test_a_matrix_of_the_targets_own_code_is_burns_linear() -> None:
    """GPT-2's Conv1D of transformers is (in, out); in Rust it is a Linear."""
    rules = '- {einsum: "...D,FD->...F", from: c/kernel, linear: {module: c, einsum: "...D,DF->...F"}}'
    kernel = RNG.standard_normal((5, 3))
    ordinary, native = (run(planned(rules, {"c/kernel": kernel}, to=to)) for to in ("torch", "burn"))
    assert np.array_equal(ordinary["c.weight"], kernel.T) and np.array_equal(native["c.weight"], kernel.T)


def test_kernels_of_the_targets_own_code_are_burns_convolutions() -> None:
    rules = '- {dimension_numbers: "NWC,WIO->NWC", axes: WCO, from: c, conv: {module: c, dimension_numbers: "NCW,OWI->NCW"}}'
    kernel = RNG.standard_normal((3, 4, 7))
    assert run(planned(rules, {"c": kernel}, to="torch"))["c.weight"].shape == (7, 3, 4)
    assert np.array_equal(run(planned(rules, {"c": kernel}))["c.weight"], kernel.transpose(2, 1, 0))


def test_folded_weights_and_tensors_of_several_rules_are_turned_as_a_whole() -> None:
    """What is computed on a weight goes by its outputs, wherever they lie in the end."""
    rules = """
- {einsum: "...D,DF->...F", from: k, weight_norm: g, linear: d}
- {einsum: "...D,DNH->...NH", from: q, linear: {module: p, part: 1 of 2}}
- {einsum: "...D,DKG->...KG", from: kv, linear: {module: p, part: 2 of 2}}
"""
    tree = {"k": RNG.standard_normal((4, 6)), "g": RNG.standard_normal(6), "q": RNG.standard_normal((4, 3, 2)), "kv": RNG.standard_normal((4, 1, 2))}  # fmt: skip
    native, ordinary = (run(planned(rules, tree, to=to)) for to in ("burn", "torch"))
    assert native["d.weight"].shape == (4, 6) and native["p.weight"].shape == (4, 8)
    assert all(np.array_equal(native[name], ordinary[name].T) for name in ordinary)


def test_the_gelu_that_burn_has_not_by_default_is_said() -> None:
    rules = '- {einsum: "...D,DF->...F", from: k, activation: gelu_ACT, linear: d}'
    tree = {"k": RNG.standard_normal((4, 6))}
    plan = planned(rules.replace("ACT", "tanh"), tree)
    assert plan.notes == ("in Burn d is followed by Gelu::new_approximate(): the defaults compute something else",)
    assert planned(rules.replace("ACT", "erf"), tree).notes == ()


def test_turning_twice_is_nothing() -> None:
    assert transposed_ops((Permute((1, 0)), Slice(0, 2, 4))) == (Slice(1, 2, 4),)
    assert transposed_ops(transposed_ops(())) == ()
    x = RNG.standard_normal((3, 4, 5))
    ops = (Permute((1, 2, 0)),)
    assert transposed_ops(ops) == (*ops, Permute((1, 0))) and x.ndim == 3


# ---- convolutions


def burn_conv(call: str, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Conv{1,2,3}d::forward as the call makes it, x channels first; padding.rs says what is padded."""
    rank = x.ndim - 2

    def told(word: str, default: int) -> list[int]:
        found = re.search(rf"with_{word}\(\[?([0-9, ]+)\]?\)", call)
        return [int(n) for n in found[1].split(",")] if found else [default] * rank

    stride, dilation, kernel = told("stride", 1), told("dilation", 1), w.shape[2:]
    pads = [(0, 0)] * rank
    if "::Same" in call:
        pads = [burn.same_padding(k, s, n) for k, s, n in zip(kernel, stride, x.shape[2:], strict=True)]
    if found := re.search(r"Explicit\(([0-9, ]+)\)", call):
        pads = burn.explicit([int(n) for n in found[1].split(",")], rank)
    x = np.pad(x, [(0, 0), (0, 0), *pads])
    conv = (torch.conv1d, torch.conv2d, torch.conv3d)[rank - 1]
    groups = told("groups", 1)[0]
    return conv(torch.tensor(x), torch.tensor(w), stride=stride, dilation=dilation, groups=groups).numpy()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("rank", "said", "call"),
    [
        (2, "padding: SAME, strides: 2", "Conv2dConfig::new(..).with_stride([2, 2]).with_padding(PaddingConfig2d::Same)"),
        (1, "padding: SAME", "Conv1dConfig::new(..).with_padding(PaddingConfig1d::Same)"),
        (2, "padding: VALID, strides: [2, 1]", "Conv2dConfig::new(..).with_stride([2, 1])"),
        (2, "padding: VALID", "Conv2dConfig::new(..)"),
        (2, "padding: [[0, 1], [2, 1]]", "Conv2dConfig::new(..).with_padding(PaddingConfig2d::Explicit(0, 2, 1, 1))"),
        (1, "padding: CAUSAL, dilation: 2", "Conv1dConfig::new(..).with_dilation(2).with_padding(PaddingConfig1d::Explicit(6, 0))"),
        (2, "padding: SAME, dilation: 2", "Conv2dConfig::new(..).with_dilation([2, 2]).with_padding(PaddingConfig2d::Explicit(3, 2, 3, 2))"),
        (3, "padding: [1, 0, 2]", "Conv3dConfig::new(..).with_padding(PaddingConfig3d::Explicit(1, 0, 2))"),
        (1, "padding: [[-1, 0]]", "Conv1dConfig::new(..), behind zeros (low, high) (-1, 0) for W (negative: taken off)"),
        (3, "padding: [[0, 1], 0, 0]", "Conv3dConfig::new(..), behind zeros (low, high) (0, 1) for D; (0, 0) for H; (0, 0) for W (negative: taken off)"),
        (1, "padding: SAME, strides: 2, dilation: 2", "Conv1dConfig::new(..).with_stride(2).with_dilation(2), behind zeros (low, high) (2, 3) for sizes 2m and (3, 3) for sizes 2m+1 of W (negative: taken off)"),
    ],
)  # fmt: skip
def test_a_window_is_said_as_burn_takes_it(rank: int, said: str, call: str) -> None:
    """Against jax.lax itself; what Burn's arguments cannot say must be done before the layer."""
    spatial = "DHW"[-rank:]
    numbers = f"N{spatial}C,{spatial}IO->N{spatial}C"
    kernel = (4, 3, 2)[:rank] if rank != 2 else (4, 3)
    w = RNG.standard_normal((*kernel, 3, 5))
    rules = f"- {{dimension_numbers: '{numbers}', axes: {'XYZ'[:rank]}IO, from: w, {said}, conv: c}}\n"
    plan = planned(rules, {"w": w})
    assert call_of(plan, "c") == call
    assert bool(plan.notes) == (call != "Conv2dConfig::new(..)")
    if "behind zeros" in call:
        return
    for size in (9, 10):
        x = RNG.standard_normal((2, *[size] * rank, 3))
        rule = plan.rules.rules[0].kind
        from convert.layers.conv.padding import pads

        geometry = rule.geometry  # type: ignore[attr-defined]
        padding = geometry.padding if geometry.padding in ("SAME", "VALID") else pads(geometry, kernel, x.shape[1:-1])
        want = jax.lax.conv_general_dilated(jnp.asarray(x), jnp.asarray(w), geometry.strides, padding, rhs_dilation=geometry.dilation, dimension_numbers=tuple(re.split(",|->", numbers)))  # fmt: skip
        got = burn_conv(call, np.moveaxis(x, -1, 1), run(plan)["c.weight"])
        close(np.moveaxis(got, 1, -1), np.asarray(want))


@pytest.mark.slow
def test_transposed_windows_and_groups() -> None:
    from flax import linen

    x = RNG.standard_normal((2, 6, 3))
    layer = linen.ConvTranspose(5, (3,), strides=(2,), padding="VALID", use_bias=False, param_dtype=jnp.float64)
    w = noise(layer.init(jax.random.key(0), x)["params"])["kernel"]
    want = np.asarray(layer.apply({"params": {"kernel": w}}, jnp.asarray(x)))
    rules = "- {dimension_numbers: 'NWC,WIO->NWC', axes: XIO, from: w, padding: VALID, strides: 2, conv_transpose: c}\n"
    plan = planned(rules, {"w": np.asarray(w)})
    assert call_of(plan, "c") == "ConvTranspose1dConfig::new(..).with_stride(2)"
    got = torch.conv_transpose1d(torch.tensor(x.swapaxes(1, 2)), torch.tensor(run(plan)["c.weight"]), stride=2).numpy()
    close(got.swapaxes(1, 2), want)
    plan = planned(rules.replace("VALID", "SAME"), {"w": np.asarray(w)})
    assert call_of(plan, "c") == "ConvTranspose1dConfig::new(..).with_stride(2), then take (0, 1) off the ends of W"
    depthwise = (
        "- {dimension_numbers: 'NWC,WIO->NWC', axes: XIO, feature_group_count: 6, from: w, padding: SAME, conv: c}\n"
    )
    plan = planned(depthwise, {"w": RNG.standard_normal((3, 1, 6))})
    assert call_of(plan, "c") == "Conv1dConfig::new(..).with_groups(6).with_padding(PaddingConfig1d::Same)"


# ---- refusals


CELL = {f"params/cell/{g}/{w}": np.zeros(5 if w == "bias" else (5, 5)) for g in ("if", "hf", "in", "hn") for w in ("kernel", "bias") if (g, w) not in (("hf", "bias"), ("hn", "bias"))}  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "tree", "finding"),
    [
        (
            "- {from: s, bias: b, multiplies_by: scale, epsilon: 1e-6, rms_norm: n}",
            {"s": np.zeros(3), "b": np.zeros(3)},
            ("n", "Burn's RmsNorm has gamma only, and b would be lost"),
        ),
        (
            "- {from: s, multiplies_by: scale, epsilon: 0, rms_norm: n}",
            {"s": np.zeros(3)},
            ("n", "Burn's RmsNorm panics at an epsilon of 0"),
        ),
        (
            "- {from: s, multiplies_by: scale, epsilon: 1e-6, rms_norm: n}",
            {"s": np.zeros((2, 3))},
            ("n.weight (float64[2,3])", "Burn's norms normalize the last axis only, and this scale has 2 axes"),
        ),
        (
            "- {from: s, parameter: x}",
            {"s": np.zeros(3, np.uint16)},
            ("x (uint16[3])", "burn-store does not read uint16; it reads float64, float32"),
        ),
        (
            "- {einsum: '...D,DF->...F', from: k, weight_norm: g, linear: {module: d, parametrization: weight_norm}}",
            {"k": np.zeros((2, 3)), "g": np.zeros(3)},
            ("d", "Burn's layers hold one weight, and the target keeps the two tensors of a weight norm"),
        ),
        (
            "- {from: e, embedding: {module: e, weight: table}}",
            {"e": np.zeros((2, 3))},
            ("e", "table is not a parameter of Burn's Embedding"),
        ),
        (
            "- {linear_interpolation: {coeffs: path, times: t}, from: p}",
            {"p/ys": np.zeros((4, 2)), "p/ts": np.zeros(4)},
            ("path", "Burn has no torchcde.LinearInterpolation"),
        ),
        (
            "- {gru: net.rnn, cell: 'flax.linen.MGUCell(reset_gate=False)', from: params/cell}",
            CELL,
            ("net.rnn", "flax.linen.MGUCell(reset_gate=False) computes n = tanh(W x + b + U h), and Burn's Gru always has a reset"),
        ),
    ],
)  # fmt: skip
def test_what_burn_has_not_is_refused_by_name(rules: str, tree: Tree, finding: tuple[str, str]) -> None:
    with pytest.raises(PlanError) as error:
        planned(rules, tree)
    (refused,) = error.value.findings
    assert (refused.code, refused.rule, refused.path) == ("burn-has-no-layer", "r.yaml:5", finding[0])
    assert refused.problem.startswith(finding[1]) and refused.fix


def test_a_target_of_the_rule_files_own() -> None:
    """Names of a Rust module; attention by its fields; what is no word of Burn's is refused where the rule says it."""
    head = "model: m\ntitle: M\ntargets: {torch: {loads: T}, rust: {loads: my_crate::Model, format: burn, rename_prefixes: {at: blocks.0.attention}}}\n"
    tree, x, want = flax_attention()
    file = run(planned(MHA, tree, to="rust", head=head))
    close(burn.attention(file, "blocks.0.attention", x, 3, np.tril(np.ones((7, 7), bool))), want)
    norm = "- {from: s, multiplies_by: 1+scale, epsilon: 1e-6, rms_norm: {torch: n, rust: {module: n, multiplies_by: 1+weight}}}"
    with pytest.raises(PlanError) as error:
        planned(norm, {"s": np.zeros(3)}, to="rust", head=head)
    (finding,) = error.value.findings
    assert (finding.code, finding.path) == ("burn-has-no-layer", "n") and "not by 1+weight" in finding.problem
    shared = "- {from: s, multiplies_by: 1+scale, epsilon: 1e-6, rms_norm: {module: n, weight: scale, multiplies_by: 1+weight}}"
    assert np.array_equal(
        run(planned(shared, {"s": np.zeros(3)}, to="rust", head=head))["n.gamma"], np.ones(3)
    )  # of torch, too
    alone = "model: m\ntitle: M\ntargets: {rust: {loads: my_crate::Model, format: burn}}\n"
    with pytest.raises(PlanError, match="scale is not a parameter of Burn's norms, which have `gamma` and `beta`"):
        make_plan(rule_file(shared, alone), MemorySource({"s": np.zeros(3)}))
    assert "at.query.weight" in run(
        make_plan(rule_file(MHA, alone), MemorySource(tree))
    )  # the first target, without --to
    with pytest.raises(RuleError, match=r"r.yaml:3:\d+: .*torch, burn"):
        rule_file(MHA, head.replace("format: burn", "format: bun"))


def test_an_unknown_target_names_burn_too() -> None:
    with pytest.raises(PlanError) as error:
        planned("- {from: s, parameter: x}", {"s": np.zeros(3)}, to="brun")
    (finding,) = error.value.findings
    assert (finding.code, finding.expected, finding.fix) == (
        "target-unknown",
        "one of torch, burn",
        "did you mean 'burn'?",
    )
