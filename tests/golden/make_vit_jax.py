"""Writes the golden cases of vit_jax, the code of ViT and AugReg, on a CPU.

vit_jax is no package on PyPI. Its models need flax alone, and run from a copy of its repository in the environment of the tests:

    git clone https://github.com/google-research/vision_transformer && git -C vision_transformer checkout c6de1e5
    PYTHONPATH=vision_transformer:src:tests python tests/golden/make_vit_jax.py

vit/CASE.npz: the configuration, names and shapes of the parameters, images, and the logits that upstream's VisionTransformer computed, in float32 with
matmul precision `highest` and in float64 with casts removed. The weights are those of `drawn` in tests/support/drawn_cases.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent / "vit"
CASE = "vit"
CONFIG = {
    "num_classes": 5, "hidden_size": 12, "patches": 4, "image": 12,
    "transformer": {"num_layers": 3, "mlp_dim": 24, "num_heads": 3, "dropout_rate": 0.0, "attention_dropout_rate": 0.0},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {CASE: {}, "jax-gap": {"classifier": "gap"}, "jax-pre-logits": {"representation_size": 13}}  # fmt: skip


def record(case: str) -> None:
    """Replace a golden case."""
    import jax
    from flax.traverse_util import flatten_dict, unflatten_dict
    from vit_jax.models_vit import VisionTransformer

    from convert.numerics.lift_jax import float64, lift
    from support.drawn_cases import DrawnCases, drawn

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")

    class Patches:
        size = (CONFIG["patches"],) * 2

    model = VisionTransformer(num_classes=CONFIG["num_classes"], hidden_size=CONFIG["hidden_size"], patches=Patches, transformer=CONFIG["transformer"], **CASES[case])  # type: ignore[arg-type]  # fmt: skip
    images = np.random.default_rng(41).uniform(-1, 1, (2, 12, 12, 3)).astype(np.float32)
    tree = jax.eval_shape(lambda: model.init(jax.random.key(0), images, train=False))["params"]
    leaves = {name: drawn(f"{case}/{name}", leaf.shape) for name, leaf in flatten_dict(tree, sep="/").items()}

    def logits(leaves: Any, images: Any) -> Any:
        return model.apply({"params": unflatten_dict(leaves, sep="/")}, images, train=False)

    with float64():
        exact = np.asarray(lift(logits)(leaves, images))
    rounded = np.asarray(jax.jit(logits)(leaves, images))
    DrawnCases(HERE).save(
        case, {**CONFIG, **CASES[case]}, leaves, {"images": images}, {"logits": rounded}, {"logits": exact}
    )
    print(
        f"{case}: {len(leaves)} leaves, logits {np.abs(exact).max():.2f} at most, drift {np.abs(exact - rounded).max():.1e}"
    )


if __name__ == "__main__":
    for case in CASES:
        record(case)
