"""Writes the golden cases keras-hub/*: Keras Hub's own models on JAX, saved by its own `save_to_preset` or Keras's `save_weights`.

    python3.12 -m venv /some/env && . /some/env/bin/activate
    pip install keras-hub==0.32.0 keras==3.15.1 "jax<0.11"
    python tests/golden/make_keras_hub.py [CASE ...]

Every weight is random: upstream's initial value, and normal numbers on top, so no norm scale is one and no bias is zero. `io.npz` has
the inputs and what the model computes in float32 of a text whose padding is masked, and of one without.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import keras
import keras_hub
import numpy as np

HERE = Path(__file__).parent / "keras-hub"
NOISE, TOKENS, VOCABULARY = 0.1, 11, 40
DECODER = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 16,
    "intermediate_dim": 24,
}
GEMMA = DECODER | {"intermediate_dim": 48, "head_dim": 8}
GEMMA_2 = GEMMA | {
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "attention_logit_soft_cap": 3.0,
    "final_logit_soft_cap": 2.0,
    "use_sliding_window_attention": True,
    "sliding_window_size": 4,
}
SCALED = {
    "rope_max_wavelength": 500000,
    "rope_frequency_adjustment_factor": 8.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_pretraining_sequence_length": 8192,
}


def causal(backbone: Callable[..., Any], task: Callable[..., Any], **sizes: Any) -> Callable[[], Any]:
    return lambda: task(backbone=backbone(**sizes), preprocessor=None)


m = keras_hub.models
CASES: dict[str, Callable[[], Any]] = {
    "gemma": causal(m.GemmaBackbone, m.GemmaCausalLM, **GEMMA),
    "gemma2": causal(m.GemmaBackbone, m.GemmaCausalLM, **GEMMA_2),
    "llama": causal(m.LlamaBackbone, m.LlamaCausalLM, **DECODER, tie_word_embeddings=False),
    "llama3.1-tied": causal(m.LlamaBackbone, m.LlamaCausalLM, **DECODER | SCALED, tie_word_embeddings=True),
    "mistral": causal(m.MistralBackbone, m.MistralCausalLM, **DECODER, sliding_window=4),
    "bert": lambda: m.BertBackbone(
        vocabulary_size=VOCABULARY, num_layers=2, num_heads=4, hidden_dim=16, intermediate_dim=24, max_sequence_length=12
    ),
    "vit": lambda: m.ViTImageClassifier(
        backbone=m.ViTBackbone(
            image_shape=(16, 16, 3), patch_size=8, num_layers=2, num_heads=4, hidden_dim=16, mlp_dim=24
        ),
        num_classes=5,
        preprocessor=None,
    ),
}  # fmt: skip


def inputs(case: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return what the model takes: the second text is shorter, and its padding is masked."""
    if case == "vit":
        return {"images": rng.uniform(-1, 1, (2, 16, 16, 3)).astype(np.float32)}
    given = {"token_ids": rng.integers(1, VOCABULARY, (2, TOKENS)).astype(np.int32), "padding_mask": np.ones((2, TOKENS), np.int32)}  # fmt: skip
    given["padding_mask"][1, TOKENS - 3 :] = 0
    if case == "bert":
        given["segment_ids"] = rng.integers(0, 2, (2, TOKENS)).astype(np.int32)
    return given


def write(case: str) -> None:
    """Replace the golden case."""
    rng = np.random.default_rng(int(hashlib.sha256(case.encode()).hexdigest()[:8], 16))
    keras.utils.set_random_seed(0)
    model = CASES[case]()
    for weight in sorted(model.weights, key=lambda weight: weight.path):
        weight.assign(np.asarray(weight) + NOISE * rng.standard_normal(weight.shape).astype(np.float32))
    given = inputs(case, rng)
    with jax.default_matmul_precision("highest"):
        made = model(given["images"] if case == "vit" else given)
    outputs = made if isinstance(made, dict) else {"logits": made}
    folder = HERE / case
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if case == "vit":  # a preset keeps the head apart from the backbone
        model.save_weights(folder / "model.weights.h5")
    else:
        model.save_to_preset(str(folder / "preset"))
        for name in ("task.json", "metadata.json"):
            (folder / "preset" / name).unlink(missing_ok=True)
    for file in folder.rglob("model.weights.h5"):  # HDF5 has much empty space
        file.with_suffix(".h5.xz").write_bytes(lzma.compress(file.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
        file.unlink()
    arrays = {name: np.asarray(y) for name, y in outputs.items()}
    assert all(y.dtype == np.float32 and np.isfinite(y).all() for y in arrays.values())
    np.savez_compressed(folder / "io.npz", **given, **arrays)
    print(case, {name: float(np.abs(y).max()) for name, y in arrays.items()})


def main() -> None:
    """Write the cases of the command line, or all."""
    names = ("keras-hub", "keras", "jax", "numpy")
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{name} {version(name)}' for name in names)}")
    for case in sys.argv[1:] or CASES:
        write(case)


if __name__ == "__main__":
    main()
