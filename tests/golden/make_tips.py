"""Writes the golden case tips/text: the flax code of google-deepmind/tips, its text encoder, on a CPU.

tips is no package: it imports itself as `tips`, and layers of scenic. Both run from copies of their repositories, in the environment of the tests:

    git clone https://github.com/google-deepmind/tips && git -C tips checkout 4db271d
    git clone https://github.com/google-research/scenic && git -C scenic checkout 4a38d47
    pip install ml-collections==1.1.0
    PYTHONPATH=.:scenic:src:tests python tests/golden/make_tips.py

tips/text.npz: the configuration, names and shapes of the parameters, tokens, and what upstream's `TextEncoder` computed, in float32 with matmul
precision `highest` and in float64 with casts removed. The sizes of a model are a table in vit.py, for which a small one stands; the text
encoder has twelve layers in any case. TensorFlow, which only the tokenizer needs, is not used. The leaves are those that upstream's
`load_checkpoint` reads from the file that the tests write.
"""

from __future__ import annotations

import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from convert.numerics.lift_jax import float64, lift
from support.drawn_cases import DrawnCases, drawn

CASE, HERE = "text", Path(__file__).parent / "tips"
ROWS, TEXT = 31, 11  # words; tokens
SMALL: dict[str, Any] = {
    "hidden_size": 18, "num_layers": 12, "mlp_dim": 34, "num_heads": 3, "patch_size": (2, 2), "ffn_layer": "mlp",
}  # fmt: skip


def main() -> None:
    """Replaces the golden case."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    for name in ("tensorflow", "tensorflow_text"):
        sys.modules[name] = types.ModuleType(name)
    from tips.scenic.models import tips, vit
    from tips.scenic.utils import checkpoint

    vit.get_vit_config = lambda variant: dict(SMALL)
    rng = np.random.default_rng(59)
    tokens = rng.integers(1, ROWS, (3, TEXT)).astype(np.int32)
    paddings = np.zeros((3, TEXT), np.int32)
    for k, length in enumerate((TEXT, 7, 2)):
        tokens[k, length:], paddings[k, length:] = 0, 1
    model = tips.TextEncoder(variant="B/14", vocab_size=ROWS)

    def run(leaves: Any) -> Any:
        return model.apply({"params": unflatten_dict(leaves, sep="/")}, tokens, paddings, train=False)

    tree = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, paddings, train=False))["params"]
    shapes = {name: leaf.shape for name, leaf in flatten_dict(tree, sep="/").items()}
    shapes["temperature_contrastive"] = ()  # run_tips_inference.py adds it
    leaves = {name: drawn(f"{CASE}/{name}", shape) for name, shape in shapes.items()}
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "ckpt.npz", **leaves)  # type: ignore[arg-type]
        wanted = unflatten_dict(leaves, sep="/")
        read = flatten_dict(checkpoint.load_checkpoint(str(Path(folder) / "ckpt.npz"), wanted), sep="/")
    with float64():
        exact = np.asarray(lift(run)(read))
    rounded = np.asarray(jax.jit(run)(read))
    given = {"tokens": tokens, "paddings": paddings}
    DrawnCases(HERE).save(CASE, SMALL, leaves, given, {CASE: rounded}, {CASE: exact})
    drift = np.abs(exact - rounded).max() / np.abs(exact).max()
    print(f"{len(leaves)} leaves, {np.abs(exact).max():.2f} at most, drift {drift:.1e}")


if __name__ == "__main__":
    main()
