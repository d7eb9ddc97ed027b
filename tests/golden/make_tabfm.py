"""Writes the golden cases of TabFM: tabfm 1.0.1's flax nnx code, saved by its own checkpoint manager, on a CPU.

tabfm needs another jaxtyping than the environment of the tests:

    python3.11 -m venv env && env/bin/pip install 'tabfm[jax,pytorch]==1.0.1'
    env/bin/python tests/golden/make_tabfm.py

Each case is a folder: `ckpt/orbax/0/params` as `TabFM_HF.save_pretrained` writes it, and io.npz: the table, what the flax code computed in float32 with
matmul precision `highest`, and what tabfm's own PyTorch class computed from the weights of tabfm's own converter, with the SHA-256 of these weights:
name by name in their order, name and little-endian float32. The published sizes are larger; the settings are those of `tabfm_v1_0_0.Config`.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import torch
from flax import nnx
from tabfm.src.hugging_face.torch_convert import convert, jax_params
from tabfm.src.jax.checkpointing import create_checkpoint_manager
from tabfm.src.jax.model import TabFM, YEmbeddingScheme
from tabfm.src.pytorch.tabfm_v1_0_0 import TabFM_HF

HERE = Path(__file__).parent
SIZES = {
    "embed_dim": 12, "max_classes": 3, "col_num_blocks": 2, "col_nhead": 3, "col_num_inds": 4, "row_num_blocks": 3, "row_nhead": 2,
    "row_num_cls": 2, "icl_num_blocks": 2, "icl_nhead": 2, "ff_factor": 4, "feature_group_size": 3,
}  # fmt: skip
FREQUENCIES = 5
PUBLISHED = {
    "activation": "swiglu", "feature_group": True, "use_fourier_features": True, "use_bias": False,
    "y_embedding_scheme": YEmbeddingScheme.ADD_Y_TO_X_POST_EMBEDDING, "fourier_features_num_frequencies": FREQUENCIES,
}  # fmt: skip


def make(case: str, loss: str, seed: int) -> None:
    """Replace a case."""
    rng = np.random.default_rng(seed)
    model = TabFM(loss=loss, rngs=nnx.Rngs(seed), dtype=jnp.float32, **SIZES, **PUBLISHED)
    state = jax.tree.map(lambda x: x + 0.2 * rng.standard_normal(x.shape).astype(np.float32), nnx.state(model))
    nnx.update(model, state)
    table = rng.standard_normal((2, 11, 6)).astype(np.float32)
    classifies = loss == "cross_entropy"
    y = rng.integers(0, 3, (2, 11)).astype(np.int32) if classifies else rng.standard_normal((2, 11)).astype(np.float32)
    given: dict[str, Any] = {
        "x": table, "y": y, "train_size": np.array([7, 5], np.int32), "d": np.array([6, 4], np.int32), "cat_mask": rng.random((2, 6)) < 0.4
    }  # fmt: skip
    out = np.asarray(
        model(jnp.asarray(table), jnp.asarray(y), **{k: jnp.asarray(given[k]) for k in ("train_size", "d", "cat_mask")})
    )
    folder = HERE / case
    if folder.exists():
        shutil.rmtree(folder)
    manager = create_checkpoint_manager(str(folder / "ckpt"))
    manager.save(0, args=ocp.args.Composite(params=ocp.args.StandardSave(nnx.state(model))))
    manager.wait_until_finished()
    for file in folder.rglob("commit_success.txt"):
        file.write_text("Checkpoint commit was successful.")
    hidden = SIZES["embed_dim"] * SIZES["row_num_cls"] * 2
    port = TabFM_HF(is_classifier=classifies, num_freq=FREQUENCIES, decoder_hidden=hidden, **SIZES).eval()
    weights, missing = convert(jax_params(model), port)
    assert not missing, missing
    port.load_state_dict(weights, strict=True)
    with torch.no_grad():
        theirs = port(**{name: torch.from_numpy(value) for name, value in given.items()}).numpy()
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].numpy().astype("<f4").tobytes())
    np.savez_compressed(
        folder / "io.npz",
        out=out,
        torch_out=theirs,
        sha256=digest.hexdigest(),
        **{f"in_{k}": v for k, v in given.items()},
    )
    print(
        f"{case}: {len(weights)} tensors, tabfm's PyTorch class differs by {np.abs(theirs - out).max() / np.abs(out).max():.1e}"
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    make("tabfm-classification", "cross_entropy", 31)
    make("tabfm-regression", "rmse", 37)
