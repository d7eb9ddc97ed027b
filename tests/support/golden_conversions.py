"""The goldens whose conversion the JAX model of upstream can be compared with, and how each is converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import gemma_image_models, gemma_models
from support.goldens import TIMESFM_1_CASES, checkpoint
from support.paths import GOLDEN

GOLDENS_WITHOUT_REFERENCE = ("siglip", "tabfm-classification", "tabfm-regression")  # that no shipped reference runs


def conversions() -> dict[str, tuple[str, Path, dict[str, Any]]]:
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
