"""A written file is confirmed at other sizes: wrong weights, and sizes that it fixes, are found."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
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


WEIGHTED = """
model: weighted
title: numbers and a kernel
axes: {I: {is: inputs}, O: {is: outputs}, W: {is: taps}}
targets: {torch: {loads: x.Weighted}}
rules:
- dimension_numbers: NWC,WIO->NWC
  axes: WIO
  from: k
  padding: VALID
  conv_transpose: c

- value: [1.0, 2.0, 4.0]
  axes: "."
  because: weights of the outputs
  constant: numbers
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


class Weighted(torch.nn.Module):
    """Multiplies by numbers that the module has, and applies a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.zeros(3))
        self.c = torch.nn.ConvTranspose1d(4, 3, 2, bias=False)

    def forward(self, x: Any) -> Any:
        return self.c(x) * self.numbers[:, None]  # type: ignore[index]


def test_numbers_of_the_rules_and_flipped_kernels_are_loaded() -> None:
    def transposed(weights: Any, given: Any) -> Any:
        made = jax.lax.conv_transpose(
            given["x"].swapaxes(1, 2), weights["k"], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return {"y": made.swapaxes(1, 2) * jnp.asarray([1.0, 2.0, 4.0])[:, None]}

    pair = Pair(
        transposed,
        Weighted().eval(),
        lambda module, given: {"y": module(given["x"])},
        lambda seed: {"x": np.random.default_rng(seed).normal(size=(2, 4, 5))},
        "weighted:pair",
    )
    assert confirm(WEIGHTED, pair, {"k": (2, 4, 3)}, "", 0) < 1e-12


def test_both_sizes_of_each_name_are_parsed() -> None:
    assert parse_shrink(["D=32,48", "vocab_size=8,9"]) == Shrink({"D": 32, "vocab_size": 8}, {"D": 48, "vocab_size": 9})
