"""Writes the golden cases of T5X: the networks of t5x/examples/t5 and t5x/examples/scalable_t5, on a CPU.

T5X is no package on PyPI. Its networks need flax alone, and run from a copy of its repository in the environment of the tests:

    git clone https://github.com/google-research/t5x && git -C t5x checkout cc342d4
    PYTHONPATH=t5x:src:tests python tests/golden/make_t5x.py

Each case is one file, t5x/CASE.npz: the configuration, names and shapes of the parameters, the tokens, and the logits that upstream's
Transformer computed from them, in float32 with matmul precision `highest` and in float64 with casts removed. The weights are those of `drawn`
in tests/support/drawn_cases.py.
The files of a checkpoint are not upstream's: t5x/checkpoints.py needs TensorFlow. `tests/support/t5x_cases.py` writes what it writes.
"""

from __future__ import annotations

import importlib
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from convert.numerics.lift_jax import float64, lift
from support.drawn_cases import DrawnCases, drawn

HERE = Path(__file__).parent / "t5x"
SIZES = {
    "vocab_size": 23, "emb_dim": 12, "num_heads": 3, "num_encoder_layers": 2, "num_decoder_layers": 3, "head_dim": 5, "mlp_dim": 20,
    "dropout_rate": 0.0,
}  # fmt: skip
GATED = {"mlp_activations": ["gelu", "linear"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5-1.0": ("t5", {"mlp_activations": ["relu"], "logits_via_embedding": True}),
    "t5-1.1": ("t5", {**GATED, "head_dim": 4}),  # heads x width of a head = width: square projections, as in most published models
    "ul2": ("t5", {"mlp_activations": ["silu", "linear"]}),
    "mt5": ("t5", {**GATED, "head_dim": 6, "num_decoder_layers": 2}),
    "byt5": ("t5", {**GATED, "num_encoder_layers": 4, "num_decoder_layers": 2}),  # its encoder is the deeper one
    "umt5": ("scalable_t5", GATED),
    "umt5-unscanned": ("scalable_t5", {**GATED, "scan_layers": False}),
    "umt5-tied": ("scalable_t5", {**GATED, "logits_via_embedding": True}),
}  # fmt: skip


def transformer(network: str, config: dict[str, Any]) -> Any:
    """Return upstream's Transformer. An empty module stands for the package itself, whose `__init__` imports the trainer."""
    package = sys.modules.setdefault("t5x", types.ModuleType("t5x"))
    package.__path__ = [folder for path in sys.path if (folder := f"{path}/t5x") and Path(folder).is_dir()]
    module = importlib.import_module(f"t5x.examples.{network}.network")
    return module.Transformer(module.T5Config(**config))


def main() -> None:
    """Replaces the golden cases."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{n} {version(n)}' for n in ('flax', 'jax', 'numpy'))}")
    rng = np.random.default_rng(29)
    texts = {
        "encoder_input_tokens": rng.integers(1, SIZES["vocab_size"], (1, 150)).astype(np.int32),  # beyond the last bucket, 128
        "decoder_input_tokens": rng.integers(1, SIZES["vocab_size"], (1, 137)).astype(np.int32),
    }  # fmt: skip
    texts["encoder_input_tokens"][:, -9:] = 0  # padding
    given = {**texts, "decoder_target_tokens": texts["decoder_input_tokens"]}
    for case, (network, other) in CASES.items():
        config = {**SIZES, **other}
        model = transformer(network, config)
        tree = jax.eval_shape(lambda model=model: model.init(jax.random.key(0), enable_dropout=False, **given))[
            "params"
        ]
        leaves = {name: drawn(f"{case}/{name}", leaf.shape) for name, leaf in flatten_dict(tree, sep="/").items()}

        def logits(leaves: Any, given: Any, model: Any = model) -> Any:
            params = unflatten_dict(leaves, sep="/")
            return model.apply({"params": params}, enable_dropout=False, **given)[:, ::4]

        with float64():
            exact = np.asarray(lift(logits)(leaves, given))
        rounded = {"logits": np.asarray(jax.jit(logits)(leaves, given))}
        DrawnCases(HERE).save(case, {"network": network, **config}, leaves, texts, rounded, {"logits": exact})
        print(
            f"{case}: {len(leaves)} leaves, logits {np.abs(exact).mean():.2f} on average, {np.abs(exact).max():.2f} at most"
        )


if __name__ == "__main__":
    main()
