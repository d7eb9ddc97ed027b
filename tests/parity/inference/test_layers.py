"""`infer` derives convolutions, norms with statistics, normalised kernels and recurrent layers of linen."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, floats, grades, linen, rules, sources

D = WIDTH


class Images(nn.Module):
    """Channels last."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(8, (3, 3), strides=2, padding="SAME")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=True)(x))
        x = nn.Conv(8, (3, 3), feature_group_count=8, use_bias=False)(x)
        x = nn.silu(nn.GroupNorm(num_groups=4)(x))
        x = jnp.tanh(nn.ConvTranspose(8, (2, 2), strides=(2, 2), padding="VALID")(x))
        x = nn.softmax(x, (1, 2)) @ jnp.eye(8)  # positions have an order
        at = jnp.arange(1.0, 9.0)
        x = x * at[:, None, None] + at[:, None] * x**2
        return nn.Dense(5)(x.reshape(len(x), -1))


class Channels(torch.nn.Module):
    """Channels first; flattened with the channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Conv2d(3, 8, 3, 2), torch.nn.BatchNorm2d(8)
        self.c, self.d = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), torch.nn.GroupNorm(4, 8, eps=1e-6)
        self.e, self.f = torch.nn.ConvTranspose2d(8, 8, 2, 2), torch.nn.Linear(8 * 64, 5)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.b(self.a(functional.pad(x.permute(0, 3, 1, 2), (0, 1, 0, 1)))))
        x = torch.tanh(self.e(functional.silu(self.d(self.c(x)))))
        x = x.flatten(2).softmax(-1).unflatten(-1, (8, 8))
        at = torch.arange(1.0, 9.0)
        return self.f((x * at[:, None] + at * x**2).flatten(1))


@pytest.mark.slow
def test_a_network_of_images():
    function, shapes = linen(Images(), np.zeros((2, 8, 8, 3)))
    module = Channels()
    found = derive(function, module, shapes, floats(2, 8, 8, 3))
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert sources(found) == {
        "a.weight": "params/Conv_0/kernel", "a.bias": "params/Conv_0/bias",
        "b.weight": "params/BatchNorm_0/scale", "b.bias": "params/BatchNorm_0/bias",
        "b.running_mean": "batch_stats/BatchNorm_0/mean", "b.running_var": "batch_stats/BatchNorm_0/var",
        "c.weight": "params/Conv_1/kernel", "d.weight": "params/GroupNorm_0/scale", "d.bias": "params/GroupNorm_0/bias",
        "e.weight": "params/ConvTranspose_0/kernel", "e.bias": "params/ConvTranspose_0/bias",
        "f.weight": "params/Dense_0/kernel", "f.bias": "params/Dense_0/bias",
    }  # fmt: skip
    assert "flattened: {F: XC}\n" in rules(found, module)[-1]
    facts = {(tensor, fact.name): fact.value for fact in found.facts for tensor in fact.tensors}
    assert facts["a.weight", "strides"] == [2, 2] and facts["a.weight", "padding"] == [[0, 1], [0, 1]]
    assert facts["c.weight", "groups"] == 8 and facts["e.weight", "transposed"] is True
    assert facts["e.weight", "strides"] == [2, 2]
    assert facts["b.running_var", "epsilon"] == 1e-5 and facts["d.weight", "epsilon"] == 1e-6


@pytest.mark.parametrize("parametrized", [True, False], ids=["weight and norm", "one kernel"])
def test_a_weight_normalised_kernel(parametrized):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(D)(jnp.tanh(nn.WeightNorm(nn.Dense(D))(x)))

    layer = torch.nn.Linear(D, D)
    module = torch.nn.Sequential(layer, torch.nn.Tanh(), torch.nn.Linear(D, D))
    if parametrized:
        torch.nn.utils.parametrizations.weight_norm(layer)
    function, shapes = linen(Model(), np.zeros((3, 7, D)))
    found = derive(function, module, shapes)
    assert found.complete and grades(found) == {Grade.DERIVED} and not found.dropped
    assert not any(tensor.unseen for tensor in found.tensors)
    kernel, scale = "params/Dense_1/kernel", "params/WeightNorm_0/Dense_1/kernel/scale"
    if parametrized:
        assert sources(found.tensor("0.parametrizations.weight.original0")) == scale
        assert sources(found.tensor("0.parametrizations.weight.original1")) == kernel
    else:
        assert sources(found.tensor("0.weight")) == (kernel, scale)
    (rule, _) = rules(found, module)
    assert f"from: {kernel}\n" in rule and f"weight_norm: {scale}\n" in rule
    assert ("parametrization: weight_norm}" in rule) == parametrized


def test_a_weight_norm_over_the_taps_of_a_convolution():
    shapes = {"v": (3, D // 4, D), "g": (3,), "b": (D,), "o": (D, D)}

    def function(w: Any, x: Any) -> Any:
        kernel = w["v"] / jnp.sqrt((w["v"] ** 2).sum((1, 2), keepdims=True)) * w["g"][:, None, None]
        layout = ("NWC", "WIO", "NWC")
        y = jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=layout, feature_group_count=4)
        return jnp.tanh(y + w["b"]) @ w["o"]

    class Positions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = torch.nn.Conv1d(D, D, 3, padding=1, groups=4)
            self.c = torch.nn.utils.parametrizations.weight_norm(layer, dim=2)
            self.o = torch.nn.Linear(D, D, bias=False)

        def forward(self, x: Any) -> Any:
            return self.o(torch.tanh(self.c(x.transpose(1, 2)).transpose(1, 2)))

    module = Positions()
    norm, weight, *_ = rules(derive(function, module, shapes), module)
    assert norm.endswith("parameter: {name: c.parametrizations.weight.original0, axes: ..P}")
    assert weight.endswith("axes: PCD\n  parameter: {name: c.parametrizations.weight.original1, axes: DCP}")


@pytest.mark.parametrize("parametrized", [True, False], ids=["weight and norm", "one kernel"])
@pytest.mark.parametrize("over", [(0, 2), pytest.param((0, 1), marks=pytest.mark.slow)], ids=["in", "out"])
def test_a_weight_norm_of_a_transposed_convolution(over, parametrized):
    """As HiFi-GAN has it. torch's own norm is that of the channels that come in; one of those that go out is folded into the kernel."""
    shapes = {"v": (4, D, D), "g": (D, 1) if over == (0, 2) else (D,), "b": (D,), "o": (D, D)}

    def function(w: Any, x: Any) -> Any:
        kernel = w["v"] / jnp.sqrt((w["v"] ** 2).sum(over, keepdims=True)) * w["g"]
        y = jax.lax.conv_transpose(x, kernel, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return jnp.tanh(y + w["b"]) @ w["o"]

    class Upsampled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = torch.nn.ConvTranspose1d(D, D, 4, 2, 1)
            if parametrized:
                torch.nn.utils.parametrizations.weight_norm(self.c, dim=0 if over == (0, 2) else 1)
            self.o = torch.nn.Linear(D, D, bias=False)

        def forward(self, x: Any) -> Any:
            return self.o(torch.tanh(self.c(x.transpose(1, 2)).transpose(1, 2)))

    module = Upsampled()
    found = derive(function, module, shapes)
    assert found.complete and grades(found) == {Grade.DERIVED}
    if parametrized and over == (0, 1):  # not one norm for each row of torch's weight: a rule has no words for it
        return
    (rule, _) = rules(found, module)
    letter = "C" if "axes: PCD" in rule else "D"
    assert ("parametrization: weight_norm}" in rule) == parametrized
    assert (f"weight_norm: {{scale: g, axes: {letter}}}" if over == (0, 2) else "weight_norm: g\n") in rule


@pytest.mark.parametrize("text", ["(w - mean) / (std + 1e-5)", "(w - mean) / sqrt(var + 1e-6)"])
def test_a_standardised_kernel(text):
    class Standardised(nn.Conv):
        def param(self, name: str, *args: Any, **kwargs: Any) -> Any:
            w = super().param(name, *args, **kwargs)
            if name != "kernel":
                return w
            below = w.std((0, 1, 2)) + 1e-5 if "std" in text else jnp.sqrt(w.var((0, 1, 2)) + 1e-6)
            return (w - w.mean((0, 1, 2))) / below

    function, shapes = linen(Standardised(5, (3, 2), padding="VALID"), np.zeros((2, 6, 5, 4)))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = torch.nn.Conv2d(4, 5, (3, 2))

        def forward(self, x: Any) -> Any:
            return self.c(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    module = Model()
    found = derive(function, module, shapes, floats(2, 6, 5, 4))
    assert f"padding: VALID\n  weight_standardization: {text}\n" in rules(found, module)[0]


def test_a_kernel_that_is_divided_by_a_norm_is_computed_and_no_number_times_the_leaf():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return jnp.tanh(nn.SpectralNorm(nn.Dense(D))(x, update_stats=False))

    function, shapes = linen(Model(), np.zeros((3, 7, D)))
    module = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh())
    found = derive(function, module, shapes)
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert sources(found.tensor("0.weight")) == ("batch_stats/SpectralNorm_0/Dense_0/kernel/u", "params/Dense_0/kernel")
    assert "spectral_norm: batch_stats/SpectralNorm_0/Dense_0/kernel/u\n" in rules(found, module)[0]


class Recurrent(torch.nn.Module):
    """A recurrent layer, without its last state."""

    def __init__(self, kind: type[torch.nn.Module]) -> None:
        super().__init__()
        self.r = kind(D, D, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.r(x)[0]


CELLS = {
    "rnn": (nn.SimpleCell, torch.nn.RNN, "i", "h"),
    "gru": (nn.GRUCell, torch.nn.GRU, "irizin", "hrhzhn"),
    "lstm": (nn.LSTMCell, torch.nn.LSTM, "iiifigio", "hihfhgho"),
    "lstm in one product": (nn.OptimizedLSTMCell, torch.nn.LSTM, "iiifigio", "hihfhgho"),
}


@pytest.mark.parametrize("name", ["rnn", "gru", *(pytest.param(n, marks=pytest.mark.slow) for n in list(CELLS)[2:])])
def test_gates_in_the_order_of_torch_and_biases_that_linen_lacks(name):
    cell, kind, inputs, states = CELLS[name]

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.RNN(cell(D))(x)

    function, shapes = linen(Model(), np.zeros((3, 4, D)))
    found = derive(function, Recurrent(kind), shapes, floats(3, 4, D))
    assert found.complete and grades(found) == {Grade.DERIVED} and not found.dropped

    def leaves(gates: str) -> Any:
        step = 1 if name == "rnn" else 2
        named = tuple(
            f"{next(iter(shapes)).rsplit('/', 2)[0]}/{gates[k : k + step]}/kernel" for k in range(0, len(gates), step)
        )
        return named[0] if len(named) == 1 else named

    assert sources(found.tensor("r.weight_ih_l0")) == leaves(inputs)
    assert sources(found.tensor("r.weight_hh_l0")) == leaves(states)
    biases = sources(found.tensor("r.bias_ih_l0")), sources(found.tensor("r.bias_hh_l0"))
    assert any(0.0 in (b if isinstance(b, tuple) else (b,)) for b in biases)
