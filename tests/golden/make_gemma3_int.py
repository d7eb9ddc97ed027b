"""Writes the golden cases gemma3-int4 and gemma3-int8: Gemma 3 with the quantised weights of gemma 4.0.1, in the environment of make_gemma4.py.

    PYTHONPATH=src:tests python tests/golden/make_gemma3_int.py

`peft.quantize` makes integers and scales of random weights, Orbax saves them, and the logits are those that upstream's `IntWrapper` computes from
what lies on disk.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict
from make_gemma3_vision import _stand_in_for_kauldron

from support.drawn_cases import drawn

HERE = Path(__file__).parent
CONFIG: dict[str, Any] = {
    "num_embed": 37, "embed_dim": 16, "hidden_dim": 20, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "final_logit_softcap": None,
    "use_post_attn_norm": True, "use_post_ffw_norm": True, "use_qk_norm": True, "sliding_window_size": 4, "transpose_gating_einsum": True,
    "local_base_frequency": 10_000, "global_base_frequency": 1_000_000,
}  # fmt: skip
LAYERS = 2  # local ones: the first six are


def transformer() -> Any:
    """Return upstream's Transformer."""
    from gemma.gm.nn import _config, _modules, _transformer

    kinds = (_modules.AttentionType.LOCAL_SLIDING,) * LAYERS
    config = _config.TransformerConfig(**CONFIG, attention_types=kinds)
    return _transformer.Transformer(config=config, dtype=jnp.float32)


def main() -> None:
    """Replaces the golden cases."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    _stand_in_for_kauldron()
    from gemma import peft
    from gemma.gm.nn._quantization import IntWrapper

    names = ("gemma", "flax", "orbax-checkpoint", "jax", "numpy")
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{name} {version(name)}' for name in names)}")
    tokens = np.random.default_rng(47).integers(1, CONFIG["num_embed"], (2, 12)).astype(np.int32)
    model = transformer()
    tree = flatten_dict(jax.eval_shape(lambda: model.init(jax.random.key(0), tokens))["params"], sep="/")
    leaves = {name: jnp.asarray(drawn(f"gemma3-int/{name}", leaf.shape)) for name, leaf in tree.items()}
    for bits in (4, 8):
        params = peft.quantize(unflatten_dict(leaves, sep="/"), method=f"int{bits}")
        wrapper = IntWrapper(model=model, dtype=jnp.int4 if bits == 4 else jnp.int8)
        folder = HERE / f"gemma3-int{bits}"
        shutil.rmtree(folder, ignore_errors=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "ckpt", params)
        # Orbax writes the absolute path into this file, whose presence alone counts.
        (folder / "ckpt" / "commit_success.txt").write_text("Checkpoint commit was successful.")
        with ocp.StandardCheckpointer() as checkpointer:
            read = checkpointer.restore(folder / "ckpt", params)
        logits = np.asarray(wrapper.apply({"params": read}, tokens).logits)
        np.savez_compressed(folder / "io.npz", tokens=tokens, logits=logits)
        (folder / "case.json").write_text(json.dumps({"source": "gemma 4.0.1 IntWrapper", "config": CONFIG}, indent=1))
        for name, leaf in flatten_dict(read, sep="/").items():
            if "layer_0" in name:
                print(name, leaf.dtype, leaf.shape)
        exact = np.asarray(model.apply({"params": unflatten_dict(leaves, sep="/")}, tokens).logits)
        print(
            f"int{bits}: logits {np.abs(logits).mean():.2f}; against the weights before rounding {np.abs(logits - exact).max():.2f}"
        )


if __name__ == "__main__":
    main()
