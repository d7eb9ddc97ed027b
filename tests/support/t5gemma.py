"""The golden cases of T5Gemma: settings that a user must give, and the model that loads the converted directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import convert
from convert.numerics.lift_torch import lifted
from support.drawn_cases import DrawnCases
from support.goldens import relative_error
from support.paths import GOLDEN

ALL = DrawnCases(GOLDEN / "t5gemma")
CASES = ALL.names


def settings(case: str) -> dict[str, Any]:
    """What a user must say of a model of no published size."""
    decoder = ALL.config(case)["decoder"]
    return {
        "vocab_size": decoder["num_embed"],
        "sliding_window": decoder["sliding_window_size"],
        "attn_logit_softcapping": decoder["attn_logits_soft_cap"],
        "final_logit_softcapping": decoder["final_logit_softcap"],
    }


def converted(case: str, folder: Path, **options: Any) -> tuple[Path, Path]:
    """Write the leaves of a case with the names of the NESTED layout, and convert them; return both."""
    source = folder / "ckpt.npz"
    np.savez(source, **ALL.leaves(case))  # type: ignore[arg-type]
    convert.convert("gemma", source, folder / "out", settings=settings(case), **options)
    return source, folder / "out"


def logits(case: str, out: Path, dtype: torch.dtype) -> np.ndarray:
    """What transformers' model says to the golden's tokens; padding is masked, as upstream does by itself."""
    from transformers import AutoModelForSeq2SeqLM

    model, report = AutoModelForSeq2SeqLM.from_pretrained(
        out, output_loading_info=True, dtype=dtype, attn_implementation="eager"
    )
    assert not any(report.values()), report
    texts = {name: torch.tensor(x).long() for name, x in ALL.values(case, "in").items()}
    given, target = texts["input_tokens"], texts["target_tokens"]
    with torch.no_grad():
        said = model.eval()(given, (given != 0).long(), decoder_input_ids=target, use_cache=False)
    return said.logits.numpy()


def errors(case: str, out: Path) -> tuple[float, float]:
    """Relative error against the recorded logits of the JAX model, in float32 and in float64 with casts removed."""
    single = logits(case, out, torch.float32)
    with lifted():
        double = logits(case, out, torch.float64)
    wanted = (ALL.values(case, kind)["logits"] for kind in ("out", "out64"))
    single, double = map(relative_error, (single, double), wanted)
    return single, double
