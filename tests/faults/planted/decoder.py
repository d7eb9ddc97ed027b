"""Faults in the code of a decoder of plain functions, of which the reference returns the outputs alone."""

from __future__ import annotations

from typing import Any

import torch

from faults.expected import Fault
from faults.plants import InTarget
from support.decoder import FAULTS, layers

# What the whole check says more of than the search that test_divergence.py tests. With outputs alone, the first is the same function
# as one whose rules exchange the two weights, and the check names the rules first.
SAID = {
    "SiLU on the wrong factor": "modules exchanged",
    "RoPE of another base": "RoPE of another base",
    "key heads repeated in turns": "heads repeated in another order",
    "norm behind the addition": "norm behind the addition, not in front of the layer",
}
IN_PLACE, LEFT_OUT = "module called in the place of another", "module left out"


def one_norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The MLP reads through the norm of the attention."""
    x = x + layer.attend(layer.norm_1(x))
    return torch.as_tensor(x + layer.mlp(layer.norm_1(x)))


def called(*numbers: int) -> Any:
    """Other layers are called."""

    def edit(module: Any) -> None:
        module.forward = lambda tokens: module.head(module.pooled(_through(module, tokens, numbers)))

    return edit


def _through(module: Any, tokens: torch.Tensor, numbers: tuple[int, ...]) -> torch.Tensor:
    x = module.begun(module.embed(tokens))
    for k in numbers:
        x = module.layers[k](x)
    return torch.as_tensor(x)


CALLS = {
    "the norm of the attention in front of the MLP, too": (layers(forward=one_norm), IN_PLACE),
    "the first layer called twice": (called(0, 0), IN_PLACE),
    "the last layer left out": (called(0), LEFT_OUT),
}
DECODER = tuple(
    Fault(name, "decoder", "torch", InTarget(edit), "model", "y", SAID.get(name, diagnosis))
    for name, (edit, diagnosis) in {**FAULTS, **CALLS}.items()
)
