"""Writes the golden cases of TIPS: the flax code of google-deepmind/tips, on a CPU.

tips is no package: it imports itself as `tips`, and layers of scenic. Both run from copies of their repositories, in the environment of the tests:

    git clone https://github.com/google-deepmind/tips && git -C tips checkout 4db271d
    git clone https://github.com/google-research/scenic && git -C scenic checkout 4a38d47
    pip install ml-collections==1.1.0
    PYTHONPATH=.:scenic:src:tests python tests/golden/make_tips.py

tips/CASE.npz: the configuration, names and shapes of the parameters, tokens or images, and what upstream's `TextEncoder` and `VisionEncoder`
computed, in float32 with matmul precision `highest` and in float64 with casts removed. The sizes of a model are a table in vit.py, for which
small ones stand; the text encoder has twelve layers in any case. TensorFlow, which only the tokenizer needs, is not used. The leaves are those
that upstream's `load_checkpoint` reads from the file that the tests write.
"""

from __future__ import annotations

import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from convert.numerics.lift_jax import float64, lift
from support.drawn_cases import DrawnCases, drawn

HERE = Path(__file__).parent / "tips"
ROWS, TEXT, SIDE = 31, 11, 4  # words; tokens; patches along a side of the table of positions
SMALL: dict[str, Any] = {
    "hidden_size": 18, "num_layers": 12, "mlp_dim": 34, "num_heads": 3, "patch_size": (2, 2), "ffn_layer": "mlp",
}  # fmt: skip
CASES = {
    "text": SMALL,
    "image": {**SMALL, "num_layers": 3, "mlp_dim": 36},
    "image-swiglu": {**SMALL, "num_layers": 3, "mlp_dim": 72, "ffn_layer": "swiglu"},
}
IMAGES = {"image": (2, 2 * SIDE, 2 * SIDE), "resized": (1, 6, 10)}  # images, height, width


def main() -> None:
    """Replaces the golden cases."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    for name in ("tensorflow", "tensorflow_text"):
        sys.modules[name] = types.ModuleType(name)
    from tips.scenic.models import tips, vit

    rng = np.random.default_rng(59)
    tokens = rng.integers(1, ROWS, (3, TEXT)).astype(np.int32)
    paddings = np.zeros((3, TEXT), np.int32)
    for k, length in enumerate((TEXT, 7, 2)):
        tokens[k, length:], paddings[k, length:] = 0, 1
    texts = {"tokens": tokens, "paddings": paddings}
    images = {name: rng.uniform(0, 1, (*shape, 3)).astype(np.float32) for name, shape in IMAGES.items()}
    for case, config in CASES.items():
        vit.get_vit_config = lambda variant, config=config: dict(config)
        if case == "text":
            write(case, config, tips.TextEncoder(variant="B/14", vocab_size=ROWS), texts)
        else:
            write(case, config, tips.VisionEncoder(variant="B/14", posembs=(SIDE, SIDE)), images)


def write(case: str, config: Mapping[str, Any], model: Any, given: Mapping[str, Any]) -> None:
    """Replace one case."""
    from tips.scenic.utils import checkpoint

    def run(leaves: Any) -> dict[str, Any]:
        params = {"params": unflatten_dict(leaves, sep="/")}
        if case == "text":
            return {"text": model.apply(params, *given.values(), train=False)}
        pairs = {name: model.apply(params, image, train=False) for name, image in given.items()}
        return {f"{name}_{kind}": x for name, pair in pairs.items() for kind, x in zip(("patches", "tokens"), pair, strict=True)}  # fmt: skip

    example = tuple(given.values()) if case == "text" else (given["image"],)
    tree = jax.eval_shape(lambda: model.init(jax.random.key(0), *example, train=False))["params"]
    shapes = {name: leaf.shape for name, leaf in flatten_dict(tree, sep="/").items()}
    if case == "text":
        shapes["temperature_contrastive"] = ()  # run_tips_inference.py adds it
    leaves = {name: drawn(f"{case}/{name}", shape) for name, shape in shapes.items()}
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "ckpt.npz", **leaves)  # type: ignore[arg-type]
        wanted = unflatten_dict(leaves, sep="/")
        read = flatten_dict(checkpoint.load_checkpoint(str(Path(folder) / "ckpt.npz"), wanted), sep="/")
    with float64():
        exact = jax.tree.map(np.asarray, lift(run)(read))
    rounded = jax.tree.map(np.asarray, jax.jit(run)(read))
    DrawnCases(HERE).save(case, config, leaves, given, rounded, exact)
    for name, x in exact.items():
        drift = np.abs(x - rounded[name]).max() / np.abs(x).max()
        print(f"{case}: {len(leaves)} leaves, {name} {np.abs(x).max():.2f} at most, drift {drift:.1e}")


if __name__ == "__main__":
    main()
