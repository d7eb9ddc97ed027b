"""The references of TimesFM: proven against recordings, in lifted float64 against PyTorch, and seen to fail."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
import torch

import convert
from convert.numerics.compare import difference
from convert.numerics.lift_jax import lift
from convert.numerics.lift_torch import lifted
from convert.references.protocol import INPUT, Reference, observe
from convert.references.timesfm import timesfm_1, timesfm_2p5
from support import upstream
from support.goldens import checkpoint, golden_io, relative_error
from support.marks import slow_but
from support.memory_source import MemorySource
from support.memory_source import run as run_plan
from support.paths import TESTS

CASES = [(case, to) for case in ("timesfm-1.0", "timesfm-2.0", "timesfm-2.5") for to in ("timesfm", "transformers")]
SETTINGS: dict[str, dict[str, Any]] = {
    "timesfm-1.0": {"use_positional_embedding": True, "context_length": 512},
    "timesfm-2.0": {"use_positional_embedding": False, "context_length": 512},
    "timesfm-2.5": {},
}
PROMISED = 1e-12  # lifted; measured are 1e-15 to 3e-15
GOLDEN_BOUND = 2e-6  # float32; measured are 2e-7 to 1e-6


@pytest.fixture(autouse=True)
def timesfm_1_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(timesfm_1.VARIABLE, str(Path(upstream.timesfm_1().__file__ or "").parents[1]))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny: threads that wait for each other cost more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def adapter(case: str) -> ModuleType:
    return timesfm_2p5 if case == "timesfm-2.5" else timesfm_1


@cache
def leaves(case: str) -> dict[str, np.ndarray]:
    source = convert.open_source(checkpoint(case))
    return {name: source.read(name) for name in source.leaves}


def plan_of(case: str, to: str, dtype: str = "float32", **settings: Any) -> convert.Plan:
    """The golden's plan; with ``float64`` as if the checkpoint had been saved so, for weights without any rounding."""
    arrays = {name: x.astype(dtype) if x.dtype == np.float32 else x for name, x in leaves(case).items()}
    return convert.plan_conversion("timesfm", MemorySource(arrays), to=to, settings={**SETTINGS[case], **settings})


