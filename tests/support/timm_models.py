"""What timm's own classes compute from the directories that `convert --to timm` writes, of the goldens of vit_jax, big_vision and scenic."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

import convert
from convert.numerics.lift_torch import lifted
from support import float64, siglip2, vit
from support.drawn_cases import DrawnCases
from support.goldens import golden_io, relative_error
from support.paths import GOLDEN
from support.wheels import timm

Arrays = dict[str, np.ndarray[Any, Any]]
CLIPPO = DrawnCases(GOLDEN / "clippo")
RATIO = {"mlp_ratio": 40 / 24}  # of a width that is not published
VITS = ("vit", "jax-gap", "tok", "gap", "map", "vit-token", "vit-gap", "vit-gmp", "vit-map")
EMBEDDINGS = ("clippo", "siglip", siglip2.CASE)


def converted(case: str, folder: Path, **options: Any) -> tuple[Path, Path]:
    """Convert a case for timm; return its checkpoint and the directory."""
    if case in VITS:
        return vit.converted(case, folder, "timm", **options)
    if case == "siglip":
        source = GOLDEN / "siglip" / "ckpt.npz"
    elif case == "clippo":
        source = folder / "clippo.npz"
        np.savez(source, **{f"params/{name}": x for name, x in CLIPPO.leaves(case).items()})  # type: ignore[arg-type]
    else:
        source = siglip2.write(folder)
    model = "clippo" if case == "clippo" else "siglip2"
    convert.convert(model, source, folder / "out", settings=RATIO, **({} if case == "clippo" else {"to": "timm"}) | options)  # fmt: skip
    return source, folder / "out"


def load(out: Path) -> Any:
    """Return the model that timm makes of a directory; it loads strictly."""
    return timm().create_model(f"local-dir:{out}", pretrained=True).requires_grad_(False).eval()


def _inputs(case: str, dtype: torch.dtype) -> dict[str, Any]:
    """What the model takes, by the name of what it says."""
    if case == siglip2.CASE:
        given = siglip2.GOLD.values(case, "in")
        places = torch.from_numpy(np.stack([given["rows"], given["columns"]], -1)).long()
        patches, valid = torch.from_numpy(given["patches"]).to(dtype), torch.from_numpy(given["kinds"]).bool()
        return {"image": {"patches": patches, "patch_coord": places, "patch_valid": valid}}
    if case == "siglip":
        images = {"image": golden_io(case)["pixels"]}
    elif case == "clippo":
        images = {"image": CLIPPO.values(case, "in")["images"], "text": CLIPPO.values(case, "in")["texts"]}
    else:
        images = {"logits": vit.gold(case).values(case, "in")["images"]}
    return {name: torch.from_numpy(x).permute(0, 3, 1, 2).to(dtype) for name, x in images.items()}


def outputs(case: str, model: Any, exact: bool = False) -> Arrays:
    """Return what timm's model says; in float64 with casts removed. big_vision divides embeddings by their norm, for both."""
    found = {}
    with lifted() if exact else nullcontext():
        for name, given in _inputs(case, torch.float64 if exact else torch.float32).items():
            x = (model.double() if exact else model)(given)
            found[name] = (x / (x.norm(dim=1, keepdim=True) + 1e-8) if case in EMBEDDINGS else x).numpy()
    return found


def errors(case: str, out: Path) -> tuple[float, float]:
    """The largest relative error in float32; and in float64 with casts removed."""
    model = load(out)
    single, double = outputs(case, model), outputs(case, model, exact=True)
    if case == "siglip":
        exact = float64.recorded("big_vision", case)["image"]
        return relative_error(single["image"], golden_io(case)["image"]), relative_error(float64.kept(double["image"]), exact)  # fmt: skip
    gold = CLIPPO if case == "clippo" else siglip2.GOLD if case == siglip2.CASE else vit.gold(case)
    pairs = ((single, gold.values(case, "out")), (double, gold.values(case, "out64")))
    first, second = (max(relative_error(x, wanted[name]) for name, x in found.items()) for found, wanted in pairs)
    return first, second
