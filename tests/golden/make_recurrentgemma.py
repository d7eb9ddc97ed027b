"""Writes the golden case recurrentgemma: the flax code of recurrentgemma 1.0.1, saved by Orbax, on a CPU.

It runs in the environment of the tests:

    pip install -e '.[test]'
    python tests/golden/make_recurrentgemma.py

Weights, inputs and outputs are the same on every run of one machine; Orbax adds timestamps and random file names.
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from recurrentgemma import common
from recurrentgemma.jax import griffin

HERE = Path(__file__).parent
SEED = 7
LAYERS, VOCABULARY, STEPS, NOISE = 11, 67, 24, 0.1
KINDS = common.TemporalBlockType
PATTERN = (KINDS.RECURRENT, KINDS.RECURRENT, KINDS.ATTENTION)
CONFIG = common.GriffinConfig(
    vocab_size=VOCABULARY,
    width=32,
    mlp_expanded_width=44,
    num_heads=4,
    lru_width=32,  # as in the published models, so that the projections are square
    block_types=tuple(PATTERN[k % 3] for k in range(LAYERS)),
    embeddings_scale_by_sqrt_dim=True,
    attention_window_size=5,
    logits_soft_cap=3.0,  # tighter than the published 30, so that logits of this size reach it
)


def randomize(params: dict, rng: np.random.Generator) -> dict:
    """Upstream's initial values, and normal numbers on top: biases and norm scales, which are 0 there, are not."""
    leaves, tree = jax.tree_util.tree_flatten(params)
    drawn = [leaf + NOISE * rng.standard_normal(leaf.shape, np.float32) for leaf in map(np.asarray, leaves)]
    return jax.tree_util.tree_unflatten(tree, [jnp.asarray(leaf) for leaf in drawn])


def main() -> None:
    """Replaces the golden case."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    names = ("recurrentgemma", "flax", "orbax-checkpoint", "jax", "numpy")
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{name} {version(name)}' for name in names)}")
    rng = np.random.default_rng(SEED)
    tokens = rng.integers(0, VOCABULARY, (3, STEPS)).astype(np.int32)
    # The second sequence starts in the middle of a document, the third holds two documents.
    positions = np.stack([np.arange(STEPS), np.arange(STEPS) + 3, np.r_[np.arange(10), np.arange(STEPS - 10)]])
    tokens, positions = jnp.asarray(tokens), jnp.asarray(positions.astype(np.int32))
    model = griffin.Griffin(CONFIG, gradient_checkpointing=False)
    variables = randomize(model.init(jax.random.key(SEED), tokens, positions), rng)
    folder = HERE / "recurrentgemma"
    if folder.exists():
        shutil.rmtree(folder)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "ckpt", variables)
    # Orbax writes the absolute path into this file, whose presence alone counts.
    (folder / "ckpt" / "commit_success.txt").write_text("Checkpoint commit was successful.")
    with ocp.StandardCheckpointer() as checkpointer:  # the outputs are those of what lies on disk
        restored = checkpointer.restore(folder / "ckpt", variables)
    logits, _ = model.apply(restored, tokens, positions, return_cache=False)
    np.savez(folder / "io.npz", tokens=tokens, positions=positions, logits=logits)
    leaves = jax.tree_util.tree_leaves(restored)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{len(leaves)} leaves, {sum(leaf.size for leaf in leaves)} parameters, {size:,} bytes")
    print(f"logits: {float(jnp.abs(logits).mean()):.2f} on average, {float(jnp.abs(logits).max()):.2f} at most")


if __name__ == "__main__":
    main()