@cache
def weights(case: str, to: str, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """The converted state_dict."""
    plan = plan_of(case, to, dtype)
    state = {name: torch.tensor(value) for name, value in run_plan(plan).items()}
    for step in plan.steps:
        if step.value is not None:  # the table of timescales: log(min), step
            low, increment = step.value
            table = low * np.exp(-increment * np.arange(step.spec.shape[0]))
            state[step.name] = torch.tensor(table.astype(np.float32))
    return state


@dataclass
class Pair:
    """A reference with what its JAX side, lifted, gives for its inputs."""

    reference: Reference
    inputs: Mapping[str, Any]
    masks: Mapping[str, np.ndarray]
    exact: Mapping[str, np.ndarray]
    unlifted: tuple[str, ...]


@cache
def pair(case: str, to: str) -> Pair:
    reference = adapter(case).reference(plan_of(case, to))
    inputs = reference.inputs(0)
    source = {name.removesuffix("/value"): x for name, x in leaves(case).items()}
    run = lift(reference.jax_side())
    exact = {name: np.asarray(value) for name, value in run(source, inputs).items()}
    assert not run.staged
    return Pair(reference, inputs, reference.masks(inputs), exact, run.unlifted)


def build(case: str, to: str, *, lift: bool, change: Mapping[str, torch.Tensor] | None = None) -> torch.nn.Module:
    state = weights(case, to, "float64" if lift else "float32")
    state = {**state, **(change or {})}
    return pair(case, to).reference.build({k: v.double() if lift else v.float() for k, v in state.items()})


def torch_values(case: str, to: str, module: torch.nn.Module) -> dict[str, np.ndarray]:
    at = pair(case, to)
    names = [name for name in at.exact if name not in at.reference.outputs]
    with observe(module, names) as values:
        outputs = at.reference.run(module, at.inputs)
    return {name: value.numpy() for name, value in {**values, **outputs}.items()}


def errors(case: str, to: str, values: Mapping[str, np.ndarray]) -> dict[str, float]:
    at = pair(case, to)
    assert values.keys() == at.exact.keys()
    return {name: difference(values[name], want, mask=at.masks.get(name)).relative for name, want in at.exact.items()}


def measure(case: str, to: str, *, lift: bool, change: Any = None, edit: Any = None) -> dict[str, float]:
    """Errors of PyTorch, lifted or in float32, at all boundaries and outputs against lifted JAX.

    `change` replaces weights, `edit` changes the built module.
    """
    if not lift:
        module = build(case, to, lift=False, change=change)
        if edit:
            edit(module)
        return errors(case, to, torch_values(case, to, module))
    with lifted() as mode:
        module = build(case, to, lift=True, change=change)
        if edit:
            edit(module)
        values = torch_values(case, to, module)
    assert mode.unlifted == set()
    assert {x.dtype for x in values.values()} == {np.dtype(np.float64)}
    return errors(case, to, values)


@cache
def honest(case: str, *, lift: bool) -> float:
    """The largest error of the honest conversion, against upstream's PyTorch model."""
    return max(measure(case, "timesfm", lift=lift).values())


# ---- they are the same function


@pytest.mark.parametrize(("case", "to"), slow_but([], CASES))
def test_both_models_compute_the_same_function(case: str, to: str) -> None:
    lifted_errors, float32_errors = (measure(case, to, lift=lift) for lift in (True, False))
    assert max(lifted_errors.values()) < PROMISED, lifted_errors
    assert max(float32_errors.values()) < 2 * GOLDEN_BOUND, float32_errors
    assert pair(case, to).unlifted == ()


@pytest.mark.parametrize(("case", "to"), slow_but([], CASES))
def test_boundaries_cover_every_layer_in_the_order_of_the_data(case: str, to: str) -> None:
    at = pair(case, to)
    names = list(at.exact)
    assert names[-len(at.reference.outputs) :] == list(at.reference.outputs)
    module = build(case, to, lift=False)
    linear = {name for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}
    assert linear <= set(names), "the result of every projection is a boundary"
    order: list[str] = []
    hooks = [
        module.get_submodule(name).register_forward_hook(lambda *_, name=name: order.append(name))
        for name in names
        if name not in at.reference.outputs and not name.endswith(INPUT)
    ]
    at.reference.run(module, at.inputs)
    for hook in hooks:
        hook.remove()
    ran = list(dict.fromkeys(order))
    expected = [name for name in names if name not in at.reference.outputs and not name.endswith(INPUT)]
    # Modules that hold others end after them; the probabilities of attention are known before its output projection.
    ends_late = [name for name in expected if name.endswith("self_attn")]
    assert [name for name in ran if name not in ends_late] == [name for name in expected if name not in ends_late]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["timesfm-1.0", "timesfm-2.0"])
def test_own_equations_reproduce_praxis(case: str) -> None:
    """Against what the Pax model gave for this checkpoint: proves the reference itself, whatever PyTorch does."""
    io = golden_io(case)
    reference = timesfm_1.reference(plan_of(case, "timesfm"))
    inputs = {name: io[name] for name in ("input_ts", "input_padding", "freq")}
    with jax.default_matmul_precision("highest"):
        got = jax.jit(reference.jax_side())(leaves(case), inputs)
    for name, value in (("mean", "mean"), ("full", "full"), ("raw_output", f"horizon_ff_layer{INPUT}")):
        assert relative_error(got[value], io[name]) < GOLDEN_BOUND, name


