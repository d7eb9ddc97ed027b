"""A norm of one channel has a rule as any other: the gates of an attention U-Net end with one."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import derive, floats, grades, rules

SLOW = pytest.mark.slow


class Net(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.psi, self.norm = torch.nn.Conv2d(4, 1, 1), norm

    def forward(self, x: Any) -> Any:
        return torch.sigmoid(self.norm(self.psi(x.movedim(-1, 1)))).movedim(1, -1)


@pytest.mark.parametrize(
    "kind", ["batch_norm", pytest.param("instance_norm", marks=SLOW), pytest.param("group_norm", marks=SLOW)]
)
def test_one_channel(kind: str) -> None:
    def function(w: Any, x: Any) -> Any:
        y = x @ w["w"] + w["wb"]
        if kind == "batch_norm":
            mean, var = w["mean"], w["var"]
        else:
            mean, var = y.mean((1, 2), keepdims=True), y.var((1, 2), keepdims=True)
        return jax.nn.sigmoid((y - mean) * jax.lax.rsqrt(var + 1e-5) * w["g"] + w["b"])

    norm = {
        "batch_norm": lambda: torch.nn.BatchNorm2d(1),
        "instance_norm": lambda: torch.nn.InstanceNorm2d(1, affine=True),
        "group_norm": lambda: torch.nn.GroupNorm(1, 1),
    }[kind]()
    leaves = {"w": (4, 1), **dict.fromkeys(("wb", "g", "b"), (1,))}
    leaves |= dict.fromkeys(("mean", "var"), (1,)) if kind == "batch_norm" else {}
    module = Net(norm)
    found = derive(function, module, leaves, floats(2, 5, 6, 4))
    assert grades(found) <= {Grade.DERIVED, Grade.INTERCHANGEABLE}
    assert any(f"{kind}: norm" in rule for rule in rules(found, module))
