"""A parameter that one program joins to a map of biases, and the other adds to the zeros in its place, as Graphormer's virtual node."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import WIDTH, grades

D, HEADS, NODES, NUMBERS = WIDTH, 4, 5, 9
SHAPES = {"table": (HEADS, NUMBERS), "virtual": (HEADS,)} | dict.fromkeys(("q", "k", "v", "o"), (D, D))


class Biased(nn.Module):
    """Attention with biases by distance; ``fault``: the column of the virtual node has no bias."""

    def __init__(self, fault: bool = False) -> None:
        super().__init__()
        self.table, self.virtual, self.fault = nn.Embedding(NUMBERS, HEADS), nn.Embedding(1, HEADS), fault
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Any, far: Any) -> Any:
        bias = torch.zeros(len(x), HEADS, NODES + 1, NODES + 1, dtype=x.dtype)
        bias[:, :, 1:, 1:] = bias[:, :, 1:, 1:] + self.table(far).permute(0, 3, 1, 2)
        virtual = self.virtual.weight.view(1, HEADS, 1)
        if not self.fault:
            bias[:, :, 1:, 0] = bias[:, :, 1:, 0] + virtual
        bias[:, :, 0, :] = bias[:, :, 0, :] + virtual
        q, k, v = (of(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for of in (self.q, self.k, self.v))
        return self.o(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))


def biased(w: Any, given: Any) -> Any:
    x, far = given["x"], given["far"]
    inner = jnp.moveaxis(w["table"][:, far], 0, 1)
    left = jnp.broadcast_to(w["virtual"][:, None, None], (len(x), HEADS, NODES, 1))
    top = jnp.broadcast_to(w["virtual"][:, None, None], (len(x), HEADS, 1, NODES + 1))
    bias = jnp.concatenate([top, jnp.concatenate([left, inner], 3)], 2)
    q, k, v = ((x @ w[name]).reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2) for name in "qkv")
    mixed = jax.nn.softmax(q @ k.swapaxes(2, 3) + bias) @ v
    return {"y": mixed.swapaxes(1, 2).reshape(x.shape) @ w["o"]}


def derived(**how: Any) -> Derivation:
    def inputs(seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        return {
            "x": rng.normal(size=(3, NODES + 1, D)),
            "far": rng.integers(0, NUMBERS, (3, NODES, NODES)),
        }

    return infer(biased, Biased(**how).eval(), lambda net, i: {"y": net(i["x"], i["far"])}, inputs, SHAPES)


def test_a_vector_that_is_added_to_zeros_of_a_map() -> None:
    found = derived()
    assert found.complete and grades(found) == {Grade.DERIVED}, found.differences


@pytest.mark.slow
def test_zeros_where_the_other_program_has_the_vector_are_not_derived() -> None:
    found = derived(fault=True)
    assert not found.complete and found.differences