@pytest.mark.slow
def test_upstream_flax_reproduces_its_recording() -> None:
    io = golden_io("timesfm-2.5")
    source = {name.removesuffix("/value"): x for name, x in leaves("timesfm-2.5").items()}
    reference = pair("timesfm-2.5", "timesfm").reference
    got = jax.jit(reference.jax_side())(source, {"inputs": io["inputs"], "masks": io["masks"]})
    assert relative_error(got["renormed_outputs"], io["renormed_outputs"]) < GOLDEN_BOUND
    assert relative_error(got["quantile_spread"], io["quantile_spread"]) < GOLDEN_BOUND
    assert relative_error(got["ar_outputs"][:, :1], io["ar_outputs"]) < GOLDEN_BOUND


@pytest.mark.slow
def test_patches_of_padding_differ_and_are_masked() -> None:
    """Without the mask the comparison would fail: it leaves out what legitimately differs, and nothing else."""
    at = pair("timesfm-2.5", "timesfm")
    with lifted():
        values = torch_values("timesfm-2.5", "timesfm", build("timesfm-2.5", "timesfm", lift=True))
    name = "stacked_xf.2"
    assert difference(values[name], at.exact[name]).relative > 1e-3
    mask = at.masks[name]
    np.testing.assert_array_equal(mask.sum(1), [16, 13, 15, 16])


# ---- and when they are not, it shows


def epsilon(name: str, attribute: str) -> Any:
    def edit(module: torch.nn.Module) -> None:
        setattr(module.get_submodule(name), attribute, 1e-5)

    return edit


def activation(function: Any) -> Any:
    """ReLU is called as a function in upstream's MLP: the one layer gets another."""

    def edit(module: torch.nn.Module) -> None:
        mlp: Any = module.get_submodule("stacked_transformer.layers.1.mlp")

        def forward(x: torch.Tensor, paddings: torch.Tensor | None = None) -> torch.Tensor:
            hidden = function(mlp.gate_proj(mlp.layer_norm(x)))
            return mlp.down_proj(hidden) * (1.0 if paddings is None else 1.0 - paddings[:, :, None]) + x

        mlp.forward = forward

    return edit


NORM = "stacked_transformer.layers.1.mlp.layer_norm"
SILU = "output_projection_point.activation"
FAULTS: dict[str, tuple[str, Any, Any, str]] = {
    "epsilon of a LayerNorm": ("timesfm-2.0", epsilon(NORM, "eps"), None, NORM),
    "epsilon of an RMSNorm": (
        "timesfm-2.0",
        epsilon("stacked_transformer.layers.11.input_layernorm", "eps"),
        None,
        "stacked_transformer.layers.11.input_layernorm",
    ),
    "epsilon of 2.5": ("timesfm-2.5", epsilon("stacked_xf.2.pre_ff_ln", "epsilon"), None, "stacked_xf.2.pre_ff_ln"),
    "GeLU for ReLU": (
        "timesfm-2.0",
        activation(torch.nn.functional.gelu),
        None,
        f"stacked_transformer.layers.1.mlp.down_proj{INPUT}",
    ),
    "GeLU for SiLU": (
        "timesfm-2.5",
        lambda module: module.get_submodule("output_projection_point").register_module("activation", torch.nn.GELU()),
        None,
        f"output_projection_point.output_layer{INPUT}",
    ),
    "1+scale missing": (
        "timesfm-2.0",
        None,
        lambda state: {f"{NORM}.weight": state[f"{NORM}.weight"] - 1},
        NORM,
    ),
    "a weight off by one bit": (
        "timesfm-2.5",
        None,
        lambda state: {"stacked_xf.1.ff0.weight": one_bit(state["stacked_xf.1.ff0.weight"])},
        "stacked_xf.1.ff0",
    ),
}


