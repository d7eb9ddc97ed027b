"""A number on either side of a product: it multiplies the data in one program, and the weight, or the result, in the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import UNPROVEN, grades

D, CODES, TOKENS = 8, 12, 11
PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "data": lambda x, w: (2 * x) @ w,
    "weight": lambda x, w: x @ (2 * w),
    "both": lambda x, w: (4 * x) @ (w / 2),
    "result": lambda x, w: 2 * (x @ w),
    "another": lambda x, w: (3 * x) @ w,
    "none": lambda x, w: x @ w,
    "twice": lambda x, w: (2 * x) @ (2 * w),
}


class Codes(nn.Module):
    """A VQ-VAE; ``place``: of the factor in its distances; ``chosen``: how rows of the codebook are taken."""

    def __init__(self, place: str, chosen: str = "lookup") -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.Linear(D, D) for _ in range(2))
        self.codes, self.place, self.chosen = nn.Embedding(CODES, D), place, chosen

    def forward(self, x: Any) -> Any:
        h, codes = self.encoder(x), self.codes.weight
        distance = (h**2).sum(1, keepdim=True) + (codes**2).sum(1) - PLACES[self.place](h, codes.t())
        index = distance.argmin(1)
        if self.chosen == "product":
            ones = torch.zeros(len(x), CODES, dtype=h.dtype).scatter_(1, index.unsqueeze(1), 1)
            return {"y": self.decoder(ones @ codes), "d": distance}
        return {"y": self.decoder(self.codes(index)), "d": distance}


def _codes(place: str) -> Callable[[Any, Any], Any]:
    def function(p: Any, given: Any) -> Any:
        h, codes = given["x"] @ p["encoder/w"] + p["encoder/b"], p["codes"]
        distance = (h**2).sum(1, keepdims=True) + (codes**2).sum(1) - PLACES[place](h, codes.T)
        return {"y": codes[jnp.argmin(distance, 1)] @ p["decoder/w"] + p["decoder/b"], "d": distance}

    return function


SHAPES = {"encoder/w": (D, D), "encoder/b": (D,), "decoder/w": (D, D), "decoder/b": (D,), "codes": (CODES, D)}


def _derive(function: Any, module: nn.Module, shapes: dict[str, tuple[int, ...]], **given: Any) -> Derivation:
    def inputs(seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        return given or {"x": rng.normal(size=(30, D))}

    return infer(function, module.eval(), lambda net, given: net(**given), inputs, shapes)


@pytest.mark.parametrize(
    ("source", "target"), [("data", "weight"), ("weight", "data"), ("both", "data"), ("weight", "both")]
)
def test_a_number_at_another_operand(source: str, target: str) -> None:
    found = _derive(_codes(source), Codes(target), SHAPES)
    assert found.complete, found.differences
    assert grades(found) == {Grade.DERIVED}


def test_codes_are_taken_by_a_product_of_ones() -> None:
    found = _derive(_codes("result"), Codes("data", "product"), SHAPES)
    assert found.complete, found.differences
    assert grades(found) == {Grade.DERIVED}


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["another", "none", "twice"])
def test_another_number_is_found(planted: str) -> None:
    found = _derive(_codes("weight"), Codes(planted), SHAPES)
    assert found.differences and found.proof is None
    assert grades(found) <= UNPROVEN


@pytest.mark.slow
def test_other_codes_are_found() -> None:
    def next_ones(p: Any, given: Any) -> Any:
        h, codes = given["x"] @ p["encoder/w"] + p["encoder/b"], p["codes"]
        distance = (h**2).sum(1, keepdims=True) + (codes**2).sum(1) - 2 * (h @ codes.T)
        index = (jnp.argmin(distance, 1) + 1) % CODES
        return {"y": codes[index] @ p["decoder/w"] + p["decoder/b"], "d": distance}

    found = _derive(next_ones, Codes("data", "product"), SHAPES)
    assert found.differences and found.proof is None


class Scaled(nn.Module):
    """An equalised convolution with its number at the kernel, and a table whose transposed one is scaled."""

    def __init__(self, number: float = 8) -> None:
        super().__init__()
        self.kernel, self.table = nn.Parameter(torch.randn(D, D, 3)), nn.Embedding(TOKENS, D)
        self.bias, self.number = nn.Parameter(torch.randn(D)), number

    def forward(self, i: Any) -> Any:
        x = torch.tanh(self.table(i))
        x = functional.leaky_relu(functional.conv1d(x.transpose(1, 2), self.kernel * 0.25, self.bias, padding=1), 0.2)
        return {"y": x.transpose(1, 2) @ (self.table.weight.t() / self.number)}


def _scaled(p: Any, given: Any) -> Any:
    x = jnp.tanh(p["table"][given["i"]]) * 0.25
    layout = ("NWC", "WIO", "NWC")
    x = jax.lax.conv_general_dilated(x, p["kernel"], (1,), "SAME", dimension_numbers=layout) + p["bias"]
    return {"y": (jax.nn.leaky_relu(x, 0.2) / 8) @ p["table"].T}


OF_SCALED = {"kernel": (3, D, D), "bias": (D,), "table": (TOKENS, D)}


def test_a_number_at_a_kernel_and_at_a_table() -> None:
    given = {"i": np.random.default_rng(0).integers(0, TOKENS, (2, 20))}
    found = _derive(_scaled, Scaled(), OF_SCALED, **given)
    assert found.complete, found.differences
    assert grades(found) == {Grade.DERIVED}


@pytest.mark.slow
def test_another_number_at_a_table_is_found() -> None:
    given = {"i": np.random.default_rng(0).integers(0, TOKENS, (2, 20))}
    found = _derive(_scaled, Scaled(4), OF_SCALED, **given)
    assert found.differences and found.proof is None
    assert grades(found) <= UNPROVEN
