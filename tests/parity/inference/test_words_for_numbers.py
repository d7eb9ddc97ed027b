"""A difference in numbers is no other order of the elements: a number for a parameter, and a function whose results are near."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import derive

IN, OUT, COLUMNS = 16, 5, 4


class Times(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = torch.nn.Linear(IN, OUT, bias=False)

    def forward(self, x: Any) -> Any:
        return self.l(x) * 3


@pytest.mark.parametrize("size", [(), (OUT,)])
def test_a_number_for_a_parameter_is_said(size: tuple[int, ...]) -> None:
    found = derive(lambda w, x: x @ w["w"] * w["n"], Times(), {"w": (IN, OUT), "n": size})
    (difference,) = found.differences
    assert difference.brief == "behind l: the target multiplies by 3, the JAX model multiplies by n"


class Between(torch.nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.l, self.o = torch.nn.Linear(IN, IN, bias=False), torch.nn.Linear(IN, OUT, bias=False)

    def forward(self, x: Any) -> Any:
        return self.o(self.function(self.l(x)))


@pytest.mark.parametrize(
    ("of_source", "of_target", "words"),
    [
        (
            lambda x: jnp.sin(x * 3.1415927),
            lambda x: torch.sin(x * np.pi),
            "behind l: the target computes with 3.141592653589793, and the JAX model with 3.1415927",
        ),
        (
            lambda x: jnp.clip(x, -3, 3),
            lambda x: torch.nn.functional.hardtanh(x, -3, 2.9),
            "behind l: the target runs hardtanh (-3 to 2.9), the JAX model limits the values to -3 to 3",
        ),
    ],
    ids=["digits", "limits"],
)
def test_numbers_that_differ_are_said(of_source: Callable[[Any], Any], of_target: Any, words: str) -> None:
    shapes = {"w": (IN, IN), "v": (IN, OUT)}
    (difference,) = derive(lambda w, x: of_source(x @ w["w"]) @ w["v"], Between(of_target), shapes).differences
    assert difference.brief == words


class Mixed(torch.nn.Module):
    """Mixes tokens with all others; with those before them where the weight is a triangle."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(7, 7))

    def forward(self, x: Any) -> Any:
        return self.w @ x


def test_a_weight_that_is_computed_from_one_leaf_names_it() -> None:
    found = derive(lambda w, x: jnp.tril(w["w"]) @ x, Mixed(), {"w": (7, 7)})
    assert found.complete
    why = write_rules(found, model_of_module(Mixed(), "Model")).open["w"]
    assert why == "it is computed from w in a way that the rule language has no words for"


class Centred(torch.nn.Module):
    """A norm with another epsilon, which large inputs nearly hide."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.o = torch.nn.LayerNorm(IN, eps=1e-3), torch.nn.Linear(IN, OUT, bias=False)

    def forward(self, x: Any) -> Any:
        return self.o(self.n(x))


def _centred(w: Any, x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w["s"] + w["b"]) @ w["w"]


class Series(torch.nn.Module):
    """Normalises a series, and adds what a GELU gives to its large mean."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.o = torch.nn.Linear(IN, IN), torch.nn.Linear(IN, COLUMNS, bias=False)

    def forward(self, x: Any) -> Any:
        mean = x.mean(-1, keepdim=True)
        scale = torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
        return self.o(torch.nn.functional.gelu(self.l((x - mean) / scale))) * scale + mean


def _series(w: Any, x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    scale = jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return jax.nn.gelu((x - mean) / scale @ w["w"] + w["b"], approximate=True) @ w["v"] * scale + mean


def _large(mean: float, deviation: float, *shape: int) -> Callable[[int], dict[str, Any]]:
    return lambda seed: {"x": mean + deviation * np.random.default_rng(seed).normal(size=shape)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "module", "shapes", "inputs", "words"),
    [
        (
            _centred,
            Centred,
            {"s": (IN,), "b": (IN,), "w": (IN, OUT)},
            _large(5e3, 1e3, 3, 7, IN),
            "the target adds 0.001 (test_words_for_numbers.py:97, in n); the JAX model adds 1e-05",
        ),
        (
            _series,
            Series,
            {"w": (IN, IN), "b": (IN,), "v": (IN, COLUMNS)},
            _large(1e6, 1.0, 8, IN),
            "gelu_erf for gelu_tanh",
        ),
    ],
    ids=["epsilon", "gelu"],
)
def test_values_that_are_near_have_no_other_order(
    function: Any, module: Any, shapes: dict[str, tuple[int, ...]], inputs: Any, words: str
) -> None:
    (difference,) = derive(function, module(), shapes, inputs).differences
    assert words in difference.problem and "order" not in difference.problem
