"""No correct conversion is called different: every golden, to every target, in float32 and bfloat16, in one file and in shards."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

import convert
from convert.verify.report.report import Report, Verdict
from convert.verify.run import check
from faults.catalogue import upstream_found
from support import gemma_image_models, gemma_models
from support.goldens import TIMESFM_1_CASES, checkpoint
from support.paths import GOLDEN

# Targets and goldens that no shipped reference runs: three levels check them.
TARGETS_WITHOUT_REFERENCE = ("gemma_pytorch", "plain_norms")
GOLDENS_WITHOUT_REFERENCE = ("siglip", "tabfm-classification", "tabfm-regression")
SHARD = 4_000  # bytes: several files even of the smallest model


def goldens() -> dict[str, tuple[str, Path, dict[str, Any]]]:
    """Model, checkpoint and settings of each golden."""
    found: dict[str, tuple[str, Path, dict[str, Any]]] = {}
    for folder in sorted(GOLDEN.iterdir()):
        case = folder.name
        if case in (*gemma_models.CASES, *gemma_models.INTEGERS, "gemma3-lora"):
            found[case] = "gemma", checkpoint(case), gemma_models.settings(case)
        elif case in gemma_image_models.CASES:
            found[case] = (
                gemma_image_models.MODEL[case],
                gemma_image_models.path(case),
                gemma_image_models.CASES[case][1],
            )
        elif case == "recurrentgemma":
            found[case] = case, checkpoint(case), {"attention_window": 5, "logits_soft_cap": 3.0}
        elif case in TIMESFM_1_CASES:
            given = {k: v for k, v in TIMESFM_1_CASES[case].items() if k == "use_positional_embedding"}
            found[case] = "timesfm", checkpoint(case), {**given, "context_length": 512}
        elif (folder / "io.npz").exists():
            found[case] = case.split("-")[0], next(folder.glob("ckpt*")), {}
    return found


GOLDENS = goldens()


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


def assert_passes(report: Report, to: str, skipped: Collection[str] = ()) -> None:
    verdicts = {level.level: (level.verdict, [str(f) for f in level.findings]) for level in report.levels}
    assert report.exit_code == 0, to
    expected = {level: (Verdict.SKIPPED if level in skipped else Verdict.PASSED, []) for level in verdicts}
    assert verdicts == expected, to
