"""Programs that are equal in exact arithmetic, and of which one loses digits: a density at a sample that was just drawn."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import UNPROVEN, grades

WIDTH = 8
LOWEST = -20.0  # log of the deviation
SHAPES = {f"{name}/{x}": (WIDTH,) * n for name in ("m", "s") for x, n in (("w", 2), ("b", 1))}


class Policy(nn.Module):
    def __init__(self, moved: float = 0.0, added: float = 0.0) -> None:
        super().__init__()
        self.mean, self.deviation = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moved, self.added = moved, added

    def forward(self, x: Any, noise: Any) -> dict[str, Any]:
        mean, log_std = self.mean(x), LOWEST + 0.5 * (2 - LOWEST) * (torch.tanh(self.deviation(x)) + 1)
        action = mean + log_std.exp() * noise
        log_prob = torch.distributions.Normal(mean, log_std.exp()).log_prob(action).sum(-1)
        return {"action": action * (1 + self.moved), "log_prob": log_prob * (1 + self.added)}


def _forward(p: Any, given: Any) -> dict[str, Any]:
    x, noise = given["x"], given["noise"]
    log_std = LOWEST + 0.5 * (2 - LOWEST) * (jnp.tanh(x @ p["s/w"] + p["s/b"]) + 1)
    log_prob = (-0.5 * (noise**2 + jnp.log(2 * jnp.pi)) - log_std).sum(-1)
    return {"action": x @ p["m/w"] + p["m/b"] + jnp.exp(log_std) * noise, "log_prob": log_prob}


def _inputs(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(6, WIDTH)) for name in ("x", "noise")}


def _derive(module: nn.Module) -> Derivation:
    return infer(_forward, module.eval(), lambda net, given: net(**given), _inputs, SHAPES)


@pytest.mark.slow
def test_digits_that_a_program_loses_are_no_difference() -> None:
    found = _derive(Policy())
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert found.proof is not None and 1e-10 < found.proof.error < found.proof.allowed < 1e-6
    (note,) = [note for note in found.notes if "loses" in note]
    assert note.startswith("the PyTorch module loses 7 of 16 digits in the output log_prob, which moves by ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "planted", [{"moved": 1e-9}, {"added": 3e-7}], ids=["an output that loses none", "more than what is lost"]
)
def test_a_difference_beside_it_is_one(planted: dict[str, float]) -> None:
    found = _derive(Policy(**planted))
    assert found.differences and grades(found) <= UNPROVEN
    assert not any("loses" in note for note in found.notes)


@pytest.mark.parametrize("epsilon", [1e-12, 1e-8])
def test_an_epsilon_of_a_program_that_loses_none_is_seen(epsilon: float) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Any) -> Any:
            return self.last(x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt())

    def forward(p: Any, given: Any) -> Any:
        x = given["x"]
        return {"y": x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-12) @ p["w"]}

    found = infer(forward, Norm().eval(), lambda net, given: {"y": net(given["x"])}, _inputs, {"w": (WIDTH, WIDTH)})
    assert found.complete == (epsilon == 1e-12)
    assert not any("loses" in note for note in found.notes)
