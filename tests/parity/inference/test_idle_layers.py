"""Tensors that no output takes, as those behind the skip connection of a last layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Grade
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import derive, floats

C = 6


class Skips(torch.nn.Module):
    """Layers whose results are added up beside what they pass on, as in WaveNet: nothing takes what the last one passes on."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.gate, self.skip, self.on = (
            torch.nn.ModuleList(torch.nn.Linear(C, C) for _ in range(layers)) for _ in range(3)
        )
        self.norm = torch.nn.ModuleList(torch.nn.BatchNorm1d(C) for _ in range(layers))

    def forward(self, x: Any) -> Any:
        total: Any = 0
        for gate, skip, on, norm in zip(self.gate, self.skip, self.on, self.norm, strict=True):
            y = torch.tanh(gate(x))
            total = total + skip(y)
            x = norm((on(y) + x).mT).mT
        return total.relu()


def _skips(w: Any, x: Any, last: bool = False) -> Any:
    total = 0.0
    for k in range(3):
        y = jnp.tanh(x @ w[f"{k}/g"] + w[f"{k}/gb"])
        total = total + y @ w[f"{k}/s"] + w[f"{k}/sb"]
        x = y @ w[f"{k}/o"] + w[f"{k}/ob"] + x
        x = (x - w[f"{k}/m"]) / jnp.sqrt(w[f"{k}/v"] + 1e-5) * w[f"{k}/n"] + w[f"{k}/nb"]
    return jax.nn.relu(total + x if last else total)


SKIPS = {f"{k}/{name}": (C, C) if name in "gso" else (C,) for k in range(3) for name in ("g", "s", "o", "gb", "sb", "ob", "m", "v", "n", "nb")}  # fmt: skip


def test_what_the_last_layer_passes_on_to_nothing_is_written_as_stored() -> None:
    module = Skips()
    found = derive(_skips, module, SKIPS, floats(4, 7, C))
    assert found.complete
    idle = {name: found.tensor(f"{name.replace('#', '2')}") for name in ("on.#.weight", "on.#.bias", "norm.#.weight", "norm.#.running_var")}  # fmt: skip
    assert {tensor.grade for tensor in idle.values()} == {Grade.INTERCHANGEABLE}
    assert all(tensor.unseen == np.prod(tensor.shape) for tensor in idle.values())
    assert not write_rules(found, model_of_module(module, "Model")).open


@pytest.mark.slow
def test_what_the_last_layer_passes_on_to_the_output_is_a_difference() -> None:
    found = derive(lambda w, x: _skips(w, x, last=True), Skips(), SKIPS, floats(4, 7, C))
    assert not found.complete and found.differences
