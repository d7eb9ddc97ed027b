"""Mistakes in a user's reference: in what `build` returns, and in the names of boundaries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from faults.expected import Fault
from faults.plants import InReference, InTarget
from support import small_decoder

CASE = "small-decoder"
NOT_LOADED, TRAINING = "module does not hold the file's values", "module in training mode"
NORM = "blocks.1.norm"


def built(name: str, edit: Callable[[Any], None], at: str, diagnosis: str) -> Fault:
    return Fault(name, CASE, "torch", InTarget(edit), "model", at, diagnosis)


def at_ones(module: Any) -> None:
    weight = module.get_submodule(NORM).weight
    weight.data = torch.ones_like(weight.data)


def tied(module: Any) -> None:
    module.head.weight = module.embed.weight


def reset(module: Any) -> None:
    module.last.running_var = torch.ones_like(module.last.running_var)


def in_training(part: str, module: Any) -> None:
    module.get_submodule(part).train()


def saying(**what: Any) -> Any:
    return partial(mock.patch.dict, small_decoder.SAID, **what)


EXCHANGED = {"blocks.0.norm": NORM, NORM: "blocks.0.norm"}
REFERENCES = [
    built("`build` does not load a norm", at_ones, NORM, NOT_LOADED),
    built("`build` ties the head afterwards", tied, "logits", NOT_LOADED),
    built("`build` resets a buffer", reset, "last", NOT_LOADED),
    built("`build` returns the module in training mode", partial(in_training, ""), "blocks.0", TRAINING),
    built("`build` returns one dropout in training mode", partial(in_training, "blocks.1.drop"), "blocks.1", TRAINING),
    Fault("names of two boundaries exchanged", CASE, "torch", InReference(saying(names=EXCHANGED)), "model", "blocks.0.norm", "boundary names exchanged"),
    Fault("the target rotates other pairs, and keys share a leaf with values", CASE, "torch", InTarget(patch=saying(target="half-split pairs")), "model", "blocks.0.o", "RoPE of other pairs"),
]  # fmt: skip
