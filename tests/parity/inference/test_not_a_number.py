"""The module alone gives NaN with the weights that were found: the words say so, and where it comes from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from support.inferred import derive, floats


class Logarithm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return torch.log(self.linear(x))


def test_nan_of_the_module_alone_is_named():
    found = derive(lambda w, x: x @ w["w"] + w["b"], Logarithm(), {"w": (4, 3), "b": (3,)}, floats(5, 4))
    (difference,) = found.differences
    assert not found.complete
    assert "the target gives NaN, and the JAX model does not: " in difference.problem
    assert "the first comes from `log` (test_not_a_number.py:" in difference.problem
