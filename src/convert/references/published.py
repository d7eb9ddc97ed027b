"""What the families were published with: facts that no weight holds, each with its source, apart from the rules.

The JAX model of a reference is often built from the facts of the rules, so a wrong fact is on both sides of the comparison.
This table is the other side: its numbers were copied from upstream's code, not from the rules. A test compares it with the
configuration classes of the packages that are installed there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Every:
    """A list that repeats: layer k has word k modulo the length."""

    period: tuple[str, ...]

    def __str__(self) -> str:
        return f"({', '.join(self.period)}) again and again"


@dataclass(frozen=True)
class OneOf:
    """Several published values."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return " or ".join(map(str, self.values))


@dataclass(frozen=True)
class Published:
    """Facts of a family, or of one of its sizes.

    Attributes:
        facts: by their names in the rules.
        source: where upstream states them.
        sizes: axis letters -> sizes of the models that the facts hold for; empty: all models of the family.
        binding: whether a model of these sizes with another value contradicts the source. Otherwise other models exist.
    """

    facts: Mapping[str, Any]
    source: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    binding: bool = True


def published(model: str, sizes: Mapping[str, int]) -> Iterator[Published]:
    """Yield what holds for a model with these sizes.

    Args:
        model: name of the rules.
    """
    for entry in PUBLISHED.get(model, ()):
        if all(sizes.get(letter) == size for letter, size in entry.sizes.items()):
            yield entry


def _sizes(letters: str, *numbers: int) -> dict[str, int]:
    return dict(zip(letters, numbers, strict=True))


# ---- Gemma

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
    for sizes in (_sizes("iDNKHF", 18, 2048, 8, 1, 256, 16384), _sizes("iDNKHF", 28, 3072, 16, 16, 256, 24576))
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
    (_sizes("iDNKHF", 26, 2304, 8, 4, 256, 9216), 256),
    (_sizes("iDNKHF", 42, 3584, 16, 8, 256, 14336), 256),
    (_sizes("iDNKHF", 46, 4608, 32, 16, 128, 36864), 144),
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
    (_sizes("iDNKHF", 18, 640, 4, 1, 256, 2048), 32_768, 512, 256, 1.0),
    (_sizes("iDNKHF", 26, 1152, 4, 1, 256, 6912), 32_768, 512, 256, 1.0),
    (_sizes("iDNKHF", 34, 2560, 8, 4, 256, 10240), 131_072, 1024, 256, 8.0),
    (_sizes("iDNKHF", 48, 3840, 16, 8, 256, 15360), 131_072, 1024, 256, 8.0),
    (_sizes("iDNKHF", 62, 5376, 32, 16, 128, 21504), 131_072, 1024, 168, 8.0),
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


def _without(entries: tuple[Published, ...], *names: str) -> tuple[Published, ...]:
    """Return the entries without facts that another model has otherwise."""
    return tuple(
        Published({k: v for k, v in e.facts.items() if k not in names}, e.source, e.sizes, e.binding) for e in entries
    )


# ---- Llama 3

_LLAMA = "meta-llama/llama-models models/llama3/args.py and its params.json files"
_LLAMA_SIZES = (
    _sizes("iDNKHF", 32, 4096, 32, 8, 128, 14336),
    _sizes("iDNKHF", 80, 8192, 64, 8, 128, 28672),
    _sizes("iDNKHF", 126, 16384, 128, 8, 128, 53248),
)
_LLAMA_3 = (
    Published({"epsilon": 1e-5, "rope_theta": 500_000.0}, _LLAMA),
    Published({"eos_token_id": OneOf((128_001, [128_001, 128_009], [128_001, 128_008, 128_009])), "bos_token_id": 128_000}, _LLAMA, binding=False),
)  # fmt: skip

# ---- TimesFM

