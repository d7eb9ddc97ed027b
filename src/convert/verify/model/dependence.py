"""Test whether the outputs of both sides depend on the weights: outputs that do not change with them prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.tensor_spec import is_float
from convert.numerics.compare import epsilon
from convert.numerics.precision import jax_precision
from convert.numerics.real_numbers import in_float64
from convert.planning.plan import Plan
from convert.references.protocol import Reference
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.run_jax import as_jax, changed_weights
from convert.verify.sides.run_torch import run_torch, written_state
from convert.writing.written import Written

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
SHARE, ROUNDINGS = 1e-3, 16  # by which each weight is changed at random, and at least by so many roundings of its dtype
JAX_FIX = "let `jax` compute with the weights that it is given"
FEW = 0.5  # share of the numbers of an output; fewer change only where the outputs are rounded or integers


def independent(plan: Plan, written: Written, reference: Reference, evidence: Evidence, device: str) -> Iterator[str]:
    """Yield why the outputs of a side prove nothing, with the next step."""
    if said := _jax_independent(plan, reference, evidence):
        yield f"{said}; {JAX_FIX}, and return numbers that are neither rounded nor chosen"
    precision = evidence.precision
    state = written_state(written, device, precision)
    signs = np.random.default_rng(0)
    share = _share(precision)

    def run(weights: Mapping[str, torch.Tensor]) -> Mapping[str, Array]:
        made = run_torch(reference, weights, evidence.inputs, [], lift=False, precision=precision, device=device)
        return made.values

    def changed(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + share * float(signs.choice((-1, 1)))) if x.is_floating_point() or x.is_complex() else x

    before, after = run(state), run({name: changed(x) for name, x in state.items()})
    if said := _said(before, after, reference):
        yield (
            f"when every weight changes, {said} on the PyTorch side; let `run` return what the module computes, neither rounded nor "
            "chosen"
        )


def jax_without_weights(plan: Plan, reference: Reference, evidence: Evidence) -> str:
    """Return that the outputs of the JAX side are the same with other values in every leaf; empty where they are not."""
    if reference.jax is None or not evidence.is_live:
        return ""
    rng = np.random.default_rng(0)

    def changed(x: Array) -> Array:
        """Shuffle a leaf; one element, or equal ones, are another number instead."""
        moved = rng.permutation(x.reshape(-1)).reshape(x.shape)
        return np.asarray(
            (2 * x + 1).astype(x.dtype) if np.array_equal(moved, x, equal_nan=is_float(x.dtype.name)) else moved
        )

    after = _changed_jax(plan, reference, evidence, changed)
    if any(not np.array_equal(evidence.native_values[n], after[n], equal_nan=True) for n in reference.outputs):
        return ""
    return (
        f"the JAX side does not use the weights: its outputs stay the same with other values in every leaf; {JAX_FIX}"
    )


def _jax_independent(plan: Plan, reference: Reference, evidence: Evidence) -> str:
    """Return that the outputs of the JAX side do not change with the weights; empty where they do."""
    if reference.jax is None or not evidence.is_live:
        return ""
    rng, share = np.random.default_rng(0), _share(evidence.precision)

    def changed(x: Array) -> Array:
        if not is_float(x.dtype.name) and x.dtype.kind != "c":
            return x
        wide = x if x.dtype.kind == "c" else x.astype(np.float64)
        return np.asarray(wide * (1 + share * rng.choice((-1.0, 1.0), x.shape)))

    said = _said(evidence.native_values, _changed_jax(plan, reference, evidence, changed), reference)
    return f"when every weight changes, {said} on the JAX side" if said else ""


def _changed_jax(
    plan: Plan, reference: Reference, evidence: Evidence, changed: Callable[[Array], Array]
) -> Mapping[str, Array]:
    """Run the JAX model with each leaf changed."""
    precision = evidence.precision
    with jax_precision(precision):
        weights = {name: as_jax(x, precision) for name, x in changed_weights(plan, changed).items()}
        values = reference.jax_side()(weights, {n: as_jax(x, precision) for n, x in evidence.inputs.items()})
    return {name: in_float64(value) for name, value in values.items()}


def _share(precision: str) -> float:
    """Return the share by which weights are changed: rounding to this precision must not undo it."""
    return max(SHARE, ROUNDINGS * epsilon(precision))


def _said(before: Mapping[str, Array], after: Mapping[str, Array], reference: Reference) -> str:
    """Return what too few numbers of all outputs do; empty where one output changes as it should."""
    said = [_too_few(before[name], after[name]) for name in reference.outputs]
    if not said or not all(said):
        return ""
    return said[0].replace("the numbers", f"the numbers of {reference.outputs[0]}")


def _too_few(before: Array, after: Array) -> str:
    """Return how few of an output's numbers change. Numbers that are one or two values, such as zeros behind a ReLU, do not count."""
    same = (before == after) | ((before != before) & (after != after))
    if same.all():
        return "none of the numbers changes"
    if same.mean() > FEW and len(np.unique(before[same])) > 2:
        return f"only {1 - same.mean():.1%} of the numbers change"
    return ""
