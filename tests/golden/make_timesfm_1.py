"""Writes the golden cases timesfm-1.0 and timesfm-2.0: the JAX code of timesfm 1.2.9 with paxml 1.4.0, on a CPU.

It needs an environment of its own (Python 3.10, jax 0.4.26), which cannot be shared with the tests:

    python3.10 -m venv pax
    pax/bin/pip install --no-deps -r tests/golden/requirements-timesfm-1.txt
    pax/bin/python tests/golden/make_timesfm_1.py

The requirements are complete, hence `--no-deps`. They are what `pip install 'timesfm[pax]==1.2.9' 'numpy<2'` resolves
to, less the packages that this script never imports (CUDA, Jupyter and others): 2.3 GB instead of 7.2 GB.

Every byte is the same on every run of one machine.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from paxml import checkpoints, tasks_lib, train_states
from praxis import base_layer, pax_fiddle, py_utils
from praxis.layers import normalizations, transformers
from timesfm import patched_decoder

HERE = Path(__file__).parent
STEP = 1_100_000  # of the released checkpoints
PATCH, OUTPUT_PATCH, CONTEXT, HORIZON, PADDED = 32, 128, 512, 128, 96
WIDTH = 32
NOISE = 0.2


@dataclass(frozen=True)
class Case:
    """What distinguishes the cases; the released 1.0 has 20 layers, 16 heads, width 1280, and 2.0 has 50 layers."""

    name: str
    seed: int
    layers: int
    heads: int
    positional_embedding: bool


CASES = (
    Case("timesfm-1.0", seed=10, layers=3, heads=4, positional_embedding=True),
    # Twelve layers, so that the order of the leaves on disk (x_layers_10 before x_layers_2) is not the order of the layers.
    Case("timesfm-2.0", seed=20, layers=12, heads=2, positional_embedding=False),
)


def build(case: Case) -> patched_decoder.PatchedTimeSeriesDecoder:
    """The model as `TimesFmJax.load_from_checkpoint` of timesfm 1.2.9 configures it, at another size."""
    config = pax_fiddle.Config(
        patched_decoder.PatchedTimeSeriesDecoder,
        name="patched_decoder",
        horizon_len=OUTPUT_PATCH,
        patch_len=PATCH,
        model_dims=WIDTH,
        hidden_dims=WIDTH,
        residual_block_tpl=pax_fiddle.Config(patched_decoder.ResidualBlock),
        quantiles=list(patched_decoder.DEFAULT_QUANTILES),
        use_freq=True,
        use_pos_emb=case.positional_embedding,
        stacked_transformer_params_tpl=pax_fiddle.Config(
            transformers.StackedTransformer,
            num_heads=case.heads,
            num_layers=case.layers,
            transformer_layer_params_tpl=pax_fiddle.Config(
                transformers.Transformer, ln_tpl=pax_fiddle.Config(normalizations.RmsNorm)
            ),
        ),
    )
    return base_layer.instantiate(config)


def make_inputs(rng: np.random.Generator) -> py_utils.NestedMap:
    """Two series, a wave on a random walk; the first points of the second are padding."""
    waves = 3 * np.sin(np.arange(CONTEXT) / np.array([[3.0], [5.0]]))
    walk = np.cumsum(rng.normal(0, 0.1, (2, CONTEXT)), axis=1)
    padding = np.zeros((2, CONTEXT + HORIZON), np.float32)
    padding[1, :PADDED] = 1
    return py_utils.NestedMap(
        input_ts=(waves + walk).astype(np.float32), input_padding=padding, freq=np.array([[0], [1]], np.int32)
    )


def context_of(inputs: py_utils.NestedMap) -> py_utils.NestedMap:
    """The inputs of one forward pass: `decode` takes the padding of the horizon too."""
    return py_utils.NestedMap(inputs, input_padding=inputs.input_padding[:, :CONTEXT])


def make_state(
    model: patched_decoder.PatchedTimeSeriesDecoder, inputs: py_utils.NestedMap, rng: np.random.Generator
) -> tuple[train_states.TrainState, train_states.TrainState]:
    """A train state without optimizer states, and the shapes with which upstream restores it.

    Every leaf is upstream's initial value plus noise. So norm scales, biases and per_dim_scale, which start at 0 or 1,
    are random too: a lost `1 +`, a forgotten bias or two norms exchanged change the outputs.
    """
    variables = model.init(jax.random.PRNGKey(0), context_of(inputs))
    variables = jax.tree_util.tree_map(lambda x: x + NOISE * rng.standard_normal(x.shape, np.float32), variables)
    metadata = model.abstract_init_with_metadata(context_of(inputs), do_eval=True)
    state = tasks_lib.create_state(variables, metadata, discard_opt_states=True, learners=None)
    shapes = tasks_lib.create_state_unpadded_shapes(metadata, discard_opt_states=True, learners=None)
    return state.replace(step=np.int32(STEP)), shapes


def run(
    model: patched_decoder.PatchedTimeSeriesDecoder, state: train_states.TrainState, inputs: py_utils.NestedMap
) -> dict[str, np.ndarray]:
    """The outputs of `decode`, and those of the transformer stack in one pass over the context."""
    mean, full = model.apply(
        state.mdl_vars,
        inputs,
        horizon_len=HORIZON,
        output_patch_len=OUTPUT_PATCH,
        max_len=CONTEXT,
        method=model.decode,
    )
    tokens = model.apply(state.mdl_vars, context_of(inputs))["output_tokens"]
    return {"raw_output": np.asarray(tokens), "mean": np.asarray(mean), "full": np.asarray(full)}


def make(case: Case, folder: Path) -> None:
    """Replaces `folder` by the case."""
    rng = np.random.default_rng(case.seed)
    model, inputs = build(case), make_inputs(rng)
    state, shapes = make_state(model, inputs, rng)
    if folder.exists():
        shutil.rmtree(folder)
    kind = checkpoints.CheckpointType.FLAX
    checkpoints.save_checkpoint(
        state, folder / "checkpoints", checkpoint_type=kind, train_state_unpadded_shape_dtype_struct=shapes
    )

    # Restored as TimesFmJax does it: the outputs are those of what lies on disk.
    restored = checkpoints.restore_checkpoint(
        shapes, folder / "checkpoints", checkpoint_type=kind, state_unpadded_shape_dtype_struct=shapes, step=STEP
    )
    jax.tree_util.tree_map(np.testing.assert_array_equal, restored.mdl_vars, state.mdl_vars)
    outputs: dict[str, Any] = {**inputs, **run(model, restored, inputs)}
    np.savez(folder / "io.npz", **outputs)

    leaves = jax.tree_util.tree_leaves(restored.mdl_vars)
    print(f"{folder}: {len(leaves)} leaves, {sum(leaf.size for leaf in leaves)} parameters")
    print("  " + ", ".join(f"{name} {list(np.shape(value))}" for name, value in outputs.items()))


def main() -> None:
    """Writes both cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE, help="where the cases' folders go [tests/golden]")
    out = parser.parse_args().out
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, numpy {np.__version__}")
    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=True)):
        for case in CASES:
            make(case, out.resolve() / case.name)


if __name__ == "__main__":
    main()
