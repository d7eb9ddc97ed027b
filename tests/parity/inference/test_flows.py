"""A masked autoregressive flow: a fused layer of which a mask empties a column for each part, and a log of a determinant beside what is transformed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from convert.cli.infer_text import summary
from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import grades, sources

D, ROWS = 8, 32
MASK = np.tril(np.ones((D, D)), -1).astype(np.float32)  # of the first column, nothing is left
SHAPES = {"mean/w": (D, D), "mean/b": (D,), "scale/w": (D, D), "scale/b": (D,), "var": (D,)}


def _flow(w: Any, x: Any) -> dict[str, Any]:
    mean = x @ (w["mean/w"] * MASK).T + w["mean/b"]
    scale = x @ (w["scale/w"] * MASK).T + w["scale/b"]
    var = w["var"] + 1e-5
    made = (x - mean) * jnp.exp(-scale) / jnp.sqrt(var)
    return {"u": made, "logdet": -scale.sum(-1) - 0.5 * jnp.log(var).sum() - 0.9189}


class NormFlow(torch.nn.Module):
    """A norm by its name, that gives two values."""

    def __init__(self, epsilon: float | None) -> None:
        super().__init__()
        self.running_var = torch.nn.Parameter(torch.ones(D))
        self.epsilon = epsilon

    def forward(self, x: Any) -> Any:
        var = self.running_var if self.epsilon is None else self.running_var + self.epsilon
        logdet = -0.5 * torch.log(var).sum()
        return x / (self.running_var + 1e-5).sqrt(), logdet


class Flow(torch.nn.Module):
    mask: torch.Tensor

    def __init__(self, epsilon: float | None = 1e-5, number: float = 0.9189) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(D, 2 * D), NormFlow(epsilon)
        self.register_buffer("mask", torch.from_numpy(np.concatenate([MASK, MASK])), persistent=False)
        self.number = number

    def forward(self, x: Any) -> dict[str, Any]:
        mean, scale = functional.linear(x, self.linear.weight * self.mask, self.linear.bias).chunk(2, 1)
        u, logdet = self.norm((x - mean) * torch.exp(-scale))
        return {"u": u, "logdet": logdet - scale.sum(-1) - self.number}


def _derived(module: torch.nn.Module) -> Derivation:
    def inputs(seed: int) -> dict[str, Any]:
        return {"x": np.random.default_rng(seed).normal(size=(ROWS, D))}

    def run(module: Any, given: Any) -> Any:
        return module(given["x"])

    return infer(lambda w, given: _flow(w, given["x"]), module.eval(), run, inputs, SHAPES)


def test_a_flow_is_derived() -> None:
    found, module = _derived(Flow()), Flow()
    written = write_rules(found, model_of_module(module, "Model"))
    assert found.complete and written.open == {} and compare_rules(written.text, found) == []
    assert sources(found) == {
        "linear.weight": ("mean/w", "scale/w"),
        "linear.bias": ("mean/b", "scale/b"),
        "norm.running_var": "var",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "says"),
    [
        (
            Flow(epsilon=None),
            ("of norm.running_var, the target", "applies log", "the JAX model adds 1e-05, applies log"),
        ),
        (Flow(number=0.919), ("the target subtracts 0.919", "the JAX model subtracts 0.9189")),
    ],
    ids=["epsilon of the log", "number of the log"],
)
def test_a_fault_in_the_second_output_is_named_there(module: torch.nn.Module, says: tuple[str, ...]) -> None:
    """The first one is equal, and so is the fused bias in front of both: it is found beside the columns that the mask empties."""
    found = _derived(module)
    (difference,) = found.differences
    assert all(words in difference.problem for words in says), difference.problem
    assert "chunk" not in difference.problem and "mean/b" not in difference.problem
    assert difference.shown  # corrected, the programs are equal
    said = sources(found)
    assert said["linear.bias"] == ("mean/b", "scale/b") and grades(found) <= {Grade.IN_FRONT, Grade.BEHIND}
    assert not any(line.startswith("note: no leaf gives") for line in summary(found, {}))
