"""Run the PyTorch model on the converted weights, in the precision that users run and in float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.ops import is_float
from convert.layers.base import Step
from convert.layers.in_memory import expected
from convert.planning.plan import Plan
from convert.references.protocol import INPUT, Reference, observe
from convert.verify.numerics.bits import same_bits
from convert.verify.numerics.compare import epsilon
from convert.verify.numerics.precision import torch_pinned
from convert.verify.sides.evidence import Evidence, Values
from convert.verify.sides.float64_plan import float64_step
from convert.verify.sides.user_reference import require_outputs
from convert.verify.written import Written

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]


def exact_state(plan: Plan, written: Written, device: str) -> dict[str, torch.Tensor]:
    """The weights in float64, as the plan gives them before the last rounding.

    A tensor that differs from what the plan makes is taken as it was written: it is what is being checked.
    """
    import torch

    state = {}
    for step in plan.steps:
        if step.name not in written.tensors:
            continue
        got = written.read(step.name)
        value = _exact(step, plan, got)
        state[step.name] = torch.tensor(
            value.copy(), dtype=torch.float64, device=device
        )  # torch takes no flipped views
    for name in written.tensors:
        if name not in state:
            state[name] = torch.tensor(np.asarray(written.read(name), np.float64), device=device)
    return state


def _exact(step: Step, plan: Plan, got: Array) -> Array:
    if not step.parts or not is_float(got.dtype.name):
        return np.asarray(got, np.float64)
    if not same_bits(got, expected(step, plan.source)):
        return np.asarray(got, np.float64)
    return expected(float64_step(step), plan.source_in_float64)


@dataclass(frozen=True)
class TorchRun:
    """One run of the PyTorch model.

    Attributes:
        values: at the boundaries, and the outputs.
        unlifted: operations that could not be lifted.
        casts: of a lifted run: whether the code casts to narrower floats, so that without lifting it rounds.
    """

    values: dict[str, Array]
    unlifted: tuple[str, ...]
    casts: bool
    module: torch.nn.Module


def run_torch(
    reference: Reference,
    state: Mapping[str, torch.Tensor],
    inputs: Values,
    names: list[str],
    *,
    lift: bool,
    precision: str,
    device: str,
) -> TorchRun:
    """Runs the PyTorch model, observed at the boundaries `names`."""
    import torch

    from convert.verify.numerics.lift_torch import lifted

    with torch_pinned(), torch.no_grad():
        if lift:
            with lifted() as mode:
                module = reference.build(state).to(device)
                values = observed(reference, module, input_tensors(inputs, "float64", device), names)
            return TorchRun(values, tuple(sorted(mode.unlifted)), mode.casts, module)
        module = reference.build(state).to(device)
        return TorchRun(observed(reference, module, input_tensors(inputs, precision, device), names), (), False, module)


def input_tensors(inputs: Values, precision: str, device: str | torch.device) -> dict[str, Any]:
    """Inputs as torch takes them, floating ones in this precision."""
    import torch

    out: dict[str, Any] = {}
    for name, value in inputs.items():
        tensor = torch.as_tensor(np.array(value), device=device)
        out[name] = tensor.to(getattr(torch, precision)) if tensor.is_floating_point() else tensor
    return out


def boundaries_of(reference: Reference, module: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """Those of the names at which the module can be observed; of those that it lacks, the report says so."""
    known = {name for name, _ in module.named_modules()}
    return [name for name in names if name not in reference.outputs and name.removesuffix(INPUT) in known]


def observed(
    reference: Reference, module: torch.nn.Module, inputs: Mapping[str, Any], names: Iterable[str]
) -> dict[str, Array]:
    """Values at the boundaries among `names`, and the outputs, of one run."""
    import torch

    with observe(module, boundaries_of(reference, module, names)) as values:
        outputs = reference.run(module, inputs)
    require_outputs(reference.outputs, "run", outputs)
    outputs = {name: torch.as_tensor(value) for name, value in outputs.items()}
    return {name: value.detach().double().cpu().numpy() for name, value in {**values, **outputs}.items()}


@dataclass(frozen=True)
class LiftedTorch:
    """The PyTorch model in lifted float64.

    Attributes:
        exact: values with the weights before their last rounding; written: with the weights as they were written.
        perturbed: with the weights perturbed at random by as much as rounding perturbed them, where the unrounded ones are not known; else
            the same as `exact`.
        casts: whether the code casts to narrower floats, so that without lifting it rounds.
    """

    exact: Values
    written: Values
    perturbed: Values
    unlifted: tuple[str, ...]
    casts: bool
    module: torch.nn.Module


def lifted_torch(
    plan: Plan,
    written: Written,
    reference: Reference,
    evidence: Evidence,
    names: list[str],
    device: str,
    *,
    finest: str = "float64",
) -> LiftedTorch:
    """Runs the PyTorch model in lifted float64, two or three times where rounding changed the weights.

    Args:
        finest: weights that were rounded to this dtype, or to a finer one, are not run as they were written: nobody could tell.
    """
    import torch

    def run(state: Mapping[str, torch.Tensor]) -> TorchRun:
        return run_torch(reference, state, evidence.inputs, names, lift=True, precision="float64", device=device)

    exact = exact_state(plan, written, device)
    lifted = run(exact)
    rounded = written_state(written, device)
    coarser = any(
        epsilon(spec.dtype) > epsilon(finest) and not torch.equal(exact[name], rounded[name])
        for name, spec in written.specs.items()
        if is_float(spec.dtype)
    )
    as_written = run(rounded).values if coarser else lifted.values
    perturbed = run(_perturbed(exact, written, evidence.rounded)).values if evidence.rounded else lifted.values
    return LiftedTorch(lifted.values, as_written, perturbed, lifted.unlifted, lifted.casts, lifted.module)


def written_state(written: Written, device: str, dtype: str = "float64") -> dict[str, torch.Tensor]:
    """The weights as they were written, in a dtype."""
    import torch

    to = getattr(torch, dtype)
    return {
        name: torch.tensor(np.asarray(written.read(name), np.float64), device=device).to(to) for name in written.tensors
    }


def _perturbed(state: Mapping[str, torch.Tensor], written: Written, dtype: str) -> dict[str, torch.Tensor]:
    """The weights of a dtype, each perturbed by up to half a last place: one more rounding of numbers that nobody knows."""
    import torch

    rng = np.random.default_rng(0)
    out = {}
    for name, value in state.items():
        out[name] = value
        if written.specs[name].dtype == dtype:
            move = torch.tensor(rng.uniform(-0.5, 0.5, tuple(value.shape)) * epsilon(dtype), device=value.device)
            out[name] = value * (1 + move)
    return out
