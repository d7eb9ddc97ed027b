"""Writes the golden cases of big_vision's ViT, for each pooling, with computed positions and without a head, on a CPU.

big_vision is no package. It runs from a copy of its repository, in the environment of the tests:

    git clone https://github.com/google-research/big_vision && git -C big_vision checkout 0127fb6
    PYTHONPATH=big_vision:src:tests python tests/golden/make_vit_big_vision.py [CASE ...]

vit-big-vision/CASE.npz: the configuration, names and shapes of the parameters, images, and what upstream's `models/vit.py` computed, in float32
with matmul precision `highest` and in float64 with casts removed. The weights are those of `drawn` in tests/support/drawn_cases.py.
`big_vision.utils`, which needs TensorFlow, is not used when the model runs, and an empty module stands for it.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent / "vit-big-vision"
SIDE = 20
VIT = {
    "num_classes": 7, "patch_size": (4, 4), "width": 24, "depth": 3, "mlp_dim": 40, "num_heads": 2, "head_zeroinit": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "tok": {"pool_type": "tok"},
    "gap": {"pool_type": "gap"},
    "map": {"pool_type": "map"},
    "tok-rep": {"pool_type": "tok", "rep_size": 13},
    "tok-sincos2d": {"pool_type": "tok", "posemb": "sincos2d"},
    "gap-sincos2d": {"pool_type": "gap", "posemb": "sincos2d"},
    "map-sincos2d": {"pool_type": "map", "posemb": "sincos2d"},
    "tok-headless": {"pool_type": "tok", "num_classes": None},
    "gap-headless": {"pool_type": "gap", "num_classes": None},
    "map-headless": {"pool_type": "map", "num_classes": None},
    "tok-sincos2d-headless": {"pool_type": "tok", "posemb": "sincos2d", "num_classes": None},
    "gap-sincos2d-headless": {"pool_type": "gap", "posemb": "sincos2d", "num_classes": None},
    "map-sincos2d-headless": {"pool_type": "map", "posemb": "sincos2d", "num_classes": None},
}


def record(case: str) -> None:
    """Replace a golden case."""
    import jax
    from big_vision.models import vit
    from flax.traverse_util import flatten_dict, unflatten_dict

    from convert.numerics.lift_jax import float64, lift
    from support.drawn_cases import DrawnCases, drawn

    model = vit.Model(**VIT | CASES[case])
    images = np.random.default_rng(61).uniform(-1, 1, (2, SIDE, SIDE, 3)).astype(np.float32)
    tree = jax.eval_shape(lambda: model.init(jax.random.key(0), images))["params"]
    leaves = {name: drawn(f"{case}/{name}", leaf.shape) for name, leaf in flatten_dict(tree, sep="/").items()}

    def run(leaves: Any, images: Any) -> dict[str, Any]:
        logits, out = model.apply({"params": unflatten_dict(leaves, sep="/")}, images)
        return {"logits": logits, "pre_logits": out["pre_logits"]}

    with float64():
        exact = jax.tree.map(np.asarray, lift(run)(leaves, images))
    rounded = jax.tree.map(np.asarray, jax.jit(run)(leaves, images))
    DrawnCases(HERE).save(case, VIT | CASES[case], leaves, {"images": images}, rounded, exact)
    drift = np.abs(exact["logits"] - rounded["logits"]).max()
    print(f"{case}: {len(leaves)} leaves, logits {np.abs(exact['logits']).max():.2f} at most, drift {drift:.1e}")


def main() -> None:
    """Replace the golden cases of the command line, or all."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    import big_vision

    big_vision.utils = sys.modules["big_vision.utils"] = types.ModuleType("big_vision.utils")
    for case in sys.argv[1:] or CASES:
        record(case)


if __name__ == "__main__":
    main()
