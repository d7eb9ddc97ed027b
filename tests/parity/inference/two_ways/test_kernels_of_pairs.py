"""A kernel that meets two values: of all pairs of their elements, as AlphaFold's outer product mean, or of one value before the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from convert.inference.infer import infer
from support.inferred import UNPROVEN, grades

D, ROWS, SITES = 6, 3, 4
LEAVES = {"l": (D, D), "r": (D, D), "w": (D, D, D), "b": (D,), "o": (D, D)}
Leaves = Mapping[str, Any]


def _pairs_first(p: Leaves, left: Any, right: Any) -> Any:
    return jnp.einsum("dceb,cef->dbf", jnp.einsum("acb,ade->dceb", jnp.swapaxes(left, 1, 2), right), p["w"])


def _joined_pairs(p: Leaves, left: Any, right: Any) -> Any:
    pairs = jnp.einsum("sic,sje->ijce", left, right)
    return pairs.reshape(SITES, SITES, D * D) @ p["w"].reshape(D * D, D)


def _kernel_first(p: Leaves, left: Any, right: Any) -> Any:
    return jnp.einsum("sief,sje->ijf", jnp.einsum("sic,cef->sief", left, p["w"]), right)


class Pairs(nn.Module):
    """`first`: the kernel is applied to one value before it meets the other; `power`: of the other."""

    def __init__(self, *, first: bool, power: int = 1) -> None:
        super().__init__()
        self.left, self.right, self.out = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.kernel = nn.Linear(D, D * D, bias=False) if first else nn.Linear(D * D, D, bias=False)
        self.bias = nn.Parameter(torch.zeros(D))
        self.first, self.power = first, power

    def forward(self, x: Any) -> Any:
        left, right = self.left(x), self.right(x) ** self.power
        if self.first:
            y = torch.einsum("sief,sje->jif", self.kernel(left).unflatten(-1, (D, D)), right).transpose(0, 1)
        else:
            y = self.kernel(torch.einsum("sic,sjd->ijcd", left, right).flatten(-2))
        return self.out(torch.tanh(y + self.bias))


@pytest.fixture
def no_search_by_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no tensor be found by the outputs alone, as in a model with more tensors than that search may run."""
    monkeypatch.setattr("convert.inference.infer.found_by_outputs", lambda *_: SimpleNamespace(tensors=None, note=""))


def _derive(form: Callable[[Leaves, Any, Any], Any], module: nn.Module) -> Any:
    def function(p: Leaves, given: Leaves) -> Leaves:
        return {"y": jnp.tanh(form(p, given["x"] @ p["l"], given["x"] @ p["r"]) + p["b"]) @ p["o"]}

    def inputs(seed: int) -> dict[str, Any]:
        return {"x": np.random.default_rng(seed).normal(size=(ROWS, SITES, D))}

    return infer(function, module.eval(), lambda net, given: {"y": net(**given)}, inputs, LEAVES)


@pytest.mark.usefixtures("no_search_by_outputs")
@pytest.mark.parametrize(("form", "first"), [(_kernel_first, False), (_pairs_first, True), (_joined_pairs, True)])
def test_a_kernel_of_pairs_in_either_order(form: Callable[..., Any], first: bool) -> None:
    found = _derive(form, Pairs(first=first))
    assert found.complete and grades(found) == {Grade.DERIVED}, found.differences


@pytest.mark.slow
@pytest.mark.usefixtures("no_search_by_outputs")
@pytest.mark.parametrize(("form", "first"), [(_kernel_first, False), (_pairs_first, True)])
def test_another_value_of_the_pair_is_a_difference(form: Callable[..., Any], first: bool) -> None:
    found = _derive(form, Pairs(first=first, power=2))
    assert not found.complete and found.proof is None and grades(found) <= UNPROVEN
