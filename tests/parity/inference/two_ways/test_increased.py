"""A multiple of a value that is added to it, or one more as its factor: the epsilon of a graph isomorphism network."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation, Grade
from support.inferred import UNPROVEN, derive, floats, grades

D, LAYERS = 5, 3
SHAPES = {"epsilon": (LAYERS,), "first": (LAYERS, D, D), "last": (LAYERS, D, D)}


@pytest.fixture(autouse=True)
def no_search_by_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no tensor be found by the outputs alone, as in a model with more tensors than that search finds."""
    monkeypatch.setattr("convert.inference.infer.found_by_outputs", lambda *_: SimpleNamespace(tensors=None, note=""))


def _function(*, added: bool) -> Any:
    def function(w: Mapping[str, Any], x: Any) -> Any:
        for k in range(LAYERS):
            near = jax.numpy.roll(x, 1, 1)
            scaled = x + w["epsilon"][k] * x if added else (1 + w["epsilon"][k]) * x
            x = jax.nn.relu((scaled + near) @ w["first"][k]) @ w["last"][k]
        return x

    return function


class Layer(nn.Module):
    def __init__(self, *, added: bool, number: float = 1.0) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))
        self.net = nn.Sequential(nn.Linear(D, D, bias=False), nn.ReLU(), nn.Linear(D, D, bias=False))
        self.added, self.number = added, number

    def forward(self, x: Any) -> Any:
        scaled = x + self.eps * x if self.added else (self.number + self.eps) * x
        return self.net(scaled + x.roll(1, 1))


def _derived(*, added: bool, number: float = 1.0) -> Derivation:
    """With the sum in one of the programs."""
    layers = nn.Sequential(*(Layer(added=not added, number=number) for _ in range(LAYERS)))
    return derive(_function(added=added), layers, SHAPES, floats(3, 7, D))


@pytest.mark.parametrize("added", [True, False])
def test_a_multiple_that_is_added_is_a_factor(added: bool) -> None:
    found = _derived(added=added)
    assert found.complete and grades(found) <= {Grade.DERIVED, Grade.INTERCHANGEABLE}, found.differences


@pytest.mark.slow
def test_another_number_in_the_factor_is_a_difference() -> None:
    found = _derived(added=True, number=0.9)
    assert found.differences and grades(found) & UNPROVEN
