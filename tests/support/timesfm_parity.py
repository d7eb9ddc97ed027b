"""Upstream's TimesFM with converted weights, run on the golden's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from convert.numerics.lift_torch import lifted
from support import float64, upstream
from support.goldens import golden_io, relative_error

# The errors measured are 2e-7 to 6e-7 (recorded in benchmarks/README.md); the bound is the one that the project promises.
BOUND = 2e-6


def load_upstream(case: str, path: Path) -> torch.nn.Module:
    model = upstream.timesfm_2p5_model() if case == "timesfm-2.5" else upstream.timesfm_1_model(case)
    model.load_state_dict(load_file(path), strict=True)
    return model


SETTINGS: Mapping[str, Mapping[str, Any]] = {  # what transformers' config.json needs, and the tree does not tell
    "timesfm-1.0": {"use_positional_embedding": True, "context_length": 512},
    "timesfm-2.0": {"use_positional_embedding": False, "context_length": 512},
    "timesfm-2.5": {},
}


def load_transformers(case: str, out: Path) -> torch.nn.Module:
    """Load a directory as a user of transformers would; nothing may be missing or left over."""
    from transformers import TimesFm2_5ModelForPrediction, TimesFmModelForPrediction

    cls = TimesFm2_5ModelForPrediction if case == "timesfm-2.5" else TimesFmModelForPrediction
    model, report = cls.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    assert not any(report.values()), report
    loaded: torch.nn.Module = model.eval()
    return loaded


def run_transformers(case: str, model: Any) -> dict[str, np.ndarray]:
    """Return what transformers computes of the golden's inputs, by the name of what the JAX model gave, or of `as_in_transformers`.

    TimesFM 1: transformers pads a short series with zeros in front, as the golden's second row is padded. It differs from JAX for constant
    series only: sigma is clamped to 1e-6 there, replaced by 1 below 1e-7 here.
    TimesFM 2.5: the outputs before what transformers' forecast adds. `forward` computes something else than `decode`: it normalises the
    whole series, averages with the negated series and overwrites quantiles; and it has no autoregressive part.
    """
    io, dtype = golden_io(case), next(model.parameters()).dtype
    with torch.no_grad():
        if case != "timesfm-2.5":
            rows = zip(io["input_ts"], io["input_padding"], strict=True)
            series = [torch.tensor(row[pad[:512] == 0], dtype=dtype) for row, pad in rows]
            assert [len(row) for row in series] == [512, 416]
            got = model(past_values=series, freq=[int(f) for f in io["freq"][:, 0]])
            return {"mean": got.mean_predictions.numpy(), "full": got.full_predictions.numpy()}
        values, masks = torch.tensor(io["inputs"], dtype=dtype), torch.tensor(io["masks"])
        point, spread, _ = model._decode_and_project(values, masks)
        hidden = model.model(past_values=values, past_values_padding=masks)
        normed = model.output_projection_point(hidden.last_hidden_state)
        patches = model.model._revin(normed, hidden.context_mu, hidden.context_sigma, reverse=True).view(2, 16, 128, 10)
    return {"point": point.numpy(), "quantile_spread": spread.numpy(), "patches": patches[_not_masked(io)].numpy()}


def _not_masked(io: Any) -> np.ndarray:
    """Patches that are padding throughout differ by O(1): softmax over nothing but masked keys is uniform in JAX, not in torch."""
    return np.asarray(~io["masks"].reshape(2, 16, 32).all(-1))


def errors(case: str, target: str, out: Path) -> tuple[float, float]:
    """The largest relative error in float32; and in float64 with casts removed."""
    load, run = (load_upstream, run_upstream) if target == "timesfm" else (load_transformers, run_transformers)
    io = golden_io(case)
    wanted = io | (as_in_transformers(io, io) if case == "timesfm-2.5" else {})
    single = max(relative_error(x, wanted[name]) for name, x in run(case, load(case, out)).items())
    with lifted():
        found = run(case, load(case, out).double())
    exact = float64.recorded("timesfm" if case == "timesfm-2.5" else "timesfm_1", case)
    return single, max(relative_error(float64.kept(x), exact[name]) for name, x in found.items())


def run_upstream(case: str, model: torch.nn.Module) -> dict[str, np.ndarray]:
    decode = upstream.timesfm_2p5_decode if case == "timesfm-2.5" else upstream.timesfm_1_decode
    return decode(model, golden_io(case))


def as_in_transformers(io: Any, decoded: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `decode` of TimesFM 2.5 gave, as `run_transformers` has it: the last patch, and the patches with a point that is not masked."""
    return {"point": decoded["renormed_outputs"][:, -1], "patches": decoded["renormed_outputs"][_not_masked(io)]}
