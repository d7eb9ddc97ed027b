"""One convolution of a program against two of the other: parts of the outputs or of the inputs of a kernel, and the rules of such parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from support.inferred import UNPROVEN, derive, floats, grades, rules

C, E, SIDE = 5, 6, 5
FUNCTIONS = (jnp.tanh, jax.nn.sigmoid)
Shapes = dict[str, tuple[int, ...]]


def convolved(x: Any, kernel: Any, dilation: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", rhs_dilation=(dilation,) * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


class Apart(nn.Module):
    """A convolution for each part of the outputs."""

    def __init__(self, outputs: Sequence[int]) -> None:
        super().__init__()
        self.f, self.g = (nn.Conv2d(C, width, 3, padding=1) for width in outputs)

    def forward(self, x: Any) -> Any:
        x = x.permute(0, 3, 1, 2)
        return torch.cat([self.f(x).tanh(), self.g(x).sigmoid()], 1).permute(0, 2, 3, 1)


def split(w: Any, x: Any, at: int) -> Any:
    parts = jnp.split(convolved(x, w["k"]) + w["b"], [at], -1)
    return jnp.concatenate([function(part) for function, part in zip(FUNCTIONS, parts, strict=True)], -1)


def listed(w: Any, x: Any) -> Any:
    """Each kernel is an element of the first axis."""
    parts = (convolved(x, w["k"][k]) + w["b"][k] for k in range(2))
    return jnp.concatenate([function(part) for function, part in zip(FUNCTIONS, parts, strict=True)], -1)


def biases(w: Any, x: Any) -> Any:
    """Only the biases are one leaf."""
    parts = (convolved(x, w[name]) + b for name, b in zip("fg", jnp.split(w["b"], 2), strict=True))
    return jnp.concatenate([function(part) for function, part in zip(FUNCTIONS, parts, strict=True)], -1)


OF_OUTPUTS = [
    ("equal", (E, E), lambda w, x: split(w, x, E), {"k": (3, 3, C, 2 * E), "b": (2 * E,)}, "axes: PQC(D + D)"),
    ("unequal", (E, 4), lambda w, x: split(w, x, E), {"k": (3, 3, C, E + 4), "b": (E + 4,)}, "part: 1 of 2"),
    ("one channel", (3, 1), lambda w, x: split(w, x, 3), {"k": (3, 3, C, 4), "b": (4,)}, "axes: PQD(C + 1)"),
    ("elements of an axis", (E, E), listed, {"k": (2, 3, 3, C, E), "b": (2, E)}, "stacked: {i: 0}"),
    ("biases", (E, E), biases, {"f": (3, 3, C, E), "g": (3, 3, C, E), "b": (2 * E,)}, "axes: (C + C)"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("outputs", "function", "shapes", "said"), [x[1:] for x in OF_OUTPUTS], ids=[x[0] for x in OF_OUTPUTS])  # fmt: skip
def test_outputs_of_one_kernel_are_two_convolutions(outputs: Any, function: Any, shapes: Shapes, said: str) -> None:
    module = Apart(outputs)
    written = rules(derive(function, module, shapes, floats(2, SIDE, SIDE, C)), module)
    assert any(said in rule for rule in written), written


class Joined(nn.Module):
    """One convolution of channels side by side, as the fused gate of an attention U-Net."""

    def __init__(self, inputs: Sequence[int], turned: bool, taps: int) -> None:
        super().__init__()
        self.inputs, self.turned = list(inputs), turned
        self.gate = nn.Conv2d(sum(inputs), E, taps, padding=taps // 2)

    def forward(self, x: Any) -> Any:
        x, g = x.permute(0, 3, 1, 2).split(self.inputs, 1)
        pair = [x, g.relu()]
        return self.gate(torch.cat(pair[::-1] if self.turned else pair, 1)).tanh().permute(0, 2, 3, 1)


class Added(nn.Module):
    """A convolution for each part of the inputs; the results are added up."""

    def __init__(self, inputs: Sequence[int]) -> None:
        super().__init__()
        self.inputs = list(inputs)
        self.x, self.g = (nn.Conv2d(width, E, 3, padding=1, bias=k == 0) for k, width in enumerate(inputs))

    def forward(self, x: Any) -> Any:
        x, g = x.permute(0, 3, 1, 2).split(self.inputs, 1)
        return (self.x(x) + self.g(g.relu())).tanh().permute(0, 2, 3, 1)


def added(w: Any, x: Any, at: int, dilation: int = 1) -> Any:
    x, g = x[..., :at], jax.nn.relu(x[..., at:])
    return jnp.tanh(convolved(x, w["x"]) + w["b"] + convolved(g, w["g"], dilation))


def joined(w: Any, x: Any, at: int, function: Any = jax.nn.relu) -> Any:
    x, g = x[..., :at], function(x[..., at:])
    return jnp.tanh(convolved(jnp.concatenate([x, g], -1), w["k"]) + w["b"])


@pytest.mark.parametrize(
    ("inputs", "turned", "taps", "said"),
    [((4, 4), False, 1, "axes: D(C + C).."), ((4, 3), True, 3, "axes: D(C + E)PQ, part: 2 of 2")],
)
def test_kernels_of_values_side_by_side_are_one(inputs: Any, turned: bool, taps: int, said: str) -> None:
    module = Joined(inputs, turned, taps)
    shapes = {name: (taps, taps, width, E) for name, width in zip("xg", inputs, strict=True)} | {"b": (E,)}
    found = derive(lambda w, x: added(w, x, inputs[0]), module, shapes, floats(2, SIDE, SIDE, sum(inputs)))
    assert any(said in rule.replace('"', "") for rule in rules(found, module))


@pytest.mark.parametrize(("inputs", "said"), [((4, 4), "axes: PQ(C + C)D"), ((3, 1), "axes: PQ(D + 1)C")])
def test_inputs_of_one_kernel_are_two_convolutions(inputs: Any, said: str) -> None:
    module = Added(inputs)
    shapes = {"k": (3, 3, sum(inputs), E), "b": (E,)}
    found = derive(lambda w, x: joined(w, x, inputs[0]), module, shapes, floats(2, SIDE, SIDE, sum(inputs)))
    assert any(said in rule for rule in rules(found, module))


def test_another_dilation_or_function_is_no_joined_kernel() -> None:
    inputs, kernels = floats(2, SIDE, SIDE, 7), {"x": (3, 3, 4, E), "g": (3, 3, 3, E), "b": (E,)}
    one = derive(lambda w, x: added(w, x, 4, dilation=2), Joined((4, 3), False, 3), kernels, inputs)
    two = derive(lambda w, x: joined(w, x, 4, jnp.tanh), Added((4, 3)), {"k": (3, 3, 7, E), "b": (E,)}, inputs)
    for found in (one, two):
        assert not found.complete
        assert grades(found) & UNPROVEN


class Heads(nn.Module):
    """Two layers of one output, such as a mean and its logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(C, 1), nn.Linear(C, 1)

    def forward(self, x: Any) -> Any:
        return torch.cat([self.f(x).tanh(), self.g(x).sigmoid()], -1)


