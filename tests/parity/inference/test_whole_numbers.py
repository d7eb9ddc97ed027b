"""Whole numbers that 32 bits do not hold, as those of a hash: `infer` runs JAX with 64 bits, and says where it would wrap around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Derivation
from convert.numerics.precision import jax_with_float64
from support.inferred import derive

ROWS, WIDTH, FACTOR = 31, 5, 1_000_003
Hash = Callable[[Any], Any]


def _derived(of_source: Hash, of_target: Hash, most: int = 50_000) -> Derivation:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = torch.nn.Embedding(ROWS, WIDTH)

        def forward(self, x: Any) -> Any:
            return self.e(of_target(x))

    def inputs(seed: int) -> dict[str, Any]:
        return {"x": np.random.default_rng(seed).integers(0, most, (3, 40))}

    return derive(lambda w, x: w["t"][of_source(x)], Table(), {"t": (ROWS, WIDTH)}, inputs)


def _as_wrapped(x: Any) -> Any:
    return (x * FACTOR).to(torch.int32).to(torch.int64) % ROWS


def _hash(x: Any) -> Any:
    return x * FACTOR % ROWS


@pytest.mark.parametrize("of_target", [_hash, _as_wrapped], ids=["equal here", "equal to JAX with 32 bits"])
def test_a_hash_that_jax_wraps_around_is_said(of_target: Hash) -> None:
    found = _derived(_hash, of_target)
    assert found.complete is (of_target is _hash)
    (note,) = (one for one in found.notes if "32 bits" in one)
    assert note.startswith("whole numbers of the JAX function exceed 32 bits (up to 5.0e+10) at test_whole_numbers.py:")
    assert "JAX wraps them around unless jax_enable_x64 is set" in note


def test_an_input_beyond_32_bits_is_said() -> None:
    found = _derived(lambda x: x % ROWS, lambda x: x % ROWS, most=2**40)
    assert [note for note in found.notes if "the input x" in note and "32 bits (up to 1.1e+12)" in note]


def _of_bits(x: Any) -> Any:
    """Has the largest number of its dtype, random bits and those of a float, which follow the width of floats."""
    smallest = jnp.where(x > 3, x, jnp.iinfo(x.dtype).max).min()
    random = jax.random.uniform(jax.random.key(0), x.shape) < 0
    parts = jnp.frexp(x * 1.5)[1] < 0
    return (x + (smallest < 0) + random + parts) % ROWS


def _of_32_bits(x: Any) -> Any:
    return (x.astype(jnp.uint32) * jnp.uint32(FACTOR) % ROWS).astype(jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_source", "of_target", "most"),
    [
        (_hash, _hash, 2_000),
        (_of_bits, lambda x: x % ROWS, ROWS),
        (_of_32_bits, lambda x: x * FACTOR % 2**32 % ROWS, 50_000),
    ],
    ids=["small", "bits", "uint32"],
)
def test_nothing_is_said_of_what_32_bits_hold(of_source: Hash, of_target: Hash, most: int) -> None:
    found = _derived(of_source, of_target, most)
    assert found.complete and not any("32 bits" in note for note in found.notes)


def test_nothing_is_said_where_64_bits_are_enabled() -> None:
    with jax_with_float64():
        found = _derived(_hash, _hash)
    assert found.complete and not found.notes