def one_bit(weight: torch.Tensor) -> torch.Tensor:
    """The last bit of one number flipped, as a float32."""
    bits = weight.float().numpy().copy()
    bits.view(np.int32)[0, 0] ^= 1
    out = weight.double().clone()  # the weights of a case are shared by the tests
    out[0, 0] = float(bits[0, 0])
    return out


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_stand_out_of_lifted_runs(fault: str) -> None:
    """At least a thousand times above what an honest conversion measures, and first where the fault is."""
    case, edit, change, where = FAULTS[fault]
    changed = change(weights(case, "timesfm", "float64")) if change else None
    found = measure(case, "timesfm", lift=True, change=changed, edit=edit)
    assert max(found.values()) > 1000 * max(honest(case, lift=True), 1e-15)
    first = next(name for name, error in found.items() if error > PROMISED)
    assert first == where


@pytest.mark.slow
def test_small_faults_are_hidden_in_float32() -> None:
    """Why lifting is needed: a wrong epsilon and a flipped bit are within what honest float32 runs differ by."""
    for fault in ("epsilon of an RMSNorm", "a weight off by one bit"):
        case, edit, change, _ = FAULTS[fault]
        changed = change(weights(case, "timesfm")) if change else None
        found = max(measure(case, "timesfm", lift=False, change=changed, edit=edit).values())
        assert found < 4 * honest(case, lift=False), fault


# ---- the protocol


@pytest.mark.parametrize(("case", "to"), slow_but([("timesfm-2.5", "timesfm")], CASES))
def test_inputs_are_seeded_and_have_what_makes_bugs_show(case: str, to: str) -> None:
    reference = pair(case, to).reference
    one, same, other = reference.inputs(0), reference.inputs(0), reference.inputs(1)
    for name in one:
        np.testing.assert_array_equal(one[name], same[name])
    values, padding = ("inputs", "masks") if case == "timesfm-2.5" else ("input_ts", "input_padding")
    assert not np.array_equal(one[values], other[values])
    rows, points = one[values].shape
    assert rows >= 3 and points >= 16 * 32 and one[values].dtype == np.float32
    patches = one[padding][:, :points].astype(bool).reshape(rows, -1, 32)
    assert patches.all(-1).any(), "whole patches of padding"
    assert (patches.any(-1) & ~patches.all(-1)).any(), "a patch with some"
    in_patches = one[values].reshape(rows, -1, 32)
    assert (np.ptp(in_patches, axis=-1) == 0).sum() >= 2, "a constant stretch"
    assert np.abs(one[values][~one[padding][:, :points].astype(bool)]).max() > 50, "a large range"


@pytest.mark.parametrize(("case", "to"), slow_but([], CASES))
def test_jax_side_is_a_pure_function_of_arrays(case: str, to: str) -> None:
    reference = pair(case, to).reference
    source = {name.removesuffix("/value"): x for name, x in leaves(case).items()}
    shapes = jax.eval_shape(reference.jax_side(), source, reference.inputs(0))
    assert isinstance(shapes, OrderedDict)
    assert {name: s.shape for name, s in shapes.items()} == {n: x.shape for n, x in pair(case, to).exact.items()}
    alone = jax.eval_shape(reference.jax_outputs_side(), source, reference.inputs(0))
    if reference.jax_outputs is not None:
        assert {name: s.shape for name, s in alone.items()} == {name: shapes[name].shape for name in reference.outputs}


def test_recording_leaves_upstream_as_it_was() -> None:
    from flax import nnx
    from timesfm.flax import dense, normalization, transformer
    from timesfm.timesfm_2p5 import timesfm_2p5_flax

    pair("timesfm-2.5", "timesfm")
    classes = (nnx.Linear, nnx.LinearGeneral, dense.ResidualBlock, normalization.RMSNorm, transformer.Transformer)
    for cls in classes:
        assert inspect.getmodule(cls.__call__) is inspect.getmodule(cls)
    assert timesfm_2p5_flax._apply_stacked_transformers.__name__ == "_apply_stacked_transformers"
    assert timesfm_2p5_flax.TimesFM_2p5_200M_flax_module.config.stacked_transformers.num_layers == 20


