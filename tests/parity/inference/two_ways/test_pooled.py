"""A convolution of one tap in front of a pooling by the mean, or behind it, as in DenseNet's transitions."""

from __future__ import annotations

from typing import Any

import flax.linen as linen_layers
import jax.numpy as jnp
import pytest
from torch import nn
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, floats, grades, linen, rules

D, WIDE = WIDTH, 12


class Pooled(linen_layers.Module):
    @linen_layers.compact
    def __call__(self, x: Any) -> Any:
        for k, width in enumerate((WIDE, D)):
            x = linen_layers.Conv(width, (1, 1), use_bias=False, name=f"mix_{k}")(linen_layers.relu(x))
            x = linen_layers.LayerNorm(epsilon=1e-5, name=f"norm_{k}")(linen_layers.avg_pool(x, (2, 2), (2, 2)))
        return linen_layers.Dense(D, name="out")(x.mean((1, 2)))


class PooledFirst(nn.Module):
    def __init__(self, pool: Any = functional.avg_pool2d) -> None:
        super().__init__()
        self.mix = nn.ModuleList([nn.Conv2d(D, WIDE, 1, bias=False), nn.Conv2d(WIDE, D, 1, bias=False)])
        self.norm, self.out, self.pool = nn.ModuleList([nn.LayerNorm(WIDE), nn.LayerNorm(D)]), nn.Linear(D, D), pool

    def forward(self, x: Any) -> Any:
        x = x.permute(0, 3, 1, 2)
        for mix, norm in zip(self.mix, self.norm, strict=True):
            x = norm(mix(self.pool(x.relu(), 2)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out(x.mean((2, 3)))


def _derived(module: nn.Module) -> Any:
    function, shapes = linen(Pooled(), jnp.zeros((2, 8, 12, D)))
    return derive(function, module, shapes, floats(2, 8, 12, D))


def test_a_mean_in_front_of_a_convolution_of_one_tap() -> None:
    module = PooledFirst()
    found = _derived(module)
    assert found.complete and grades(found) == {Grade.DERIVED}, found.differences
    assert "conv: mix.1" in "\n".join(rules(found, module))


@pytest.mark.slow
def test_a_maximum_in_front_of_it_is_not_derived() -> None:
    found = _derived(PooledFirst(functional.max_pool2d))
    assert not found.complete and found.differences
