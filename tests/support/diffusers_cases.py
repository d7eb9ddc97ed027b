"""The golden cases of diffusers' flax classes (`tests/golden/make_diffusers.py`), and the PyTorch classes that load the outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from flax import serialization
from flax.traverse_util import unflatten_dict

from support.drawn_cases import DrawnCases
from support.goldens import relative_error
from support.paths import GOLDEN

FOLDER = GOLDEN / "diffusers"
ALL = DrawnCases(FOLDER)
CASES = ALL.names
DIGESTS: dict[str, dict[str, Any]] = json.loads((FOLDER / "DIGEST.json").read_text()) if CASES else {}


def write(case: str, folder: Path, changed: dict[str, np.ndarray[Any, Any]] | None = None, **keys: Any) -> Path:
    """Write the checkpoint of a case: the bytes that `save_pretrained` wrote, unless something is changed."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = unflatten_dict(ALL.leaves(case) if changed is None else changed, sep="/")
    (folder / "diffusion_flax_model.msgpack").write_bytes(serialization.to_bytes(tree))
    (folder / "config.json").write_text(json.dumps(ALL.config(case) | keys))
    return folder


def loaded(out: Path) -> Any:
    """Return the PyTorch class that config.json names, loaded by `from_pretrained`; every tensor must fit."""
    import diffusers

    name = json.loads((out / "config.json").read_text())["_class_name"]
    model, info = getattr(diffusers, name).from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def as_flax(model: Any) -> Any:
    """Let the PyTorch class compute GELU and the norms before attention as the flax class does; config.json cannot say so."""
    from diffusers.models.activations import GEGLU
    from diffusers.models.transformers.transformer_2d import Transformer2DModel
    from torch.nn.functional import gelu

    for module in model.modules():
        if isinstance(module, GEGLU):
            module.gelu = lambda gate: gelu(gate, approximate="tanh")
        if isinstance(module, Transformer2DModel):
            module.norm.eps = 1e-5
    return model


def outputs(model: Any, case: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return what the PyTorch model makes of the inputs of a case."""
    import torch

    dtype = next(model.parameters()).dtype
    given = {name: torch.from_numpy(x) for name, x in ALL.values(case, "in").items()}
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
    with torch.no_grad():
        if case.startswith("vae"):
            posterior = model.encode(given["sample"]).latent_dist
            found = {
                "mean": posterior.mean,
                "logvar": posterior.logvar,
                "decoded": model.decode(given["latents"]).sample,
            }
            return {name: x.numpy() for name, x in found.items()}
        args = [given[name] for name in ("sample", "timesteps", "encoder_hidden_states")]
        if case.startswith("controlnet"):
            down, mid = model(*args, given["controlnet_cond"], return_dict=False)
            named = {**{f"down{k}": x for k, x in enumerate(down)}, "mid": mid}
            return {name: x.permute(0, 2, 3, 1).numpy() for name, x in named.items()}  # as the flax UNet takes them
        added = {name: given[name] for name in ("text_embeds", "time_ids") if name in given}
        return {"sample": model(*args, added_cond_kwargs=added or None).sample.numpy()}


def errors(model: Any, case: str, kind: str = "out") -> float:
    """Return the largest error of the outputs, relative to those of the flax class: in float32 (`out`) or float64 (`out64`)."""
    found, wanted = outputs(model, case), ALL.values(case, kind)
    assert found.keys() == wanted.keys()
    return max(relative_error(found[name], x) for name, x in wanted.items())


def drift(case: str) -> float:
    """Return how far the flax class is in float32 from itself in float64, with `jax.jit` or without it."""
    return max(DIGESTS[case]["drift"], DIGESTS[case]["drift_without_jit"])
