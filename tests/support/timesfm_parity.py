"""Upstream's TimesFM with converted weights, run on the golden's inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from support import upstream
from support.goldens import golden_io

# The errors measured are 2e-7 to 6e-7 (recorded in benchmarks/README.md); the bound is the one that the project promises.
BOUND = 2e-6


def load_upstream(case: str, path: Path) -> torch.nn.Module:
    model = upstream.timesfm_2p5_model() if case == "timesfm-2.5" else upstream.timesfm_1_model(case)
    model.load_state_dict(load_file(path), strict=True)
    return model


def run_upstream(case: str, model: torch.nn.Module) -> dict[str, np.ndarray]:
    decode = upstream.timesfm_2p5_decode if case == "timesfm-2.5" else upstream.timesfm_1_decode
    return decode(model, golden_io(case))
