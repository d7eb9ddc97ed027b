"""A note says what the proof lacks: inputs that ignore the seed, outputs that ignore the inputs, outputs that are always the same."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from convert.cli.infer_text import summary
from convert.inference.derivation import Derivation
from support.inferred import WIDTH, derive, floats

D = WIDTH
DRAWN = floats(7, D)


class Layer(nn.Module):
    def __init__(self, of: Any = lambda layer, x: layer(x).tanh()) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.of = of

    def forward(self, x: Any) -> Any:
        return self.of(self.layer, x)


def found(function: Any, module: nn.Module, inputs: Any = DRAWN) -> Derivation:
    made = derive(function, module, {"w": (D, D), "b": (D,)}, inputs)
    assert made.complete and made.proof is not None
    return made


def layer(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"] + p["b"])


def test_inputs_that_ignore_the_seed() -> None:
    made = found(layer, Layer(), lambda seed: DRAWN(0))
    said = list(summary(made, {}))
    assert made.proof is not None and made.proof.same_inputs
    note = "the inputs are the same for every seed, and the proof has no others; draw them from np.random.default_rng(seed)"
    assert made.notes == (note,)
    assert said[-1].startswith(
        "proven with 3 further draws of weights, with the same inputs, through the module as it is"
    )


def test_one_input_that_follows_the_seed() -> None:
    made = found(layer, Layer(), lambda seed: {**DRAWN(seed), "positions": np.arange(7)})
    assert made.notes == () and made.proof is not None and not made.proof.same_inputs


def test_no_output_of_the_inputs() -> None:
    made = found(lambda p, x: jnp.tanh(p["w"]) + p["b"], Layer(lambda of, x: torch.tanh(of.weight) + of.bias))
    assert made.notes == (
        "no output depends on the inputs: the outputs are compared as functions of the weights alone",
    )


def test_outputs_that_are_always_the_same() -> None:
    made = found(lambda p, x: layer(p, x) * 0 + 1, Layer(lambda of, x: of(x).tanh() * 0 + 1))
    (note,) = made.notes
    assert note.startswith("the outputs are the same for all weights and inputs, so that they prove nothing")
