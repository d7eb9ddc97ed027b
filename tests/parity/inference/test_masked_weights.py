"""Buffers that multiply a weight: masked convolutions and products, pruned weights, fixed kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.functional import conv2d, linear
from torch.nn.utils import prune

from convert.inference.derivation import Arithmetic, Grade
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import WIDTH, derive, floats, rules, sources, tokens

PIXELS = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]], np.float64)
LOWER = np.tril(np.ones((WIDTH, WIDTH)))
SHAPES = {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH)}


class Masked(torch.nn.Module):
    """Two layers whose weights are multiplied by a buffer."""

    def __init__(self, mask: Any, kernel: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.m = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for part in self.m:
            part.w = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH, *kernel))
            part.register_buffer("mask", torch.as_tensor(mask).expand(WIDTH, WIDTH, *kernel).clone())

    def forward(self, x: Any) -> Any:
        for part in self.m:
            w = part.w * part.mask
            x = torch.tanh(linear(x, w) if w.ndim == 2 else conv2d(x, w, padding=1))
        return x


def convolved(x: Any, kernel: Any) -> Any:
    return jnp.tanh(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NCHW", "HWIO", "NCHW")))


def test_a_masked_convolution():
    def function(w, x):
        for name in "ab":
            x = convolved(x, w[name] * PIXELS[:, :, None, None])
        return x

    module = Masked(PIXELS, (3, 3))
    found = derive(function, module, dict.fromkeys("ab", (3, 3, WIDTH, WIDTH)), floats(2, WIDTH, 5, 6))
    assert sources(found)["m.0.w"] == "a" and found.tensor("m.0.mask").parts[0].arithmetic is Arithmetic.OWN
    (written,) = [rule for rule in rules(found, module) if "constant" in rule]
    assert "value: [[1, 1, 1], [1, 0, 0], [0, 0, 0]]" in written and "constant: m.{0,1}.mask" in written


@pytest.mark.slow
def test_another_mask_is_a_difference():
    def function(w, x):
        for name in "ab":
            x = convolved(x, w[name] * PIXELS.T[:, :, None, None])
        return x

    found = derive(function, Masked(PIXELS, (3, 3)), dict.fromkeys("ab", (3, 3, WIDTH, WIDTH)), floats(2, WIDTH, 5, 6))
    assert found.differences and not found.complete


def in_place(w: Any) -> Any:
    w.data[:, :, -1].zero_()
    return w


ZEROED = {
    "in place": in_place,
    "filled": lambda w: w.masked_fill(torch.arange(4)[:, None] == 3, 0),
    "joined": lambda w: torch.cat([w[:, :, :-1], torch.zeros_like(w[:, :, -1:])], 2),
    "another row": lambda w: torch.cat([torch.zeros_like(w[:, :, :1]), w[:, :, 1:]], 2),
    "another number": lambda w: w.masked_fill(torch.arange(4)[:, None] == 3, 1e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ZEROED)
def test_elements_that_the_module_sets_to_zero(how):
    """As the vertical stack of a Gated PixelCNN, whose first layer does not see the row of the pixel itself."""

    class Zeroed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Conv2d(WIDTH, WIDTH, (4, 3)), torch.nn.Conv2d(WIDTH, WIDTH, 1)

        def forward(self, x: Any) -> Any:
            return self.b(torch.tanh(conv2d(x, ZEROED[how](self.a.weight), self.a.bias, padding=(3, 1))[:, :, :5]))

    def function(w, x):
        kernel, dimensions = w["a"] * np.array([1, 1, 1, 0])[:, None, None, None], ("NCHW", "HWIO", "NCHW")
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), [(3, 0), (1, 1)], dimension_numbers=dimensions)
        y = jnp.tanh(y + w["ab"][:, None, None])
        return jnp.einsum("nchw,co->nohw", y, w["b"]) + w["bb"][:, None, None]

    shapes = {"a": (4, 3, WIDTH, WIDTH), "ab": (WIDTH,), "b": (WIDTH, WIDTH), "bb": (WIDTH,)}
    found = derive(function, Zeroed(), shapes, floats(2, WIDTH, 5, 5))
    assert found.complete != how.startswith("another") and bool(found.differences) != found.complete
    if found.complete:
        assert sources(found) == {"a.weight": "a", "a.bias": "ab", "b.weight": "b", "b.bias": "bb"}
    elif how == "another row":
        zeros = "zeros at the taps (0, 0), (0, 1), (0, 2), and the JAX model at the taps (3, 0), (3, 1), (3, 2)"
        assert zeros in found.differences[0].brief and "pads" not in found.differences[0].brief


def test_a_masked_product():
    def function(w, x):
        for name in "ab":
            x = jnp.tanh(x @ (w[name] * LOWER))
        return x

    module = Masked(LOWER.T)
    (written,) = [rule for rule in rules(derive(function, module, SHAPES), module) if "constant" in rule]
    assert "value: {below: 0, diagonal: 1, above: 1}" in written


@pytest.mark.parametrize("pruned", [False, True])
def test_a_weight_with_a_mask_of_ones(pruned):
    """As a weight that torch prunes has before the mask is loaded. A mask that hides elements is a difference: the source has none."""
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Tanh())
    prune.random_unstructured(module[0], "weight", 0.5) if pruned else prune.identity(module[0], "weight")
    found = derive(lambda w, x: jnp.tanh(x @ w["a"]), module, {"a": (WIDTH, WIDTH)})
    assert found.complete != pruned
    if not pruned:
        assert sources(found)["0.weight_orig"] == "a" and "value: 1" in "".join(rules(found, module))


def test_a_mask_that_both_sides_learn():
    module = Masked(np.ones((WIDTH, WIDTH)))

    def function(w, x):
        for name in "ab":
            x = jnp.tanh(x @ (w[name] * w[f"{name}/mask"]).T)
        return x

    found = derive(function, module, {**SHAPES, "a/mask": (WIDTH, WIDTH), "b/mask": (WIDTH, WIDTH)})
    assert found.complete and sources(found)["m.0.w"] == "a" and sources(found)["m.1.mask"] == "b/mask"


class Gated(torch.nn.Module):
    """A vector of scales of which a buffer keeps some, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.s, self.w = torch.nn.Parameter(torch.ones(WIDTH)), torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("keep", torch.as_tensor(np.arange(WIDTH) % 3 == 0).double())

    def forward(self, x: Any) -> Any:
        return self.w(x + x * (self.s * self.keep))


