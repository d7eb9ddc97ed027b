"""Writes the golden case siglip2/naflex: SigLIP 2 with images of any aspect ratio, the flax code of big_vision, on a CPU.

big_vision is no package. It runs from a copy of its repository, in the environment of the tests:

    git clone https://github.com/google-research/big_vision && git -C big_vision checkout 0127fb6
    PYTHONPATH=big_vision:src:tests python tests/golden/make_siglip2.py

siglip2/naflex.npz: the configuration, names and shapes of the parameters, patches of three images of different shapes with padding, tokens, and
the embeddings and logits that upstream's `two_towers.Model` computed, in float32 with matmul precision `highest` and in float64 with casts removed.
The weights are those of `drawn` in tests/support/drawn_cases.py. `big_vision.utils`, which needs TensorFlow, is not used when the
models run, and an empty module stands for it. `batch_shmap` without a mesh calls its function.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from convert.numerics.lift_jax import float64, lift
from support.drawn_cases import DrawnCases, drawn

CASE, HERE = "naflex", Path(__file__).parent / "siglip2"
PATCH, MOST = 4, 20  # values of a patch are 3 * 2 * 2; the most patches of an image
GRIDS = ((4, 4), (3, 5), (2, 8))  # patches of each image; the table has 4 x 4 rows
WIDTH, ROWS = 24, 31
IMAGE = {
    "width": WIDTH,
    "depth": 2,
    "mlp_dim": 40,
    "num_heads": 3,
    "pool_type": "map",
    "nposemb": 4,
    "posemb": "learn_2d(16)",
}
TEXT = {"width": WIDTH, "depth": 2, "mlp_dim": 36, "num_heads": 2, "vocab_size": ROWS}


def images(rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Patches, 1 where there is one, and the row and the column of each."""
    found = {name: np.zeros((len(GRIDS), MOST), np.int32) for name in ("kinds", "rows", "columns")}
    for k, (height, width) in enumerate(GRIDS):
        count = height * width
        rows, columns = np.divmod(np.arange(count), width)
        found["kinds"][k, :count], found["rows"][k, :count], found["columns"][k, :count] = 1, rows, columns
    patches = rng.uniform(-1, 1, (len(GRIDS), MOST, 3 * PATCH)).astype(np.float32)
    return {"patches": patches, **found}


def main() -> None:
    """Replace the golden case."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    import big_vision

    big_vision.utils = sys.modules["big_vision.utils"] = types.ModuleType("big_vision.utils")
    helper = types.ModuleType("big_vision.models.proj.image_text.utils")
    helper.batch_shmap = lambda fn, *args: fn(*args)  # type: ignore[attr-defined]
    sys.modules[helper.__name__] = helper
    import big_vision.models.proj.image_text

    big_vision.models.proj.image_text.utils = helper
    from big_vision.models.proj.image_text import two_towers

    rng = np.random.default_rng(29)
    given = images(rng)
    tokens = rng.integers(2, ROWS, (2, 7)).astype(np.int32)
    model = two_towers.Model(
        image=IMAGE, text=TEXT, image_model="proj.image_text.naflex_vit", out_dim=(None, WIDTH), bias_init=-10.0
    )

    def run(leaves: Any, patches: Any) -> dict[str, Any]:
        image = (patches, given["kinds"], given["rows"], given["columns"])
        found, words, out = model.apply({"params": unflatten_dict(leaves, sep="/")}, image, tokens)
        return {
            "image": found,
            "text": words,
            "logits": found @ words.T * out["t"] + out["b"],
        }  # trainers/proj/image_text/siglip.py

    image = (given["patches"], given["kinds"], given["rows"], given["columns"])
    tree = jax.eval_shape(lambda: model.init(jax.random.key(0), image, tokens))["params"]
    leaves = {name: drawn(f"{CASE}/{name}", leaf.shape) for name, leaf in flatten_dict(tree, sep="/").items()}
    with float64():
        exact = jax.tree.map(np.asarray, lift(run)(leaves, given["patches"]))
    rounded = jax.tree.map(np.asarray, jax.jit(run)(leaves, given["patches"]))
    config = {"image": IMAGE, "text": TEXT, "grids": GRIDS}
    DrawnCases(HERE).save(CASE, config, leaves, {**given, "tokens": tokens}, rounded, exact)
    for name, x in exact.items():
        print(f"{name} {x.shape}: {np.abs(x).max():.2f} at most, drift {np.abs(x - rounded[name]).max():.1e}")
    print(f"{len(leaves)} leaves")


if __name__ == "__main__":
    main()
