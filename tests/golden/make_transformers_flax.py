"""Writes the golden cases of the flax models of transformers, as `save_pretrained` published them.

transformers 5 has no flax models any more; 4.46.3 is run in an environment of its own (Python 3.10), on a CPU:

    python3.10 -m venv env && env/bin/pip install transformers==4.46.3 jax==0.4.30 jaxlib==0.4.30 flax==0.8.5 'numpy<2'
    env/bin/python tests/golden/make_transformers_flax.py [CASE ...]

Each case has `ckpt`, with `flax_model.msgpack` and `config.json` as on the hub, and `io.npz`: inputs and what the flax model computed in
float32 with matmul precision `highest`. Weights, inputs and outputs are the same on every run of one machine.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from flax.traverse_util import flatten_dict

HERE = Path(__file__).parent
NOISE = 0.15
BERT = {
    "vocab_size": 67,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 19,
    "type_vocab_size": 2,
}
SMALL = {
    **BERT,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "vocab_size": 31,
}
T5 = {"vocab_size": 53, "d_model": 20, "d_kv": 7, "d_ff": 28, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 3}


def write(
    case: str, model: Any, rng: np.random.Generator, inputs: dict[str, np.ndarray], outputs: tuple[str, ...]
) -> None:
    """Writes a golden case; upstream's initial values get normal numbers on top: biases and norm scales are 0 or 1 there."""
    folder = HERE / case
    if folder.exists():
        shutil.rmtree(folder)
    leaves, tree = jax.tree_util.tree_flatten(model.params)
    drawn = [jnp.asarray(np.asarray(x) + NOISE * rng.standard_normal(x.shape, np.float32)) for x in leaves]
    model.params = jax.tree_util.tree_unflatten(tree, drawn)
    model.save_pretrained(folder / "ckpt")
    made = model(**{name: jnp.asarray(x) for name, x in inputs.items()}, train=False)
    np.savez(folder / "io.npz", **inputs, **{name: np.asarray(made[name]) for name in outputs})
    flat = flatten_dict(model.params, sep="/")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{case}: {len(flat)} leaves, {sum(x.size for x in flat.values())} parameters, {size:,} bytes")
    for name in outputs:
        x = np.asarray(made[name])
        print(f"  {name} {x.shape}: {float(np.abs(x).mean()):.2f} on average, {float(np.abs(x).max()):.2f} at most")
    if "-v" in sys.argv:
        for name, x in flat.items():
            print("    ", name, x.shape)


def texts(rng: np.random.Generator, vocabulary: int, length: int = 13) -> dict[str, np.ndarray]:
    """Two texts; the end of the second is padding."""
    mask = np.ones((2, length), np.int32)
    mask[1, -3:] = 0
    return {"input_ids": rng.integers(2, vocabulary, (2, length)).astype(np.int32), "attention_mask": mask}


def bert() -> None:
    """Token types differ along a text; the heads of pre-training, classification and none at all have trees of their own."""
    heads: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
        "bert": (transformers.FlaxBertForMaskedLM, BERT, ("logits",)),
        "bert-model": (transformers.FlaxBertModel, SMALL, ("last_hidden_state", "pooler_output")),
        "bert-pretraining": (
            transformers.FlaxBertForPreTraining,
            SMALL,
            ("prediction_logits", "seq_relationship_logits"),
        ),
        "bert-classification": (
            transformers.FlaxBertForSequenceClassification,
            {**SMALL, "num_labels": 5},
            ("logits",),
        ),
        "bert-tokens": (transformers.FlaxBertForTokenClassification, {**SMALL, "num_labels": 5}, ("logits",)),
        "bert-answers": (
            transformers.FlaxBertForQuestionAnswering,
            {**SMALL, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
            ("start_logits", "end_logits"),
        ),
    }
    for seed, (case, (model, sizes, outputs)) in enumerate(heads.items()):
        rng = np.random.default_rng(100 + seed)
        config = transformers.BertConfig(**sizes)
        given = texts(rng, config.vocab_size)
        types = (np.arange(13) > 5).astype(np.int32)[None].repeat(2, 0)
        if wanted(case):
            write(case, model(config, seed=seed), rng, {**given, "token_type_ids": types}, outputs)


