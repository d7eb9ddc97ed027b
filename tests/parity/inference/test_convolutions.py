"""`infer` derives convolutions of linen with their arguments, and writes them; a transposed kernel is turned round."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from support.inferred import derive, floats, linen, rules

SLOW = pytest.mark.slow


class Channels(torch.nn.Module):
    """A convolution with the channels first, between two transpositions; `crop` pads the result."""

    def __init__(self, layer: torch.nn.Module, crop: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.c, self.crop = layer, crop

    def forward(self, x: Any) -> Any:
        y = self.c(x.movedim(-1, 1))
        return torch.tanh((functional.pad(y, self.crop) if self.crop else y).movedim(1, -1))


def rule_of(layer: Any, module: torch.nn.Module, *shape: int) -> list[str]:
    function, shapes = linen(layer, np.zeros(shape))
    (rule,) = rules(derive(lambda w, x: jnp.tanh(function(w, x)), module, shapes, floats(*shape)), module)
    return rule.split("\n  ")


@pytest.mark.parametrize(
    ("given", "torchs", "said"),
    [
        ({"padding": "SAME", "kernel_dilation": 2}, {"padding": 2, "dilation": 2}, ["padding: [[2, 2], [2, 2]]", "dilation: [2, 2]"]),
        pytest.param({"padding": "VALID", "strides": 2, "feature_group_count": 2}, {"stride": 2, "groups": 2}, ["padding: VALID", "strides: [2, 2]", "feature_group_count: 2"], marks=SLOW),
        pytest.param({"padding": "SAME", "feature_group_count": 4}, {"padding": 1, "groups": 4}, ["padding: [[1, 1], [1, 1]]", "feature_group_count: 4"], marks=SLOW),
    ],
    ids=["dilated", "grouped", "depthwise, two for each channel"],
)  # fmt: skip
def test_convolutions(given: dict[str, Any], torchs: dict[str, Any], said: list[str]) -> None:
    module = Channels(torch.nn.Conv2d(4, 8, 3, **torchs))
    lines = rule_of(nn.Conv(8, (3, 3), **given), module, 2, 9, 8, 4)
    assert lines[0] == "- dimension_numbers: NHWC,HWIO->NHWC" and set(said) <= set(lines)


@pytest.mark.parametrize(
    ("kernel", "strides", "padding", "torchs", "crop", "said"),
    [
        ((4,), (2,), "SAME", {"padding": 1}, (), ["padding: [[2, 2]]", "strides: [2]"]),
        pytest.param((4, 4), (2, 2), "SAME", {"padding": 1}, (), ["padding: [[2, 2], [2, 2]]", "strides: [2, 2]"], marks=SLOW),
        pytest.param((3, 3), (2, 2), "SAME", {}, (0, -1, 0, -1), ["padding: [[2, 1], [2, 1]]", "strides: [2, 2]"], marks=SLOW),
        pytest.param((3, 2), (2, 1), "VALID", {}, (), ["padding: [[2, 2], [1, 1]]", "strides: [2, 1]"], marks=SLOW),
    ],
    ids=["one axis", "even kernel", "result without its last row", "two strides"],
)  # fmt: skip
def test_transposed_convolutions(
    kernel: Any, strides: Any, padding: str, torchs: Any, crop: Any, said: list[str]
) -> None:
    make = torch.nn.ConvTranspose2d if len(kernel) == 2 else torch.nn.ConvTranspose1d
    module = Channels(make(4, 5, kernel, strides, **torchs), crop)
    lines = rule_of(nn.ConvTranspose(5, kernel, strides=strides, padding=padding), module, 2, *(6, 5)[: len(kernel)], 4)
    assert lines[-1] == "conv_transpose: c" and set(said) <= set(lines)
