"""One layer or parameter that stands in several places of a module: its tensors have several names in the state_dict."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch

from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import WIDTH, derive

D = WIDTH


class Layer(torch.nn.Module):
    def __init__(self, shift: torch.nn.Parameter) -> None:
        super().__init__()
        self.up, self.shift = torch.nn.Linear(D, D), shift

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.up(x)) * self.shift


class Model(torch.nn.Module):
    """Two layers, of which one is applied twice, and a parameter of the model that both have."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(D))
        one, other = Layer(self.shift), Layer(self.shift)
        self.layers = torch.nn.ModuleList([one, other, one])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def model(w: Any, x: Any) -> Any:
    for k in (0, 1, 0):
        x = x + jnp.tanh(x @ w[f"k{k}"] + w[f"c{k}"]) * w["s"]
    return x


def test_the_names_of_what_several_places_share_are_written() -> None:
    module = Model()
    found = derive(model, module, {"k0": (D, D), "k1": (D, D), "c0": (D,), "c1": (D,), "s": (D,)})
    assert found.complete, (found.differences, found.proof)
    written = write_rules(found, model_of_module(module, "Model"))
    assert written.open == {}
    assert 'loads: "Model", shared: {layers.0: [layers.2], shift: [layers.0.shift, layers.1.shift]}' in written.text
