"""MaxText's families."""

from __future__ import annotations

from collections.abc import Mapping

from convert.references.published import gemma, gemma4
from convert.references.published.entry import Every, OneOf, Published, by_letter, known_contexts

_LLAMA = "meta-llama/llama-models models/llama3/args.py and its params.json files"
_LLAMA_SIZES = (
    by_letter("iDNKHF", 32, 4096, 32, 8, 128, 14336),
    by_letter("iDNKHF", 80, 8192, 64, 8, 128, 28672),
    by_letter("iDNKHF", 126, 16384, 128, 8, 128, 53248),
)
_LLAMA_3 = (
    Published({"epsilon": 1e-5, "rope_theta": 500_000.0}, _LLAMA),
    Published({"eos_token_id": OneOf((128_001, [128_001, 128_009], [128_001, 128_008, 128_009])), "bos_token_id": 128_000}, _LLAMA, binding=False),
)  # fmt: skip

_MAXTEXT = "maxtext 0.2.5 configs/models"
_GEMMA_4_UNIT = Published(
    {"attention_pattern": Every(("sliding_attention",) * 5 + ("full_attention",))},
    "maxtext 0.2.5 models/gemma4.py, GEMMA4_ATTENTION_PATTERN",
)
_EXPORTER = "maxtext 0.2.5 checkpoint_conversion/utils/hf_model_configs.py"

_TOKENS = "maxtext 0.2.5 multimodal/processor_qwen3_omni.py"
_QWEN_3_VL = (
    Published({"epsilon": 1e-6, "rope_theta_text": 5e6, "rope_theta_vision": 1e4, "rope": "half-split", "mrope_section": [24, 20, 20]}, f"{_MAXTEXT}/qwen3-vl-*.yml"),
    Published({"context_length": 262144}, _EXPORTER),
    Published({"image_token": 151655, "video_token": 151656, "vision_start_token": 151652, "vision_end_token": 151653}, _TOKENS, binding=False),
    Published({"eos_token_id": OneOf((151645, 151643)), "bos_token_id": 151643}, _EXPORTER, binding=False),
)  # fmt: skip
_QWEN_3_5 = (
    Published({"epsilon": 1e-6, "rope_theta_text": 1e7, "rotated": 0.25, "rope": "half-split", "mrope_section": [11, 11, 10]}, f"{_MAXTEXT}/qwen3.5-*.yml"),
    Published({"attention_pattern": Every(("linear_attention",) * 3 + ("full_attention",))}, f"{_MAXTEXT}/qwen3.5-*.yml, inhomogeneous_layer_cycle_interval"),
    Published({"key_heads": 16, "key_head_width": 128}, f"{_MAXTEXT}/qwen3.5-*.yml"),
    *(Published({"experts_per_token": per_token}, f"{_MAXTEXT}/qwen3.5-*.yml", {"i": layers}) for layers, per_token in ((40, 8), (60, 10))),
    Published({"context_length": 262144}, _EXPORTER),
    Published({"eos_token_id": 248044}, _EXPORTER, binding=False),
)  # fmt: skip


def _mistral(lengths: Mapping[int, int]) -> tuple[Published, ...]:
    return (
        Published({"epsilon": 1e-5, "rope_theta": 1e6}, f"{_MAXTEXT}/mistral-7b.yml, mixtral-8x*.yml"),
        Published({"eos_token_id": 2, "bos_token_id": 1}, "transformers MistralConfig, MixtralConfig", binding=False),
        *known_contexts("config.json of mistralai's repositories", lengths),
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
        *known_contexts(_EXPORTER, lengths),
    )


