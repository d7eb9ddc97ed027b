"""BERT and GPT-2 through `convert check`: the plain-JAX references are what the flax classes computed."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

import convert
from check.catalogue import one_thread
from convert.check.model import jax_weights
from convert.check.record import record
from convert.check.report import Verdict
from convert.check.run import check, load_reference
from convert.references.transformers_flax import OUTPUTS
from upstream import checkpoint, golden_io, relative_error

CASES = ("bert", "bert-model", "bert-pretraining", "bert-classification", "bert-tokens", "bert-answers", "gpt2", "gpt2-model")  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_plain_jax_model_is_what_the_flax_classes_recorded(case: str) -> None:
    plan = convert.plan_conversion(case.split("-")[0], checkpoint(case))
    reference = load_reference(plan, None)
    assert not isinstance(reference, str)
    io = golden_io(case)
    inputs = {name: jax.numpy.asarray(io[name]) for name in io.files if name.endswith(("_ids", "_mask"))}
    with jax.default_matmul_precision("highest"), jax.disable_jit():
        got = reference.jax_side()(jax_weights(plan), inputs)
    for name in OUTPUTS[plan.rules.model]:
        assert relative_error(got[name], io[name]) < 3e-6, name


@pytest.mark.parametrize("case", ["bert", "bert-pretraining", "gpt2", "gpt2-model"])
def test_a_correct_conversion_passes_all_levels(case: str, tmp_path: Path) -> None:
    convert.convert(case.split("-")[0], checkpoint(case), tmp_path / "out")
    with one_thread():
        report = check(tmp_path / "out", checkpoint(case))
    assert [level.verdict for level in report.levels] == [Verdict.PASSED] * 4
    model = report.levels[-1]
    assert not any("could not be lifted" in note for note in model.notes)
    assert max(m.lifted.relative for m in model.measures if m.lifted is not None) < 1e-13
    assert max(m.difference.relative for m in model.measures) < 5e-6


def test_a_recording_takes_along_what_lies_beside_the_checkpoint(tmp_path: Path) -> None:
    """Where it is checked there is no config.json, and the number of heads is needed."""
    plan = convert.plan_conversion("gpt2", checkpoint("gpt2-model"))
    reference = load_reference(plan, None)
    assert not isinstance(reference, str)
    record(plan, reference, tmp_path / "recorded.safetensors")
    convert.convert("gpt2", checkpoint("gpt2-model"), tmp_path / "out.safetensors")
    with one_thread():
        report = check(tmp_path / "out.safetensors", recorded=tmp_path / "recorded.safetensors")
    verdicts = {level.level: level.verdict for level in report.levels}
    assert verdicts["model"] is verdicts["coverage"] is Verdict.PASSED
