"""A side that cannot be had skips its level, with the reason; the others run. A directory is checked by its own config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convert.api import convert
from support.command_line import Run
from support.goldens import checkpoint

pytestmark = pytest.mark.slow  # each test runs a whole model on both sides

NO_POSITIONS = {"use_positional_embedding": False}


def test_without_upstreams_torch_code(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """timesfm 3.0 is installed, 1.3 is not: weights and layers are compared all the same."""
    monkeypatch.delenv("CONVERT_TIMESFM_1", raising=False)
    out = tmp_path / "out.safetensors"
    convert("timesfm", checkpoint("timesfm-2.0"), out, settings=NO_POSITIONS)
    said, _ = run("check", out, "--from", checkpoint("timesfm-2.0"), code=0)
    assert (
        "timesfm/pytorch_patched_decoder.py of timesfm 1.3.0, the PyTorch side, is not installed; pip install" in said
    )
    lines = {line.split()[0]: line.split()[1] for line in said.splitlines() if "  " in line and line[0].isalpha()}
    assert (lines["weights"], lines["layers"], lines["model"]) == ("passed", "passed", "skipped")
    assert "CONVERT_TIMESFM_1=DIR" in said and "not checked: model (exit code 0)" in said
    run("check", out, "--from", checkpoint("timesfm-2.0"), "--level", "coverage,model", "--require", "model", code=2)


def test_a_fact_that_only_the_configuration_needs(run: Run, tmp_path: Path) -> None:
    """context_length is no weight: the file does not say it, and transformers' model needs it."""
    out = tmp_path / "out.safetensors"
    convert("timesfm", checkpoint("timesfm-2.0"), out, to="transformers", settings=NO_POSITIONS)
    said, _ = run("check", out, "--from", checkpoint("timesfm-2.0"), "--level", "coverage,weights,model", code=0)
    assert "--set context_length=" in said
    assert "equal, as far as coverage, weights can tell; not checked: layers, model" in said
    said, _ = run(
        "check", out, "--from", checkpoint("timesfm-2.0"), "--level", "model", "--set", "context_length=512", code=0
    )
    assert "model: passed" in said


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "hf"
    convert("timesfm", checkpoint("timesfm-2.5"), out, to="transformers")
    return out


@pytest.mark.parametrize(
    ("key", "value", "first"),
    [
        ("rms_norm_eps", 1e-4, "input_layernorm"),
        ("activation", "gelu", "input_ff_layer"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 500000.0}, "self_attn"),
    ],
)
def test_the_model_is_the_one_that_config_json_describes(
    run: Run, directory: Path, tmp_path: Path, key: str, value: object, first: str
) -> None:
    """The model level alone, without the facts: what `from_pretrained` would build computes something else."""
    out = tmp_path / "hf"
    out.mkdir()
    for file in directory.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((out / "config.json").read_text())
    assert config[key] != value
    (out / "config.json").write_text(json.dumps({**config, key: value}))
    said, _ = run("check", out, "--from", checkpoint("timesfm-2.5"), "--level", "model", code=1)
    place = next(line for line in said.splitlines() if "first difference" in line)
    assert first in place


def test_a_configuration_that_no_module_takes(run: Run, directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    out.mkdir()
    for file in directory.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "hidden_size": 64, "head_dim": 16}))
    said, _ = run("check", out, "--from", checkpoint("timesfm-2.5"), "--level", "coverage,model", code=1)
    assert "coverage: FAILED" in said and "load_state_dict(strict=True) of the target's module rejects the file" in said
