"""A convolution whose channels the two programs take apart in the other order: the masks of Conv-TasNet (Luo and Mesgarani 2019), for each speaker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import derive, floats, grades, rules

SIZES = [(3, 5, 7), (2, 8, 8), (4, 4, 8)]  # speakers, channels, features: none, two, and the turned axes equal


def shapes(speakers: int, channels: int, features: int, taps: int) -> dict[str, tuple[int, ...]]:
    return {
        "in": (features, channels),
        "mask": (taps, channels, speakers * channels),
        "bias": (speakers * channels,),
        "out": (channels, 5),
    }


def function(speakers: int) -> Any:
    """Speakers first, channels last."""

    def masked(w: Mapping[str, Any], x: Any) -> Any:
        h = jax.nn.relu(x @ w["in"])
        m = jax.lax.conv_general_dilated(h, w["mask"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        m = jax.nn.softmax((m + w["bias"]).reshape(*h.shape[:2], speakers, -1), 2)
        return jnp.einsum("btsc,co->bsto", h[:, :, None] * m, w["out"])

    return masked


class Masked(torch.nn.Module):
    """Channels first, and of these the channels before the speakers; ``over``: the axis of the softmax, of [batch, channels, speakers, time]."""

    def __init__(self, speakers: int, channels: int, features: int, taps: int, over: int = 2) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(features, channels, bias=False)
        self.m = torch.nn.Conv1d(channels, channels * speakers, taps, padding=taps // 2)
        self.out, self.over = torch.nn.Linear(channels, 5, bias=False), over

    def forward(self, x: Any) -> Any:
        h = torch.relu(self.inner(x)).mT
        m = self.m(h).view(len(x), h.shape[1], -1, h.shape[2]).softmax(self.over)
        return self.out((h[:, :, None] * m).permute(0, 2, 3, 1))


@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("sizes", SIZES)
def test_turned_channels_have_a_rule(sizes: tuple[int, int, int], taps: int) -> None:
    module = Masked(*sizes, taps)
    found = derive(function(sizes[0]), module, shapes(*sizes, taps), floats(2, 11, sizes[2]))
    assert found.complete and grades(found) == {Grade.DERIVED}
    written = rules(found, module)
    assert any("parameter: {name: m.weight" in rule for rule in written), written
    assert any("parameter: {name: m.bias" in rule for rule in written), written


@pytest.mark.slow
@pytest.mark.parametrize("taps", [1, 3])
def test_a_softmax_over_the_other_axis_is_not_derived(taps: int) -> None:
    """Where both axes have one size, no shape shows it."""
    found = derive(function(4), Masked(4, 4, 8, taps, over=1), shapes(4, 4, 8, taps), floats(2, 11, 8))
    assert not found.complete and found.differences
