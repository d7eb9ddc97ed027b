"""The Flax classes of transformers 4: the values where config.json states none."""

from __future__ import annotations

from convert.references.published.entry import Published, known_heads

_FLAX = "transformers 4.46.3 models"

_BERT = (
    Published({"layer_norm_eps": 1e-12, "hidden_act": "gelu"}, f"{_FLAX}/bert/configuration_bert.py; transformers BertConfig"),
    *known_heads(("num_attention_heads",), "google-research/bert README.md", D768=12, D1024=16),
)  # fmt: skip
_GPT2 = (
    Published(
        {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"},
        f"{_FLAX}/gpt2/configuration_gpt2.py; transformers GPT2Config; openai/gpt-2 src/model.py",
    ),
    *known_heads(("n_head",), "openai/gpt-2 hparams.json of each size", D768=12, D1024=16, D1280=20, D1600=25),
)
_T5 = (
    Published(
        {"layer_norm_epsilon": 1e-6, "relative_attention_max_distance": 128},
        f"{_FLAX}/t5/configuration_t5.py; transformers T5Config",
    ),
)

_WHISPER = (
    Published({"epsilon": 1e-5}, f"{_FLAX}/whisper/modeling_flax_whisper.py, nn.LayerNorm(epsilon=1e-05)"),
    Published({"activation_function": "gelu"}, "openai/whisper model.py; transformers WhisperConfig"),
    *known_heads(
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
    *known_heads(("num_attention_heads",), _DINOV2_SIZES, D384=6, D768=12, D1024=16),
)  # fmt: skip

MODELS: dict[str, tuple[Published, ...]] = {
    **dict.fromkeys(("bert_masked_lm", "bert_pretraining", "bert_model", "bert_classification", "bert_tokens", "bert_answers"), _BERT),
    **dict.fromkeys(("gpt2_lm", "gpt2_lm_untied", "gpt2_model"), _GPT2),
    **dict.fromkeys(("t5_tied", "t5_untied", "t5_model", "t5_encoder"), _T5),
    "whisper": _WHISPER,
    **dict.fromkeys((f"llama_{of}{biased}" for of in ("lm", "model") for biased in ("", "_biased")), _LLAMA_FLAX),
    **dict.fromkeys(("mistral_lm", "mistral_model"), _MISTRAL_FLAX),
    **dict.fromkeys((f"dinov2_{of}{without}" for of in ("classifier", "model") for without in ("", "_unmasked", "_unbiased", "_unmasked_unbiased")), _DINOV2),
    **dict.fromkeys((f"gemma_flax{of}{biased}" for of in ("", "_untied", "_model") for biased in ("", "_biased")), _GEMMA_FLAX),
    **dict.fromkeys(("flax_transformers", "flax_diffusers"), ()),  # their only fact, epsilon, is that of each module
}  # fmt: skip
