"""Writes flax-published.json.xz: config.json and the shapes of the leaves of each flax family of transformers 4 in its published size, and some more sizes.

    python tests/golden/make_flax_published.py [NAME ...]     # in the environment of make_diffusers.py (transformers 4.49.0, jax 0.4.38)

A class's defaults are the sizes of a published model. No weight is made: the flax class is traced. `stated` is config.json as
`save_pretrained` writes it, without the keys that have the default; `whole` has every key.
"""

from __future__ import annotations

import functools
import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import transformers
from flax.traverse_util import flatten_dict
from make_flax_families import FAMILIES, patched

OUT = Path(__file__).parent / "flax-published.json.xz"
# The class whose weights are published; of the others, the last that is named.
CLASSES = {
    "albert": "AlbertForMaskedLM", "bart": "BartForConditionalGeneration", "beit": "BeitForImageClassification", "bert": "BertForPreTraining",
    "big_bird": "BigBirdForPreTraining", "distilbert": "DistilBertForMaskedLM", "electra": "ElectraForPreTraining", "mbart": "MBartForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration", "roberta": "RobertaForMaskedLM", "roberta_prelayernorm": "RobertaPreLayerNormForMaskedLM",
    "roformer": "RoFormerForMaskedLM", "t5": "T5ForConditionalGeneration", "whisper": "WhisperForConditionalGeneration", "xlm_roberta": "XLMRobertaForMaskedLM",
}  # fmt: skip
# wav2vec2-large-lv60: no flax class has the norms of the defaults.
LV60 = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096, "conv_bias": True, "codevector_dim": 768,
    "proj_codevector_dim": 768, "feat_extract_norm": "layer", "do_stable_layer_norm": True,
}  # fmt: skip
# Other sizes that are published: those in which a family has another form, or numbers of another kind.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "albert-base": ("albert", {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}),
    "bart-base": ("bart", {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}),
    "beit-large-512": ("beit", {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096, "image_size": 512, "use_relative_position_bias": True, "num_labels": 1000}),
    "bloom-560m": ("bloom", {"hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}),
    "distilbart-12-6": ("bart", {"decoder_layers": 6}),
    "electra-large": ("electra", {"embedding_size": 1024, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}),
    "gpt-neo-125m": ("gpt_neo", {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]}),
    "gpt2-large": ("gpt2", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "longt5-tglobal-base": ("longt5", {"d_model": 768, "d_ff": 2048, "num_heads": 12, "num_layers": 12, "encoder_attention_type": "transient-global", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "opt-350m": ("opt", {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "ffn_dim": 4096, "word_embed_proj_dim": 512, "do_layer_norm_before": False}),
    "opus-mt": ("marian", {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "activation_function": "swish", "scale_embedding": True}),
    "regnet-y-160": ("regnet", {"hidden_sizes": [224, 448, 1232, 3024], "depths": [2, 4, 11, 1], "groups_width": 112, "num_labels": 1000}),
    "resnet-18": ("resnet", {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic", "num_labels": 1000}),
    "resnet-34": ("resnet", {"hidden_sizes": [64, 128, 256, 512], "depths": [3, 4, 6, 3], "layer_type": "basic", "num_labels": 1000}),
    "roformer-chinese-base": ("roformer", {"vocab_size": 50000, "embedding_size": 768, "max_position_embeddings": 1536}),
    "t5-v1.1-small": ("t5", {"d_ff": 1024, "num_heads": 6, "num_layers": 8, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "vit-large-384": ("vit", {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096, "image_size": 384, "patch_size": 32, "num_labels": 1000}),
    "whisper-large-v3": ("whisper", {"d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "num_mel_bins": 128, "vocab_size": 51866}),
}  # fmt: skip
SIDE = 224  # of an image
SHAPES = {
    "EncoderDecoderModel": ((1, 4), (1, 4)),
    "SpeechEncoderDecoderModel": ((1, 16_000), (1, 4)),
    "VisionEncoderDecoderModel": ((1, SIDE, SIDE, 3), (1, 4)),
    "VisionTextDualEncoderModel": ((1, 4), (1, SIDE, SIDE, 3)),
    **dict.fromkeys(("ResNetForImageClassification", "RegNetForImageClassification"), (1, SIDE, SIDE, 3)),
}


def cases() -> Iterator[tuple[str, str, Any]]:
    """Yield name, class and configuration of each model: a family's defaults by its name."""
    t = transformers
    for family, of in FAMILIES.items():
        yield family, CLASSES.get(family, of.classes[-1]), getattr(t, of.config)(**LV60 if family == "wav2vec2" else {})
    for model, (family, sizes) in MORE.items():
        yield model, CLASSES.get(family, FAMILIES[family].classes[-1]), getattr(t, FAMILIES[family].config)(**sizes)
    gpt2 = t.GPT2Config(add_cross_attention=True, is_decoder=True)
    yield (
        "encoder_decoder",
        "EncoderDecoderModel",
        t.EncoderDecoderConfig.from_encoder_decoder_configs(t.BertConfig(), gpt2),
    )
    yield (
        "speech_encoder_decoder",
        "SpeechEncoderDecoderModel",
        t.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(t.Wav2Vec2Config(**LV60), t.BartConfig()),
    )
    yield (
        "vision_encoder_decoder",
        "VisionEncoderDecoderModel",
        t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(t.ViTConfig(), gpt2),
    )
    yield "vision_text_dual_encoder", "VisionTextDualEncoderModel", t.VisionTextDualEncoderConfig.from_vision_text_configs(t.ViTConfig(), t.BertConfig())  # fmt: skip


def traced(name: str, config: Any) -> dict[str, list[int]]:
    """Return the shapes of the leaves of a class, which has no weights."""
    cls = getattr(transformers, f"Flax{name}")
    init = cls.init_weights

    def without_weights(self: Any, rng: Any, input_shape: Any, params: Any = None) -> Any:
        return jax.eval_shape(functools.partial(init, self, input_shape=input_shape), rng)

    cls.init_weights = without_weights
    shape = {"input_shape": SHAPES[name]} if name in SHAPES else {}
    model = cls(config, **shape)
    return {leaf: list(x.shape) for leaf, x in flatten_dict(model.params, sep="/").items()}


def main() -> None:
    patched()
    made: dict[str, Any] = json.loads(lzma.decompress(OUT.read_bytes())) if OUT.exists() else {}
    for family, name, config in cases():
        if sys.argv[1:] and family not in sys.argv[1:]:
            continue
        leaves = traced(name, config)
        kept = {"architectures": [name], "model_type": config.model_type}
        stated, whole = (json.loads(json.dumps(x)) | kept for x in (config.to_diff_dict(), config.to_dict()))
        made[family] = {"stated": stated, "whole": whole, "leaves": leaves}
        print(family, name, len(leaves), f"{sum(map(size, leaves.values())):,}", flush=True)
    OUT.write_bytes(lzma.compress(json.dumps(made).encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{OUT}: {len(made)} families, {OUT.stat().st_size:,} bytes, transformers {transformers.__version__}")


def size(shape: list[int]) -> int:
    return functools.reduce(lambda one, other: one * other, shape, 1)


if __name__ == "__main__":
    main()
