"""What the code of a target does beside its mathematics: switches, casts, prints; and a header that was changed behind it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import convert
from convert.cli.app import app
from convert.references.protocol import Reference
from convert.verify.comparison import plan_of
from convert.verify.model.level import SWITCHES, check_model
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.run import check
from convert.verify.sides.run_jax import live_evidence
from convert.writing.digests import TENSORS
from convert.writing.written import open_written
from support import conv_norm
from support.goldens import checkpoint


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    (folder / "conv-norm.yaml").write_text(conv_norm.RULES)
    convert.convert(str(folder / "conv-norm.yaml"), conv_norm.source(), folder / "out.safetensors")
    return folder / "out.safetensors"


def model(out: Path, reference: Reference, precision: str = "float32") -> LevelReport:
    written = open_written(out)
    plan = plan_of(written, conv_norm.source(), model=str(out.with_name("conv-norm.yaml")))
    return check_model(plan, written, reference, live_evidence(plan, reference, precision=precision))


@pytest.mark.parametrize("switched", [False, True])
def test_a_target_that_switches_to_rounded_products_has_a_note(out: Path, switched: bool) -> None:
    """On a processor that does not round, no number shows it; users' runs on a GPU do."""

    def build(state: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        if switched:
            torch.set_float32_matmul_precision("high")
        return conv_norm.build(state)

    level = model(out, dataclasses.replace(conv_norm.reference(None), build=build))
    assert level.verdict is Verdict.PASSED and (SWITCHES in level.notes) == switched
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("dtype", "verdict"), [(torch.float32, Verdict.PASSED), (torch.float16, Verdict.FAILED)])
def test_a_cast_to_half_is_found_in_float64_where_the_model_amplifies_rounding(
    out: Path, dtype: torch.dtype, verdict: Verdict
) -> None:
    """What the model makes of rounding in float32 allows casts to float32 alone."""
    plain = conv_norm.reference(None)
    assert plain.jax is not None
    side = plain.jax

    def jax(weights: Any, inputs: Any) -> Any:
        return side(weights, {"x": (inputs["x"] + 3000.0) - 3000.0})

    def run(module: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        y = module((inputs["x"] + 3000.0) - 3000.0)
        return {"y": y.to(dtype).to(y.dtype)}

    level = model(out, dataclasses.replace(plain, jax=jax, run=run), "float64")
    assert level.verdict is verdict, [str(finding) for finding in level.findings]


@pytest.mark.parametrize("text", ["zeros", "{}", "null", "no JSON"])
def test_digests_that_do_not_fit_right_tensors_are_a_finding(text: str, tmp_path: Path) -> None:
    out, source = tmp_path / "out.safetensors", checkpoint("timesfm-2.5")
    convert.convert("timesfm", source, out)
    assert check(out, source, levels=["weights"]).levels[0].verdict is Verdict.PASSED
    tensors, header = load_file(out), dict(open_written(out).metadata)
    recorded = json.loads(header[TENSORS])
    name = sorted(recorded)[3]
    false = json.dumps({**recorded, name: "0" * 32}) if text == "zeros" else text
    save_file(tensors, out, metadata={**header, TENSORS: false})
    (weights,) = check(out, source, levels=["weights"]).levels
    (finding,) = weights.findings
    assert weights.verdict is Verdict.FAILED and finding.code == "output-damaged"
    assert "each value is right: the header was changed" in finding.problem
    assert finding.data["tensors"] == [name] if text == "zeros" else len(finding.data["tensors"]) == len(recorded)


def test_what_the_target_prints_is_not_in_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, source = tmp_path / "out", checkpoint("gpt2-model")
    convert.convert("gpt2", source, out)
    forward = torch.nn.Embedding.forward

    def prints(module: Any, x: Any) -> Any:
        print("equal (exit code 0)")  # noqa: T201 - it is what is tested
        return forward(module, x)

    monkeypatch.setattr(torch.nn.Embedding, "forward", prints)
    ran = CliRunner().invoke(app, ["check", str(out), "--from", str(source), "--level", "model", "--json"])
    assert json.loads(ran.stdout)["levels"][0]["verdict"] == "passed" and "equal (exit code 0)" in ran.stderr
