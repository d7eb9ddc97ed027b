"""Tables that have a row of zeros in one program and none in the other, such as that of the padding word or of the class token."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import torch

from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import derive, floats, rules, tokens


class Padded(torch.nn.Module):
    """A table with a row for the padding word, or positions with one for the class token."""

    def __init__(self, is_table: bool) -> None:
        super().__init__()
        self.own = torch.nn.Embedding(13, 5) if is_table else torch.nn.Parameter(torch.zeros(1, 13, 5))
        self.o = torch.nn.Linear(5, 3)

    def forward(self, x: Any) -> Any:
        return self.o(torch.tanh(self.own(x) if isinstance(self.own, torch.nn.Embedding) else x + self.own))


@pytest.mark.parametrize("is_table", [True, False])
def test_zeros_in_front_of_a_table(is_table: bool) -> None:
    def function(w: Any, x: Any) -> Any:
        padded = jnp.pad(w["e"], ((1, 0), (0, 0)))
        return jnp.tanh(padded[x] if is_table else x + padded) @ w["o"] + w["b"]

    module = Padded(is_table)
    inputs = tokens(13, 4, 9) if is_table else floats(3, 13, 5)
    found = derive(function, module, {"e": (12, 5), "o": (5, 3), "b": (3,)}, inputs)
    own = "{name: own.weight, axes: DC, " if is_table else "{name: own, axes: .DC, "
    assert f"- from: e\n  axes: DC\n  parameter: {own}zeros_before: {{D: 1}}}}" in rules(found, module)
    text = write_rules(found, model_of_module(module, "Model")).text
    planted = text.replace("zeros_before: {D: 1}", "zeros_before: {D: 2}")
    assert [wrong.problem for wrong in compare_rules(planted, found)] == [
        f"expected shape {[13, 5] if is_table else [1, 13, 5]}, got {[14, 5] if is_table else [1, 14, 5]}"
    ]


def test_ones_in_front_of_a_table_have_no_rule() -> None:
    """Planted."""

    def function(w: Any, x: Any) -> Any:
        return jnp.tanh(jnp.pad(w["e"], ((1, 0), (0, 0)), constant_values=1)[x]) @ w["o"] + w["b"]

    module = Padded(True)
    found = derive(function, module, {"e": (12, 5), "o": (5, 3), "b": (3,)}, tokens(13, 4, 9))
    assert found.complete and list(write_rules(found, model_of_module(module, "Model")).open) == ["own.weight"]