def test_masked_scales():
    keep = np.arange(WIDTH) % 3 == 0
    shapes = {"s": (WIDTH,), "w": (WIDTH, WIDTH), "b": (WIDTH,)}
    found = derive(lambda w, x: (x + x * (w["s"] * keep)) @ w["w"] + w["b"], Gated(), shapes)
    assert found.complete and sources(found)["s"] == "s"


class Blurred(torch.nn.Module):
    """A fixed kernel that is saved, and indices and a mask that are no floating numbers."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.as_tensor(kernel).expand(WIDTH, 1, 2, 2).clone())
        self.register_buffer("order", torch.arange(WIDTH).flip(0))
        self.register_buffer("seen", torch.tril(torch.ones(3, 3)).bool())
        self.w = torch.nn.Conv2d(WIDTH, WIDTH, 1, bias=False)

    def forward(self, x: Any) -> Any:
        y = conv2d(x[:, self.order], self.kernel, stride=2, groups=WIDTH)
        return self.w(y).masked_fill(~self.seen, 0.0)


@pytest.mark.parametrize("kernel", [np.array([[1.0, 2], [3, 4]]) / 10, np.full((2, 2), 0.25)])
def test_a_fixed_kernel_and_whole_numbers(kernel):
    def function(w, x):
        x = x[:, ::-1]
        fixed = np.broadcast_to(kernel, (WIDTH, 1, 2, 2))
        y = jax.lax.conv_general_dilated(x, fixed, (2, 2), "VALID", feature_group_count=WIDTH)
        y = jnp.einsum("nchw,oc->nohw", y, w["w"])
        return jnp.where(np.tril(np.ones((3, 3), bool)), y, 0.0)

    module = Blurred(kernel)
    found = derive(function, module, {"w": (WIDTH, WIDTH)}, floats(2, WIDTH, 6, 6))
    written = "\n".join(rules(found, module))
    assert {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}
    assert "dtype: int64" in written and "constant: order" in written and "dtype: bool" in written
    assert ("value: [[0.1, 0.2]" if kernel[0, 0] == 0.1 else "value: [[0.25, 0.25]") in written


class Causal(torch.nn.Module):
    """A convolution whose mask is saved, as wide as its kernel is long, and a scale that the source's code lacks."""

    def __init__(self, width: int, entries: int) -> None:
        super().__init__()
        self.emb, self.head = torch.nn.Embedding(entries, width), torch.nn.Linear(width, entries, bias=False)
        self.conv = torch.nn.Conv1d(width, width, 5, padding=2, bias=False)
        self.conv.register_buffer("mask", torch.ones(width, width, 5))
        self.conv.mask[:, :, 3:] = 0
        self.scale = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        y = self.emb(x).transpose(1, 2)
        y = torch.nn.functional.conv1d(y, self.conv.weight * self.conv.mask, padding=2)
        return self.head(torch.tanh(y).transpose(1, 2) * self.scale)


