"""MaxText's hybrid and sparse models in their published sizes, from shapes alone: no setting is needed, and transformers' class has these tensors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers

import convert
from support import maxtext
from support.goldens import SpecsOnly

pytestmark = pytest.mark.slow

NEXT = {"s": 12, "p": 3, "V": 151936, "D": 2048, "N": 16, "K": 2, "H": 256, "Q": 512, "A": 4096, "F": 512, "S": 512, "E": 512, "P": 12288, "B": 64, "C": 8192, "T": 4, "U": 32, "W": 128, "Z": 4096}  # fmt: skip
NEWER = NEXT | {"V": 248320, "E": 256, "J": 16, "R": 2, "Y": 128}
TOWER = {"V": 151936, "K": 8, "H": 128, "W": 1024, "A": 16, "B": 64, "M": 4096, "L": 4096, "J": 4096, "Z": 2304, "T": 2, "S": 16, "X": 16, "C": 3}  # fmt: skip
SOUND = {"Q": 1280, "q": 1280, "O": 20, "P": 64, "R": 5120, "U": 1, "c": 480, "d": 480, "h": 3, "w": 3, "Y": 7680}
COMPOSITE = {"in_proj_qkvz": "P", "in_proj_ba": "B"}
COUNTS = {
    "3-vl-2b": (28, 24, 3),
    "3-vl-4b": (36, 24, 3),
    "3-vl-30b-a3b": (48, 27, 3),
    "3-omni-30b-a3b": (48, 27, 3, 32),
}  # layers of the decoder, of the vision tower, those that give features, and of the tower for sound
STACKS = ("/decoder/layers", "/blocks", "/merger", "/Qwen3OmniAudioEncoder_0/layers")
SIZES: dict[
    str, tuple[str, dict[str, int]]
] = {  # maxtext 0.2.5 configs/models: the golden that has the names, its letters
    "80b-a3b": ("qwen3-next", NEXT),
    "3-vl-2b": ("qwen3-vl", TOWER | {"D": 2048, "N": 16, "F": 6144}),
    "3-vl-4b": ("qwen3-vl", TOWER | {"D": 2560, "N": 32, "F": 9728}),
    "3-vl-30b-a3b": ("qwen3-vl-moe", TOWER | {"D": 2048, "N": 32, "K": 4, "F": 768, "E": 128, "W": 1152, "B": 72, "M": 4304, "L": 4608, "J": 4608}),
    "3-omni-30b-a3b": ("qwen3-omni", TOWER | SOUND | {"V": 152064, "D": 2048, "N": 32, "K": 4, "F": 768, "E": 128, "W": 1152, "B": 72, "M": 4304, "L": 4608, "J": 4608}),
    "4-284b": ("deepseek4", {"V": 129280, "D": 4096, "N": 64, "K": 1, "H": 512, "L": 1024, "G": 8, "I": 4096, "O": 1024, "o": 8192, "B": 4, "b": 4, "M": 16384, "R": 16, "F": 2048, "S": 2048, "E": 256, "T": 6, "C": 4, "c": 128, "g": 1024, "X": 64, "Y": 128, "x": 8192, "y": 256}),
    "4-284b, scanned": ("deepseek4", {}),
    "3.5-35b-a3b": ("qwen3.5", NEWER | {"s": 10}),
    "3.5-397b-a17b": ("qwen3.5", NEWER | {"s": 15, "D": 4096, "N": 32, "A": 8192, "F": 1024, "S": 1024, "E": 512, "P": 20480, "B": 128, "C": 12288, "U": 64, "Z": 8192, "R": 4}),
    "3.2-671b": ("deepseek3.2", {"d": 3, "m": 58, "V": 129280, "D": 7168, "N": 128, "Q": 192, "L": 1536, "R": 512, "C": 576, "J": 256, "W": 128, "F": 18432, "M": 2048, "S": 2048, "E": 256, "X": 64, "Y": 128}),
}  # fmt: skip


def published(name: str) -> SpecsOnly:
    """The tree of a published size: the golden's names, the axes of its leaves at other sizes."""
    if name.endswith(", scanned"):
        return SpecsOnly(
            _in_blocks(
                {leaf: (x.spec.shape, x.spec.dtype) for leaf, x in published(name.partition(",")[0]).leaves.items()}
            )
        )
    case, sizes = SIZES[name]
    plan = convert.plan_conversion(maxtext.rules(case), maxtext.checkpoint(case), settings=maxtext.settings(case))
    axes = {part.leaf: [x for x, _ in part.stored] for step in plan.steps for part in step.parts}
    for merge in plan.merges.values():
        axes.pop(merge.name)
        axes |= {merge.first: [*merge.product.first], merge.second: [*merge.product.second]}
    composite = {leaf: x for leaf in axes for key, x in COMPOSITE.items() if f"/{key}/" in leaf and case == "qwen3.5"}
    axes |= {
        leaf: [*axes[leaf][:2], x] for leaf, x in composite.items()
    }  # the parts of that axis, one by one, in the plan
    specs = {leaf: (tuple(sizes.get(x, 1) for x in letters) or (1,), "bfloat16") for leaf, letters in axes.items()}
    for key, count in zip(STACKS, COUNTS.get(name, ()), strict=False):  # one by one
        first = {leaf: spec for leaf, spec in specs.items() if f"{key}_0/" in leaf}
        specs |= {leaf.replace(f"{key}_0/", f"{key}_{k}/"): x for leaf, x in first.items() for k in range(count)}
    return SpecsOnly(_deepseek_4(specs) if case == "deepseek4" else specs)


