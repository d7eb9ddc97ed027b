"""Parts of a matrix that have one column: rows of ``nn.Linear(D, 1)``. No pattern had the axes of weight and bias, and nothing was written."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, floats, grades, rules

FUNCTIONS = (torch.tanh, torch.sin, torch.cosh)


class Heads(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, width) for name, width in zip("abc", widths, strict=False)})

    def forward(self, x: Any) -> Any:
        return torch.cat([f(head(x)) for f, head in zip(FUNCTIONS, self.heads.values(), strict=False)], -1)


def _split(w: Any, x: Any, *at: int) -> Any:
    parts = jnp.split(x @ w["w"] + w["b"], at, -1)
    return jnp.concatenate([f(y) for f, y in zip((jnp.tanh, jnp.sin, jnp.cosh), parts, strict=False)], -1)


@pytest.mark.parametrize("widths", [(1, 1, 1), (1, 1), (4, 1)])
def test_each_part_has_a_rule(widths: tuple[int, ...]) -> None:
    module, total = Heads(*widths), sum(widths)
    at = [sum(widths[: k + 1]) for k in range(len(widths) - 1)]
    found = derive(lambda w, x: _split(w, x, *at), module, {"w": (WIDTH, total), "b": (total,)}, floats(5, WIDTH))
    assert grades(found) == {Grade.DERIVED}
    written = [rule.splitlines() for rule in rules(found, module)]
    assert [lines[-2:] for lines in written] == [
        [f"  part: {k} of {len(widths)}", f"  linear: heads.{name}"] for k, name in enumerate("abc"[: len(widths)], 1)
    ]


@pytest.mark.slow
def test_another_function_of_one_part_is_a_difference() -> None:
    module = Heads(1, 1, 1)
    found = derive(
        lambda w, x: _split({"w": w["w"][:, ::-1], "b": w["b"]}, x, 1, 2),
        module,
        {"w": (WIDTH, 3), "b": (3,)},
        floats(5, WIDTH),
    )
    assert found.complete  # the columns in the other order, and the biases as they are
    assert all("part: " in rule for rule in rules(found, module))
    planted = Heads(1, 1, 1)
    planted.forward = lambda x: torch.cat([torch.tanh(head(x)) for head in planted.heads.values()], -1)  # type: ignore[method-assign]
    found = derive(lambda w, x: _split(w, x, 1, 2), planted, {"w": (WIDTH, 3), "b": (3,)}, floats(5, WIDTH))
    assert found.differences and not found.complete
