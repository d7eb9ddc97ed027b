"""The golden cases of Gemma 4 and Gemma 3n: settings that a user must give, and the models that load the converted directories."""

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

ALL = DrawnCases(GOLDEN / "gemma4")
CASES = ("gemma3n", "gemma4-e2b", "gemma4-e4b", "gemma4-31b", "gemma4-26b-a4b")
SHOWN = {"gemma4-26b-a4b": "gemma, with its router's input"}  # in the table of families
WORDS = {"L": "sliding_attention", "G": "full_attention"}


def settings(case: str) -> dict[str, Any]:
    """What a user must say of a model of no published size; taken from the configuration it was made with."""
    config = ALL.config(case)
    said = {
        "vocab_size": config["num_embed"],
        "sliding_window": config["sliding_window_size"],
        "context_length": 64,
    }
    if config["final_logit_softcap"] is not None:
        said["final_logit_softcapping"] = config["final_logit_softcap"]
    if "shared" in config:
        pattern = config["pattern"] * config["layers"]
        said["attention_pattern"] = [WORDS[x] for x in pattern[: config["layers"]]]
        said["kv_shared_layers"] = round(config["shared"] * config["layers"])
    if "activation_sparsity_pattern" in config:
        said["activation_sparsity"] = config["activation_sparsity_pattern"]
    elif "shared" in config:
        said["double_wide_mlp"] = "override_kv_shared_ffw_hidden" in config
    if "top_k_experts" in config:
        said |= {"experts_per_token": config["top_k_experts"], "router_input": "residual"}
    return said


def write(case: str, folder: Path) -> Path:
    """Write the leaves of a case with the names of the NESTED layout."""
    folder.mkdir(exist_ok=True)
    np.savez(folder / "ckpt.npz", **ALL.leaves(case))  # type: ignore[arg-type]
    return folder / "ckpt.npz"


def converted(case: str, folder: Path, **options: Any) -> tuple[Path, Path]:
    """Write a case and convert it; return both."""
    source = write(case, folder)
    convert.convert("gemma", source, folder / "out", settings=settings(case), **options)
    return source, folder / "out"


def logits(case: str, out: Path, dtype: torch.dtype, *, as_gemma: bool = True) -> np.ndarray:
    """What transformers' model says to the golden's tokens.

    Args:
        as_gemma: whether the router of experts gets what gemma 4.0.1 gives it, behind the norm, and not what transformers does.
    """
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype=dtype, attn_implementation="eager"
    )
    assert not any(report.values()), report
    for layer in model.model.layers if as_gemma and ALL.config(case).get("enable_moe") else ():
        layer.router.register_forward_pre_hook(lambda _, given, layer=layer: (layer.pre_feedforward_layernorm_2(given[0]),))  # fmt: skip
    with torch.no_grad():
        return model.eval()(torch.tensor(ALL.values(case, "in")["tokens"]).long()).logits.numpy()


def errors(case: str, out: Path, **options: Any) -> tuple[float, float]:
    """Relative error against the recorded logits of the JAX model, in float32 and in float64 with casts removed."""
    single = logits(case, out, torch.float32, **options)
    with lifted():
        double = logits(case, out, torch.float64, **options)
    wanted = (ALL.values(case, kind)["logits"] for kind in ("out", "out64"))
    single, double = map(relative_error, (single, double), wanted)
    return single, double
