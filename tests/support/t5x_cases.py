"""The golden cases of T5X (`tests/golden/make_t5x.py`, and flaxformer's by `make_flaxformer.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from flax import serialization
from flax.traverse_util import unflatten_dict

from support.drawn_cases import DrawnCases
from support.paths import GOLDEN
from support.writers import t5x

ALL = DrawnCases(GOLDEN / "t5x")
CASES, leaves = ALL.names, ALL.leaves
RULES = {  # of each case: the model that its tree selects, and what only its configuration says
    "t5-1.0": ("t5x-1.0", {"feed_forward_proj": "relu"}),
    "t5-1.1": ("t5x-1.1", {"feed_forward_proj": "gated-gelu"}),
    "mt5": ("t5x-mt5", {"feed_forward_proj": "gated-gelu"}),
    "byt5": ("t5x-1.1", {"feed_forward_proj": "gated-gelu"}),
    "ul2": ("t5x-1.1", {"feed_forward_proj": "gated-silu"}),
    "umt5": ("t5x-umt5", {"feed_forward_proj": "gated-gelu"}),
    "umt5-unscanned": ("t5x-umt5", {"feed_forward_proj": "gated-gelu"}),
    "umt5-tied": ("t5x-umt5-tied", {"feed_forward_proj": "gated-gelu"}),
    "longt5-tglobal": ("t5x-longt5", {"feed_forward_proj": "gated-gelu", "local_radius": 5, "tokens_per_block": 4}),
    "longt5-local": ("t5x-longt5-local", {"feed_forward_proj": "gated-gelu", "local_radius": 5}),
    "pix2struct": ("pix2struct", {}),
    "switch": ("t5x-switch", {"expert_capacity": 1000}),
    "switch-c": ("t5x-switch-c", {"expert_capacity": 1000}),
}
SHOWN = {"t5-1.1": "t5-1.1, Flan-T5"}  # one network and one class
FLAXFORMER = ("longt5-tglobal", "longt5-local", "pix2struct", "switch", "switch-c")


def rules(case: str) -> str:
    """Return what the user names: T5X's family, or the model where its tree is that of another one."""
    model = RULES[case][0]
    return model if model in ("t5x-mt5", "t5x-longt5-local", "pix2struct") else "t5x"


def tokens(case: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the inputs by transformers' names."""
    given = ALL.values(case, "in")
    encoder, decoder = given["encoder_input_tokens"], given["decoder_input_tokens"]
    name, there = ("flattened_patches", encoder[..., 0]) if case == "pix2struct" else ("input_ids", encoder)
    mask = (there > 0).astype(np.int32)
    return {name: encoder, "attention_mask": mask, "decoder_input_ids": decoder, "decoder_attention_mask": np.ones_like(decoder)}  # fmt: skip


def as_tensors(case: str) -> dict[str, Any]:
    """Return the inputs as transformers' classes take them."""
    import torch

    given = {name: torch.tensor(x) for name, x in tokens(case).items()}
    return {name: x if x.is_floating_point() else x.long() for name, x in given.items()}


def write(case: str, folder: Path, changed: dict[str, np.ndarray[Any, Any]] | None = None) -> Path:
    """Write the checkpoint of a case as T5X does: the parameters in zarr, the numbers and a part of the optimizer's state in msgpack."""
    every = {f"target/{name}": x for name, x in (leaves(case) if changed is None else changed).items()}
    rows = {f"state/param_states/{name}/v_row": x.mean(axis=-1) for name, x in leaves(case).items() if x.ndim > 1}
    step = {"state/step": np.int32(1000)}
    return t5x(folder / "checkpoint_1000", {**every, **rows, **step}, inline=(*step, *rows))


def write_msgpack(case: str, file: Path) -> Path:
    """Write the parameters as one msgpack file of flax."""
    tree = unflatten_dict({f"target/{name}": x for name, x in leaves(case).items()}, sep="/")
    file.write_bytes(serialization.to_bytes(tree))
    return file
