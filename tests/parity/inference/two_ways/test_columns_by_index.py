"""Columns of the data in another order, or some of them, in front of a layer: by an index in JAX, in another way or not at all in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from support.inferred import derive, floats, grades, rules

D, OUT = 6, 5
ORDER = np.array([4, 1, 5, 0, 3, 2])
SHUFFLED = np.arange(D).reshape(2, 3).T.ravel()


class Layer(nn.Module):
    """A layer in front of which a function is applied."""

    def __init__(self, before: Callable[[Any], Any], width: int = D) -> None:
        super().__init__()
        self.layer, self.before = nn.Linear(width, OUT, bias=False), before

    def forward(self, x: Any) -> Any:
        return self.layer(self.before(x))


def by_index(order: np.ndarray[Any, Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: x[..., jnp.asarray(order)] @ w["w"]


@pytest.mark.parametrize("shape", [(4, D), (3, 7, D)])
@pytest.mark.parametrize(
    ("order", "before"),
    [
        (ORDER, lambda x: x[..., torch.as_tensor(ORDER)]),
        (ORDER, lambda x: torch.stack([x[..., k] for k in ORDER.tolist()], -1)),
        (ORDER, lambda x: x @ torch.eye(D, dtype=x.dtype)[torch.as_tensor(ORDER)].T),
        (np.arange(D)[::-1].copy(), lambda x: x.flip(-1)),
        (SHUFFLED, lambda x: x.unflatten(-1, (2, 3)).mT.flatten(-2)),
        (ORDER[:3], lambda x: torch.stack([x[..., k] for k in ORDER[:3].tolist()], -1)),
    ],
)
def test_columns_that_an_index_takes(shape: tuple[int, ...], order: Any, before: Any) -> None:
    """The layer's rows are another's where columns are taken, not rows: infer ended with an internal error."""
    found = derive(by_index(order), Layer(before, len(order)), {"w": (len(order), OUT)}, floats(*shape))
    assert grades(found) == {Grade.DERIVED}
    assert rules(found, Layer(before, len(order)))


def test_pairs_of_features_by_two_indices() -> None:
    """As DLRM's: of the products of all pairs, those above the diagonal."""

    def pairs(w: Any, x: Any) -> Any:
        first, second = np.triu_indices(4, 1)
        return (x @ x.swapaxes(1, 2))[:, first, second] @ w["w"]

    module = Layer(lambda x: torch.cat([(x @ x.mT)[:, k, k + 1 :] for k in range(3)], 1))
    found = derive(pairs, module, {"w": (6, OUT)}, floats(9, 4, 8))
    assert grades(found) == {Grade.DERIVED}
    assert rules(found, module)


def test_another_order_is_a_difference_where_no_weights_hide_it() -> None:
    """The planted fault: the target takes the columns in another order, between two layers that share one matrix."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, D, bias=False)

        def forward(self, x: Any) -> Any:
            return self.layer(torch.tanh(self.layer(x))[..., torch.as_tensor(np.argsort(ORDER))])

    found = derive(lambda w, x: jax.nn.tanh(x @ w["w"])[..., ORDER] @ w["w"], Twice(), {"w": (D, D)}, floats(4, D))
    assert not found.complete and found.differences
