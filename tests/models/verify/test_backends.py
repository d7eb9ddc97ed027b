"""`--backends`: the same weights through JAX, torch, torch.compile and registered kernels; who differs, and whether it matters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from convert.api import convert
from convert.cli.app import app
from convert.references.protocol import Reference
from convert.verify.comparison import plan_of
from convert.verify.model import backend_runs, backends
from convert.verify.model.backend_runs import COMPILED, CUDA, EAGER, JITTED, OP_BY_OP
from convert.verify.model.backends import check_backends, lower_median
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.run import check
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.run_jax import live_evidence
from convert.writing.written import open_written
from support import conv_norm

PLAIN = (OP_BY_OP, JITTED, EAGER)


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("backends") / "conv-norm.yaml"
    path.write_text(conv_norm.RULES)
    return path


@pytest.fixture(scope="module")
def out(rules: Path) -> Path:
    """The conversion, written once."""
    path = rules.with_name("out.safetensors")
    convert(str(rules), conv_norm.source(), path)
    return path


def run(
    rules: Path,
    out: Path,
    reference: Reference,
    *,
    precision: str = "float32",
    weights: Verdict | None = None,
    only: Any = None,
    evidence: Callable[[Evidence], Evidence] = lambda evidence: evidence,
) -> LevelReport:
    written = open_written(out)
    plan = plan_of(written, conv_norm.source(), model=str(rules))
    known = evidence(live_evidence(plan, reference, precision=precision))
    return check_backends(plan, written, reference, known, weights=weights, only=only)


def with_backends(**functions: Any) -> Reference:
    return dataclasses.replace(conv_norm.reference(None), backends=functions)


# ---- nobody is odd


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_equal_backends_pass(rules: Path, out: Path, precision: str) -> None:
    level = run(rules, out, with_backends(unfused=conv_norm.unfused), precision=precision, only=(*PLAIN, "unfused"))
    assert level.verdict is Verdict.PASSED and not level.findings
    assert [measure.name for measure in level.measures] == [f"{name}: y" for name in (*PLAIN, "unfused")]
    assert all(
        measure.passed and measure.tolerance and precision in measure.tolerance.why for measure in level.measures
    )
    assert list(level.matrix) == [*PLAIN, "unfused", "JAX float64", "torch float64"]
    assert level.matrix["JAX float64"]["torch float64"] < 1e-14 and level.matrix[EAGER][EAGER] == 0
    for one, row in level.matrix.items():
        for two, value in row.items():
            assert value == pytest.approx(level.matrix[two][one], rel=0.2)
    json.dumps(level.to_dict())


@pytest.mark.slow
def test_torch_compile_runs_or_says_why_not(rules: Path, out: Path) -> None:
    level = run(rules, out, conv_norm.reference(None), only=(EAGER, COMPILED))
    assert level.verdict is (Verdict.PASSED if COMPILED in level.matrix else Verdict.FAILED) or any(
        note.startswith(f"{COMPILED} was skipped: ") for note in level.notes
    )
    assert level.verdict is not Verdict.FAILED


@pytest.mark.slow
def test_torch_compile_without_a_compiler_is_skipped(rules: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(backend_runs.shutil, "which", lambda name: None)
    level = run(rules, out, conv_norm.reference(None), only=(EAGER, COMPILED))
    assert level.verdict is Verdict.SKIPPED and level.reason == "fewer than two backends ran"
    assert any(note.startswith(f"{COMPILED} was skipped: ") and "g++, clang++, c++" in note for note in level.notes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_skipped_with_the_reason(rules: Path, out: Path) -> None:
    level = run(rules, out, conv_norm.reference(None), only=(EAGER, JITTED, CUDA))
    assert level.verdict is Verdict.PASSED
    assert any(note.startswith(f"{CUDA} was skipped: ") and "CUDA" in note for note in level.notes)


@pytest.mark.slow
def test_a_file_in_bfloat16_makes_no_backend_odd(rules: Path, tmp_path: Path) -> None:
    out = tmp_path / "narrow.safetensors"
    convert(str(rules), conv_norm.source(), out, dtype="bfloat16")
    level = run(rules, out, conv_norm.reference(None), only=PLAIN)
    assert level.verdict is Verdict.PASSED, [str(finding) for finding in level.findings]
    assert level.matrix[EAGER][JITTED] > 1e-4  # of the weights, not of a backend


# ---- a backend with a wrong kernel


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_a_wrong_fused_kernel_is_named_and_located(rules: Path, out: Path, precision: str) -> None:
    reference = conv_norm.with_wrong_kernel(None)
    level = run(rules, out, reference, precision=precision, weights=Verdict.PASSED, only=(*PLAIN, "fused", "unfused"))
    assert level.verdict is Verdict.FAILED and len(level.findings) == 1
    finding = level.findings[0]
    assert finding.code == "backend-differs" and finding.path == "fused"
    assert finding.problem.startswith("the weights are equal (bit for bit)") and "first at norm " in finding.problem
    assert finding.expected and finding.got and finding.fix.startswith("do not change the conversion")
    assert finding.data["first"] == "norm" and finding.data["differing"] == ["norm", "y"]
    assert finding.data["agreeing"] == [*PLAIN, "unfused"] and finding.data["diagnosis"] == "a backend"
    assert [measure.passed for measure in level.measures] == [True, True, True, False, True]


def test_without_the_weights_level_lifted_float64_is_the_proof(rules: Path, out: Path) -> None:
    level = run(rules, out, conv_norm.with_wrong_kernel(None), only=(*PLAIN, "fused"))
    assert "the weights are equal (both models compute the same function in float64)" in level.findings[0].problem


def test_a_reduction_that_the_model_cannot_have_hides_no_backend(rules: Path, out: Path) -> None:
    reference = dataclasses.replace(conv_norm.with_wrong_kernel(None), reduction=10**16)
    level = run(rules, out, reference, only=(*PLAIN, "fused"))
    assert [finding.data["backend"] for finding in level.findings] == ["fused"]
    assert any("`reduction` = 10,000,000,000,000,000 of the reference" in note for note in level.notes)


def test_two_backends_are_enough_to_tell(rules: Path, out: Path) -> None:
    level = run(rules, out, conv_norm.with_wrong_kernel(None), only=(EAGER, "fused"))
    assert [finding.data["backend"] for finding in level.findings] == ["fused"]


@pytest.mark.slow
def test_a_backend_that_runs_the_modules_is_observed(rules: Path, out: Path) -> None:
    def broken_head(module: Any, inputs: Any) -> Any:
        return {"y": module.head(module.norm(module.conv(inputs["x"].permute(0, 2, 1)).permute(0, 2, 1))) + 1e-3}

    level = run(rules, out, with_backends(broken=broken_head), only=(*PLAIN, "broken"))
    assert level.findings[0].data["first"] == "y" and level.findings[0].data["differing"] == ["y"]

    def broken_conv(module: Any, inputs: Any) -> Any:
        module.conv.weight = torch.nn.Parameter(module.conv.weight * (1 + 1e-4))
        return {"y": module(inputs["x"])}

    level = run(rules, out, with_backends(broken=broken_conv), only=(*PLAIN, "broken"))
    assert level.findings[0].data["first"] == "conv" and level.findings[0].data["differing"][-1] == "y"


@pytest.mark.slow
def test_a_wrong_compiler_is_located(rules: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = backend_runs._run

    def wrong(function: Any, module: Any, *args: Any) -> Any:  # as if the compiler had changed the layer
        if "inner" not in str(function):
            return real(function, module, *args)
        module.norm.eps = 0.1
        return real(conv_norm.run, module, *args)

    monkeypatch.setattr(backend_runs, "_run", wrong)
    monkeypatch.setattr(torch, "compile", lambda run, backend, dynamic: (backend, "inner"))
    monkeypatch.setattr(backend_runs, "COMPILERS", ("python3", "python"))
    level = run(rules, out, conv_norm.reference(None), only=(*PLAIN, COMPILED))
    assert any("compiled nothing" in note for note in level.notes)

    def compile_(run_: Any, backend: Any, dynamic: bool) -> Any:
        graph = torch.fx.symbolic_trace(lambda x: x + 1)
        backend(graph, [torch.ones(1)])
        return (backend, "inner")

    monkeypatch.setattr(torch, "compile", compile_)
    level = run(rules, out, conv_norm.reference(None), only=(*PLAIN, COMPILED))
    assert [finding.data["backend"] for finding in level.findings] == [COMPILED]
    assert level.findings[0].data["first"] == "norm"


def test_a_backend_that_does_not_run_is_a_finding(rules: Path, out: Path) -> None:
    level = run(rules, out, conv_norm.with_absent_runtime(None), only=(*PLAIN, "absent"))
    (finding,) = level.findings
    assert (finding.code, finding.path) == (
        "backend-failed",
        "absent",
    ) and "OSError: no such runtime" in finding.problem


def test_outputs_that_are_not_there_or_of_another_shape_are_findings(rules: Path, out: Path) -> None:
    reference = with_backends(
        short=lambda module, inputs: {"y": module(inputs["x"])[:1]}, mute=lambda module, inputs: {}
    )
    level = run(rules, out, reference, only=(*PLAIN, "short", "mute"))
    assert [finding.path for finding in level.findings] == ["short", "mute"]
    assert {finding.expected for finding in level.findings} == {"shape [2, 16, 5]"}
    assert [finding.got for finding in level.findings] == ["shape [1, 16, 5]", "no value"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_many_bad_backends_do_not_excuse_each_other(rules: Path, out: Path, precision: str) -> None:
    """However many there are, and however much they agree: JAX op by op and torch eager say what rounding is."""

    def off(by: float) -> Callable[[Any, Any], Any]:
        return lambda module, inputs: {"y": module(inputs["x"]) * (1 + by)}

    bad = {f"off{k}": off(by) for k, by in enumerate((1e-4, 1e-4, 1e-4, 1e-3, 0.2, 0.2, -2.0, 3.0))}
    level = run(rules, out, with_backends(**bad, good=conv_norm.run), precision=precision, only=(*PLAIN, *bad, "good"))
    assert [finding.data["backend"] for finding in level.findings] == list(bad)
    assert all(finding.data["agreeing"] == [*PLAIN, "good"] for finding in level.findings)


@pytest.mark.parametrize("which", [OP_BY_OP, EAGER])
def test_an_anchor_that_is_wrong_does_not_excuse_itself(
    which: str, rules: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one says what rounding is."""
    kept = backends.jax_runs, backends.torch_runs

    def wrong(runs: Any) -> Any:
        def changed(*args: Any) -> Any:
            for one in runs(*args):
                made = one.make
                off = {"make": lambda made=made: {**made(), "y": made()["y"] * 1.01}} if one.name == which else {}
                yield dataclasses.replace(one, **off)

        return changed

    monkeypatch.setattr(backends, "jax_runs", wrong(kept[0]))
    monkeypatch.setattr(backends, "torch_runs", wrong(kept[1]))
    level = run(rules, out, conv_norm.reference(None), only=PLAIN)
    assert [finding.data["backend"] for finding in level.findings] == [which]