def gpt2() -> None:
    for seed, (case, model, outputs) in enumerate(
        [
            ("gpt2", transformers.FlaxGPT2LMHeadModel, ("logits",)),
            ("gpt2-model", transformers.FlaxGPT2Model, ("last_hidden_state",)),
        ]
    ):
        rng = np.random.default_rng(200 + seed)
        small = {} if case == "gpt2" else {"n_embd": 12, "n_layer": 2, "n_head": 2}
        sizes = {"vocab_size": 61, "n_positions": 19, "n_embd": 24, "n_layer": 3, "n_head": 3, **small}
        config = transformers.GPT2Config(**sizes, bos_token_id=60, eos_token_id=60)
        if wanted(case):
            write(case, model(config, seed=seed), rng, texts(rng, 61), outputs)


def t5() -> None:
    """1.0: ReLU and a tied head; 1.1: gated GeLU and a head of its own. Texts are longer than the buckets are exact."""
    rest: dict[str, dict[str, Any]] = {
        "t5": {"feed_forward_proj": "relu"},
        "t5-v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    }
    for seed, (case, own) in enumerate(rest.items()):
        rng = np.random.default_rng(300 + seed)
        config = transformers.T5Config(
            **{**T5, **own}, relative_attention_num_buckets=12, relative_attention_max_distance=17
        )
        given = texts(rng, config.vocab_size, 23)
        answer = texts(rng, config.vocab_size, 21)
        answers = {f"decoder_{name}": x for name, x in answer.items()}
        if not wanted(case):
            continue
        write(
            case, transformers.FlaxT5ForConditionalGeneration(config, seed=seed), rng, {**given, **answers}, ("logits",)
        )


def whisper() -> None:
    rng = np.random.default_rng(400)
    config = transformers.WhisperConfig(
        vocab_size=59, num_mel_bins=10, d_model=24, encoder_layers=2, decoder_layers=3, encoder_attention_heads=3,
        decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=44, max_source_positions=14, max_target_positions=17,
        pad_token_id=57, bos_token_id=57, eos_token_id=57, decoder_start_token_id=58, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    sound = rng.standard_normal((2, 10, 28)).astype(np.float32)
    ids = rng.integers(2, 57, (2, 9)).astype(np.int32)
    model = transformers.FlaxWhisperForConditionalGeneration(config, seed=0)
    if wanted("whisper"):
        write("whisper", model, rng, {"input_features": sound, "decoder_input_ids": ids}, ("logits",))


DECODER = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 31,
    "pad_token_id": 0,
}


def decoders() -> None:
    """Each config.json states what the flax code does not compute: base and scaling of RoPE, window, tied head, activation."""
    other = {
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "tie_word_embeddings": True,
    }
    heads: dict[str, tuple[Any, Any, dict[str, Any], tuple[str, ...]]] = {
        "llama": (transformers.FlaxLlamaForCausalLM, transformers.LlamaConfig, other, ("logits",)),
        "llama-model": (
            transformers.FlaxLlamaModel,
            transformers.LlamaConfig,
            {**other, "num_key_value_heads": 4, "hidden_act": "gelu"},
            ("last_hidden_state",),
        ),
        "mistral": (
            transformers.FlaxMistralForCausalLM,
            transformers.MistralConfig,
            {"rope_theta": 1000000.0, "sliding_window": 5, "tie_word_embeddings": True},
            ("logits",),
        ),
        "mistral-model": (
            transformers.FlaxMistralModel,
            transformers.MistralConfig,
            {"sliding_window": 7},
            ("last_hidden_state",),
        ),
        "gemma-flax": (
            transformers.FlaxGemmaForCausalLM,
            transformers.GemmaConfig,
            {"head_dim": 10, "num_hidden_layers": 2, "rope_theta": 50000.0, "hidden_act": "gelu"},
            ("logits",),
        ),
        "gemma-flax-untied": (
            transformers.FlaxGemmaForCausalLM,
            transformers.GemmaConfig,
            {"head_dim": 6, "tie_word_embeddings": False, "num_key_value_heads": 1},
            ("logits",),
        ),
        "gemma-flax-model": (
            transformers.FlaxGemmaModel,
            transformers.GemmaConfig,
            {"head_dim": 6, "hidden_activation": "gelu_new", "num_key_value_heads": 4},
            ("last_hidden_state",),
        ),
    }
    for seed, (case, (model, config, own, outputs)) in enumerate(heads.items()):
        if wanted(case):
            rng = np.random.default_rng(500 + seed)
            made = model(config(**{**DECODER, **own}), seed=seed)
            write(case, made, rng, texts(rng, DECODER["vocab_size"], 23), outputs)


def dinov2() -> None:
    """A layerscale_value that is not 1."""
    sizes = {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "mlp_ratio": 2, "image_size": 12, "patch_size": 4,
    }  # fmt: skip
    heads: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
        "dinov2": (transformers.FlaxDinov2Model, {"layerscale_value": 0.3}, ("last_hidden_state", "pooler_output")),
        "dinov2-classification": (
            transformers.FlaxDinov2ForImageClassification,
            {"layerscale_value": 0.5, "num_labels": 5},
            ("logits",),
        ),
    }
    for seed, (case, (model, own, outputs)) in enumerate(heads.items()):
        if wanted(case):
            rng = np.random.default_rng(600 + seed)
            made = model(transformers.Dinov2Config(**sizes, **own), seed=seed)
            write(case, made, rng, {"pixel_values": rng.standard_normal((2, 3, 12, 12)).astype(np.float32)}, outputs)


