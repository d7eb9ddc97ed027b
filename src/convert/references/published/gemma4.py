"""Gemma 4 and Gemma 3n."""

from __future__ import annotations

from convert.references.published.entry import Every, OneOf, Published, by_letter
from convert.references.published.gemma import GLOBAL, LOCAL

_CODE = "gemma 4.0.1 gm/nn/gemma4"
_EVERY = (
    Published({"epsilon": 1e-6}, f"{_CODE}/_layers.py, RMSNorm"),
    Published(
        {"embedding_scale": "sqrt(D)", "rope": "half-split"}, f"{_CODE}/_modules.py; gm/math/_positional_embeddings.py"
    ),
    Published({"pad_token_id": 0, "bos_token_id": 2}, "gemma 4.0.1 gm/text/_tokenizer.py"),
    Published({"eos_token_id": OneOf((1, [1, 106]))}, "gemma 4.0.1 gm/text/_tokenizer.py", binding=False),
    Published(
        {
            "rope_theta_local": 10_000.0,
            "rope_theta_global": 1_000_000.0,
            "rotated_global": 0.25,
            "final_logit_softcapping": 30.0,
        },
        f"{_CODE}/_gemma4.py; transformers Gemma4TextConfig",
    ),
)
_SMALL = {"context_length": 131_072, "sliding_window": 512}
_LARGE = {"context_length": 262_144, "sliding_window": 1024}
_E2B = {"kv_shared_layers": 20, "double_wide_mlp": True, "attention_pattern": Every((LOCAL,) * 4 + (GLOBAL,))}
_E4B = {"kv_shared_layers": 18, "double_wide_mlp": False, "attention_pattern": Every((LOCAL,) * 5 + (GLOBAL,))}
_SIZES = tuple(
    Published({"vocab_size": 262_144, **facts}, f"{_CODE}/_gemma4.py; model card of Gemma 4", sizes)
    for sizes, facts in (
        (by_letter("iDNKP", 35, 1536, 8, 1, 256), {**_SMALL, **_E2B}),
        (by_letter("iDNKP", 42, 2560, 8, 2, 256), {**_SMALL, **_E4B}),
        (by_letter("iDNKL", 60, 5376, 32, 16, 4), _LARGE),
        (by_letter("iDNKLEX", 30, 2816, 16, 8, 2, 128, 704), {**_LARGE, "experts_per_token": 8}),
    )
)
_ROUTER = Published({"router_input": "residual"}, "transformers Gemma4TextDecoderLayer; vLLM; llama.cpp")
_TRANSFORMERS = "transformers 5.23 modeling_gemma4.py"
_IMAGES = (
    Published(
        {"boi_token": 255_999, "eoi_token": 258_882, "image_token": 258_880},
        "gemma 4.0.1 gm/text/_tokenizer.py; transformers Gemma4Config",
    ),
    Published({"padded_patches": "hidden"}, f"{_TRANSFORMERS}, Gemma4VisionModel"),
)
_SOUND = (
    Published(
        {"boa_token": 256_000, "eoa_token": 258_883, "audio_token": 258_881},
        "gemma 4.0.1 gm/text/_tokenizer.py; transformers Gemma4Config",
    ),
    Published(
        {"audio_norm": "before", "audio_context": 12, "padded_frames": "cleared"},
        f"{_TRANSFORMERS}, Gemma4MultimodalEmbedder, Gemma4AudioModel, Gemma4AudioSubSampleConvProjectionLayer",
    ),
)

_3N = "gemma 4.0.1 gm/nn/gemma3n"
_EVERY_3N = (
    *_EVERY[:4],
    Published(
        {
            "rope_theta_local": 10_000.0,
            "rope_theta_global": 1_000_000.0,
            "coefficient_clip": 120.0,
            "final_logit_softcapping": OneOf(
                (1e30, 30.0)
            ),  # none, as gemma computes; as transformers' config.json says
            "attention_pattern": Every((LOCAL,) * 4 + (GLOBAL,)),
        },
        f"{_3N}/_gemma3n.py; transformers Gemma3nTextConfig",
    ),
)
_SIZES_3N = tuple(
    Published(
        {
            "vocab_size": 262_144,
            "context_length": 32_768,
            "sliding_window": 512,
            "kv_shared_layers": layers - 20,
            "activation_sparsity": [0.95] * 10 + [0.0] * (layers - 10),
        },
        f"{_3N}/_gemma3n.py; transformers Gemma3nTextConfig",
        by_letter("iDNKHF", layers, 2048, 8, 2, 256, width),
    )
    for layers, width in ((30, 8192), (35, 16384))
)

MODELS: dict[str, tuple[Published, ...]] = {
    "gemma3n": (*_EVERY_3N, *_SIZES_3N),
    **dict.fromkeys(("gemma4", "gemma4_e"), (*_EVERY, *_SIZES)),
    "gemma4_moe": (*_EVERY, *_SIZES, _ROUTER),
    "gemma4_vision": (*_EVERY, *_SIZES, *_IMAGES),
    "gemma4_moe_vision": (*_EVERY, *_SIZES, _ROUTER, *_IMAGES),
    "gemma4_e_towers": (*_EVERY, *_SIZES, *_IMAGES, *_SOUND),
}
