"""Mistakes in how tables and factors are computed, and in which part of a value is taken: what the comparison of the two records says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from support.small_faults import Arrays, Fault, check

MISSING, EXTRA = "operation missing", "operation that the JAX model lacks"


def of(x: Any) -> Any:
    return torch if isinstance(x, torch.Tensor) else jnp


def sloping(p: Arrays, x: Any, real: Any, change: Any = lambda of, d: of.abs(d)) -> Any:
    steps = of(x).arange(10)
    return x @ p["w"] - of(x).einsum("ts,bsd->btd", 0.1 * change(of(x), steps[:, None] - steps[None]), x)


def corrected(p: Arrays, x: Any, real: Any, first: int = 1) -> Any:
    """The numbers of the steps are powers, as in the correction of a running mean."""
    return (x @ p["w"]) / (1 - 0.5 ** of(x).arange(first, first + 10))[:, None] @ p["v"]


def unit(w: Any, axis: int | None) -> Any:
    return w if axis is None else w / ((w * w).sum(axis)[None if axis == 0 else (slice(None), None)]) ** 0.5


def rows_of_unit_length(p: Arrays, x: Any, real: Any, axis: int | None = 1) -> Any:
    return of(x).tanh(x) @ unit(p["w"], axis).T


def scaled(p: Arrays, x: Any, real: Any, factor: Any = jax.nn.softplus) -> Any:
    return of(x).tanh(x @ p["w"]) * factor(p["h"] - 1) @ p["v"]


def steps_apart(p: Arrays, x: Any, real: Any, n: int = 1) -> Any:
    joined = [x[:, :n], x[:, n:] - x[:, :-n]]
    return (torch.cat(joined, 1) if isinstance(x, torch.Tensor) else jnp.concatenate(joined, 1)) @ p["w"]


def conditioned(p: Arrays, x: Any, real: Any, of_steps: Any = lambda x: x.mean(1)) -> Any:
    return of(x).tanh(x @ p["w"]) * (of_steps(x) @ p["v"])[:, None]


def two_largest(p: Arrays, x: Any, real: Any) -> Any:
    return jax.lax.top_k(x @ p["w"], 2)[0] @ p["v"][:2]


def two_smallest(p: Arrays, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor((x @ p["w"]).topk(2, -1, largest=False).values @ p["v"][:2])


FAULTS = {
    "distances as they are": Fault(sloping, lambda p, x, real: sloping(p, x, real, lambda of, d: d), MISSING, ("the JAX model takes the absolute value",)),
    "squares of distances": Fault(sloping, lambda p, x, real: sloping(p, x, real, lambda of, d: d * d), "multiply for abs", ("takes the absolute value",)),
    "distances with a limit": Fault(sloping, lambda p, x, real: sloping(p, x, real, lambda of, d: of.clip(of.abs(d), 0, 4)), EXTRA, ("limits the values",)),
    "powers that begin at two": Fault(corrected, lambda p, x, real: corrected(p, x, real, 2), "counts off by one", ("the table counts from 2 by 1 in the target, and from 1 by 1 in the JAX model",)),
    "rows that are not divided by their length": Fault(rows_of_unit_length, lambda p, x, real: rows_of_unit_length(p, x, real, None), MISSING, ("of w, the JAX model computes division by the L2 norm",)),
    "columns for rows": Fault(rows_of_unit_length, lambda p, x, real: rows_of_unit_length(p, x, real, 0), "division by the L2 norm over axis 0 for division by the L2 norm over the last axis", ("sums, raises to the power 0.5, divides by w",)),
    "exp for softplus": Fault(scaled, lambda p, x, real: scaled(p, x, real, torch.exp), "exp for softplus", ("the target applies exp", "the JAX model computes softplus")),
    "relu for softplus": Fault(scaled, lambda p, x, real: scaled(p, x, real, torch.relu), "relu for softplus", ("relu for softplus",)),
    "a factor behind softplus": Fault(scaled, lambda p, x, real: scaled(p, x, real, lambda h: torch.nn.functional.softplus(h) * 2), EXTRA, ("multiplies by 2",)),
    "differences of two steps": Fault(steps_apart, lambda p, x, real: steps_apart(p, x, real, 2), "another part", ("takes the indices 2 to 9",)),
    "the last step for the mean": Fault(conditioned, lambda p, x, real: conditioned(p, x, real, lambda x: x[:, -1]), "last element over axis 1 for mean over axis 1", ("the input x",)),
    "the smallest for the largest": Fault(two_largest, two_smallest, "smallest values for the largest", ("the target takes the 2 smallest", "the JAX model takes the 2 largest")),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_mistake_is_named(name: str) -> None:
    check(FAULTS[name])