MODELS: dict[str, tuple[Published, ...]] = {
    "maxtext-gemma2": gemma.MODELS["gemma2"],
    "maxtext-gemma3": gemma.MODELS["gemma3"],
    "maxtext-gemma3-vision": gemma.MODELS["gemma3_vision"],
    "maxtext-gemma4-e": gemma4.MODELS["gemma4_e"],
    **dict.fromkeys(("maxtext-gemma4", "maxtext-gemma4-moe"), (*gemma4.MODELS["gemma4"], _GEMMA_4_UNIT)),
    **dict.fromkeys(("maxtext-gemma4-vision", "maxtext-gemma4-moe-vision"), (*gemma4.MODELS["gemma4_vision"], _GEMMA_4_UNIT)),
    "tunix-gemma3": gemma.MODELS["gemma3"],
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
    "maxtext-qwen3-vl": (
        Published({"deepstack_layers": [5, 11, 17]}, f"{_MAXTEXT}/qwen3-vl-2b.yml, qwen3-vl-4b.yml"),
        *_QWEN_3_VL,
    ),
    "maxtext-qwen3-vl-moe": (
        Published({"deepstack_layers": [8, 16, 24], "experts_per_token": 8}, f"{_MAXTEXT}/qwen3-vl-30b-a3b.yml"),
        *_QWEN_3_VL,
    ),
    "maxtext-qwen3-omni": (
        Published({"epsilon": 1e-6, "rope_theta_text": 1e6, "rope_theta_vision": 1e4, "rope": "half-split", "mrope_section": [24, 20, 20], "deepstack_layers": [8, 16, 24], "experts_per_token": 8, "bands": 128, "context_length": 65536, "positions_per_second": 13}, f"{_MAXTEXT}/qwen3-omni-30b-a3b.yml"),
        Published({"sound_epsilon": 1e-5}, "maxtext 0.2.5 models/qwen3.py, Qwen3OmniAudioEncoder"),
        Published({"image_token": 151655, "video_token": 151656, "vision_start_token": 151652, "audio_token": 151675, "audio_start_token": 151669}, _TOKENS, binding=False),
        Published({"eos_token_id": OneOf((151645, 151643)), "bos_token_id": 151643}, "transformers Qwen3OmniMoeConfig", binding=False),
    ),
    "maxtext-deepseek4": (
        Published({"epsilon": 1e-6, "rope_theta": 1e4, "compressed_rope_theta": 1.6e5, "rotated": 0.125, "context_length": 1048576, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "sliding_window": 128, "tokens_attended": 512, "shared_experts": 1}, f"{_MAXTEXT}/deepseek4-284b.yml"),
        Published({"attention_pattern": Every(("sliding_attention",) * 2 + ("compressed_sparse_attention", "heavily_compressed_attention") * 20 + ("compressed_sparse_attention",))}, f"{_MAXTEXT}/deepseek4-284b.yml, compress_ratios", {"i": 43}),
        Published({"eos_token_id": 1, "bos_token_id": 0}, _EXPORTER, binding=False),
    ),
    "maxtext-qwen3.5": _QWEN_3_5,
    "maxtext-qwen3.5-vision": (
        *_QWEN_3_5,
        Published({"rope_theta_vision": 1e4}, f"{_MAXTEXT}/qwen3.5-*.yml, rope_theta_for_vit"),
        Published({"image_token": 248056, "video_token": 248057, "vision_start_token": 248053, "vision_end_token": 248054}, _TOKENS, binding=False),
    ),
    "maxtext-qwen3-next": (
        Published({"epsilon": 1e-6, "rope_theta": 1e7, "rotated": 0.25, "rope": "half-split"}, f"{_MAXTEXT}/qwen3-next-80b-a3b.yml"),
        Published({"attention_pattern": Every(("linear_attention",) * 3 + ("full_attention",))}, f"{_MAXTEXT}/qwen3-next-80b-a3b.yml, inhomogeneous_layer_cycle_interval"),
        Published({"experts_per_token": 10, "key_heads": 16, "key_head_width": 128}, f"{_MAXTEXT}/qwen3-next-80b-a3b.yml"),
        Published({"context_length": 262144}, _EXPORTER),
        Published({"eos_token_id": OneOf((151645, 151643)), "bos_token_id": 151643}, _EXPORTER, binding=False),
    ),
    "maxtext-gpt-oss": (
        Published({"epsilon": 1e-5, "rope_theta": 1.5e5, "rope_factor": 32.0, "rope_original_length": 4096, "swiglu_limit": 7.0}, f"{_MAXTEXT}/gpt-oss-*.yml"),
        Published({"attention_pattern": Every(("sliding_attention", "full_attention"))}, "maxtext 0.2.5 models/gpt_oss.py, GPT_OSS_ATTENTION_PATTERN"),
        Published({"context_length": 131072, "sliding_window": 128, "experts_per_token": 4}, f"{_MAXTEXT}/gpt-oss-*.yml"),
        Published({"eos_token_id": 200002, "pad_token_id": 199999}, _EXPORTER, binding=False),
    ),
    "maxtext-deepseek3.2": (
        Published({"epsilon": 1e-6, "rope_theta": 1e4, "rope_factor": 40.0, "rope_mscale": 1.0, "rope_original_length": 4096, "context_length": 163840}, f"{_MAXTEXT}/deepseek3.2-671b.yml"),
        Published({"experts_per_token": 8, "shared_experts": 1, "routed_scaling_factor": 2.5, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "tokens_attended": 2048}, f"{_MAXTEXT}/deepseek3.2-671b.yml"),
        Published({"indexer_epsilon": 1e-6}, "flax nnx.LayerNorm, of which layers/attention_mla.py gives no epsilon"),
        Published({"eos_token_id": 1, "bos_token_id": 0}, _EXPORTER, binding=False),
    ),
    "maxtext-deepseek3": (
        Published({"epsilon": 1e-6, "rope_theta": 1e4, "rope_factor": 40.0, "rope_mscale": 1.0, "rope_original_length": 4096, "context_length": 163840}, f"{_MAXTEXT}/deepseek3-671b.yml"),
        Published({"experts_per_token": 8, "shared_experts": 1, "routed_scaling_factor": 2.5, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}, f"{_MAXTEXT}/deepseek3-671b.yml"),
        Published({"eos_token_id": 1, "bos_token_id": 0}, _EXPORTER, binding=False),
    ),
    "maxtext-deepseek2": (
        Published({"epsilon": 1e-6, "rope_theta": 1e4, "rope_factor": 40.0, "rope_mscale": 0.707, "rope_original_length": 4096, "context_length": 163840}, f"{_MAXTEXT}/deepseek2-16b.yml"),
        Published({"experts_per_token": 6, "shared_experts": 2, "routed_scaling_factor": 1.0, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}, f"{_MAXTEXT}/deepseek2-16b.yml"),
        Published({"eos_token_id": 100001, "bos_token_id": 100000}, _EXPORTER, binding=False),
    ),
    "maxtext-olmo3": (
        Published({"epsilon": 1e-6, "rope_theta": 5e5, "attention_pattern": Every(("sliding_attention",) * 3 + ("full_attention",))}, f"{_MAXTEXT}/olmo3-*.yml; models/olmo3.py, get_attention_type"),
        Published({"sliding_window": 4096, "rope_factor": 8.0, "rope_original_length": 8192, "context_length": 65536}, f"{_MAXTEXT}/olmo3-*.yml", binding=False),
        Published({"eos_token_id": 100257, "pad_token_id": 100277}, "config.json of allenai/Olmo-3-1025-7B", binding=False),
    ),
}  # fmt: skip
