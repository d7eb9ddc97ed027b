"""Writes the golden cases of Gemma 4 and Gemma 3n: the flax code of gemma 4.0.1, on a CPU.

gemma 4 needs Python 3.12:

    pip install numpy jax==0.10.2 flax==0.12.8 orbax-checkpoint==0.12.8 einops sentencepiece jaxtyping pillow pyyaml && pip install --no-deps gemma==4.0.1
    PYTHONPATH=src:tests python tests/golden/make_gemma4.py

Of kauldron, which needs TensorFlow, gemma's modules use type annotations and one identity layer; `_stand_in_for_kauldron` has those.
Each case is one file, gemma4/CASE.npz: the configuration, names and shapes of the parameters, the tokens, and the logits that upstream's
Transformer computed from them, in float32 with matmul precision `highest` and in float64 with casts removed. The weights are those of `drawn`
in tests/support/drawn_cases.py.
"""

from __future__ import annotations

import sys
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

HERE = Path(__file__).parent / "gemma4"
SIZES: dict[str, Any] = {
    "num_embed": 37, "embed_dim": 16, "hidden_dim": 20, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "global_key_size": 16,
    "final_logit_softcap": 3.0, "use_post_attn_norm": True, "use_post_ffw_norm": True, "sliding_window_size": 4,
    "global_rope_proportion": 0.25, "local_rope_proportion": 1.0, "local_base_frequency": 10_000, "global_base_frequency": 1_000_000,
}  # fmt: skip
KEYS_ARE_VALUES = {"num_heads": 6, "num_kv_heads": 3, "num_global_kv_heads": 2, "k_eq_v_global": True}
PER_LAYER = {"per_layer_input_dim": 6}
EXPERTS = {"enable_moe": True, "num_experts": 5, "expert_dim": 12, "top_k_experts": 2, "moe_dense_hidden_dim": 20}
CASES: dict[str, dict[str, Any]] = {
    "gemma4-e2b": {**PER_LAYER, "num_kv_heads": 1, "shared": 0.5, "override_kv_shared_ffw_hidden": 40},
    "gemma4-e4b": {**PER_LAYER, "shared": 0.5},
    "gemma4-31b": KEYS_ARE_VALUES,
    "gemma4-26b-a4b": {**KEYS_ARE_VALUES, **EXPERTS},
}  # fmt: skip
PATTERN, LAYERS = "LG", 4
GEMMA_3N: dict[str, Any] = {  # gm/nn/gemma3n/_gemma3n.py, smaller
    "num_embed": 37, "embed_dim": 16, "hidden_dim": 20, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "final_logit_softcap": None,
    "use_post_attn_norm": True, "use_post_ffw_norm": True, "use_qk_norm": True, "use_value_norm": True, "sliding_window_size": 4,
    "transpose_gating_einsum": True, "local_base_frequency": 10_000, "global_base_frequency": 1_000_000,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0], "use_altup": True, "num_altup_inputs": 4, "altup_coef_clip": 120.0,
    "per_layer_input_dim": 6, "use_laurel": True, "laurel_rank": 3, "scale_plus_one": False, "guard_against_excess_precision": True,
    "shared": 0.5,
}  # fmt: skip
CASES["gemma3n"] = GEMMA_3N


def transformer(case: str, given: dict[str, Any]) -> Any:
    """Return upstream's Transformer of a case."""
    given, more = dict(given), {}
    if case == "gemma3n":
        from gemma.gm.nn.gemma3n import _config, _modules, _transformer

        network = _transformer.Gemma3nTransformer
        more["query_pre_attn_norm"] = _config.QueryPreAttentionNormalisation.NONE
    else:
        from gemma.gm.nn.gemma4 import _config, _modules, _transformer

        network = _transformer.Transformer
    shared = given.pop("shared", 0.0)
    kinds = {"L": _modules.AttentionType.LOCAL_SLIDING, "G": _modules.AttentionType.GLOBAL}
    config = _config.TransformerConfig(
        **given,
        **more,
        attention_types=_config.make_attention_layers_types(tuple(kinds[x] for x in PATTERN), num_layers=LAYERS),
        kv_cache_sharing_config=_config.KVCacheSharingConfig(shared, True, True) if shared else None,
    )
    return network(config=config, dtype=jnp.float32)


def main() -> None:
    """Replaces the golden cases."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    _stand_in_for_kauldron()
    names = ("gemma", "flax", "jax", "numpy")
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{name} {version(name)}' for name in names)}")
    tokens = np.random.default_rng(41).integers(1, SIZES["num_embed"], (2, 12)).astype(np.int32)
    for case, other in CASES.items():
        config = other if case == "gemma3n" else {**SIZES, **other}
        model = transformer(case, config)
        tree = jax.eval_shape(lambda model=model: model.init(jax.random.key(0), tokens))["params"]
        leaves = {name: drawn(f"{case}/{name}", leaf.shape) for name, leaf in flatten_dict(tree, sep="/").items()}

        def logits(leaves: Any, tokens: Any, model: Any = model) -> Any:
            return model.apply({"params": unflatten_dict(leaves, sep="/")}, tokens).logits

        with float64():
            exact = np.asarray(lift(logits)(leaves, tokens))
        rounded = {"logits": np.asarray(logits(leaves, tokens))}
        DrawnCases(HERE).save(
            case,
            {**config, "layers": LAYERS, "pattern": PATTERN},
            leaves,
            {"tokens": tokens},
            rounded,
            {"logits": exact},
        )
        print(
            f"{case}: {len(leaves)} leaves, logits {np.abs(exact).mean():.2f} on average, {np.abs(exact).max():.2f} at most; drift {np.abs(exact - rounded['logits']).max() / np.abs(exact).max():.1e}"
        )


if __name__ == "__main__":
    main()
