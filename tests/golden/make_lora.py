"""Writes gemma3-lora (gemma 3.3.0's Transformer in its LoRA wrapper, saved by Orbax) and lora/openpi.npz (openpi's layers), on a CPU.

    pip install -e '.[test]' && pip install --no-deps --target /some/folder gemma==3.3.0 chex==0.1.92 toolz
    git clone https://github.com/Physical-Intelligence/openpi && git -C openpi checkout 15a9616a00943ada6c20a0f158e3adb39df2ccac
    PYTHONPATH=/some/folder:openpi/src python tests/golden/make_lora.py

kauldron has the stand-in of make_gemma3_vision.py; of openpi's type annotations one name is used. All parameters are random, those of
the adapters too: B is zero in both libraries until it is trained.
"""

from __future__ import annotations

import json
import shutil
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from make_gemma3_vision import HERE, _stand_in_for_kauldron, randomize

SEED, RANK = 17, 3
CONFIG = {
    "num_embed": 61,
    "embed_dim": 16,
    "hidden_dim": 24,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
    "final_logit_softcap": None,
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
    "use_qk_norm": True,
    "sliding_window_size": 8,
    "transpose_gating_einsum": True,
    "local_base_frequency": 10_000,
    "global_base_frequency": 1_000_000,
}


def gemma(rng: np.random.Generator) -> None:
    """Replaces the golden case gemma3-lora."""
    _stand_in_for_kauldron()
    from gemma.gm.nn import _config, _lora, _modules, _transformer

    kinds = _modules.AttentionType
    config = _config.TransformerConfig(**CONFIG, attention_types=(kinds.LOCAL_SLIDING,) * 2)
    model = _lora.LoRA(rank=RANK, model=_transformer.Transformer(config=config, dtype=jnp.float32), dtype=jnp.float32)
    tokens = rng.integers(0, CONFIG["num_embed"], (2, 9)).astype(np.int32)
    variables = randomize(model.init(jax.random.key(SEED), jnp.asarray(tokens)), rng)
    folder = HERE / "gemma3-lora"
    shutil.rmtree(folder, ignore_errors=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "ckpt", variables["params"])
    (folder / "ckpt" / "commit_success.txt").write_text("Checkpoint commit was successful.")
    case = {"source": "gemma 3.3.0 gm.nn LoRA(Transformer), float32", "layout": "nested", "config": CONFIG}
    (folder / "case.json").write_text(json.dumps(case, indent=1) + "\n")
    logits = model.apply(variables, jnp.asarray(tokens)).logits
    without = jax.tree_util.tree_map_with_path(lambda path, x: x * ("lora" not in str(path)), variables)
    base = model.apply(without, jnp.asarray(tokens)).logits
    print(
        f"the adapter changes the logits by {float(jnp.abs(logits - base).max() / jnp.abs(base).max()):.2f} of the largest"
    )
    np.savez(folder / "io.npz", tokens=tokens, logits=logits, base_logits=base)


def openpi(rng: np.random.Generator) -> None:
    """Replaces lora/openpi.npz: leaves of single layers, an input and the result of each."""
    annotations = types.ModuleType("openpi.shared.array_typing")
    annotations.Array = Any  # type: ignore[attr-defined]
    shared = types.ModuleType("openpi.shared")
    shared.array_typing = annotations  # type: ignore[attr-defined]
    sys.modules |= {"openpi.shared": shared, annotations.__name__: annotations}
    import openpi as package

    package.shared = shared
    from openpi.models.lora import Einsum, FeedForward, LoRAConfig

    config = LoRAConfig(rank=RANK, alpha=6.0)
    layers = {  # models/gemma.py, Attention and FeedForward
        "q_einsum": (Einsum((4, 16, 8), lora_config=config), "BTD,NDH->BTNH", (2, 5, 16)),
        "kv_einsum": (Einsum((2, 2, 16, 8), lora_config=config), "BSD,2KDH->2BSKH", (2, 5, 16)),
        "attn_vec_einsum": (Einsum((4, 8, 16), lora_config=config), "BTNH,NHD->BTD", (2, 5, 4, 8)),
        "mlp": (FeedForward(16, 24, lora_config=config), "", (2, 5, 16)),
    }
    recorded: dict[str, Any] = {}
    for name, (layer, equation, shape) in layers.items():
        x = rng.standard_normal(shape).astype(np.float32)
        args = (equation, jnp.asarray(x)) if equation else (jnp.asarray(x),)
        variables = randomize(layer.init(jax.random.key(SEED), *args), rng)
        leaves = {f"leaf/{name}/{key}": np.asarray(leaf) for key, leaf in variables["params"].items()}
        recorded |= {**leaves, f"x/{name}": x, f"y/{name}": np.asarray(layer.apply(variables, *args))}
    (HERE / "lora").mkdir(exist_ok=True)
    np.savez(HERE / "lora" / "openpi.npz", **recorded)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    rng = np.random.default_rng(SEED)
    gemma(rng)
    openpi(rng)


if __name__ == "__main__":
    main()
