"""Faults of the features that RoPE rotates, where a leaf has all heads in one axis."""

from __future__ import annotations

import numpy as np

from faults.expected import Fault
from faults.plants import InFile, InRule, Tensors
from support.rope_model import HALVES, WIDTH

CASE = "rope-model"


def stored(name: str) -> np.ndarray:
    """A kernel or bias in the source's order, its outputs first."""
    from faults.own_models import OWN

    return np.load(OWN[CASE].checkpoint())[name].T


def across(tensors: Tensors) -> None:
    """All heads reordered as if they were one."""
    for name, leaf in (("q.weight", "wq/kernel"), ("q.bias", "wq/bias"), ("k.weight", "wk/kernel")):
        x = stored(leaf)
        tensors[name] = np.concatenate([x[0::2], x[1::2]])


def as_stored(tensors: Tensors) -> None:
    tensors["k.weight"] = stored("wk/kernel")


def twice(tensors: Tensors) -> None:
    x = tensors["q.weight"].reshape(-1, WIDTH, tensors["q.weight"].shape[1])
    tensors["q.weight"] = x[:, HALVES].reshape(tensors["q.weight"].shape)


ROPE = [
    Fault("RoPE declared on the axis of all heads", CASE, "torch", InRule((("rope: {H: interleaved}\n  linear: q", "rope: {E: interleaved}\n  linear: q"),)), "rules", "rope-model.yaml:14:3", "refused"),
    Fault("RoPE pairs reordered over all heads at once", CASE, "torch", InFile(across), "weights", "q.weight", "RoPE pairs reordered over all heads at once", ("q", "other values in the file")),
    Fault("RoPE pairs of keys in the source's order", CASE, "torch", InFile(as_stored), "weights", "k.weight", "RoPE pairs still interleaved", ("k", "another value in the file")),
    Fault("RoPE pairs reordered twice", CASE, "torch", InFile(twice), "weights", "q.weight", "RoPE pairs de-interleaved needlessly", ("q", "another value in the file")),
    Fault("RoPE pairs of queries not declared", CASE, "torch", InRule((("  rope: {H: interleaved}\n  linear: q", "  linear: q"),)), "model", "q", "RoPE pairs still interleaved"),
    Fault("RoPE declared with half the width of a head", CASE, "torch", InRule(((f"equals: {WIDTH}", f"equals: {WIDTH // 2}"),)), "model", "q", "RoPE pairs of heads of another width"),
]  # fmt: skip