def _deepseek_4(specs: dict[str, tuple[tuple[int, ...], str]]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Two layers with a window, then by turns one whose compressed keys an indexer chooses and one with the other kind; three choose experts by the token."""
    made = {leaf: spec for leaf, spec in specs.items() if "/layers_" not in leaf}
    for k in range(43):
        of, router = (0 if k < 2 else 1 + k % 2, 0 if k < 3 else 1)
        for leaf, spec in specs.items():
            if f"/layers_{router if leaf.startswith('nnx_aux') else of}/" in leaf:
                made[re.sub(r"/layers_\d/", f"/layers_{k}/", leaf)] = spec
    return made


def _in_blocks(specs: dict[str, tuple[tuple[int, ...], str]]) -> dict[str, tuple[tuple[int, ...], str]]:
    """The 40 layers behind the first three in 20 blocks of two, stacked on axis 1; on axis 0, what is no parameter."""
    made = {}
    for leaf, (shape, dtype) in specs.items():
        layer = re.search(r"/layers_(\d+)/", leaf)
        if layer is None or int(layer[1]) < 3:
            made[leaf] = (shape, dtype)
        elif int(layer[1]) < 5:
            axis = 0 if leaf.startswith("nnx_aux") else 1
            stacked = (*shape[:axis], 20, *shape[axis:])
            made[leaf.replace(layer[0], f"/scanned_blocks/layers_{int(layer[1]) - 3}/")] = (stacked, dtype)
    return made


def joined(shapes: dict[str, tuple[int, ...]], vl: bool) -> dict[str, tuple[int, ...]]:
    """Join the experts of published names as transformers 5 does when it loads them; those of Qwen 3-VL are joined, in another order of axes."""
    made: dict[str, tuple[int, ...]] = {}
    counts: dict[str, int] = {}
    for name, shape in shapes.items():
        if found := re.fullmatch(r"(.*\.experts)\.\d+\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight", name):
            down, up = found[2] in ("down_proj", "w2"), found[2] in ("up_proj", "w3")
            of_all = f"{found[1]}.{'down_proj' if down else 'gate_up_proj'}"
            counts[of_all] = counts.get(of_all, 0) + (0 if up else 1)
            made[of_all] = (counts[of_all], *(shape if down else (2 * shape[0], shape[1])))
        elif ".experts." in name and vl:  # exchanged as it loads
            made[name] = (shape[0], *shape[:0:-1])
        else:
            made[name] = shape
    return made


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_need_no_setting_and_match_transformers(name: str) -> None:
    plan = convert.plan_conversion("maxtext", published(name))
    assert plan.version == name.partition(",")[0] and plan.config is not None
    (architecture,) = plan.config["architectures"]
    model_class: Any = getattr(transformers, architecture)
    with torch.device("meta"):
        made = model_class(model_class.config_class(**plan.config)).state_dict()
    if plan.config["tie_word_embeddings"]:
        made.pop("lm_head.weight")
    assert {key: tuple(x.shape) for key, x in made.items()} == joined(
        {s.name: s.spec.shape for s in plan.steps}, "-vl-" in name
    )