_DECODER = "timesfm 1.3 patched_decoder.py"
_QUANTILES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
_QUERY_SCALE = "1.442695041 / sqrt(H) * softplus(per_dim_scale)"
_TIMESFM_1 = (
    Published(
        {"epsilon": 1e-6, "min_timescale": 1, "max_timescale": 10_000, "query_scale": _QUERY_SCALE},
        "praxis normalizations.py, embedding_softmax.py, attentions.py; transformers TimesFmConfig",
    ),
    Published(
        {"quantiles": _QUANTILES, "pad_value": 1123581321.0, "tolerance": 1e-6, "attention_mask": "causal and padding"},
        f"{_DECODER}; transformers TimesFmConfig",
    ),
    Published(
        {"use_positional_embedding": True, "context_length": 512},
        "google/timesfm-1.0-200m, its README; timesfm 1.3 timesfm_base.py",
        _sizes("iDNHF", 20, 1280, 16, 80, 1280),
    ),
    Published(
        {"use_positional_embedding": False, "context_length": 2048},
        "google/timesfm-2.0-500m, its README; timesfm 1.3 timesfm_base.py",
        _sizes("iDNHF", 50, 1280, 16, 80, 1280),
    ),
)
_TIMESFM_2P5 = (
    Published(
        {"epsilon": 1e-6, "rope_theta": 10_000.0, "rope": "half-split", "query_scale": _QUERY_SCALE, "attention_mask": "causal and padding"},
        "timesfm 3.0.2 timesfm/flax/normalization.py, transformer.py; transformers TimesFm2_5Config",
    ),
    Published(
        {"quantiles": _QUANTILES, "decode_index": 5, "context_length": 16_384},
        "timesfm 3.0.2 timesfm_2p5_base.py, TimesFM_2p5_200M_Definition; transformers TimesFm2_5Config",
    ),
)  # fmt: skip

# ---- RecurrentGemma

_GRIFFIN = "recurrentgemma 1.0.1 recurrentgemma/jax"
_RECURRENT = (
    Published({"epsilon": 1e-6, "decay": 8.0}, f"{_GRIFFIN}/layers.py, RMSNorm and RGLRU"),
    Published(
        {"rope": "half-split", "rope_theta": 10_000.0, "rotated": 0.5, "embedding_scale": "sqrt(D), rounded to bfloat16"},
        f"{_GRIFFIN}/modules.py, _apply_rope, _MAX_WAVELENGTH, Embedder",
    ),
    *(
        Published(
            {"attention_window": 2048, "logits_soft_cap": 30.0}, "recurrentgemma 1.0.1 recurrentgemma/common.py, Preset", sizes
        )
        for sizes in (_sizes("iDNRF", 26, 2560, 10, 2560, 7680), _sizes("iDNRF", 38, 4096, 16, 4096, 12288))
    ),
)  # fmt: skip

# ---- the flax classes of transformers: the values where config.json states none

_FLAX = "transformers 4.46.3 models"


def _heads(names: tuple[str, ...], source: str, **by_width: int) -> tuple[Published, ...]:
    """Return the published numbers of heads by the width of the model, ``D768=12``."""
    return tuple(
        Published(dict.fromkeys(names, heads), source, {"D": int(width[1:])}, binding=False)
        for width, heads in by_width.items()
    )