def wanted(case: str) -> bool:
    """Whether a case is written: one of those that are named, or any if none is."""
    names = [word for word in sys.argv[1:] if word != "-v"]
    return not names or case in names


def drafts() -> None:
    """`convert rules new --like` drafts their rules from the classes of transformers."""
    if not wanted("drafts"):
        return
    rng = np.random.default_rng(500)
    image = {"pixel_values": rng.standard_normal((2, 3, 28, 28)).astype(np.float32)}
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
    seen = {**sizes, "image_size": 28, "patch_size": 7}
    read = {**sizes, "vocab_size": 61, "intermediate_size": 20, "max_position_embeddings": 32}
    shape = {"seed": 0, "input_shape": (1, 28, 28, 3)}
    vit = transformers.ViTConfig(**seen, intermediate_size=20, num_labels=5)
    write("drafts/vit", transformers.FlaxViTForImageClassification(vit, **shape), rng, image, ("logits",))
    dinov2 = transformers.Dinov2Config(**seen, mlp_ratio=2)
    write("drafts/dinov2", transformers.FlaxDinov2Model(dinov2, **shape), rng, image, ("last_hidden_state",))
    gemma = transformers.GemmaConfig(**{**read, "num_attention_heads": 2}, num_key_value_heads=1, head_dim=8)
    write("drafts/gemma", transformers.FlaxGemmaForCausalLM(gemma, seed=0), rng, texts(rng, 61), ("logits",))
    llama = transformers.LlamaConfig(**read, num_key_value_heads=3)
    write("drafts/llama", transformers.FlaxLlamaForCausalLM(llama, seed=0), rng, texts(rng, 61), ("logits",))
    resnet = transformers.ResNetConfig(embedding_size=6, hidden_sizes=[8, 12], depths=[2, 3], num_labels=5)
    write("drafts/resnet", transformers.FlaxResNetForImageClassification(resnet, **shape), rng, image, ("logits",))


def main() -> None:
    """Replaces the golden cases, or those that are named."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    names = ("transformers", "flax", "jax", "numpy")
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{n} {version(n)}' for n in names)}")
    bert()
    gpt2()
    t5()
    whisper()
    decoders()
    drafts()
    dinov2()


if __name__ == "__main__":
    main()