def test_nan_is_odd(rules: Path, out: Path) -> None:
    reference = with_backends(nan=lambda module, inputs: {"y": module(inputs["x"]) * float("nan")})
    level = run(rules, out, reference, only=(*PLAIN, "nan"))
    assert [finding.data["backend"] for finding in level.findings] == ["nan"]


# ---- a wrong conversion


def test_a_wrong_conversion_is_no_backends_fault(rules: Path, out: Path, tmp_path: Path) -> None:
    tensors = load_file(out)
    tensors["head.weight"] = tensors["head.weight"][::-1].copy()
    wrong = tmp_path / "wrong.safetensors"
    save_file(tensors, wrong, metadata={**open_written(out).metadata})
    level = run(rules, wrong, conv_norm.reference(None), weights=Verdict.FAILED, only=PLAIN)
    assert len(level.findings) == 1 and level.findings[0].data["diagnosis"] == "wrong conversion"
    assert (level.findings[0].code, level.findings[0].path) == ("outputs-differ", "y")

    both = run(rules, wrong, conv_norm.with_wrong_kernel(None), weights=Verdict.FAILED, only=(*PLAIN, "fused"))
    assert [finding.data["diagnosis"] for finding in both.findings] == ["wrong conversion", "a backend"]
    assert "correct the conversion first" in both.findings[1].fix


