"""Writes the golden cases of VideoPrism: the flax code of google-deepmind/videoprism, on a CPU.

videoprism needs TensorFlow for buckets and tokenizers alone. It runs from a copy of its repository, in the environment of the tests:

    git clone https://github.com/google-deepmind/videoprism && git -C videoprism checkout d481d91
    pip install einshape==1.0
    PYTHONPATH=videoprism:src:tests python tests/golden/make_videoprism.py

videoprism/CASE.npz: the configuration, names and shapes of the parameters, videos, tokens, and what upstream's `FactorizedEncoder` and
`FactorizedVideoCLIP` computed, in float32 with matmul precision `highest` and in float64 with casts removed. The second video has fewer
frames and larger images than the tables of positions, so they are resized. Upstream publishes .npz files and has no code that
writes them; the leaves are those that its `load_checkpoint` reads from the file that the tests write.
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

HERE = Path(__file__).parent / "videoprism"
PATCH, FRAMES, SIDE, ROWS, TEXT = 3, 5, 4, 31, 11
ENCODER: dict[str, Any] = {
    "patch_size": PATCH, "pos_emb_shape": (FRAMES, SIDE, SIDE), "num_spatial_layers": 3, "num_temporal_layers": 2, "atten_logit_cap": 2.0,
    "num_heads": 3, "scan": True,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "encoder": {**ENCODER, "model_dim": 21, "mlp_dim": 40},
    "encoder-unscanned": {**ENCODER, "model_dim": 21, "mlp_dim": 40, "scan": False},
    "lvt": {
        **ENCODER, "model_dim": 18, "mlp_dim": 72, "num_auxiliary_layers": 2, "num_unimodal_layers": 3, "vocabulary_size": ROWS,
        "enable_causal_atten": True, "norm_policy": "pre",
    },
}  # fmt: skip
VIDEOS = {"video": (2, FRAMES, SIDE * PATCH), "resized": (1, 3, 5 * PATCH)}  # of how many frames, and how large


def upstream() -> tuple[Any, Any]:
    """Import videoprism's encoders and utils; an empty module stands for TensorFlow, with which utils opens files of buckets."""
    names = ("tensorflow", "tensorflow.io")
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules["tensorflow.io"].gfile = types.ModuleType("gfile")  # type: ignore[attr-defined]
    from videoprism import encoders, utils

    for name in names:  # einops would take it for the real one
        del sys.modules[name]
    return encoders, utils


def texts(rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Tokens of three texts, and which of them are padding: it comes last."""
    tokens = rng.integers(1, ROWS, (3, TEXT)).astype(np.int32)
    paddings = np.zeros((3, TEXT), np.float32)
    for k, length in enumerate((TEXT, 7, 2)):
        tokens[k, length:], paddings[k, length:] = 0, 1
    return {"tokens": tokens, "paddings": paddings}


def main() -> None:
    """Replaces the golden cases."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    encoders, utils = upstream()
    rng = np.random.default_rng(53)
    videos = {name: rng.uniform(0, 1, (n, t, s, s, 3)).astype(np.float32) for name, (n, t, s) in VIDEOS.items()}
    said = texts(rng)
    for case, config in CASES.items():
        lvt = case == "lvt"
        model = (encoders.FactorizedVideoCLIP if lvt else encoders.FactorizedEncoder)(**config)
        given = {**videos, **(said if lvt else {})}

        def run(leaves: Any, given: Any, model: Any = model, lvt: bool = lvt) -> dict[str, Any]:
            tree = unflatten_dict(leaves, sep="/")
            if not lvt:
                return {name: model.apply(tree, given[name])[0] for name in VIDEOS}
            found = {}
            for kind, normalize in (("", True), ("_unnormalized", False)):
                words = (given["tokens"], given["paddings"])
                found[f"video{kind}"], found[f"text{kind}"], _ = model.apply(
                    tree, given["video"], *words, normalize=normalize
                )
                found[f"resized{kind}"] = model.apply(tree, given["resized"], normalize=normalize)[0]
            return found

        args = (given["video"], *((given["tokens"], given["paddings"]) if lvt else ()))
        tree = jax.eval_shape(lambda model=model, args=args: model.init(jax.random.key(0), *args))
        leaves = {name: drawn(f"{case}/{name}", leaf.shape) for name, leaf in flatten_dict(tree, sep="/").items()}
        with tempfile.TemporaryDirectory() as folder:
            np.savez(Path(folder) / "ckpt.npz", **leaves)  # type: ignore[arg-type]
            read = flatten_dict(utils.load_checkpoint(str(Path(folder) / "ckpt.npz")), sep="/")
        with float64():
            exact = jax.tree.map(np.asarray, lift(run)(read, given))
        rounded = jax.tree.map(np.asarray, jax.jit(run)(read, given))
        DrawnCases(HERE).save(case, config, leaves, given, rounded, exact)
        for name, x in exact.items():
            drift = np.abs(x - rounded[name]).max() / np.abs(x).max()
            print(f"{case} {name} {x.shape}: {np.abs(x).max():.2f} at most, drift {drift:.1e}")
        print(f"{case}: {len(leaves)} leaves")


if __name__ == "__main__":
    main()