_BERT = (
    Published({"layer_norm_eps": 1e-12, "hidden_act": "gelu"}, f"{_FLAX}/bert/configuration_bert.py; transformers BertConfig"),
    *_heads(("num_attention_heads",), "google-research/bert README.md", D768=12, D1024=16),
)  # fmt: skip
_GPT2 = (
    Published(
        {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"},
        f"{_FLAX}/gpt2/configuration_gpt2.py; transformers GPT2Config; openai/gpt-2 src/model.py",
    ),
    *_heads(("n_head",), "openai/gpt-2 hparams.json of each size", D768=12, D1024=16, D1280=20, D1600=25),
)
_T5 = (
    Published(
        {"layer_norm_epsilon": 1e-6, "relative_attention_max_distance": 128},
        f"{_FLAX}/t5/configuration_t5.py; transformers T5Config",
    ),
)
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
_TABFM = (
    Published(
        {
            "epsilon": 1e-6,
            "rope": "interleaved",
            "query_scale": "1.442695041 / sqrt(head width) * softplus(per_dim_scale)",
        },
        "tabfm 1.0.1 tabfm/src/jax/model.py",
    ),
)
_OPENPI = (
    Published(
        {"epsilon": 1e-6, "embedding_scale": "sqrt(D)", "query_scale": "1 / sqrt(H)", "rope": "half-split", "rope_theta": 10000.0},
        "Physical-Intelligence/openpi@15a9616 src/openpi/models/{gemma,gemma_fast,siglip}.py",
    ),
    Published(
        {"image_token": 257152, "context_length": 8192, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1},
        "config.json of google/paligemma-3b-pt-224",
        binding=False,
    ),
)  # fmt: skip
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
_WHISPER = (
    Published({"epsilon": 1e-5}, f"{_FLAX}/whisper/modeling_flax_whisper.py, nn.LayerNorm(epsilon=1e-05)"),
    Published({"activation_function": "gelu"}, "openai/whisper model.py; transformers WhisperConfig"),
    *_heads(
        ("encoder_attention_heads", "decoder_attention_heads"),
        "arXiv 2212.04356, table 1",
        D384=6, D512=8, D768=12, D1024=16, D1280=20,
    ),
)  # fmt: skip

# Flax's code of these three has RoPE's base as a constant and does not read that of config.json.
_ROTARY = Published({"rope_theta": 10_000.0}, f"{_FLAX}/*/modeling_flax_*.py, create_sinusoidal_positions")
_LLAMA_FLAX = (
    _ROTARY,
    Published(
        {"rms_norm_eps": 1e-6, "hidden_act": "silu"}, f"{_FLAX}/llama/configuration_llama.py; transformers LlamaConfig"
    ),
)
_MISTRAL_FLAX = (
    _ROTARY,
    Published(
        {"rms_norm_eps": 1e-6, "hidden_act": "silu", "sliding_window": 4096},
        f"{_FLAX}/mistral/configuration_mistral.py; transformers MistralConfig",
    ),
)
_GEMMA_FLAX = (
    _ROTARY,
    Published({"rms_norm_eps": 1e-6}, f"{_FLAX}/gemma/configuration_gemma.py; transformers GemmaConfig"),
    Published({"hidden_activation": "gelu_pytorch_tanh"}, f"{_FLAX}/gemma/modeling_flax_gemma.py, FlaxGemmaMLP"),
)

_DINOV2_SIZES = "transformers 4.46.3 models/dinov2/convert_dinov2_to_hf.py, get_dinov2_config"
_DINOV2 = (
    Published(
        {"layer_norm_eps": 1e-6, "hidden_act": "gelu"}, f"{_FLAX}/dinov2/configuration_dinov2.py; transformers Dinov2Config"
    ),
    Published({"mlp_ratio": 4, "layerscale_value": 1.0}, "transformers Dinov2Config", binding=False),
    *_heads(("num_attention_heads",), _DINOV2_SIZES, D384=6, D768=12, D1024=16),
)  # fmt: skip

# ---- Keras Hub

_KERAS = "keras-hub 0.32.0 src/models"
_KERAS_GEMMA = (
    Published({"layer_norm_epsilon": 1e-6, "embedding_scale": "sqrt(D)"}, f"{_KERAS}/gemma/gemma_backbone.py"),
    Published({"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0}, "transformers GemmaConfig", binding=False),
    Published({"context_length": 8192}, f"{_KERAS.removesuffix('models')}utils/transformers/export/gemma.py", binding=False),
)  # fmt: skip
_KERAS_LLAMA = (
    Published({"layer_norm_epsilon": 1e-6, "rope_max_wavelength": 1e4}, f"{_KERAS}/llama/llama_backbone.py", binding=False),
)  # fmt: skip
_KERAS_LLAMA_3 = (
    *_KERAS_LLAMA,
    Published(
        {"rope_frequency_adjustment_factor": 8.0, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_pretraining_sequence_length": 8192},
        "config.json of meta-llama/Llama-3.1-8B",
        binding=False,
    ),
)  # fmt: skip

# ---- MaxText's decoders

_MAXTEXT = "maxtext 0.2.5 configs/models"
_EXPORTER = "maxtext 0.2.5 checkpoint_conversion/utils/hf_model_configs.py"


def _contexts(source: str, lengths: Mapping[int, int]) -> Iterator[Published]:
    """Yield the context of each number of layers; a longer one of a fine-tuned model contradicts nothing."""
    for layers, length in lengths.items():
        yield Published({"context_length": length}, source, {"i": layers}, binding=False)


def _mistral(lengths: Mapping[int, int]) -> tuple[Published, ...]:
    return (
        Published({"epsilon": 1e-5, "rope_theta": 1e6}, f"{_MAXTEXT}/mistral-7b.yml, mixtral-8x*.yml"),
        Published({"eos_token_id": 2, "bos_token_id": 1}, "transformers MistralConfig, MixtralConfig", binding=False),
        *_contexts("config.json of mistralai's repositories", lengths),
    )


def _qwen(lengths: Mapping[int, int], rope_theta: Mapping[int, float] | None = None) -> tuple[Published, ...]:
    """Return what holds for Qwen; `rope_theta` by the number of layers, where the sizes differ in it."""
    source = f"{_MAXTEXT}/qwen2.5-*.yml, qwen3-*.yml"
    bases = (
        [Published({"rope_theta": 1e6}, source)]
        if rope_theta is None
        else [
            Published({"rope_theta": base}, source, {"i": layers}, binding=False) for layers, base in rope_theta.items()
        ]
    )
    return (
        Published({"epsilon": 1e-6}, source),
        *bases,
        Published({"eos_token_id": OneOf((151645, 151643)), "bos_token_id": 151643}, _EXPORTER, binding=False),
        *_contexts(_EXPORTER, lengths),
    )


PUBLISHED: Mapping[str, tuple[Published, ...]] = {
    "gemma1": (*_GEMMA_1, *_GEMMA_1_SIZES),
    "gemma2": (*_GEMMA_2, *_GEMMA_2_PUBLISHED),
    "gemma3": (*_GEMMA_3, *_GEMMA_3_PUBLISHED),
    "gemma3_vision": (*_GEMMA_3, *_GEMMA_3_PUBLISHED, _VISION, _IMAGE_TOKENS),
    "paligemma1": (*_GEMMA_1, *_without(_GEMMA_1_SIZES, "vocab_size"), _VISION, _PALI_TOKENS),
    "paligemma2": (
        *_without(_GEMMA_2, "attention_pattern", "final_logit_softcapping"),
        *_without(_GEMMA_2_PUBLISHED, "vocab_size"),
        _PALI_2,
        _VISION,
        _PALI_TOKENS,
    ),
    "maxtext-gemma2": (*_GEMMA_2, *_GEMMA_2_PUBLISHED),
    "maxtext-gemma3": (*_GEMMA_3, *_GEMMA_3_PUBLISHED),
    "maxtext-llama3": (*_LLAMA_3, *(Published({"context_length": 8192}, _LLAMA, sizes) for sizes in _LLAMA_SIZES)),
    "maxtext-llama3.1": (
        *_LLAMA_3,
        *(Published({"context_length": 131_072, "rope_factor": 8.0}, _LLAMA, sizes) for sizes in _LLAMA_SIZES),
    ),
    "maxtext-mistral": _mistral({32: 32768}),
    "maxtext-mixtral": (*_mistral({32: 32768, 56: 65536}), Published({"experts_per_token": 2}, f"{_MAXTEXT}/mixtral-8x*.yml")),
    **dict.fromkeys(("maxtext-qwen2.5", "maxtext-qwen2.5-tied"), _qwen({28: 32768, 48: 32768})),
    **dict.fromkeys(("maxtext-qwen3", "maxtext-qwen3-tied"), _qwen({28: 40960, 36: 40960, 40: 40960, 64: 40960})),
    "maxtext-qwen3-moe": (
        *_qwen({48: 262144, 94: 262144, 62: 262144}, rope_theta={48: 1e7, 94: 5e6, 62: 1e7}),
        Published({"experts_per_token": 8}, f"{_MAXTEXT}/qwen3-*-a*b.yml"),
    ),
    "maxtext-gpt-oss": (
        Published({"epsilon": 1e-5, "rope_theta": 1.5e5, "rope_factor": 32.0, "rope_original_length": 4096, "swiglu_limit": 7.0}, f"{_MAXTEXT}/gpt-oss-*.yml"),
        Published({"attention_pattern": Every(("sliding_attention", "full_attention"))}, "maxtext 0.2.5 models/gpt_oss.py, GPT_OSS_ATTENTION_PATTERN"),
        Published({"context_length": 131072, "sliding_window": 128, "experts_per_token": 4}, f"{_MAXTEXT}/gpt-oss-*.yml"),
        Published({"eos_token_id": 200002, "pad_token_id": 199999}, _EXPORTER, binding=False),
    ),
    "maxtext-deepseek3": (
        Published({"epsilon": 1e-6, "rope_theta": 1e4, "rope_factor": 40.0, "rope_mscale": 1.0, "rope_original_length": 4096, "context_length": 163840}, f"{_MAXTEXT}/deepseek3-671b.yml"),
        Published({"experts_per_token": 8, "shared_experts": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}, f"{_MAXTEXT}/deepseek3-671b.yml"),
        Published({"eos_token_id": 1, "bos_token_id": 0}, _EXPORTER, binding=False),
    ),
    "maxtext-deepseek2": (
        Published({"epsilon": 1e-6, "rope_theta": 1e4, "rope_factor": 40.0, "rope_mscale": 0.707, "rope_original_length": 4096, "context_length": 163840}, f"{_MAXTEXT}/deepseek2-16b.yml"),
        Published({"experts_per_token": 6, "shared_experts": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}, f"{_MAXTEXT}/deepseek2-16b.yml"),
        Published({"eos_token_id": 100001, "bos_token_id": 100000}, _EXPORTER, binding=False),
    ),
    "maxtext-olmo3": (
        Published({"epsilon": 1e-6, "rope_theta": 5e5, "attention_pattern": Every(("sliding_attention",) * 3 + ("full_attention",))}, f"{_MAXTEXT}/olmo3-*.yml; models/olmo3.py, get_attention_type"),
        Published({"sliding_window": 4096, "rope_factor": 8.0, "rope_original_length": 8192, "context_length": 65536}, f"{_MAXTEXT}/olmo3-*.yml", binding=False),
        Published({"eos_token_id": 100257, "pad_token_id": 100277}, "config.json of allenai/Olmo-3-1025-7B", binding=False),
    ),
    "timesfm-1": _TIMESFM_1,
    "timesfm-2.5": _TIMESFM_2P5,
    "recurrentgemma": _RECURRENT,
    "siglip": (
        Published({"epsilon": 1e-6}, _SIGLIP),
        Published({"pad_token_id": 1, "eos_token_id": 1}, "google-research/big_vision@0127fb6 models/proj/image_text/text_transformer.py"),
    ),
    **dict.fromkeys(("bert_masked_lm", "bert_pretraining", "bert_model", "bert_classification", "bert_tokens", "bert_answers"), _BERT),
    **dict.fromkeys(("gpt2_lm", "gpt2_lm_untied", "gpt2_model"), _GPT2),
    **dict.fromkeys(("t5_tied", "t5_untied", "t5_model", "t5_encoder"), _T5),
    "t5x-1.0": _T5X_1_0,
    **dict.fromkeys(("t5x-1.1", "t5x-mt5", "t5x-umt5", "t5x-umt5-tied"), _T5X_GATED),
    **dict.fromkeys(("tabfm-classification", "tabfm-regression"), _TABFM),
    **dict.fromkeys(("pi0", "pi05", "pi0-fast"), _OPENPI),
    "vit-jax": _VIT_JAX,
    "keras-gemma": _KERAS_GEMMA,
    "keras-gemma2": (
        *_KERAS_GEMMA,
        Published({"attention_pattern": Every((LOCAL, GLOBAL))}, f"{_KERAS}/gemma/gemma_backbone.py"),
        Published({"attention_logit_soft_cap": 50.0, "final_logit_soft_cap": 30.0, "sliding_window_size": 4096}, "config.json of google/gemma-2-2b, 9b, 27b", binding=False),
    ),
    **dict.fromkeys(("keras-llama", "keras-llama-tied"), _KERAS_LLAMA),
    **dict.fromkeys(("keras-llama3.1", "keras-llama3.1-tied"), _KERAS_LLAMA_3),
    "keras-mistral": (
        Published({"layer_norm_epsilon": 1e-6, "rope_max_wavelength": 1e4, "sliding_window": 512}, f"{_KERAS}/mistral/mistral_backbone.py", binding=False),
        Published({"eos_token_id": 2, "bos_token_id": 1}, "transformers MistralConfig", binding=False),
    ),
    "keras-bert": (
        Published({"layer_norm_epsilon": 1e-12, "hidden_act": "gelu_pytorch_tanh", "pad_token_id": 0}, f"{_KERAS}/bert/bert_backbone.py"),
    ),
    "keras-vit": (
        Published({"layer_norm_epsilon": 1e-6, "hidden_act": "gelu"}, f"{_KERAS}/vit/vit_backbone.py, vit_layers.py"),
        *(Published({"image_size": side}, f"{_KERAS}/vit/vit_presets.py", sizes, binding=False) for side, sizes in ((224, {"P": 16, "L": 197}), (384, {"P": 16, "L": 577}), (224, {"P": 32, "L": 50}), (384, {"P": 32, "L": 145}), (224, {"P": 14, "L": 257}))),
    ),
    "whisper": _WHISPER,
    **dict.fromkeys(("llama_lm", "llama_model"), _LLAMA_FLAX),
    **dict.fromkeys(("mistral_lm", "mistral_model"), _MISTRAL_FLAX),
    **dict.fromkeys(("dinov2_classifier", "dinov2_model"), _DINOV2),
    **dict.fromkeys(("gemma_flax", "gemma_flax_untied", "gemma_flax_model"), _GEMMA_FLAX),
    "flax_transformers": (),  # its only fact, epsilon, is that of each module
}  # fmt: skip
