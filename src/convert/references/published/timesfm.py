"""TimesFM."""

from __future__ import annotations

from convert.references.published.entry import Published, by_letter

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
        by_letter("iDNHF", 20, 1280, 16, 80, 1280),
    ),
    Published(
        {"use_positional_embedding": False, "context_length": 2048},
        "google/timesfm-2.0-500m, its README; timesfm 1.3 timesfm_base.py",
        by_letter("iDNHF", 50, 1280, 16, 80, 1280),
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

MODELS: dict[str, tuple[Published, ...]] = {
    "timesfm-1": _TIMESFM_1,
    "timesfm-2.5": _TIMESFM_2P5,
}  # fmt: skip