@pytest.mark.slow
@pytest.mark.parametrize(("case", "to"), slow_but([("timesfm-1.0", "timesfm"), ("timesfm-2.5", "timesfm")], CASES))
def test_built_modules_have_the_dtype_of_their_weights(case: str, to: str) -> None:
    reference = pair(case, to).reference
    for dtype in (torch.float32, torch.bfloat16):
        module = reference.build({name: x.to(dtype) for name, x in weights(case, to).items()})
        assert not module.training and {p.dtype for p in module.parameters()} == {dtype}
        outputs = reference.run(module, reference.inputs(0))
        assert tuple(outputs) == tuple(reference.outputs)
        assert all(bool(x.isfinite().all()) and x.dtype == dtype for x in outputs.values())
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize(("case", "to"), CASES)
def test_builds_on_the_meta_device_and_loads_strictly(case: str, to: str) -> None:
    reference, state = pair(case, to).reference, dict(weights(case, to))
    with torch.device("meta"):
        shapes = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in state.items()}
        reference.build(shapes)
        first = next(iter(shapes))
        with pytest.raises(RuntimeError, match=f'Missing key.*"{first}"'):
            reference.build({name: x for name, x in shapes.items() if name != first})


FACTS = {
    ("timesfm-1.0", "timesfm"): {
        "input_ff_layer.hidden_layer.0": {"activation": "silu"},
        "stacked_transformer.layers.1.input_layernorm": {"epsilon": 1e-6, "multiplies_by": "weight"},
        "stacked_transformer.layers.1.mlp.layer_norm": {"epsilon": 1e-6, "multiplies_by": "weight"},
        "stacked_transformer.layers.1.mlp.gate_proj": {"activation": "relu"},
    },
    ("timesfm-2.0", "transformers"): {
        "horizon_ff_layer.input_layer": {"activation": "silu"},
        "decoder.layers.11.input_layernorm": {"epsilon": 1e-6, "multiplies_by": "weight"},
        "decoder.layers.11.mlp.gate_proj": {"activation": "relu"},
    },
    ("timesfm-2.5", "timesfm"): {
        "tokenizer.hidden_layer": {"activation": "silu"},
        "stacked_xf.2.attn.query_ln": {"epsilon": 1e-6, "multiplies_by": "weight"},
        "stacked_xf.2.ff0": {"activation": "silu"},
    },
    ("timesfm-2.5", "transformers"): {
        "output_projection_quantiles.input_layer": {"activation": "silu"},
        "model.layers.2.self_attn.q_norm": {"epsilon": 1e-6, "multiplies_by": "weight"},
        "model.layers.2.mlp.fc1": {"activation": "silu"},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "to"), FACTS)
def test_facts_are_read_off_the_live_module(case: str, to: str) -> None:
    module = build(case, to, lift=False)
    found = pair(case, to).reference.facts(module)
    assert FACTS[case, to].items() <= found.items()
    rules = [entry for entry in plan_of(case, to).layers if "activation" in entry or "epsilon" in entry]
    said = {"activation": sum("activation" in f for f in found.values()), "epsilon": sum("epsilon" in f for f in found.values())}  # fmt: skip
    layers = pair(case, to).reference.depth
    per_layer = 2 if case != "timesfm-2.5" else 6
    blocks = 2 if case != "timesfm-2.5" else 3
    assert rules and said == {"activation": layers + blocks, "epsilon": per_layer * layers}


@pytest.mark.slow
def test_facts_show_what_was_changed() -> None:
    reference = pair("timesfm-2.0", "timesfm").reference
    module = build("timesfm-2.0", "timesfm", lift=False)
    gate = "stacked_transformer.layers.1.mlp.gate_proj"
    epsilon(NORM, "eps")(module)
    for name, function in (("gelu_erf", torch.nn.functional.gelu), ("silu", torch.nn.functional.silu)):
        activation(function)(module)
        found = reference.facts(module)
        assert found[gate]["activation"] == name and found[NORM]["epsilon"] == 1e-5
    activation(torch.nn.functional.hardswish)(module)
    assert reference.facts(module)[gate]["activation"] == "unknown"
    norm: Any = module.get_submodule("stacked_transformer.layers.0.input_layernorm")
    norm.add_unit_offset = True
    assert reference.facts(module)["stacked_transformer.layers.0.input_layernorm"]["multiplies_by"] == "1+weight"


