"""Writes rules/diffusers-classes.json: the modules of the PyTorch classes of diffusers that had a flax class, and of their blocks.

    python tests/golden/make_diffusers_classes.py     # in the environment of make_diffusers.py (diffusers 0.35.2)

Which blocks a model has, and how many layers, config.json says: the classes are built on the meta device with settings that
show each block once with and once without what depends on a setting. `verify` then compares the lists with whole models.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch

from convert.planning.modules.blocks import blocks as blocks_of
from convert.planning.modules.formulas import Keys

OUT = Path(__file__).parents[2] / "rules" / "diffusers-classes.json"
MID, MID_KEY = "UNetMidBlock2DCrossAttn", "mid_block_type"
DOWN = {"key": "down_block_types"}
UP = {"key": "up_block_types", "backwards": True}
# Where each class has blocks, and the keys that name their types.
BLOCKS: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "UNet2DConditionModel": {"down_blocks": DOWN, "mid_block": {"key": MID_KEY}, "up_blocks": UP},
    "ControlNetModel": {"down_blocks": DOWN, "mid_block": {"key": MID_KEY}},
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
HEADS = {
    "attention_head_dim": "block_out_channels"
}  # of blocks with attention: heads, in spite of the name, and what they divide
REFUSES = {
    "num_attention_heads": [
        {"other_than": []},
        "the class takes the number of heads from attention_head_dim, and refuses this key",
    ],
    "addition_time_embed_dim": [
        {"where": [[["addition_embed_type", None, True], ["addition_time_embed_dim", None, {"is": "None"}]]]},
        "it stops when it runs, as text_time needs the width to which each number of the image's sizes is embedded",
    ],
}
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
    {**SMALL, **ATTENTION, **TYPES, **SDXL, LINEAR: True, "transformer_layers_per_block": [1, 3], "only_cross_attention": [False, True]},
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


# Sizes that no two keys share; of three blocks, so that each has another one before and after it.
SIZES = [
    {"block_out_channels": [32, 96, 160], "layers_per_block": 3, "in_channels": 5, "out_channels": 7, "latent_channels": 9, "cross_attention_dim": 22, "projection_class_embeddings_input_dim": 82, "conditioning_embedding_out_channels": [11, 13, 17]},
    {"block_out_channels": [224, 64, 128], "layers_per_block": 1, "in_channels": 3, "out_channels": 6, "latent_channels": 10, "cross_attention_dim": 26, "projection_class_embeddings_input_dim": 86, "conditioning_embedding_out_channels": [12, 14, 18]},
]  # fmt: skip
FACTS = (
    *SIZES[0],
    *HEADS,
    DOWN["key"],
    UP["key"],
    MID_KEY,
    "transformer_layers_per_block",
    "norm_num_groups",
)  # keys whose defaults count
# What sizes may follow, the likeliest first: keys and, with `#`, elements of lists.
KEYS = (
    "block_out_channels", "first", "block_out_channels.0", "block_out_channels.-1", "entering.#", "skipped.#", "in_channels", "out_channels", "latent_channels",
    "cross_attention_dim", "attended", "projection_class_embeddings_input_dim", "conditioning_embedding_out_channels.0", "conditioning_embedding_out_channels.-1",
)  # fmt: skip
FORMULAS = (
    *(text for key in KEYS for text in (key, f"2*{key}", f"4*{key}", f"8*{key}")),
    *("+".join(two) for two in itertools.combinations(KEYS, 2)),
)
Sample = tuple[Keys, str, tuple[int, ...]]  # configuration, first number of the name, shape of the weight


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
        parts: name with the mark of its bias -> heading, with the formulas of its axes.
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


def sized(name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the configurations of a class, and each with the sizes of `SIZES`."""
    taken = inspect.signature(getattr(diffusers, name).__init__).parameters
    for config in CONFIGS[name]:
        yield config
        for sizes in SIZES:
            more = {key: value for key, value in sizes.items() if key in taken}
            longer = {key: [*value, value[-1]] for key, value in config.items() if isinstance(value, list) and key != "block_out_channels"}  # fmt: skip
            yield {**config, **longer, **more}


def defaults(name: str) -> dict[str, Any]:
    """Return the defaults of a class's keys."""
    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
    return {key: json.loads(json.dumps(one.default)) for key, one in parameters.items() if key != "self"}


def formulas(samples: list[Sample]) -> tuple[str, ...]:
    """Return the formula of each axis of a module, which holds in all samples; empty where none does."""
    made = []
    for at in range(len(samples[0][2])):
        sizes = {shape[at] for _, _, shape in samples}
        holding = (text for text in FORMULAS if all(keys.count(text, number) == shape[at] for keys, number, shape in samples))  # fmt: skip
        made.append(str(*sizes) if len(sizes) == 1 else next(holding, ""))
    return tuple(made)


