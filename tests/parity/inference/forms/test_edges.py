"""A layer for the edges of a graph, as DGCNN's (Wang et al. 2019): applied to the points or to their neighbours, to their difference or to each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from support.inferred import derive, floats, grades, rules, sources

POINTS, NEAR, D, WIDE = 11, 4, 5, 7
SHAPES = {"theta": (D, WIDE), "out": (WIDE, 3), **dict.fromkeys(("scale", "bias", "mean", "var"), (WIDE,))}
BOTH = {**SHAPES, "phi": (D, WIDE)}
Edges = Callable[[Any, Any, Callable[[Any], Any]], Any]


def taken(w: Any, x: Any, near: Callable[[Any], Any]) -> Any:
    return near(x @ w["theta"])


def of_points(w: Any, x: Any, near: Callable[[Any], Any]) -> Any:
    moved, centre = x @ w["theta"], x @ w["phi"]
    return near(moved) - moved[:, :, None] + centre[:, :, None]


def of_points_in_another_order(w: Any, x: Any, near: Callable[[Any], Any]) -> Any:
    return near(x @ w["theta"]) + (x @ w["phi"] - x @ w["theta"])[:, :, None]


def of_edges(w: Any, x: Any, near: Callable[[Any], Any]) -> Any:
    return (near(x) - x[:, :, None]) @ w["theta"] + (x @ w["phi"])[:, :, None]


def of_other_points(w: Any, x: Any, near: Callable[[Any], Any]) -> Any:
    moved = x @ w["theta"]
    return near(moved) - jnp.roll(moved, 1, 1)[:, :, None] + (x @ w["phi"])[:, :, None]


def layer(edges: Edges) -> Any:
    """Return a JAX function with this layer, a batch norm and the largest of the neighbours."""

    def function(w: Any, x: Any) -> Any:
        squares = ((x[:, :, None] - x[:, None]) ** 2).sum(-1)
        _, at = jax.lax.top_k(-squares, NEAR)
        y = edges(w, x, lambda rows: jax.vmap(lambda one, where: one[where])(rows, at))
        y = (y - w["mean"]) * (jax.lax.rsqrt(w["var"] + 1e-5) * w["scale"]) + w["bias"]
        return jax.nn.relu(y).max(2) @ w["out"]

    return function


class Layer(nn.Module):
    """`joined`: the point stands beside its difference to each neighbour; `kernel`: they are channels of a map."""

    def __init__(self, joined: bool, kernel: bool) -> None:
        super().__init__()
        size = 2 * D if joined else D
        self.mix = nn.Conv2d(size, WIDE, 1, bias=False) if kernel else nn.Linear(size, WIDE, bias=False)
        self.norm, self.out = nn.BatchNorm2d(WIDE), nn.Linear(WIDE, 3, bias=False)
        self.joined, self.kernel = joined, kernel

    def forward(self, x: Any) -> Any:
        squares = ((x[:, :, None] - x[:, None]) ** 2).sum(-1)
        near = x[torch.arange(len(x))[:, None, None], (-squares).topk(NEAR).indices]
        point = x[:, :, None].expand_as(near)
        edges = torch.cat((near - point, point), -1) if self.joined else near
        y = self.mix(edges.permute(0, 3, 1, 2)) if self.kernel else self.mix(edges).permute(0, 3, 1, 2)
        return self.out(torch.relu(self.norm(y)).amax(-1).mT)


@pytest.mark.parametrize("edges", [of_points, of_points_in_another_order, of_edges])
@pytest.mark.parametrize("kernel", [True, False])
def test_a_layer_of_points_and_their_differences(edges: Edges, kernel: bool) -> None:
    module = Layer(True, kernel)
    found = derive(layer(edges), module, BOTH, floats(3, POINTS, D))
    assert grades(found) == {Grade.DERIVED}
    assert sources(found)["mix.weight"] == ("theta", "phi")
    assert rules(found, module)


@pytest.mark.parametrize("kernel", [True, False])
def test_neighbours_that_are_taken_behind_a_layer(kernel: bool) -> None:
    module = Layer(False, kernel)
    found = derive(layer(taken), module, SHAPES, floats(3, POINTS, D))
    assert grades(found) == {Grade.DERIVED}
    assert rules(found, module)


def test_the_difference_to_another_point_is_not_derived() -> None:
    found = derive(layer(of_other_points), Layer(True, True), BOTH, floats(3, POINTS, D))
    assert not found.complete and found.differences
