"""Faults of recurrent layers, in the model of tests/support/cell_model.py: flax's GRUCell, Haiku's LSTM, a head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import numpy as np

from faults.expected import Fault
from faults.plants import InFile, InReference, InRule, Tensors
from support import cell_model

CELLS = "cells"
Rows = Callable[[list[np.ndarray]], list[np.ndarray]]


def rows(name: str, change: Rows, count: int = 3) -> Callable[[Tensors], None]:
    """An edit of the rows of each gate of a tensor."""

    def edit(tensors: Tensors) -> None:
        tensors[name] = np.concatenate(change(np.split(tensors[name].copy(), count)))

    return edit


def everywhere(change: Rows) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            rows(f"gru.{name}_l0", change)(tensors)

    return edit


def folded(tensors: Tensors) -> None:
    tensors["gru.bias_ih_l0"] = tensors["gru.bias_ih_l0"] + tensors["gru.bias_hh_l0"]
    tensors["gru.bias_hh_l0"] = np.zeros_like(tensors["gru.bias_hh_l0"])


def exchanged(tensors: Tensors) -> None:
    one, two = "gru.bias_ih_l0", "gru.bias_hh_l0"
    tensors[one], tensors[two] = tensors[two], tensors[one]


def doubled(tensors: Tensors) -> None:
    tensors["lstm.bias_hh_l0"] = tensors["lstm.bias_ih_l0"]


def in_file(name: str, edit: Callable[[Tensors], None], at: str, diagnosis: str, model: str) -> Fault:
    return Fault(name, CELLS, "torch", InFile(edit), "weights", at, diagnosis, (at.partition(".")[0], model))


def in_rule(name: str, old: str, new: str, at: str, diagnosis: str) -> Fault:
    """The file is what the rule says, so that only the models tell."""
    return Fault(name, CELLS, "torch", InRule(((old, new),)), "model", at, diagnosis)


def in_reference(name: str, factory: str, at: str, diagnosis: str) -> Fault:
    """The two models compute different recurrences from the same weights."""
    patch = partial(mock.patch.object, cell_model, "reference", getattr(cell_model, factory))
    return Fault(name, CELLS, "torch", InReference(patch), "model", at, diagnosis)


FLAX, HAIKU = "cell: flax.linen.GRUCell", "cell: haiku.LSTM"
LEAVES = """
  leaves:
    ir/kernel: W [I, r]
    iz/kernel: W [I, z]
    in/kernel: W [I, n]
    ir/bias: b [r]
    iz/bias: b [z]
    in/bias: b [n]
    hr/kernel: U [H, r]
    hz/kernel: U [H, z]
    hn/kernel: U [H, n]
    hn/bias: c [n]"""
SPELT = "cell: {n: tanh(W x + b + r * (U h + c)), h: (1 - z) * n + z * h}"
R_FOR_Z = LEAVES.replace("r]", "q]").replace("z]", "r]").replace("q]", "z]")
PACKED = "\n  leaves:\n    linear/w: W U [I+H, {0}]\n    linear/b: b [{0}]"
RESET, STALE = "reset gate on the wrong side of the matmul", "stale state across steps"
ONE, BOTH = "another value in the file", "other values in the file"

CELL_FAULTS: tuple[Fault, ...] = (
    in_file("gates in the order z, r, n", everywhere(lambda x: [x[1], x[0], x[2]]), "gru.weight_ih_l0", "gates in another order", BOTH),
    in_file("update gate of the other polarity", everywhere(lambda x: [x[0], -x[1], x[2]]), "gru.weight_ih_l0", "update gate polarity", "update gate polarity"),
    in_file("b_hn folded into b_in", folded, "gru.bias_ih_l0", "b_hn folded into b_in", BOTH),
    in_file("hidden matrices transposed", rows("gru.weight_hh_l0", lambda x: [m.T for m in x]), "gru.weight_hh_l0", "transposed", ONE),
    in_file("forget bias missing", rows("lstm.bias_ih_l0", lambda x: [x[0], x[1] - 1, x[2], x[3]], 4), "lstm.bias_ih_l0", "forget bias missing", ONE),
    in_file("forget bias added twice", rows("lstm.bias_ih_l0", lambda x: [x[0], x[1] + 1, x[2], x[3]], 4), "lstm.bias_ih_l0", "forget bias added twice", ONE),
    in_file("LSTM gates in the source's order", rows("lstm.weight_hh_l0", lambda x: [x[0], x[2], x[1], x[3]], 4), "lstm.weight_hh_l0", "gates in another order", ONE),
    in_file("biases of input and state exchanged", exchanged, "gru.bias_ih_l0", "input and hidden tensors exchanged", BOTH),
    in_file("a bias where the source has none", doubled, "lstm.bias_hh_l0", "bias that the source does not add", ONE),
    in_rule("reset and update gate exchanged", FLAX, SPELT + R_FOR_Z, "gru", "gates in another order"),
    in_rule("update gate of the other polarity", FLAX, SPELT.replace("(1 - z) * n + z * h", "(1 - z) * h + z * n") + LEAVES, "gru", "update gate polarity"),
    in_rule("forget bias missing", HAIKU, "cell: {}" + PACKED.format("igfo"), "lstm", "forget bias missing"),
    in_rule("forget bias of two", HAIKU, "cell: {f: sigmoid(W x + U h + b + 2)}" + PACKED.format("igfo"), "lstm", "forget bias added twice"),
    in_rule("LSTM gates in torch's order", HAIKU, "cell: {f: sigmoid(W x + U h + b + 1)}" + PACKED.format("ifgo"), "lstm", "gates in another order"),
    in_reference("reset gate on the wrong side of the matmul", "reset_before", "gru", RESET),
    in_reference("stale state across steps", "stale_state", "gru", STALE),
    in_reference("both, as Burn before 0.17", "both", "gru", f"{RESET} and {STALE}"),
    in_reference("update gate of the other polarity", "polarity", "gru", "update gate polarity"),
    in_reference("stale state across steps (LSTM)", "stale_lstm", "lstm", STALE),
)  # fmt: skip
