"""Gemma through `convert check`: the plain-JAX reference is what the real package computed, and transformers agrees with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import convert
from convert.layers.step_tensor import expected
from convert.numerics.lift_torch import lifted
from convert.numerics.precision import torch_pinned
from convert.references.gemma import jax_model, text
from convert.references.protocol import Observed
from convert.verify.comparison import load_reference
from convert.verify.report.report import Report, Verdict
from convert.verify.run import check
from convert.verify.sides.run_jax import jax_weights
from convert.verify.sides.run_torch import input_tensors, observed
from faults.catalogue import one_thread
from support.gemma_models import CASES, directory, settings
from support.goldens import checkpoint, golden_io, relative_error
from support.marks import slow_but


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_plain_jax_model_is_what_the_gemma_package_recorded(case: str) -> None:
    plan = convert.plan_conversion("gemma", checkpoint(case), settings=settings(case))
    io = golden_io(case)
    with jax.default_matmul_precision("highest"):
        got = jax_model.run(text.model_of(plan, plan.rules.model), jax_weights(plan), jax.numpy.asarray(io["tokens"]))[
            "logits"
        ]
    assert relative_error(got, io["logits"]) < 3e-6


def checked(case: str, out: Path) -> Report:
    with one_thread():
        return check(directory(case, out / "model"), checkpoint(case))


@pytest.mark.parametrize("case", slow_but([], ["gemma1-mha", "gemma2-2b", "gemma3-stacked"]))
def test_a_correct_conversion_passes_all_levels(case: str, tmp_path: Path) -> None:
    report = checked(case, tmp_path)
    assert [level.verdict for level in report.levels] == [Verdict.PASSED] * 4
    model = report.levels[-1]
    assert not any("could not be computed in float64" in note for note in model.notes)
    assert max(m.float64.relative for m in model.measures if m.float64 is not None) < 1e-12
    assert max(m.difference.relative for m in model.measures) < 1e-5
    (logits,) = (m for m in model.measures if m.logits is not None)
    assert logits.name == "logits" and logits.float64_logits is not None
    assert 0 <= logits.float64_logits.kl_max < 1e-25 and 0 < logits.logits.kl_max < 1e-10
    assert logits.logits.top1 == logits.float64_logits.top1 == 1 and logits.logits.positions > 40


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma1-mqa", "gemma2-9b", "gemma3"])
def test_what_is_meant_is_what_transformers_computes(case: str) -> None:
    """The first variant at each boundary that has some; its name is told from all others."""
    given = {**settings(case), **({} if case == "gemma1-mqa" else {"query_pre_attn_scalar": 7})}
    plan = convert.plan_conversion(
        "gemma", checkpoint(case), settings=given | ({"rope_factor_global": 4.0} if case == "gemma3" else {})
    )
    reference = load_reference(plan, None)
    assert not isinstance(reference, str)
    weights = {step.name: expected(step, plan.source).astype(np.float64) for step in plan.steps}
    inputs = reference.inputs(3)
    names = ["model.embed_tokens", "model.norm"]
    for i in range(plan.sizes["i"]):
        layer = f"model.layers.{i}"
        names += [f"{layer}.self_attn.{part}_proj" for part in "qkv"] + [f"{layer}.self_attn.o_proj:in"]
        names += [f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj", f"{layer}.mlp.down_proj:in"]
        names += [f"{layer}.self_attn.{part}_norm" for part in "qk"] if case == "gemma3" else []
    with torch_pinned(), lifted(), torch.no_grad():
        module = reference.build({name: torch.tensor(value) for name, value in weights.items()})
        values = observed(reference, module, input_tensors(inputs, "float64", "cpu"), names)
    seen = Observed(values, inputs, {k: v.numpy() for k, v in module.state_dict().items()})
    tried = {name: reference.variants(name) for name in values}
    assert sum(bool(found) for found in tried.values()) == 2 + plan.sizes["i"] * (4 if case == "gemma3" else 2)
    for name, found in tried.items():
        if found:
            assert relative_error(found[0].make(seen), values[name]) < 1e-12, name
            assert len({v.name for v in found}) == len(found), name
    assert not reference.variants("model.layers.0") and not reference.variants("model.norm")


def erf(config: Any) -> None:
    config.hidden_activation = config.hidden_act = "gelu"


def no_cap(config: Any) -> None:
    config.attn_logit_softcapping = None


def short_window(config: Any) -> None:
    config.sliding_window = 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "change", "fact"),
    [
        ("gemma1-mha", erf, "activation"),
        ("gemma2-2b", no_cap, "attn_logit_softcapping"),
        ("gemma2-2b", short_window, "sliding_window"),
    ],
)
def test_another_configuration_is_flagged(case: str, change: Any, fact: str, tmp_path: Path) -> None:
    """As a user would have it: config.json says something else than the source computes."""
    out = directory(case, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(out)
    change(model.config)
    model.config.save_pretrained(out)
    findings = [f for level in check(out, checkpoint(case), levels=("layers",)).levels for f in level.findings]
    assert any(f.data.get("fact") == fact for f in findings), [str(f) for f in findings]


def test_the_window_is_exceeded_and_no_token_is_padding() -> None:
    plan = convert.plan_conversion("gemma", checkpoint("gemma3"), settings=settings("gemma3"))
    reference = load_reference(plan, None)
    assert not isinstance(reference, str)
    tokens = reference.inputs(0)["tokens"]
    assert tokens.shape == (2, 8 + text.BEYOND) and tokens.min() > 0


def test_other_targets_have_no_reference() -> None:
    plan = convert.plan_conversion("gemma", checkpoint("gemma3"), to="plain_norms", settings=settings("gemma3"))
    with pytest.raises(convert.ConvertError, match="expected transformers, got plain_norms"):
        text.reference(plan)


def test_stacked_layers_are_taken_apart_in_order() -> None:
    weights = {f"stacked_layers/attention_type_{p}/x/w": np.arange(2) * 3 + p for p in range(3)}
    assert {k: int(v) for k, v in jax_model.layered(weights).items()} == {f"layer_{i}/x/w": i for i in range(6)}
    with pytest.raises(convert.ConvertError, match="their order is unknown"):
        jax_model.layered({**weights, "layer_6/x/w": np.zeros(1)})
