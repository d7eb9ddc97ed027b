"""RecurrentGemma."""

from __future__ import annotations

from convert.references.published.entry import Published, by_letter

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
        for sizes in (by_letter("iDNRF", 26, 2560, 10, 2560, 7680), by_letter("iDNRF", 38, 4096, 16, 4096, 12288))
    ),
)  # fmt: skip

MODELS: dict[str, tuple[Published, ...]] = {
    "recurrentgemma": _RECURRENT,
}  # fmt: skip
