"""Writes rules/diffusers-classes.json: the modules of the PyTorch classes of diffusers that had a flax class, and of their blocks.

    python tests/golden/make_diffusers_classes.py     # in the environment of make_diffusers.py (diffusers 0.35.2)

Which blocks a model has, and how many layers, config.json says: the classes are built on the meta device with settings that
show each block once with and once without what depends on a setting. `verify` then compares the lists with whole models.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch

OUT = Path(__file__).parents[2] / "rules" / "diffusers-classes.json"
MID = "UNetMidBlock2DCrossAttn"
DOWN = {"key": "down_block_types"}
UP = {"key": "up_block_types", "backwards": True}
# Where each class has blocks, and the keys that name their types.
BLOCKS: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "UNet2DConditionModel": {"down_blocks": DOWN, "mid_block": {"key": "mid_block_type", "default": MID}, "up_blocks": UP},
    "ControlNetModel": {"down_blocks": DOWN, "mid_block": {"key": "mid_block_type", "default": MID}},
    "AutoencoderKL": {"encoder.down_blocks": DOWN, "decoder.up_blocks": UP},
}  # fmt: skip
DEPTH = {"attentions.#.transformer_blocks": "transformer_layers_per_block"}
# The numbers of layers, by the end of a block's name: sums of products of keys; of a list, its length.
COUNTS: Mapping[str, Mapping[str, str]] = {
    "DownBlock2D": {"resnets": "layers_per_block", "attentions": "layers_per_block", **DEPTH},
    "UpBlock2D": {"resnets": "layers_per_block+1", "attentions": "layers_per_block+1", **DEPTH},
    "ControlNetModel": {
        "controlnet_down_blocks": "down_block_types*layers_per_block+down_block_types",
        "controlnet_cond_embedding.blocks": "2*conditioning_embedding_out_channels+-2",
    },
    "DownEncoderBlock2D": {"resnets": "layers_per_block"},
    "UpDecoderBlock2D": {"resnets": "layers_per_block+1"},
    MID: {"attentions.0.transformer_blocks": "transformer_layers_per_block"},
}
LINEAR = "use_linear_projection"
# Modules that depend on a setting: [key, its default, with which value].
WHEN = {
    r"Linear attentions\..\.proj_(in|out)": [[LINEAR, False, True]],
    r"Conv2d attentions\..\.proj_(in|out)": [[LINEAR, False, False]],
    r"Conv2d (down|up)samplers\.0\.conv": [["last", False, False]],
    r"Conv2d resnets\.0\.conv_shortcut": [["widens", False, True]],
    r"Linear add_embedding\..*": [["addition_embed_type", None, True]],
}
# The flax classes have this epsilon where PyTorch's have 1e-6 (models/attention_flax.py, FlaxTransformer2DModel).
EPSILONS = {r"(.*\.)?attentions\.[#\d]+\.norm": 1e-5}
# Keys that change no output of the model, and keys of both classes of which the flax class reads one.
HARMLESS = ("upcast_attention", "force_upcast", "latents_mean", "latents_std", "shift_factor", "sample_size", "dropout", "mid_block_only_cross_attention")  # fmt: skip
UNREAD: Mapping[str, dict[str, Any]] = {"AutoencoderKL": {"act_fn": "silu"}}
GELU = (
    "diffusers' PyTorch class computes GELU with erf and the norms before attention with an epsilon of 1e-6, the flax class with tanh and with 1e-5; "
    "no key of config.json says so, and the outputs differ by about 1e-3 (docs/models/flax-diffusers.md has the lines that make them equal)"
)
SMALL = {"block_out_channels": [32, 64], "layers_per_block": 2, "norm_num_groups": 32}
ATTENTION = {
    "cross_attention_dim": 16,
    "attention_head_dim": [2, 4],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
}
SDXL = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80}
TYPES = {
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
}
UNETS = [
    {**SMALL, **ATTENTION, "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]},
    {**SMALL, **ATTENTION, **TYPES, **SDXL, LINEAR: True, "transformer_layers_per_block": [1, 3]},
    {**SMALL, **ATTENTION, **TYPES, "block_out_channels": [32, 32], "mid_block_type": None},
]  # fmt: skip
CONFIGS: Mapping[str, list[dict[str, Any]]] = {
    "UNet2DConditionModel": UNETS,
    "ControlNetModel": [{k: v for k, v in config.items() if k not in ("up_block_types", "mid_block_type")} for config in UNETS],
    "AutoencoderKL": [
        {**SMALL, "block_out_channels": widths, "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2, "norm_num_groups": 16}
        for widths in ([32, 64], [32, 32])
    ],
}  # fmt: skip


def build(name: str, config: Mapping[str, Any]) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = getattr(diffusers, name)(**config)
    return model


def heading(module: torch.nn.Module, name: str, of: str) -> str:
    """Return the type of a module; of a norm also its epsilon, and its number of groups where config.json states it."""
    word = type(module).__name__
    if not hasattr(module, "eps"):
        return word
    epsilon = next(
        (value for pattern, value in EPSILONS.items() if of != "AutoencoderKL" and re.fullmatch(pattern, name)),
        module.eps,
    )
    groups = (
        " $norm_num_groups" if of == "AutoencoderKL" and word == "GroupNorm" else " 32" if word == "GroupNorm" else ""
    )
    return f"{word} {epsilon:g}{groups}"


def modules(model: torch.nn.Module, of: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, heading, and ` -bias` for one without a bias."""
    for name, module in model.named_modules():
        if parameters := dict(module.named_parameters(recurse=False)):
            assert "weight" in parameters and set(parameters) <= {"weight", "bias"}, (name, set(parameters))
            yield name, heading(module, name, of), "" if "bias" in parameters else " -bias"


