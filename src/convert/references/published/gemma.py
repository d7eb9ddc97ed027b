"""Gemma 1, 2, 3 and PaliGemma."""

from __future__ import annotations

from convert.references.published.entry import Every, OneOf, Published, by_letter, without

_GEMMA = "google-deepmind/gemma@7691fd4"
_LAYERS, _CODE = f"{_GEMMA} gm/nn/_layers.py", f"{_GEMMA} gm/nn/_gemma.py"
_TOKENS = f"{_GEMMA} gm/text/_tokenizer.py"
_PALI = "google-research/big_vision@0127fb6 models/ppp/gemma.py"
_SIGLIP = "flax.linen.LayerNorm's default"
LOCAL, GLOBAL = "sliding_attention", "full_attention"

_EVERY_GEMMA = (
    Published({"epsilon": 1e-6}, f"{_LAYERS}, RMSNorm"),
    Published({"embedding_scale": "sqrt(D)"}, f"{_GEMMA} gm/nn/_modules.py, Embedder.encode"),
    Published({"rope": "half-split"}, f"{_GEMMA} gm/math/_positional_embeddings.py"),
    Published({"pad_token_id": 0, "bos_token_id": 2}, _TOKENS),
)
_TURN_107 = Published({"eos_token_id": OneOf((1, [1, 107]))}, _TOKENS, binding=False)
_TURN_106 = Published({"eos_token_id": OneOf((1, [1, 106]))}, _TOKENS, binding=False)
_GEMMA_1 = (
    *_EVERY_GEMMA,
    _TURN_107,
    Published({"rope_theta": 10_000.0}, f"{_GEMMA} gm/nn/_modules.py; transformers GemmaConfig"),
    Published({"query_scale": "1 / sqrt(H)"}, f"{_GEMMA} gm/nn/_modules.py, Attention"),
)
_GEMMA_1_SIZES = tuple(
    Published(
        {"context_length": 8192, "vocab_size": 256_000}, "transformers GemmaConfig; gemma_pytorch config.py", sizes
    )
    for sizes in (by_letter("iDNKHF", 18, 2048, 8, 1, 256, 16384), by_letter("iDNKHF", 28, 3072, 16, 16, 256, 24576))
)
_GEMMA_2 = (
    *_EVERY_GEMMA,
    _TURN_107,
    Published(
        {
            "rope_theta": 10_000.0,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "attention_pattern": Every((LOCAL, GLOBAL)),
        },
        f"{_CODE}, Gemma2_2B; arXiv 2408.00118, section 2; transformers Gemma2Config",
    ),
    Published({"context_length": 8192}, "arXiv 2408.00118, section 2; transformers Gemma2Config", binding=False),
)
# the number by whose square root attention is divided, by size
_GEMMA_2_SIZES = (
    (by_letter("iDNKHF", 26, 2304, 8, 4, 256, 9216), 256),
    (by_letter("iDNKHF", 42, 3584, 16, 8, 256, 14336), 256),
    (by_letter("iDNKHF", 46, 4608, 32, 16, 128, 36864), 144),
)
_GEMMA_2_PUBLISHED = tuple(
    Published(
        {"sliding_window": 4096, "vocab_size": 256_000, "query_pre_attn_scalar": scalar},
        f"{_CODE}, Gemma2_*; arXiv 2408.00118, table 1",
        sizes,
    )
    for sizes, scalar in _GEMMA_2_SIZES
)
_GEMMA_3 = (
    *_EVERY_GEMMA,
    _TURN_106,
    Published(
        {
            "rope_theta_local": 10_000.0,
            "rope_theta_global": 1_000_000.0,
            "attention_pattern": Every((LOCAL, LOCAL, LOCAL, LOCAL, LOCAL, GLOBAL)),
        },
        f"{_CODE}, Gemma3_*; arXiv 2503.19786, section 2; transformers Gemma3TextConfig",
    ),
)
# context, window, scalar and the factor of the global layers' positions, by size
_GEMMA_3_SIZES = (
    (by_letter("iDNKHF", 18, 640, 4, 1, 256, 2048), 32_768, 512, 256, 1.0),
    (by_letter("iDNKHF", 26, 1152, 4, 1, 256, 6912), 32_768, 512, 256, 1.0),
    (by_letter("iDNKHF", 34, 2560, 8, 4, 256, 10240), 131_072, 1024, 256, 8.0),
    (by_letter("iDNKHF", 48, 3840, 16, 8, 256, 15360), 131_072, 1024, 256, 8.0),
    (by_letter("iDNKHF", 62, 5376, 32, 16, 128, 21504), 131_072, 1024, 168, 8.0),
)
_GEMMA_3_PUBLISHED = tuple(
    Published(
        {
            "context_length": context,
            "sliding_window": window,
            "query_pre_attn_scalar": scalar,
            "rope_factor_global": factor,
            "vocab_size": 262_144,
            "mm_tokens_per_image": 256,
        },
        f"{_CODE}, Gemma3_*; arXiv 2503.19786, table 1 and section 2",
        sizes,
    )
    for sizes, context, window, scalar, factor in _GEMMA_3_SIZES
)
_VISION = Published({"vision_epsilon": 1e-6}, _SIGLIP)
_IMAGE_TOKENS = Published(
    {"boi_token": 255_999, "eoi_token": 256_000, "image_token": 262_144}, f"{_TOKENS}; transformers Gemma3Config"
)
_PALI_TOKENS = Published(
    {"vocab_size": 257_152, "image_token": 257_152},
    "google-research/big_vision@0127fb6 models/ppp/gemma.py, load; transformers PaliGemmaConfig",
    binding=False,
)
_PALI_2 = Published(
    {"attention_pattern": Every((GLOBAL,)), "final_logit_softcapping": None, "attn_logit_softcapping": 50.0},
    f"{_PALI}: no layer has a window, and `compute_logits` does not cap",
)

MODELS: dict[str, tuple[Published, ...]] = {
    "gemma1": (*_GEMMA_1, *_GEMMA_1_SIZES),
    "gemma2": (*_GEMMA_2, *_GEMMA_2_PUBLISHED),
    "gemma3": (*_GEMMA_3, *_GEMMA_3_PUBLISHED),
    "gemma3_vision": (*_GEMMA_3, *_GEMMA_3_PUBLISHED, _VISION, _IMAGE_TOKENS),
    "paligemma1": (*_GEMMA_1, *without(_GEMMA_1_SIZES, "vocab_size"), _VISION, _PALI_TOKENS),
    "paligemma2": (
        *without(_GEMMA_2, "attention_pattern", "final_logit_softcapping"),
        *without(_GEMMA_2_PUBLISHED, "vocab_size"),
        _PALI_2,
        _VISION,
        _PALI_TOKENS,
    ),
}  # fmt: skip
