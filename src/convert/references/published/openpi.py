"""openpi's π0, π0.5 and π0-FAST."""

from __future__ import annotations

from convert.references.published.entry import Published

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

MODELS: dict[str, tuple[Published, ...]] = {
    **dict.fromkeys(("pi0", "pi05", "pi0-fast"), _OPENPI),
}  # fmt: skip
