"""No correct conversion is called different: every golden, to every target, in float32 and bfloat16, in one file and in shards."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

import convert
from convert.verify.report.report import Report, Verdict
from convert.verify.run import check
from faults.catalogue import upstream_found
from support.golden_conversions import GOLDENS_WITHOUT_REFERENCE, conversions

# Targets that no shipped reference runs: three levels check them.
TARGETS_WITHOUT_REFERENCE = ("gemma_pytorch", "plain_norms")
SHARD = 4_000  # bytes: several files even of the smallest model


GOLDENS = conversions()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", GOLDENS)
def test_a_correct_conversion_passes(case: str, dtype: str, tmp_path: Path) -> None:
    """To each target."""
    model, path, settings = GOLDENS[case]
    for to in convert.plan_conversion(model, path, settings=settings).rules.supported_targets:
        out, shards = tmp_path / to / "out.safetensors", tmp_path / to / "out"
        out.parent.mkdir()
        convert.convert(model, path, out, to=to, dtype=dtype, settings=settings)
        without_reference = to in TARGETS_WITHOUT_REFERENCE or case in GOLDENS_WITHOUT_REFERENCE
        with upstream_found():
            assert_passes(check(out, path), to, skipped=("model",) if without_reference else ())
        convert.convert(model, path, shards, to=to, dtype=dtype, settings=settings, max_shard_bytes=SHARD)
        assert len(list(shards.glob("*.safetensors"))) > 1, to
        assert_passes(check(shards, path, levels=("coverage", "weights", "layers")), to)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in GOLDENS if case not in GOLDENS_WITHOUT_REFERENCE])
def test_a_check_in_float64_passes(case: str, tmp_path: Path) -> None:
    """Also where the PyTorch code alone casts to float32: only a JAX run in float32 shows how much the model amplifies that."""
    model, path, settings = GOLDENS[case]
    convert.convert(model, path, tmp_path / "out", to="transformers", settings=settings)
    assert_passes(check(tmp_path / "out", path, levels=("model",), precision="float64"), "transformers")


def assert_passes(report: Report, to: str, skipped: Collection[str] = ()) -> None:
    verdicts = {level.level: (level.verdict, [str(f) for f in level.findings]) for level in report.levels}
    assert report.exit_code == 0, to
    expected = {level: (Verdict.SKIPPED if level in skipped else Verdict.PASSED, []) for level in verdicts}
    assert verdicts == expected, to
