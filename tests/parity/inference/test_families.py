"""`convert infer` through the reference of every shipped family gives the tensors that its shipped rules give, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from convert.rules.library import find_rules
from support.command_line import Run
from support.goldens import checkpoint
from support.paths import GOLDEN
from support.upstream import timesfm_1

pytest.importorskip("jax")
pytest.importorskip("transformers")

GEMMA = ("vocab_size=256", "sliding_window=8", "query_pre_attn_scalar=5")
SHIPPED = {  # golden: model, settings
    "bert": ("bert", ()),
    "gpt2": ("gpt2", ("n_head=4",)),
    "t5": ("t5", ()),
    "t5-v1.1": ("t5", ()),
    "whisper": ("whisper", ()),
    "llama": ("llama", ()),
    "gemma1-mha": ("gemma1", ("vocab_size=256", "context_length=1024")),
    "gemma1-mqa": ("gemma1", ("vocab_size=256", "context_length=1024")),
    "gemma2-2b": ("gemma2", GEMMA),
    "gemma2-9b": ("gemma2", GEMMA),
    "gemma3": ("gemma3", (*GEMMA, "rope_factor_global=8.0", "context_length=1024")),
    "gemma3-stacked": ("gemma3", (*GEMMA, "rope_factor_global=8.0", "context_length=1024")),
    "gemma3-kauldron": ("gemma3", (*GEMMA, "rope_factor_global=8.0", "context_length=1024")),
    "gemma3-vision": (
        "gemma3_vision",
        (
            *("vocab_size=131", "sliding_window=8", "query_pre_attn_scalar=8", "rope_factor_global=1.0"),
            *("context_length=1024", "mm_tokens_per_image=4"),
        ),
    ),
    "paligemma1": ("paligemma1", ("vocab_size=101", "context_length=1024")),
    "paligemma2": (
        "paligemma2",
        ("vocab_size=101", "sliding_window=4", "query_pre_attn_scalar=8", "attn_logit_softcapping=5.0"),
    ),
    "timesfm-1.0": ("timesfm-1", ("use_positional_embedding=true", "context_length=64")),
    "timesfm-2.0": ("timesfm-1", ("use_positional_embedding=false", "context_length=64")),
    "timesfm-2.5": ("timesfm-2.5", ()),
    "recurrentgemma": ("recurrentgemma", ("attention_window=5", "logits_soft_cap=3.0")),
}
TIED = ("timesfm-1.0", "timesfm-2.0", "timesfm-2.5")  # the rows without padding have zeros where padding is told


@pytest.mark.parametrize("case", ["bert", *(pytest.param(case, marks=pytest.mark.slow) for case in list(SHIPPED)[1:])])
def test_the_tensors_of_the_shipped_rules(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    if case in ("timesfm-1.0", "timesfm-2.0"):
        monkeypatch.setenv("CONVERT_TIMESFM_1", str(Path(timesfm_1().__file__ or "").parents[1]))
    model, given = SHIPPED[case]
    settings = [word for setting in given for word in ("--set", setting)]
    _as_shipped(run, case, model, settings, 2 if case in TIED else 0)


SECOND_TARGETS = {  # golden: model, options, exit code
    "recurrentgemma": ("recurrentgemma", "--to recurrentgemma --set attention_window=5 --set logits_soft_cap=3.0", 0),
    "timesfm-1.0": ("timesfm-1", "--to transformers --set use_positional_embedding=true --set context_length=512", 2),
    "timesfm-2.0": ("timesfm-1", "--to transformers --set use_positional_embedding=false --set context_length=64", 2),
    "timesfm-2.5": ("timesfm-2.5", "--to transformers", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", list(SECOND_TARGETS))
def test_the_tensors_for_a_second_target(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    model, options, code = SECOND_TARGETS[case]
    _as_shipped(run, case, model, options.split(), code)


def _as_shipped(run: Run, case: str, model: str, options: list[str], code: int) -> None:
    from safetensors.torch import load_file

    reference = find_rules(model)[0].reference
    source = str(GOLDEN / case / "ckpt.npz" if case.startswith("paligemma") else checkpoint(case))
    _, said = run("infer", source, "mine.yaml", "--reference", reference, *options, code=code)
    assert "differs:" not in said and "open:" not in said and "proven with 3 further draws" in said
    tied = [line for line in said.splitlines() if line.startswith("tied: ")]
    assert bool(tied) is (case in TIED) and all("input_ff_layer" in line or "tokenizer" in line for line in tied)
    run("mine.yaml", source, "mine.safetensors")
    run(model, source, "shipped.safetensors", *options)
    mine, shipped = load_file("mine.safetensors"), load_file("shipped.safetensors")
    for name in mine.keys() - shipped.keys():  # a second name of a tensor, which the shipped rules leave to the module
        assert any(_same(mine[name], tensor) for tensor in shipped.values()), name
    for name, tensor in shipped.items():
        assert _same(mine[name], tensor), name


def _same(one: Any, two: Any) -> bool:
    """To the byte; NumPy lacks bfloat16."""
    same: bool = (one.dtype, one.shape) == (two.dtype, two.shape) and (
        one.view(-1).view(torch.uint8) == two.view(-1).view(torch.uint8)
    ).all()
    return same
