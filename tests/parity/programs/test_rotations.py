"""What the angles of a rotation are made of, also where positions begin anew within a series."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from convert.programs.rewrites.positions.rope import _of_angles
from convert.programs.rewrites.positions.rotations import Angles, Turn, angles

PACKED = np.array([[*range(5), *range(3), *range(4)], [*range(7), *range(5)]])


def turned(positions: Any, base: float, sign: int = 1) -> Angles:
    """The angles as they are measured of a table of halves, 8 wide."""
    a = sign * positions[..., None] * base ** (-np.arange(4) / 4)
    table = np.zeros((*a.shape[:-1], 8, 8))
    for k in range(4):
        table[..., k, k] = table[..., k + 4, k + 4] = np.cos(a[..., k])
        table[..., k, k + 4], table[..., k + 4, k] = -np.sin(a[..., k]), np.sin(a[..., k])
    found = angles(Turn(cast("Any", None), table))
    assert found is not None
    return found


@pytest.mark.parametrize("base", [100.0, 10000.0])
def test_the_base_and_the_positions_of_packed_series_are_measured(base: float) -> None:
    found = turned(PACKED, base)
    assert found.base == pytest.approx(base) and found.first is None
    assert found.positions is not None and np.array_equal(found.positions, PACKED)


@pytest.mark.parametrize(
    ("positions", "base", "sign", "name", "says"),
    [
        (PACKED, 10000.0, 1, "RoPE of another base", "base 10000 in the target, and 100"),
        (PACKED, 100.0, -1, "angles of the other sign", "the other sign"),
        (PACKED + 1, 100.0, 1, "RoPE of other positions", "begin at 1, and the JAX model's at 0"),
        (np.arange(12)[None].repeat(2, 0), 100.0, 1, "RoPE of other positions", "the target go on"),
        (PACKED[::-1], 100.0, 1, "RoPE of other positions", "0, 1, 2, 3, 4, 0, 1, 2"),
    ],
)
def test_what_differs_in_packed_series_is_named(positions: Any, base: float, sign: int, name: str, says: str) -> None:
    said = _of_angles(turned(positions, base, sign), turned(PACKED, 100.0), ((), ()))
    assert said[0] == name and says in said[1]


def test_positions_that_are_no_numbers_of_steps_have_no_base() -> None:
    rng = np.random.default_rng(0)
    table = np.eye(4)[None].repeat(12, 0)
    for k, angle in enumerate(rng.uniform(0, 6, 12)):
        table[k] = [
            [np.cos(angle), 0, -np.sin(angle), 0],
            [0, 1, 0, 0],
            [np.sin(angle), 0, np.cos(angle), 0],
            [0, 0, 0, 1],
        ]
    assert angles(Turn(cast("Any", None), table)) is None
