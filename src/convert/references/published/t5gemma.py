"""T5Gemma."""

from __future__ import annotations

from convert.references.published.entry import Every, OneOf, Published
from convert.references.published.gemma import GLOBAL, LOCAL

_CODE = "gemma 4.0.1 research/t5gemma"

MODELS: dict[str, tuple[Published, ...]] = {
    "t5gemma": (
        Published({"epsilon": 1e-6}, "gemma 4.0.1 gm/nn/_layers.py, RMSNorm"),
        Published(
            {"embedding_scale": "square root of the width", "rope": "half-split", "rope_theta": 10_000.0},
            f"{_CODE}/modules.py; gm/nn/_modules.py, Embedder.encode; gm/math/_positional_embeddings.py",
        ),
        Published(
            {
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "sliding_window": 4096,
                "encoder_pattern": Every((LOCAL, GLOBAL)),
                "decoder_pattern": Every((LOCAL, GLOBAL)),
            },
            f"{_CODE}/config.py, GemmaPreset.make_config",
        ),
        Published({"vocab_size": 256_000, "context_length": 8192}, "transformers T5GemmaModuleConfig", binding=False),
        Published({"pad_token_id": 0, "bos_token_id": 2}, f"{_CODE}/t5gemma.py, sampling.py; gm/text/_tokenizer.py"),
        Published({"eos_token_id": OneOf((1, [1, 107]))}, "gemma 4.0.1 gm/text/_tokenizer.py", binding=False),
    )
}
