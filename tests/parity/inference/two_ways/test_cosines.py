"""Cosines with learned vectors, as of an NTM's memory or the classes of a face: norms divide the factors of a product, or its result."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.derivation import Derivation
from support.inferred import derive, floats, rules

ROWS, WIDTH, COUNT = 9, 6, 7
SHAPES = {"w": (WIDTH, WIDTH), "b": (WIDTH,), "m": (COUNT, WIDTH), "out": (COUNT, WIDTH)}


def length(x: Any) -> Any:
    return jnp.linalg.norm(x, axis=-1, keepdims=True)


SOURCES: dict[str, Any] = {
    "at once": lambda m, key: (key @ m.T) / (length(key) * length(m).T),
    "one by one": lambda m, key: (key @ m.T) / length(m).T / length(key),
    "in front": lambda m, key: (key / length(key)) @ (m / length(m)).T,
    "of the memory alone": lambda m, key: (key @ m.T) / length(m).T,
    "of the key alone": lambda m, key: (key @ m.T) / length(key),
}
TARGETS: dict[str, Any] = {
    "cosine": lambda m, key: functional.cosine_similarity(m[None], key[:, None], dim=-1),
    "repeated": lambda m, key: functional.cosine_similarity(
        m.repeat(len(key), 1, 1) + 1e-16, key.unsqueeze(1) + 1e-16, dim=-1
    ),
    "in front": lambda m, key: functional.linear(functional.normalize(key), functional.normalize(m)),
    "columns": lambda m, key: functional.normalize(key, dim=0) @ functional.normalize(m).T,
}


class Memory(nn.Module):
    def __init__(self, similarity: str) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(COUNT, WIDTH, bias=False)
        self.memory, self.similarity = nn.Parameter(torch.zeros(COUNT, WIDTH)), TARGETS[similarity]

    def forward(self, x: Any) -> Any:
        return self.out(torch.softmax(self.similarity(self.memory, self.key(x)), -1))


def derived(source: str, module: Memory) -> Derivation:
    def function(w: Any, x: Any) -> Any:
        return jax.nn.softmax(SOURCES[source](w["m"], x @ w["w"] + w["b"])) @ w["out"]

    return derive(function, module, SHAPES, floats(ROWS, WIDTH))


@pytest.mark.parametrize("source", ["at once", "one by one", "in front"])
@pytest.mark.parametrize("similarity", ["cosine", "repeated", "in front"])
def test_norms_of_the_factors_or_of_the_result(source: str, similarity: str) -> None:
    module = Memory(similarity)
    written = rules(derived(source, module), module)
    assert any("from: m\n" in rule and "memory" in rule for rule in written), written


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "similarity"),
    [("of the memory alone", "cosine"), ("of the key alone", "cosine"), ("at once", "columns")],
)
def test_another_norm_is_a_difference(source: str, similarity: str) -> None:
    found = derived(source, Memory(similarity))
    assert not found.complete and found.differences


@pytest.mark.parametrize("divisor", [3, 4])
def test_rows_are_divided_by_whole_numbers(divisor: int) -> None:
    """Of a mean over the words of each row; the planted fault is another count."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, COUNT)

        def forward(self, x: Any) -> Any:
            return self.out(torch.tanh(self.key(x)) / torch.where(x[:, :1] > 0, divisor, 2))

    def function(w: Any, x: Any) -> Any:
        return (jnp.tanh(x @ w["w"] + w["b"]) @ w["m"].T) / jnp.where(x[:, :1] > 0, 3, 2) + w["c"]

    found = derive(function, Mean(), {**SHAPES, "c": (COUNT,)}, floats(ROWS, WIDTH))
    assert found.complete == (divisor == 3) != bool(found.differences)
