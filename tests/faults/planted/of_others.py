"""Faults that make a written tensor of others of its layer: rows of two in turns, the mean of its heads, a bias folded in."""

from __future__ import annotations

import numpy as np

from faults.expected import HUGGING, Fault
from faults.planted.orders import combined
from faults.planted.values import BERT, GPT, HF25, fault, one
from faults.plants import Tensors

Array = np.ndarray
GATE, UP = f"{HF25}mlp.gate_proj.weight", f"{HF25}mlp.up_proj.weight"
FC, POSITIONS = f"{GPT}mlp.c_fc", "bert.embeddings.position_embeddings"


def in_turns(tensors: Tensors) -> None:
    """A row of the gate, a row of up, and so on, cut into halves."""
    both = np.stack([tensors[GATE], tensors[UP]], 1).reshape(-1, tensors[GATE].shape[1])
    tensors[GATE], tensors[UP] = np.split(both, 2)


def same_heads(x: Array) -> Array:
    """Three heads, each their mean."""
    mean = x.reshape(3, -1, x.shape[1]).mean(0)
    return np.concatenate([mean, mean, mean])


def through_the_norm(tensors: Tensors) -> None:
    """What a batch norm multiplies by, in the kernel in front of it."""
    factor = tensors["norm.weight"] / np.sqrt(tensors["norm.running_var"] + np.float32(1e-5))
    tensors["stem.weight"] = tensors["stem.weight"] * factor[:, None, None, None]


def through_the_weight(tensors: Tensors) -> None:
    """The bias of the norm, in that of the linear layer behind it."""
    bias = tensors[f"{GPT}ln_2.bias"] @ tensors[f"{FC}.weight"]
    tensors[f"{FC}.bias"] = tensors[f"{FC}.bias"] + bias


OF_OTHERS: tuple[Fault, ...] = (
    fault("rows of gate and up in turns", "gemma2-2b", HUGGING, in_turns, GATE, "rows of several tensors", GATE.removesuffix(".weight")),
    one("heads averaged", "bert", HUGGING, f"{BERT}attention.self.query.weight", same_heads, "blocks averaged"),
    fault("a norm's bias folded into the next layer's", "gpt2", HUGGING, through_the_weight, f"{FC}.bias", "a bias folded in", FC),
    fault("a row of token types added to the positions", "bert", HUGGING, combined(f"{POSITIONS}.weight", "bert.embeddings.token_type_embeddings.weight", lambda x, y: x + y[0]), f"{POSITIONS}.weight", "a bias folded in", POSITIONS),
    fault("a batch norm folded into the kernel", "conv-net", "torch", through_the_norm, "stem.weight", "a scale folded in", "stem"),
)  # fmt: skip
