"""A TimesFM 2.5 of the published size, made by upstream's code with random weights. Slow: `pytest -m slow`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import convert
import upstream
from upstream import GOLDEN

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "timesfm-2.5-200m"
    script = GOLDEN / "make_timesfm_2p5.py"
    subprocess.run([sys.executable, script, "--size", "real", folder], check=True, capture_output=True)
    return folder


def test_converts_and_loads_strictly(checkpoint: Path, tmp_path: Path) -> None:
    plan = convert.plan_conversion("timesfm", checkpoint)
    assert plan.found == "TimesFM 2.5 (flax nnx), 2.5-200m"
    out = tmp_path / "out.safetensors"
    for event in convert.execute(plan, out):
        result = event
    assert isinstance(result, convert.Result) and result.tensors == 232 and result.nbytes == 925_157_120
    model = upstream.timesfm_2p5_model(layers=20, heads=16, width=1280, quantile_len=1024)
    model.load_state_dict(load_file(out), strict=True)


def test_transformers_loads_shards_of_the_published_size(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import TimesFm2_5ModelForPrediction

    out = tmp_path / "out"
    result = convert.convert("timesfm", checkpoint, out, to="transformers", max_shard_bytes=300 * 10**6)
    assert len(result.files) == 7  # four shards, the index, config.json, the model card
    model, report = TimesFm2_5ModelForPrediction.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    assert not any(report.values()), report
    assert sum(p.numel() for p in model.parameters()) == 231_289_280
