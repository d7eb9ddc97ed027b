"""A difference within a function of one value is told by the names of the two functions, however each side computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from convert import infer
from support.marks import slow_but

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
act = torch.nn.functional

SOURCES: dict[str, Callable[[Any], Any]] = {
    "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "softplus": jax.nn.softplus,
    "hardtanh (-1 to 1)": jax.nn.hard_tanh,
    "relu2": lambda x: jax.numpy.square(jax.nn.relu(x)),
    "the absolute value": jax.numpy.abs,
}
TARGETS: dict[str, Callable[[Any], Any]] = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanhshrink": act.tanhshrink,
    "celu with alpha 2": lambda x: act.celu(x, 2.0),
    "softshrink by 0.5": act.softshrink,
    "selu": act.selu,
    "leaky_relu": act.leaky_relu,
    "relu6": act.relu6,
}


class _Net(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.up, self.down, self.function = torch.nn.Linear(6, 12), torch.nn.Linear(12, 6), function

    def forward(self, x: Any) -> Any:
        return self.down(self.function(self.up(x)))


def _differences(source: Callable[[Any], Any], target: Callable[[Any], Any]) -> list[str]:
    found = infer(
        lambda p, given: source(given["x"] @ p["u/w"] + p["u/b"]) @ p["d/w"] + p["d/b"],
        _Net(target),
        lambda module, given: module(given["x"]),
        lambda seed: {"x": np.random.default_rng(seed).normal(size=(7, 6)).astype(np.float32) * 3},
        {"u/w": (6, 12), "u/b": (12,), "d/w": (12, 6), "d/b": (6,)},
    )
    return [difference.brief for difference in found.differences]


PAIRS = [(one, two) for one in SOURCES for two in TARGETS if one != two]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "two"), [pytest.param(*pair, marks=[pytest.mark.slow] if k % 4 else []) for k, pair in enumerate(PAIRS)]
)
def test_both_functions_have_a_name(one: str, two: str) -> None:
    assert _differences(SOURCES[one], TARGETS[two]) == [f"behind up: the target computes {two}, the JAX model {one}"]


@pytest.mark.parametrize("two", slow_but(["relu6"], ["selu", "relu6", "celu with alpha 2"]))
def test_a_function_that_the_jax_model_lacks(two: str) -> None:
    assert _differences(lambda x: x, TARGETS[two]) == [f"behind up: the target computes {two}, the JAX model does not"]