def test_observe_takes_the_first_call_and_leaves_no_hook() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    with observe(module, ["0", f"1{INPUT}", "1"]) as values:
        first = module(torch.ones(1, 2))
        module(torch.zeros(1, 2))
    assert torch.equal(values["1"], first.detach()) and torch.equal(values["0"], values[f"1{INPUT}"])
    assert not module[0]._forward_hooks and not module[1]._forward_pre_hooks
    with pytest.raises(AttributeError), observe(module, ["0", "nowhere"]):
        pass
    assert not module[0]._forward_hooks


# ---- other sizes, and what a user may do wrong


def other_size(case: str, to: str) -> dict[str, np.ndarray]:
    """A random checkpoint in which every axis has a size of its own, as far as the target can."""
    sizes = {"D": 24, "N": 3, "H": 8, "F": 20, "G": 28, "P": 16, "T": 48, "S": 40, "i": 2, "Q": 10, "E": 4}
    sizes |= {"I": 2 * sizes["P"], "O": sizes["T"] * 10, "U": sizes["S"] * 10}
    if case != "timesfm-2.5":
        sizes["E"] = 3  # fixed upstream
    elif to == "transformers":
        sizes["G"] = sizes["D"]  # not in its config
    rng = np.random.default_rng(3)
    arrays: dict[str, np.ndarray] = {}
    for step in plan_of(case, "timesfm").steps:
        for part in step.parts:
            axes = part.layout.stored.split()
            if part.leaf in arrays or any(f"x_layers_{i}/" in part.leaf for i in range(2, 20)):
                continue
            shape = [sizes[axis] for axis in axes]
            centre = 1 if part.leaf.removesuffix("/value").endswith("_ln/scale") else 0
            arrays[part.leaf] = (centre + rng.normal(0, 0.3, shape)).astype(np.float32)
    return arrays


@pytest.mark.slow
@pytest.mark.parametrize("to", ["timesfm", "transformers"])
@pytest.mark.parametrize("case", ["timesfm-1.0", "timesfm-2.5"])
def test_any_size(case: str, to: str) -> None:
    source = other_size(case, to)
    plan = convert.plan_conversion("timesfm", MemorySource(source), to=to, settings={**SETTINGS[case]})
    reference = adapter(case).reference(plan)
    inputs = reference.inputs(5)
    want = jax.jit(reference.jax_side())({name.removesuffix("/value"): x for name, x in source.items()}, inputs)
    state = {name: torch.tensor(x) for name, x in run_plan(plan).items()}
    if case == "timesfm-1.0" and to == "transformers":
        table = 10_000.0 ** (-np.arange(12) / 11)
        state["decoder.position_emb.inv_timescales"] = torch.tensor(table.astype(np.float32))
    module = reference.build(state)
    with observe(module, [name for name in want if name not in reference.outputs]) as values:
        outputs = reference.run(module, inputs)
    got, masks = {**values, **outputs}, reference.masks(inputs)
    for name, value in want.items():
        assert difference(got[name].numpy(), value, mask=masks.get(name)).relative < 1e-5, name


def test_facts_that_the_tree_lacks_are_asked_for() -> None:
    plan = convert.plan_conversion("timesfm", checkpoint("timesfm-1.0"))
    with pytest.raises(convert.ConvertError, match="--set use_positional_embedding=true"):
        timesfm_1.reference(plan)


