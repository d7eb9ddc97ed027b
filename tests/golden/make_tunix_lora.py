"""Writes the golden case adapters/tunix-gemma3: Tunix's Gemma 3 with LoRA pairs, saved by Tunix's own CheckpointManager, on a CPU.

    TUNIX=tunix-wheel/tunix PYTHONPATH=src:tests:tests/golden python tests/golden/make_tunix_lora.py   # as make_tunix.py

The base model is that of tunix/gemma3.npz. The pairs are those that `qwix.apply_lora_to_model` adds with the arguments that Tunix gives it
(cli/utils/model.py); both halves are random. Three checkpoints: `base` before the pairs were added, `whole` with them, and `pairs` as Tunix's
trainer saves a model with pairs (`save_only_lora_params=True`). io.npz has tokens and the logits of the model with the pairs, also in float64
with casts removed.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from make_tunix import CASE, CONFIG, LENGTH, ROWS, without_trainers

from convert.numerics.lift_jax import float64, lift
from support.drawn_cases import drawn

HERE = Path(__file__).parent / "adapters" / "tunix-gemma3"
RANK, ALPHA = 3, 5.0
MODULES = ".*q_einsum|.*kv_einsum|.*attn_vec_einsum|.*gate_proj|.*down_proj|.*up_proj"  # as in the module_path of Tunix's examples


def fill(state: Any, case: str, scale: float = 1.0) -> None:
    """Draw every leaf."""
    for path, leaf in nnx.to_flat_state(state):
        leaf[...] = jnp.asarray(np.float32(scale) * drawn(f"{case}/{'/'.join(map(str, path))}", leaf[...].shape))


def main() -> None:
    """Replace the golden case."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    without_trainers(Path(os.environ["TUNIX"]))
    from tunix.models.gemma3 import model as upstream
    from tunix.sft.checkpoint_manager import CheckpointManager

    shutil.rmtree(HERE, ignore_errors=True)

    def save(name: str, model: nnx.Module, **options: bool) -> None:
        manager = CheckpointManager(str(HERE / name))
        manager.save(1, model, force=True, **options)
        manager.close()
        shutil.rmtree(HERE / name / "1" / "model_params" / "array_metadatas")  # these two are for Orbax's restore alone
        (HERE / name / "1" / "model_params" / "_sharding").unlink()
        for said in (HERE / name).rglob("commit_success.txt"):
            said.write_text("Checkpoint commit was successful\n")  # Orbax adds the path on this machine

    model = upstream.Gemma3(upstream.ModelConfig(**CONFIG, param_dtype=jnp.float32), rngs=nnx.Rngs(0))
    fill(nnx.state(model), CASE)
    save("base", model)
    provider = qwix.LoraProvider(module_path=MODULES, rank=RANK, alpha=ALPHA)
    model = qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(1))
    fill(nnx.state(model, nnx.LoRAParam), "adapters/tunix-gemma3", 0.5)
    save("whole", model)
    save("pairs", model, save_only_lora_params=True)

    tokens = np.random.default_rng(32).integers(1, ROWS, (2, LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    mask = np.broadcast_to(np.tril(np.ones((LENGTH, LENGTH), bool)), (2, LENGTH, LENGTH))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def logits(params: Any) -> Any:
        return nnx.merge(graph, params, rest)(tokens, positions, None, mask)[0]

    with float64():
        exact = np.asarray(lift(logits)(params))
    rounded = np.asarray(jax.jit(logits)(params))
    np.savez_compressed(HERE / "io.npz", tokens=tokens, logits=rounded, logits64=exact)
    (HERE / "case.json").write_text(json.dumps({"rank": RANK, "alpha": ALPHA}) + "\n")
    print(f"logits {np.abs(exact).max():.2f} at most, drift {np.abs(exact - rounded).max():.1e}")


if __name__ == "__main__":
    main()
