"""ViT of big_vision, scenic and vit_jax: the golden cases, their checkpoints, and what transformers computes from the converted files."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flax import serialization
from flax.traverse_util import unflatten_dict

import convert
from convert.numerics.lift_torch import lifted
from support.drawn_cases import DrawnCases
from support.goldens import relative_error
from support.paths import GOLDEN

BIG_VISION, SCENIC, JAX = (DrawnCases(GOLDEN / folder) for folder in ("vit-big-vision", "scenic", "vit"))
CASES = ("tok", "tok-rep", "gap", "map")
POOLS = ("tok", "gap", "map")
COMPUTED = tuple(
    f"{pool}-sincos2d{head}" for head in ("", "-headless") for pool in POOLS
)  # positions that no leaf holds
HEADLESS = tuple(f"{pool}{table}-headless" for table in ("", "-sincos2d") for pool in POOLS)
TABLES = {
    "vit-token-2d": "sinusoidal_2d",
    "vit-token-1d": "sinusoidal_1d",
    "vit-gap-1d": "sinusoidal_1d",
    "vit-gap-none": "none",
}  # scenic's, that no leaf holds
SCENIC_CASES = ("vit-token", "vit-token-rep", "vit-gap", "vit-gmp", "vit-map", *TABLES)
JAX_CASES = ("vit", "jax-gap", "jax-pre-logits")
IMAGE = {"image_size": 20}  # where the table has a row for the class token


def gold(case: str) -> DrawnCases:
    return SCENIC if case in SCENIC_CASES else JAX if case in JAX_CASES else BIG_VISION


def write(case: str, folder: Path) -> Path:
    """Write the checkpoint as upstream does: a .npz of vit_jax or big_vision, a train state of scenic in flax's msgpack."""
    leaves = gold(case).leaves(case)
    if case not in SCENIC_CASES:
        root = "" if case in JAX_CASES else "params/"
        np.savez(folder / "vit.npz", **{f"{root}{name}": x for name, x in leaves.items()})  # type: ignore[arg-type]
        return folder / "vit.npz"
    state = {"params": unflatten_dict(leaves, sep="/"), "global_step": np.int32(3), "opt_state": {"0": {"count": np.int32(3)}}}  # fmt: skip
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(state))
    return folder / "checkpoint"


def settings(case: str, to: str = "transformers") -> dict[str, Any]:
    """What the tree does not tell: the image beside a class token's position, timm's ratio of widths, the pooling."""
    if case in TABLES:
        return {"image_size": 12, "posemb": TABLES[case], **({"mlp_ratio": 2.0} if to == "timm" else {})}
    if case.startswith("vit-token"):
        return IMAGE
    if case in COMPUTED:
        ratio = {"mlp_ratio": 5 / 3} if to == "timm" else {}
        return {**IMAGE, "posemb": "sincos2d", **ratio}
    if case in ("vit", "jax-pre-logits"):
        return {"image_size": 12}
    ratio = {"mlp_ratio": 2.0 if case in (*SCENIC_CASES, *JAX_CASES) else 5 / 3} if to == "timm" else {}
    return {**ratio, "global_pool": "max"} if case == "vit-gmp" else ratio


def converted(case: str, folder: Path, to: str = "transformers", **options: Any) -> tuple[Path, Path]:
    source = write(case, folder)
    convert.convert("vit-jax", source, folder / "out", to=to, settings=settings(case, to), **options)
    return source, folder / "out"


def outputs(case: str, out: Path, exact: bool = False) -> dict[str, Any]:
    """Return what transformers' class computes; in float64 with casts removed. With `pre_logits`, the head of the tree follows ViTModel."""
    import transformers

    (name,) = json.loads((out / "config.json").read_text())["architectures"]
    model, info = getattr(transformers, name).from_pretrained(out, output_loading_info=True, dtype=torch.float32, attn_implementation="eager")  # fmt: skip
    assert not any(info.values()), info
    model = model.requires_grad_(False).eval()
    pixels = torch.from_numpy(gold(case).values(case, "in")["images"]).permute(0, 3, 1, 2)
    with lifted() if exact else nullcontext():
        found = model.double()(pixels.double()) if exact else model(pixels)
    if name != "ViTModel":
        return {"logits": found.logits.numpy()}
    leaves, head = gold(case).leaves(case), "output_projection" if case in SCENIC_CASES else "head"
    pooled = found.pooler_output.numpy()
    return {"pre_logits": pooled, "logits": pooled @ leaves[f"{head}/kernel"] + leaves[f"{head}/bias"]}


def errors(case: str, out: Path) -> tuple[float, float]:
    """The relative error in float32; and in float64 with casts removed."""
    found = []
    for exact, kind in ((False, "out"), (True, "out64")):
        wanted, given = gold(case).values(case, kind), outputs(case, out, exact)
        found.append(max(relative_error(x, wanted[name]) for name, x in given.items() if name in wanted))
    single, double = found
    return single, double
