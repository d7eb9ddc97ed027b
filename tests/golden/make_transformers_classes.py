"""Writes rules/transformers-classes.json: the modules of the PyTorch classes of transformers 5 that have a flax class in transformers 4.

    python tests/golden/make_transformers_classes.py [FAMILY ...]     # in the test environment (transformers 5.23)

The classes are built on the meta device from the configurations of the golden cases in flax-families; what only some of them have is optional.
Names are those that `save_pretrained` writes, which are not always those of the modules (transformers 5 renames as it loads).
"""

from __future__ import annotations

import copy
import json
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from class_sizes import LABELS, Shapes, Sizes, changed
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from convert.planning.modules.formulas import Keys, keys_of
from convert.planning.modules.table import holds

HERE = Path(__file__).parent
OUT = HERE.parents[1] / "rules" / "transformers-classes.json"
RENAMED = {"BertForCausalLM": "BertLMHeadModel"}  # a flax class and its PyTorch class
COMPOSITES = {
    "EncoderDecoderModel": {"encoder": ["encoder", "base"], "decoder": ["decoder", "causal"]},
    "SpeechEncoderDecoderModel": {"encoder": ["encoder", "base"], "decoder": ["decoder", "causal"]},
    "VisionEncoderDecoderModel": {"encoder": ["encoder", "base"], "decoder": ["decoder", "causal"]},
    "VisionTextDualEncoderModel": {"vision_model": ["vision_config", "base"], "text_model": ["text_config", "base"]},
}
WIDTH = "hidden_size|n_embd|d_model|dim"
PROJECTION = {f"Linear [decoder.{WIDTH},encoder.{WIDTH}]": ["enc_to_dec_proj"]}
# wav2vec2 states the width behind its adapters, with which the class compares.
SPEECH = [[["decoder.cross_attention_hidden_size", None, False], [f"encoder.output_hidden_size|{WIDTH}", None, {"differs_from": f"decoder.{WIDTH}"}]]]  # fmt: skip
OWN = {
    "EncoderDecoderModel": PROJECTION,
    "SpeechEncoderDecoderModel": PROJECTION,
    "VisionEncoderDecoderModel": PROJECTION,
    "VisionTextDualEncoderModel": {
        f"Linear [projection_dim,text_config.{WIDTH}]": ["text_projection -bias"],
        f"Linear [projection_dim,vision_config.{WIDTH}]": ["visual_projection -bias"],
        "Parameter": ["logit_scale"],
    },
}  # fmt: skip
CROSS_ATTENTION = {"add_cross_attention": True, "is_decoder": True}
# Keys that change which modules there are, beyond what the golden cases have.
MORE: Mapping[str, list[dict[str, Any]]] = {
    "bart": [{"scale_embedding": True}],
    "wav2vec2": [{"add_adapter": True, "num_adapter_layers": 2, "output_hidden_size": 10}, {"conv_bias": False}],
    "beit": [{"use_mask_token": True}, {"use_absolute_position_embeddings": True, "use_relative_position_bias": True}],
    "vit": [{"qkv_bias": False}],
    "mt5": [{"is_gated_act": False}],
    "whisper": [{"use_weighted_layer_sum": True}],
    **{family: [CROSS_ATTENTION] for family in ("roberta_prelayernorm", "xglm", "xlm_roberta")},
    "big_bird": [CROSS_ATTENTION, {"use_bias": False}],
    "electra": [CROSS_ATTENTION, {"embedding_size": 12}],
    "dinov2": [{"qkv_bias": False}],
    "resnet": [{"layer_type": kind, "embedding_size": size, "hidden_sizes": [8, 12], "depths": [2, 2]} for kind in ("basic", "bottleneck") for size in (6, 8)],
    "regnet": [{"embedding_size": size, "hidden_sizes": [8, 12], "depths": [2, 2]} for size in (6, 8)],
}  # fmt: skip
INSTEAD = (
    "resnet",
    "regnet",
)  # their stages have as many layers each, so that every number runs over the layers of its place
# The first stage of a ResNet has a shortcut only where the width changes.
FIRST_DIFFERS = re.compile(r"(.*\.)?stages\.\d+\.layers\.0\.shortcut\..*")
CROSS = [["add_cross_attention", False, True]]
# T5's `is_gated_act` follows from `feed_forward_proj`, unless config.json states it.
FOLLOWS = ["is_gated_act", None, {"is": "None"}]
# Modules and biases that a class has where keys, with these defaults, say so; `described` compares each with the configurations above.
# A list of conditions holds where one of them does, a list of tests in it where all do.
WHEN: Mapping[str, Any] = {
    r"Parameter (.*\.)?masked_spec_embed": [["mask_time_prob", 0.05, True], ["mask_feature_prob", 0.0, True]],
    r".* (.*\.)?(crossattention\..*|ln_cross_attn|encoder_attn\..*|encoder_attn_layer_norm)": CROSS,
    r".* (.*\.)?attention\.attention\.(query|key|value)\.bias": [["qkv_bias", True, True]],
    r"LayerNorm (.*\.)?(?<!pooler\.)layernorm": [["use_mean_pooling", True, False]],
    r"LayerNorm (.*\.)?pooler\.layernorm": [["use_mean_pooling", True, True]],
    r"Parameter (.*\.)?mask_token": [["use_mask_token", False, True]],
    r"Parameter (.*\.)?position_embeddings": [["use_absolute_position_embeddings", False, True]],
    r"Parameter .*\.attention\.relative_position_bias\..*": [["use_relative_position_bias", False, True]],
    r"Parameter (.*\.)?encoder\.relative_position_bias\..*": [["use_shared_relative_position_bias", False, True]],
    r"Linear .*\.DenseReluDense\.wi": [["is_gated_act", None, {"is": "False"}], [FOLLOWS, ["feed_forward_proj", "relu", {"is_not": "gated-*"}]]],
    r"Linear .*\.DenseReluDense\.wi_[01]": [["is_gated_act", None, True], [FOLLOWS, ["feed_forward_proj", "relu", {"is": "gated-*"}]]],
    r".* .*\.LocalSelfAttention\..*": [["encoder_attention_type", "local", {"is": "local"}]],
    r".* .*\.TransientGlobalSelfAttention\..*": [["encoder_attention_type", "local", {"is": "transient-global"}]],
    r"LayerNorm (.*\.)?decoder\.final_layer_norm": [[["do_layer_norm_before", True, True], ["_remove_final_layer_norm", False, False]]],
    r"Linear (.*\.)?embeddings_project": [["embedding_size", None, {"differs_from": "hidden_size"}]],
    r"Linear (.*\.)?decoder\.project_(in|out)": [[["word_embed_proj_dim", None, True], ["word_embed_proj_dim", None, {"differs_from": "hidden_size"}]]],
    r".* (.*\.)?stages\.0\.layers\.0\.shortcut\..*": [["downsample_in_first_stage", False, True], ["hidden_sizes.0", 256, {"differs_from": "embedding_size"}]],
    r"Conv1d (.*\.)?adapter\.layers\.#\.conv": [["add_adapter", False, True]],
    r"Conv1d (.*\.)?conv_layers\.#\.conv\.bias": [["conv_bias", False, True]],
    r".* (.*\.)?adapter\.(proj|proj_layer_norm)": [[["add_adapter", False, True], ["output_hidden_size", None, True], ["output_hidden_size", None, {"differs_from": "hidden_size"}]]],
    r"Parameter (.*\.)?lambda_[12]": [["layer_scale_init_value", 0.1, True]],
    r"Linear sequence_summary\.summary": [["summary_use_proj", True, True]],
    r"Linear (.*\.)?attention\.self\.(query|key|value)\.bias": [["use_bias", True, True]],
    r"Parameter layer_weights": [["use_weighted_layer_sum", False, True]],
}  # fmt: skip
PROJECTED = [[["decoder.cross_attention_hidden_size", None, False], [f"encoder.{WIDTH}", None, {"differs_from": f"decoder.{WIDTH}"}]]]  # fmt: skip
# What a tree of flax lacks although the class has it: tables of sines and cosines, which transformers computes, and poolers of heads that do not use them.
SINES = "SinusoidalPositionalEmbedding"
LACKS: Mapping[str, str] = dict.fromkeys(("BigBirdForCausalLM", "BigBirdForMaskedLM", "BigBirdForTokenClassification"), r"bert\.pooler")  # fmt: skip
SINES_WHEN = {"distilbert": [["sinusoidal_pos_embds", False, False]]}  # where a tree has an embedding in their place
# Numbers of layers that no key of one number states, or that stand in a part; the end of a place -> key; of a list, its length.
COUNTS: Mapping[str, Mapping[str, str | list[str]]] = {
    "albert": {"encoder.albert_layer_groups": "num_hidden_groups", "encoder.albert_layer_groups.#.albert_layers": "inner_group_num"},
    "clip": {"text_model.encoder.layers": "text_config.num_hidden_layers", "vision_model.encoder.layers": "vision_config.num_hidden_layers"},
    "gpt_neo": {"h": ["num_hidden_layers|num_layers", "attention_types"]},
    "regnet": {"encoder.stages": "hidden_sizes", "encoder.stages.#.layers": "depths.#"},
    "resnet": {"encoder.stages": "hidden_sizes", "encoder.stages.#.layers": "depths.#"},
    "wav2vec2": {"feature_extractor.conv_layers": "conv_dim"},
}  # fmt: skip
# Axes whose formula is none that `class_sizes` finds: module -> axis, formula. `where_they_hold` compares each with the configurations.
AXES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "regnet": {r".*\.layers\.#\.layer\.1\.convolution": (1, "hidden_sizes.#//(hidden_sizes.#//groups_width);hidden_sizes.#")},
}  # fmt: skip
INSTEAD_OF = {"num_decoder_layers": "num_layers"}  # T5's decoder has as many layers as its encoder, unless it is stated
PREFIXES = {
    "CLIPTextModel": "text_model",
    "CLIPVisionModel": "vision_model",
}  # of the flax classes; their trees have it, and the names have not
# Values of keys with which the class computes something else than the flax class.
GELU = {
    "hidden_act": [
        {"other_than": ["gelu"]},
        "PyTorch's class has GELU in front of its head, and the flax class this key",
    ]
}
FROM_0 = [["roberta", "xlm-roberta", "roberta-prelayernorm"], "the flax class counts the positions of its texts from 0"]
CAUSAL = [[False], "the flax class lets each token attend to earlier ones alone"]  # a key of transformers 5
CACHE = "transformers 5.23 makes a cache of as many layers as this key states, and stops in a decoder of more; write as many as decoder_layers, as the class has no encoder"
FEWER = ["num_hidden_layers|encoder_layers", 12, {"less_than": "decoder_layers"}]
STRIDED = [
    {"where": [[["encoder.add_adapter", False, True], ["decoder.model_type", None, {"is": "gpt2"}], ["encoder.hidden_size", 768, {"same_as": "decoder.hidden_size|n_embd"}]]]},
    "transformers 5.23 stops in the cross-attention of GPT-2, which does not take the output of an adapter as it lies in memory",
]  # fmt: skip
REFUSES = {
    "BartForCausalLM": {"encoder_layers": [{"where": [FEWER]}, CACHE]},
    "CLIPModel": {"text_config.is_causal": CAUSAL},
    "ElectraForMaskedLM": GELU,
    "ElectraForCausalLM": GELU,
    "MT5ForConditionalGeneration": {"tie_word_embeddings": [[True], "the class of transformers 5 does not scale the outputs of a tied head"]},
    "ElectraForMultipleChoice": {"summary_type": [{"other_than": ["first"]}, "the flax class takes the first token of each choice"]},
    "RoFormerForMultipleChoice": {
        "summary_type": [{"other_than": ["last"]}, "the flax class takes the last token of each choice"],
        "summary_use_proj": [[True], "the flax class has no projection before its classifier"],
        "summary_activation": [{"other_than": []}, "the flax class has no activation before its classifier"],
    },
    "BeitForMaskedImageModeling": {"use_mean_pooling": [[False], "transformers 5.23 gives each of its two last norms the values of the other as it loads"]},
    "GPTJForCausalLM": {"tie_word_embeddings": [[True], "the flax class cannot be run with a tied head: it has a bias, for which it then has no parameter"]},
    "ViTModel": {"pooler_act": [{"other_than": ["tanh"]}, "the flax class has tanh in its pooler"]},
    "EncoderDecoderModel": {"encoder.model_type": FROM_0, "decoder.model_type": FROM_0, "decoder.is_causal": CAUSAL},
    "SpeechEncoderDecoderModel": {"decoder.model_type": FROM_0, "decoder.is_causal": CAUSAL, "encoder.add_adapter": STRIDED},
    "VisionEncoderDecoderModel": {"decoder.model_type": FROM_0, "decoder.is_causal": CAUSAL},
    "VisionTextDualEncoderModel": {"text_config.model_type": FROM_0, "text_config.is_causal": CAUSAL},
}  # fmt: skip
# What flax's and torch's ACT2FN both have.
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "silu", "swish", "tanh")
T5_REFUSES = {
    "feed_forward_proj": [{"other_than": [f"{gate}{name}" for gate in ("", "gated-") for name in ACTIVATIONS]}, "transformers' flax and PyTorch classes have no such activation in common"],
}  # fmt: skip
# With cross-attention, these PyTorch classes must be decoders; the flax classes need not.
BLIND = {"where": [[["add_cross_attention", False, True], ["is_decoder", False, False]]]}
DECODERS = {
    "is_decoder": [
        BLIND,
        "with add_cross_attention it must be true; the flax class then lets each token attend to later ones as well",
    ]
}
ROPE = {
    "rope_theta": [{"other_than": [10000.0]}, "the flax class has 10000 in its code"],
    "rope_scaling": [{"other_than": []}, "the flax class does not scale its positions"],
    "sliding_window": [{"other_than": []}, "the flax class lets one token more through"],
}  # fmt: skip
# The positions of RoBERTa begin behind this number, and its table has a row of zeros there.
PAST_THE_TABLE = {
    "pad_token_id": [
        {
            "where": [
                ["max_position_embeddings", 512, {"less_than": "pad_token_id"}],
                ["max_position_embeddings", 512, {"same_as": "pad_token_id"}],
            ]
        },
        "PyTorch's class cannot be built with a pad_token_id that is no row of its table of positions (max_position_embeddings)",
    ],
}
REFUSES_OF_TYPE = {  # keys that no flax class of the family reads
    **dict.fromkeys(("t5", "mt5", "longt5"), T5_REFUSES),
    **dict.fromkeys(("bert", "big_bird", "electra"), DECODERS),
    **dict.fromkeys(("roberta", "roberta-prelayernorm", "xlm-roberta"), DECODERS | PAST_THE_TABLE),
    # Parts of a composite: alone, these three have rules of their own, which write what the flax class computes.
    "dinov2": {"layerscale_value": [{"other_than": [1.0]}, "the flax class multiplies by its square"]},
    **dict.fromkeys(("llama", "mistral"), ROPE),
    "gpt2": {
        "scale_attn_weights": [[False], "the flax class scales the scores of its attention"],
        "scale_attn_by_inverse_layer_idx": [[True], "the flax class does not divide by the number of the layer"],
    },
    "blenderbot-small": {
        "scale_embedding": [[True], "the PyTorch class does not multiply the embeddings of its decoder"]
    },
    "marian": {
        "share_encoder_decoder_embeddings": [[False], "the flax class has one embedding for both languages"],
        "decoder_vocab_size": [
            {
                "where": [
                    ["decoder_vocab_size", None, {"less_than": "pad_token_id"}],
                    ["decoder_vocab_size", None, {"same_as": "pad_token_id"}],
                ]
            },
            "with a pad_token_id that is no token of these, PyTorch's class cannot be built; the flax class does not read it",
        ],
    },
    "opt": {
        "enable_bias": [[False], "the flax class has biases"],
        "layer_norm_elementwise_affine": [[False], "the norms of the flax class have a scale and a bias"],
    },
    "resnet": {
        "downsample_in_bottleneck": [[True], "the flax class has the stride in the second convolution of a block"]
    },
    "roformer": {
        "add_cross_attention": [[True], "the flax class has no cross-attention"],
        "is_decoder": [[True], "the flax class has no causal mask"],
    },
    "wav2vec2": {
        "adapter_attn_dim": [{"other_than": []}, "the flax class has no adapters in its layers"],
        "do_stable_layer_norm": [[False], "the flax class has its norms in front of the blocks"],
        "feat_extract_norm": [["group"], "the flax class has a norm in each of its convolutions"],
        "layer_norm_eps": [
            {"other_than": [1e-5]},
            "in the norms of the convolutions the flax class has this key, and PyTorch's class 1e-05",
        ],
    },
    "whisper": {"scale_embedding": [[True], "the flax class does not scale its embeddings"]},
    "xglm": {
        "add_cross_attention": [[True], "the flax class cannot be built with cross-attention"],
        "pad_token_id": [
            {"other_than": [0, 1]},
            "PyTorch's class sets the position of this number to zero; positions begin at 2",
        ],
    },
}
# Keys that only the PyTorch class reads -> the value that the flax class computes with. BLOOM's sum of slices lacks the bias.
# Without is_encoder_decoder, the cache of transformers 5.23 has as many layers as the encoder, and the decoder stops if it has more.
# With chunk_size_feed_forward, the classes of BERT's relatives stop at a text whose length it does not divide.
UNREAD_OF_TYPE: Mapping[str, Mapping[str, Any]] = {
    "bloom": {"slow_but_exact": False},
    **{of: {"chunk_size_feed_forward": 0} for of in ("albert", "bert", "big_bird", "distilbert", "electra", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta")},
    **{of: {"is_encoder_decoder": True} for of in ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus")},
}  # fmt: skip
# The same, of one class: with is_decoder, PyTorch's encoder of T5 has cross-attention.
UNREAD: Mapping[str, Mapping[str, Any]] = {
    "BartForCausalLM": {"is_encoder_decoder": False},
    **{name: {"is_decoder": False} for name in ("T5EncoderModel", "MT5EncoderModel")},
    **{
        f"{of}{head}": {"is_encoder_decoder": True}
        for of in ("T5", "MT5", "LongT5")
        for head in ("Model", "ForConditionalGeneration")
    },
}
DERIVED = ("architectures", "id2label", "label2id", "torch_dtype", "dtype", "transformers_version")
FLOATS = {"layer_scale_init_value"}  # that a golden case has as an integer, which transformers 5 refuses
HEADS = re.compile(r"n_heads?|num_heads|(num_|encoder_|decoder_)?attention_heads")
SOME = 24  # a size for a key without one
NUMBERED = re.compile(r"\.([0-9]+)(?=\.|$)")
SKIPPED = re.compile(
    r"(^|\.)(position_ids|token_type_ids|num_batches_tracked|bias|masked_bias|relative_position_index)$"
)


def kind(module: torch.nn.Module) -> str:
    """Return the word that rules use for a module; empty for one whose parameters are its own."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if hasattr(module, "parametrizations"):
        return "WeightNorm"
    for of, word in ((torch.nn.Linear, "Linear"), (Conv1D, "Conv1D"), (torch.nn.Conv1d, "Conv1d"), (torch.nn.Conv2d, "Conv2d"), (torch.nn.Embedding, "Embedding"), (torch.nn.LayerNorm, "LayerNorm"), (torch.nn.GroupNorm, "GroupNorm"), (torch.nn.BatchNorm2d, "BatchNorm")):  # fmt: skip
        if isinstance(module, of):
            return word
    name = type(module).__name__
    if own == {"weight"} and name.endswith(("RMSNorm", "LayerNorm")):
        return "RMSNormOnePlus" if name.startswith("Gemma") else "RMSNorm"
    return ""


def epsilon(module: torch.nn.Module) -> float | None:
    found = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    return None if found is None else float(found)


def written(model: Any) -> Iterator[tuple[str, str, str, float | None, tuple[int, ...]]]:
    """Yield the module and the tensor in it, by the names that `save_pretrained` writes; its kind, epsilon and shape."""
    owner = {}
    for path, module in model.named_modules():
        if ".parametrizations" in path or path.startswith("parametrizations"):
            continue
        word = kind(module)
        named = [*module.named_parameters(recurse=word == "WeightNorm"), *module.named_buffers(recurse=False)]
        for name, _ in named:
            owner[f"{path}.{name}" if path else name] = (word, epsilon(module))
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not SKIPPED.search(name) or owner.get(name, ("",))[0] or name in dict(model.named_parameters())
    }
    numbered = {name: torch.full((1,), float(k)) for k, name in enumerate(state)}
    order = list(state)
    for name, number in revert_weight_conversion(model, numbered).items():
        of = order[int(number.item())]
        word, eps = owner.get(of, ("", None))
        if name.endswith("num_batches_tracked"):
            continue
        stem = (
            name
            if not word
            else name.partition(".parametrizations.")[0]
            if word == "WeightNorm" and "parametrizations" in name
            else name.rpartition(".")[0]
        )
        yield stem, "" if not word else name.removeprefix(f"{stem}."), word, eps, tuple(state[of].shape)


def modules(model: Any) -> dict[str, tuple[str, float | None, frozenset[str]]]:
    """Return name -> kind, epsilon and parameters."""
    found: dict[str, tuple[str, float | None, set[str]]] = {}
    for stem, role, word, eps, _ in written(model):
        found.setdefault(stem, (word or "Parameter", eps, set()))[2].add(role)
    return {name: (word, eps, frozenset(roles)) for name, (word, eps, roles) in found.items()}


def leads(model: Any) -> Shapes:
    """Return module -> the shape of its weight."""
    roles = ("", "weight", "parametrizations.weight.original1")
    return {stem: shape for stem, role, _, _, shape in written(model) if role in roles}


def expressed(model_type: str, pattern: str, formulas: tuple[str, ...]) -> tuple[str, ...]:
    """Return the formulas of a module, with those of `AXES`."""
    own = {at: text for name, (at, text) in AXES.get(model_type, {}).items() if re.fullmatch(name, pattern)}
    return tuple(own.get(at, text) for at, text in enumerate(formulas))


def where_they_hold(formulas: tuple[str, ...], name: str, shape: tuple[int, ...], keys: Keys) -> tuple[str, ...]:
    """Leave out the formulas that do not give the sizes of another configuration."""
    number = found[1] if (found := NUMBERED.search(name)) else ""
    return tuple(text if not text or keys.count(text, number) in (size, None) else "" for text, size in zip(formulas, shape, strict=True))  # fmt: skip


def sizes_of(cls: Any, config: Any) -> tuple[dict[str, tuple[str, ...]], dict[str, Any]]:
    """Return module -> the formula of each axis of its weight, and key -> default of the class; a key that others stand for has none."""

    def shapes(raw: Mapping[str, Any]) -> Shapes:
        with torch.device("meta"):
            model = cls(type(config).from_dict(dict(raw)))
        return leads(model)

    raw = json.loads(json.dumps({key: value for key, value in config.to_dict().items() if key not in DERIVED}))
    raw[LABELS] = 2
    whole, default = Sizes(raw, shapes), type(config)()
    names = {of: f"{alias}|{of}" for alias, of in config.attribute_map.items() if alias != LABELS}
    without: dict[str, Sizes] = {}
    defaults: dict[str, Any] = {}
    used = {key for stem, shape in (whole.at(()) or {}).items() for at in range(len(shape)) for key in whole.depends((stem, at))}  # fmt: skip
    for key in sorted(used):
        listed = key.rpartition(".")[0] if key.rpartition(".")[2].isdecimal() else key
        value = attribute(default, listed)
        missing = changed(raw, {key: None}) if listed == key else None
        other = None if missing is None else Sizes(missing, shapes)
        if other is not None and other.at(()) and (value is None or other.at(()) != whole.at(((key, value),))):
            without[key] = other
        else:
            defaults[listed] = list(value) if isinstance(value, list | tuple) else value

    stated = {key: Sizes({**raw, key: SOME}, shapes) for key, value in raw.items() if value is None}
    stated = {key: sizes for key, sizes in stated.items() if sizes.at(()) not in (None, whole.at(()))}

    def formula(axis: tuple[str, int]) -> str:
        first = [sizes.formula(axis) for key, sizes in stated.items() if key in sizes.depends(axis)]
        then = [without[key].formula(axis) for key in whole.depends(axis) if key in without]
        return ";".join(dict.fromkeys(text for text in (*first, whole.formula(axis), *then) if text))

    found = {stem: tuple(formula((stem, at)) for at in range(len(shape))) for stem, shape in (whole.at(()) or {}).items()}  # fmt: skip
    return {stem: tuple(with_keys(text, names) for text in texts) for stem, texts in found.items()}, defaults


def with_keys(formula: str, names: Mapping[str, str]) -> str:
    """Write other names of keys into a formula."""
    return re.sub(r"[a-z][a-z0-9_.]*", lambda found: names.get(found[0], found[0]), formula)


def common(pattern: str, formulas: Mapping[str, tuple[str, ...]], config: Any) -> tuple[str, ...]:
    """Return the formulas of modules that differ in their numbers; `#` is the first number of a name, and an axis without a common formula has none.

    An element of a list is the last one, or that of the first number: another place would be another one in a longer list.
    """
    ends = {f"{key}.{len(value) - 1}": f"{key}.-1" for key, value in config.to_dict().items() if isinstance(value, list)}  # fmt: skip
    if "#" not in pattern:
        return next((tuple(with_keys(text, ends) for text in texts) for texts in formulas.values()), ())
    made = []
    for name, texts in formulas.items():
        number = NUMBERED.search(name)
        assert number is not None
        made.append(tuple(re.sub(rf"(?<=[a-z])\.{number[1]}\b", ".#", text) for text in texts))
    return tuple(each[0] if len(set(each)) == 1 and not re.search(r"[a-z]\.\d", each[0]) else "" for each in zip(*made, strict=True))  # fmt: skip


def generalised(names: Iterable[str], first_differs: bool) -> dict[str, str]:
    """Return each name with `#` for the numbers that run over all layers of its place, and literal numbers elsewhere.

    Where the first differs, it is literal, and `#` are the others.
    """
    every = [name.split(".") for name in names]
    universe: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for keys in every:
        for at, key in enumerate(keys):
            if key.isdecimal():
                universe[tuple(keys[:at])].add(key)
    known = set(map(tuple, every))
    out = {}
    for keys in every:
        made = list(keys)
        for at, key in enumerate(keys):
            if key.isdecimal():
                other = universe[tuple(keys[:at])]
                layers = other == set(map(str, range(len(other))))
                if first_differs and FIRST_DIFFERS.fullmatch(".".join(keys)):
                    other = {key} if key == "0" else other - {"0"}
                    layers = layers and key != "0"
                if layers and all((*keys[:at], number, *keys[at + 1 :]) in known for number in other):
                    made[at] = "#"
        out[".".join(keys)] = ".".join(made)
    return out


def build(cls: Any, config: Any) -> Any:
    config = copy.deepcopy(config)
    config.num_labels = 2  # question answering has no other number
    with torch.device("meta"):
        return cls(config)


def fact_of(cls: Any, config: Any, name: str) -> str | None:
    """Return the key of the configuration that is the epsilon of a module; None if the code has the number."""
    parts = [part for part in ("text_config", "vision_config") if hasattr(config, part)]
    flat = {key: value for key, value in config.to_dict().items() if isinstance(value, float) and 0 < value < 0.01}
    flat |= {f"{part}.{key}": value for part in parts for key, value in getattr(config, part).to_dict().items() if isinstance(value, float) and 0 < value < 0.01}  # fmt: skip
    for key in flat:
        other = copy.deepcopy(config)
        part, _, last = key.rpartition(".")
        setattr(getattr(other, part) if part else other, last, 0.0078125)
        if modules(build(cls, other))[name][1] == 0.0078125:
            return key
    return None


def counts_of(cls: Any, config: Any) -> dict[str, str]:
    """Return the place of each number -> the key of the configuration that is the number of layers there."""

    def counted(config: Any) -> dict[str, int]:
        found: dict[str, set[str]] = defaultdict(set)
        for name in modules(build(cls, config)):
            keys = name.split(".")
            for at, key in enumerate(keys):
                if key.isdecimal():
                    found[".".join(keys[:at])].add(key)
        return {place: len(numbers) for place, numbers in found.items()}

    base, found = counted(config), {}
    for key, value in config.to_dict().items():
        if isinstance(value, int) and not isinstance(value, bool) and re.search("layers?$", key):
            other = copy.deepcopy(config)
            try:
                setattr(other, key, value + 1)
                after = counted(other)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                continue  # no such number of layers is possible
            others = [alias for alias, of in config.attribute_map.items() if of in (key, INSTEAD_OF.get(key))]
            names = "|".join([key, *others, INSTEAD_OF[key]] if key in INSTEAD_OF else [*others, key])
            found |= {place: names for place, n in base.items() if after.get(place) == n + 1 and n == value}
    return found


def conditions(
    listed: Mapping[str, list[str]], names: list[tuple[Any, dict[str, bool]]], never: set[str]
) -> dict[str, Any]:
    """Return the condition of each module and of each bias that some of the configurations lack."""
    out = {}
    for word, texts in listed.items():
        for text in texts:
            pattern, _, mark = text.removeprefix("?").partition(" ")
            key = f"{word.split()[0]} {pattern}"
            wanted = [key] * (pattern not in never and not all(pattern in has for _, has in names))
            for each in (*wanted, *([f"{key}.bias"] if mark == "?bias" else [])):
                found = [condition for stated, condition in WHEN.items() if re.fullmatch(stated, each)]
                assert len(found) == 1, (each, found)
                out[each] = with_defaults(found[0], names[0][0])
    return out


def with_defaults(condition: list[Any], config: Any) -> list[Any]:
    """Write the defaults of a class into a condition: families have other defaults for one key."""
    default = type(config)()
    return [
        with_defaults(one, config) if isinstance(one[0], list) else [one[0], getattr(default, one[0]), one[2]] if hasattr(default, one[0]) and one[0] != FOLLOWS[0] else one
        for one in condition
    ]  # fmt: skip


def sines_when(model_type: str, listed: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the condition of embeddings that a setting makes a table of sines and cosines."""
    names = [x for x in listed["Embedding"] if x.endswith("position_embeddings")]
    return {f"Embedding {x}": SINES_WHEN[model_type] for x in names if model_type in SINES_WHEN}


def counts_elsewhere(model_type: str, patterns: Iterable[str]) -> dict[str, str | list[str]]:
    """Return the places of `COUNTS` that the modules have -> key."""
    places = {".".join(keys[:at]) for x in patterns for keys in [x.split(".")] for at, key in enumerate(keys) if key == "#"}  # fmt: skip
    return {
        place: key
        for end, key in COUNTS.get(model_type, {}).items()
        for place in sorted(places)
        if f".{place}".endswith(f".{end}")
    }


def tests_of(condition: list[Any]) -> list[Any]:
    return [test for one in condition for test in (one if isinstance(one[0], list) else [one])]


def dict_of(stated: Any) -> dict[str, Any]:
    return stated if isinstance(stated, dict) else {}


def attribute(config: Any, key: str) -> Any:
    """Return what a configuration has for a key, of several names for the first."""
    for one in key.partition("|")[0].split("."):
        config = getattr(config, one)
    return config


def described(name: str, configs: list[Any]) -> dict[str, Any]:
    """Return the entry of a class."""
    cls = getattr(transformers, name)
    seen: dict[str, list[tuple[str, float | None, frozenset[str]]]] = defaultdict(list)
    example: dict[str, tuple[Any, str]] = {}
    names: list[tuple[Any, dict[str, bool]]] = []  # of each configuration: what it has -> whether with a bias
    never: set[str] = set()
    axes: dict[str, tuple[str, ...]] = {}
    facts: dict[str, Any] = {}
    for config in configs:
        model = build(cls, config)
        found = modules(model)
        never |= {module for module, of in model.named_modules() if SINES in type(of).__name__}
        never |= {module for module in found if re.fullmatch(LACKS.get(name, "$^"), module)}
        general = generalised(found, config.model_type == "resnet")
        names.append((config, {pattern: "bias" in found[concrete][2] for concrete, pattern in general.items()}))
        if set(general.values()) - axes.keys():
            formulas, defaults = sizes_of(cls, config)
            facts |= defaults
            for pattern in set(general.values()) - axes.keys():
                of_pattern = {x: formulas[x] for x, of in general.items() if of == pattern and x in formulas}
                axes[pattern] = expressed(config.model_type, pattern, common(pattern, of_pattern, config))
        shapes = leads(model)
        stated = Keys(
            {**{key: value for key, value in config.to_dict().items() if key not in DERIVED}, LABELS: 2}, facts
        )
        for concrete, pattern in general.items():
            if concrete in shapes:
                axes[pattern] = where_they_hold(axes[pattern], concrete, shapes[concrete], stated)
        once = set()
        for concrete, pattern in general.items():
            example.setdefault(pattern, (config, concrete))
            if pattern not in once:
                seen[pattern].append(found[concrete])
                once.add(pattern)
    listed: dict[str, list[str]] = defaultdict(list)
    known: dict[tuple[float, str], str] = {}
    for pattern, entries in seen.items():
        word, eps, _ = entries[0]
        if eps is not None and word != "Parameter":
            config, concrete = example[pattern]
            tail = pattern
            key = known.get((eps, tail)) or known.setdefault((eps, tail), fact_of(cls, config, concrete) or f"{eps:g}")
            if not key[0].isdecimal():
                facts[key] = float(getattr(type(configs[0])(), key, eps))
                key = f"${key}"
            word = f"{word} {key}"
        roles = [entry[2] for entry in entries]
        biased = [any(role == "bias" or role.endswith(".bias") for role in each) for each in roles]
        mark = (
            ""
            if word == "Parameter" or word.startswith(("Embedding", "RMSNorm"))
            else ""
            if all(biased)
            else " ?bias"
            if any(biased)
            else " -bias"
        )
        listed[word].append(("?" if pattern in never else "") + pattern + mark)
    tied = getattr(build(cls, configs[0]), "all_tied_weights_keys", None) or {}
    counts: dict[str, str | list[str]] = {}
    for config in configs:
        counts |= counts_of(cls, config)
    when = conditions(listed, names, never)
    counts |= counts_elsewhere(configs[0].model_type, seen)
    default = type(configs[0])()
    heads = heads_of(
        configs[0],
        {name for texts in axes.values() for text in texts for key in keys_of(text) for name in key.split("|")},
    )
    numbers = [text for texts in counts.values() for text in ([texts] if isinstance(texts, str) else texts)]
    for key in (*numbers, *heads, *(test[2]["differs_from"] for condition in when.values() for test in tests_of(condition) if "differs_from" in dict_of(test[2]))):  # fmt: skip
        value = attribute(default, key.removesuffix(".#"))
        facts[key.removesuffix(".#")] = list(value) if isinstance(value, list | tuple) else value
    for key, condition in when.items():
        said = [(config, key.partition(" ")[2] in has) for config, has in names]
        assert key.endswith(".bias") or all(holds(condition, Keys(config.to_dict(), facts)) is has for config, has in said), (name, key)  # fmt: skip
    when |= (sines := sines_when(configs[0].model_type, listed))
    listed["Embedding"] = [f"?{x}" if f"Embedding {x}" in sines else x for x in listed["Embedding"]]
    return {
        "model_type": configs[0].model_type,
        "prefix": PREFIXES.get(name, getattr(cls, "base_model_prefix", "")),
        **({"below": True} if name in PREFIXES else {}),
        "facts": facts,
        "tied": dict(sorted(tied.items())),
        "counts": counts,
        **({"heads": heads} if heads else {}),
        "refuses": REFUSES_OF_TYPE.get(configs[0].model_type, {}) | REFUSES.get(name, {}),
        **({"unread": unread} if (unread := {**UNREAD_OF_TYPE.get(configs[0].model_type, {}), **UNREAD.get(name, {})}) else {}),
        "when": when,
        "modules": with_axes(listed, axes),
    }  # fmt: skip


def heads_of(config: Any, sizes: Collection[str], part: str = "") -> dict[str, str]:
    """Return the key of each number of heads that no size follows -> the key of the width that it divides."""
    parts = [key for key in ("text_config", "vision_config") if hasattr(config, key)]
    found = {key: one for key in parts for key, one in heads_of(getattr(config, key), sizes, f"{key}.").items()}
    width = config.attribute_map.get("hidden_size", "hidden_size")
    names = {of: f"{alias}|{of}" for alias, of in config.attribute_map.items()}
    for key, value in config.to_dict().items():
        if HEADS.fullmatch(key) and isinstance(value, int) and f"{part}{key}" not in sizes and hasattr(config, width):
            found[f"{part}{names.get(key, key)}"] = f"{part}{names.get(width, width)}"
    return found


def with_axes(listed: Mapping[str, list[str]], axes: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Add the formulas of the axes to the headings."""
    made: dict[str, list[str]] = defaultdict(list)
    for word in sorted(listed):
        for text in listed[word]:
            formulas = axes[text.removeprefix("?").partition(" ")[0]]
            made[f"{word} [{','.join(formulas)}]" if any(formulas) else word].append(text)
    return dict(made)


def configurations() -> dict[str, tuple[list[str], list[Any]]]:
    """Return family -> classes, and configurations: of the families of the command line, or of all."""
    out: dict[str, tuple[list[str], list[Any]]] = {}
    for path in sorted((HERE / "flax-families").glob("*.npz")):
        raw = json.loads(str(np.load(path)["config"]))
        family = path.name.partition(".")[0]
        if sys.argv[1:] and family not in sys.argv[1:]:
            continue
        if raw.get("attention_bias"):  # rules/llama.yaml has models for these
            continue
        classes, found = out.setdefault(family, ([], []))
        name = raw["architectures"][0]
        if name not in classes:
            classes.append(name)
        for more in (*(() if family in INSTEAD else ({},)), *MORE.get(family, ())):
            of = {**raw, **more}
            of |= {key: float(of[key]) for key in FLOATS & of.keys()}
            # One layer does not show what only the first one has.
            of |= {key: max(of[key], 2) for key in ("num_layers", "num_decoder_layers") if of.get(key)}
            found.append(transformers.AutoConfig.for_model(**of))
    return out


def entries() -> dict[str, Any]:
    """Return class -> its entry."""
    found: dict[str, Any] = {}
    for classes, configs in configurations().values():
        for name in (RENAMED.get(name, name) for name in classes if name not in COMPOSITES):
            wanted = getattr(transformers, name).config_class
            part = "text_config" if "Text" in name else "vision_config"
            of = [config for config in configs if isinstance(config, wanted)]
            found[name] = described(name, of or [getattr(config, part) for config in configs if hasattr(config, part)])
    for name, parts in COMPOSITES.items() if not sys.argv[1:] else ():
        found[name] = {
            "model_type": "", "prefix": "", "facts": {"projection_dim": 512} if "Dual" in name else {}, "tied": {}, "counts": {}, "refuses": REFUSES.get(name, {}),
            "when": {"Linear enc_to_dec_proj": SPEECH if name.startswith("Speech") else PROJECTED} if OWN[name] is PROJECTION else {},
            "modules": OWN[name], "parts": parts,
        }  # fmt: skip
    for path in sorted((HERE / "flax-families").glob("*.npz"), key=lambda path: path.stem.partition(".")[2].islower()):
        stored = np.load(path)
        (name,) = json.loads(str(stored["config"]))["architectures"]
        outputs = [x.removeprefix("out/") for x in stored.files if x.startswith("out/")]
        found.get(RENAMED.get(name, name), {}).setdefault("outputs", outputs)
    return dict(sorted(found.items()))


def not_taken() -> dict[str, dict[str, list[str]]]:
    """Return type of model -> the keys with a default that must not be null (no class of the type can be built then), and those that must not be an integer."""
    found: dict[str, dict[str, set[str]]] = {"nulls": {}, "floats": {}}
    for classes, configs in configurations().values():
        for name in (RENAMED.get(name, name) for name in classes if name not in COMPOSITES):
            cls = getattr(transformers, name)
            for config in [one for one in configs if isinstance(one, cls.config_class)][:1]:
                default = cls.config_class()
                raw = {key: value for key, value in config.to_dict().items() if key not in DERIVED}
                given = [key for key in raw if getattr(default, key, None) is not None]
                refused = {
                    "nulls": {key for key in given if not builds(cls, {**raw, key: None})},
                    "floats": {
                        key
                        for key in given
                        if isinstance(getattr(default, key), float) and not configures(cls, {**raw, key: 1})
                    },
                }
                for kind, keys in refused.items():
                    found[kind][config.model_type] = found[kind].get(config.model_type, keys) & keys
    return {kind: {of: sorted(keys) for of, keys in sorted(each.items())} for kind, each in found.items()}


def configures(cls: Any, raw: Mapping[str, Any]) -> bool:
    """Whether the configuration of a class takes a config.json."""
    try:
        cls.config_class.from_dict(dict(raw))
    except Exception:  # noqa: BLE001  # whatever a class raises
        return False
    return True


def builds(cls: Any, raw: Mapping[str, Any]) -> bool:
    """Whether a class can be built with a config.json."""
    try:
        with torch.device("meta"):
            cls(cls.config_class.from_dict(dict(raw)))
    except Exception:  # noqa: BLE001  # whatever a class raises
        return False
    return True


def main() -> None:
    logging.disable(logging.WARNING)
    known = json.loads(OUT.read_text()) if sys.argv[1:] else {"classes": {}, "nulls": {}, "floats": {}}
    found = dict(sorted((known["classes"] | entries()).items()))
    whole = {name: entry["model_type"] for name, entry in found.items() if "parts" not in entry}
    base = {
        of: name
        for name, of in whole.items()
        if name.endswith("Model") and not name.endswith(("LMHeadModel", "EncoderModel"))
    }
    causal = {of: name for name, of in whole.items() if name.endswith(("ForCausalLM", "LMHeadModel"))}
    made_by = f"tests/golden/make_transformers_classes.py, transformers {transformers.__version__}"
    head = {
        "made_by": made_by,
        "library": "transformers",
        "parts": {"base": base, "causal": causal},
        **{kind: dict(sorted((known[kind] | keys).items())) for kind, keys in not_taken().items()},
    }
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in found.items()]
    text = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    OUT.write_text("{\n" + text + ',\n"classes": {\n' + ",\n".join(lines) + "\n}}\n")
    print(f"{OUT}: {len(found)} classes, {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
