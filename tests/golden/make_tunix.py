"""Writes the golden case tunix/gemma3: the Gemma 3 of Tunix (flax nnx), on a CPU.

It runs in the environment of the tests, from the wheel of Tunix without its trainers, whose packages its models do not need:

    pip download --no-deps google-tunix==0.1.7 && unzip google_tunix-0.1.7-py3-none-any.whl -d tunix-wheel
    TUNIX=tunix-wheel/tunix PYTHONPATH=src:tests python tests/golden/make_tunix.py

tunix/gemma3.npz: the configuration, names and shapes of the parameters, tokens, and the logits that upstream's `Gemma3` computed, in float32 with
matmul precision `highest` and in float64 with casts removed. The weights are those of `drawn` in tests/support/drawn_cases.py. The modules
of Tunix's package are imported from their folders, without the `__init__` files, which import the trainers.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convert.numerics.lift_jax import float64, lift
from support.drawn_cases import DrawnCases, drawn

CASE, HERE = "gemma3", Path(__file__).parent / "tunix"
ROWS, LENGTH = 40, 11
CONFIG = {
    "num_layers": 7, "num_embed": ROWS, "embed_dim": 16, "hidden_dim": 24, "num_heads": 4, "head_dim": 4, "num_kv_heads": 2,
    "sliding_window_size": 4, "global_base_frequency": 1_000_000, "global_scale_factor": 8.0,
}  # fmt: skip


def without_trainers(root: Path) -> None:
    """Let the packages on the way to Gemma 3 be their folders alone."""
    for name in ("tunix", "tunix.generate", "tunix.models", "tunix.models.gemma3", "tunix.utils"):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]


def main() -> None:
    """Replace the golden case."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    without_trainers(Path(os.environ["TUNIX"]))
    from tunix.models.gemma3 import model as upstream

    tokens = np.random.default_rng(31).integers(1, ROWS, (2, LENGTH)).astype(np.int32)
    model = upstream.Gemma3(upstream.ModelConfig(**CONFIG, param_dtype=jnp.float32), rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    paths = [path for path, _ in nnx.to_flat_state(state)]
    leaves = {"/".join(map(str, path)): x[...].shape for path, x in nnx.to_flat_state(state)}
    leaves = {name: drawn(f"{CASE}/{name}", shape) for name, shape in leaves.items()}
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    mask = np.broadcast_to(np.tril(np.ones((LENGTH, LENGTH), bool)), (2, LENGTH, LENGTH))

    def logits(leaves: Any) -> Any:
        values = nnx.from_flat_state([(path, nnx.Param(leaves["/".join(map(str, path))])) for path in paths])
        return nnx.merge(graph, values)(tokens, positions, None, mask)[0]

    with float64():
        exact = np.asarray(lift(logits)(leaves))
    rounded = np.asarray(jax.jit(logits)(leaves))
    DrawnCases(HERE).save(CASE, CONFIG, leaves, {"tokens": tokens}, {"logits": rounded}, {"logits": exact})
    print(f"{len(leaves)} leaves, logits {np.abs(exact).max():.2f} at most, drift {np.abs(exact - rounded).max():.1e}")


if __name__ == "__main__":
    main()
