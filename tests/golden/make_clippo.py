"""Writes the golden case of CLIPPO: the flax code of big_vision, on a CPU.

big_vision is no package. It runs from a copy of its repository, in the environment of the tests:

    git clone https://github.com/google-research/big_vision && git -C big_vision checkout 0127fb6
    PYTHONPATH=big_vision:src:tests python tests/golden/make_clippo.py

clippo/clippo.npz: the configuration, names and shapes of the parameters, images, rendered texts, and the embeddings that upstream's
`one_tower.Model` computed, in float32 with matmul precision `highest` and in float64 with casts removed. The weights are those of `drawn` in
tests/support/drawn_cases.py. `big_vision.utils`, which needs TensorFlow, is not used when the model runs, and an empty module stands for it.
"""

from __future__ import annotations

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


if __name__ == "__main__":
    record()
