"""ViT, SigLIP, CLIPPO, VideoPrism, and TIPS."""

from __future__ import annotations

from convert.references.published.entry import Published

_VIT_JAX = (
    Published(
        {"epsilon": 1e-6, "hidden_act": "gelu_pytorch_tanh"},
        "google-research/vision_transformer@c6de1e5 vit_jax/models_vit.py; flax.linen.LayerNorm, gelu",
    ),
    *(
        Published(
            {"image_size": patches * side},
            "the image of AugReg's files, vision_transformer README.md",
            {"P": side, "L": patches**2 + 1},
        )
        for side, patches in ((16, 14), (16, 24), (32, 7), (32, 12), (14, 16), (8, 28))
    ),
)

_VIT_BIG_VISION = (
    Published(
        {"epsilon": 1e-6, "hidden_act": "gelu_pytorch_tanh"},
        "google-research/big_vision@0127fb6 models/vit.py; flax.linen.LayerNorm, gelu",
    ),
    *(
        Published({"mlp_ratio": ratio}, "models/vit.py, decode_variant", {"D": width, "F": features})
        for width, features, ratio in (
            (192, 768, 4), (384, 1536, 4), (768, 3072, 4), (1024, 4096, 4), (1280, 5120, 4), (1152, 4304, 3.7362), (1408, 6144, 4.3637), (1664, 8192, 4.9231),
        )
    ),
)  # fmt: skip

_TOWER = (
    Published({"epsilon": 1e-6, "act_layer": "gelu_tanh"}, "google-research/big_vision@0127fb6 models/vit.py; flax.linen.LayerNorm, gelu"),
    Published({"mlp_ratio": 4}, "models/vit.py, decode_variant", {"W": 768, "M": 3072}),
    Published({"mlp_ratio": 4}, "models/vit.py, decode_variant", {"W": 1024, "M": 4096}),
    Published({"mlp_ratio": 3.7362}, "models/vit.py, decode_variant; timm 1.0.31 vision_transformer.py", {"W": 1152, "M": 4304}),
    Published({"mlp_ratio": 4}, "models/vit.py, decode_variant", {"W": 1536, "M": 6144}),
)  # fmt: skip
_VIT_POOLED = (
    *_TOWER,
    *(
        Published({"mlp_ratio": ratio}, "models/vit.py, decode_variant", {"W": width, "M": features})
        for width, features, ratio in ((192, 768, 4), (384, 1536, 4), (1280, 5120, 4), (1408, 6144, 4.3637), (1664, 8192, 4.9231))
    ),
)  # fmt: skip

_VIT_MEAN = (
    *_VIT_POOLED,
    Published(
        {"global_pool": "avg"},
        "big_vision models/vit.py, pool_type; scenic projects/baselines/vit.py, classifier",
        binding=False,
    ),
)

_SIGLIP = (
    Published({"epsilon": 1e-6}, "flax.linen.LayerNorm's default"),
    Published({"pad_token_id": 1, "eos_token_id": 1}, "google-research/big_vision@0127fb6 models/proj/image_text/text_transformer.py"),
)  # fmt: skip

_VIDEOPRISM = (
    Published(
        {"epsilon": 1e-6, "query_scale": "1 / sqrt(H)"},
        "google-deepmind/videoprism@d481d91 videoprism/layers.py, LayerNorm, DotProductAttention; encoders.py, VisionTransformer",
    ),
    Published({"attn_logit_softcapping": 50.0}, "videoprism/models.py, CONFIGS", binding=False),
)
_VIDEOPRISM_LVT = (
    *_VIDEOPRISM,
    Published(
        {
            "embedding_scale": "sqrt(D)",
            "min_timescale": 1,
            "max_timescale": 10_000,
            "pooling_scale": "1.442695041 / sqrt(G) * softplus(per_dim_scale)",
        },
        "google-deepmind/videoprism@d481d91 videoprism/encoders.py, Embedding, PositionalEmbedding; layers.py, PerDimScale",
    ),
    Published({"pad_token_id": 0}, "videoprism/models.py, tokenize_texts"),
)

_TIPS = (
    Published({"epsilon": 1e-6}, "flax.linen.LayerNorm's default"),
    Published(
        {"embedding_scale": "sqrt(D)", "min_timescale": 1, "max_timescale": 10_000, "pooling_epsilon": 1e-8},
        "google-deepmind/tips@4db271d scenic/models/text.py",
    ),
    Published({"pad_token_id": 0}, "google-deepmind/tips@4db271d scenic/models/text.py, Tokenizer"),
    Published(
        {"context_length": 64}, "google-deepmind/tips@4db271d scenic/configs/tips_model_config.py", binding=False
    ),
)

_TIPS_IMAGE = (
    Published(
        {"epsilon": 1e-6, "hidden_act": "gelu_pytorch_tanh"},
        "google-deepmind/tips@4db271d scenic/models/vit.py; flax.linen.LayerNorm, gelu",
    ),
    *(
        Published({"mlp_ratio": ratio}, "scenic/models/vit.py, get_vit_config", {"D": width, "F": features})
        for width, features, ratio in ((384, 1536, 4), (768, 3072, 4), (1024, 4096, 4), (1152, 4304, 3.7362), (1536, 4096, 4))
    ),
)  # fmt: skip

_VIT_MEAN_HEADLESS = (*_VIT_MEAN, Published({"head": "none"}, "big_vision models/vit.py, num_classes"))

MODELS: dict[str, tuple[Published, ...]] = {
    "siglip": _SIGLIP,
    "siglip-image": _TOWER,
    "clippo": _TOWER,
    "siglip-naflex-image": _TOWER,
    "siglip2-naflex": _SIGLIP,
    "vit-jax-token": _VIT_JAX,
    "vit-jax-pooler": _VIT_JAX,
    "vit-big-vision": _VIT_BIG_VISION,
    "vit-big-vision-pooler": _VIT_BIG_VISION,
    "vit-jax-map": _VIT_POOLED,
    "vit-jax-gap": _VIT_MEAN,
    "vit-jax-token-headless": _VIT_JAX,
    "vit-big-vision-headless": _VIT_BIG_VISION,
    "vit-jax-map-headless": _VIT_POOLED,
    "vit-jax-gap-headless": _VIT_MEAN_HEADLESS,
    "vit-big-vision-sincos2d": _VIT_BIG_VISION,
    "vit-jax-map-sincos2d": _VIT_POOLED,
    "vit-jax-gap-sincos2d": _VIT_MEAN,
    "vit-big-vision-sincos2d-headless": _VIT_BIG_VISION,
    "vit-jax-map-sincos2d-headless": _VIT_POOLED,
    "vit-jax-gap-sincos2d-headless": _VIT_MEAN_HEADLESS,
    "tips-image": _TIPS_IMAGE,
    "tips-image-swiglu": _TIPS_IMAGE,
    "tips-text": _TIPS,
    "videoprism-encoder": _VIDEOPRISM,
    "videoprism-lvt": _VIDEOPRISM_LVT,
}