def axes() -> dict[tuple[str, str], tuple[str, ...]]:
    """Return class or block, and name of a module with its mark and heading -> the formulas of its axes."""
    samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for name, config in ((of, config) for of in CONFIGS for config in sized(of)):
        model, keys = build(name, config), Keys(config, defaults(name))
        parts = dict(model.named_modules())
        named = {".".join(place): (own, of) for part, block in BLOCKS[name].items() for place, of, own in blocks_of(keys, tuple(part.split(".")), **block)}  # fmt: skip
        within = {place: name for place in named for name in parts if name.startswith(f"{place}.")}
        assert within.keys() == named.keys()
        for place, (own, of) in {"": (keys, name), **named}.items():
            of_place = parts[place]
            for inner, word, bias in modules(of_place, name):
                if place or not inner.startswith(tuple(f"{one}." for one in named)):
                    number = next((key for key in inner.split(".") if key.isdecimal()), "")
                    shape = tuple(of_place.get_submodule(inner).weight.shape)
                    samples[of, f"{counted(inner, counts_of(of), of_place)}{bias}|{word}"].append((own, number, shape))
    return {key: formulas(found) for key, found in samples.items()}


def entries() -> dict[str, Any]:
    """Return class or block -> its entry."""
    blocks: dict[str, dict[str, str]] = defaultdict(dict)
    found: dict[str, Any] = {}
    sizes = {(of, name): f" [{','.join(texts)}]" if any(texts) else "" for (of, name), texts in axes().items()}
    for name, configs in CONFIGS.items():
        own: dict[str, str] = {}
        for config in configs:
            model = build(name, config)
            places = {}
            for place, of in BLOCKS[name].items():
                if (at := dict(model.named_modules()).get(place)) is None:
                    continue
                for where, block in (
                    [(f"{place}.{k}", x) for k, x in enumerate(at)] if of["key"] != MID_KEY else [(place, at)]
                ):
                    places[f"{where}."] = type(block).__name__
                    counts = counts_of(type(block).__name__)
                    for inner, word, bias in modules(block, name):
                        key = f"{counted(inner, counts, block)}{bias}|{word}"
                        blocks[type(block).__name__].setdefault(key, f"{word}{sizes[type(block).__name__, key]}")
            for inner, word, bias in modules(model, name):
                if not inner.startswith(tuple(places)):
                    key = f"{counted(inner, counts_of(name), model)}{bias}|{word}"
                    own.setdefault(key, f"{word}{sizes[name, key]}")
        flax = getattr(diffusers, f"Flax{name}")
        mine = {key.partition("|")[0]: word for key, word in own.items()}
        unread = {
            key: json.loads(json.dumps(parameter.default))
            for key, parameter in inspect.signature(getattr(diffusers, name).__init__).parameters.items()
            if key != "self" and key not in flax.__dataclass_fields__ and key not in HARMLESS
        }
        notes = [] if name == "AutoencoderKL" else [GELU]
        stated = {one: value for one, value in defaults(name).items() if one in FACTS}
        refuses = REFUSES if "num_attention_heads" in defaults(name) else {}
        found[name] = entry(
            mine, counts_of(name), blocks=BLOCKS[name], unread={**unread, **UNREAD.get(name, {})}, notes=notes, facts=stated, refuses=refuses
        )  # fmt: skip
    for block, parts in sorted(blocks.items()):
        found[block] = entry_of_block(block, parts)
    return found


def entry_of_block(block: str, parts: Mapping[str, str]) -> dict[str, Any]:
    """Return the entry of a block; one module may have two types (`proj_in`)."""
    merged = entry({}, {}, **({"heads": HEADS} if any("attentions" in name for name in parts) else {}))
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

    for name in CONFIGS:
        for config in sized(name):
            model = build(name, config)
            actual = {path: (word, bias) for path, word, bias in modules(model, name)}
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
                    number = next((key for key in path.split(".")[module.keys.depth :] if key.isdecimal()), "")
                    for formula, size in zip(module.axes, model.get_submodule(path).weight.shape, strict=True) if module.axes else ():  # fmt: skip
                        assert not formula or module.keys.count(formula, number) == size, (path, formula, size)
            assert listed == set(actual), set(actual) - listed


def nulls(name: str) -> list[str]:
    """Return the keys with a default for which a null stops the class: while it is made, or when it runs."""
    config = next(iter(CONFIGS[name][1:2] if "UNet" in name or "Control" in name else CONFIGS[name]))
    run(name, config)
    found = []
    for key, default in defaults(name).items():
        if default is not None and key not in UNREAD.get(name, {}):
            try:
                run(name, {**config, key: None})
            except (AttributeError, TypeError, ValueError):
                found.append(key)
    return found


def run(name: str, config: Mapping[str, Any]) -> None:
    """Make a model and run it once."""
    model = getattr(diffusers, name)(**config).eval()
    image = torch.zeros(1, 3, 16, 16)
    with torch.no_grad():
        if name == "AutoencoderKL":
            model.decode(model.encode(image).latent_dist.mean)
            return
        given = {"encoder_hidden_states": torch.zeros(1, 5, 16), "added_cond_kwargs": {"text_embeds": torch.zeros(1, 32), "time_ids": torch.zeros(1, 6)}}  # fmt: skip
        more = {"controlnet_cond": torch.zeros(1, 3, 64, 64)} if name == "ControlNetModel" else {}
        model(torch.zeros(1, 4, 8, 8), torch.tensor([3]), **given, **more)


def table() -> dict[str, Any]:
    found = entries()
    roots = [name for name in found if name in CONFIGS]
    return {
        "made_by": f"tests/golden/make_diffusers_classes.py, diffusers {diffusers.__version__}",
        "library": "diffusers",
        "nulls": {name: [key for key in nulls(name) if key not in found[name]["unread"]] for name in roots},
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