def test_the_letters_of_a_mask_are_those_of_its_weight():
    def function(w, x):
        kernel = w["conv"] * (np.arange(5) < 3)[:, None, None]
        y = jax.lax.conv_general_dilated(w["emb"][x], kernel, (1,), [(2, 2)], dimension_numbers=("NWC", "WIO", "NWC"))
        return jnp.tanh(y) @ w["head"]

    def found(width: int) -> tuple[Any, str]:
        module = Causal(width, 7)
        shapes = {"emb": (7, width), "conv": (5, width, width), "head": (width, 7)}
        derived = derive(function, module, shapes, tokens(7, 3, 9))
        return derived, write_rules(derived, model_of_module(module, "Model")).text

    text = found(5)[1]  # the kernel has the same size
    assert "L: {is: a size that only the target has, equals: 5}" in text and "axes: L\n" in text  # of the scale
    assert [mismatch.tensor for mismatch in compare_rules(text, found(6)[0])] == ["scale"]


class Mixing(torch.nn.Module):
    """Mixes tokens with those before them by a learned matrix, as a causal gMLP does."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.w, self.way = torch.nn.Parameter(torch.zeros(7, 7)), way
        self.register_buffer("hidden", torch.triu(torch.ones(7, 7), 1).bool())

    def forward(self, x: Any) -> Any:
        if self.way == "tril":
            return torch.tril(self.w) @ x
        if self.way == "upper":
            return torch.triu(self.w) @ x
        if self.way == "scaled":
            return (self.w / torch.arange(1, 8)[:, None]).tril() @ x
        if self.way == "gates":
            return self.w.sigmoid().tril() @ x
        if self.way == "mask":
            return self.w * ~self.hidden @ x
        return self.w.masked_fill(self.hidden, -torch.inf).softmax(-1) @ x


SEEN = np.tri(7)
MIXED = {
    "tril": lambda w, x: jnp.tril(w["w"]) @ x,
    "where": lambda w, x: jnp.where(SEEN > 0, w["w"], 0) @ x,
    "mask": lambda w, x: (w["w"] * SEEN) @ x,
    "scaled": lambda w, x: (jnp.tril(w["w"]) / np.arange(1, 8.0)[:, None]) @ x,
    "gates": lambda w, x: jnp.tril(jax.nn.sigmoid(w["w"])) @ x,
    "softmax": lambda w, x: jax.nn.softmax(jnp.where(SEEN > 0, w["w"], -1e30)) @ x,
}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *((source, target) for source in ("tril", "where", "mask") for target in ("tril", "mask")),
        *((way, way) for way in ("softmax", "scaled", "gates")),
    ],
)
def test_a_matrix_of_which_both_programs_use_a_triangle(source: str, target: str) -> None:
    module = Mixing(target)
    found = derive(MIXED[source], module, {"w": (7, 7)}, floats(3, 7, 8))
    assert found.complete and sources(found)["w"] == "w"
    assert not write_rules(found, model_of_module(module, "Model")).open


@pytest.mark.parametrize("source", ["tril", "mask"])
def test_the_other_triangle_is_no_such_matrix(source: str) -> None:
    found = derive(MIXED[source], Mixing("upper"), {"w": (7, 7)}, floats(3, 7, 8))
    assert not found.complete or write_rules(found, model_of_module(Mixing("upper"), "Model")).open


class Mixer(torch.nn.Module):
    """Mixes tokens by the softmax of a learned matrix, in front of anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = torch.nn.Parameter(torch.zeros(7, 7)), torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.head(self.w.softmax(-1) @ x)


@pytest.mark.parametrize("axis", [-1, 0])
def test_a_softmax_of_a_matrix_in_front_of_a_layer(axis: int) -> None:
    function = lambda w, x: (jax.nn.softmax(w["w"], axis) @ x) @ w["h"]  # noqa: E731
    found = derive(function, Mixer(), {"w": (7, 7), "h": (8, 8)}, floats(3, 7, 8))
    assert found.complete is (axis == -1)
