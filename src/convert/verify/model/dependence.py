"""Test whether the outputs of both sides depend on the weights: outputs that do not change with them prove nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.findings import Finding
from convert.core.ops import is_float
from convert.numerics.compare import epsilon
from convert.numerics.precision import jax_precision
from convert.planning.plan import Plan
from convert.references.protocol import Reference
from convert.verify.report.report import LevelReport
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.run_jax import as_jax, jax_weights
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
    if said := jax_independent(plan, reference, evidence):
        yield f"{said}; {JAX_FIX}, and return numbers that are neither rounded nor chosen"
    precision = evidence.precision
    state = written_state(written, device, precision)
    signs = np.random.default_rng(0)
    share = _share(precision)

    def run(weights: Mapping[str, torch.Tensor]) -> Mapping[str, Array]:
        made = run_torch(reference, weights, evidence.inputs, [], lift=False, precision=precision, device=device)
        return made.values

    def changed(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + share * float(signs.choice((-1, 1)))) if x.is_floating_point() else x

    before, after = run(state), run({name: changed(x) for name, x in state.items()})
    if said := _said(before, after, reference):
        yield (
            f"when every weight changes, {said} on the PyTorch side; let `run` return what the module computes, neither rounded nor "
            "chosen"
        )


def jax_independent(plan: Plan, reference: Reference, evidence: Evidence) -> str:
    """Return that the outputs of the JAX side do not change with the weights; empty where they do."""
    if reference.jax is None or evidence.origin != "live":
        return ""
    said = _said(evidence.native_values, _changed_jax(plan, reference, evidence), reference)
    return f"when every weight changes, {said} on the JAX side" if said else ""


def with_independent_jax(level: LevelReport, plan: Plan, reference: Reference, evidence: Evidence) -> LevelReport:
    """Return a level that failed with the reason that the JAX side has weights of its own, where this is so."""
    if not (said := jax_independent(plan, reference, evidence)):
        return level
    data = {"diagnosis": "JAX side does not use the weights"}
    finding = Finding("reference-values-invalid", said, path="jax", fix=JAX_FIX, data=data)
    return replace(level, findings=(finding, *level.findings))


def _changed_jax(plan: Plan, reference: Reference, evidence: Evidence) -> Mapping[str, Array]:
    """Run the JAX model with each weight changed at random."""
    rng = np.random.default_rng(0)
    precision = evidence.precision
    share = _share(precision)

    def changed(x: Array) -> Array:
        if not is_float(x.dtype.name):
            return x
        wide = x.astype(np.float64)
        return np.asarray(wide * (1 + share * rng.choice((-1.0, 1.0), x.shape)))

    with jax_precision(precision):
        weights = {name: as_jax(changed(x), precision) for name, x in jax_weights(plan).items()}
        values = reference.jax_side()(weights, {n: as_jax(x, precision) for n, x in evidence.inputs.items()})
    return {name: np.asarray(value, np.float64) for name, value in values.items()}


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
