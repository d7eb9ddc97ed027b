"""Models of published sizes with random weights: TimesFM 2.5 and Gemma 3 1B. Slow: `pytest -m slow`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import convert
from support import upstream
from support.paths import GOLDEN, ROOT

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


@pytest.fixture(scope="module", params=["nested", "stacked"])
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / f"gemma-3-1b-{request.param}"
    script = ROOT / "benchmarks" / "checkpoints.py"
    subprocess.run([sys.executable, script, folder, "--layout", request.param], check=True, capture_output=True)
    return folder


def test_gemma_3_1b_converts_and_loads(gemma: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    plan = convert.plan_conversion("gemma", gemma)
    assert plan.found == "Gemma 3 (text), 3-1b"
    result = convert.convert("gemma", gemma, tmp_path / "out", max_shard_bytes=10**9)
    assert result.tensors == 340 and result.nbytes == 2 * 999_885_952
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.bfloat16 and model.config.layer_types[5] == "full_attention"
    source = convert.open_source(gemma)
    at = "transformer/stacked_layers/attention_type_1" if "stacked" in gemma.name else "layer_25"
    last = "/w" if "stacked" in gemma.name else ""
    linear = source.read(f"{at}/mlp/linear{last}")
    want = torch.from_numpy((linear[4] if linear.ndim == 3 else linear).astype("float32")).T
    assert torch.equal(model.model.layers[25].mlp.down_proj.weight.float(), want)


def test_gemma_3_1b_for_gemma_pytorch(gemma: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    convert.convert("gemma", gemma, out, to="gemma_pytorch")
    state = load_file(out)
    assert len(state) == 288 and state["model.layers.25.self_attn.qkv_proj.weight"].shape == (6 * 256, 1152)
