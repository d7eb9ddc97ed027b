"""Weight norms that the module has, and the JAX function has not, or has for other axes."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from convert.inference.derivation import Grade
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import UNPROVEN, derive, floats, grades, rules

C, NUMBERS = 6, ("NWC", "WIO", "NWC")
PLAIN = {"a": (3, C, C), "b": (C,), "u": (4, C, C), "v": (C,), "o": (C, C)}
NORMED = {**PLAIN, "ga": (C,), "gu": (C,), "go": (C,)}


def _over(w: Any, axes: tuple[int, ...]) -> Any:
    return w / jnp.sqrt((w**2).sum(axes, keepdims=True))


def _source(*, normed: bool, function: Any = jnp.tanh) -> Any:
    """A convolution, a transposed one and a projection; `normed`: with weight norms, a scale for each output."""

    def weights(w: Any) -> tuple[Any, Any, Any]:
        if not normed:
            return w["a"], w["u"], w["o"]
        return _over(w["a"], (0, 1)) * w["ga"], _over(w["u"], (0, 1)) * w["gu"], _over(w["o"], (0,)) * w["go"]

    def run(w: Any, x: Any) -> Any:
        a, u, o = weights(w)
        y = jax.lax.conv_general_dilated(x, a, (1,), "VALID", dimension_numbers=NUMBERS) + w["b"]
        y = jax.lax.conv_transpose(function(y), u, (2,), "VALID", dimension_numbers=NUMBERS) + w["v"]
        return jnp.tanh(y) @ o

    return run


class Vocoder(nn.Module):
    def __init__(self, *, old: bool = False, axis: int | None = 0) -> None:
        super().__init__()
        layers = nn.Conv1d(C, C, 3), nn.ConvTranspose1d(C, C, 4, 2), nn.Linear(C, C, bias=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            norm = torch.nn.utils.weight_norm if old else parametrizations.weight_norm
            self.first = norm(layers[0], "weight", axis)
            self.up, self.last = map(norm, layers[1:])

    def forward(self, x: Any) -> Any:
        y = self.up(self.first(x.mT).tanh())
        return self.last(y.tanh().mT)


@pytest.mark.parametrize("old", [False, True])
def test_a_module_with_weight_norms_and_a_function_without(old: bool) -> None:
    module = Vocoder(old=old)
    found = derive(_source(normed=False), module, PLAIN, floats(3, 9, C))
    assert found.complete and grades(found) == {Grade.DERIVED}
    written = write_rules(found, model_of_module(module, "Model"))
    assert not written.open and not compare_rules(written.text, found)
    word = "parametrization: old_weight_norm" if old else "parametrization: weight_norm"
    assert written.text.count(word) == 3 and "weight_norm:" not in written.text.replace(word, "")


def test_a_transposed_convolution_has_its_scales_for_the_channels_that_come_in() -> None:
    """Those of the function are for the channels that go out: they are folded, and the others are kept."""
    module = Vocoder()
    found = derive(_source(normed=True), module, NORMED, floats(3, 9, C))
    assert found.complete and grades(found) == {Grade.DERIVED}
    written = write_rules(found, model_of_module(module, "Model"))
    assert not written.open and not compare_rules(written.text, found)
    kept = {name: found.tensor(name).parts[0].leaf for name in ("first.parametrizations.weight.original0",)}
    assert kept == {"first.parametrizations.weight.original0": "ga"}
    assert found.tensor("up.parametrizations.weight.original0").parts[0].rows_of.endswith("original1")


def test_another_function_behind_such_a_layer_is_a_difference() -> None:
    found = derive(_source(normed=False, function=jnp.sin), Vocoder(), PLAIN, floats(3, 9, C))
    assert not found.complete and found.differences and UNPROVEN & grades(found)


@pytest.mark.parametrize("axis", [1, 2, None])
def test_lengths_that_are_none_of_rows_have_no_rule(axis: int | None) -> None:
    module = Vocoder(axis=axis)
    found = derive(_source(normed=False), module, PLAIN, floats(3, 9, C))
    assert found.complete
    (why,) = write_rules(found, model_of_module(module, "Model")).open.values()
    assert why.startswith("it is the length of each slice of first.parametrizations.weight.original1")
    assert "a rule has such lengths for rows alone; build the module without this weight norm" in why


def test_the_scales_are_the_lengths_of_what_is_written() -> None:
    found = derive(_source(normed=False), Vocoder(), PLAIN, floats(3, 9, C))
    scale = found.tensor("first.parametrizations.weight.original0")
    kernel = found.weights["a"]
    assert scale.parts[0].values is not None
    np.testing.assert_allclose(scale.parts[0].values, np.sqrt((kernel**2).sum((0, 1))), rtol=1e-12)
    assert rules(found, Vocoder())


class Halves(nn.Module):
    """Two layers with a weight norm, of which the function has the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (parametrizations.weight_norm(nn.Linear(C, C, bias=False)) for _ in range(2))

    def forward(self, x: Any) -> Any:
        return self.two(self.one(x).tanh())


def test_a_norm_that_both_have_stays_beside_one_that_the_module_has_alone() -> None:
    module = Halves()
    function = lambda w, x: jnp.tanh(x @ (_over(w["o"], (0,)) * w["go"])) @ w["p"]  # noqa: E731
    found = derive(function, module, {"o": (C, C), "go": (C,), "p": (C, C)}, floats(9, C))
    assert found.complete and not write_rules(found, model_of_module(module, "Model")).open
    assert found.tensor("one.parametrizations.weight.original0").parts[0].leaf == "go"
    assert found.tensor("two.parametrizations.weight.original0").parts[0].rows_of
