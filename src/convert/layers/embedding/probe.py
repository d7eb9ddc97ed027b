"""The probe of a table: `jnp.take` and torch's embedding; a tied head is flax's ``Embed.attend`` and torch's linear."""

from __future__ import annotations

from typing import Any

import numpy as np

from convert.layers.base import ProbeSample
from convert.layers.probe import (
    BATCH,
    SHARED,
    Probe,
    as_float64,
    jnp_einsum,
    probe_of_sum,
    probe_of_values,
    torch_linear,
    torch_tensor,
)
from convert.layers.transforms.probe import as_target_gives

Array = np.ndarray[Any, np.dtype[Any]]
ENTRIES = 17  # rows that are looked up


def probe_table(sample: ProbeSample, table: Array) -> Probe:
    """Probe a table by what the target does with it.

    Args:
        table: the leaf, without axes of size 1.
    """
    rows = table[: sample.written.shape[0]]  # the rest of a table is padding, which the target does not have
    if sample.step.kind_name == "embedding":
        return _probe_lookup(sample, rows)
    if sample.step.kind_name == "linear":
        return _probe_tied_head(sample, rows)
    return probe_of_values(sample.written, rows)


def _probe_lookup(sample: ProbeSample, table: Array) -> Probe:
    tokens = sample.rng.integers(0, sample.written.shape[0], ENTRIES)

    def run(dtype: str) -> tuple[Array, Array]:
        import jax.numpy as jnp
        import torch

        want = np.asarray(jnp.take(jnp.asarray(table), jnp.asarray(tokens), axis=0)).astype(np.float64)
        shared = sample.written.dtype.name in SHARED
        written = torch_tensor(sample.written, sample.written.dtype.name if shared else "float64", sample.device)
        got = torch.nn.functional.embedding(torch.as_tensor(tokens, device=sample.device), written)
        return as_float64(got), as_target_gives(want, "..", sample)

    return probe_of_sum(run, 1)


def _probe_tied_head(sample: ProbeSample, table: Array) -> Probe:
    x = sample.rng.standard_normal((BATCH, table.shape[1]))
    wanted = jnp_einsum("zd,vd->zv", sample.precision, x, table)

    def run(dtype: str) -> tuple[Array, Array]:
        got = torch_linear(x, sample.written, dtype, sample.device)
        return got, as_target_gives(wanted[dtype], "..", sample)

    return probe_of_sum(run, sample.written.shape[-1])
