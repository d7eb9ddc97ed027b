"""Record what both models compute, operation by operation: one run of each in float64, on the same weights and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.errors import ConvertError
from convert.planning.plan import Plan
from convert.references.protocol import Reference, observe
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.run_torch import boundaries_of

if TYPE_CHECKING:
    import torch

    from convert.programs.program import Program

LARGEST = 2**30  # bytes of both records, as far as they can be told before
VALUES = 50  # values of a run for each boundary, about
USER_FAILS = (
    AttributeError,
    AssertionError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
NOT_RECORDED = (*USER_FAILS, ConvertError)  # of code that cannot be recorded


def too_large(module: torch.nn.Module, evidence: Evidence) -> str:
    """Return that the records of both models are not kept, and what to do, as a clause; empty where they are not too large."""
    weights = sum(value.numel() for value in module.state_dict().values())
    values = sum(np.size(value) for value in evidence.native_values.values())
    size = 8 * int(3 * weights + VALUES * values)
    if size <= LARGEST:
        return ""
    return (
        f"their records would take about {size / 2**30:.1f} GiB, and at most {LARGEST / 2**30:.0f} GiB are kept; check a smaller "
        "model of the same code, or shorter inputs"
    )


def record_source(plan: Plan, reference: Reference, evidence: Evidence, *, twice: bool = True) -> Program:
    """Record the JAX model.

    Args:
        twice: as for `record_jax`.
    """
    from convert.numerics.precision import jax_precision
    from convert.programs.record_jax import record_jax
    from convert.verify.sides.run_jax import jax_weights

    with jax_precision(evidence.precision):
        return record_jax(reference.jax_side(), jax_weights(plan), evidence.inputs, twice=twice)


def record_target(reference: Reference, module: torch.nn.Module, evidence: Evidence, names: Sequence[str]) -> Program:
    """Record the PyTorch model.

    Args:
        module: in float64.
        names: of the boundaries that are among its outputs.
    """
    from convert.programs.record_torch import record_torch

    def run(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        with observe(module, boundaries_of(reference, module, names)) as values:
            outputs = reference.run(module, tensors)
        return {**values, **outputs}

    return record_torch(module, run, evidence.inputs)
