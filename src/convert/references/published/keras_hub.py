"""Keras Hub's families."""

from __future__ import annotations

from convert.references.published.entry import Every, Published
from convert.references.published.gemma import GLOBAL, LOCAL

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

MODELS: dict[str, tuple[Published, ...]] = {
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
        Published({"pooling": "token"}, f"{_KERAS}/vit/vit_image_classifier.py", binding=False),
        *(Published({"image_size": side}, f"{_KERAS}/vit/vit_presets.py", sizes, binding=False) for side, sizes in ((224, {"P": 16, "L": 197}), (384, {"P": 16, "L": 577}), (224, {"P": 32, "L": 50}), (384, {"P": 32, "L": 145}), (224, {"P": 14, "L": 257}))),
    ),
}  # fmt: skip
