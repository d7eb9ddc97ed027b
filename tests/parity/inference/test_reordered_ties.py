"""Units that are zero for every row, behind values that the programs concatenate in another order: fresh draws tell which is which."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, floats, rules

D = WIDTH
SHAPES = {"first": (D, D), "second": (D, D), "out": (2 * D, D)}


class Joined(torch.nn.Module):
    """Two layers that are no twins, whose units are joined in another order than in the source."""

    def __init__(self, kind: str, factor: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(D, D, bias=False) for _ in range(2))
        self.scale = torch.nn.Parameter(torch.randn(2 * D)) if kind == "scale" else None
        self.out = torch.nn.Conv1d(2 * D, D, 2, bias=False) if kind == "conv" else torch.nn.Linear(2 * D, D, bias=False)
        self.factor = factor

    def forward(self, x: Any) -> Any:
        units = torch.cat([torch.relu(torch.tanh(self.second(x))), self.factor * torch.relu(self.first(x))], -1)
        if self.scale is not None:
            units = units * self.scale
        return self.out(units.mT).mT if isinstance(self.out, torch.nn.Conv1d) else self.out(units)


def joined(w: Any, x: Any) -> Any:
    units = jnp.concatenate([jnp.maximum(x @ w["first"], 0), jnp.maximum(jnp.tanh(x @ w["second"]), 0)], -1)
    if "scale" in w:
        units = units * w["scale"]
    if w["out"].ndim == 3:
        return jax.lax.conv_general_dilated(units, w["out"], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))
    return units @ w["out"]


@pytest.mark.parametrize(
    ("kind", "shapes", "rows"),
    [
        ("product", SHAPES, (2, D)),
        ("conv", {**SHAPES, "out": (2, 2 * D, D)}, (1, 3, D)),
        ("scale", {**SHAPES, "scale": (2 * D,)}, (2, D)),
    ],
)
def test_dead_units_in_another_order(kind: str, shapes: dict[str, tuple[int, ...]], rows: tuple[int, ...]) -> None:
    net = Joined(kind)
    found = derive(joined, net, shapes, floats(*rows))
    assert {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}
    (part,) = found.tensor("out.weight").parts
    order = np.empty(part.elements.size, int)
    order[part.elements] = part.positions
    order = order.reshape(found.tensor("out.weight").shape)
    channel = order // D % (2 * D)  # of the source, whose leaf has the channels in front of D outputs
    assert (channel[0].T.reshape(-1, 2 * D) == np.roll(np.arange(2 * D), D)).all()
    assert any("concatenated" in rule for rule in rules(found, net))


def test_an_order_hides_no_difference() -> None:
    found = derive(joined, Joined("product", 1.01), SHAPES, floats(2, D))
    assert not found.complete or found.tensor("first.weight").parts[0].factor != 1.0
