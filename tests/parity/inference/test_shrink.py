"""A written file is confirmed at other sizes: wrong weights, and sizes that it fixes, are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from convert.core.errors import ConvertError
from convert.inference.pair import Pair
from convert.inference.shrink import Shrink, confirm, parse_shrink

RULES = """
model: square
title: a square matrix
axes: {{D: {{is: width{equals}}}, E: {{is: outputs}}}}
targets: {{torch: {{loads: x.Square}}}}
rules:
- einsum: {einsum}
  from: w
  linear: ""
"""


def square(width: int) -> Pair:
    def inputs(seed: int) -> dict[str, Any]:
        return {"x": np.random.default_rng(seed).normal(size=(5, width))}

    return Pair(
        lambda weights, given: {"y": given["x"] @ weights["one/w"]},
        torch.nn.Sequential(torch.nn.Linear(width, width, bias=False)).eval(),
        lambda module, given: {"y": module(given["x"])},
        inputs,
        "square:pair",
    )


def confirmed(einsum: str, equals: str = "") -> float:
    text = RULES.format(einsum=einsum, equals=equals).replace("from: w", "from: one/w").replace('""', '"0"')
    return confirm(text, square(6), {"one/w": (6, 6)}, "", 0)


def test_the_right_equation_is_confirmed() -> None:
    assert confirmed("...D,DE->...E") < 1e-12


def test_a_transposed_matrix_is_found_though_its_shape_fits() -> None:
    assert confirmed("...D,ED->...E") > 0.1


def test_a_size_that_the_file_fixes_is_found() -> None:
    with pytest.raises(ConvertError, match="D"):
        confirmed("...D,DE->...E", equals=", equals: 4")


def test_both_sizes_of_each_name_are_parsed() -> None:
    assert parse_shrink(["D=32,48", "vocab_size=8,9"]) == Shrink({"D": 32, "vocab_size": 8}, {"D": 48, "vocab_size": 9})