# ---- recordings


def test_a_recording_stands_in_for_jax(rules: Path, out: Path) -> None:
    reference = dataclasses.replace(conv_norm.with_wrong_kernel(None))
    level = run(
        rules,
        out,
        reference,
        only=("JAX recorded", EAGER, "fused"),
        evidence=lambda evidence: dataclasses.replace(evidence, origin="recording r"),
    )
    assert next(iter(level.matrix)) == "JAX recorded" and OP_BY_OP not in level.matrix
    assert [finding.data["backend"] for finding in level.findings] == ["fused"]


# ---- the command


@pytest.mark.slow
def test_the_command_prints_the_matrix(rules: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        backends, "torch_runs", lambda *args: (r for r in backend_runs.torch_runs(*args) if r.name != COMPILED)
    )
    monkeypatch.setattr("convert.api.open_source", lambda path, **_: conv_norm.source())
    arguments = ["check", str(out), "--from", "memory", "--model", str(rules), "--backends"]
    equal = CliRunner().invoke(app, [*arguments, "--reference", "support.conv_norm:reference"])
    assert equal.exit_code == 0, equal.output
    assert (
        "backends" in equal.stdout
        and "relative differences of all pairs" in equal.stdout
        and "torch float64" in equal.stdout
    )
    wrong = CliRunner().invoke(app, [*arguments, "--reference", "support.conv_norm:with_wrong_kernel", "--json"])
    assert wrong.exit_code == 1
    level = json.loads(wrong.stdout)["levels"][-1]
    assert level["level"] == "backends" and level["matrix"]["fused"][EAGER] > 0.1
    assert "the weights are equal (bit for bit)" in level["findings"][0]["text"]


def test_without_a_reference_it_is_skipped(rules: Path, out: Path) -> None:
    report = check(out, conv_norm.source(), model=str(rules), backends=True, levels=["coverage"])
    assert [str(level.verdict) for level in report.levels] == ["passed", "skipped"]
    assert "--reference" in report.levels[-1].reason


def test_lower_median() -> None:
    assert [lower_median(x) for x in ([], [3.0], [1.0, 9.0], [5.0, 1.0, 9.0], [4.0, 3.0, 2.0, 1.0])] == [0, 3, 1, 5, 2]
    assert np.isfinite(lower_median([1.0, float("inf")]))
