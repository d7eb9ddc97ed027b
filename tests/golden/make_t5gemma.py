"""Writes the golden cases of T5Gemma: the flax code of gemma 4.0.1, on a CPU, in the environment of make_gemma4.py.

    PYTHONPATH=src:tests python tests/golden/make_t5gemma.py

Each case is one file, t5gemma/CASE.npz, as make_gemma4.py writes them. The texts are longer than the window. The second text of the encoder
ends with padding, which upstream's T5Gemma masks.
"""

from __future__ import annotations

import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from make_gemma3_vision import _stand_in_for_kauldron

from convert.numerics.lift_jax import float64, lift
from support.drawn_cases import DrawnCases, drawn

HERE = Path(__file__).parent / "t5gemma"
SMALL: dict[str, Any] = {
    "num_layers": 2, "num_embed": 41, "embed_dim": 16, "hidden_dim": 20, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2,
    "final_logit_softcap": 3.0, "attn_logits_soft_cap": 5.0, "use_post_attn_norm": True, "use_post_ffw_norm": True,
    "sliding_window_size": 4, "transpose_gating_einsum": False,
}  # fmt: skip
LARGE = {"num_layers": 4, "embed_dim": 24, "hidden_dim": 28, "num_heads": 6, "transpose_gating_einsum": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # encoder, decoder: what is other than SMALL
    "t5gemma-2b-2b": ({}, {}),
    "t5gemma-9b-2b": (LARGE, {}),
    "t5gemma-s-s": ({"num_kv_heads": 4}, {"num_kv_heads": 4}),  # one leaf for queries, keys and values
}


def network(encoder: dict[str, Any], decoder: dict[str, Any]) -> Any:
    """Return upstream's T5Gemma, put together as config.py does."""
    from gemma.research.t5gemma import modules, t5gemma

    def half(sizes: dict[str, Any], **more: Any) -> Any:
        kinds = (modules.AttentionType.LOCAL_SLIDING, modules.AttentionType.GLOBAL)
        return modules.TransformerConfig(**sizes, attention_types=kinds * (sizes["num_layers"] // 2), **more)

    config = t5gemma.T5GemmaConfig(
        encoder_config=half(encoder, bidirectional=True),
        decoder_config=half(decoder, enable_cross_attention=True, kv_embed_dim=encoder["embed_dim"]),
    )
    return config.make(dtype=jnp.float32)


def main() -> None:
    """Replaces the golden cases."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    _stand_in_for_kauldron()
    sys.modules["kagglehub"] = types.ModuleType("kagglehub")  # config.py imports it, to download
    names = ("gemma", "flax", "jax", "numpy")
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{name} {version(name)}' for name in names)}")
    rng = np.random.default_rng(43)
    texts = {"input_tokens": (2, 12), "target_tokens": (2, 9)}
    tokens = {name: rng.integers(1, SMALL["num_embed"], shape).astype(np.int32) for name, shape in texts.items()}
    tokens["input_tokens"][1, -3:] = 0
    for case, others in CASES.items():
        encoder, decoder = ({**SMALL, **other} for other in others)
        model = network(encoder, decoder)
        tree = jax.eval_shape(lambda model=model: model.init(jax.random.key(0), **tokens))["params"]
        leaves = {name: drawn(f"{case}/{name}", leaf.shape) for name, leaf in flatten_dict(tree, sep="/").items()}

        def logits(leaves: Any, tokens: Any, model: Any = model) -> Any:
            return model.apply({"params": unflatten_dict(leaves, sep="/")}, **tokens).logits

        with float64():
            exact = np.asarray(lift(logits)(leaves, tokens))
        rounded = np.asarray(logits(leaves, tokens))
        given = {"encoder": encoder, "decoder": decoder}
        DrawnCases(HERE).save(case, given, leaves, tokens, {"logits": rounded}, {"logits": exact})
        print(
            f"{case}: {len(leaves)} leaves, logits {np.abs(exact).mean():.2f} on average; drift {np.abs(exact - rounded).max() / np.abs(exact).max():.1e}"
        )


if __name__ == "__main__":
    main()
