"""Writes the golden case of CLIPPO: the flax code of big_vision, on a CPU. With `--timm` it compares timm with this case, and with SigLIP's.

big_vision is no package. It runs from a copy of its repository, in the environment of the tests:

    git clone https://github.com/google-research/big_vision && git -C big_vision checkout 0127fb6
    PYTHONPATH=big_vision:src:tests python tests/golden/make_clippo.py

clippo/clippo.npz: the configuration, names and shapes of the parameters, images, rendered texts, and the embeddings that upstream's
`one_tower.Model` computed, in float32 with matmul precision `highest` and in float64 with casts removed. The weights are those of `drawn` in
tests/support/drawn_cases.py. `big_vision.utils`, which needs TensorFlow, is not used when the model runs, and an empty module stands for it.

With `--timm clippo OUT_DIR` or `--timm siglip OUT_DIR`, in an environment with timm 1.0.31, it prints the error of timm's model, made with the
arguments of the converted directory's config.json.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

HERE, CASE = Path(__file__).parent, "clippo"
SIDE = 12
IMAGE = {
    "patch_size": (4, 4), "width": 24, "depth": 3, "mlp_dim": 40, "num_heads": 3, "pool_type": "map",
    "head_zeroinit": False,
}  # fmt: skip
OUT_DIM = 11


def record() -> None:
    """Replace the golden case."""
    import jax
    from flax.traverse_util import flatten_dict, unflatten_dict

    from convert.numerics.lift_jax import float64, lift
    from support.drawn_cases import DrawnCases, drawn

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    import big_vision

    big_vision.utils = sys.modules["big_vision.utils"] = types.ModuleType("big_vision.utils")
    from big_vision.models.proj.clippo import one_tower

    model = one_tower.Model(image=IMAGE, out_dim=OUT_DIM)  # configs/proj/clippo/train_clippo.py
    rng = np.random.default_rng(59)
    images, texts = (rng.uniform(-1, 1, (count, SIDE, SIDE, 3)).astype(np.float32) for count in (3, 2))
    tree = jax.eval_shape(lambda: model.init(jax.random.key(0), images, texts))["params"]
    leaves = {name: drawn(f"{CASE}/{name}", leaf.shape) for name, leaf in flatten_dict(tree, sep="/").items()}

    def run(leaves: Any, images: Any, texts: Any) -> dict[str, Any]:
        image, text, _ = model.apply({"params": unflatten_dict(leaves, sep="/")}, images, texts)
        return {"image": image, "text": text}

    with float64():
        exact = jax.tree.map(np.asarray, lift(run)(leaves, images, texts))
    rounded = jax.tree.map(np.asarray, jax.jit(run)(leaves, images, texts))
    config = {**IMAGE, "out_dim": OUT_DIM}
    DrawnCases(HERE / CASE).save(CASE, config, leaves, {"images": images, "texts": texts}, rounded, exact)
    for name, x in exact.items():
        print(f"{name} {x.shape}: {np.abs(x).max():.2f} at most, drift {np.abs(x - rounded[name]).max():.1e}")
    print(f"{len(leaves)} leaves")


def recorded(case: str) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Return inputs by the name of their output, the outputs, and those in float64 where they were recorded."""
    if case == "siglip":
        with np.load(HERE / "siglip" / "io.npz") as stored:
            return {"image": stored["pixels"]}, {"image": stored["image"]}, {}
    with np.load(HERE / CASE / f"{CASE}.npz") as stored:
        given = {"image": stored["in/images"], "text": stored["in/texts"]}
        return given, *({name: stored[f"{kind}/{name}"] for name in given} for kind in ("out", "out64"))


def timm(case: str, folder: Path) -> None:
    """Print the error of timm's model, whose embeddings are normalised as upstream does."""
    import torch
    from safetensors.torch import load_file
    from timm.models.vision_transformer import VisionTransformer

    made = VisionTransformer(**json.loads((folder / "config.json").read_text())["model_args"]).eval()
    made.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    given, rounded, exact = recorded(case)
    for model, wanted, kind in ((made, rounded, "float32"), (made.double(), exact, "float64")):
        dtype = next(model.parameters()).dtype
        for name, right in wanted.items():
            with torch.no_grad():
                found = model(torch.from_numpy(given[name]).permute(0, 3, 1, 2).to(dtype))
            found = (found / (found.norm(dim=1, keepdim=True) + 1e-8)).numpy()
            print(f"timm: {name}: {np.abs(found - right).max() / np.abs(right).max():.1e} in {kind}")


if __name__ == "__main__":
    timm(sys.argv[2], Path(sys.argv[3])) if sys.argv[1:2] == ["--timm"] else record()
