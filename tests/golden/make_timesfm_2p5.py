"""Writes the golden case timesfm-2.5: the flax nnx code of timesfm 3.0.2, saved by Orbax, on a CPU.

It runs in the environment of the tests:

    pip install -e '.[test]' jaxtyping
    python tests/golden/make_timesfm_2p5.py

A checkpoint of the published size, for benchmarks and slow tests; 0.9 GB, without inputs and outputs:

    python tests/golden/make_timesfm_2p5.py --size real OUT_DIR

Weights, inputs and outputs are the same on every run of one machine; Orbax adds timestamps and random file names.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from timesfm.timesfm_2p5 import timesfm_2p5_base, timesfm_2p5_flax

HERE = Path(__file__).parent
SEED = 25
CONTEXT, HORIZON, MASKED = 512, 256, 96
LAYERS, WIDTH, HEADS, QUANTILE_LEN = 3, 32, 4, 64
NOISE = 0.1


def small_definition() -> timesfm_2p5_base.TimesFM_2p5_200M_Definition:
    """Upstream's definition at the golden's size; patches, quantiles, norms and activations stay as they are."""
    replace = dataclasses.replace
    full = timesfm_2p5_base.TimesFM_2p5_200M_Definition()
    stack, outputs = full.stacked_transformers, len(full.quantiles) + 1
    transformer = replace(stack.transformer, model_dims=WIDTH, hidden_dims=WIDTH, num_heads=HEADS)
    return replace(
        full,
        tokenizer=replace(full.tokenizer, hidden_dims=WIDTH, output_dims=WIDTH),
        stacked_transformers=replace(stack, num_layers=LAYERS, transformer=transformer),
        output_quantile_len=QUANTILE_LEN,
        output_projection_point=replace(full.output_projection_point, input_dims=WIDTH, hidden_dims=WIDTH),
        output_projection_quantiles=replace(
            full.output_projection_quantiles, input_dims=WIDTH, hidden_dims=WIDTH, output_dims=QUANTILE_LEN * outputs
        ),
    )


class SmallModule(timesfm_2p5_flax.TimesFM_2p5_200M_flax_module):
    """Upstream's module at the golden's size."""

    config = small_definition()


def randomize(state: nnx.State, rng: np.random.Generator) -> nnx.State:
    """Random values for every leaf, in the order of the tree.

    Kernels are spread as upstream initialises them. What starts as a constant is spread around it, so that a forgotten
    bias and a doubled or lost `1 +` change the outputs; but norm scales, which start at 0 (nothing would pass), around 1.
    """

    def draw(path: jax.tree_util.KeyPath, value: jax.Array) -> jax.Array:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        spread = NOISE if np.ptp(value) == 0 else float(value.std())
        centre = 1.0 if "scale" in names else 0.0
        drawn = rng.standard_normal(value.shape, np.float32)
        return jax.numpy.asarray(centre + spread * drawn, value.dtype)

    return jax.tree_util.tree_map_with_path(draw, state)


def save(folder: Path, state: nnx.State) -> None:
    """Saves as `TimesFM_2p5_200M_flax.load_checkpoint` restores."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state)


def describe(folder: Path, state: nnx.State) -> None:
    """Prints what was written."""
    leaves = jax.tree_util.tree_leaves(state)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(
        f"{folder}: {len(leaves)} leaves, {sum(leaf.size for leaf in leaves)} parameters, {size / 1e6:.1f} MB on disk"
    )


def make_golden(folder: Path) -> None:
    """Replaces `folder` by the golden case."""
    rng = np.random.default_rng(SEED)
    graph, state = nnx.split(SmallModule())
    state = randomize(state, rng)
    if folder.exists():
        shutil.rmtree(folder)
    save(folder / "ckpt", state)
    # Orbax writes the absolute path into this file, whose presence alone counts.
    (folder / "ckpt" / "commit_success.txt").write_text("Checkpoint commit was successful.")

    # Two series, a wave on a random walk; the first points of the second are masked.
    waves = 3 * np.sin(np.arange(CONTEXT) / np.array([[3.0], [5.0]]))
    inputs = (waves + np.cumsum(rng.normal(0, 0.1, (2, CONTEXT)), axis=1)).astype(np.float32)
    masks = np.zeros((2, CONTEXT), bool)
    masks[1, :MASKED] = True

    # Restored as upstream does it: the outputs are those of what lies on disk.
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder / "ckpt", state)
    jax.tree_util.tree_map(np.testing.assert_array_equal, restored, state)
    decoded = nnx.merge(graph, restored).decode(HORIZON, jax.numpy.asarray(inputs), jax.numpy.asarray(masks))
    names = ("renormed_outputs", "quantile_spread", "ar_outputs")
    outputs = {name: np.asarray(value) for name, value in zip(names, decoded, strict=True)}
    np.savez(folder / "io.npz", inputs=inputs, masks=masks, horizon=HORIZON, **outputs)
    describe(folder / "ckpt", restored)
    print("  " + ", ".join(f"{name} {list(value.shape)}" for name, value in outputs.items()))


def make_real(folder: Path) -> None:
    """Writes a checkpoint of the published size to `folder`, which must not exist."""
    start = time.perf_counter()
    _, state = nnx.split(timesfm_2p5_flax.TimesFM_2p5_200M_flax_module())
    state = randomize(state, np.random.default_rng(SEED))
    built = time.perf_counter()
    save(folder, state)
    describe(folder, state)
    print(f"  built in {built - start:.1f} s, saved in {time.perf_counter() - built:.1f} s")


def main() -> None:
    """Writes the golden case, or a checkpoint of the published size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("golden", "real"), default="golden")
    parser.add_argument(
        "out", type=Path, nargs="?", help="golden: where the case's folder goes [tests/golden]; real: the checkpoint"
    )
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    versions = ", ".join(f"{name} {version(name)}" for name in ("timesfm", "flax", "orbax-checkpoint", "jax", "numpy"))
    print(f"Python {sys.version.split()[0]}, {versions}")
    if arguments.size == "golden":
        make_golden((arguments.out or HERE).resolve() / "timesfm-2.5")
    elif arguments.out is None:
        parser.error("--size real needs OUT_DIR")
    else:
        make_real(arguments.out.resolve())


if __name__ == "__main__":
    main()
