"""Writes the golden cases adapters/maxtext-*: models of MaxText with LoRA pairs, MaxText's own writer and converter, on a CPU.

    python tests/golden/make_maxtext_lora.py     # in the environment of make_maxtext.py

The pairs are those that MaxText's `apply_lora_to_model` adds (qwix 0.1.8), at the modules that its configuration has for the model (for Gemma 3 with
layers that are not scanned it finds none, and the case names them); both halves are random. Three checkpoints, all by `save_checkpoint`: `base`
before the pairs were added, `whole` with them, and `pairs`, which is what a run with `lora.enable_lora` saves: with its step. io.npz has tokens and the logits of the model with the pairs. peer.json has what `to_huggingface` makes of `base`
and `pairs` (`lora.lora_restore_path`), as in make_maxtext.py.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from make_maxtext import CASES, computed, configured, peer, randomize
from maxtext.common import checkpointing, train_state_nnx
from maxtext.configs import pyconfig
from maxtext.utils import lora_utils, maxtext_utils, model_creation_utils

HERE = Path(__file__).parent / "adapters"
RANK, ALPHA = 3, 5.0
LORA = {"lora.enable_lora": True, "lora.lora_rank": RANK, "lora.lora_alpha": ALPHA}
UNSCANNED = "decoder/layers_[0-9]+/.*(self_attention/(query|key|value|out)|mlp/(wi_0|wi_1|wo))"
LORAS = {"llama3.1": LORA, "gemma3-unscanned": {**LORA, "lora.lora_module_path": UNSCANNED}}


def save(model: nnx.Module, config: Any, folder: Path, optimizer: nnx.Optimizer[Any] | None = None) -> Path:
    """Save as a training run does; return the directory of the items."""
    state = nnx.state(train_state_nnx.TrainStateNNX(model, optimizer))
    manager = checkpointing.create_orbax_checkpoint_manager(str(folder), True, False, 1)
    checkpointing.save_checkpoint(manager, 0, state, config=config, force=True)
    checkpointing.wait_until_finished(manager)
    items = folder / "0" / "items"
    for said in folder.rglob("commit_success.txt"):
        said.write_text("Checkpoint commit was successful\n")  # Orbax adds the path on this machine
    (items / "_sharding").unlink()
    shutil.rmtree(items / "array_metadatas")
    return items


def write(case: str) -> None:
    """Replace the golden case."""
    name, _, changes = CASES[case]
    argv = configured(name, changes)
    plain, config = (
        pyconfig.initialize_pydantic(argv + [f"{k}={x}" for k, x in more.items()]) for more in ({}, LORAS[case])
    )
    mesh = maxtext_utils.get_mesh_from_config(plain)
    rng = np.random.default_rng(int(hashlib.sha256(f"lora {case}".encode()).hexdigest()[:8], 16))
    folder = HERE / f"maxtext-{case}"
    shutil.rmtree(folder, ignore_errors=True)
    with jax.set_mesh(mesh):
        model = model_creation_utils.from_config(plain, mesh=mesh, rngs=nnx.Rngs(0))
        randomize(model, rng, plain.logits_via_embedding)
        base = save(model, plain, folder / "base")
        model = lora_utils.apply_lora_to_model(model, mesh, config)
        leaves = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
        for _, leaf in sorted(leaves, key=lambda item: tuple(map(str, item[0]))):
            leaf[...] = jax.numpy.asarray(0.15 * rng.standard_normal(leaf[...].shape, np.float32))
        said = computed(model, config, rng)
        save(model, plain, folder / "whole")
        pairs = save(model, config, folder / "pairs", nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.LoRAParam))
    assert all(np.isfinite(x).all() for x in said.values())
    np.savez_compressed(folder / "io.npz", **said)
    more = [
        *argv,
        *(f"{k}={x}" for k, x in LORAS[case].items() if k != "lora.enable_lora"),
        f"lora.lora_restore_path={pairs}",
    ]
    try:
        made: dict[str, Any] = peer(more, plain, base)
    except ValueError as error:  # what MaxText cannot merge is a fact of the case
        made = {"error": f"{type(error).__name__}: {error}"}
    (folder / "peer.json").write_text(json.dumps(made).replace("], ", "],\n") + "\n")
    (folder / "case.json").write_text(json.dumps({"case": case, "rank": RANK, "alpha": ALPHA}) + "\n")
    print(
        case,
        len(leaves),
        "leaves of pairs,",
        len(made),
        "tensors of the peer, logits",
        float(np.abs(said["logits"]).max()),
    )


if __name__ == "__main__":
    for case in LORAS:
        write(case)
