"""The published facts are those of upstream's own code, where it is installed; no rule file is read here."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from convert.references.published import PUBLISHED, published
from convert.verify.config.judge import equal

# fact of the rules -> key of the configuration
KEYS = {
    "epsilon": ("rms_norm_eps", "layer_norm_eps"),
    "rope_theta": ("rope_parameters.rope_theta",),
    "rotated": ("rope_parameters.partial_rotary_factor",),
    "rope_theta_local": ("rope_parameters.sliding_attention.rope_theta",),
    "rope_theta_global": ("rope_parameters.full_attention.rope_theta",),
    "attention_pattern": ("layer_types",),
    "pad_value": ("pad_val",),
    "context_length": ("max_position_embeddings", "context_length"),
    "boi_token": ("boi_token_index", "boi_token_id"),
    "eoi_token": ("eoi_token_index", "eoi_token_id"),
    "image_token": ("image_token_index", "image_token_id"),
    "boa_token": ("boa_token_id",),
    "eoa_token": ("eoa_token_index",),
    "audio_token": ("audio_token_id",),
}
BASE = {"i": 26, "D": 2304, "N": 8, "K": 4, "H": 256, "F": 9216}


def value_of(config: Any, name: str) -> Any:
    for key in KEYS.get(name, (name,)):
        value: Any = config.to_dict()
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return value
    return None


@pytest.mark.parametrize(
    ("model", "config", "sizes", "compared"),
    [
        ("gemma1", "GemmaConfig", {"i": 28, "D": 3072, "N": 16, "K": 16, "H": 256, "F": 24576}, {"rope_theta", "epsilon", "vocab_size"}),
        ("gemma2", "Gemma2Config", BASE, {"rope_theta", "attn_logit_softcapping", "final_logit_softcapping", "attention_pattern", "sliding_window", "query_pre_attn_scalar", "context_length"}),
        ("gemma3", "Gemma3TextConfig", {}, {"rope_theta_local", "rope_theta_global", "attention_pattern", "epsilon"}),
        ("gemma3_vision", "Gemma3Config", {}, {"boi_token", "eoi_token", "image_token"}),
        ("gemma4_e_towers", "Gemma4Config", {}, {"boi_token", "eoi_token", "image_token", "boa_token", "eoa_token", "audio_token"}),
        ("timesfm-1", "TimesFmConfig", {}, {"quantiles", "pad_value", "tolerance", "min_timescale", "max_timescale", "epsilon"}),
        ("timesfm-2.5", "TimesFm2_5Config", {}, {"quantiles", "decode_index", "context_length", "rope_theta", "epsilon"}),
        ("recurrentgemma", "RecurrentGemmaConfig", {"i": 26, "D": 2560, "N": 10, "R": 2560, "F": 7680}, {"logits_soft_cap", "rope_theta", "rotated"}),
        ("bert_masked_lm", "BertConfig", {"D": 768}, {"layer_norm_eps", "hidden_act", "num_attention_heads"}),
        ("gpt2_lm", "GPT2Config", {"D": 768}, {"layer_norm_epsilon", "activation_function", "n_head"}),
        ("t5_tied", "T5Config", {}, {"layer_norm_epsilon", "relative_attention_max_distance"}),
        ("whisper", "WhisperConfig", {"D": 384}, {"activation_function", "encoder_attention_heads", "decoder_attention_heads"}),
        ("llama_lm", "LlamaConfig", {}, {"rms_norm_eps", "hidden_act", "rope_theta"}),
        ("mistral_lm", "MistralConfig", {}, {"rms_norm_eps", "hidden_act", "sliding_window", "rope_theta"}),
        ("gemma_flax", "GemmaConfig", {}, {"rms_norm_eps", "rope_theta"}),
        ("dinov2_model", "Dinov2Config", {"D": 768, "i": 12}, {"layer_norm_eps", "hidden_act", "mlp_ratio", "layerscale_value", "num_attention_heads"}),
        ("siglip", "SiglipVisionConfig", {}, {"epsilon"}),
        ("owlvit", "OwlViTTextConfig", {}, {"epsilon", "hidden_act", "pad_token_id", "bos_token_id", "eos_token_id"}),
        ("owlv2", "Owlv2VisionConfig", {}, {"epsilon", "hidden_act"}),
        ("vivit", "VivitConfig", {"T": 2, "P": 16, "L": 3137}, {"epsilon", "image_size", "num_frames"}),
        ("siglip2-naflex", "Siglip2VisionConfig", {}, {"epsilon"}),
        ("tips-text", "Tipsv2TextConfig", {}, {"pooling_epsilon", "context_length", "pad_token_id"}),
        ("videoprism-encoder", "VideoPrismVisionConfig", {}, {"epsilon", "attn_logit_softcapping"}),
    ],
)  # fmt: skip
def test_the_table_states_the_defaults_of_transformers(
    model: str, config: str, sizes: dict[str, int], compared: set[str]
) -> None:
    defaults = getattr(transformers, config)()
    seen = set()
    for entry in published(model, sizes):
        for name, value in entry.facts.items():
            if (own := value_of(defaults, name)) is not None and name in compared:
                assert equal(value, own), f"{name}: {value} in {entry.source}, {own} in {config}"
                seen.add(name)
    assert seen == compared


def test_timesfm_states_the_same() -> None:
    base = pytest.importorskip("timesfm.timesfm_2p5.timesfm_2p5_base")
    definition = base.TimesFM_2p5_200M_Definition()
    known = {name: value for entry in PUBLISHED["timesfm-2.5"] for name, value in entry.facts.items()}
    assert known["quantiles"] == list(definition.quantiles) and known["decode_index"] == definition.decode_index
    assert known["context_length"] == definition.context_limit


def test_recurrentgemma_states_the_same() -> None:
    common = pytest.importorskip("recurrentgemma.common")
    modules = pytest.importorskip("recurrentgemma.jax.modules")
    for preset in (common.Preset.RECURRENT_GEMMA_2B_V1, common.Preset.RECURRENT_GEMMA_9B_V1):
        values = preset.config_dict
        sizes = {"i": len(values["block_types"]), "D": values["width"], "N": values["num_heads"], "R": values["lru_width"], "F": values["mlp_expanded_width"]}  # fmt: skip
        known = {name: value for entry in published("recurrentgemma", sizes) for name, value in entry.facts.items()}
        assert known["attention_window"] == values["attention_window_size"], preset
        assert known["logits_soft_cap"] == values["logits_soft_cap"]
    assert known["rope_theta"] == modules._MAX_WAVELENGTH
