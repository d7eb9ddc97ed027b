"""The golden Gemma checkpoints: what their trees do not hold, and the models that load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import convert
from support.goldens import checkpoint, golden_io, relative_error
from support.paths import GOLDEN

INTEGERS = ("gemma3-int4", "gemma3-int8")
CASES = ("gemma1-mqa", "gemma1-mha", "gemma2-2b", "gemma2-9b", "gemma3", "gemma3-stacked", "gemma3-kauldron")

# The largest error that the project promises; measured: 3e-7 to 2e-6.
BOUND = 5e-6


def settings(case: str) -> dict[str, Any]:
    """What a user must say of a model of no published size; taken from the configuration it was made with."""
    config = json.loads((GOLDEN / case / "case.json").read_text())["config"]
    said: dict[str, Any] = {"vocab_size": config["num_embed"]}
    if case.startswith("gemma1"):
        said |= {"context_length": 1024}
    if not case.startswith("gemma1"):
        said |= {"sliding_window": config["sliding_window_size"], "query_pre_attn_scalar": config["head_dim"]}
    if case.startswith("gemma3"):
        said |= {"rope_factor_global": 1.0, "context_length": 1024}
    return said


def directory(case: str, out: Path, rules: str = "gemma", **options: Any) -> Path:
    """The golden, converted to a directory."""
    convert.convert(rules, checkpoint(case), out, settings=settings(case), **options)
    return out


def load(out: Path, auto: str = "AutoModelForCausalLM") -> torch.nn.Module:
    """As a user loads it; nothing may be missing, left over or of another shape."""
    import transformers

    model, report = getattr(transformers, auto).from_pretrained(
        out, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(report.values()), report
    return model.eval()


def logits(model: torch.nn.Module, case: str) -> np.ndarray:
    """What the model says to the golden's tokens."""
    with torch.no_grad():
        return model(torch.tensor(golden_io(case)["tokens"], dtype=torch.long)).logits.numpy()


def error(case: str, out: Path) -> float:
    """Relative error of the converted model against the recorded logits of the JAX model."""
    return relative_error(logits(load(out), case), golden_io(case)["logits"])