def test_plans_of_other_rules_are_refused() -> None:
    for module, model, case in ((timesfm_1, "timesfm-1", "timesfm-2.5"), (timesfm_2p5, "timesfm-2.5", "timesfm-1.0")):
        plan = plan_of(case, "timesfm")
        with pytest.raises(convert.ConvertError) as error:
            module.reference(plan)
        (finding,) = error.value.findings
        assert finding.code == "reference-unavailable"
        assert (finding.expected, finding.got) == (model, plan.rules.model)


def test_heads_that_do_not_make_up_the_width_are_refused() -> None:
    plan = plan_of("timesfm-2.5", "timesfm")
    with pytest.raises(convert.ConvertError) as error:
        timesfm_2p5.reference(replace(plan, sizes={**plan.sizes, "H": 7}))
    (finding,) = error.value.findings
    assert finding.code == "reference-unavailable" and finding.expected.startswith("32 // 4 = 8") and finding.got == "7"


def test_timesfm_1_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reference = pair("timesfm-1.0", "timesfm").reference
    monkeypatch.setenv(timesfm_1.VARIABLE, str(tmp_path))
    with pytest.raises(convert.ConvertError, match=r"timesfm.pytorch_patched_decoder\.py; pip install") as error:
        reference.build({})
    assert error.value.code == "reference-unavailable" and error.value.findings[0].path == str(tmp_path)
    monkeypatch.delenv(timesfm_1.VARIABLE)  # timesfm 3 is installed, and has no such module
    with pytest.raises(convert.ConvertError, match=r"--target DIR timesfm==1\.3\.0, and set CONVERT_TIMESFM_1=DIR"):
        reference.build({})


def test_timesfm_1_as_the_installed_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "timesfm"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs praxis')\n")
    (package / "pytorch_patched_decoder.py").write_text("CONFIG = 1\n")
    monkeypatch.delenv(timesfm_1.VARIABLE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "timesfm", raising=False)
    assert timesfm_1.upstream_module().CONFIG == 1


WITHOUT = """
import sys
for name in {missing!r}: sys.modules[name] = None
import numpy as np
import convert
from convert.references.timesfm import {module} as adapter
plan = convert.plan_conversion("timesfm", {checkpoint!r}, settings={settings!r})
reference = adapter.reference(plan)
inputs = reference.inputs(0)
reference.masks(inputs)
weights = {{n.removesuffix("/value"): plan.source.read(n) for n in plan.source.leaves}}
"""
NO_JAX = """
try:
    reference.jax_side()(weights, inputs)
except ImportError as error:
    assert {said!r} in str(error) and error.name in ("jax.numpy", "flax"), error
else:
    raise AssertionError
sys.path.insert(0, {tests!r})
import torch
from support import memory_source
module = reference.build({{n: torch.tensor(x) for n, x in memory_source.run(plan).items()}})
assert all(x.isfinite().all() for x in reference.run(module, inputs).values())
"""
NO_TORCH = """
out = reference.jax_side()(weights, inputs)
assert np.isfinite(out["mean"]).all()
"""


@pytest.mark.slow  # each starts a process that imports everything anew
@pytest.mark.parametrize("case", ["timesfm-1.0", "timesfm-2.5"])
def test_torch_side_runs_without_jax(case: str) -> None:
    code = WITHOUT + NO_JAX
    code = code.format(
        missing=["jax", "flax"],
        module=adapter(case).__name__.rpartition(".")[2],
        checkpoint=str(checkpoint(case)),
        settings=SETTINGS[case],
        said="No module named 'jax.numpy'" if case == "timesfm-1.0" else "pip install",
        tests=str(TESTS),
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.slow
def test_jax_side_of_timesfm_1_runs_without_torch() -> None:
    code = WITHOUT.format(
        missing=["torch", "timesfm"],
        module="timesfm_1",
        checkpoint=str(checkpoint("timesfm-1.0")),
        settings=SETTINGS["timesfm-1.0"],
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code + NO_TORCH], check=True)
