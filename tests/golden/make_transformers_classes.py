"""Writes rules/transformers-classes.json: the modules of the PyTorch classes of transformers 5 that have a flax class in transformers 4.

    python tests/golden/make_transformers_classes.py     # in the test environment (transformers 5.23)

The classes are built on the meta device from the configurations of the golden cases in flax-families; what only some of them have is optional.
Names are those that `save_pretrained` writes, which are not always those of the modules (transformers 5 renames as it loads).
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

HERE = Path(__file__).parent
OUT = HERE.parents[1] / "rules" / "transformers-classes.json"
RENAMED = {"BertForCausalLM": "BertLMHeadModel"}  # a flax class and its PyTorch class
COMPOSITES = {
    "EncoderDecoderModel": {"encoder": ["encoder", "base"], "decoder": ["decoder", "causal"]},
    "SpeechEncoderDecoderModel": {"encoder": ["encoder", "base"], "decoder": ["decoder", "causal"]},
    "VisionEncoderDecoderModel": {"encoder": ["encoder", "base"], "decoder": ["decoder", "causal"]},
    "VisionTextDualEncoderModel": {"vision_model": ["vision_config", "base"], "text_model": ["text_config", "base"]},
}
OWN = {
    "EncoderDecoderModel": {"Linear": ["?enc_to_dec_proj"]},
    "SpeechEncoderDecoderModel": {"Linear": ["?enc_to_dec_proj"]},
    "VisionEncoderDecoderModel": {"Linear": ["?enc_to_dec_proj"]},
    "VisionTextDualEncoderModel": {"Linear": ["text_projection -bias", "visual_projection -bias"], "Parameter": ["logit_scale"]},
}  # fmt: skip
# Keys that change which modules there are, beyond what the golden cases have.
MORE: Mapping[str, list[dict[str, Any]]] = {
    "bart": [{"scale_embedding": True}],
    "wav2vec2": [{"add_adapter": True, "num_adapter_layers": 2, "output_hidden_size": 10}],
    "beit": [{"use_mask_token": True}, {"use_absolute_position_embeddings": True, "use_relative_position_bias": True}],
    "vit": [{"qkv_bias": False}],
    "dinov2": [{"qkv_bias": False}],
    "resnet": [{"layer_type": kind, "embedding_size": size, "hidden_sizes": [8, 12], "depths": [2, 2]} for kind in ("basic", "bottleneck") for size in (6, 8)],
    "regnet": [{"embedding_size": size, "hidden_sizes": [8, 12], "depths": [2, 2]} for size in (6, 8)],
}  # fmt: skip
INSTEAD = (
    "resnet",
    "regnet",
)  # their stages have as many layers each, so that every number runs over the layers of its place
# A parameter that the class has where one of these keys, with these defaults, is above 0: [key, default, whether].
WHEN = {"masked_spec_embed": [["mask_time_prob", 0.05, True], ["mask_feature_prob", 0.0, True]]}
PREFIXES = {
    "CLIPTextModel": "text_model",
    "CLIPVisionModel": "vision_model",
}  # of the flax classes; their trees have it, and the names have not
# Values of keys with which the class computes something else than the flax class.
REFUSES = {
    "MT5ForConditionalGeneration": {"tie_word_embeddings": [[True], "the class of transformers 5 does not scale the outputs of a tied head"]},
    "VisionTextDualEncoderModel": {"text_config.model_type": [["roberta", "xlm-roberta", "roberta-prelayernorm"], "the flax class counts the positions of its texts from 0"]},
}  # fmt: skip
REFUSES_OF_TYPE = {  # keys that no flax class of the family reads
    "gpt2": {
        "scale_attn_weights": [[False], "the flax class scales the scores of its attention"],
        "scale_attn_by_inverse_layer_idx": [[True], "the flax class does not divide by the number of the layer"],
    },
    "whisper": {"scale_embedding": [[True], "the flax class does not scale its embeddings"]},
}
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


def modules(model: Any) -> dict[str, tuple[str, float | None, frozenset[str]]]:
    """Return name -> kind, epsilon and parameters, by the names that `save_pretrained` writes."""
    owner = {}
    for path, module in model.named_modules():
        if ".parametrizations" in path or path.startswith("parametrizations"):
            continue
        word = kind(module)
        named = [*module.named_parameters(recurse=word == "WeightNorm"), *module.named_buffers(recurse=False)]
        for name, tensor in named:
            owner[f"{path}.{name}" if path else name] = (word, epsilon(module), tensor)
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not SKIPPED.search(name) or owner.get(name, ("",))[0] or name in dict(model.named_parameters())
    }
    numbered = {name: torch.full((1,), float(k)) for k, name in enumerate(state)}
    order = list(state)
    found: dict[str, tuple[str, float | None, set[str]]] = {}
    for name, number in revert_weight_conversion(model, numbered).items():
        of = order[int(number.item())]
        word, eps, _ = owner.get(of, ("", None, None))
        if name.endswith("num_batches_tracked"):
            continue
        stem = (
            name
            if not word
            else name.partition(".parametrizations.")[0]
            if word == "WeightNorm" and "parametrizations" in name
            else name.rpartition(".")[0]
        )
        entry = found.setdefault(stem, (word or "Parameter", eps, set()))
        entry[2].add("" if not word else name.removeprefix(f"{stem}."))
    return {name: (word, eps, frozenset(roles)) for name, (word, eps, roles) in found.items()}


def generalised(names: Iterable[str]) -> dict[str, str]:
    """Return each name with `#` for the numbers that run over all that its place has, and literal numbers elsewhere."""
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
                if all((*keys[:at], number, *keys[at + 1 :]) in known for number in other):
                    made[at] = "#"
        out[".".join(keys)] = ".".join(made)
    return out


def build(cls: Any, config: Any) -> Any:
    config = copy.deepcopy(config)
    config.num_labels = 2  # question answering has no other number
    with torch.device("meta"):
        return cls(config)


def fixed_widths(cls: Any, config: Any) -> dict[str, int]:
    """Return the outputs of each layer that has one or two of them whatever the number of classes is."""
    config = copy.deepcopy(config)
    config.num_labels = 3
    try:
        with torch.device("meta"):
            model = cls(config)
    except (AssertionError, ValueError):
        return {}  # the class takes no other number
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {name: module.out_features for name, module in linear.items() if module.out_features < 3}


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
            found |= {place: key for place, n in base.items() if after.get(place) == n + 1 and n == value}
    return found


def described(name: str, configs: list[Any]) -> dict[str, Any]:
    """Return the entry of a class."""
    cls = getattr(transformers, name)
    seen: dict[str, list[tuple[str, float | None, frozenset[str]]]] = defaultdict(list)
    example: dict[str, tuple[Any, str]] = {}
    built = 0
    for config in configs:
        model = build(cls, config)
        built += 1
        found = modules(model)
        general = generalised(found)
        once = set()
        for concrete, pattern in general.items():
            example.setdefault(pattern, (config, concrete))
            if pattern not in once:
                seen[pattern].append(found[concrete])
                once.add(pattern)
    facts: dict[str, float] = {}
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
        listed[word].append(("?" if len(entries) < built else "") + pattern + mark)
    tied = getattr(build(cls, configs[0]), "all_tied_weights_keys", None) or {}
    counts: dict[str, str] = {}
    for config in configs:
        counts |= counts_of(cls, config)
    parameters = [pattern.removeprefix("?") for pattern in listed["Parameter"]]
    return {
        "model_type": configs[0].model_type,
        "prefix": PREFIXES.get(name, getattr(cls, "base_model_prefix", "")),
        **({"below": True} if name in PREFIXES else {}),
        "facts": facts,
        "tied": dict(sorted(tied.items())),
        "counts": counts,
        "refuses": REFUSES_OF_TYPE.get(configs[0].model_type, {}) | REFUSES.get(name, {}),
        **({"widths": widths} if (widths := fixed_widths(cls, configs[0])) else {}),
        "when": {f"Parameter {x}": WHEN[last] for x in parameters if (last := x.rpartition(".")[2]) in WHEN},
        "modules": {word: listed[word] for word in sorted(listed) if listed[word]},
    }  # fmt: skip


def configurations() -> dict[str, tuple[list[str], list[Any]]]:
    """Return family -> classes, and configurations."""
    out: dict[str, tuple[list[str], list[Any]]] = {}
    for path in sorted((HERE / "flax-families").glob("*.npz")):
        raw = json.loads(str(np.load(path)["config"]))
        family = path.name.partition(".")[0]
        classes, found = out.setdefault(family, ([], []))
        name = raw["architectures"][0]
        if name not in classes:
            classes.append(name)
        for more in (*(() if family in INSTEAD else ({},)), *MORE.get(family, ())):
            found.append(transformers.AutoConfig.for_model(**{**raw, **more}))
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
    for name, parts in COMPOSITES.items():
        found[name] = {
            "model_type": "", "prefix": "", "facts": {}, "tied": {}, "counts": {}, "refuses": REFUSES.get(name, {}), "when": {},
            "modules": OWN[name], "parts": parts,
        }  # fmt: skip
    for path in sorted((HERE / "flax-families").glob("*.npz"), key=lambda path: path.stem.partition(".")[2].islower()):
        stored = np.load(path)
        (name,) = json.loads(str(stored["config"]))["architectures"]
        outputs = [x.removeprefix("out/") for x in stored.files if x.startswith("out/")]
        found[RENAMED.get(name, name)].setdefault("outputs", outputs)
    return dict(sorted(found.items()))


def main() -> None:
    logging.disable(logging.WARNING)
    found = entries()
    whole = {name: entry["model_type"] for name, entry in found.items() if "parts" not in entry}
    base = {
        of: name
        for name, of in whole.items()
        if name.endswith("Model") and not name.endswith(("LMHeadModel", "EncoderModel"))
    }
    causal = {of: name for name, of in whole.items() if name.endswith(("ForCausalLM", "LMHeadModel"))}
    made_by = f"tests/golden/make_transformers_classes.py, transformers {transformers.__version__}"
    head = {"made_by": made_by, "library": "transformers", "parts": {"base": base, "causal": causal}}
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in found.items()]
    text = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    OUT.write_text("{\n" + text + ',\n"classes": {\n' + ",\n".join(lines) + "\n}}\n")
    print(f"{OUT}: {len(found)} classes, {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
