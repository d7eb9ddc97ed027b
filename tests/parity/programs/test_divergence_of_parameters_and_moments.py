"""Mistakes in what is computed of a parameter before it is used, and in the moments that a norm divides by."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import torch

from support.small_faults import Arrays, Fault, check, said


def normed(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def normed_by(x: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance + 1e-5)


def with_unit_rows(p: Arrays, x: Any, real: Any) -> Any:
    return jnp.tanh(x) @ (p["w"] / jnp.linalg.norm(p["w"], axis=-1, keepdims=True)).T


def with_norm(p: Arrays, x: Any, real: Any) -> Any:
    return normed(x @ p["w"]) @ p["v"]


FAULTS = {
    "the rows of a parameter are not normalised": Fault(
        with_unit_rows,
        lambda p, x, real: torch.tanh(x) @ p["w"].T,
        "operation missing",
        ("of w, the JAX model computes division by the L2 norm over the last axis", "the target uses it as it is"),
    ),
    "the columns of a parameter are normalised": Fault(
        with_unit_rows,
        lambda p, x, real: torch.tanh(x) @ (p["w"] / p["w"].norm(dim=0, keepdim=True)).T,
        "division by the L2 norm over axis 0 for division by the L2 norm over the last axis",
        ("of w, the target computes division by the L2 norm over axis 0",),
    ),
    "a square parameter that is no layer's, transposed": Fault(
        lambda p, x, real: jnp.tanh(x @ p["w"]) @ p["v"],
        lambda p, x, real: torch.tanh(x @ p["w"].T) @ p["v"],
        "elements in another order",
        ("takes the matrix product with w", "the elements are in another order"),
    ),
    "variance over another axis": Fault(
        with_norm,
        lambda p, x, real: normed_by(y := x @ p["w"], y.var(1, keepdim=True, unbiased=False)) @ p["v"],
        "reduction over another axis",
        ("the target runs var", "the target reduces axis 1, and the JAX model axis 2"),
    ),
    "unbiased variance": Fault(
        with_norm,
        lambda p, x, real: normed_by(y := x @ p["w"], y.var(-1, keepdim=True)) @ p["v"],
        "variance of n-1 over the last axis for variance over the last axis",
        ("the target computes variance of n-1",),
    ),
    "epsilon added to the deviation": Fault(
        with_norm,
        lambda p, x, real: ((y := x @ p["w"]) - y.mean(-1, keepdim=True)) / (y.std(-1, keepdim=True, unbiased=False) + 1e-2) @ p["v"],
        "another computation",
        ("the target runs std, adds 0.01, divides",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_mistake_is_named(name: str) -> None:
    check(FAULTS[name])


def test_another_parameter_is_not_the_code() -> None:
    """The product with another parameter of the same shape: which one is meant is told, not how it is computed."""
    found = said(lambda p, x, real: jnp.tanh(x) @ p["w"] @ p["v"], lambda p, x, real: torch.tanh(x) @ p["v"] @ p["v"])
    assert found is not None and found.name != "another function of a parameter"
