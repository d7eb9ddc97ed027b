"""A limit from above that no value reaches shows nothing of its number: relu for relu6 would be equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.verify.sides.conditions import undecided

VALUES = np.linspace(-3, 3, 24).reshape(4, 6)


@pytest.mark.parametrize(
    ("limited", "numbers"),
    [
        (jax.nn.relu6, [6.0]),
        (lambda x: jnp.clip(x, -8, 8), [8.0]),
        (lambda x: jnp.minimum(x, 7.0), [7.0]),
        (lambda x: jnp.minimum(x, 2.0), []),  # reached
        (lambda x: jnp.maximum(x, -9.0), []),  # a guard
        (jax.nn.hard_sigmoid, []),
        (jax.nn.softmax, []),
        (lambda x: jnp.take(x, jnp.array([0, 1]), 0), []),
    ],
)
def test_a_limit_from_above_is_listed(limited: Callable[[Any], Any], numbers: list[float]) -> None:
    found = undecided(
        lambda weights, inputs: {"y": limited(inputs["x"]) * weights["w"]}, {"w": np.ones(1)}, {"x": VALUES}
    )
    assert [one.number for one in found] == numbers
    assert all("test_limits" in one.where and one.high == 3 for one in found)
