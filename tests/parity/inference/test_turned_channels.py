"""A convolution whose channels the two programs take apart in the other order: the masks of Conv-TasNet (Luo and Mesgarani 2019), for each speaker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from convert.inference.derivation import BY_OUTPUTS, Grade
from support.inferred import derive, floats, grades, layer_norm, rules

BLOCKS = 6  # behind each upsampling
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


def upsample(w: Mapping[str, Any], x: Any) -> Any:
    """Twice a map of channels of which each point becomes four, in TensorFlow's `depth_to_space`: the channels are the last of the three axes."""
    for k in range(2):
        b, height, width, c = x.shape
        y = (x @ w[f"up{k}/kernel"] + w[f"up{k}/bias"]).reshape(b, height, width, 2, 2, c)
        y = y.transpose(0, 1, 3, 2, 4, 5).reshape(b, 2 * height, 2 * width, c)
        x = y + x.repeat(2, 1).repeat(2, 2)
        for j in range(BLOCKS):
            y = layer_norm(x, w[f"{k}/{j}/scale"], w[f"{k}/{j}/bias"])
            x = x + jnp.tanh(y @ w[f"{k}/{j}/mix"]) * w[f"{k}/{j}/gain"]
    return x


class Upsample(torch.nn.Module):
    """With `torch.nn.PixelShuffle`, or the same by hand: the channels are the first of the three axes."""

    def __init__(self, c: int, *, by_hand: bool) -> None:
        super().__init__()
        self.up = torch.nn.ModuleList(torch.nn.Conv2d(c, 4 * c, 1) for _ in range(2))
        self.norm = torch.nn.ModuleList(torch.nn.LayerNorm(c, eps=1e-6) for _ in range(2 * BLOCKS))
        self.mix = torch.nn.ModuleList(torch.nn.Linear(c, c, bias=False) for _ in range(2 * BLOCKS))
        self.gain = torch.nn.Parameter(torch.ones(2 * BLOCKS, c))
        self.by_hand = by_hand

    def forward(self, x: Any) -> Any:
        x = x.permute(0, 3, 1, 2)
        for k, up in enumerate(self.up):
            b, c, h, w = x.shape
            y = up(x)
            if self.by_hand:
                y = y.view(b, c, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c, 2 * h, 2 * w)
            else:
                y = torch.nn.functional.pixel_shuffle(y, 2)
            x = (y + torch.nn.functional.interpolate(x, scale_factor=2)).permute(0, 2, 3, 1)
            for j in range(BLOCKS * k, BLOCKS * (k + 1)):
                x = x + torch.tanh(self.mix[j](self.norm[j](x))) * self.gain[j]
            x = x.permute(0, 3, 1, 2)
        return x.permute(0, 2, 3, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "by_hand"),  # 4: the two turned axes are equal
    [(6, False), (6, True), (4, False), (4, True)],
)
def test_a_pixel_shuffle_of_the_other_order_has_a_rule(channels: int, by_hand: bool) -> None:
    leaves: dict[str, tuple[int, ...]] = {}
    for k in range(2):
        leaves |= {f"up{k}/kernel": (channels, 4 * channels), f"up{k}/bias": (4 * channels,)}
        for j in range(BLOCKS):  # so many vectors fit a norm that the search must try the other order early
            leaves |= {f"{k}/{j}/{name}": (channels,) for name in ("scale", "bias", "gain")}
            leaves[f"{k}/{j}/mix"] = (channels, channels)
    module = Upsample(channels, by_hand=by_hand)
    found = derive(upsample, module, leaves, floats(2, 3, 5, channels))
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert BY_OUTPUTS not in {part.evidence.by for tensor in found.tensors for part in tensor.parts}
    assert any("layer_norm: norm" in rule for rule in rules(found, module))
