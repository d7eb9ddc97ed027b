"""Inputs that are not finite: one error that names the element, unless the model handles it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.core.errors import ConvertError
from convert.inference.derivation import Derivation
from convert.inference.draws import Draws
from convert.inference.infer import infer
from convert.inference.models import Runs
from support.inferred import WIDTH, derive

D = WIDTH
LEAVES = {"w": (D, D), "b": (D,), "v": (D, D)}


class Last(nn.Module):
    """Gives the last position alone."""

    def __init__(self, prepared: Any = lambda x: x) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.prepared = prepared

    def forward(self, x: Any) -> Any:
        return self.second(torch.tanh(self.first(self.prepared(x))))[-1]


def last(p: Any, x: Any) -> Any:
    return (jnp.tanh(x @ p["w"] + p["b"]) @ p["v"])[-1]


def drawn(seed: int, value: float = 0.0, dtype: Any = np.float64, row: int = 2) -> dict[str, Any]:
    x = np.random.default_rng(seed).normal(size=(5, D))
    if value:
        x[row, 3] = value
    return {"x": x.astype(dtype)}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_an_element_that_parameters_multiply(value: float, dtype: Any) -> None:
    """No output has it: the last position is finite."""
    with pytest.raises(ConvertError) as raised:
        derive(last, Last(), LEAVES, lambda seed: drawn(seed, value, dtype))
    (finding,) = raised.value.findings
    assert finding.code == "reference-values-invalid" and finding.path.startswith("test_infinities.py:")
    assert finding.expected == "finite inputs" and finding.got == f"{value} in the input 'x' at [2, 3]"
    assert "dot_general" in finding.problem and "finite" in finding.fix


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_an_output_that_is_not_a_number_because_of_it(value: float) -> None:
    def function(p: Any, x: Any) -> Any:
        return last(p, x - x.mean(0))

    with pytest.raises(ConvertError) as raised:
        derive(function, Last(lambda x: x - x.mean(0)), LEAVES, lambda seed: drawn(seed, value, row=4))
    (finding,) = raised.value.findings
    assert finding.code == "output-not-a-number"
    assert finding.expected == "finite inputs" and finding.got == f"{value} in the input 'x' at [4, 3]"


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_one_that_both_models_replace(value: float) -> None:
    def function(p: Any, x: Any) -> Any:
        return last(p, jnp.where(jnp.isfinite(x), x, 0))

    module = Last(lambda x: torch.where(x.isfinite(), x, 0))
    assert derive(function, module, LEAVES, lambda seed: drawn(seed, value)).complete


def test_bfloat16() -> None:
    assert derive(last, Last(), LEAVES, lambda seed: drawn(seed, dtype=ml_dtypes.bfloat16)).complete


class Masked(nn.Module):
    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        for name in "qkvo":
            setattr(self, name, nn.Linear(D, D, bias=False))

    def forward(self, x: Any, mask: Any = None) -> Any:
        mask = x.new_full((5, 5), -torch.inf).triu(1) if mask is None else mask
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o(functional.scaled_dot_product_attention(q, k, v, mask, scale=self.scale))


def attend(p: Any, x: Any, mask: Any = None) -> Any:
    q, k, v = (x @ p[name] for name in "qkv")
    mask = jnp.where(jnp.tri(5) > 0, 0, -jnp.inf) if mask is None else mask
    return jax.nn.softmax(q @ k.T / D**0.5 + mask) @ v @ p["o"]


def with_mask(seed: int) -> dict[str, Any]:
    return {**drawn(seed), "mask": np.triu(np.full((5, 5), -np.inf), 1)}


def found(module: nn.Module, inputs: Any) -> Derivation:
    shapes = dict.fromkeys("qkvo", (D, D))
    return infer(lambda p, x: {"y": attend(p, **x)}, module, lambda m, x: {"y": m(**x)}, inputs, shapes)


@pytest.mark.parametrize("inputs", [drawn, with_mask])
def test_infinities_of_a_mask_stay(inputs: Any) -> None:
    assert found(Masked(), inputs).complete


@pytest.mark.slow
def test_a_difference_beside_the_infinities_of_a_mask_is_named() -> None:
    (difference,) = found(Masked(scale=1.0), with_mask).differences
    assert "divides" in (difference.brief or difference.problem)


def test_runs_keep_the_size_of_their_weights_where_no_size_makes_the_outputs_finite() -> None:
    """As those of masked logits: all further runs have weights of the size of the first."""
    given = {"x": np.ones((2, D))}
    runs = Runs(lambda w, x: {"y": x["x"] @ w["w"] - jnp.inf}, Draws({"w": (D, D)}, size=0.5))
    first, again = runs.program(0, given), runs.program(0, given)
    np.testing.assert_array_equal(again.parameters["w"].array, first.parameters["w"].array)
