"""`infer` derives convolutions of linen with their arguments, and writes them; a transposed kernel is turned round.

A filter for each channel may be a sum of products with shifted values in the source.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from convert.inference.derivation import Grade
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import UNPROVEN, WIDTH, derive, floats, grades, linen, rules

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


def test_a_depthwise_convolution_has_a_letter_for_its_groups() -> None:
    """So the rules are those of every width."""
    module = Channels(torch.nn.Conv2d(4, 4, 3, padding=1, groups=4))
    lines = rule_of(nn.Conv(4, (3, 3), padding="SAME", feature_group_count=4), module, 2, 9, 8, 4)
    (letter,) = [line[-1] for line in lines if line.startswith("feature_group_count: ")]
    assert f"axes: PQO{letter}" in lines  # O: the axis of the inputs of a group, which has one element


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


@pytest.mark.parametrize(
    ("channels", "kernel", "strides", "padding", "torchs", "crop", "said"),
    [
        (3, (4,), (2,), "SAME", {"padding": 1}, (), ["axes: PDC", "padding: [[2, 2]]", "strides: [2]"]),
        pytest.param(4, (4, 4), (2, 2), "SAME", {"padding": 1}, (), ["padding: [[2, 2], [2, 2]]", "strides: [2, 2]"], marks=SLOW),
        pytest.param(3, (3, 3), (2, 2), "SAME", {}, (0, -1, 0, -1), ["padding: [[2, 1], [2, 1]]"], marks=SLOW),
        pytest.param(3, (3, 2), (2, 1), "VALID", {}, (), ["padding: [[2, 2], [1, 1]]", "strides: [2, 1]"], marks=SLOW),
        pytest.param(3, (3, 3), (1, 1), ((1, 1), (0, 0)), {"padding": (1, 2)}, (), ["padding: [[1, 1], [0, 0]]"], marks=SLOW),
        pytest.param(3, (3, 3), (1, 1), ((0, 0), (0, 0)), {"padding": (2, 2)}, (), ["padding: [[0, 0], [0, 0]]"], marks=SLOW),
        pytest.param(1, (3, 1), (1, 1), "SAME", {"padding": (1, 0)}, (), ["padding: [[1, 1], [0, 0]]"], marks=SLOW),
    ],
    ids=["one axis", "as many channels", "result without its last row", "VALID", "explicit", "none", "one channel"],
)  # fmt: skip
def test_kernels_of_the_forward_convolution(
    channels: int, kernel: Any, strides: Any, padding: Any, torchs: Any, crop: Any, said: list[str]
) -> None:
    """With transpose_kernel=True JAX flips the kernel itself: it was a rule that makes something else."""
    make = torch.nn.ConvTranspose2d if len(kernel) == 2 else torch.nn.ConvTranspose1d
    module = Channels(make(4, channels, kernel, strides, **torchs), crop)
    layer = nn.ConvTranspose(channels, kernel, strides=strides, padding=padding, transpose_kernel=True)
    lines = rule_of(layer, module, 2, *(6, 5)[: len(kernel)], 4)
    assert {*said, "transpose_kernel: true", "conv_transpose: c"} <= set(lines)


@SLOW
def test_a_kernel_of_size_one_is_not_flipped() -> None:
    """The letters of its axes say it all: with and without transpose_kernel it is one convolution."""
    module = Channels(torch.nn.ConvTranspose2d(4, 3, 1, 2, output_padding=1))
    lines = rule_of(nn.ConvTranspose(3, (1, 1), strides=(2, 2), transpose_kernel=True), module, 2, 6, 5, 4)
    assert "- dimension_numbers: NHWC,HWOI->NHWC" in lines and "transpose_kernel: true" not in lines


@SLOW
def test_a_transposed_convolution_without_padding_is_not_valid() -> None:
    """VALID pads the input by what the kernel covers; no padding is another convolution."""
    module = Channels(torch.nn.ConvTranspose1d(4, 3, 3, padding=2))
    lines = rule_of(nn.ConvTranspose(3, (3,), padding=((0, 0),)), module, 2, 6, 4)
    assert "padding: [[0, 0]]" in lines


@SLOW
def test_a_kernel_that_is_stored_as_torch_has_it() -> None:
    """The source moves the axes of the leaf itself: the letters are those of the leaf."""

    def function(w: Any, x: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jnp.tanh(
            jax.lax.conv_general_dilated(x, w["k"].transpose(2, 3, 1, 0), (1, 1), "VALID", dimension_numbers=numbers)
        )

    module = Channels(torch.nn.Conv2d(4, 3, (3, 2), bias=False))
    (rule,) = rules(derive(function, module, {"k": (3, 4, 3, 2)}, floats(2, 6, 5, 4)), module)
    assert rule.startswith("- dimension_numbers: NHWC,OIHW->NHWC\n  axes: DCPQ")


class Causal(torch.nn.Module):
    """A filter for each channel between two layers; the padding behind the last place is cut off."""

    def __init__(self, taps: int) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.c = torch.nn.Conv1d(WIDTH, WIDTH, taps, groups=WIDTH, padding=taps - 1)

    def forward(self, x: Any) -> Any:
        y = self.c(self.a(x).transpose(1, 2))[..., : x.shape[1]]
        return self.b(torch.tanh(y.transpose(1, 2)))


TAPS = 4
CAUSAL = {
    **dict.fromkeys(("a", "b"), (WIDTH, WIDTH)),
    **dict.fromkeys(("ab", "bb", "kb"), (WIDTH,)),
    "k": (TAPS, WIDTH),
}


def shifted(w: Any, x: Any, order: Any = range(TAPS)[::-1], back: int = 0) -> Any:
    """The filters of `Causal` as a sum; the tap that belongs to each shift, and how much further back all look."""
    y = x @ w["a"] + w["ab"]
    length = y.shape[1]
    moved = [jnp.pad(y, ((0, 0), (shift + back, 0), (0, 0)))[:, :length] for shift in range(TAPS)]
    made = sum(part * w["k"][tap] for part, tap in zip(moved, order, strict=True))
    return jnp.tanh(made + w["kb"]) @ w["b"] + w["bb"]


def test_a_sum_of_shifted_products_is_a_convolution() -> None:
    module = Causal(TAPS)
    found = derive(shifted, module, CAUSAL)
    assert "- dimension_numbers: NWC,WO->NWC\n  axes: PD\n  from: k\n  bias: kb\n  conv: c" in rules(found, module)
    assert grades(found) == {Grade.DERIVED}


@SLOW
def test_a_sum_of_shifted_products_on_a_map_is_a_convolution() -> None:
    def function(w: Any, x: Any) -> Any:
        moved = jnp.pad(x, ((0, 0), (2, 2), (1, 1), (0, 0)))
        parts = [moved[:, 2 * i : 2 * i + 9 : 2, j : j + 8] * w["k"][i, j] for i in range(3) for j in range(3)]
        return jnp.tanh(sum(parts))

    layer = torch.nn.Conv2d(4, 4, 3, stride=(2, 1), padding=(2, 1), dilation=(2, 1), groups=4, bias=False)
    module = Channels(layer)
    (rule,) = rules(derive(function, module, {"k": (3, 3, 4)}, floats(2, 9, 8, 4)), module)
    assert rule.startswith("- dimension_numbers: NHWC,HWO->NHWC")


@SLOW
def test_a_filter_that_is_stored_from_the_last_place_on_has_no_words() -> None:
    module = Causal(TAPS)
    found = derive(lambda w, x: shifted(w, x, range(TAPS)), module, CAUSAL)
    assert found.complete and list(write_rules(found, model_of_module(module, "Model")).open) == ["c"]


@SLOW
def test_shifts_that_look_further_back_are_a_difference() -> None:
    found = derive(lambda w, x: shifted(w, x, back=1), Causal(TAPS), CAUSAL)
    (difference,) = found.differences
    assert "the target convolves with c.weight" in difference.problem and grades(found) <= UNPROVEN


def test_convolutions_that_differ_in_strides_are_two_rules() -> None:
    class Pair(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = jnp.tanh(nn.Conv(4, (3, 3), padding=1, name="stem")(x))
            return jnp.tanh(nn.Conv(4, (3, 3), 2, padding=1, name="down")(x))

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.down = (torch.nn.Conv2d(4, 4, 3, stride=k, padding=1) for k in (1, 2))

        def forward(self, x: Any) -> Any:
            return self.down(self.stem(x.movedim(-1, 1)).tanh()).tanh().movedim(1, -1)

    function, shapes = linen(Pair(), np.zeros((2, 9, 8, 4)))
    stem, down = rules(derive(function, Module(), shapes, floats(2, 9, 8, 4)), Module())
    assert "conv: stem" in stem and "strides" not in stem
    assert "conv: down" in down and "strides: [2, 2]" in down


class Windows(torch.nn.Module):
    """A convolution of the features of several windows, each by columns, with ``turned``, or by rows, as the source has them."""

    def __init__(self, turned: bool = True) -> None:
        super().__init__()
        self.c, self.turned = torch.nn.Conv2d(18, 4, 1), turned

    def forward(self, x: Any) -> Any:
        windows = x.movedim(-1, 1).unflatten(1, (2, 3, 3))
        return self.c((windows.transpose(2, 3) if self.turned else windows).flatten(1, 3)).tanh().movedim(1, -1)


def test_channels_in_another_order_are_parts_of_an_axis() -> None:
    function, shapes = linen(nn.Conv(4, (1, 1)), np.zeros((2, 3, 4, 18)))
    derived = derive(lambda w, x: jnp.tanh(function(w, x)), Windows(), shapes, floats(2, 3, 4, 18))
    bias, kernel = sorted(rules(derived, Windows()))
    assert bias == "- from: params/bias\n  parameter: c.bias"
    assert kernel == '- from: params/kernel\n  axes: ..(C F E)D\n  parameter: {name: c.weight, axes: "D(C E F).."}'
    found = derive(lambda w, x: jnp.tanh(function(w, x)), Windows(turned=False), shapes, floats(2, 3, 4, 18))
    assert rules(found, Windows())[0].startswith("- dimension_numbers")


class Film(torch.nn.Module):
    """A (2+1)-dimensional convolution, as in R(2+1)D: over each image, then over time."""

    def __init__(self) -> None:
        super().__init__()
        self.image = torch.nn.Conv3d(4, 4, (1, 3, 3), padding=(0, 1, 1))
        self.time = torch.nn.Conv3d(4, 5, (3, 1, 1), padding=(1, 0, 0), bias=False)

    def forward(self, x: Any) -> Any:
        return self.time(torch.relu(self.image(x.permute(0, 4, 1, 2, 3)))).permute(0, 2, 3, 4, 1)


def test_kernels_of_an_image_or_of_time_in_a_film() -> None:
    def function(w: Any, x: Any) -> Any:
        of_image = functools.partial(jax.lax.conv_general_dilated, rhs=w["i"], window_strides=(1, 1), padding="SAME")
        y = jax.vmap(lambda x: of_image(x, dimension_numbers=("NHWC", "HWIO", "NHWC")), 1, 1)(x) + w["b"]
        y = jax.nn.relu(y).transpose(0, 2, 3, 1, 4).reshape(-1, x.shape[1], 4)
        y = jax.lax.conv_general_dilated(y, w["t"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return y.reshape(*x.shape[:1], *x.shape[2:4], -1, 5).transpose(0, 3, 1, 2, 4)

    module = Film()
    found = derive(function, module, {"i": (3, 3, 4, 4), "b": (4,), "t": (3, 4, 5)}, floats(2, 6, 5, 3, 4))
    assert found.complete
    written = "\n".join(rules(found, module))
    assert "name: image.weight, axes: DC.PQ}" in written.replace('"', "") and "time.weight, axes: " in written, written


class ByHand(torch.nn.ConvTranspose2d):
    """Multiplies its kernel itself."""

    def forward(self, x: Any) -> Any:
        y = torch.einsum("bihw,iopq->bohpwq", x, self.weight)
        return y.flatten(4).flatten(2, 3) + self.bias[:, None, None]


class Upscaled(torch.nn.Module):
    """A transposed convolution beside a projection of the same map, as the mask decoder of Segment Anything has them."""

    def __init__(self, up: type[torch.nn.ConvTranspose2d] = torch.nn.ConvTranspose2d) -> None:
        super().__init__()
        self.up, self.side = up(8, 8, 2, 2), torch.nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        y = self.up(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return torch.cat([y.tanh(), self.side(x).sin().repeat_interleave(2, 1).repeat_interleave(2, 2)], -1)


@pytest.mark.parametrize("up", [torch.nn.ConvTranspose2d, ByHand])
def test_a_transposed_convolution_beside_a_smaller_projection_of_the_same_map(up: Any) -> None:
    def function(w: Any, x: Any) -> Any:
        y = jnp.einsum("bhwi,ipqo->bhpwqo", x, w["u"]) + w["b"]
        y = y.reshape(y.shape[0], 2 * x.shape[1], 2 * x.shape[2], 8)
        side = jnp.sin(x @ w["s"] + w["c"])
        return jnp.concatenate([jnp.tanh(y), side.repeat(2, 1).repeat(2, 2)], -1)

    shapes = {"u": (8, 2, 2, 8), "b": (8,), "s": (8, 4), "c": (4,)}
    module = Upscaled(up)
    found = derive(function, module, shapes, floats(2, 4, 3, 8))
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert not write_rules(found, model_of_module(module, "Model")).open