def test_outputs_of_one_element_each() -> None:
    def function(w: Any, x: Any) -> Any:
        a, b = jnp.split(x @ w["k"] + w["b"], 2, -1)
        return jnp.concatenate([jnp.tanh(a), jax.nn.sigmoid(b)], -1)

    module = Heads()
    written = rules(derive(function, module, {"k": (C, 2), "b": (2,)}, floats(4, C)), module)
    assert ["part: 1 of 2" in rule or "part: 2 of 2" in rule for rule in written] == [True, True]


def test_leaves_of_unlike_paths_are_one_tensor() -> None:
    module = nn.Linear(C, 2 * E, bias=False)
    shapes = {"a/kernel": (C, E), "b/inner/kernel": (C, E)}
    found = derive(lambda w, x: jnp.concatenate([x @ w[name] for name in shapes], -1), module, shapes, floats(4, C))
    assert np.array_equal([len(part.elements) for part in found.tensors[0].parts], [C * E, C * E])
    assert any('from: "{a,b/inner}/kernel"' in rule for rule in rules(found, module))


def test_a_kernel_of_one_tap_over_the_rows_of_an_image() -> None:
    """Equinox's `Conv1d` for each row, against a `Conv2d`: both have one tap, over other axes."""

    def of_row(w: Any, x: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w["k"], (1,), "VALID", dimension_numbers=("NCH", "OIH", "NCH")) + w["b"]

    def function(w: Any, x: Any) -> Any:
        return jnp.tanh(jax.vmap(lambda rows: of_row(w, rows), 2, 2)(x))

    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(C, E, 1)

        def forward(self, x: Any) -> Any:
            return self.conv(x).tanh()

    module = Image()
    found = derive(function, module, {"k": (E, C, 1), "b": (E, 1)}, floats(2, C, SIDE, SIDE))
    assert found.complete
    assert any("parameter: {name: conv.weight" in rule for rule in rules(found, module)), rules(found, module)
