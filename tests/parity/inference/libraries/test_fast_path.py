"""PyTorch's fast path of nn.TransformerEncoderLayer computes the erf form of GELU whatever the module says."""

from __future__ import annotations

from typing import Any

import flax.linen as fnn
import jax
import numpy as np
import pytest
from torch import nn

from convert.inference.derivation import Grade
from convert.references.pytree import fill_pytree
from support.inferred import derive, floats, grades

D = 8


class Encoder(fnn.Module):
    approximate: bool

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        x = x + fnn.MultiHeadDotProductAttention(2, name="attention")(fnn.LayerNorm(epsilon=1e-5, name="first")(x))
        y = fnn.Dense(D, name="up")(fnn.LayerNorm(epsilon=1e-5, name="second")(x))
        return x + fnn.Dense(D, name="down")(fnn.gelu(y, approximate=self.approximate))


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_another_function_of_the_fast_path_is_noted(approximate: str) -> None:
    model = Encoder(approximate == "tanh")
    variables = jax.eval_shape(model.init, jax.random.key(0), np.zeros((3, 5, D)))
    activation = nn.GELU(approximate=approximate)
    module = nn.TransformerEncoderLayer(D, 2, D, activation=activation, batch_first=True, norm_first=True).eval()
    found = derive(lambda w, x: model.apply(fill_pytree(variables, w), x), module, variables, floats(3, 5, D))
    assert grades(found) <= {Grade.DERIVED, Grade.INTERCHANGEABLE}
    assert ["fast path" in note for note in found.notes] == [True] * (approximate == "tanh"), found.notes
