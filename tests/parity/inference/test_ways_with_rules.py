"""Of several orders that give the same outputs, one that the rule language has words for is written."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from torch import nn
from torch.nn import functional as f

from convert.core.tensor_spec import TensorSpec
from convert.inference.derivation import Grade
from convert.inference.pair import Pair
from convert.inference.rule_file.from_pair import infer_rules
from convert.verify.target_model import model_of_module

C, HEIGHT, WIDTH = 4, 6, 4


class Upscaled(nn.Module):
    """A pixel shuffle in front of a flattened map: its channels may lie in any order that the layers on both sides share."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.up, self.last = nn.Conv2d(C, 4 * C, 1, bias=False), last
        self.head = nn.Linear(4 * HEIGHT * WIDTH * C, 3, bias=False)

    def forward(self, x: Any) -> Any:
        y = f.pixel_shuffle(self.up(x.permute(0, 3, 1, 2)), 2)
        return self.head((y.permute(0, 2, 3, 1) if self.last else y).flatten(1))


@pytest.mark.parametrize("last", [False, True])
def test_an_order_with_words_is_written(last: bool) -> None:
    def function(w: Any, given: Any) -> Any:
        x = given["x"]
        return {"y": jnp.einsum("bhwc,cijd->bhiwjd", x, w["u"]).reshape(x.shape[0], -1) @ w["head"]}

    module = Upscaled(last)
    pair = Pair(
        function,
        module,
        lambda net, given: {"y": net(given["x"])},
        lambda seed: {"x": np.random.default_rng(seed).normal(size=(30, HEIGHT, WIDTH, C)).astype(np.float32)},
        "pair:pair",
    )
    shapes = {"u": (C, 2, 2, C), "head": (4 * HEIGHT * WIDTH * C, 3)}
    specs = {name: TensorSpec(shape, "float32") for name, shape in shapes.items()}
    made = infer_rules(pair, model_of_module(module, "Net"), specs, "net", option="--reference ")
    assert not made.written.open
    assert {tensor.grade for tensor in made.derivation.tensors} == {Grade.INTERCHANGEABLE}
