"""RecurrentGemma: the golden case, and what transformers and upstream's PyTorch code compute from its converted files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import convert
from convert.numerics.lift_torch import lifted
from support import float64, goldens

CASE = "recurrentgemma"
SETTINGS = {"attention_window": 5, "logits_soft_cap": 3.0}
# transformers' convolution does not keep apart the two documents of the third sequence.
ROWS = {"transformers": slice(0, 2), "recurrentgemma": slice(0, 3)}


def converted(target: str, folder: Path) -> Path:
    out = folder / ("out" if target == "transformers" else "out.safetensors")
    convert.convert(CASE, goldens.checkpoint(CASE), out, to=target, settings=SETTINGS)
    return out


def load(target: str, out: Path) -> Any:
    """Load an output strictly, by the class of its target."""
    if target == "transformers":
        from transformers import AutoModelForCausalLM

        model, said = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
        return model.eval()
    from recurrentgemma import common
    from recurrentgemma.torch import griffin

    weights = load_file(out)
    config = common.GriffinConfig.from_torch_params(weights, embeddings_scale_by_sqrt_dim=True, attention_window_size=5, logits_soft_cap=3.0)  # fmt: skip
    model = griffin.Griffin(config, gradient_checkpointing=False)
    model.load_state_dict(weights, strict=True)
    return model


def logits(target: str, model: Any) -> np.ndarray[Any, Any]:
    """What a model says to the golden's sequences, in its dtype."""
    io = goldens.golden_io(CASE)
    tokens, positions = (torch.tensor(io[name][ROWS[target]]).long() for name in ("tokens", "positions"))
    with torch.no_grad():
        if target == "transformers":
            found = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        else:
            found, _ = model(tokens, positions, return_cache=False)
    return np.asarray(found.numpy())


def errors(target: str, out: Path) -> tuple[float, float]:
    """The relative error in float32; and in float64 with casts removed."""
    single = goldens.relative_error(logits(target, load(target, out)), goldens.golden_io(CASE)["logits"][ROWS[target]])
    with lifted():
        double = logits(target, load(target, out).double())
    exact = float64.recorded(CASE, CASE)["logits" if target == "recurrentgemma" else "first_logits"]
    return single, goldens.relative_error(float64.kept(double), exact)