def counted(name: str, counts: Mapping[str, str], block: torch.nn.Module) -> str:
    """Return a name with `#` for the numbers of counted layers; only the first layer may widen, or all do, after a concatenation."""
    if name.endswith("conv_shortcut") and not type(block).__name__.endswith("UpBlock2D"):
        return name
    keys: list[str] = []
    for key in name.split("."):
        keys.append("#" if key.isdecimal() and ".".join(keys) in counts else key)
    return ".".join(keys)


def entry(parts: Mapping[str, str], counts: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """Return the entry of a class or a block.

    Args:
        parts: name with the mark of its bias -> heading.
    """
    listed: dict[str, list[str]] = defaultdict(list)
    when = {}
    for name, word in parts.items():
        listed[word.partition("|")[0]].append(name)
        key = f"{word.split()[0]} {name.partition(' ')[0]}"
        if found := [stated for pattern, stated in WHEN.items() if re.fullmatch(pattern, key)]:
            (when[key],) = found
    used = {
        place: key
        for place, key in counts.items()
        if any(f"{name.partition(' ')[0]}.".startswith(f"{place}.#.") for name in parts)
    }
    return {
        "prefix": "",
        "facts": {},
        "tied": {},
        "refuses": {},
        "counts": used,
        "when": when,
        "modules": dict(sorted(listed.items())),
        **more,
    }


def entries() -> dict[str, Any]:
    """Return class or block -> its entry."""
    blocks: dict[str, dict[str, str]] = defaultdict(dict)
    found: dict[str, Any] = {}
    for name, configs in CONFIGS.items():
        own: dict[str, str] = {}
        for config in configs:
            model = build(name, config)
            places = {}
            for place, of in BLOCKS[name].items():
                if (at := dict(model.named_modules()).get(place)) is None:
                    continue
                for where, block in (
                    [(f"{place}.{k}", x) for k, x in enumerate(at)] if "default" not in of else [(place, at)]
                ):
                    places[f"{where}."] = type(block).__name__
                    counts = counts_of(type(block).__name__)
                    for inner, word, bias in modules(block, name):
                        blocks[type(block).__name__].setdefault(f"{counted(inner, counts, block)}{bias}|{word}", word)
            for inner, word, bias in modules(model, name):
                if not inner.startswith(tuple(places)):
                    own.setdefault(f"{counted(inner, counts_of(name), model)}{bias}|{word}", word)
        flax = getattr(diffusers, f"Flax{name}")
        mine = {key.partition("|")[0]: word for key, word in own.items()}
        unread = {
            key: json.loads(json.dumps(parameter.default))
            for key, parameter in inspect.signature(getattr(diffusers, name).__init__).parameters.items()
            if key != "self" and key not in flax.__dataclass_fields__ and key not in HARMLESS
        }
        notes = [] if name == "AutoencoderKL" else [GELU]
        found[name] = entry(
            mine, counts_of(name), blocks=BLOCKS[name], unread={**unread, **UNREAD.get(name, {})}, notes=notes
        )
    for block, parts in sorted(blocks.items()):
        found[block] = entry_of_block(block, parts)
    return found


def entry_of_block(block: str, parts: Mapping[str, str]) -> dict[str, Any]:
    """Return the entry of a block; one module may have two types (`proj_in`)."""
    merged = entry({}, {})
    for word in dict.fromkeys(parts.values()):
        one = entry({key.partition("|")[0]: word for key, other in parts.items() if other == word}, counts_of(block))
        for key in ("counts", "when", "modules"):
            merged[key] |= one[key]
    return merged


def counts_of(block: str) -> Mapping[str, str]:
    return next((counts for end, counts in COUNTS.items() if block.endswith(end)), {})


def verify(table: Mapping[str, Any]) -> None:
    """Compare the lists with whole models.

    Raises:
        AssertionError: they differ.
    """
    from convert.planning.modules.table import module_list

    for name, configs in CONFIGS.items():
        for config in configs:
            actual = {path: (word, bias) for path, word, bias in modules(build(name, config), name)}
            listed: set[str] = set()
            for module in module_list(table, name, config).modules:
                pattern = re.compile(r"\.".join(r"\d+" if key == "#" else re.escape(key) for key in module.name))
                these = {path for path in actual if pattern.fullmatch(path)}
                assert these and not these & listed and not module.optional, (name, module)
                listed |= these
                for path in these:
                    word, bias = actual[path]
                    kind, *numbers = word.replace("$norm_num_groups", str(config["norm_num_groups"])).split()
                    assert [kind, *map(float, numbers)] == [
                        x for x in (module.type, module.epsilon, module.groups) if x is not None
                    ], (path, word, module)
                    assert module.bias is (bias == ""), path
            assert listed == set(actual), set(actual) - listed


def table() -> dict[str, Any]:
    found = entries()
    roots = [name for name in found if name in CONFIGS]
    return {
        "made_by": f"tests/golden/make_diffusers_classes.py, diffusers {diffusers.__version__}",
        "library": "diffusers",
        "classes": {name: found[name] for name in roots},
        "blocks": {name: one for name, one in found.items() if name not in roots},
    }


def main() -> None:
    made = table()
    verify(made)
    parts = [
        f"{json.dumps(key)}: {lined(value) if isinstance(value, dict) else json.dumps(value)}"
        for key, value in made.items()
    ]
    OUT.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    print(f"{OUT}: {len(made['classes'])} classes, {OUT.stat().st_size:,} bytes")


def lined(entries: Mapping[str, Any]) -> str:
    """Write one entry a line."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in entries.items()) + "\n}"


if __name__ == "__main__":
    main()
