"""T5X's T5 1.0, 1.1, mT5, ByT5, UL2, UMT5, LongT5, Pix2Struct and Switch Transformers."""

from __future__ import annotations

from convert.references.published.entry import Published

_T5X_AT = "google-research/t5x@cc342d4 t5x/examples"
_T5X = (
    Published(
        {"layer_norm_epsilon": 1e-6, "relative_attention_max_distance": 128}, f"{_T5X_AT}/t5/layers.py, network.py"
    ),
    Published(
        {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1},
        "seqio/vocabularies.py, feature_converters.py",
        binding=False,
    ),
)
_T5X_1_0 = (
    *_T5X,
    Published({"feed_forward_proj": "relu"}, f"{_T5X_AT}/t5/t5_1_0/*.gin, mlp_activations", binding=False),
)
_T5X_GATED = (
    *_T5X,
    Published(
        {"feed_forward_proj": "gated-gelu"}, f"{_T5X_AT}/t5/{{t5_1_1,mt5,byt5}}/*.gin, mlp_activations", binding=False
    ),
    Published(
        {"feed_forward_proj": "gated-silu"},
        "google-research/google-research ul2/README.md",
        {"i": 32, "j": 32, "D": 4096, "F": 16384},
    ),
)

_FLAXFORMER = "google/flaxformer@399ea3a flaxformer"
_LONG = (
    Published(
        {
            "layer_norm_epsilon": 1e-6,
            "relative_attention_max_distance": 128,
            "local_radius": 127,
            "tokens_per_block": 16,
        },
        f"{_FLAXFORMER}/components/layer_norm.py, t5x/configs/longt5/architectures/*.gin",
    ),
    _T5X[1],
    Published(
        {"feed_forward_proj": "gated-gelu"}, f"{_FLAXFORMER}/t5x/configs/longt5/architectures/*.gin", binding=False
    ),
)
_PIX2STRUCT = (
    Published(
        {"layer_norm_epsilon": 1e-6, "relative_attention_max_distance": 128, "activation": "gelu_new"},
        f"{_FLAXFORMER}/components/layer_norm.py; google-research/pix2struct@945f27e pix2struct/configs/models/*.gin",
    ),
    _T5X[1],
)

_SWITCH = (
    Published(
        {"layer_norm_epsilon": 1e-6, "relative_attention_max_distance": 128, "dense_act_fn": "relu"},
        f"{_FLAXFORMER}/components/layer_norm.py, t5x/configs/moe/architectures/moe.gin, models/switch_base.gin",
    ),
    _T5X[1],
    Published({"expert_capacity": 64}, "transformers SwitchTransformersConfig", binding=False),
)

MODELS: dict[str, tuple[Published, ...]] = {
    "t5x-1.0": _T5X_1_0,
    **dict.fromkeys(("t5x-1.1", "t5x-mt5", "t5x-umt5", "t5x-umt5-tied"), _T5X_GATED),
    **dict.fromkeys(("t5x-longt5", "t5x-longt5-local"), _LONG),
    "pix2struct": _PIX2STRUCT,
    **dict.fromkeys(("t5x-switch", "t5x-switch-c"), _SWITCH),
}  # fmt: skip
