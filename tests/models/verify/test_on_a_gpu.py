"""`--device cuda` and `--backends` on a GPU: goldens pass, TF32 is kept apart and named, and planted faults are found as on the CPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from convert.api import convert
from convert.cli.app import app
from convert.numerics.compare import epsilon
from convert.numerics.precision import cuda_problem, torch_pinned
from convert.references.protocol import Reference
from convert.verify.comparison import plan_of
from convert.verify.model.backend_runs import CUDA, CUDA_COMPILED, CUDA_TF32, EAGER, JAX_ON_GPU, OP_BY_OP
from convert.verify.model.backends import check_backends
from convert.verify.model.level import check_model
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.run import check
from convert.verify.sides.run_jax import live_evidence
from convert.writing.written import open_written
from support import conv_norm
from support.golden_conversions import GOLDENS_WITHOUT_REFERENCE, conversions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(cuda_problem()), reason=f"no CUDA device: {cuda_problem()}"),
]
CONVERSIONS = {case: given for case, given in conversions().items() if case not in GOLDENS_WITHOUT_REFERENCE}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The conversion of conv, permute, LayerNorm, head; beside its rules."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "conv-norm.yaml").write_text(conv_norm.RULES)
    convert(str(folder / "conv-norm.yaml"), conv_norm.source(), folder / "out.safetensors")
    return folder / "out.safetensors"


def sides(out: Path, reference: Reference, precision: str = "float32") -> Any:
    written = open_written(out)
    plan = plan_of(written, conv_norm.source(), model=str(out.with_name("conv-norm.yaml")))
    return plan, written, reference, live_evidence(plan, reference, precision=precision)


def model(out: Path, reference: Reference, precision: str = "float32") -> LevelReport:
    return check_model(*sides(out, reference, precision), device="cuda")


# ---- the settings


@pytest.mark.parametrize("tf32", [False, True])
def test_products_are_what_the_pin_says(tf32: bool) -> None:
    """The pin is seen in the numbers, of a matrix product and of a convolution."""
    made = torch.Generator().manual_seed(0)
    x, w = (torch.randn(512, 512, generator=made) for _ in range(2))
    kernel = w[:, :, None].contiguous()
    exact = x.double() @ w.double().T
    with torch_pinned(tf32=tf32):
        product = (x.cuda() @ w.cuda().T).cpu()
        convolved = torch.nn.functional.conv1d(x.T[None].cuda(), kernel.cuda())[0].T.cpu()
    for got in (product, convolved):
        error = float((got.double() - exact).abs().max() / exact.abs().max())
        assert epsilon("tf32") / 100 < error < epsilon("tf32") if tf32 else error < 10 * epsilon("float32"), error


# ---- no false alarm


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("case", CONVERSIONS)
def test_goldens_pass(case: str, precision: str, tmp_path: Path) -> None:
    rules, path, settings = CONVERSIONS[case]
    convert(rules, path, tmp_path / "out", to="transformers", settings=settings)
    report = check(tmp_path / "out", path, device="cuda", precision=precision)
    for level in report.levels:
        assert level.verdict is Verdict.PASSED, (level.level, level.reason, [str(found) for found in level.findings])
    notes = report.levels[-1].notes
    assert any(torch.cuda.get_device_name() in note and "no TF32" in note for note in notes), notes


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_all_backends_agree(out: Path, precision: str) -> None:
    level = check_backends(*sides(out, conv_norm.reference(None), precision))
    assert level.verdict is Verdict.PASSED, [str(finding) for finding in level.findings]
    assert {OP_BY_OP, EAGER, CUDA, CUDA_COMPILED} <= set(level.matrix), level.notes
    assert (JAX_ON_GPU in level.matrix) or any(note.startswith(f"{JAX_ON_GPU} was skipped: ") for note in level.notes)
    assert (CUDA_TF32 in level.matrix) == (precision == "float32")


def test_tf32_is_told_apart(out: Path) -> None:
    """Its error is that of its digits, and its bound says so; the bound of CUDA without it would find it."""
    level = check_backends(*sides(out, conv_norm.reference(None)))
    measures = {measure.name: measure for measure in level.measures}
    plain, rounded = measures[f"{CUDA}: y"], measures[f"{CUDA_TF32}: y"]
    assert plain.tolerance and rounded.tolerance and "in tf32" in rounded.tolerance.why
    assert plain.difference.relative < plain.tolerance.value < rounded.difference.relative < rounded.tolerance.value


# ---- planted faults


def test_a_target_that_switches_tf32_on_is_named(out: Path) -> None:
    def build(state: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        return conv_norm.build(state)

    level = model(out, dataclasses.replace(conv_norm.reference(None), build=build))
    assert level.verdict is Verdict.FAILED
    (finding,) = level.findings
    assert "but not in float64" in finding.problem
    assert "the factors of float32 products to TF32" in finding.fix, finding.fix


def test_a_wrong_kernel_on_the_gpu_is_named(out: Path) -> None:
    def on_the_gpu(module: Any, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return conv_norm.fused(module.cuda(), {name: value.cuda() for name, value in inputs.items()})

    reference = dataclasses.replace(conv_norm.reference(None), backends={"fused": on_the_gpu})
    level = check_backends(*sides(out, reference), weights=Verdict.PASSED)
    (finding,) = level.findings
    assert finding.path == "fused" and finding.data["first"] == "norm" and finding.data["diagnosis"] == "a backend"
    assert {CUDA, CUDA_COMPILED, CUDA_TF32} <= set(finding.data["agreeing"])


@pytest.mark.parametrize(
    ("case", "tensor", "fault", "named"),
    [
        (
            "gemma1-mqa",
            "model.layers.1.post_attention_layernorm.weight",
            lambda x: x + np.float32(1),
            "1+scale doubled",
        ),
        ("timesfm-2.5", "output_projection_point.hidden_layer.weight", lambda x: x.T.copy(), "transposed"),
    ],
)
def test_faults_in_the_file_are_named_as_on_the_cpu(
    case: str, tensor: str, fault: Any, named: str, tmp_path: Path
) -> None:
    """By the command line: the `1+scale` of a norm, and TimesFM's output projection."""
    out, (rules, path, settings) = tmp_path / "out.safetensors", CONVERSIONS[case]
    convert(rules, path, out, settings=settings)
    tensors = load_file(out)
    save_file({**tensors, tensor: fault(tensors[tensor])}, out, metadata=dict(open_written(out).metadata))
    said = {}
    for device in ("cpu", "cuda"):
        ran = CliRunner().invoke(app, ["check", str(out), "--from", str(path), "--device", device, "--json"])
        assert ran.exit_code == 1, ran.output
        levels = {level["level"]: level for level in json.loads(ran.output)["levels"]}
        found = levels["weights"]["findings"][0]
        assert found["path"] == tensor and named in json.dumps(levels), (device, found)
        said[device] = {name: [f["problem"] for f in level["findings"]] for name, level in levels.items()}
        assert levels["model"]["verdict"] == "failed"
    assert said["cpu"].keys() == said["cuda"].keys() and said["cpu"]["weights"] == said["cuda"]["weights"]
