"""Published models filled from their golden checkpoints, without a file: they give the outputs of the JAX models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import convert
from support import gemma_models, upstream
from support.goldens import checkpoint, golden_io, relative_error
from support.paths import DOCS, ROOT
from support.timesfm_parity import BOUND, run_upstream


def test_timesfm_2p5_gets_the_bits_of_the_file(tmp_path: Path) -> None:
    convert.convert("timesfm", checkpoint("timesfm-2.5"), tmp_path / "out.safetensors")
    model = upstream.timesfm_2p5_model()
    loaded = convert.load_into(model, "timesfm", checkpoint("timesfm-2.5"))
    want = load_file(tmp_path / "out.safetensors")
    assert loaded.tensors == len(want)
    assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_timesfm_2p5_reproduces_the_jax_outputs() -> None:
    model = upstream.timesfm_2p5_model()
    convert.load_into(model, "timesfm", checkpoint("timesfm-2.5"))
    io = golden_io("timesfm-2.5")
    for name, got in run_upstream("timesfm-2.5", model).items():
        assert relative_error(got, io[name]) < BOUND, name


@pytest.mark.slow
def test_a_head_that_accelerate_unties_is_tied_again(tmp_path: Path) -> None:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    said = gemma_models.settings("gemma2-9b")
    config = AutoConfig.from_pretrained(gemma_models.directory("gemma2-9b", tmp_path / "out"))
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(convert.PlanError) as error:
        convert.load_into(model, "gemma", checkpoint("gemma2-9b"), settings=said)
    (finding,) = error.value.findings
    assert finding.path == "lm_head.weight" and "module.tie_weights()" in finding.fix
    model.tie_weights()
    convert.load_into(model, "gemma", checkpoint("gemma2-9b"), settings=said)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    want = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in want.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma3", "gemma3-stacked"])
def test_gemma_3_reproduces_the_jax_logits(case: str, tmp_path: Path) -> None:
    """The parameters are on the meta device, the head is tied to the table."""
    from transformers import AutoConfig, AutoModelForCausalLM

    out = gemma_models.directory(case, tmp_path / "out")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out), attn_implementation="eager")
    table = model.model.embed_tokens
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.to("meta"))
    model.lm_head.weight = table.weight
    loaded = convert.load_into(model, "gemma", checkpoint(case), settings=gemma_models.settings(case))
    assert model.lm_head.weight is table.weight and len(loaded.materialised) == loaded.tensors
    logits = gemma_models.logits(model.eval(), case)
    assert relative_error(logits, golden_io(case)["logits"]) < gemma_models.BOUND


BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_programs_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand, but for the checkpoints and classes of published sizes, which small ones replace."""
    timesfm, gemma, tensors = BLOCK.findall((DOCS / "guides" / "into-a-model.md").read_text())
    monkeypatch.chdir(ROOT)
    out = gemma_models.directory("gemma3", tmp_path / "out")
    small = {
        "model = TimesFM_2p5_200M_torch_module()": "from support import upstream; model = upstream.timesfm_2p5_model()",
        "timesfm-2.5/ckpt": str(checkpoint("timesfm-2.5")),
        "google/gemma-3-1b-pt": str(out),
        '"gemma-3-1b/ckpt"': f"{str(checkpoint('gemma3'))!r}, settings={gemma_models.settings('gemma3')!r}",
    }
    for program in (timesfm, gemma, tensors):
        for published, golden in small.items():
            program = program.replace(published, golden)
        names: dict[str, Any] = {}
        exec(program, names)
    assert names["weight"].shape == (32, 32)
